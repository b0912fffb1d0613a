"""Measures a program of the user's own round by round, in another process.

On the CPU under torch's profiler from the program's start, on a card by the allocator's peaks. `python -m
fxmem.validation.measure_program` is that process; what it is to run and where to write stand on its command line as
JSON.

Rounds are found as a recording finds them. Of what the program does, three things differ from running it alone: it ends
after its rounds, garbage is collected where a round ends and only there, and what it compiles runs as it was written,
as in a recording, unless it is to be compiled. On the CPU data loaders load in the program's own process, and what they
allocate and free themselves is set aside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem._torch import kernels as torch_kernels
from fxmem._torch import programs as torch_programs
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem.errors import AnalysisError, one_line
from fxmem.records.profile import Phase
from fxmem.records.units import MeasuredDevice
from fxmem.records.validation import MeasuredRound, ProgramMeasurement
from fxmem.simulation.code.round_rule import Enough, RoundRule, stepped_parameters
from fxmem.simulation.program import Launch, run_as_main
from fxmem.validation.measure_cpu import cpu_machine, mark, nowhere, quiet_profiler
from fxmem.validation.measure_cuda import card_machine, current_bytes
from fxmem.validation.profiler_log import (
    BACKEND,
    LOADER,
    WORKSPACE_KERNELS,
    WRAPPER_PRODUCTS,
    live_bytes,
    read_rounds,
    scratch_by_op,
    scratch_events,
)

_STANDARD_ERROR = 2
_SET_ASIDE = (*WORKSPACE_KERNELS, LOADER, BACKEND)


def measure_program(
    program: Launch, *, steps: int, device: MeasuredDevice, compile: str | None = None, module: str = __name__
) -> ProgramMeasurement:
    """Run a program for real in another process, and measure each of its rounds.

    It is ended after so many optimizer steps. Its standard output goes to standard error.

    Args:
        program: what is run.
        steps: optimizer steps after which it is ended.
        device: where it is measured.
        compile: "as-is" compiles what the program compiles; None runs that as it was written.
        module: the module that is the process.

    Raises:
        AnalysisError: it ended before its first round did, or not by itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measurement.json")
        settings = {"steps": steps, "device": device, "compile": compile}
        wanted = json.dumps({"program": dataclasses.asdict(program), **settings})
        command = [sys.executable, "-m", module, wanted, str(file)]
        code = subprocess.run(command, stdout=_STANDARD_ERROR, check=False).returncode
        if not file.exists():
            raise AnalysisError(f"the program ended with exit code {code} and was not measured; its output says why")
        measured = ProgramMeasurement.model_validate_json(file.read_bytes())
    if not measured.rounds:
        raise AnalysisError(f"expected a program that runs on {device}; it {measured.ending} before its first step")
    return measured


class _RealRounds(RoundRule):
    """The rounds of a program that runs for real.

    Args:
        device: where it is measured.
        steps: rounds after which it is ended.
        mark: called with each phase that begins.
        end: called where set-up ends, and each round.
        compiles: whether what the program compiles is compiled.
    """

    def __init__(
        self,
        device: MeasuredDevice,
        steps: int,
        mark: Callable[[Phase], None],
        end: Callable[[], None],
        *,
        compiles: bool = False,
    ) -> None:
        super().__init__(compiles=compiles)
        self._device = device
        self._steps = steps
        self._mark_phase = mark
        self._phase: Phase | None = None
        self._end = end
        self._in_backward = 0
        self._depth = 0
        self.finished = 0
        self.has_setup = False

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Find the rounds of what runs inside."""
        with (
            self._observe_compiled_calls() if self.compiles else self._observe_calls(),
            self.observe_optimizers(),
            torch_autograd.observe_backwards(
                self._around_backward, functools.partial(self.backward_ends, accumulates=False)
            ),
        ):
            yield

    @contextlib.contextmanager
    def _observe_calls(self) -> Iterator[None]:
        with (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            torch_wrappers.run_compiled_as_eager(lambda: None),
        ):
            yield

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if not self._depth:  # within a module's call a backward of its own may end, and begins no round
            self._module_called(module, args)
        self._depth += 1

    def _leave_module(self, *_: Any) -> None:
        self._depth -= 1

    @contextlib.contextmanager
    def _observe_compiled_calls(self) -> Iterator[None]:
        """As `_observe_calls`; compiled code is not observed. Dynamo would trace a hook of all modules."""
        original, calls = torch.nn.Module.__call__, 0
        plain = contextlib.ExitStack()

        def watch(_: Any) -> Callable[..., Any]:
            def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                self._module_called(module, args)
                calls += 1
                try:
                    return original(module, *args, **kwargs)
                finally:
                    calls -= 1

            return call_module

        def unpatched() -> contextlib.AbstractContextManager[Any]:
            return torch_common.patch(torch.nn.Module, "__call__", lambda _: original)

        def enter() -> None:
            if not calls and not self._in_backward and not self._in_step:
                self._mark(Phase.FORWARD)
                self.module_called(torch.nn.Module())
            plain.enter_context(unpatched())

        with (
            torch_common.patch(torch.nn.Module, "__call__", watch),
            torch_dynamo.observe_compiled_calls(enter, plain.close, None, unpatched),
        ):
            yield

    def _module_called(self, module: torch.nn.Module, _: Any) -> None:
        if not self._in_backward and (self._device == "cpu" or _uses_device(self._device, module.parameters())):
            self._mark(Phase.FORWARD)
            self.module_called(module)

    @contextlib.contextmanager
    def _around_backward(self) -> Iterator[None]:
        self.backward_begins()
        self._mark(Phase.BACKWARD)
        self._in_backward += 1
        try:
            yield
        finally:
            self._in_backward -= 1
            self.backward_ends()
            self._mark(Phase.OPTIMIZER)

    def _mark(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._mark_phase(phase)

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        return _uses_device(self._device, stepped_parameters(optimizer))

    def end_program(self) -> None:
        """One that only runs has one round: all after its set-up."""
        if not self.finished:
            with contextlib.suppress(Enough):
                self._end_round()

    def _end_setup(self) -> None:
        gc.collect()
        self.has_setup = True
        self._end()

    def _end_round(self) -> None:
        gc.collect()
        self.finished += 1
        self._end()
        if self.finished >= self._steps:
            raise Enough


def _uses_device(device: str, tensors: Iterator[torch.Tensor]) -> bool:
    return any(tensor.device.type == device for tensor in tensors)


# --- in the program's process -----------------------------------------------------------------------------------------


def _run(program: Launch, rounds: _RealRounds) -> str:
    """Run the program; how it ended."""
    gc.disable()
    gc.freeze()  # a round's collection looks only at what the program has made
    ending = "ran to its end"
    try:
        with rounds.observe():
            run_as_main(program)
    except Enough:
        return f"stopped after step {rounds.finished}"
    except SystemExit as leaving:
        ending = f"called sys.exit({leaving.code!r})" if leaving.code else ending
    except Exception as error:
        traceback.print_exc()
        return f"raised {one_line(error)}"
    rounds.end_program()
    return ending


def _measure_on_cpu(program: Launch, steps: int, *, compiles: bool = False) -> ProgramMeasurement:
    rounds = _RealRounds("cpu", steps, mark, functools.partial(mark, "round"), compiles=compiles)
    set_aside = (*_SET_ASIDE, *WRAPPER_PRODUCTS) if compiles else _SET_ASIDE
    with _loaders_apart(), quiet_profiler(), torch_kernels.profiler() as profiled:
        ending = _run(program, rounds)
    events, ends = read_rounds(profiled, apart=torch_distributed.is_initialized())
    scratch = scratch_events(events)
    live = live_bytes(0, events, {})
    without = live_bytes(0, events, {index: call for index, call in scratch.items() if call.name in set_aside})
    found, peaks = [], []
    for begin, end in zip([0, *ends], ends, strict=False):
        at = max(range(begin, end + 1), key=live.__getitem__)
        running = events[at - 1].call if at else None
        peaks.append(at - 1)
        found.append(
            MeasuredRound(
                peak_bytes=live[at],
                peak_phase=events[at - 1].phase if at else Phase.FORWARD,
                peak_op=running.name if running else "",
                peak_without_kernel_scratch_bytes=max(without[begin : end + 1]),
                retained_bytes=live[end],
            )
        )
    largest = max(range(rounds.has_setup, len(found)), key=lambda number: found[number].peak_bytes, default=None)
    by_op = () if largest is None else scratch_by_op(events, scratch, peaks[largest])
    return _record(program, rounds, ending, found, machine=cpu_machine(), set_aside=set_aside, scratch=by_op)


def _record(
    program: Launch, rounds: _RealRounds, ending: str, found: list[MeasuredRound], **more: Any
) -> ProgramMeasurement:
    """The measurement of a program; `found` are its rounds, after its set-up if it has one."""
    before, after = found[: rounds.has_setup], found[rounds.has_setup :]
    setup = before[0] if before else None
    return ProgramMeasurement(program=program.command, ending=ending, setup=setup, rounds=tuple(after), **more)


@contextlib.contextmanager
def _loaders_apart() -> Iterator[None]:
    """Data loaders load in this process; their work is named in the log."""

    def naming(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(LOADER):
                return original(*args, **kwargs)

        return run

    iterator = torch_programs.LOADER_ITERATOR
    with (
        torch_programs.loaders_at_home(workers=False),
        torch_common.patch(iterator, "__init__", naming),
        torch_common.patch(iterator, "__next__", naming),
    ):
        yield


def measure_round() -> MeasuredRound:
    """The peaks of the card's allocator since this was last called; if never, since the program began."""
    peaks, now = current_bytes("peak"), current_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    return MeasuredRound(
        peak_bytes=peaks["requested"],
        retained_bytes=now["requested"],
        allocated_bytes=peaks["allocated"],
        reserved_bytes=peaks["reserved"],
    )


def _measure_on_card(program: Launch, steps: int, *, compiles: bool = False) -> ProgramMeasurement:
    found: list[MeasuredRound] = []
    rounds = _RealRounds("cuda", steps, nowhere, lambda: found.append(measure_round()), compiles=compiles)
    ending = _run(program, rounds)
    note = "a program that resets the allocator's peaks itself hides what came before, in that round"
    return _record(program, rounds, ending, found, machine=card_machine(), notes=(note,))


def main() -> None:
    """Measure the program of the command line."""
    wanted, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    program = Launch(**{**wanted["program"], "arguments": tuple(wanted["program"]["arguments"])})
    measure = _measure_on_card if wanted["device"] == "cuda" else _measure_on_cpu
    file.write_text(measure(program, wanted["steps"], compiles=wanted["compile"] is not None).model_dump_json())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the program's threads may still wait for work


if __name__ == "__main__":
    main()
