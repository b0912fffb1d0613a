"""`Recording`: a program runs on FakeTensors as it would on the target, and everything it does is observed.

Each part stands in a module of its own: FakeTensors on the target's device, the kernels the target would choose, the
autograd engine, the tracer that writes the graph, the recorder of operators, and the log of every allocation and free.
A recording ties them together, whatever the program is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import kernels as torch_kernels
from fxmem._torch import triton as torch_triton
from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import FxmemError
from fxmem.hardware.workspaces import (
    CUBLAS_VARIABLES,
    Collector,
    CpuCollector,
    HiddenMemory,
    Seen,
    copy_in_memory,
)
from fxmem.records.parts import CompileRecord
from fxmem.records.pause_gc import freeze_gc, pause_gc
from fxmem.records.profile import Phase, Step, Target
from fxmem.simulation import flops, known_values
from fxmem.simulation.error_advice import explain_error
from fxmem.simulation.kernel_settings import chosen_cudnn, convolution_settings, is_deterministic
from fxmem.simulation.kernels import card_emulation, subclass_ways
from fxmem.simulation.kernels.inner_ops import inner_memory
from fxmem.simulation.model.fake_model import deep_recursion
from fxmem.simulation.model.stop_rule import StopRule
from fxmem.simulation.observe.autograd_engine import AutogradEngine
from fxmem.simulation.observe.event_log import LOSS, OPTIMIZER, StepLog
from fxmem.simulation.observe.fx_tracer import ProgramTracer
from fxmem.simulation.observe.op_cache import CHECK, OpCache
from fxmem.simulation.observe.op_recorder import OpFacts, OpRecorder
from fxmem.simulation.process_guard import process_unchanged
from fxmem.simulation.ranks.collectives import Collectives
from fxmem.simulation.ranks.world import World


class Recording:
    """The observers of one program.

    Make the program's tensors with `fakes`, then `attach` its root module, then run it inside `environment()`, every
    round after a `begin()`.
    """

    _tracer_class = ProgramTracer

    def __init__(self, target: Target, world: World | None = None) -> None:
        self.target = target
        on_card = target.device == "cuda"
        self.device = torch.device(target.device, 0) if on_card else torch.device("cpu")
        self.fakes = self._make_mode()
        convolutions, deterministic = convolution_settings(), is_deterministic()
        self.collector: Collector | CpuCollector = CpuCollector()
        """Of the target's hidden memory."""
        if on_card:
            self.collector = Collector(
                target,
                torch.__version__,
                os.environ,
                convolutions,
                deterministic=deterministic,
                cudnn=chosen_cudnn(),
            )
        self.log = self._make_log()
        self.collectives = Collectives(self.log, world)
        context = (
            target,
            torch.__version__,
            convolutions,
            torch.are_deterministic_algorithms_enabled(),
            deterministic,
            tuple(map(os.environ.get, CUBLAS_VARIABLES)),
            frozenset(flops.torch_formulas().items()),
        )
        cache = OpCache(self.fakes, os.environ.get(CHECK, ""), context)
        self.recorder = self._make_recorder(self.log, self.fakes, self._inspect, self._note_hidden, cache)
        self.stop_rule = StopRule()
        """What a generation is answered where it asks whether its sequences have ended."""
        self.ran_compiled = False
        """Whether the program called something compiled."""
        self.traces_itself = False
        """Whether the program traced a function with make_fx."""

    def _make_mode(self) -> torch_common.FakeTensorMode:
        return torch_common.FakeMode()

    def _make_log(self) -> StepLog:
        return StepLog(self.device)

    def _make_recorder(self, *arguments: Any) -> OpRecorder:
        return OpRecorder(*arguments)

    def attach(self, root: torch.nn.Module) -> None:
        """Trace the calls and the backward of this module."""
        self.root = root
        self.tracer = self._tracer_class(
            root, self.log, replacement=replacement, on_tensor_method=self._note_tensor_method
        )
        self.engine = AutogradEngine(
            self.log,
            around=self.tracer.observe_backward_calls,
            unpacking=self._observe_unpack,
            newest_that_ran=lambda: self.recorder.newest_node,
            streams=self.log.streams,
        )

    def begin(self) -> None:
        """Forget the last round: what is alive now was there before this one."""
        self.log.begin()
        self.collector.begin()
        self.collectives.begin()
        self.tracer.restart()

    def has_left_over(self) -> bool:
        """Whether something that the last round allocated is still alive."""
        return any(self.log.birth[index] > 0 for index in self.log.alive())

    # --- what the program runs inside ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """What the program runs inside; nothing global is left changed.

        Raises:
            AnalysisError: for what the program raises, with advice.
        """
        try:
            with process_unchanged(), self.emulate(), self._observe(), calm_python():
                yield
        except FxmemError:
            raise
        except Exception as error:
            raise explain_error(error, self.root) from error
        finally:
            self.log.close()

    @contextlib.contextmanager
    def emulate(self) -> Iterator[None]:
        """Tensors are fakes on the target's device, and torch chooses the target's kernels."""
        with (
            card_emulation.target_kernels(self.target),
            self.log.streams.patches() if self.target.device == "cuda" else contextlib.nullcontext(),
            known_values.libraries_ask_for_values() as self.ask_libraries,
            self.stop_rule,
            torch_common.patch(torch.utils, "swap_tensors", torch_fakes.make_swap),
            torch_fakes.group_in_python(),
            torch_common.silence_fake_kernels(),
            torch_kernels.views_of_zeros(),
            self.fakes,
        ):
            yield

    @contextlib.contextmanager
    def _observe(self) -> Iterator[None]:
        """Operators, autograd, calls of modules and functions, compiled code and Triton's kernels are observed."""
        flops.torch_formulas()  # imports Triton, whose launches are looked for
        with (
            self.recorder,
            self.engine.route(self._call_function),
            self.tracer.observe_calls(),
            self._observe_compiled(),
            torch_wrappers.observe_traces(self._note_trace),
            torch_triton.observe_launches(self._note_launch),
            torch_distributed.observe_resizes(self.log.resize),
            torch_common.patch(torch, "clear_autocast_cache", self.log.free_in_order),
            torch_common.patch(torch.overrides, "has_torch_function", subclass_ways.takes_own_kernels),
            # `multi_head_attention_forward` is one call to observers; what it calls is looked up there.
            torch_common.patch(torch.nn.functional, "linear", lambda _: subclass_ways.linear),
        ):
            yield

    def _observe_compiled(self) -> contextlib.AbstractContextManager[None]:
        """What compiled code is run inside: here as the eager code it was made from."""
        return torch_wrappers.run_compiled_as_eager(self._note_compiled)

    def _call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        return self.tracer.call_function(cls, args, apply)

    @contextlib.contextmanager
    def _observe_unpack(self) -> Iterator[None]:
        with self.tracer.observe_backward_calls(), self.log.observe_recomputation():
            yield

    def prepare(self, model: torch.nn.Module) -> None:
        """Change the model before it is sharded; eager code stays as it is."""

    def wrap(self, model: torch.nn.Module) -> Any:
        """What the step calls in the place of the model."""
        return model

    def observe_run(self) -> contextlib.AbstractContextManager[None]:
        """What one run of the step is inside."""
        return contextlib.nullcontext()

    def describe(self) -> CompileRecord | None:
        """How the step was compiled; None for eager code."""
        return None

    # --- what the observers report ------------------------------------------------------------------------------------

    def _inspect(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpFacts:
        if self.collectives.look(name, args, kwargs, result):
            moved = flops.moved_bytes(func, args, kwargs, result)
            return OpFacts(0, moved, hidden=self._look_at_gradients(name, args, kwargs))
        return OpFacts(
            flops.op_flops(func, args, kwargs, result),
            flops.moved_bytes(func, args, kwargs, result),
            flops.host_bytes(name, args, result),
            self._look(func, name, args, kwargs, result),
        )

    def _look_at_gradients(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen | None:
        """What hides where FSDP2 copies gradients into the buffer that it reduces."""
        memory = copy_in_memory(name, args, kwargs.get("out"), on_card=isinstance(self.collector, Collector))
        return None if memory is None else Seen(name, multiplies=False, multiplies_lt=False, memory=memory)

    def _look(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Seen | None:
        """What a call hides, with what the operators hide that its kernel calls."""
        seen = self.collector.look(name, args, result)
        if seen is not None and seen.memory is not None:
            return seen
        calls = [seen] if seen is not None else []

        def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> HiddenMemory | None:
            inner = self._look(func, str(func), args, kwargs, result)
            calls.extend([inner] if inner is not None else [])
            return None if inner is None else inner.memory

        memory = inner_memory(func, args, kwargs, self.fakes, self.device.type, look)
        if memory is None and not calls:
            return None
        return Seen(
            name,
            multiplies=any(call.multiplies for call in calls),
            multiplies_lt=any(call.multiplies_lt for call in calls),
            memory=memory,
        )

    def _note_hidden(self, index: int, hidden: Any, phase: Phase) -> None:
        self.collector.saw(index, hidden, phase, self.log.ops[index].stream)

    def _note_launch(self, kernel: str, arguments: tuple[Any, ...]) -> None:
        for tensor in torch_common.iterate_tensors(arguments):
            known_values.forget(tensor)
        self.log.note_call(f"triton.{kernel}", flops.size_of_tensors(arguments))

    def _note_compiled(self) -> None:
        self.ran_compiled = True

    def _note_trace(self) -> None:
        self.traces_itself = True

    def _note_tensor_method(self, name: str, tensor: torch.Tensor) -> None:
        hooks = self.engine.hooks
        (hooks.note_tensor_hook if name == "register_hook" else hooks.note_retain_grad)(tensor)


@dataclasses.dataclass(frozen=True)
class FakeRun:
    """A step that has been run on FakeTensors, and the recording of it."""

    name: str
    notes: tuple[str, ...]
    """How the model was built."""
    step: Step
    model: torch.nn.Module
    """The fake one."""
    inputs: tuple[tuple[str, torch.Tensor], ...]
    optimizer: torch.optim.Optimizer | None
    recording: Recording
    cycles: int
    """Storages that only Python's garbage collector freed."""
    is_program: bool = False
    """Whether this is a round of a program, and not the step of a model."""
    labels: str | None = None
    """What is taken for granted of labels that were made for the loss."""
    missing_loss: tuple[str, int] = ("", 0)
    """What a loss would add to a step without one, in words and bytes; empty where one was given."""

    @property
    def log(self) -> StepLog:
        """The storages and operators of the step."""
        return self.recording.log

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The nodes of the traced graph."""
        return self.recording.tracer.nodes

    def row(self, node: int) -> int:
        """Index in `Profile.nodes` of a node of the log: two rows follow the graph's, loss and optimizer."""
        return node if node >= 0 else {LOSS: len(self.nodes), OPTIMIZER: len(self.nodes) + 1}[node]


def replacement(function: Any) -> Callable[..., Any] | None:
    """What to run instead of a torch function, for the target's kernels or for values; None for every other."""
    return next(
        (found for module in (card_emulation, subclass_ways, known_values) if (found := module.replacement(function))),
        None,
    )


@contextlib.contextmanager
def calm_python() -> Iterator[None]:
    """Allow deep models, and silence the program's warnings and the garbage collector. A real run collects at no fixed
    moment."""
    with deep_recursion(), warnings.catch_warnings(), freeze_gc(), pause_gc():
        warnings.simplefilter("ignore")  # the program's own warnings are about a run that is not real
        yield
