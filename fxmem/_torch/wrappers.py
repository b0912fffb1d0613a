"""Private names of torch for wrappers of tensors and callables, with why and since when.

A *wrapper* is a tensor whose memory is that of the tensors inside it: a subclass that says how to take it apart
(torchao's quantised weights), or one of the views `torch.func` makes of a tensor while `vmap` or `grad` runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nested._internal import nested_tensor, sdpa
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # `__tensor_flatten__` (since 2.1)

from fxmem._torch.common import FakeTensor, HigherOrderOperator, nested, no_modes, wrap

is_wrapper = is_traceable_wrapper_subclass
"""Whether a tensor's memory is that of the tensors inside it."""


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func or a `vmap` of autograd's own wraps a tensor
    (`torch._C._functorch.is_legacy_batchedtensor`, since 2.0)."""
    functorch = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


_SPARSE_PARTS = "_fxmem_sparse_parts"


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse tensor of indices and values (COO)."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def make_sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], *, coalesced: bool
) -> torch.Tensor:
    """A sparse FakeTensor. Its parts are attributes: C++ keeps none, and would hand out other tensors each time."""
    dims, kind = (indices.shape[0], values.dim() - 1), {"dtype": values.dtype, "device": values.device}
    with no_modes():
        make = torch.ops.aten._sparse_coo_tensor_with_dims.default
        fakes: Any = values
        made: torch.Tensor = fakes.fake_mode.dispatch(make, (), (*dims, shape), {**kind, "layout": torch.sparse_coo})
    set_sparse_parts(made, indices, values, coalesced=coalesced)
    return made


def set_sparse_parts(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, *, coalesced: bool) -> None:
    """Give a sparse FakeTensor other indices and values; `coalesced`: whether no two indices are equal, and sorted."""
    setattr(tensor, _SPARSE_PARTS, (indices, values, coalesced))


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor (`Tensor._indices` and `_values`, since 0.4)."""
    if hasattr(tensor, _SPARSE_PARTS):
        indices, values, _ = getattr(tensor, _SPARSE_PARTS)
        return indices, values
    with no_modes():
        return tensor._indices(), tensor._values()


def is_coalesced(tensor: torch.Tensor) -> bool:
    """Whether a sparse tensor has each index once, in order (`Tensor.is_coalesced`, since 0.4)."""
    if hasattr(tensor, _SPARSE_PARTS):
        return bool(getattr(tensor, _SPARSE_PARTS)[2])
    with no_modes():
        return tensor.is_coalesced()


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's memory: itself, unless it is a wrapper or sparse."""
    return (
        (tensor,) if type(tensor) is FakeTensor and not is_sparse(tensor) else tuple(p for _, p in named_parts(tensor))
    )


@functools.cache
def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of a class take themselves apart (`__tensor_flatten__`, since 2.1)."""
    return not issubclass(kind, FakeTensor) and hasattr(kind, "__tensor_flatten__")


@functools.cache
def runs_own_way(kind: type) -> bool:
    """Whether tensors of a class, no FakeTensors, say themselves how operators run on them.

    `x.data` hands any class to dispatch modes, `Parameter` among them (`Tensor.__torch_dispatch__`, which a class
    without a way of its own inherits, since 1.11).
    """
    way = vars(torch.Tensor)["__torch_dispatch__"]
    return not issubclass(kind, FakeTensor) and getattr(kind, "__torch_dispatch__", way) is not way


def is_fake(value: Any) -> bool:
    """Whether a value is a FakeTensor, or a wrapper of one."""
    if type(value) is FakeTensor or not isinstance(value, torch.Tensor):
        return type(value) is FakeTensor
    return any(isinstance(part, FakeTensor) for part in parts(value))


def unwrap_transforms(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that transforms of torch.func wrap; None if none does
    (`is_functorch_wrapped_tensor` and `get_unwrapped` of `torch._C._functorch`, since 2.0)."""
    value = tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return None if value is tensor else value


def named_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """`parts` with the path of attributes to each, empty for the tensor itself."""
    tensor = tensor if (value := unwrap_transforms(tensor)) is None else value
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        return []  # nothing in Python leads to the tensor inside
    if is_sparse(tensor):
        return list(zip(("indices", "values"), sparse_parts(tensor), strict=True))
    if not is_wrapper(tensor):
        return [] if _has_no_memory(tensor) else [("", tensor)]
    attributes = [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    # Since 2.15 a DTensor also lists its mesh, which is no tensor.
    inside = [(name, part) for name, part in attributes if isinstance(part, torch.Tensor)]
    if [name for name, _ in inside] == ["_local_tensor"]:  # of a DTensor, whose shard goes by its own name (since 2.1)
        inside = [("", inside[0][1])]
    return [(f"{name}.{path}".rstrip("."), part) for name, inner in inside for path, part in named_parts(inner)]


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a shape around others that its class knows of, and says of none
    (`Tensor._make_wrapper_subclass`, since 1.10): its storage has a size and no address. Or has no shape yet."""
    if not runs_own_way(type(tensor)):
        return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
    try:
        return tensor.untyped_storage().data_ptr() == 0
    except RuntimeError:
        return True


def rebuild(tensor: torch.Tensor, replace: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A wrapper subclass with each tensor inside it replaced; what is no wrapper, replaced itself."""
    if not is_wrapper(tensor):
        return replace(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    inside = {name: rebuild(each, replace) if isinstance(each, torch.Tensor) else each for name, each in parts.items()}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inside, context, tensor.size(), tensor.stride())
    return made


def wrapped_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside what `torch.compile` returns (`OptimizedModule._orig_mod`, since 2.0); None for every other."""
    compiled = sys.modules.get("torch._dynamo.eval_frame")
    if compiled is None or not isinstance(module, compiled.OptimizedModule):
        return None
    inner: torch.nn.Module = module._orig_mod
    return inner


def observe_traces(on_trace: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `on_trace()` when this thread traces a function into a graph, as `torch.func.linearize` does
    (`ProxyTorchDispatchMode`, since 1.12)."""

    def enter_noted(original: Callable[[Any], Any], mode: Any) -> Any:
        on_trace()
        return original(mode)

    return wrap(ProxyTorchDispatchMode, "__enter__", enter_noted, here=True)


def run_compiled_as_eager(on_call: Callable[[], None]) -> AbstractContextManager[None]:
    """On this thread, run what `torch.compile` returned as the original function, after an `on_call()`.

    Compiled code asks `torch._dynamo.eval_frame._callback_from_stance` what to do whenever it begins (since 2.6). Where
    torch._dynamo has not been imported nothing is compiled yet, and a program that compiles in mid-step is given its
    function back.
    """

    def choose_stance(original: Any, callback: Any) -> None:
        if callback not in (None, False):
            on_call()

    def compile(original: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend")
        if getattr(backend, "__module__", backend) not in ("eager", "torch._dynamo.backends.debugging"):
            on_call()  # the backend `eager`, which `flex_attention` takes by itself, compiles nothing
        return (lambda function: function) if model is None else model

    changes = [wrap(torch, "compile", compile, here=True)]
    if (compiled := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        changes.append(wrap(compiled, "_callback_from_stance", choose_stance, here=True))
    return nested(*changes)


def follow_flex_attention(apart: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Do for `flex_attention` what dynamo does, which traces each call of it, eager ones too (since 2.5).

    What a `score_mod` learns becomes an argument of the operator: variables of the function around it, and parameters
    that it names of a module there (`score_mod_other_buffers`). The graph of its derivative is written inside `apart()`
    (`create_fw_bw_graph` of torch/_higher_order_ops/flex_attention.py).
    """

    def differentiate(original: Callable[..., Any], *args: Any) -> Any:
        # Autograd's hooks would hand out what its tracer does not know (`_saved_tensors_hooks_set_tracing`, since 2.6).
        tracing = torch._C._autograd._saved_tensors_hooks_set_tracing
        with apart():
            before = tracing(True)
            try:
                return original(*args)
            finally:
                tracing(before)

    def find(score: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
        for cell in getattr(score, "__closure__", None) or ():
            value = cell.cell_contents
            if isinstance(value, torch.Tensor):
                yield value, functools.partial(setattr, cell, "cell_contents")
            elif isinstance(value, torch.nn.Module):
                own = value._parameters
                yield from ((own[name], functools.partial(own.__setitem__, name)) for name in find_names(score, own))

    def find_names(score: Any, names: Any) -> list[str]:
        return [name for name in score.__code__.co_names if name in names]

    def call(original: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator.name() != "flex_attention" or any(args[7:]):
            return original(operator, *args, **kwargs)
        score = args[3]
        learned = [each for each in find(score) if each[0] is not None and each[0].requires_grad]

        def lifted(*given: Any) -> Any:
            count = len(given) - len(learned)
            try:
                for (_, put), value in zip(learned, given[count:], strict=True):
                    put(value)
                return score(*given[:count])
            finally:
                for value, put in learned:
                    put(value)

        buffers = tuple(value for value, _ in learned)
        return original(operator, *args[:3], lifted if learned else score, *args[4:7], buffers, *args[8:], **kwargs)

    changes = [wrap(HigherOrderOperator, "__call__", call, here=True)]
    if (module := sys.modules.get("torch._higher_order_ops.flex_attention")) is not None:
        changes.append(wrap(module, "create_fw_bw_graph", differentiate, here=True))
    return nested(*changes)


@contextlib.contextmanager
def observe_scripted(on_call: Callable[[], None]) -> Iterator[None]:
    """Call `on_call()` when this thread calls a function or a module's method that `torch.jit.script` or `trace` has
    compiled.

    Each function begins as in a new process, and is left so: what its interpreter learns in a run decides what the next
    ones keep (`ScriptFunction._debug_flush_compilation_cache`, since 1.8). Nothing is fused on a card (`torch._C`'s
    `_jit_texpr_fuser_enabled`, since 1.7): the kernels that a fuser makes cannot run on fakes.
    """
    scripted, called = torch.jit.ScriptFunction, dict[int, Any]()

    def call(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        if id(function) not in called:
            function._debug_flush_compilation_cache()
            called[id(function)] = function
        on_call()
        return original(function, *args, **kwargs)

    def call_method(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        on_call()
        return original(*args, **kwargs)

    fuses = torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_set_texpr_fuser_enabled(False)
    try:
        methods = wrap(torch._C.ScriptMethod, "__call__", call_method, here=True)
        with wrap(scripted, "__call__", call, here=True), methods:
            yield
    finally:
        torch._C._jit_set_texpr_fuser_enabled(fuses)
        for function in called.values():
            function._debug_flush_compilation_cache()


# --- private names of torch for jagged tensors, with why and since when -----------------------------------------------
# The length of a jagged dimension is a *nested int*, one for each tensor of offsets (`torch.nested._internal`, 2.1).
# FakeTensorMode makes them of symbols, and without a `ShapeEnv` it has none. Here a fake has a nested int as a real
# tensor has, in the same registry, so that they stay equal where a tensor goes to the card and back.


ATTENTION: Final = sdpa
"""Where attention of jagged tensors chooses its kernel (since 2.2)."""


@contextlib.contextmanager
def fakes_have_nested_ints() -> Iterator[None]:
    """Let jagged tensors be made of FakeTensors, and moved (`FakeTensor.get_nested_int` and `nested_int_memo`, 2.4)."""
    registry: Any = nested_tensor._tensor_symint_registry

    def get_nested_int(original: Callable[..., Any], offsets: Any, *, coeff: Any = 1) -> Any:
        if offsets.fake_mode.shape_env is None:
            if offsets.nested_int_memo is None:
                offsets.nested_int_memo = registry.get(offsets) or _make_nested_int()
            registry[offsets] = offsets.nested_int_memo
        return original(offsets, coeff=coeff)

    host: Any = torch.Tensor
    host.nested_int_memo = property(registry.get)  # read where a tensor of the host moves
    try:
        with wrap(FakeTensor, "get_nested_int", get_nested_int):
            yield
    finally:
        del host.nested_int_memo


def known_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a jagged one that of all its rows, one after another."""
    values: Any = tensor
    return tuple((values._values if isinstance(tensor, nested_tensor.NestedTensor) else tensor).shape)


def pad(tensor: torch.Tensor) -> torch.Tensor:
    """A jagged tensor on meta with each sequence as long as the longest (`NestedTensor._max_seqlen`); another as is."""
    if not isinstance(tensor, nested_tensor.NestedTensor):
        return tensor
    jagged: Any = tensor
    longest = jagged._get_max_seqlen()
    shape = [longest if isinstance(size, torch.SymInt) else size for size in tensor.shape]
    with no_modes():
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def _make_nested_int() -> Any:
    made = torch._C._get_nested_int(nested_tensor._tensor_id_counter, 1)
    nested_tensor._tensor_id_counter += 1
    return made
