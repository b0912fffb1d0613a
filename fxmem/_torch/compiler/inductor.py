"""Private names of torch's compiler: what asks the card, what builds and launches kernels, where files go.

Inductor writes a Python module for each graph, the *wrapper*, which allocates buffers and launches kernels. Dynamo,
AOTAutograd, the partitioner and inductor run unmodified here. Kernels are neither built nor launched, and what the
compiler asks of the card is answered for one that is not there.

Checked on torch 2.11.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import linecache
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.common import nested, patch, replace_all, restored, set_environment, wrap
from fxmem._torch.compiler.timed_choices import UnknownRateError

OWN_FILES: Final = os.path.join(tempfile.gettempdir(), "fxmem-inductor-")
"""How the names of the files begin that inductor writes for fxmem."""
SDPA: Final[Callable[..., Any]] = torch._C._nn.scaled_dot_product_attention
"""What dynamo's graph calls for `torch.nn.functional.scaled_dot_product_attention` (since 2.0)."""


class Origin(NamedTuple):
    """The operator of the user's program that a kernel computes last."""

    module: str = ""
    """Path of the module; empty where it is not known."""
    file: str = ""
    line: int = 0
    function: str = ""


class KernelCall(NamedTuple):
    """A launch that a wrapper makes."""

    name: str
    """Inductor's name, or that of the extern kernel."""
    origin: Origin


class Wrapper:
    """A module that inductor wrote for one graph, with the kernel of each line."""

    def __init__(self, path: str, text: str, line_map: list[tuple[int, Any]], *, is_backward: bool) -> None:
        self.path = path
        self.is_backward = is_backward
        lines = text.splitlines()
        self._starts = [start for start, _ in line_map]
        ends = [*self._starts[1:], len(lines) + 1][: len(self._starts)]  # of a graph that launches nothing, none
        self._calls = [
            KernelCall(_kernel_name("\n".join(lines[start - 1 : end - 1])), _origin(node))
            for (start, node), end in zip(line_map, ends, strict=True)
        ]

    def find_call(self, line: int) -> KernelCall | None:
        """The kernel that a line is for; None where the wrapper launches none."""
        position = max(bisect.bisect_right(self._starts, line) - 1, 0)
        return self._calls[position] if self._calls else None


_LAUNCHES: Final = re.compile(
    r"(?:= |^ *)(?:(\w+)\.run\(|(?:extern_kernels|torch\.ops)\.([\w.]+)\(|(cpp_fused\w*|cpp_\w+)\()", re.MULTILINE
)


def _kernel_name(text: str) -> str:
    found = _LAUNCHES.search(text)
    if found is None:
        return "wrapper"
    return found[2].removesuffix(".default") if found[2] else found[1] or found[3]


_TRACE: Final = re.compile(r'File "(.+)", line (\d+), in (.+)')


def _origin(node: Any) -> Origin:
    """Module and line of a node of AOTAutograd's graph (`node.meta`: `nn_module_stack`, in backward
    `fwd_nn_module_stack`, and `stack_trace`)."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    frames = _TRACE.findall(node.meta.get("stack_trace") or "")
    file, line, function = frames[-1] if frames else ("", "0", "")
    return Origin(_module_path(path), file, int(line), function)


def _module_path(path: str) -> str:
    """`layers.0.linear` of dynamo's `L['self']._modules['layers']...` and its like."""
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"(?:\._modules)?\['?([\w]+)'?\]", r".\1", path)
    path = re.sub(r"getattr\((.*), '?(\w+)'?\)", r"\1.\2", path)
    return path.removeprefix("_orig_mod").strip(".")


# --- kernels that are not built ---------------------------------------------------------------------------------------


class StubKernel:
    """A kernel that inductor wrote, which reports its launches and does nothing else.

    Called as a wrapper calls them: `kernel.run(...)` for Triton's, `kernel(...)` for C++.
    """

    def __init__(self, name: str, outputs: tuple[int, ...], launched: Callable[..., None]) -> None:
        self.name = name
        self.outputs = outputs
        """Positions of the arguments that it writes."""
        self._launched = launched

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Report a launch."""
        self._launched(self, args)

    __call__ = run

    def __getitem__(self, grid: Any) -> StubKernel:
        return self


_TRITON_SIGNATURE: Final = re.compile(r"^def \w+\(([^)]*)\):", re.MULTILINE)


def _triton_outputs(source: str) -> tuple[int, ...]:
    """Positions of the arguments that a Triton kernel of inductor's writes: `out_ptr0`, `in_out_ptr0`."""
    found = _TRITON_SIGNATURE.search(source)
    names = [] if found is None else [name.partition(":")[0].strip() for name in found[1].split(",")]
    return tuple(i for i, name in enumerate(names) if name.startswith(("out_ptr", "in_out_ptr")))


def _cpp_outputs(types: list[str]) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(types) if "*" in each and not each.startswith("const"))


# --- the compiler's surroundings --------------------------------------------------------------------------------------


def require_compiler(device_type: str) -> str:
    """What is missing here to run the compiler for a device; empty if nothing is."""
    if not hasattr(torch, "compile"):
        return "torch.compile"
    return "triton" if device_type == "cuda" and importlib.util.find_spec("triton") is None else ""


@contextlib.contextmanager
def own_files() -> Iterator[None]:
    """Inductor's and Triton's files go into a folder of their own, which is removed; none is read.

    `torch._inductor.config.force_disable_caches` (since 2.5); `TORCHINDUCTOR_CACHE_DIR` and `TRITON_CACHE_DIR` are
    what `cache_dir()` of torch/_inductor/runtime/cache_dir_utils.py and triton/knobs.py read, and the former sets.
    """
    from torch._inductor import codecache, config

    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    code = codecache.PyCodeCache
    loaded = set(sys.modules)
    parent, prefix = os.path.split(OWN_FILES)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder:
        try:
            with (
                restored(code.modules, code.modules_no_attr, code.linemaps),
                set_environment(dict.fromkeys(names, folder)),
                config.patch(force_disable_caches=True, compile_threads=1),
            ):
                yield
        finally:
            for name in set(sys.modules) - loaded:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                    del sys.modules[name]
            for file in [file for file in linecache.cache if file.startswith(folder)]:
                del linecache.cache[file]


def stub_kernels(
    launched: Callable[[StubKernel, tuple[Any, ...]], None],
    wrote: Callable[[Wrapper], None],
    make_buffer: Callable[..., torch.Tensor] = torch.empty_strided,
) -> AbstractContextManager[None]:
    """Kernels are neither built nor launched, and wrappers run on FakeTensors, which `make_buffer` makes.

    `AsyncCompile` (since 2.0) builds kernels. Wrappers look up `torch._C._dynamo.guards._empty_strided_*`,
    `_reinterpret_tensor`, `assert_size_stride` (since 2.1) and `assert_alignment` (since 2.8) when they are imported;
    those are C++ that knows no FakeTensors. `GraphLowering._compile_to_module_lines` (since 2.8) has the map from a
    wrapper's lines to the nodes of the graph; `PythonWrapperCodegen.define_subgraph_launcher_fn` (since 2.6) that of a
    partition, such as a CUDA graph is.
    """
    from torch._inductor import utils
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.graph import GraphLowering

    guards = torch._C._dynamo.guards

    def empty(device: str) -> Callable[..., torch.Tensor]:
        return lambda size, stride, dtype: make_buffer(size, stride, dtype=dtype, device=device)

    parts: list[Any] = []
    """The texts of partitions since the last wrapper, which are put into it without their maps."""

    def define_part(original: Callable[..., Any], self: Any, name: str, code: Any) -> None:
        parts.append(code)
        original(self, name, code)

    def compile_noted(original: Callable[..., Any], self: Any, wrapper_code: Any) -> Any:
        module = original(self, wrapper_code)
        text = wrapper_code.value
        nodes = [*wrapper_code.line_map, *(each for part in parts for each in _lines_within(text, part))]
        nodes = sorted(((line, node) for line, node in nodes if hasattr(node, "meta")), key=lambda each: each[0])
        parts.clear()
        wrote(Wrapper(module.__file__, text, nodes, is_backward=bool(self.is_backward)))
        return module

    replaced: list[tuple[Any, str, Any]] = [
        (AsyncCompile, "triton", lambda self, name, source, **_: StubKernel(name, _triton_outputs(source), launched)),
        (AsyncCompile, "cpp_pybinding", lambda self, kinds, source: StubKernel("cpp", _cpp_outputs(kinds), launched)),
        (AsyncCompile, "cpp", lambda self, source: StubKernel("cpp", (), launched)),
        (AsyncCompile, "multi_kernel", lambda self, name, *_, **__: StubKernel(name, (), launched)),
        (AsyncCompile, "wait", lambda self, scope: None),
        (AsyncCompile, "wakeup", classmethod(lambda cls: None)),
        (guards, "_reinterpret_tensor", lambda t, size, stride, offset=0: torch.as_strided(t, size, stride, offset)),
        (guards, "assert_size_stride", lambda *_, **__: None),
        (guards, "assert_alignment", lambda *_, **__: None),
        *((guards, f"_empty_strided_{device}", empty(device)) for device in ("cpu", "cuda")),
        (guards, "_empty_strided_cpu_pinned", empty("cpu")),
        (utils, "copy_misaligned_inputs", lambda *_, **__: ([], [])),
    ]
    return nested(
        replace_all(replaced),
        wrap(GraphLowering, "_compile_to_module_lines", compile_noted),
        wrap(PythonWrapperCodegen, "define_subgraph_launcher_fn", define_part),
    )


def _lines_within(text: str, part: Any) -> list[tuple[int, Any]]:
    """The lines of a text that a part of it (`ValueWithLineMap` of torch/_inductor/utils.py, since 2.7) has nodes for.

    What surrounds a part is stripped where it is put in.
    """
    begin = text.find(part.value.strip())
    if begin < 0:
        return []
    stripped = part.value[: len(part.value) - len(part.value.lstrip())].count("\n")
    above = text.count("\n", 0, begin) - stripped
    return [(above + line, node) for line, node in part.line_map]


def spare_work() -> AbstractContextManager[None]:
    """What nothing comes of here is not computed. Wrappers and kernels are the same, but for a hash in each kernel.

    `triton_key` hashes Triton's files for caches that are off (torch/_inductor/runtime/triton_compat.py, since 2.7).
    `BoundVars.get_bounds` (since 2.1) gives the ranges of numbers, which matter for indices that are read from memory,
    for masks and for 64-bit numbers. `Scheduler` looks for the symbols of the parts of a graph, which CUDA graphs are
    made of (`get_graph_partition_symbol_inputs`, since 2.8); there are parts without CUDA graphs, too.
    `DtypePropagationOpsHandler` (since 2.6), of which there is one, is set up with the same rules at each use. Seven of
    eight times that inductor puts other symbols into an index (`sympy_subs` of torch/_inductor/utils.py), it has done
    the same before: a model repeats its layers.
    """
    from torch._inductor import bounds, config, dtype_propagation, scheduler, utils
    from torch._inductor.runtime import triton_compat

    rules: list[int] = []

    def find_bounds(original: Callable[..., Any], self: Any) -> Any:
        body = self.loop_body
        casts = any(node.target == "to_dtype" and node.args[2] is torch.int64 for node in body.get_nodes())
        return original(self) if casts or body.indirect_vars or body.subblocks else {}

    def find_symbols(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if config.triton.cudagraphs else set()

    def set_up(original: Callable[..., None], self: Any) -> None:
        if rules != [len(utils.op_dtype_propagation_rules)]:
            original(self)
            rules[:] = [len(utils.op_dtype_propagation_rules)]

    replaced: dict[Any, Any] = {}

    def put_symbols(original: Callable[..., Any], self: Any, rule: Any) -> Any:
        if type(rule) is not dict:
            return original(self, rule)
        key = self, tuple(rule.items()), tuple(map(type, rule.values()))  # 1 and True are equal
        if key not in replaced:
            replaced[key] = original(self, rule)
        return replaced[key]

    places = (
        (triton_compat, "triton_key", lambda _: ""),
        (vars(utils)["sympy"].Basic, "xreplace", put_symbols),
        (bounds.BoundVars, "get_bounds", find_bounds),
        (scheduler.Scheduler, "get_graph_partition_symbol_inputs", find_symbols),
        (dtype_propagation.DtypePropagationOpsHandler, "__init__", set_up),
    )
    return nested(*(wrap(owner, name, call) for owner, name, call in places if hasattr(owner, name)))


class _OnCpu(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    """Numbers that inductor folds at compile time are computed on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*(torch.device("cpu") if isinstance(each, torch.device) else each for each in args), **kwargs)


def fold_on_cpu() -> AbstractContextManager[None]:
    """Constant folding runs `aten.full(device="cuda")` for real; here on the CPU.

    `ConstantFolder._deduce_value` and that of `UniformValueConstantFolder` (since 2.1). So does AOTAutograd what it
    traces of single numbers, `x.new_tensor(0.5)`, inside `unset_fake_temporarily` of
    torch/fx/experimental/proxy_tensor.py (since 2.5).
    """
    from torch._inductor import constant_folding
    from torch._inductor.fx_passes import joint_graph
    from torch.fx.experimental import proxy_tensor

    def deduce(original: Callable[..., Any], self: Any, node: Any) -> Any:
        with _OnCpu():  # type: ignore[no-untyped-call]
            return original(self, node)

    @contextlib.contextmanager
    def unset(original: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
        with original() as mode, _OnCpu():  # type: ignore[no-untyped-call]
            yield mode

    folders = constant_folding.ConstantFolder, joint_graph.UniformValueConstantFolder
    changes = [wrap(each, "_deduce_value", deduce) for each in folders if "_deduce_value" in vars(each)]
    if hasattr(proxy_tensor, "unset_fake_temporarily"):
        changes.append(wrap(proxy_tensor, "unset_fake_temporarily", unset))
    return nested(*changes)


def copy_constants(copied: Callable[[torch.Tensor], None]) -> AbstractContextManager[None]:
    """Constants that a kernel on the card reads are FakeTensors there; `copied` is called with each.

    `GraphLowering.constant_name` (since 2.0) copies them when it compiles, outside of all modes. `is_same_tensor` of
    torch/_inductor/utils.py (since 2.1), which graph.py has imported, compares addresses. `V.fake_mode` is the mode of
    the graph that is compiled (since 2.0).
    """
    from torch._inductor import graph
    from torch._inductor.virtualized import V

    def name_copy(original: Callable[..., str], self: Any, name: str, device: torch.device | None) -> str:
        real = self.constants[name]
        if device is None or real.device == device or isinstance(real, torch_common.FakeTensor):
            return original(self, name, device)
        with V.fake_mode:
            copy = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        # `.to` of any tensor, out of all modes, would have torch take the card for one that works from then on.
        self.constants[name] = SimpleNamespace(device=real.device, to=lambda _: copy)
        try:
            made = original(self, name, device)
        finally:
            self.constants[name] = real
        copied(copy)
        return made

    def is_same(original: Callable[..., bool], data: torch.Tensor, value: torch.Tensor) -> bool:
        fakes = isinstance(data, torch_common.FakeTensor) or isinstance(value, torch_common.FakeTensor)
        return data is value if fakes else original(data, value)

    return nested(
        wrap(graph.GraphLowering, "constant_name", name_copy),
        wrap(graph, "is_same_tensor", is_same) if hasattr(graph, "is_same_tensor") else contextlib.nullcontext(),
    )


class CardAnswers(NamedTuple):
    """What the compiler asks of a card."""

    properties: Any
    tflops: Callable[[torch.dtype], float] | None = None
    """By dtype; None where the card's rates are not known."""
    bandwidth_gb: float | None = None


class _NoGuard(contextlib.nullcontext[None]):
    """Stands for `torch.cuda.device` and `torch.cuda._DeviceGuard` where there is no device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _unknown_rate(*_: Any) -> Any:
    raise UnknownRateError


@contextlib.contextmanager
def answer_for_card(card: CardAnswers) -> Iterator[None]:
    """Dynamo, inductor and Triton ask this card.

    `CudaInterface` (torch/_dynamo/device_interface.py, since 2.1) has bound the functions of `torch.cuda`;
    `DeviceProperties.create` (torch/_inductor/runtime/hints.py, since 2.4) and functions of torch/_inductor/utils.py
    and torch/utils/_triton.py remember answers; Triton has an active driver (`triton.runtime.driver`, since 3.0).
    """
    import torch.utils._triton as triton_utils
    from torch._dynamo import device_interface
    from torch._inductor import compile_fx, scheduler, utils

    asked = card.properties
    capability = (asked.major, asked.minor)
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    interface: Any = device_interface.CudaInterface

    zeros = ("current_device", "get_raw_stream", "exchange_device", "maybe_exchange_device")
    answers: dict[str, Any] = {
        **dict.fromkeys(zeros, lambda device=None: 0),
        **dict.fromkeys(("synchronize", "set_device"), lambda device=None: None),
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: asked,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "current_stream": lambda device=None: stream,
    }
    replaced: list[tuple[Any, str, Any]] = [
        *((interface, name, staticmethod(answer)) for name, answer in answers.items()),
        (interface, "device", _NoGuard),
        (interface.Worker, "get_device_properties", staticmethod(lambda device=None: asked)),
        (interface.Worker, "current_device", staticmethod(lambda: 0)),
        *((torch.cuda, name, _NoGuard) for name in ("device", "_DeviceGuard")),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        # Since 2.15 it is asked about the CPU, too.
        *((each, "has_triton", lambda *, include_cpu=False: True) for each in (scheduler, compile_fx, triton_utils)),
        (utils, "get_device_tflops", card.tflops or _unknown_rate),
        (utils, "get_gpu_dram_gbps", _unknown_rate if card.bandwidth_gb is None else lambda: card.bandwidth_gb),
        (utils, "get_gpu_shared_memory", lambda: asked.shared_memory_per_block_optin),
    ]
    _forget_answers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(replace_all(replaced))
        stack.enter_context(_triton_driver(asked, capability))
        stack.callback(_forget_answers)
        yield


def no_device_guard() -> AbstractContextManager[Any]:
    """Wrappers enter `torch.cuda._DeviceGuard` (since 2.0), which asks the driver."""
    return patch(torch.cuda, "_DeviceGuard", lambda _: _NoGuard)


@contextlib.contextmanager
def _triton_driver(asked: Any, capability: tuple[int, int]) -> Iterator[None]:
    triton = importlib.import_module("triton")
    make_target = importlib.import_module("triton.backends.compiler").GPUTarget
    target = make_target("cuda", capability[0] * 10 + capability[1], 32)
    found = {"max_shared_mem": asked.shared_memory_per_block_optin, "multiprocessor_count": asked.multi_processor_count}
    stand_in = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_device_interface=lambda: torch.cuda,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=SimpleNamespace(get_device_properties=lambda _: found),
    )
    driver = triton.runtime.driver
    before = vars(driver).get("_active")
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


def _forget_answers() -> None:
    """Forget what torch remembers of this machine's card, or of the last target."""
    import torch.utils._triton as triton_utils
    from torch._inductor import utils
    from torch._inductor.runtime import hints

    for function in (*vars(triton_utils).values(), *vars(utils).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    vars(hints.DeviceProperties)["create"].__func__.cache_clear()


# --- dynamo and autograd ----------------------------------------------------------------------------------------------


def compile_fx(graph: Any, inputs: Any, options: dict[str, Any]) -> Any:
    """Inductor itself (`torch._inductor.compile_fx.compile_fx`, since 2.0)."""
    from torch._inductor import compile_fx

    return compile_fx.compile_fx(graph, inputs, config_patches=options)


def route_inductor(compile: Callable[[Any, Any, dict[str, Any]], Any]) -> AbstractContextManager[None]:
    """Let `compile(graph, inputs, options)` stand for inductor in what `torch.compile` made anywhere.

    `torch._TorchCompileInductorWrapper` (since 2.0) is its backend.
    """

    def run(original: Any, self: Any, graph: Any, inputs: Any) -> Any:
        return compile(graph, inputs, dict(self.config))

    return wrap(torch._TorchCompileInductorWrapper, "__call__", run)


def limit_saved(share: float | None) -> AbstractContextManager[Any]:
    """What the partitioner may keep for backward (`torch._functorch.config.activation_memory_budget`, since 2.4)."""
    from torch._functorch import config

    return contextlib.nullcontext() if share is None else config.patch(activation_memory_budget=share)


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's settings of a mode (`torch._inductor.list_mode_options`, since 2.0)."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}


def known_options() -> set[str]:
    """The names of inductor's settings (`torch._inductor.config.get_config_copy`, since 2.1)."""
    from torch._inductor import config

    return set(config.get_config_copy())


def without_graph_task(
    release: Callable[[], None], keeps: Callable[[], bool] = lambda: False
) -> AbstractContextManager[None]:
    """AOTAutograd's backward asks the C++ engine's task, of which there is none.

    `_get_current_graph_task_keep_graph` (since 2.2); `maybe_clear_saved_tensors` of a Function's node (since 2.2),
    which frees what the node saved once its arguments are at hand.
    """

    def clear(original: Any, node: Any) -> None:
        if not keeps():
            release()

    return nested(
        patch(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda _: keeps),
        wrap(torch.autograd.function.BackwardCFunction, "maybe_clear_saved_tensors", clear),
    )


def stashed_tensors(outputs: Any) -> tuple[Any, list[torch.Tensor]]:
    """The node of a compiled function and the tensors it keeps without autograd's saved variables
    (`ctx._tensors_no_vc_check`, since 2.10)."""
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        node = getattr(output, "grad_fn", None)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node, list(getattr(node, "_tensors_no_vc_check", None) or ())
    return None, []


def states_in_tensors() -> AbstractContextManager[None]:
    """States of generators, for what is recomputed, are tensors of the host.

    On a card that is there it is kept in a generator (`graphsafe_rng_functionalization` of torch._functorch.config,
    since 2.7); neither takes memory of the card. An operator of higher order looks for a rule of the mode's own class
    (`python_key_table`, since 2.0).
    """
    from torch._functorch import config
    from torch._prims import rng_prims

    for each in (rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state):
        if torch_common.FakeMode not in each.python_key_table:
            each.py_impl(torch_common.FakeMode)(each.python_key_table[torch_common.FakeTensorMode])
    name = "graphsafe_rng_functionalization"
    return config.patch({name: False}) if hasattr(config, name) else contextlib.nullcontext()


def wrapper_frame(
    frame: types.FrameType | None, wrappers: dict[str, Wrapper], depth: int = 24
) -> tuple[Wrapper, int] | None:
    """The wrapper and its line that a frame runs for; None for none."""
    while frame is not None and depth:
        found = wrappers.get(frame.f_code.co_filename)
        if found is not None:
            return found, frame.f_lineno
        frame, depth = frame.f_back, depth - 1
    return None
