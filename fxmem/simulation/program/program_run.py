"""`ProgramRecording`: a program runs as it is, on a pretended card, and every round of it becomes a profile."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem._torch import wrappers as torch_wrappers
from fxmem.hardware.workspaces import Seen
from fxmem.records.names import GRAPH_POOL, MAX_OPERATORS, OWN_LOSS, Mode
from fxmem.records.profile import Phase, Profile, ProgramRun, Step, Target
from fxmem.simulation.kernels.recurrent import flatten_rnn_weights
from fxmem.simulation.observe.autograd_engine import AutogradEngine
from fxmem.simulation.observers import FakeRun, Recording, calm_python, replacement
from fxmem.simulation.process_guard import process_unchanged
from fxmem.simulation.profile_builder import build_profile
from fxmem.simulation.program.border import Border, CardMode
from fxmem.simulation.program.card_memory import CardMemory
from fxmem.simulation.program.card_thread import CardThread
from fxmem.simulation.program.made_up import MadeUpNotes
from fxmem.simulation.program.program_log import ProgramLog
from fxmem.simulation.program.program_recorder import ProgramRecorder
from fxmem.simulation.program.roots import Roots, has_target_tensors
from fxmem.simulation.program.round_tracer import ProgramRoot, RoundTracer
from fxmem.simulation.program.rounds import FinishedRound, Rounds, find_growth
from fxmem.simulation.program.sandbox.isolation import Isolation
from fxmem.simulation.program.stand_ins.checkpoints import Checkpoints
from fxmem.simulation.program.stand_ins.cuda import stand_ins
from fxmem.simulation.program.stand_ins.host import loader_patches, trace_patches
from fxmem.simulation.program.stand_ins.nvidia_smi import nvidia_smi_patches
from fxmem.simulation.program.stand_ins.processes import process_patches
from fxmem.simulation.program.tensor_reads import TensorReads
from fxmem.simulation.ranks.world import World


class _ProgramEngine(AutogradEngine):
    """The autograd engine of a program: of what is on the target, backward by backward."""

    def __init__(self, rounds: Rounds, *arguments: Any, takes_all: bool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rounds = rounds
        self._takes_all = takes_all

    def takes(self, roots: Sequence[Any]) -> bool:
        """Whether a root is fake, or an edge on the card.

        A model on the host trains for real.
        """
        return self._takes_all or any(
            torch_wrappers.is_fake(root)
            or (not isinstance(root, torch.Tensor) and torch_autograd.edge_device(root).type == "cuda")
            for root in roots
        )

    def run_backward(self, roots: Sequence[Any], *arguments: Any, **settings: Any) -> tuple[torch.Tensor | None, ...]:
        """As `AutogradEngine.run_backward`, as a phase of the round."""
        with self._rounds.observe_backward(roots, accumulates=settings.get("accumulate_grad", True)):
            return super().run_backward(roots, *arguments, **settings)


class ProgramRecording(Recording):
    """A recording of any program: the caller runs it inside `environment()`.

    Args:
        target: the machine to pretend.
        name: what the program is called in the record.
        raises: whether an allocation that the card has no room for raises `torch.cuda.OutOfMemoryError`.
        enough: asked after each round, with all of them, whether the program has run long enough.
        max_operators: how many operators a round may have before the program is ended.
        prepare: called with name and module of each model of the program before its first call.
        world: whose rank the program is; None for one that is alone.
        isolation: what keeps its files apart; None where they are real.
    """

    log: ProgramLog

    def __init__(
        self,
        target: Target,
        *,
        name: str = "program",
        raises: bool = True,
        enough: Callable[[Sequence[FinishedRound]], bool] = lambda rounds: False,
        max_operators: int = MAX_OPERATORS,
        prepare: Callable[[str, torch.nn.Module], None] | None = None,
        world: World | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        on_card = target.device == "cuda"
        self.name = name
        self.notes = MadeUpNotes()
        self._border = Border(on_card=on_card)
        self._thread = CardThread()
        self.memory = CardMemory(target, os.environ, raises=raises) if on_card else None
        super().__init__(target, world)
        self.roots = Roots(prepare)
        self.rounds = Rounds(
            self.log,
            self.roots,
            on_card=on_card,
            begin=self._begin_round,
            build=self._build_profile,
            enough=enough,
            max_operators=max_operators,
        )
        self._reads = TensorReads(self._border, self.notes, self.device)
        self._isolation = isolation or Isolation()
        self._checkpoints = Checkpoints(self.notes, self.device, self._isolation)
        self.attach(torch.nn.Module())

    def _make_mode(self) -> torch_common.FakeTensorMode:
        return CardMode(self._border, self._thread)

    def _make_log(self) -> ProgramLog:
        return ProgramLog(self.device, self.memory)

    def _make_recorder(self, *arguments: Any) -> ProgramRecorder:
        return ProgramRecorder(self._border, self.notes, self.memory, *arguments)

    def attach(self, root: torch.nn.Module) -> None:
        """Trace whatever the program calls."""
        self.root = root
        self.tracer: RoundTracer = RoundTracer(
            self.roots,
            self.log,
            everything_is_targets=self.memory is None,
            on_module_call=self._note_module_call,
            on_gradient=self.rounds.begin_forward,
            replacement=self._replacement,
            on_tensor_method=self._note_tensor_method,
        )
        self.engine = _ProgramEngine(
            self.rounds,
            self.log,
            takes_all=self.memory is None,
            around=self.tracer.observe_backward_calls,
            unpacking=self._observe_unpack,
            newest_that_ran=lambda: self.recorder.newest_node,
            streams=self.log.streams,
        )
        self.rounds.tracer = self.tracer

    def _note_module_call(self, module: torch.nn.Module) -> None:
        self.ask_libraries()  # which the program may have imported since it began
        self.stop_rule.install()
        self.rounds.module_called(module)

    def _replacement(self, function: Any) -> Callable[..., Any] | None:
        return self._reads.replacement(function) or replacement(function)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """What the program runs inside; torch is as before afterwards. What the program raises passes through."""
        try:
            with process_unchanged(sys.stdout), contextlib.ExitStack() as stack:
                stack.enter_context(self.emulate())
                for patch in self._stand_ins():
                    stack.enter_context(patch)
                stack.enter_context(self._observe())
                stack.enter_context(self.rounds.observe_optimizers())
                stack.enter_context(calm_python())
                self.log.setting_up = False
                with self._thread.watch():
                    try:
                        yield
                    except torch.cuda.OutOfMemoryError:
                        self.rounds.finish()
                        raise
                self.rounds.finish()
        finally:
            self.log.close()

    @contextlib.contextmanager
    def emulate(self) -> Iterator[None]:
        """As of every step; and modules that move keep their parameters' identity."""
        with super().emulate(), torch_programs.parameters_keep_identity():
            yield

    def _stand_ins(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        on_card = self.memory is not None
        yield from self._isolation.patches(self.notes)
        yield from self._checkpoints.patches()
        yield from loader_patches(self._border, on_card=on_card)
        yield from trace_patches(self.notes)
        yield self._thread.pool_patch()
        yield torch_programs.observe_moves(self._moving)
        yield torch_common.patch(torch.nn.Module, "__setstate__", self._copying)
        if self.memory is not None and self.target.capability is not None:
            yield torch_programs.fakes_are_foreach_tensors()
            yield from stand_ins(self.memory, self.target.capability, self._thread)
            yield from nvidia_smi_patches(self.memory, self.target, self.notes)

        if on_card or self.collectives.world is not None:
            yield from process_patches(self.notes, self.collectives.world)

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Module.to` and its kind: what has come to the target is a root, its recurrent weights are one block."""
        depth = 0

        def apply(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                with self.tracer.write_nothing():
                    moved = original(module, *args, **kwargs)
            finally:
                depth -= 1
            if not depth and has_target_tensors(module, self.device.type):
                self.roots.note_move(module)
                flatten_rnn_weights(module)
            return moved

        return apply

    def _copying(self, original: Callable[..., None]) -> Callable[..., None]:
        """`copy.deepcopy`: a copy that is averaged or kept is a root, too."""

        def set_state(module: torch.nn.Module, state: Any) -> None:
            original(module, state)
            if has_target_tensors(module, self.device.type):
                self.roots.note_move(module)

        return set_state

    # --- what the observers report ------------------------------------------------------------------------------------

    def _note_hidden(self, index: int, hidden: Any, phase: Phase) -> None:
        super()._note_hidden(index, hidden, phase)
        if self.memory is None:
            if isinstance(hidden, Seen) and hidden.memory is not None:
                self.log.pass_through(self.log.ops[index], hidden.memory)
            return
        if self.log.streams.current != GRAPH_POOL:
            self.memory.release_graphs()
        if isinstance(hidden, Seen):
            self.memory.run_operator(hidden.memory, self.log.streams.current)
            if hidden.multiplies:  # a library asks for its workspace once the output is there
                held = self.collector.held().items()
                self.memory.hold({name: each for name, each in held if not each.needed_by or index in each.needed_by})

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.begin()
        self.log.results = {}  # of nodes of another graph

    def _build_profile(self) -> Profile:
        with torch_common.no_modes(), torch_common.pause_observers():
            names = "+".join(self.rounds.stepped_names) or None
            trains = bool(self.log.saved_by_node) or any(span.phase is Phase.BACKWARD for span in self.log.phases)
            mode: Mode = "train" if trains else "infer"
            loss = OWN_LOSS if trains else None
            step = Step(mode=mode, optimizer=names, loss=loss, precision=None, compiled=self.describe())
            optimizer = next(iter(self.rounds.optimizers), None)
            root = ProgramRoot()
            for child, module in self.roots.children():
                root.add_module(child, module)
            run = FakeRun(
                name=self.name,
                notes=(),
                step=step,
                model=root,
                inputs=(),
                optimizer=optimizer,
                recording=self,
                cycles=0,
                is_program=True,
            )
            return build_profile(run)

    def program(self, ending: str, *, failed: bool) -> ProgramRun:
        """The record of the program."""
        rounds, shown = self.rounds.finished, self.rounds.shown
        whole = [each for each in rounds if each.record.is_whole]
        return ProgramRun(
            ending=ending,
            failed=failed,
            setup=self.rounds.setup,
            rounds=tuple(each.record for each in rounds),
            shown=0 if shown is None else shown.number,
            steady=whole[-1].repeats(whole[-2]) if len(whole) > 1 else None,
            growth_bytes=find_growth(whole),
            optimizers=tuple(self.rounds.stepped_names),
            made_up=self.notes.records(),
        )
