"""`CompiledCode`: torch's own compiler at work for a target that is not there, on a whole or part by part.

Dynamo and AOTAutograd trace over FakeTensors of the target, the joint graph's backward runs on fxmem's engine, inductor
writes its wrappers. These then run on FakeTensors: their allocations, their `del` and their boxed arguments give the
lifetimes of the real step. While they run, each operator belongs to a launch, as `CompiledOpRecorder` says.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import kernels as torch_kernels
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem._torch.compiler import timed_choices as torch_timing
from fxmem.errors import EnvironmentLacksError
from fxmem.hardware.catalogue import CATALOGUE
from fxmem.records.parts import CompileRecord, CompileSettings, TimedChoice
from fxmem.records.profile import Kind, Target
from fxmem.records.units import AS_IS, BUDGET_OPTION, TimedQuestion
from fxmem.simulation.kernels import card_emulation
from fxmem.simulation.recording import flops
from fxmem.simulation.recording.compiled.tracer import KernelTracer
from fxmem.simulation.recording.observe.autograd_engine import AutogradEngine
from fxmem.simulation.recording.observe.observer import Observer
from fxmem.simulation.recording.observe.op_recorder import OpRecorder, Run
from fxmem.simulation.recording.recording import EagerCode

_SAID: Final = ("triton.cudagraphs", "triton.cudagraph_trees")
"""Options of the program's own that the record has: what CUDA graphs take beside is taken for granted."""


class CompiledCode(EagerCode):
    """What becomes of compiled code where it is compiled.

    Args:
        target: the machine to pretend.
        settings: of the compiler.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """

    compiles = True
    kernels: KernelTracer
    """Who follows the launches."""

    def __init__(self, target: Target, settings: CompileSettings) -> None:
        missing = torch_inductor.require_compiler(target.device)
        if missing:
            raise EnvironmentLacksError(
                f"expected {missing} to analyse a compiled step for {target.name}, and it is not installed: "
                f"pip install {missing} (it comes with torch's CUDA wheel; no GPU is needed)"
            )
        torch_dynamo.load_compiler()
        self._target = target
        self._on_card = target.device == "cuda"
        self._settings = settings
        self._breaks: list[str] = []
        self._timed: Counter[TimedChoice] = Counter()
        self._cuda_graphs: set[int] = set()
        self._random_state: list[torch.Tensor] = []
        self._graph_skips: dict[str, None] = {}
        self._given: dict[str, str] = {}
        self._numbers = torch_dynamo.TracedNumbers()

    def make_recorder(self, *parts: Any) -> OpRecorder:
        """The recorder of operators, some of them for a launch."""
        return CompiledOpRecorder(self, *parts)

    def follows(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator, as it is dispatched, may be for a launch."""
        return True

    @property
    def _options(self) -> dict[str, Any]:
        """What inductor is given for all that it compiles."""
        return {**torch_inductor.mode_options(self._settings.mode), **self._settings.options}

    # --- what surrounds it --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def surroundings(self, empty: Callable[..., torch.Tensor] = torch.empty_strided) -> Iterator[None]:
        """What is compiled runs inside, and leaves neither files nor compiled code behind; `empty` makes buffers."""
        flops.torch_formulas()
        with (
            _quiet_loggers(),
            torch_inductor.own_files(),
            torch_inductor.spare_work(),
            torch_inductor.limit_saved(self._settings.activation_memory_budget),
            torch_inductor.stub_kernels(self.kernels.launched, self._note_wrapper, empty),
            torch_inductor.route_inductor(self.compile),
            torch_dynamo.route_cuda_graphs(self._capture, self._graph_skips.setdefault),
            torch_dynamo.fresh_dynamo(self._breaks.append),
            self._numbers.observe(),
        ):
            yield

    @contextlib.contextmanager
    def answers(self) -> Iterator[None]:
        """What the compiler asks while it compiles is answered for the target."""
        with (
            torch_common.replace(torch.nn.functional, "scaled_dot_product_attention", torch_inductor.SDPA),
            torch_inductor.answer_for_card(self._card_answers()) if self._on_card else contextlib.nullcontext(),
            torch_inductor.fold_on_cpu(),
            torch_inductor.copy_constants(self._note_constant),
            torch_inductor.states_in_tensors(),
            torch_timing.decide_timing(self._timing()),
        ):
            yield

    def _capture(
        self, model: torch_dynamo.Model, static: frozenset[int], written: frozenset[int]
    ) -> torch_dynamo.Model:
        """The graph as its recording allocates: all in the private pool, what may move copied there first.

        Results of an earlier graph are in the pool already, and stay where they are. A graph that writes into what may
        move is not recorded (`check_for_mutation` of torch/_inductor/cudagraph_utils.py).
        """

        def run(inputs: list[Any]) -> Any:
            kernels = self.kernels
            if any(not kernels.is_in_graph_pool(inputs[i]) for i in written - static):
                self._graph_skips.setdefault("it writes into an input that may move")
                return model(inputs)
            self._cuda_graphs.add(id(model))
            self._random_state = self._random_state or kernels.make_random_state()
            with self.recording.log.streams.graph_pool():
                tensors = [i for i, each in enumerate(inputs) if isinstance(each, torch.Tensor) and i not in static]
                kernels.copy_inputs(inputs, [i for i in tensors if not kernels.is_in_graph_pool(inputs[i])])
                return model(inputs)

        return run

    def _note_constant(self, copy: torch.Tensor) -> None:
        """Note the copy on the card of a constant that a graph was compiled with."""
        self.recording.log.resident(copy, Kind.BUFFER, "constant of a compiled graph")

    def _note_wrapper(self, wrapper: torch_inductor.Wrapper) -> None:
        self.kernels.wrappers[wrapper.path] = wrapper

    def _timing(self) -> torch_timing.Timing:
        def decide(question: TimedQuestion, what: str, offered: tuple[str, ...]) -> str:
            """The settings' answer, or the first."""
            answer = self._settings.answers.get(question)
            taken = answer if answer in offered else offered[0]
            others = tuple(each for each in offered if each != taken)
            self._timed[TimedChoice(question=question, what=what, taken=taken, others=others)] += 1
            return taken

        return torch_timing.Timing(
            pads=lambda what: decide("padding", f"pad_mm: {what}", ("not padded", "padded")) == "padded",
            choose_kernel=lambda what, kinds: decide("kernel", what, kinds),
            fuses=lambda what: decide("fusion", f"fusion of {what}", ("fused", "not fused")) == "fused",
        )

    def _card_answers(self) -> torch_inductor.CardAnswers:
        properties = torch.cuda.get_device_properties(0)
        card = CATALOGUE.get(self._target.name)
        rates = None if card is None else card.rates
        if rates is None:
            return torch_inductor.CardAnswers(properties)
        return torch_inductor.CardAnswers(
            properties,
            lambda dtype: (rates.half if dtype in (torch.float16, torch.bfloat16) else rates.fp32) / 1e12,
            rates.bandwidth / 1e9,
        )

    # --- compiling ----------------------------------------------------------------------------------------------------

    def compile_module(self, model: torch.nn.Module, options: dict[str, Any]) -> Any:
        """The model as `torch.compile` returns it."""

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:  # a function, because Lightning copies what it is
            return self.compile(graph, inputs, options)

        return torch.compile(model, backend=backend, dynamic=self._settings.dynamic)

    def compile(self, graph: torch.fx.GraphModule, inputs: Any, options: dict[str, Any]) -> Any:
        """Compile a graph, as inductor's backend for dynamo.

        On a card's host nothing is pretended: a graph of the host's tensors alone runs as it was written.
        """
        if self._on_card and _is_on_host(graph):
            return graph
        self._numbers.note(graph)
        self._given |= {name: repr(options[name]) for name in _SAID if options.get(name)}
        if not self._on_card:
            return torch_inductor.compile_fx(graph, inputs, options)
        attend = card_emulation.attend_on_card
        _replace(graph, torch_inductor.SDPA, attend)
        with torch_common.replace(torch.nn.functional, "scaled_dot_product_attention", attend):
            return torch_inductor.compile_fx(graph, inputs, options)

    def note_numbers(self, *, collects: bool = False) -> None:
        """Log the numbers that dynamo keeps.

        On the CPU they are in the step's own memory. With `collects`, garbage is collected before; in a round of a
        program, it lives to the round's end.
        """
        if not self._on_card:
            for number in self._numbers.alive(collects=collects):
                self.recording.log.resident(number, Kind.BUFFER, "number in dynamo's graph")

    def describe(self) -> CompileRecord:
        """What came of it."""
        settings = self._settings
        share = settings.activation_memory_budget
        options: dict[str, Any] = settings.options if share is None else {**settings.options, BUDGET_OPTION: share}
        given = self._given if settings.as_is else {}
        return CompileRecord(
            mode=AS_IS if settings.as_is else settings.mode,
            dynamic=settings.dynamic,
            options={**{name: repr(value) for name, value in options.items()}, **given},
            graphs=len(self.kernels.wrappers),
            cuda_graphs=len(self._cuda_graphs),
            cuda_graph_skips=tuple(self._graph_skips),
            breaks=tuple(self._breaks),
            kernels=self.kernels.launches,
            timed=tuple(each.model_copy(update={"count": count}) for each, count in self._timed.items()),
        )


class CompiledOpRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Says which launch of a wrapper an operator is for; dynamo runs compiled code under it.

    Args:
        code: what is compiled.
        further: those of `OpRecorder`.
    """

    def __init__(self, code: CompiledCode, *further: Any) -> None:
        super().__init__(*further)
        self._code = code
        self._run_unplaced: Run = self._run_op
        self._run_op = self._place

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo skips every frame under other dispatch modes (torch/_dynamo/convert_frame.py)."""
        return True

    def _place(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: types.FrameType
    ) -> Any:
        is_apart = func is torch.ops.prim.device.default or self._log.setting_up
        if is_apart or not self._code.follows(func, types, args, kwargs):
            return self._run_unplaced(func, types, args, kwargs, caller)
        tracer, resume = self._code.kernels, torch_dynamo.pause_tracing()
        try:
            call = tracer.place(caller)
            tracer.begin_op(call)
            result = self._run_unplaced(func, types, args, kwargs, caller)
            tracer.end_op(call, torch_common.op_name(func), (args, kwargs), result)
        finally:
            resume()
        return result


@contextlib.contextmanager
def differentiate_joint_graphs() -> Iterator[None]:
    """AOTAutograd's backward of a graph that it traces runs on an engine that nothing observes."""
    with AutogradEngine(Observer()).route_backward(), torch_inductor.without_graph_task(lambda: None):
        yield


@contextlib.contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Torch's warnings while it compiles are not logged; graph breaks are in the report.

    What the caller has asked for with TORCH_LOGS is still logged.
    """
    logger = logging.getLogger("torch")
    before = logger.level
    if before in (logging.NOTSET, logging.WARNING):
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _replace(graph: torch.fx.GraphModule, function: Callable[..., Any], stand_in: Callable[..., Any]) -> None:
    """Call `stand_in` in the place of `function`, in the regions of checkpoints as well."""
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and node.target is function:
                    node.target = stand_in
            part.recompile()


def _is_on_host(graph: torch.fx.GraphModule) -> bool:
    """Whether all tensors of dynamo's graph, of which there are some, are the host's."""
    values = torch_common.tree_leaves([node.meta.get("example_value") for node in graph.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"cpu"}


# --- `CompiledModel` --------------------------------------------------------------------------------------------------
# The model of a step is compiled in a first run that is not recorded, and recorded in the second.


class CompiledModel(CompiledCode):
    """A step whose nodes are the launches of its compiled model."""

    streams = None
    is_compiling = True

    def make_tracer(self, root: torch.nn.Module) -> KernelTracer:
        """The tracer that follows the launches of this module."""
        self.recording.nodes.saves_by_launch = True
        self.kernels = KernelTracer(root, self.recording.nodes)
        return self.kernels

    def wrap(self, model: torch.nn.Module) -> Any:
        """The compiled model, which the step calls in the place of the model."""
        if not self._settings.as_is:
            return _Root(model, self.compile_module(model, self._options), self)
        called: Any = model
        for path, chosen in self._settings.parts.items():
            if not path:
                called = self.compile_module(model, chosen or {})
            else:
                backend = functools.partial(self.compile, options=chosen or {})
                torch_dynamo.compile_part(model.get_submodule(path), backend, in_place=chosen is None)
        return _Root(model, called, self)

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """The compiler's surroundings; operators are observed in `observe_run`."""
        with self.answers(), self.surroundings():
            yield

    @contextlib.contextmanager
    def observe_run(self) -> Iterator[None]:
        """The first run compiles, and nothing is recorded; later ones are."""
        recording, log = self.recording, self.recording.log
        if self.is_compiling:
            with (
                differentiate_joint_graphs(),
                log.setup(),
                recording.recorder,  # eager code between graphs, and the optimizer's, may ask for known numbers
                torch_dynamo.observe_compiled_calls(lambda: None, lambda: None, self._compile, contextlib.nullcontext),
            ):
                yield
            self.is_compiling = False
            self.note_numbers(collects=True)
            return
        with (
            recording.recorder,
            recording.engine.route(self.kernels.call_function),
            torch_inductor.without_graph_task(recording.engine.release_unpacked),
            torch_kernels.observe_launches(recording.on_launch, recording.packages.timed.add),
            torch_common.patch(torch, "clear_autocast_cache", log.free_in_order),
        ):
            yield

    @contextlib.contextmanager
    def _compile(self) -> Iterator[None]:
        """Dynamo traces, and nothing follows what it calls."""
        with torch_common.no_modes(), self.recording.fakes:
            yield

    def observe_recomputation(self) -> contextlib.AbstractContextManager[None]:
        """What a compiled graph recomputes is in the graph."""
        return contextlib.nullcontext()


class _Root:
    """The compiled model as the step calls it."""

    def __init__(self, model: torch.nn.Module, compiled: Callable[..., Any], compilation: CompiledModel) -> None:
        self._model, self._compiled, self._compilation = model, compiled, compilation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compilation.is_compiling:
            return self._compiled(*args, **kwargs)
        return self._compilation.kernels.call_root(self._compiled, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none=set_to_none)
