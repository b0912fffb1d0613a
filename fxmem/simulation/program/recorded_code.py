"""`RecordedCode`: a program runs as it is, on a pretended card, and every round of it becomes a profile."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import programs as torch_programs
from fxmem._torch import wrappers as torch_wrappers
from fxmem.hardware.workspaces import Seen
from fxmem.records.names import GRAPH_POOL, MAX_OPERATORS, OWN_LOSS, STEPS, Mode
from fxmem.records.parts import LongestBatch
from fxmem.records.profile import Phase, ProgramRun, Step, Target
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.asked.routing import BALANCED, Rule
from fxmem.simulation.asked.values import MadeUpValues
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.card.border import Border, CardMode
from fxmem.simulation.card.card_memory import CardMemory, LiveBytes
from fxmem.simulation.card.card_thread import CardThread
from fxmem.simulation.card.roots import Roots, has_target_tensors
from fxmem.simulation.code.round_rule import Enough
from fxmem.simulation.processes.sandbox.isolation import Isolation
from fxmem.simulation.program.round_tracer import ProgramRoot, RoundTracer
from fxmem.simulation.program.rounds import IsEnough, Rounds
from fxmem.simulation.program.tensor_reads import TensorReads
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.recording.observe.observer import PendingCall
from fxmem.simulation.recording.recording import FinishedRun, Recording, Subject, device_of
from fxmem.simulation.run.decode_loops import DecodeLoops
from fxmem.simulation.run.host_memory import HostMeter
from fxmem.simulation.run.loader_watch import LoaderWatch
from fxmem.simulation.run.longest_batch import RecordedLengths, find_longest
from fxmem.simulation.stand_ins.checkpoints import Checkpoints
from fxmem.simulation.stand_ins.cuda import stand_ins
from fxmem.simulation.stand_ins.host import loader_patches, process_patches, trace_patches
from fxmem.simulation.stand_ins.nvidia_smi import nvidia_smi_patches
from fxmem.simulation.stand_ins.nvml import nvml_patches
from fxmem.simulation.stand_ins.vllm import Engines


class RecordedCode(Subject):
    """The code that the caller runs inside the recording's `environment()`, whatever it is.

    Args:
        target: the machine to pretend.
        name: what the program is called in the record.
        raises: whether an allocation that the card has no room for raises `torch.cuda.OutOfMemoryError`.
        enough: asked after each round, with all of them, whether the program has run long enough.
        max_operators: how many operators a round may have before the program is ended.
        prepare: called with name and module of each model of the program before its first call.
        isolation: what keeps its files apart; None where they are real.
        given: values that the user says it reads, by line.
        rule: how tokens are shared out among experts.
        host_bytes: the host's memory; None where it is not known.
        measures_host: whether what the process has there is measured.
        loaders: what watches its loaders.
    """

    compiles_whole = False

    def __init__(  # noqa: PLR0913 - what `record` is told, by keyword
        self,
        target: Target,
        *,
        name: str = "program",
        raises: bool = True,
        enough: IsEnough = lambda rounds: False,
        max_operators: int = MAX_OPERATORS,
        prepare: Callable[[str, torch.nn.Module], None] | None = None,
        isolation: Isolation | None = None,
        given: Mapping[str, torch.Tensor] | None = None,
        rule: Rule = BALANCED,
        host_bytes: int | None = None,
        measures_host: bool = True,
        loaders: LoaderWatch | None = None,
    ) -> None:
        self.name = name
        self.loaders = loaders or LoaderWatch()
        self.longest: LongestBatch | None = None
        """Of its loader's batches; found once the program is over."""
        self.notes = MadeUpNotes(given)
        self._made_up = MadeUpValues(self.notes, rule)
        super().__init__(self._made_up)
        on_card, device = target.device == "cuda", device_of(target)
        self._thread = CardThread()
        self.trace = BlockTrace()
        self.memory = CardMemory(target, os.environ, raises=raises, trace=self.trace) if on_card else None
        self._border = Border(self.memory, self.notes)
        self.route = self._border.run
        self._live = LiveBytes()
        self._host = HostMeter(
            self._border.host,
            lambda: 0 if on_card else self._live.now,
            lambda: len(self.recording.tracer.nodes),
            lambda: self.rounds.made_optimizers > 0,
            host_bytes,
            measures=measures_host,
        )
        if not on_card:
            self._live.on_rise = lambda passing: self._border.host.on_rise(passing)
        self.loaders.apart = self._host.pause
        self.roots = Roots(prepare)
        self.rounds = Rounds(
            self.roots,
            self._live,
            self.memory,
            self._host,
            self.trace,
            self.loaders,
            enough=enough,
            max_operators=max_operators,
        )
        self._reads = TensorReads(self._border, self.notes, device)
        self._isolation = isolation or Isolation()
        self.engines: Engines | None = None
        """Serving engines that it starts; None on the CPU."""
        self._is_moving = False
        """Whether a module is on its way, with what is inside it."""
        self._checkpoints = Checkpoints(self._border, self.notes, device, self._isolation)

    def record(self, recording: Recording) -> None:
        """Trace whatever the program calls."""
        self.rounds.attach(recording)
        if (world := recording.collectives.world) is not None:
            self._border.cards = int(world.variables["LOCAL_WORLD_SIZE"])
        self.rounds.compiles = compiles = recording.compilation.compiles
        # A rank in a fork would send what others wait for.
        fork = self._host.look_ahead if hasattr(os, "fork") and world is None else None
        self.loops = DecodeLoops(
            *(recording.log, self.trace, self._made_up.maker),
            memory=self.memory,
            rolling=self.rounds.generating,
            fork=fork,
            is_compiled=compiles,
        )
        if self.memory is not None:
            self.engines = Engines(self.memory, self.rounds.generating, self.roots, recording)
            recording.packages.own.append(self.engines.package())
        recording.attach(torch.nn.Module())

    # --- the parts of the recording -----------------------------------------------------------------------------------

    def make_mode(self) -> torch_common.FakeTensorMode:
        """A mode that leaves the host's tensors real."""
        mode = CardMode(self._border, self._thread)
        self._made_up.maker = torch_fakes.Maker(mode)
        if self.memory is None:
            torch_fakes.observe_twins(mode, lambda real, fake: self._border.log.note_twin(real, fake))
        return mode

    def make_log(self, device: torch.device) -> StepLog:
        """A log that tells the card's allocator of each storage, and counts what is alive."""
        observers = (self.trace, self._live) if self.memory is None else (self.memory, self.trace, self._live)
        log = StepLog(device, counts=self._counts, keeps_outputs=True, observers=observers)
        self._live.log = self._border.log = log
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
        return RoundTracer(self.roots, recording.nodes, recording, everything_is_targets=self.memory is None)

    # --- while it runs ------------------------------------------------------------------------------------------------

    @property
    def output(self) -> Any:
        """The program's own standard output."""
        return sys.stdout

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The program runs inside, to its end or until it raises."""
        self.recording.log.setting_up = False
        watched = (self.rounds.observe_optimizers(), self._thread.watch(), self._host.watch())
        with torch_common.nested(*watched, self.rounds.cycles.watch()):
            try:
                yield
            except Exception as error:
                if self.rounds.refusals.find_cause(error) is not None:
                    self.rounds.finish()
                raise
            except Enough:
                if self.rounds.cut or self.rounds.is_cut_after:
                    self.rounds.finish()
                raise
        self.rounds.finish()

    def explain(self, error: Exception) -> Exception:
        """What the program raises passes through."""
        return error

    def emulate(self) -> contextlib.AbstractContextManager[None]:
        """Modules that move keep their parameters' identity."""
        return torch_programs.parameters_keep_identity()

    def patches(self) -> torch_common.Patches:
        """What stands in for the rest of the machine: files, data loaders, processes, the card's driver."""
        on_card, target, world = self.memory is not None, self.recording.target, self.recording.collectives.world
        yield from self._isolation.patches(self.notes)
        yield self.loops.patched()
        yield from self._checkpoints.patches()
        yield self._reads.patch()
        yield from loader_patches(self._border, on_card=on_card)
        yield from self.loaders.patches()
        yield torch_common.wrap(torch, "clear_autocast_cache", lambda own: self.rounds.repeats.clear_casts(own))
        yield from trace_patches(self.notes)
        yield from self._thread.patches()
        yield torch_programs.lazy_tensors()
        yield torch_common.wrap(torch.export, "export", self._export)
        yield torch_programs.observe_moves(self._move)
        yield torch_common.wrap(torch.nn.Module, "__setstate__", self._copy)
        if self.memory is None:
            yield torch_programs.observe_mappings(self._border.log.note_mapping)
        if self.memory is not None and target.capability is not None:
            yield torch_programs.fakes_are_foreach_tensors()
            yield from stand_ins(self.memory, self._border, target.capability, self._thread)
            yield from nvidia_smi_patches(self.memory, target, self.notes)
            yield from nvml_patches(self.memory, target, self.notes)
        if on_card or world is not None:
            yield from process_patches(self.notes, world, compiles=self.recording.compilation.compiles)

    def _move(self, original: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Module.to` and its kind: what has come to the target is a root."""
        self.loops.install()
        with torch_common.replace(self, "_is_moving", True), self.recording.tracer.write_nothing():
            moved = original(module, *args, **kwargs)
        if not self._is_moving and has_target_tensors(module, self.recording.device.type):
            self.roots.note_move(module)
        return moved

    def _export(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`torch.export.export` traces on fakes of its own, which its graph keeps."""
        with self.recording.tracer.write_nothing(), self.recording.log.trace(), torch_common.no_modes():
            return original(*args, **kwargs)

    def _copy(self, original: Callable[..., None], module: torch.nn.Module, state: Any) -> None:
        """`copy.deepcopy`: a copy that is averaged or kept is a root, too."""
        original(module, state)
        if has_target_tensors(module, self.recording.device.type):
            self.roots.note_move(module)

    # --- what is observed ---------------------------------------------------------------------------------------------

    def on_hidden(self, op: int, hidden: Any, phase: Phase) -> None:
        """The kernel of an operator has memory for itself: the card's allocator passes through it."""
        log, collector = self.recording.log, self.recording.collector
        if isinstance(hidden, Seen):
            self.trace.run_operator(hidden, log.streams.current)
        if isinstance(hidden, Seen) and hidden.memory is not None:
            known = hidden.memory
            if self.memory is not None and known.signatures:
                known = known.fill_workspaces(self.memory.asked)
            self._live.pass_through(log.ops[op], known)
        if self.memory is None:
            return
        if log.streams.current != GRAPH_POOL:
            self.memory.release_graphs()
        if isinstance(hidden, Seen):
            self.memory.run_operator(hidden.memory, log.streams.current)
            # A library asks for its workspace once the output is there.
            if hidden.multiplies or (hidden.memory is not None and hidden.memory.signatures):
                held = collector.held().items()
                needed = {name: each for name, each in held if not each.needed_by or op in each.needed_by}
                self.memory.hold(needed)
                self.trace.hold(needed)

    def find_replacement(self, function: Any) -> Callable[..., Any] | None:
        """What to run where the program looks into a tensor on the card."""
        return self._reads.replacement(function)

    def on_module_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module of the program is about to be called."""
        with self.rounds.holding(module, args, kwargs):
            self.rounds.module_called(module)

    def run_module(self, call: PendingCall) -> Any:
        """Run it, or what stands for it."""
        return self.rounds.run_module(call)

    def on_torch_call(self) -> None:
        """The program calls torch, as an evaluation may without end, and before `generate`, which calls a module."""
        self.loops.install()
        if not (self.rounds.cut or self.rounds.is_cut_after):  # once: closing the round calls torch, too
            self.rounds.end_long_round()
            self.rounds.end_long_evaluation()
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
        return self.roots.find_class(path)

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
        for child, module in self.roots.children():
            root.add_module(child, module)
        return FinishedRun(
            recording=self.recording,
            name=self.name,
            step=Step(mode=mode, optimizer=optimizers, loss=loss, precision=None, compiled=compiled),
            model=root,
            optimizer=next(iter(rounds.optimizers), None),
            is_program=True,
            rollouts=tuple(filter(None, (each.describe() for each in self.loops.rollouts.values()))),
            engines=() if self.engines is None else self.engines.uses,
        )

    def find_longest(self) -> None:
        """Find the batch that decides, where the loader's batches have different lengths."""
        watch, recording = self.loaders, self.recording
        found, per_step = watch.find_training()
        if watch.epoch is None or found is None:
            return
        self.longest = find_longest(
            RecordedLengths(
                watch.epoch,
                watch.handed(found),
                per_step,
                STEPS,
                self.trace.rounds[:-1],  # the last is not over
                recording.collector,
                recording.target,
                dict(os.environ if self.memory is None else self.memory.environ),
            )
        )

    def summarize(self, ending: str, *, failed: bool) -> ProgramRun:
        """The record of the whole program."""
        rounds, shown = self.rounds.finished, self.rounds.shown
        whole = [each for each in rounds if each.record.is_whole]
        is_over = not self.rounds.was_ended
        return ProgramRun(
            ending=ending,
            failed=failed,
            is_cut=self.rounds.cut is not None,
            setup=self.rounds.setup,
            rounds=tuple(each.record for each in rounds),
            shown=0 if shown is None else shown.number,
            steady=whole[-1].repeats(whole[-2]) if len(whole) > 1 else None,
            **self.rounds.growth.describe(is_over=is_over),
            full_at=self.rounds.full_at,
            grown_anew=self.rounds.anew.describe()["grown"],
            schedules=self.rounds.later.describe(
                [each.record.requested_bytes for each in whole],
                {each.place for each in self.notes.records()},
                is_over=is_over,
                is_after=self.rounds.has_evaluated,
            ),
            longest=self.longest,
            evaluations=tuple(self.rounds.evaluations.passes),
            optimizers=tuple(self.rounds.stepped_names),
            made_up=self.notes.records(),
            engines=() if self.engines is None else self.engines.uses,
            host=self._host.record().model_copy(update=self.rounds.host_growth.describe(is_over=is_over)),
        )
