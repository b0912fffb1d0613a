"""`Recording`: code runs on FakeTensors as it would on the target, and everything it does is observed.

It is composed of parts, each in a module of its own: FakeTensors on the target's device, the kernels the target would
choose, the autograd engine, the tracer that writes the graph, the recorder of operators, the log of every allocation
and free. Two of them vary: the `Subject` is what is recorded, and `EagerCode` or one of its kind what becomes of what
that compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TextIO

import torch
import torch.fx

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import kernels as torch_kernels
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.wrappers import fakes_have_nested_ints
from fxmem.errors import FxmemError
from fxmem.hardware.workspaces import CUBLAS_VARIABLES, Collector, CpuCollector, HiddenMemory, Seen, copy_in_memory
from fxmem.records.parts import CompileRecord, EngineUse
from fxmem.records.pause_gc import freeze_gc, pause_gc
from fxmem.records.profile import Phase, Step, Target
from fxmem.simulation.asked import known_values
from fxmem.simulation.asked.checks import StopRule
from fxmem.simulation.asked.values import Values
from fxmem.simulation.kernels import card_emulation, subclass_ways
from fxmem.simulation.kernels.inner_ops import inner_memory
from fxmem.simulation.kernels.kernel_settings import asked_cudnns, convolution_settings, is_deterministic
from fxmem.simulation.kernels.streams import Streams
from fxmem.simulation.kernels.subclass_ways import StandInModules
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.ranks.mailbox import World
from fxmem.simulation.recording import flops
from fxmem.simulation.recording.collectives import Collectives
from fxmem.simulation.recording.error_advice import explain_error
from fxmem.simulation.recording.observe.autograd_engine import AutogradEngine
from fxmem.simulation.recording.observe.event_log import LOSS, OPTIMIZER, StepLog
from fxmem.simulation.recording.observe.fx_tracer import Listener, ProgramTracer
from fxmem.simulation.recording.observe.node_ledger import NodeLedger
from fxmem.simulation.recording.observe.observer import Observer, PendingCall
from fxmem.simulation.recording.observe.op_cache import CHECK, OpCache, OpFacts
from fxmem.simulation.recording.observe.op_recorder import OpRecorder, Route

# --- `OpInspector`: FLOPs, bytes moved, and the memory that no tensor shows, of each call of an operator --------------


class OpInspector:
    """Inspects the calls of one program.

    Args:
        collector: of the target's hidden memory.
        collectives: told of each call that communicates.
        fakes: the mode the program runs in.
        device_type: of the target.
    """

    def __init__(
        self,
        collector: Collector | CpuCollector,
        collectives: Collectives,
        fakes: torch_common.FakeTensorMode,
        device_type: str,
    ) -> None:
        self._collector = collector
        self._collectives = collectives
        self._fakes = fakes
        self._device_type = device_type

    def inspect(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpFacts:
        """The facts of a call that gave `result`."""
        moved = flops.moved_bytes(func, args, kwargs, result)
        if self._collectives.note_call(name, args, kwargs, result):
            # Memory hides where FSDP2 copies gradients into the buffer that it reduces.
            memory = copy_in_memory(name, args, kwargs.get("out"), on_card=isinstance(self._collector, Collector))
            seen = None if memory is None else Seen(name, multiplies=False, multiplies_lt=False, memory=memory)
            return OpFacts(0, moved, hidden=seen)
        counted, host = flops.op_flops(func, args, kwargs, result), flops.host_bytes(name, args, result)
        return OpFacts(counted, moved, host, self._look(func, name, args, kwargs, result))

    def _look(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Seen | None:
        """What a call hides, with what the operators hide that its kernel calls."""
        seen = self._collector.find_hidden(name, args, result)
        if seen is not None and seen.memory is not None:
            return seen
        calls = [seen] if seen is not None else []

        def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> HiddenMemory | None:
            inner = self._look(func, str(func), args, kwargs, result)
            calls.extend([inner] if inner is not None else [])
            return None if inner is None else inner.memory

        memory = inner_memory(func, args, kwargs, self._fakes, self._device_type, look)
        if memory is None and not calls:
            return None
        multiplies, multiplies_lt = any(call.multiplies for call in calls), any(call.multiplies_lt for call in calls)
        call = seen.call if seen is not None and memory is None else None
        return Seen(name, multiplies=multiplies, multiplies_lt=multiplies_lt, memory=memory, call=call)


# --- the recording ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run that is over: what was observed, and what its subject says of it."""

    recording: Recording
    name: str
    step: Step
    model: torch.nn.Module
    """The fake one."""
    notes: tuple[str, ...] = ()
    """How the model was built."""
    inputs: tuple[tuple[str, torch.Tensor], ...] = ()
    optimizer: torch.optim.Optimizer | None = None
    replaced: tuple[tuple[int, int], ...] = ()
    """When the loop's variables let go of what they held, and its bytes."""
    cycles: int = 0
    """Storages that only Python's garbage collector freed."""
    is_program: bool = False
    """Whether this is a round of a program, and not the step of a model."""
    engines: tuple[EngineUse, ...] = ()
    """Serving engines that it starts."""
    rollouts: tuple[str, ...] = ()
    """What of a program's calls of `generate` was made by arithmetic, and why not more."""
    labels: str | None = None
    """What is taken for granted of labels that were made for the loss."""
    missing_loss: tuple[str, int] = ("", 0)
    """What a loss would add to a step without one, in words and bytes; empty where one was given."""

    @property
    def log(self) -> StepLog:
        """The storages and operators of the run."""
        return self.recording.log

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The nodes of the traced graph."""
        nodes: list[torch.fx.Node] = self.recording.tracer.nodes
        return nodes

    def row(self, node: int) -> int:
        """Index in `Profile.nodes` of a node of the log: two rows follow the graph's, loss and optimizer."""
        return node if node >= 0 else {LOSS: len(self.nodes), OPTIMIZER: len(self.nodes) + 1}[node]


def device_of(target: Target) -> torch.device:
    """The device whose memory is counted."""
    return torch.device(target.device, 0) if target.device == "cuda" else torch.device("cpu")


class Subject(Observer):
    """What a recording is of, and how it differs from others. The defaults are those of a step of a model.

    A recording asks it for parts (`make_mode`, `make_log`, `make_tracer`), runs inside its `patches`, forwards what it
    observes, and in the end asks it to `describe` itself.
    """

    compiles_whole = True
    """Whether all of it is compiled in a run of its own, where it is compiled."""
    route: Route | None = None
    """What sees each operator before the recorder does."""

    def __init__(self, values: Values) -> None:
        self.values = values
        """Answers where numbers are needed that no kernel has computed."""
        self.recording: Recording
        """Set by the recording itself."""

    def make_mode(self) -> torch_common.FakeTensorMode:
        """The mode whose tensors it computes with."""
        return torch_common.FakeMode()

    def make_log(self, device: torch.device) -> StepLog:
        """The log of what it allocates."""
        return StepLog(device)

    def make_tracer(self, root: torch.nn.Module, *, writes_anew: bool) -> ProgramTracer:
        """The tracer that writes its graph; `writes_anew` as there."""
        return ProgramTracer(root, self.recording.nodes, self.recording, writes_anew=writes_anew)

    @property
    def output(self) -> TextIO | None:
        """Where its standard output goes; None for standard error."""
        return None

    # --- while it runs ------------------------------------------------------------------------------------------------

    def emulate(self) -> contextlib.AbstractContextManager[None]:
        """What it needs beside the target's kernels wherever its tensors are fakes."""
        return contextlib.nullcontext()

    def patches(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        """What stands in for the rest of the machine."""
        yield from ()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """It runs inside, when all is observed."""
        return contextlib.nullcontext()

    def explain(self, error: Exception) -> Exception:
        """What is raised in the place of an error of its own."""
        return explain_error(error, self.recording.root)

    # --- what compiled code asks --------------------------------------------------------------------------------------

    def find_class(self, path: str) -> type[torch.nn.Module] | None:
        """The class of its module with this path; None for none."""
        return self.recording.classes.get(path)

    def is_targets(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator runs on the target."""
        return True

    def make_buffers(self) -> contextlib.AbstractContextManager[None]:
        """Compiled code makes a buffer of its own inside."""
        return contextlib.nullcontext()

    # --- when it has run ----------------------------------------------------------------------------------------------

    def describe(self) -> FinishedRun:
        """What it was, for the profile."""
        raise NotImplementedError


class EagerCode:
    """Nothing is compiled: what the program compiles runs as the eager code it was made from.

    A recording asks it for its recorder and its tracer, and runs inside its `environment` and its `observe`.
    """

    compiles = False
    """Whether anything is compiled."""
    is_compiling = False
    """Whether the compiler is at work."""

    recording: Recording
    """Set by the recording itself."""

    # --- the parts of the recording -----------------------------------------------------------------------------------

    def make_recorder(self, *parts: Any) -> OpRecorder:
        """The recorder of operators; arguments as there."""
        return OpRecorder(*parts)

    def make_tracer(self, root: torch.nn.Module) -> Any:
        """The tracer that writes the graph of a module's runs."""
        return self.recording.subject.make_tracer(root, writes_anew=False)

    @property
    def streams(self) -> Streams | None:
        """The streams on which backward runs; None where that is no matter."""
        return self.recording.log.streams

    def attach(self) -> None:
        """The recording has its tracer and its engine."""

    def restart(self) -> None:
        """A round begins, and the tracer has a new graph."""

    # --- the step of a model ------------------------------------------------------------------------------------------

    def prepare(self, model: torch.nn.Module) -> None:
        """Change the model before it is sharded."""

    def wrap(self, model: torch.nn.Module) -> Any:
        """What the step calls in the place of the model."""
        return model

    def observe_run(self) -> contextlib.AbstractContextManager[None]:
        """What one run of the step is inside."""
        return contextlib.nullcontext()

    def describe(self) -> CompileRecord | None:
        """What was compiled; None for eager code."""
        return None

    # --- while the program runs ---------------------------------------------------------------------------------------

    def environment(self) -> contextlib.AbstractContextManager[None]:
        """Entered before anything of torch is replaced."""
        return contextlib.nullcontext()

    def observe(self) -> contextlib.AbstractContextManager[None]:
        """What the program does is observed inside."""
        return self.recording.observe_code(torch_wrappers.run_compiled_as_eager(self._note_call))

    def _note_call(self) -> None:
        self.recording.recorder.runs_compiled_as_eager = True

    def call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        """Run an `autograd.Function.apply` that the program calls."""
        return self.recording.tracer.call_function(cls, args, apply)

    def observe_backward(self) -> contextlib.AbstractContextManager[None]:
        """The backward of a compiled graph runs inside."""
        return contextlib.nullcontext()

    def observe_recomputation(self) -> contextlib.AbstractContextManager[None]:
        """An unpack hook of the program runs inside, which recomputes."""
        return self.recording.nodes.observe_recomputation()


class Recording(Observer):
    """The parts that observe one subject.

    Make its tensors with `fakes`, then `attach` its root module, then run it inside `environment()`, every round after
    a `begin()`.

    Args:
        target: the machine to pretend.
        subject: what is recorded.
        world: whose rank it is; None for one that is alone.
        compilation: what becomes of what it compiles.
    """

    def __init__(self, target: Target, subject: Subject, world: World | None, compilation: EagerCode) -> None:
        self.target = target
        self.subject = subject
        self.compilation = compilation
        subject.recording = compilation.recording = self
        self.device = device_of(target)
        self.fakes = subject.make_mode()
        self.collector: Collector | CpuCollector = CpuCollector()
        """Of the target's hidden memory."""
        if target.device == "cuda":
            self.collector = Collector(
                target,
                target.release(torch.__version__),
                os.environ,
                convolution_settings(target),
                deterministic=is_deterministic(),
                cudnns=asked_cudnns(target),
            )
        self.log = subject.make_log(self.device)
        self.nodes = NodeLedger(self.log)
        """For which node of the graph the program works."""
        self.collectives = Collectives(self.log, world)
        cache = OpCache(self.fakes, os.environ.get(CHECK, ""), self._follow_flags)
        inspector = OpInspector(self.collector, self.collectives, self.fakes, self.device.type)
        self.recorder = self.compilation.make_recorder(
            self.log, self.fakes, inspector.inspect, self, cache, subject.values, subject.route
        )
        self.stop_rule = StopRule()
        """What a generation is answered where it asks whether its sequences have ended."""
        self.traces_itself = False
        """Whether the program traced a function with make_fx."""
        self.packages = StandInModules(self.on_kernel)
        """Kernels of other packages that it calls."""
        self.ran_scripted = False
        """Whether the program called a function that TorchScript has compiled."""

    def _follow_flags(self) -> Hashable:
        """What operators look at beside their arguments, as the program has set it by now; the collector is told."""
        convolutions, deterministic = convolution_settings(self.target), is_deterministic()
        self.collector.follow(convolutions, deterministic=deterministic)
        return (
            self.target,
            torch.__version__,
            convolutions,
            torch.are_deterministic_algorithms_enabled(),
            deterministic,
            tuple(map(os.environ.get, CUBLAS_VARIABLES)),
            frozenset(flops.torch_formulas().items()),
        )

    def attach(self, root: torch.nn.Module) -> None:
        """Trace the calls and the backward of this module."""
        self.root = root
        self.classes = {name: type(module) for name, module in root.named_modules()}
        self.tracer: Any = self.compilation.make_tracer(root)
        self.engine = AutogradEngine(self.nodes, self, self.compilation.streams, on_card=self.target.device == "cuda")
        world = self.collectives.world
        self.subject.values.routing.begin((0, 1) if world is None else (world.rank, world.size), self._find_router)
        self.compilation.attach()

    def _find_router(self) -> str | None:
        """The module in which a router may choose experts; None where beams or words are chosen."""
        path = str(self.tracer.path)
        return None if self.log.phase is Phase.ROLLOUT and not path else path

    def begin(self) -> None:
        """Forget the last round: what is alive now was there before this one."""
        if self.tracer.writes_anew:
            self.nodes.results = {}  # of nodes of another graph
        self.log.begin(self.nodes.find_kept(self.engine.find_saved()))
        self.nodes.begin()
        self.collector.begin()
        self.collectives.begin()
        self.subject.values.begin()
        self.tracer.restart()
        self.compilation.restart()

    def count_runs(self) -> int:
        """How many runs a step that has run once still wants, until it is like those that follow.

        One where something that it allocated is still alive. TorchScript runs a function unchanged first, then as it is
        optimized for what came; what comes otherwise is a function of its own to it.
        """
        return 2 if self.ran_scripted else int(any(self.log.storages[index].birth > 0 for index in self.log.alive()))

    # --- what the program runs inside ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """What the subject runs inside; nothing global is left changed.

        Raises:
            What the subject makes of an error of its own.
        """
        subject = self.subject
        try:
            with process_unchanged(subject.output), torch_common.imports_unchanged(), contextlib.ExitStack() as stack:
                stack.enter_context(self.compilation.environment())
                stack.enter_context(self.emulate())
                if self.target.device == "cuda":
                    stack.enter_context(self.packages.installed())
                stack.enter_context(fakes_have_nested_ints())
                for patch in subject.patches():
                    stack.enter_context(patch)
                stack.enter_context(self.compilation.observe())
                stack.enter_context(calm_python())
                stack.enter_context(subject.running())
                yield
        except FxmemError:
            raise
        except Exception as error:
            explained = subject.explain(error)
            if explained is error:
                raise
            raise explained from error
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
            torch_wrappers.follow_flex_attention(self._trace_apart),
            self.fakes,
            self.subject.emulate(),
        ):
            yield

    @contextlib.contextmanager
    def _trace_apart(self) -> Iterator[None]:
        """What runs inside is traced by torch itself, over fakes that are no part of the program."""
        with (
            torch_common.replace(self, "traces_itself", self.traces_itself),
            torch_common.no_modes(),
            torch_common.without_function_modes(Listener),
            self.fakes,
            AutogradEngine(Observer()).route_backward(),
        ):
            yield

    @contextlib.contextmanager
    def observe_code(self, compiled: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Operators, autograd, calls of modules and functions, and Triton's kernels are observed; compiled code runs
        inside `compiled`."""
        flops.torch_formulas()  # imports Triton, whose launches are looked for
        with (
            self.recorder,
            self.engine.route(self.compilation.call_function),
            self.tracer.observe_calls(),
            compiled,
            torch_wrappers.observe_traces(self.on_trace),
            torch_wrappers.observe_scripted(self.on_scripted_call),
            torch_kernels.observe_launches(self.on_launch, self.packages.timed.add),
            torch_distributed.observe_resizes(self.log.resize),
            torch_common.patch(torch, "clear_autocast_cache", self.log.free_in_order),
            torch_common.patch(torch.overrides, "has_torch_function", subclass_ways.takes_own_kernels),
            # `multi_head_attention_forward` is one call to observers; what it calls is looked up there.
            torch_common.patch(
                torch.nn.functional, "linear", lambda own: torch_common.StandIn(subclass_ways.linear, own)
            ),
        ):
            yield

    # --- what the parts report ----------------------------------------------------------------------------------------

    def on_hidden(self, op: int, hidden: Any, phase: Phase) -> None:
        """The kernel of an operator has memory for itself."""
        self.collector.note_seen(op, hidden, phase, self.log.ops[op].stream)
        self.subject.on_hidden(op, hidden, phase)

    def on_launch(self, kernel: str, arguments: tuple[Any, ...]) -> None:
        """The program launches a Triton kernel of its own."""
        for tensor in torch_common.iterate_tensors(arguments):
            known_values.forget(tensor)
        self.log.note_call(f"triton.{kernel}", flops.size_of_tensors(arguments))

    def on_kernel(self, kernel: str, count: int | None, values: Any) -> None:
        """The program has called a kernel of another package, or asked it something, which takes no tensors."""
        tensors = list(torch_common.iterate_tensors(values))
        for tensor in tensors:
            known_values.forget(tensor)
        if tensors:
            self.log.note_call(kernel, flops.size_of_tensors(values), count)

    def on_compiled_call(self) -> None:
        """The program calls compiled code."""
        self.subject.on_compiled_call()

    def on_scripted_call(self) -> None:
        """The program calls a function that TorchScript has compiled."""
        self.ran_scripted = True

    def on_trace(self) -> None:
        """The program traces a function with make_fx."""
        self.traces_itself |= not self.compilation.is_compiling

    def on_tensor_method(self, name: str, tensor: torch.Tensor) -> None:
        """The program called `Tensor.register_hook` or `Tensor.retain_grad`."""
        hooks = self.engine.hooks
        (hooks.note_tensor_hook if name == "register_hook" else hooks.note_retain_grad)(tensor)

    def on_module_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module of the program is about to be called, within no other."""
        self.ask_libraries()  # which the program may have imported since it began
        self.stop_rule.install()
        self.subject.on_module_call(module, args, kwargs)

    def run_module(self, call: PendingCall) -> Any:
        """Let the subject run it."""
        return self.subject.run_module(call)

    def on_torch_call(self) -> None:
        """The program calls torch, outside of modules, as it does before it calls a library's `generate`."""
        self.stop_rule.install()
        self.subject.on_torch_call()

    def on_gradient(self) -> None:
        """A call outside every node returned a tensor that a gradient leads to."""
        self.subject.on_gradient()

    def find_replacement(self, function: Any) -> Callable[..., Any] | None:
        """What to run in the place of a torch function: for the program, for the target's kernels, or for values."""
        owners = (card_emulation, subclass_ways, known_values)
        own = self.subject.find_replacement(function)
        return own or next((found for owner in owners if (found := owner.replacement(function))), None)

    def takes_backward(self, roots: Sequence[Any]) -> bool:
        """Whether a backward from these roots is observed."""
        return self.subject.takes_backward(roots)

    def observe_backward(
        self, roots: Sequence[Any], *, accumulates: bool, is_inner: bool
    ) -> contextlib.AbstractContextManager[None]:
        """A backward runs inside."""
        return self.subject.observe_backward(roots, accumulates=accumulates, is_inner=is_inner)

    @contextlib.contextmanager
    def observe_backward_function(self) -> Iterator[None]:
        """A function of the program that backward calls runs inside."""
        with self.tracer.observe_backward_calls(), torch_common.replace(self.log.reads, "in_function", True):
            yield

    def observe_compiled_backward(self) -> contextlib.AbstractContextManager[None]:
        """The backward of a compiled graph, which calls nothing of the program, runs inside."""
        return self.compilation.observe_backward()

    @contextlib.contextmanager
    def observe_unpack(self) -> Iterator[None]:
        """An unpack hook of the program runs inside."""
        with self.tracer.observe_backward_calls(), self.compilation.observe_recomputation():
            yield

    def newest_node_that_ran(self) -> int:
        """The number of autograd's newest node when an operator ran last."""
        return self.recorder.newest_node


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Nested modules may go as deep as in a run of their own: between two of their frames lie several of ours, or of
    `copy.deepcopy`'s."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(4 * limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextlib.contextmanager
def calm_python() -> Iterator[None]:
    """Allow deep models, and silence the program's warnings and the garbage collector. A real run collects at no fixed
    moment."""
    with deep_recursion(), warnings.catch_warnings(), freeze_gc(), pause_gc():
        warnings.simplefilter("ignore")  # the program's own warnings are about a run that is not real
        yield
