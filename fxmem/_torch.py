"""Every private torch name fxmem uses, each with why and since when; nothing else in fxmem names one.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd
import torch.utils.checkpoint
from torch._ops import OpOverload, OpOverloadPacket  # the types of ATen and custom operators as a dispatch mode sees them (since 1.9)

# FakeTensors are how torch itself runs a program without data (since 1.13); there is no public spelling.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.passes.shape_prop import _extract_tensor_metadata as tensor_metadata  # what torch.fx puts in `node.meta["tensor_meta"]`
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks  # hooks on every optimizer (since 2.0)
from torch.utils._python_dispatch import TorchDispatchMode  # documented in the notes, private by name (since 1.12)
from torch.utils._python_dispatch import _disable_current_modes as no_modes  # real tensors in the midst of a fake run (since 2.0)
from torch.utils._pytree import tree_iter, tree_leaves, tree_map, tree_map_only  # torch's own nested-structure walk (since 1.8)

__all__ = [
    "CHECKS",
    "DATA_DEPENDENT",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "Hooks",
    "InstanceNorm",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "checkpoint_regions",
    "checkpoints_told",
    "detached",
    "detached_sharing_version",
    "device_type",
    "engine_routed_to",
    "function_calls_seen_by",
    "input_metadata",
    "is_accumulate_grad",
    "is_composite",
    "is_function_mode_on",
    "is_mutable",
    "is_sole_owner",
    "is_view",
    "next_sequence_number",
    "no_modes",
    "op_arguments",
    "output_number",
    "patched",
    "quiet_fake_kernels",
    "runs_only_its_own_code",
    "saved_tensors_seen_by",
    "sequence_number",
    "storage_key",
    "tensor_metadata",
    "tensors_in",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "unwatched",
]

NormBase = torch.nn.modules.batchnorm._NormBase  # what every module with running statistics derives from (since 1.4)
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm  # (since 0.4)

CHECKS = frozenset((torch._is_all_true, torch.Tensor._is_all_true))
"""What `torch._check_tensor_all` and the checks of distributions' arguments ask, and nothing else in torch (since 1.13)."""

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""What a FakeTensor raises where the program asks for a value it does not have."""


def device_type(tensor: torch.Tensor) -> str:
    """`tensor.device.type`, which for a FakeTensor would be an operator call of its own (`FakeTensor.fake_device`, since 1.13)."""
    return str((tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type)


def detached_sharing_version(value: Any) -> Any:
    """Nested values with each tensor detached, for use within a dispatch mode: below autograd nothing but this guard lets the alias count writes with its base.

    `_SetExcludeDispatchKeyGuard` is what torch/utils/checkpoint.py itself does it with (since 2.4).
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers and dataclasses, in order."""
    for leaf in (value,) if isinstance(value, torch.Tensor) else tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(original)` and put the original back, also on error.

    Nests: the inner replacement wraps the outer one and goes first. An attribute that `owner` only
    inherits is removed again rather than pinned.
    """
    own = name in vars(owner)
    raw = vars(owner)[name] if own else None
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, raw)
        else:
            delattr(owner, name)


def op_arguments(func: OpOverload) -> Any:
    """The arguments an op is declared with (`OpOverload._schema`, since 1.10)."""
    return func._schema.arguments


def is_mutable(func: OpOverload) -> bool:
    """Whether an op writes to an argument (`OpOverload._schema`, since 1.10)."""
    return bool(func._schema.is_mutable)


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether the dispatcher runs an op as other ops (`torch._C._dispatch_has_kernel_for_dispatch_key`, since 1.11; `OpOverload.decompose` then calls them).

    Not those that also have a kernel of their own for CPU and CUDA, such as `silu_backward`. `OpOverload.has_kernel_for_dispatch_key` would also
    count decompositions written in Python, which only tracers of programs use: the CPU's `native_batch_norm` has one.
    """
    if not isinstance(func, OpOverload):
        return False
    name = func.name()  # type: ignore[no-untyped-call]
    here = [key for key in ("CompositeImplicitAutograd", "CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    return here == ["CompositeImplicitAutograd"]


def is_function_mode_on() -> bool:
    """Whether a TorchFunctionMode sees this thread's calls now (`torch._C._len_torch_function_stack`, since 2.0)."""
    return bool(torch._C._len_torch_function_stack())


def runs_only_its_own_code(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer is torch's code alone: a class of torch.optim with no hooks (`_optimizer_step_pre_hooks`, since 2.0)."""
    own = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return own and not any(hooks)


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """For the duration no TorchFunctionMode sees this thread's calls (`torch._C.DisableTorchFunction`, since 1.11)."""
    manager: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return manager


@contextlib.contextmanager
def quiet_fake_kernels() -> Iterator[None]:
    """FakeTensorMode logs a traceback for each error it then raises (logger `torch._subclasses.fake_tensor`, since 2.8); the error is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# --- the autograd graph -----------------------------------------------------------------------------------------------------


def next_sequence_number() -> int:
    """Number the next autograd node made on this thread will get (`torch._C._autograd._get_sequence_nr`, since 2.1)."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Any) -> int:
    """Order in which a node was made; `AccumulateGrad` has 2**64 - 1 (`Node._sequence_nr`, since 1.8)."""
    return int(node._sequence_nr())


def input_metadata(node: Any) -> list[Any]:
    """Shape, dtype and device of each gradient a node takes (`Node._input_metadata`, since 2.1)."""
    return list(node._input_metadata)


def is_accumulate_grad(node: Any) -> bool:
    """Whether a node is the sink that writes a leaf's `.grad`."""
    return type(node).__name__ == "AccumulateGrad"


def output_number(tensor: torch.Tensor) -> int:
    """Which output of its `grad_fn` a tensor is (`Tensor.output_nr`, since 0.4)."""
    return int(tensor.output_nr)


def _count_held_once(holder: list[Any], index: int) -> int:
    held = holder[index]
    return sys.getrefcount(held)


_HELD_ONCE = _count_held_once([object()], 0)
"""What `_count_held_once` answers for an object that only the list holds; differs between Python versions."""


def is_sole_owner(holder: list[Any], index: int, *, storage: bool) -> bool:
    """Whether nobody but `holder[index]` can see that tensor, as the C++ engine asks before it reuses a gradient.

    With `storage`, no other tensor may share its storage either. Source: `can_accumulate_inplace` in
    torch/csrc/autograd/input_buffer.cpp and `AccumulateGrad::accumulateGrad` in
    torch/csrc/autograd/functions/accumulate_grad.h. `Tensor._use_count` (since 2.4) counts C++ owners, all of Python
    being one; `_storage_Use_Count` (since 2.1) counts one for the tensor and one for the storage's Python object.
    """
    if _count_held_once(holder, index) > _HELD_ONCE or holder[index]._use_count() > 1:
        return False
    return not storage or torch._C._storage_Use_Count(holder[index].untyped_storage()._cdata) <= 2


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another (`Tensor._is_view`, since 1.0)."""
    return bool(tensor._is_view())


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage without its history, made behind the back of whoever watches calls (`torch._C.DisableTorchFunction`, since 1.11)."""
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in, while that storage is alive; a fake one has no address (`UntypedStorage._cdata`, since 1.0)."""
    return int(tensor.untyped_storage()._cdata)


# --- saved tensors ----------------------------------------------------------------------------------------------------------


def _same(value: Any) -> Any:
    return value


class Hooks:
    """A pair of saved-tensor hooks. Held by those who still need to unpack, and by the context that pushed it."""

    __slots__ = ("__weakref__", "change_nothing", "pack", "unpack")

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack = pack
        self.unpack = unpack
        self.change_nothing = pack is unpack is _same


@contextlib.contextmanager
def saved_tensors_seen_by(pack: Callable[[Hooks, Any], Any], unpack: Callable[[Any], Any]) -> Iterator[None]:
    """Route every tensor autograd saves on this thread through `pack(hooks, tensor) -> handle` and `unpack(handle)`.

    `hooks` are those the program itself has pushed (`save_on_cpu`, checkpointing), or a pair that changes nothing.
    C++ lets go of them when a node has run; the handle is therefore the only one of ours to hold them.
    `torch.autograd.graph.saved_tensors_hooks` pushes and pops through `torch._C._autograd` (since 1.10). `torch.func` transforms refuse hooks
    (`disable_saved_tensors_hooks`, since 1.13), because a hook may do anything to a tensor that belongs to a transform; the pair that changes
    nothing does not, and stays.
    """
    me = threading.get_ident()
    pushed: list[Hooks | None] = []

    def make_push(push: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def pushing(own_pack: Any, own_unpack: Any) -> None:
            if threading.get_ident() != me:
                push(own_pack, own_unpack)
                return
            hooks = Hooks(own_pack, own_unpack)
            pushed.append(hooks)
            weak = weakref.ref(hooks)

            def packing(tensor: Any) -> Any:
                current = weak()
                assert current is not None
                return pack(current, tensor)

            push(packing, unpack)

        return pushing

    def make_pop(pop: Callable[[], None]) -> Callable[[], None]:
        def popping() -> None:
            pop()
            if threading.get_ident() == me:
                pushed.pop()

        return popping

    def make_disable(disable: Callable[[str], Any]) -> Callable[[str], Any]:
        def disabling(message: str) -> Any:
            return disable(message) if threading.get_ident() != me or len(pushed) > 1 else contextlib.nullcontext()

        return disabling

    with (
        patched(torch.autograd.graph, "disable_saved_tensors_hooks", make_disable),
        patched(torch._C._autograd, "_push_saved_tensors_default_hooks", make_push),
        patched(torch._C._autograd, "_pop_saved_tensors_default_hooks", make_pop),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    ):
        yield


# --- entry points routed elsewhere ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_routed_to(
    run_backward: Callable[..., tuple[Any, ...]], task_id: Callable[[], int], queue_callback: Callable[[Callable[[], None]], bool]
) -> Iterator[None]:
    """Send `Tensor.backward`, `torch.autograd.backward` and `.grad` on this thread to another engine.

    All three call `torch.autograd._engine_run_backward(roots, grads, retain_graph, create_graph, inputs,
    allow_unreachable, accumulate_grad)` (since 2.2). `torch._C._current_graph_task_id` is how
    `torch.utils.checkpoint` tells one backward from the next (since 1.11); `queue_callback(f) -> bool` takes what a
    hook wants run at the end, or answers False when no walk of ours is under way.
    """
    me = threading.get_ident()

    def route(original: Callable[..., Any]) -> Callable[..., Any]:
        def running(roots: Any, *args: Any, **kwargs: Any) -> Any:
            return (run_backward if threading.get_ident() == me else original)(roots, *args, **kwargs)

        return running

    def task(original: Callable[[], int]) -> Callable[[], int]:
        def current() -> int:
            mine = task_id() if threading.get_ident() == me else -1
            return mine if mine >= 0 else original()

        return current

    class Callbacks:
        """Stands in for the C++ engine object; everything but `queue_callback` is the original's."""

        def __init__(self, original: Any) -> None:
            self._original = original

        def __getattr__(self, name: str) -> Any:
            return getattr(self._original, name)

        def queue_callback(self, callback: Callable[[], None]) -> None:
            if threading.get_ident() != me or not queue_callback(callback):
                self._original.queue_callback(callback)

    with (
        patched(torch.autograd, "_engine_run_backward", route),
        patched(torch._C, "_current_graph_task_id", task),
        patched(torch.autograd.Variable, "_execution_engine", Callbacks),
    ):
        yield


@contextlib.contextmanager
def function_calls_seen_by(
    call: Callable[[type, tuple[Any, ...], Callable[..., Any]], Any],
    node_hook: Callable[[Any, str, Callable[..., Any]], None],
    no_materialize: Callable[[Any], None],
) -> Iterator[None]:
    """Show every `autograd.Function.apply` on this thread to `call(cls, args, original)`.

    Up to torch 2.14 `Function.apply` ends in `_SingleLevelFunction.apply`, looked up anew on each call, so that functions
    bound as `f = F.apply` at import time are seen too (since 2.0). From 2.15 it is the C method itself: what was bound
    before goes past us, and is seen as the torch calls its forward makes. Hooks put on a Function's node are told to
    `node_hook(node, "register_hook" | "register_prehook", hook)`, for they live in C++ and only the engine runs them;
    `no_materialize(ctx)` says that a Function asked for undefined gradients as None.
    """
    me = threading.get_ident()
    function = torch.autograd.Function
    applied: Any = torch.autograd.function._SingleLevelFunction if isinstance(vars(function).get("apply"), classmethod) else function
    nodes = torch.autograd.function.BackwardCFunction

    def apply(original: Any) -> Any:
        del original  # bound to this class, but each call needs its own

        def applying(cls: Any, *args: Any) -> Any:
            c_apply = super(applied, cls).apply
            return call(cls, args, c_apply) if threading.get_ident() == me else c_apply(*args)

        return classmethod(applying)

    def hook(name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def registering(self: Any, hook: Callable[..., Any]) -> Any:
                if threading.get_ident() == me:
                    node_hook(self, name, hook)
                return original(self, hook)

            return registering

        return make

    def materialize(original: Any) -> Any:
        def setting(self: Any, value: bool) -> None:
            if threading.get_ident() == me and not value:
                no_materialize(self)
            original(self, value)

        return setting

    with (
        patched(applied, "apply", apply),
        patched(nodes, "register_hook", hook("register_hook")),
        patched(nodes, "register_prehook", hook("register_prehook")),
        patched(torch.autograd.function.FunctionCtx, "set_materialize_grads", materialize),
    ):
        yield


def _with_one_object_each(function: Callable[..., Any], given: tuple[Any, ...]) -> Callable[..., Any]:
    """`function`, to be called again with the last of these arguments, those that were one tensor being one tensor again.

    Without hooks for saved tensors C++ gives the same object back; with hooks, which an analysis has, a new one each time.
    """
    # torch 2.15 hands the function's own arguments over as a tuple and a dict, before what checkpointing itself takes.
    values = given[0] if len(given) > 1 and isinstance(given[0], tuple) and isinstance(given[1], dict) else given
    tensors = [id(value) if isinstance(value, torch.Tensor) else None for value in values]

    def again(*args: Any, **kwargs: Any) -> Any:
        first: dict[int, Any] = {}
        if len(args) > len(tensors):
            return function(*args, **kwargs)
        keys = tensors[len(tensors) - len(args) :]
        return function(*(value if key is None else first.setdefault(key, value) for key, value in zip(keys, args, strict=True)), **kwargs)

    return again


@contextlib.contextmanager
def checkpoint_regions(
    region: Callable[[], tuple[Callable[[Callable[..., Any]], Callable[..., Any]], Callable[[], None]]],
    own_work: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Tell where `torch.utils.checkpoint` regions begin and end, and when they are run again.

    `region()` is called when a checkpointed function is about to run forward and returns a wrapper for the function
    that recomputes it, and what to call when the function has run; what checkpointing does for itself happens within `own_work()`. Non-reentrant checkpointing
    recomputes the `fn` it gave to `_checkpoint_without_reentrant_generator` (since 2.1; `…_impl` in 2.15), reentrant the `run_function` of
    `CheckpointFunction`.
    """
    me = threading.get_ident()

    def generator(original: Any) -> Any:
        def generating(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            if threading.get_ident() != me:
                yield from original(fn, *args, **kwargs)
                return
            wrap, ended = region()
            steps = original(wrap(_with_one_object_each(fn, args)), *args, **kwargs)
            del fn, args, kwargs  # held by the region itself, and no longer than it needs them
            with own_work():
                next(steps)
            try:
                yield
            except BaseException as error:
                steps.throw(error)
                raise
            ended()
            with own_work():
                next(steps, None)

        return generating

    def forward(original: Any) -> Any:
        def running(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            if threading.get_ident() != me:
                return original(ctx, run_function, *args)
            wrap, ended = region()
            again = wrap(run_function)
            outputs = original(ctx, run_function, *args)
            ended()
            ctx.run_function = again
            return outputs

        return staticmethod(running)

    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name
    with patched(module, name, generator), patched(module.CheckpointFunction, "forward", forward):
        yield


@contextlib.contextmanager
def checkpoints_told(told: Callable[[Any], None]) -> Iterator[None]:
    """Call `told(function)` for each function this thread is about to run under `torch.utils.checkpoint`; names as in `checkpoint_regions`."""
    me = threading.get_ident()

    def first(position: int) -> Callable[[Any], Callable[..., Any]]:
        def make(original: Any) -> Callable[..., Any]:
            def calling(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == me:
                    told(args[position])
                return original(*args, **kwargs)

            return calling

        return make

    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name
    with patched(module, name, first(0)), patched(module.CheckpointFunction, "forward", lambda original: staticmethod(first(1)(original))):
        yield
