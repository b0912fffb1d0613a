"""`CompiledRecording`: a step is compiled in a first run that is not recorded, and recorded in the second.

Dynamo and AOTAutograd trace the model over FakeTensors of the target, the joint graph's backward runs on fxmem's
engine, inductor writes its wrappers. The second run calls these wrappers, on FakeTensors: their allocations, their
`del` and their boxed arguments give the lifetimes of the real step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import triton as torch_triton
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.errors import EnvironmentLacksError
from fxmem.hardware.cards import CATALOGUE
from fxmem.records.names import AS_IS, BUDGET_OPTION
from fxmem.records.parts import CompileRecord, CompileSettings, TimedChoice
from fxmem.records.profile import Target
from fxmem.simulation import flops
from fxmem.simulation.compiled.tracer import KernelTracer
from fxmem.simulation.kernels import card_emulation
from fxmem.simulation.observe.autograd_engine import AutogradEngine
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.observe.op_recorder import OpRecorder
from fxmem.simulation.observers import Recording


class CompiledRecording(Recording):
    """The observers of a compiled step.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """

    def __init__(self, target: Target, settings: CompileSettings) -> None:
        self._settings = settings
        missing = torch_inductor.require_compiler(target.device)
        if missing:
            raise EnvironmentLacksError(
                f"expected {missing} to analyse a compiled step for {target.name}, and it is not installed: "
                f"pip install {missing} (it comes with torch's CUDA wheel; no GPU is needed)"
            )
        super().__init__(target)
        self.graphs = 0
        self.breaks: list[str] = []
        self.timed: Counter[str] = Counter()
        self._compiling = True

    def _make_log(self) -> StepLog:
        return _CompiledLog(self.device)

    def _make_recorder(self, *arguments: Any) -> OpRecorder:
        return _CompiledRecorder(self, *arguments)

    def attach(self, root: torch.nn.Module) -> None:
        """Follow the launches of this module."""
        self.root = root
        self.kernels = KernelTracer(root, self.log)
        self.tracer: Any = self.kernels
        self.engine = AutogradEngine(self.log, newest_that_ran=lambda: self.recorder.newest_node)

    def wrap(self, model: torch.nn.Module) -> Any:
        """The compiled model, which the step calls in the place of the model."""
        settings = self._settings
        if not settings.as_is:
            options = {**torch_inductor.mode_options(settings.mode), **settings.options}
            return _Root(model, self._compile_module(model, options), self)
        called: Any = model
        for path, chosen in settings.parts.items():
            if not path:
                called = self._compile_module(model, chosen or {})
            else:
                backend = functools.partial(self._compile, options=chosen or {})
                torch_dynamo.compile_part(model.get_submodule(path), backend, in_place=chosen is None)
        return _Root(model, called, self)

    def _compile_module(self, model: torch.nn.Module, options: dict[str, Any]) -> Any:
        backend = functools.partial(self._compile, options=options)
        return torch.compile(model, backend=backend, dynamic=self._settings.dynamic)

    def describe(self) -> CompileRecord:
        """What came of it."""
        padded = "padded" if self._settings.pads else "not padded"
        return CompileRecord(
            mode=AS_IS if self._settings.as_is else self._settings.mode,
            dynamic=self._settings.dynamic,
            options={name: repr(value) for name, value in self._list_options().items()},
            graphs=len(self.kernels.wrappers),
            breaks=tuple(self.breaks),
            kernels=self.kernels.launches,
            timed=tuple(
                TimedChoice(what=f"pad_mm: {what}", taken=padded, count=count) for what, count in self.timed.items()
            ),
        )

    def _list_options(self) -> dict[str, Any]:
        share = self._settings.activation_memory_budget
        return self._settings.options if share is None else {**self._settings.options, BUDGET_OPTION: share}

    # --- what the step runs inside ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _observe(self) -> Iterator[None]:
        """The compiler's surroundings; operators are observed in `observe_run`."""
        flops.torch_formulas()
        with (
            torch_inductor.own_files(),
            torch_inductor.limit_saved(self._settings.activation_memory_budget),
            torch_common.patch(torch.nn.functional, "scaled_dot_product_attention", lambda _: torch_inductor.SDPA),
            torch_inductor.answer_for_card(self._card_answers())
            if self.target.device == "cuda"
            else contextlib.nullcontext(),
            torch_inductor.stub_kernels(self.kernels.launched, self._note_wrapper),
            torch_inductor.fold_on_cpu(),
            torch_inductor.route_inductor(self._compile),
            torch_inductor.decide_padding(self._decide_padding),
            torch_dynamo.fresh_dynamo(self.breaks.append),
        ):
            yield

    @contextlib.contextmanager
    def observe_run(self) -> Iterator[None]:
        """The first run compiles, and nothing is observed; later ones are recorded."""
        if self._compiling:
            engine = AutogradEngine(_Nobody())
            with engine.route_backward(), torch_inductor.without_graph_task(lambda: None):
                yield
            self._compiling = False
            return
        with (
            self.recorder,
            self.engine.route(self.tracer.call_function),
            torch_inductor.without_graph_task(self.engine.release_unpacked),
            torch_triton.observe_launches(self._note_launch),
            torch_common.patch(torch, "clear_autocast_cache", self.log.free_in_order),
        ):
            yield

    @property
    def is_compiled(self) -> bool:
        """Whether the run that compiles is over."""
        return not self._compiling

    # --- the compiler -------------------------------------------------------------------------------------------------

    def _compile(self, graph: torch.fx.GraphModule, inputs: Any, options: dict[str, Any]) -> Any:
        options = {**options, "triton.cudagraphs": False}
        with contextlib.ExitStack() as stack:
            if self.target.device == "cuda":
                attend = card_emulation.attend_on_card
                for node in graph.graph.nodes:
                    if node.op == "call_function" and node.target is torch_inductor.SDPA:
                        node.target = attend
                graph.recompile()
                stack.enter_context(
                    torch_common.patch(torch.nn.functional, "scaled_dot_product_attention", lambda _: attend)
                )
            return torch_inductor.compile_fx(graph, inputs, options)

    def _note_wrapper(self, wrapper: torch_inductor.Wrapper) -> None:
        self.kernels.wrappers[wrapper.path] = wrapper

    def _decide_padding(self, what: str) -> bool:
        self.timed[what] += 1
        return self._settings.pads

    def _card_answers(self) -> torch_inductor.CardAnswers:
        properties = torch.cuda.get_device_properties(0)
        card = CATALOGUE.get(self.target.name)
        rates = None if card is None else card.rates

        if rates is None:
            return torch_inductor.CardAnswers(properties)
        return torch_inductor.CardAnswers(
            properties,
            lambda dtype: (rates.half if dtype in (torch.float16, torch.bfloat16) else rates.fp32) / 1e12,
            rates.bandwidth / 1e9,
        )


class _Root:
    """The compiled model as the step calls it."""

    def __init__(self, model: torch.nn.Module, compiled: Callable[..., Any], recording: CompiledRecording) -> None:
        self._model, self._compiled, self._recording = model, compiled, recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._recording.is_compiled:
            return self._compiled(*args, **kwargs)
        return self._recording.kernels.call_root(self._compiled, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none=set_to_none)


class _CompiledLog(StepLog):
    """A storage that autograd saves belongs to the launch that made it: a whole graph is one node of autograd."""

    def on_save(self, value: Any, handle: weakref.ref[Any]) -> None:
        for tensor in torch_common.iterate_tensors(value):
            index = self.note_storage(tensor)
            node = None if index is None else self.node_of[index]
            if node is None:
                continue
            before = self.current_call()
            self.resume_call(node)
            super().on_save(tensor, handle)
            self.resume_call(before)


class _CompiledRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Says which launch of a wrapper an operator is for; dynamo runs compiled code under it."""

    _frames_to_caller = 2

    def __init__(self, recording: CompiledRecording, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recording = recording

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo skips every frame under other dispatch modes (torch/_dynamo/convert_frame.py)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default or self._log.setting_up:
            return super().__torch_dispatch__(func, types, args, kwargs)
        tracer = self._recording.kernels
        call = tracer.place(sys._getframe(1))
        tracer.begin_op(call)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tracer.end_op(call, torch_common.op_name(func), (args, kwargs), result)
        return result


class _Nobody:
    """An observer of autograd to which nothing matters."""

    def on_save(self, value: Any, handle: Any) -> None:
        """See `AutogradObserver`."""

    def on_unpack(self, tensor: torch.Tensor) -> None:
        """See `AutogradObserver`."""

    def on_backward_node(self, sequence_number: int) -> None:
        """See `AutogradObserver`."""
