"""`RecordedCode`: a program runs as it is, on a pretended card, and every round of it becomes a profile."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import programs as torch_programs
from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import UsageError, one_line
from fxmem.hardware.workspaces import Seen
from fxmem.records.profile import Phase, ProgramRun, Step
from fxmem.records.units import GRAPH_POOL, OWN_LOSS, Mode
from fxmem.simulation.asked.made_up import given_note
from fxmem.simulation.card.card_thread import has_target_tensors
from fxmem.simulation.card.device_border import CardMode
from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.code.round_rule import Enough
from fxmem.simulation.program.round_tracer import ProgramRoot, RoundTracer
from fxmem.simulation.program.rounds import Rounds
from fxmem.simulation.program.watch import Watch
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.recording.observe.observer import PendingCall
from fxmem.simulation.recording.recording import FinishedRun, Subject
from fxmem.simulation.stand_ins.cuda import stand_ins
from fxmem.simulation.stand_ins.driver import nvidia_smi_patches, nvml_patches
from fxmem.simulation.stand_ins.host import loader_patches, process_patches, trace_patches, types_are_torchs
from fxmem.simulation.stand_ins.hub import Hub


class RecordedCode(Subject):
    """The code that the caller runs inside the recording's `environment()`, whatever it is.

    Args:
        name: what the program is called in the record.
        machine: that it runs on.
    """

    compiles_whole = False
    watch: Watch
    """Made with the recording."""

    def __init__(self, name: str, machine: PretendedMachine) -> None:
        super().__init__(machine.values)
        self.name, self.machine = name, machine
        self.memory, self.notes, self._border = machine.memory, machine.notes, machine.border
        self.route = self._border.run
        self._is_moving = False
        """Whether a module is on its way, with what is inside it."""

    @property
    def rounds(self) -> Rounds:
        """The program's."""
        return self.watch.rounds

    def record(self, watch: Watch) -> None:
        """Trace whatever the program calls."""
        self.watch = watch
        recording = self.recording
        if (world := recording.collectives.world) is not None:
            self._border.cards = int(world.variables["LOCAL_WORLD_SIZE"])
        if watch.engines is not None:
            recording.packages.own.append(watch.engines.package())
        recording.attach(torch.nn.Module())

    # --- the parts of the recording -----------------------------------------------------------------------------------

    def make_mode(self) -> torch_common.FakeTensorMode:
        """A mode that leaves the host's tensors real."""
        mode = CardMode(self._border, self.machine.thread)
        self.machine.values.maker = torch_fakes.Maker(mode)
        if self.memory is None:
            torch_fakes.observe_twins(mode, lambda real, fake: self._border.log.real.note_twin(real, fake))
        return mode

    def make_log(self, device: torch.device) -> StepLog:
        """A log that tells the card's allocator of each storage, and counts what is alive."""
        machine = self.machine
        observers = [each for each in (self.memory, machine.trace, machine.live) if each is not None]
        log = StepLog(device, counts=self._counts, keeps_outputs=True, observers=observers)
        machine.live.log = self._border.log = log
        if self.memory is not None:
            self.memory.find_bounded = log.sum_bounded
        return log

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the target's.

        Real tensors are the host's, on a CPU all that its allocator gave: not numpy's, nor a file's pages.
        """
        return isinstance(tensor, torch_common.FakeTensor) or (
            self.memory is None and tensor.layout is torch.strided and tensor.untyped_storage().resizable()
        )

    def make_tracer(self, root: torch.nn.Module, *, writes_anew: bool) -> RoundTracer:
        """A tracer of all that the program calls, round by round."""
        recording = self.recording
        return RoundTracer(self.machine.roots, recording.nodes, recording, everything_is_targets=self.memory is None)

    # --- while it runs ------------------------------------------------------------------------------------------------

    @property
    def output(self) -> Any:
        """The program's own standard output."""
        return sys.stdout

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The program runs inside, to its end or until it raises."""
        self.recording.log.setting_up = False
        watched = (self.rounds.observe_optimizers(), self.machine.thread.watch(), self.watch.parts.host.watch())
        with torch_common.nested(*watched, self.watch.parts.cycles.watch()):
            try:
                yield
            except Exception as error:
                if self.rounds.refusals.find_cause(error) is not None:
                    self.rounds.finish()
                raise
            except Enough:
                if self.rounds.cut or self.rounds.is_cut_after or self.watch.parts.branches.is_leaving:
                    self.rounds.finish()
                raise
        self.rounds.finish(is_over=True)

    def explain(self, error: Exception) -> Exception:
        """What the program raises passes through."""
        return error

    def emulate(self) -> contextlib.AbstractContextManager[None]:
        """Modules that move keep their parameters' identity."""
        return torch_programs.parameters_keep_identity()

    def patches(self) -> torch_common.Patches:
        """What stands in for the rest of the machine: files, data loaders, processes, the card's driver."""
        on_card, target, world = self.memory is not None, self.recording.target, self.recording.collectives.world
        yield from self.machine.isolation.patches(self.notes)
        yield self.watch.decode_loops.patched()
        yield from self.watch.checkpoints.patches()
        yield from Hub(self.notes, self._border.host, self.machine.isolation).patches()
        yield self.watch.reads.patch()
        yield from loader_patches(self._border, on_card=on_card)
        yield from self.watch.parts.loaders.patches()
        yield torch_common.wrap(torch, "clear_autocast_cache", lambda own: self.watch.parts.repeats.clear_casts(own))
        yield from trace_patches(self.notes)
        yield types_are_torchs()
        yield from self.machine.thread.patches()
        yield torch_programs.lazy_tensors()
        yield torch_common.wrap(torch.export, "export", self._export)
        yield torch_programs.observe_moves(self._move)
        yield torch_common.wrap(torch.nn.Module, "__setstate__", self._copy)
        if self.memory is None:
            yield torch_programs.observe_mappings(self._border.log.note_mapping)
        if self.memory is not None and target.capability is not None:
            yield torch_programs.fakes_are_foreach_tensors()
            yield from stand_ins(self.memory, self._border, target.capability, self.machine.thread)
            yield from nvidia_smi_patches(self.memory, target, self.notes)
            yield from nvml_patches(self.memory, target, self.notes)
        if on_card or world is not None:
            yield from process_patches(self.notes, world, compiles=self.recording.compilation.compiles)

    def _move(self, original: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Module.to` and its kind: what has come to the target is a root."""
        self.watch.decode_loops.install()
        with torch_common.replace(self, "_is_moving", True), self.recording.tracer.write_nothing():
            moved = original(module, *args, **kwargs)
        if not self._is_moving and has_target_tensors(module, self.recording.device.type):
            self.machine.roots.note_move(module)
        return moved

    def _export(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`torch.export.export` traces on fakes of its own, which its graph keeps."""
        with self.recording.tracer.write_nothing(), self.recording.log.trace(), torch_common.no_modes():
            return original(*args, **kwargs)

    def _copy(self, original: Callable[..., None], module: torch.nn.Module, state: Any) -> None:
        """`copy.deepcopy`: a copy that is averaged or kept is a root, too."""
        original(module, state)
        if has_target_tensors(module, self.recording.device.type):
            self.machine.roots.note_move(module)

    # --- what is observed ---------------------------------------------------------------------------------------------

    def on_hidden(self, op: int, hidden: Any, phase: Phase) -> None:
        """The kernel of an operator has memory for itself: the card's allocator passes through it."""
        log, collector = self.recording.log, self.recording.collector
        if isinstance(hidden, Seen):
            self.machine.trace.run_operator(hidden, log.streams.current)
        if isinstance(hidden, Seen) and hidden.memory is not None:
            known = hidden.memory
            if self.memory is not None and known.signatures:
                known = known.fill_workspaces(self.memory.asked)
            self.machine.live.pass_through(log.ops[op], known)
        if self.memory is None:
            return
        if log.streams.current != GRAPH_POOL:
            self.memory.release_graphs()
        if isinstance(hidden, Seen):
            self.memory.run_operator(hidden.memory, log.streams.current)
            # A library asks for its workspace once the output is there.
            if hidden.multiplies or (hidden.memory is not None and hidden.memory.signatures):
                held = collector.find_held().items()
                needed = {name: each for name, each in held if not each.needed_by or op in each.needed_by}
                self.memory.hold(needed)
                self.machine.trace.hold(needed)

    def find_replacement(self, function: Any) -> Callable[..., Any] | None:
        """What to run where the program looks into a tensor on the card."""
        return self.watch.reads.replacement(function)

    def on_module_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module of the program is about to be called."""
        with self.watch.parts.owners.holding(module, args, kwargs):
            self.rounds.module_called(module)

    def run_module(self, call: PendingCall) -> Any:
        """Run it, or what stands for it."""
        result = self.watch.parts.repeats.run(call, infers=self.rounds.infers)
        self.rounds.refusals.end_call()
        return result

    def on_torch_call(self) -> None:
        """The program calls torch, as an evaluation may without end, and before `generate`, which calls a module."""
        self.watch.decode_loops.install()
        self.rounds.torch_called()

    def on_gradient(self) -> None:
        """A call between modules leads to a gradient: forward goes on."""
        self.rounds.begin_forward()

    def on_compiled_call(self) -> None:
        """The program calls compiled code."""
        if not self.recording.tracer.path:
            self.rounds.function_called()

    def takes_backward(self, roots: Sequence[Any]) -> bool:
        """Whether a root is fake, or an edge on the card.

        A model on the host trains for real.
        """
        return self.memory is None or any(
            torch_wrappers.is_fake(root)
            or (not isinstance(root, torch.Tensor) and torch_autograd.edge_device(root).type == "cuda")
            for root in roots
        )

    def observe_backward(
        self, roots: Sequence[Any], *, accumulates: bool, is_inner: bool
    ) -> contextlib.AbstractContextManager[None]:
        """A backward is a phase of the round."""
        return self.rounds.observe_backward(roots, accumulates=accumulates, is_inner=is_inner)

    # --- what compiled code asks --------------------------------------------------------------------------------------

    def find_class(self, path: str) -> type[torch.nn.Module] | None:
        """The class of the program's module with this path; None for none."""
        return self.machine.roots.find_class(path)

    def is_targets(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator runs on the target."""
        return self._border.is_targets(func, types, args, kwargs)

    def make_buffers(self) -> contextlib.AbstractContextManager[None]:
        """Compiled code makes a buffer of its own inside: it is the target's."""
        return torch_common.replace(self._border, "making_buffers", True)

    # --- what it was --------------------------------------------------------------------------------------------------

    def describe(self) -> FinishedRun:
        """The round that is over."""
        rounds, log = self.rounds, self.recording.log
        trains = bool(self.recording.nodes.saved) or any(span.phase is Phase.BACKWARD for span in log.phases)
        mode: Mode = "train" if trains else "infer"
        optimizers = "+".join(rounds.stepped_names) or None
        loss = OWN_LOSS if trains else None
        compiled, root = self.recording.compilation.describe(), ProgramRoot()
        for child, module in self.machine.roots.children():
            root.add_module(child, module)
        return FinishedRun(
            recording=self.recording,
            name=self.name,
            step=Step(mode=mode, optimizer=optimizers, loss=loss, precision=None, compiled=compiled),
            model=root,
            optimizer=next(iter(rounds.optimizers), None),
            is_program=True,
            rollouts=tuple(filter(None, (each.describe() for each in self.watch.decode_loops.rollouts.values()))),
            engines=() if self.watch.engines is None else self.watch.engines.uses,
        )

    def finish(self) -> None:
        """The program is over."""
        for each in self.watch.listeners:
            each.finish()

    def summarize(self, ending: str, *, failed: bool) -> ProgramRun:
        """The record of the whole program."""
        rounds, shown = self.rounds.finished, self.rounds.shown
        whole = [each for each in rounds if each.record.is_whole]
        found: dict[str, Any] = {}
        for each in self.watch.listeners:
            found |= each.describe(is_over=not self.rounds.was_ended)
        return ProgramRun(
            ending=ending,
            failed=failed,
            is_cut=self.rounds.cut is not None,
            setup=self.rounds.setup,
            rounds=tuple(each.record for each in rounds),
            shown=0 if shown is None else shown.number,
            steady=whole[-1].repeats(whole[-2]) if len(whole) > 1 else None,
            optimizers=tuple(self.rounds.stepped_names),
            made_up=self.notes.records(),
            engines=() if self.watch.engines is None else self.watch.engines.uses,
            **found,
        )


# --- values that the user gives for what a program reads of the card: `--value train.py:41=0.5` -----------------------


_EXPECTED = "expected --value FILE:LINE=VALUE with a number, a list, true, false, FILE.npy or FILE.pt"


def read_given(words: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read values by line, as `Made up` names it. Raises UsageError."""
    found: dict[str, torch.Tensor] = {}
    for word in words:
        parts = re.fullmatch(r"(?:\./)?(.+?:\d+)=(.+)", word)
        if parts is None:
            raise UsageError(f"{_EXPECTED}; got {word!r}")
        try:
            found[parts[1]] = _read(parts[2])
        except Exception as error:  # whatever json, numpy, torch and the system say of it
            raise UsageError(f"{_EXPECTED}; got {word!r}: {one_line(error)}") from error
    return found


def _read(text: str) -> torch.Tensor:
    suffix = Path(text).suffix
    if suffix == ".npy":
        value = torch.from_numpy(np.load(text, allow_pickle=False))
    elif suffix == ".pt":
        value = torch.load(text, map_location="cpu", weights_only=True)
    else:
        value = torch.tensor(json.loads({"True": "true", "False": "false"}.get(text, text)))
    if not isinstance(value, torch.Tensor) or not value.numel():
        raise ValueError("it holds no numbers")
    return value.detach()


def find_unread(given: Mapping[str, torch.Tensor], run: ProgramRun | None) -> Iterator[str]:
    """The lines at which none of the values was read."""
    read = {each.what for each in (run.made_up if run else ())}
    return (place for place in given if given_note(place) not in read)
