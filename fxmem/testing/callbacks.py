"""A prediction within other people's training loops: a run that cannot fit is refused, the others are compared.

The prediction is made beforehand, on any machine. `guard` refuses a run before its first step. The callbacks measure
the first steps on the card and print a line for each; nothing else of the loop is changed but the allocator's peaks,
which are reset between two of these steps. What the prediction has found wrong is printed when training begins.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxmem.errors import EnvironmentLacksError, ExceededError, FxmemError, UsageError
from fxmem.hardware.context import room_bytes
from fxmem.memory.budget import peak_in_room
from fxmem.memory.report_reader import load_report
from fxmem.planning.estimate import estimate
from fxmem.records.profile import Kind, Peak, Report, Round
from fxmem.records.units import format_bytes, printable
from fxmem.show.plan_facts import list_findings
from fxmem.show.text.verdict import round_line
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.program import is_recording
from fxmem.validation.measure_program import measure_round
from fxmem.validation.validate import compare_round

if TYPE_CHECKING:
    from transformers import TrainerCallback

Prediction = str | Path | Report | ProfiledStep
"""A report that `--json` wrote, by its path or read; or what `fxmem.analyze` or `fxmem.record` has returned."""


def guard(report: Prediction) -> None:
    """Refuse a training run that the card at hand has no room for, before its first step.

    The prediction's allocator is replayed in that room: what the driver has free, and what this process's allocator
    holds, but for tensors beyond the weights that are predicted. Call it where the loop is about to begin, or let a
    callback do so.

    Assumptions: the current card is the one that trains, and nothing else will take of what is free there. Settings of
    the allocator are those of this process's environment. Where there is no card, the room is what a CUDA context
    leaves of the report's. A recording that ran out of memory is known up to there only: a larger room is then taken as
    enough. In a program that fxmem records nothing is refused: the report may be the one that is to be renewed.
    A report of other arguments of the script is said to be one.

    Args:
        report: what `fxmem run train.py --json FILE` or `fxmem analyze ... --json FILE` wrote, or an analysis or a
            recording itself.

    Raises:
        ExceededError: it does not fit: how much room there is, where it runs out, and what would make it fit.
        UsageError: the report cannot be read, or is of the CPU.
    """
    if is_recording():
        return
    found = _load(report)
    room, whose = room_bytes(found.target), found.target.name
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        own = sum(found.peak.by_kind.get(kind, 0) for kind in (Kind.PARAMETER, Kind.BUFFER))
        others = max(0, torch.cuda.memory_allocated() - own)
        room, whose = free + torch.cuda.memory_reserved() - others, torch.cuda.get_device_name()
    if room is None:
        return
    ended = found.peak.at_least and room <= (room_bytes(found.target) or 0)
    peak = found.peak if ended else peak_in_room(found, found.peak, room)
    other = _describe_other_arguments(found)
    if peak.fits is False and (ended or not found.peak.at_least):
        raise ExceededError(
            f"expected a step that runs in the {format_bytes(room)} that {whose} has for it; the predicted one does "
            f"not: {peak.shortage.rstrip('.')}. {_describe_way_out(found, room)}{f'. {other}' if other else ''}"
        )
    if other:
        print(f"fxmem: {other}")


def _describe_other_arguments(report: Report) -> str:
    """That the report is of other arguments of this script, in words; empty where it is of the same, or of another
    program."""
    script, own = Path(sys.argv[0]).name, " ".join(sys.argv[1:]).split()
    told = report.model.split()
    place = next((index for index, each in enumerate(told) if script and Path(each).name == script), None)
    if report.step.program is None or place is None or told[place + 1 :] == own:
        return ""
    now = " ".join([script, *own])
    return f"The report is of {printable(report.model)}, this run of {now}: renew it (fxmem run --json FILE {now})"


def _describe_way_out(report: Report, room: int) -> str:
    """What would make a step fit, in a sentence: a change that was tried, a plan, or how to look for more."""
    over = report.peak.counted_bytes - room
    for each in report.findings:
        if each.saved_bytes is not None and each.of == "peak" and each.saved_bytes >= over:
            return f"What would: {each.change}{f', {each.place}' if each.place else ''}"
    with contextlib.suppress(FxmemError):
        after = estimate(report, report.peak, "auto", room).after
        return (
            f"What would, by estimate: activation checkpoints down to {format_bytes(after.counted_bytes)} (fxmem plan)"
        )
    return "fxmem advise says what each change would save"


def trainer_callback(report: Prediction, *, steps: int = 3, refuse: bool = False) -> TrainerCallback:
    """A callback for the Trainer of Hugging Face: predicted beside measured peaks.

    `Trainer(..., callbacks=[trainer_callback("run.json")])` prints a line for each of the first optimizer steps, with
    the bytes allocated and reserved at most, and the error of the prediction, predicted / measured - 1.

    Assumptions: the current card is the one that trains. Steps are those of the Trainer, accumulation included; what
    runs between two of them (an evaluation, a checkpoint) counts as the beginning of the next, as it does in a
    recording. `skip_memory_metrics=False` resets the allocator's peaks itself, which hides what came before.

    Args:
        report: what `fxmem run train.py --json FILE` or `fxmem analyze ... --json FILE` wrote, or an analysis or a
            recording itself. Of a recorded program, step by step; an analysed step is one in its steady state, which
            the first step of an optimizer with a state is not: compared from the second on.
        steps: optimizer steps to measure.
        refuse: end the run before its first step where it cannot fit, as `guard` does, by an `ExceededError`.

    Raises:
        UsageError: the report cannot be read, is of no training step, or `steps` is less than 1.
        EnvironmentLacksError: transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise EnvironmentLacksError("transformers, whose Trainer calls it, is not installed") from error
    first = _FirstSteps(report, steps, refuse=refuse)

    class FirstSteps(TrainerCallback):
        """Measures the first steps of a Trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            first.begin(prints=state.is_world_process_zero)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            first.end_step()

    return FirstSteps()


def lightning_callback(report: Prediction, *, steps: int = 3, refuse: bool = False) -> Any:
    """A callback for Lightning's Trainer: predicted beside measured peaks.

    `lightning.Trainer(..., callbacks=[lightning_callback("run.json")])`; what it prints and assumes, and its arguments,
    are those of `trainer_callback`. A step is a batch after which the Trainer's count of optimizer steps has grown.

    Raises:
        UsageError: as `trainer_callback`; or Lightning, under either of its names, has not been imported.
    """
    loaded = sys.modules.get("lightning.pytorch") or sys.modules.get("pytorch_lightning")
    if loaded is None:
        raise UsageError("expected Lightning to be imported before its callback is made: import lightning")
    first = _FirstSteps(report, steps, refuse=refuse)

    class FirstSteps(loaded.Callback):  # type: ignore[misc, name-defined]
        """Measures the first steps of Lightning's Trainer."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._stepped = trainer.global_step
            first.begin(prints=trainer.is_global_zero)

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step > self._stepped:
                self._stepped = trainer.global_step
                first.end_step()

    return FirstSteps()


def _load(prediction: Prediction) -> Report:
    given = prediction.report() if isinstance(prediction, ProfiledStep) else prediction
    report = given if isinstance(given, Report) else load_report(Path(given))
    if report.peak.allocated_bytes is None:
        raise UsageError("expected a prediction for a card, got one for the CPU: make it with --target")
    return report


class _FirstSteps:
    """Measures the first steps of a training loop and prints each beside its prediction."""

    def __init__(self, prediction: Prediction, steps: int, *, refuse: bool) -> None:
        if steps < 1:
            raise UsageError(f"expected steps of at least 1, got {steps}")
        self._left = 0
        # The program is being recorded to make this report, which is not there yet.
        self._is_to_come = isinstance(prediction, str | Path) and is_recording() and not Path(prediction).exists()
        if self._is_to_come:
            return
        report = _load(prediction)
        if report.step.mode != "train":
            raise UsageError("expected a report of a training step, got one of inference")
        self._peak, self._step, self._found = report.peak, report.step, list_findings(report.findings)
        self._guarded = report if refuse else None
        self._left = steps
        self._number = 0
        self._prints = False

    def begin(self, *, prints: bool) -> None:
        """Training begins; in one process of many it prints.

        Raises:
            ExceededError: it was to be refused, and cannot fit.
        """
        if self._is_to_come:
            return
        if self._guarded is not None:
            guard(self._guarded)
        self._prints = prints
        for fact in self._found if prints else ():
            print(f"fxmem: found: {fact.text}")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            return
        self._left = 0
        if prints:
            print("fxmem: there is no card here, so no step is measured")

    def end_step(self) -> None:
        """An optimizer step is over."""
        if not self._left:
            return
        self._left -= 1
        self._number += 1
        measured, predicted = measure_round(), self._predicted()
        if not self._prints:
            return
        if predicted is None:
            print(f"fxmem: step {self._number}: not predicted; the report is of {self._known()}")
        else:
            print(round_line(self._number, compare_round(predicted, measured)))

    def _predicted(self) -> Round | Peak | None:
        program = self._step.program
        if program is None:
            return self._peak if self._number > 1 or Kind.OPTIMIZER_STATE not in self._peak.by_kind else None
        if self._number <= len(program.steps):
            return program.steps[self._number - 1]
        return program.steps[-1] if program.steady else None

    def _known(self) -> str:
        program = self._step.program
        if program is None:
            return "a later one, which finds the optimizer's state there"
        return f"{len(program.steps)} steps that were not alike: record more of them"
