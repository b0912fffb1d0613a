"""Private names of torch that all of fxmem needs (fake tensors, operators, nested values), each with why and since
when.

The other modules of `fxmem._torch` hold those of one subject each; nothing else in fxmem names one.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

# The types of ATen and custom operators as a dispatch mode sees them (since 1.9), and what takes operators as arguments
# (since 1.13).
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._prims_common import make_contiguous_strides_for

# FakeTensors are how torch itself runs a program without data (since 1.13); there is no public spelling.
from torch._subclasses.fake_tensor import DataDependentOutputException, _BypassDispatchCache
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.fx.passes import shape_prop
from torch.optim import optimizer as torch_optimizer
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented in the notes (since 1.12)

_PACKAGE, _FOLDER = f"{__name__.partition('.')[0]}.", __file__.removesuffix(os.path.join("_torch", "common.py"))
_major, _minor = torch.__version__.split(".")[:2]
TORCH_VERSION: Final = int(_major), int(_minor)

tree_iter, tree_leaves, tree_map = _pytree.tree_iter, _pytree.tree_leaves, _pytree.tree_map
tree_map_only, tree_flatten, tree_unflatten = _pytree.tree_map_only, _pytree.tree_flatten, _pytree.tree_unflatten
"""torch's own nested-structure walk (since 1.8)."""

no_modes = _python_dispatch._disable_current_modes
"""Real tensors in the midst of a fake run (since 2.0)."""

tensor_metadata = shape_prop._extract_tensor_metadata
"""What torch.fx puts in `node.meta["tensor_meta"]`."""

contiguous_strides: Callable[..., tuple[int, ...]] = make_contiguous_strides_for
"""The strides of a contiguous tensor of a shape (since 1.13)."""

CONTAINERS: Final = (
    *(torch.nn.DataParallel, torch.nn.Transformer, torch.nn.TransformerEncoder, torch.nn.TransformerDecoder),
)
"""Modules of torch.nn that run layers, or a whole model: public, but no layer of torch's own."""
NormBase = torch.nn.modules.batchnorm._NormBase  # what every module with running statistics derives from (since 1.4)
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm  # (since 0.4)

CHECKS = frozenset((torch._is_all_true, torch.Tensor._is_all_true))
"""What `torch._check_tensor_all` and the checks of distributions' arguments ask, and nothing else in torch (since
1.13)."""

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""What a FakeTensor raises where the program asks for a value it does not have."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that neither imports torch._dynamo nor goes through it. Every other one does.

    `TorchDispatchMode._should_skip_dynamo` (in 2.11; pytorch/pytorch#166417). FakeTensorMode says the same of itself.
    """

    is_of_program = True
    """Whether a real run of the program has it, too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@functools.cache
def keep_device_guard() -> None:
    """Let the stand-in for CUDA's device guard outlive the thread that made it.

    Where no card is, each FakeTensorMode sees to it that the process has one (`torch._C._ensureCUDADeviceGuardSet`,
    since 2.9). In 2.11 (no longer in 2.15) it is freed with the thread that made it, and the next mode, in whichever
    thread, calls what is no longer there: the process dies (c10/core/impl/DeviceGuardImplInterface.cpp). The main
    thread ends with the process; for any other one a thread makes it that only waits.
    """
    if threading.current_thread() is threading.main_thread():
        torch._C._ensureCUDADeviceGuardSet()
        return
    made = threading.Event()

    def make_and_wait() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        made.set()
        threading.Event().wait()

    threading.Thread(target=make_and_wait, name="fxmem-device-guard", daemon=True).start()
    made.wait()


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode whose storages are as large as the operators make them.

    torch keeps results of calls that look alike, for the whole process, and makes the next one as large as its sizes
    and strides span: a storage that the operator padded, such as the gradient of an attention bias, is smaller then.
    So padded results are not kept (`FakeTensorMode._validate_output_for_cache_entry`), and what other modes have kept
    is not used (`_cache_key`); both are the same in 2.11 to 2.15. Nor are calls kept that take a storage, as `set_`
    does: it would live as long as the process; nor the one that moves its arguments and has no tag that says so.
    """

    def __init__(self) -> None:
        keep_device_guard()
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def _cache_key(self, *call: Any) -> Any:
        moves = call[1] is torch.ops.aten._cudnn_rnn_flatten_weight.default
        if moves or any(isinstance(each, torch.UntypedStorage) for each in call[2]):
            raise _BypassDispatchCache("storage")
        key = super()._cache_key(*call)
        return type(key)((*key.key, FakeMode))

    def _validate_output_for_cache_entry(
        self, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        super()._validate_output_for_cache_entry(state, key, func, args, kwargs, output)
        if any(output is each for each in args) or getattr(func, "is_view", False):
            return
        if isinstance(output, torch.Tensor) and output.untyped_storage().nbytes() > spanned_bytes(output):
            raise _BypassDispatchCache("padded storage")


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of a tensor's storage to the end of its last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize


def device_type(tensor: torch.Tensor) -> str:
    """`tensor.device.type`, which for a FakeTensor would be an operator call of its own (`FakeTensor.fake_device`,
    since 1.13)."""
    return str((tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type)


def detached_sharing_version(value: Any) -> Any:
    """Nested values with each tensor detached, for use within a dispatch mode: below autograd nothing but this guard
    lets the alias count writes with its base.

    `_SetExcludeDispatchKeyGuard` is what torch/utils/checkpoint.py itself does it with (since 2.4).
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        if isinstance(value, torch.Tensor):  # a tree of one takes several times as long
            return value.detach()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


_NO_CONTAINERS: Final = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format})


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers and dataclasses, in order."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield value
        return
    if kind in _NO_CONTAINERS:
        return
    if kind is tuple or kind is list or kind is dict:  # nearly always, and `tree_iter` takes several times as long
        for item in value.values() if kind is dict else value:
            yield from iterate_tensors(item)
        return
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from iterate_tensors(getattr(leaf, field.name))


@contextlib.contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put them back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def restored(*containers: Any) -> Iterator[None]:
    """What lists, dicts and sets have in them now, they have in them again afterwards."""
    before = [copy.copy(each) for each in containers]
    try:
        yield
    finally:
        for each, kept in zip(containers, before, strict=True):
            each.clear()
            put_back = each.extend if isinstance(each, list) else each.update
            put_back(kept)


@contextlib.contextmanager
def nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Several contexts as one, the first outermost."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@contextlib.contextmanager
def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(original)` and put the original back, also on error.

    Nests: the inner replacement wraps the outer one and goes first. An attribute that `owner` only
    inherits is removed again rather than pinned.
    """
    own, before = name in vars(owner), getattr(owner, name)
    raw, made = vars(owner)[name] if own else None, make(before)
    if _replaced is not None and isinstance(owner, types.ModuleType) and callable(made) and _is_ours(made):
        is_shared = _replaced.get(id(made), (made, before))[1] is not before
        if is_shared and isinstance(made, types.FunctionType):  # one for each that it stands for
            made = _make_another(made)
        _replaced.setdefault(id(made), (made, before))
    setattr(owner, name, made)
    try:
        yield
    finally:
        if getattr(getattr(owner, name, None), "__wrapped__", None) is made and hasattr(made, _PASSES_ON):
            pass  # a library that was imported meanwhile has wrapped it, as Lightning does with torch.compile
        elif own:
            setattr(owner, name, raw)
        else:
            delattr(owner, name)


_PASSES_ON: Final = "_fxmem_passes_on"
"""Marks what calls what it stands for, once it is no longer wanted."""
_replaced: dict[int, tuple[Any, Any]] | None = None
"""By identity, what stands in the place of modules' functions and classes, and what was there; None while nobody asks.
"""


@contextlib.contextmanager
def imports_unchanged() -> Iterator[None]:
    """Modules that are imported inside have afterwards what others really offer.

    One that asks for a function by name (`from torch import save`) gets what stands in its place, and would keep it.
    """
    global _replaced
    if _replaced is not None:
        yield
        return
    _replaced, loaded = {}, set(sys.modules)
    try:
        yield
    finally:
        replaced, _replaced = _replaced, None
        for name in sys.modules.keys() - loaded:
            if name.startswith(_PACKAGE):
                continue
            scope = getattr(sys.modules[name], "__dict__", {})
            for key, value in list(scope.items()):
                while (found := replaced.get(id(value))) is not None:
                    value = scope[key] = found[1]


def _make_another(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


def _is_ours(made: Any) -> bool:
    """Whether a function or class is of this package, and so nobody's own."""
    code = getattr(made, "__code__", None)
    if code is None:
        return str(getattr(made if isinstance(made, type) else type(made), "__module__", "")).startswith(_PACKAGE)
    return bool(code.co_filename.startswith(_FOLDER))


@contextlib.contextmanager
def add(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give `owner` an attribute that it has not."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


Patches = Iterator[AbstractContextManager[Any]]
"""What is entered one after another, and puts back in the end what it has replaced."""


def replace(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Put a value in the place of `owner.name`, as `patch` does."""
    return patch(owner, name, lambda _: value)


class StandIn:
    """Stands where programs look a function up, and is equal to it: in a table by functions, as libraries of tensor
    subclasses keep them for `__torch_function__`, either is found by the other.

    Args:
        run: what is called.
        function: what it stands for.
    """

    def __init__(self, run: Callable[..., Any], function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._run, self._function = run, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._function

    def __hash__(self) -> int:
        return hash(self._function)


@contextlib.contextmanager
def wrap(owner: Any, name: str, call: Callable[..., Any], *, here: bool = False) -> Iterator[None]:
    """Run `call(original, *args, **kwargs)` where the function `owner.name` is called, as `patch` does.

    Args:
        owner: has the function; a static method stays one.
        name: of it.
        call: runs in its place.
        here: whether this thread's calls alone go there, and those of others to the original.
    """
    me, is_over = threading.get_ident(), False

    def make(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_over or (here and threading.get_ident() != me):  # over: who has kept it gets what was there before
                return original(*args, **kwargs)
            return call(original, *args, **kwargs)

        setattr(run, _PASSES_ON, True)
        return staticmethod(run) if isinstance(vars(owner).get(name), staticmethod) else run

    with patch(owner, name, make):
        try:
            yield
        finally:
            is_over = True


def replace_all(places: Iterable[tuple[Any, str, Any]]) -> AbstractContextManager[None]:
    """Put other values, of `(owner, attribute, value)`, in the place of attributes that are there."""
    return nested(*(replace(owner, name, value) for owner, name, value in places if hasattr(owner, name)))


def replace_raw_stream(find: Callable[[], int]) -> AbstractContextManager[None]:
    """Kernels of other packages are given this stream (`torch._C._cuda_getCurrentRawStream`, since 1.10)."""
    return replace_all([(torch._C, "_cuda_getCurrentRawStream", lambda _: find())])


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of one storage."""
    layouts = [(storage_key(each), each.shape, each.stride(), each.storage_offset()) for each in (one, other)]
    return layouts[0] == layouts[1]


def op_arguments(func: OpOverload) -> Any:
    """The arguments an op is declared with (`OpOverload._schema`, since 1.10)."""
    return func._schema.arguments


def op_name(func: Any) -> str:
    """`add` of `aten.add.Tensor` (`OpOverload._opname`, since 1.10); empty for a higher-order operator."""
    return str(getattr(func, "_opname", ""))


def has_out(func: Any) -> bool:
    """Whether an operator writes its results to tensors that it is given for them (since 1.8)."""
    return any(argument.is_out for argument in func._schema.arguments)


def is_mutable(func: OpOverload) -> bool:
    """Whether an op writes to an argument (`OpOverload._schema`, since 1.10)."""
    return isinstance(func, OpOverload) and bool(func._schema.is_mutable)


def list_written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an op's arguments that it writes to."""
    declared = op_arguments(func)
    given = {**{each.name: value for each, value in zip(declared, args, strict=False)}, **kwargs}
    return list(iterate_tensors([given.get(each.name) for each in declared if each.is_write]))


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether the dispatcher runs an op as other ops (`torch._C._dispatch_has_kernel_for_dispatch_key`, since 1.11).

    Not those that also have a kernel of their own for CPU and CUDA, such as `silu_backward`.
    `OpOverload.has_kernel_for_dispatch_key` would also count decompositions written in Python, which only tracers of
    programs use: the CPU's `native_batch_norm` has one.
    """
    if not isinstance(func, OpOverload):
        return False
    name = func.name()  # type: ignore[no-untyped-call]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU") and not has(name, "CUDA")


def decompose(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op as other ops, as the dispatcher does (`OpOverload._op_dk`, since 2.0).

    `OpOverload.decompose` prefers what is written in Python for tracers of programs: matrix products, dropout, and
    upsampling, by indices and with many temporaries.
    """
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


_EAGER_KERNELS: Final = {
    **dict.fromkeys(("flex_attention", "flex_attention_backward"), "CompositeExplicitAutograd"),
    **dict.fromkeys(("run_and_save_rng_state", "run_with_rng_state"), "BackendSelect"),
}


def run_higher_order(func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what takes operators as arguments as eager code does on a device: by its kernel, which calls others.

    `py_kernels` (since 1.13): those of `flex_attention` (torch/_higher_order_ops/flex_attention.py, since 2.5), and of
    what is run again with the numbers it drew before (torch/_prims/rng_prims.py, since 2.0).
    """
    if (name := str(func)) not in _EAGER_KERNELS:
        raise NotImplementedError(f"There was no rule registered for HigherOrderOperator {name}.")
    return func.py_kernels[getattr(torch._C.DispatchKey, _EAGER_KERNELS[name])](*args, **kwargs)


@functools.cache
def explicit_kernel(func: OpOverload, device_type: str) -> Callable[..., Any] | None:
    """The kernel of an op that calls other ops below autograd; None where this device has a kernel of its own.

    A CompositeExplicitAutograd kernel serves the devices that have no kernel of their own
    (`torch._C._dispatch_has_kernel_for_dispatch_key`, since 1.11; `OpOverload._op_dk`, since 2.0).
    """
    if not isinstance(func, OpOverload) or func.is_view:
        return None
    if any(argument.is_write and not argument.is_out for argument in op_arguments(func)):
        return None  # it would write twice
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()  # type: ignore[no-untyped-call]
    if has(name, device_type.upper()):
        return None
    for key in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        if has(name, key):
            return functools.partial(func._op_dk, getattr(torch._C.DispatchKey, key))
    return None


@functools.cache
def python_kernel(func: OpOverload) -> Callable[..., Any] | None:
    """The kernel on a card of an operator that a package has in Python, as `torch.library` registers it; None where
    there is none.

    A call of it leads back to Python, whatever modes there are (`OpOverload._op_dk`, since 2.0). Addresses of tensors
    are the tensors themselves meanwhile: what a kernel hands on to a library knows them.
    """
    name = func.name()  # type: ignore[no-untyped-call]
    for key in ("CUDA", "CompositeExplicitAutograd"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            kernel = functools.partial(func._op_dk, getattr(torch._C.DispatchKey, key))
            break
    else:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        with replace(torch.Tensor, "data_ptr", lambda tensor: tensor):
            return kernel(*args, **kwargs)

    return run


def is_function_mode_active() -> bool:
    """Whether a TorchFunctionMode sees this thread's calls now (`torch._C._len_torch_function_stack`, since 2.0)."""
    return bool(torch._C._len_torch_function_stack())


def optimizer_state(optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, Any]:
    """The state of an optimizer by parameter; a wrapper that leaves out `Optimizer.__init__` has none."""
    state: Mapping[torch.Tensor, Any] = getattr(optimizer, "state", {})
    return state


def runs_only_its_own_code(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer is torch's code alone: a class of torch.optim with no hooks
    (`_optimizer_step_pre_hooks`, since 2.0)."""
    if getattr(torch.optim, type(optimizer).__name__, None) is not type(optimizer):
        return False  # may have no hooks at all: a wrapper that leaves out `Optimizer.__init__`
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    every = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    return not any((*own, *every))


def pause_observers() -> AbstractContextManager[Any]:
    """For the duration no TorchFunctionMode sees this thread's calls (`torch._C.DisableTorchFunction`, since 1.11)."""
    manager: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return manager


@contextlib.contextmanager
def without_function_modes(kind: type) -> Iterator[None]:
    """For the duration no TorchFunctionMode of this kind sees this thread's calls; those of the program do
    (`torch.overrides._pop_mode` and `_push_mode`, since 2.0)."""
    before = _pop_function_modes()
    try:
        for mode in before:
            if not isinstance(mode, kind):
                torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]
        yield
    finally:
        _pop_function_modes()
        for mode in before:
            torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def _pop_function_modes() -> list[Any]:
    """The modes that were on the stack, outermost first."""
    pop: Callable[[], Any] = torch.overrides._pop_mode
    return [pop() for _ in range(torch._C._len_torch_function_stack())][::-1]


def has_program_mode() -> bool:
    """Whether a mode that a real run of the program has sees this thread's operators
    (`_get_current_dispatch_mode_stack` of torch.utils._python_dispatch, since 2.0)."""
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    return any(getattr(mode, "is_of_program", not isinstance(mode, FakeTensorMode)) for mode in stack)


def keep_modes() -> Callable[[], AbstractContextManager[None]]:
    """What sees this thread's operators now: a context in which it sees them again, wherever no mode does
    (`_get_current_dispatch_mode_stack`, `_push_mode` and `_pop_mode` of torch.utils._python_dispatch, since 2.0)."""
    kept = _python_dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with no_modes():
            for mode in kept:
                _python_dispatch._push_mode(mode)
            try:
                yield
            finally:
                for _ in kept:
                    _python_dispatch._pop_mode()

    return inside


@contextlib.contextmanager
def silence_fake_kernels() -> Iterator[None]:
    """FakeTensorMode logs a traceback for each error it then raises (logger `torch._subclasses.fake_tensor`, since
    2.8); the error is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


storage_address: Callable[[Any], int] = operator.attrgetter("_cdata")
"""Which storage an `UntypedStorage` is, while it is alive (`UntypedStorage._cdata`, since 1.0); asked several times an
op."""


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in, while that storage is alive; a fake one has no address (`UntypedStorage._cdata`,
    since 1.0)."""
    return storage_address(tensor.untyped_storage())
