"""Private names of torch that a whole program meets on its way to a card: tensors that change place under their own
name, classes of tensors, tracing and scripting, data loaders, lists of types that torch compares with.

Checked on torch 2.11.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
import torch.utils.data
from torch.fx.experimental import proxy_tensor
from torch.optim.optimizer import _foreach_supported_types as _OPTIMIZER_TYPES
from torch.utils._foreach_utils import _foreach_supported_types as _UTILITY_TYPES
from torch.utils.data import dataloader
from torch.utils.weak import WeakIdKeyDictionary

from fxmem._torch.common import FakeTensor, iterate_tensors, nested, no_modes, replace, restored, wrap
from fxmem._torch.wrappers import is_wrapper

_of_subclass: Final[Any] = vars(torch.Tensor)["__torch_function__"].__func__
_LINEAR: Final = torch._C._nn.linear  # what `torch.nn.functional.linear` is (since 1.10)


def functions_to_script() -> AbstractContextManager[None]:
    """TorchScript compiles torch's own functions by their names inside, whatever stands in for them."""
    return replace(torch.nn.functional, "linear", _LINEAR)


@contextlib.contextmanager
def scripts_unfused() -> Iterator[None]:
    """Let TorchScript run a function operator by operator: a fused kernel is made for a card that is there
    (`_jit_override_can_fuse_on_gpu`, since 1.0)."""
    before = torch._C._jit_can_fuse_on_gpu()
    torch._C._jit_override_can_fuse_on_gpu(False)
    try:
        yield
    finally:
        torch._C._jit_override_can_fuse_on_gpu(before)


@functools.cache
def _script_class(cls: Any) -> type[torch.nn.Module]:
    """A class of modules that is also one of those that `torch.jit.script` returns (`ScriptModule`, since 1.0)."""
    script: Any = torch.jit.ScriptModule
    own = {"__module__": cls.__module__, "save": torch.jit.save}
    made: type[torch.nn.Module] = type(script)(cls.__name__, (cls, script), own)
    return made


def pass_for_scripted(module: torch.nn.Module) -> None:
    """Let a module that stays as it was written be what a program expects of `torch.jit.script`."""
    if not isinstance(module, torch.jit.ScriptModule):
        kind: Any = type(module)
        module.__class__ = _script_class(kind)


class ScriptedForward:
    """A forward by TorchScript's interpreter, on the parameters, buffers and mode that the module as written has by
    then (`torch._C.ScriptModule.setattr`, since 1.2)."""

    def __init__(self, compiled: Any, written: torch.nn.Module) -> None:
        self._compiled, self._written = compiled, weakref.ref(written)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts, written = dict(self._compiled.named_modules()), self._written()
        for path, module in () if written is None else written.named_modules():
            part = parts[path]._c
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is not None:
                    part.setattr(name, value)
            part.setattr("training", module.training)
        return self._compiled.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScriptedForward:
        return ScriptedForward(self._compiled, memo[id(self._written())])


def is_as_written(module: Any) -> bool:
    """Whether a module only passes for one of TorchScript (`_actual_script_module`, since 1.2)."""
    scripts: Any = torch.jit
    is_script = isinstance(module, scripts.ScriptModule) and not isinstance(module, scripts.RecursiveScriptModule)
    return is_script and "_actual_script_module" not in vars(module)


def observe_make_fx(make: Callable[..., Any]) -> AbstractContextManager[None]:
    """Call `make(original, function, ...)` for `make_fx`, by which a program traces itself (since 1.12)."""
    return wrap(proxy_tensor, "make_fx", make)


_aside: Final[Any] = WeakIdKeyDictionary()
"""What FakeTensor keeps in the attributes of a tensor, for those of a class of the program's own: such a class may copy
or replace all of a tensor's attributes (`torch.utils.weak`, since 2.0)."""


class _Functions(FakeTensor):
    """A fake tensor whose class is that of the results, as torch has it of a subclass; FakeTensor switches that off."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _of_subclass(cls, func, types, args, kwargs)


@functools.cache
def _fake_class(cls: type[torch.Tensor]) -> type[FakeTensor]:
    """A class of tensors with methods and attributes of its own, of fakes; `nn.Parameter` wants `detach` to keep it."""

    def get_attribute(tensor: Any, name: str) -> Any:
        kept = _aside.get(tensor, {})
        if name in kept:
            return kept[name]
        if hasattr(cls, "__getattr__"):
            return cls.__getattr__(tensor, name)
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.Tensor.detach(tensor)
        if type(made) is not type(tensor):
            _set_class(made, type(tensor))
        return made

    own = {"__module__": cls.__module__, "__getattr__": get_attribute, "detach": detach}
    return type(cls.__name__, (cls, _Functions), own)


def _set_class(fake: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """Make a new fake tensor one of a class of the program's own."""
    _aside[fake] = dict(vars(fake))
    vars(fake).clear()
    fake.__class__ = cls if issubclass(cls, FakeTensor) else _fake_class(cls)


@contextlib.contextmanager
def plain_within(types: Iterable[type], given: Any) -> Iterator[None]:
    """For the duration of an operator, let fakes among `given` of a class of the program's own be plain ones: what
    torch's Python calls of them there (`x.to` in a decomposition) is no method of that class, as it is none in C++."""
    there = iterate_tensors(given) if any(issubclass(each, _Functions) for each in types) else ()
    found = (each for each in there if isinstance(each, _Functions))
    # Not a parameter's, whose own data its `to` replaces.
    own: dict[int, Any] = {id(each): each for each in found if not isinstance(each, torch.nn.Parameter)}
    before = [(each, type(each), dict(vars(each))) for each in own.values()]
    for each, _, _ in before:
        vars(each).clear()
        vars(each).update(_aside.get(each, {}))
        each.__class__ = FakeTensor
    try:
        yield
    finally:
        for each, cls, attributes in before:
            _aside[each] = dict(vars(each))
            vars(each).clear()
            vars(each).update(attributes)
            each.__class__ = cls


def alias_as(original: Callable[..., Any], tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    """`Tensor.as_subclass` (since 1.7): of a fake tensor an alias of the subclass that is a fake one as well.

    `THPVariable_as_subclass` (torch/csrc/autograd/python_variable.cpp) aliases, too.
    """
    if not isinstance(tensor, FakeTensor):
        return original(tensor, cls.__bases__[0] if issubclass(cls, _Functions) else cls)  # type: ignore[no-any-return]
    return _of_class(torch.ops.aten.alias.default, tensor, cls)


def _of_class(view: Callable[..., Any], tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made: torch.Tensor = view(tensor)
    if cls not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        _set_class(made, cls)
    return made


def make_subclass(
    original: Callable[..., Any], cls: type[torch.Tensor], data: torch.Tensor, *rest: Any, **settings: Any
) -> Any:
    """`Tensor._make_subclass` (since 1.7), by which parameters of a class of their own are made: of a fake tensor a
    detached one of that class that is a fake one as well. It does not keep the tensor."""
    if not isinstance(data, FakeTensor):
        return original(cls, data, *rest, **settings)
    made = _of_class(torch.ops.aten.detach.default, data, cls)
    if rest and rest[0]:
        made.requires_grad_()
    return made


def is_host_subclass(value: Any) -> bool:
    """Whether a tensor has a class of its own that changes no operator: it has methods and attributes."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, FakeTensor)
    return isinstance(value, torch.Tensor) and not is_plain and not is_wrapper(value)


def import_dynamo() -> None:
    """Import the compiler's front, which torch itself does where the first optimizer is made (`torch._compile`, since
    2.0)."""
    importlib.import_module("torch._dynamo")


LOADER_ITERATOR: Final[Any] = dataloader._BaseDataLoaderIter
"""The iterator of a `DataLoader` in this process; its `__next__` hands out a batch (since 1.2)."""


class LoadingPlan(NamedTuple):
    """How a data loader loads."""

    workers: int
    ahead: int
    """Batches that its workers load before they are asked for."""
    pins: bool
    is_first: bool
    """Whether it has handed out one batch."""


def loading_plan(iterator: Any) -> LoadingPlan:
    """Read how a loader's iterator loads, by its attributes (since 1.2, `_prefetch_factor` since 1.7); `_fxmem_pins` is
    what `loaders_at_home` took from it."""
    workers = int(iterator._num_workers)
    ahead = workers * int(getattr(iterator, "_prefetch_factor", 0) or 0)
    with contextlib.suppress(TypeError, NotImplementedError):  # an IterableDataset that does not know its length
        ahead = max(min(ahead, len(iterator) - 1), 0)
    return LoadingPlan(workers, ahead, getattr(iterator, "_fxmem_pins", False), iterator._num_yielded == 1)


_Uninitialized: Final[Any] = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_LIKE: Final = "_fxmem_like"
_data: Any = torch.Tensor.data
_grad: Any = torch.Tensor.grad
SET_DATA: Final[Any] = _data.__set__
GET_DATA: Final[Any] = _data.__get__
GET_GRAD: Final[Any] = _grad.__get__
"""What a mode of torch functions sees where a program writes or reads these attributes (since 1.13)."""


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give `tensor` the contents of `other` under its own identity.

    Either may be fake. What `tensor.data = other` does where both are of one kind: optimizers, tied weights and names
    that held the tensor before still hold it (`torch._C._swap_tensor_impl`, since 2.2, as `torch.utils.swap_tensors`
    uses it). `other` is used up. Attributes that the program gave the tensor stay with it.
    """
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    needs_gradient, before = tensor.requires_grad, _find_attributes(tensor)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        moved: Any = other.detach()
        if is_parameter and not isinstance(moved, FakeTensor):
            moved = torch.nn.Parameter(moved, requires_grad=False)
        elif is_parameter:
            moved._is_param = True
    with torch._C.DisableTorchFunctionSubclass():  # a class of the program's own may ask for attributes that it has not
        moved.requires_grad_(needs_gradient and (moved.is_floating_point() or moved.is_complex()))
    _exchange(tensor, moved)
    for name, value in before.items():
        tensor.__dict__.setdefault(name, value)


def _exchange(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Exchange two tensors' contents, classes and attributes, as `torch.utils.swap_tensors` does."""
    tensor.__class__, moved.__class__ = type(moved), type(tensor)
    tensor.__dict__, moved.__dict__ = moved.__dict__, tensor.__dict__
    for each, aside in ((tensor, _aside.pop(moved, None)), (moved, _aside.pop(tensor, None))):
        if aside is not None:
            _aside[each] = aside
    if is_wrapper(tensor) and is_wrapper(moved):  # exchange what is in slots, as a DTensor's shard
        for name in copyreg._slotnames(type(tensor)):  # as `swap_tensors` finds them
            own = getattr(tensor, name)
            setattr(tensor, name, getattr(moved, name))
            setattr(moved, name, own)
    torch._C._swap_tensor_impl(tensor, moved)


def _find_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What a program gave a tensor, beside what a FakeTensor keeps there: the attributes it declares and memos of its
    shape's (since 2.0)."""
    if not isinstance(tensor, FakeTensor):
        return dict(vars(tensor))
    kept = {"_is_param", "fake_device", *FakeTensor.__annotations__}
    return {name: value for name, value in vars(tensor).items() if name not in kept and "_memo" not in name}


def _make_lazy(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    """An uninitialised tensor of the host, where a fake one would have been made."""
    settings = inspect.signature(original).bind(cls, *args, **kwargs).arguments
    like = torch.empty(0, device=settings.get("device"), dtype=settings.get("dtype"))
    with no_modes():
        made = original(cls, settings["requires_grad"]) if "requires_grad" in settings else original(cls)
    setattr(made, _LIKE, like)
    return made


def _move_lazy(
    original: Callable[..., Any], module: torch.nn.Module, move: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`Module._apply`, to which uninitialised tensors are None."""
    tables: list[dict[str, Any]] = [module._parameters, module._buffers]
    lazy = [(own, name, each) for own in tables for name, each in own.items() if isinstance(each, _Uninitialized)]
    for own, name, _ in lazy:
        own[name] = None
    try:
        return original(module, move, *args, **kwargs)
    finally:
        for own, name, each in lazy:
            own[name] = each
            setattr(each, _LIKE, move(getattr(each, _LIKE)))


def _fill_lazy(original: Callable[..., Any], tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    like = vars(tensor).pop(_LIKE)
    made = torch.empty(shape, device=device or like.device, dtype=dtype or like.dtype)
    tensor.__class__ = tensor.cls_to_become
    set_data(tensor, made)


def lazy_tensors() -> AbstractContextManager[None]:
    """Uninitialised parameters and buffers (`UninitializedTensorMixin`, since 1.8) get their shape where they were
    moved to meanwhile: each has an empty tensor that was moved in its place."""
    kinds = torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer
    return nested(
        *(wrap(kind, "__new__", _make_lazy) for kind in kinds),
        wrap(torch.nn.Module, "_apply", _move_lazy),
        wrap(_Uninitialized, "materialize", _fill_lazy),
    )


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`; either may be fake. A class of the program's own stays."""
    if isinstance(tensor, FakeTensor) != isinstance(value, FakeTensor):
        own = type(tensor)
        become(tensor, _of_class(torch.ops.aten.detach.default, value, own) if is_host_subclass(tensor) else value)
        if issubclass(own, _Functions):
            tensor.__class__ = own.__bases__[0]
        return
    SET_DATA(tensor, value)
    if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device  # an attribute of its own (since 2.0)


def swap_moved(_: Callable[[Any, Any], None], t1: torch.Tensor, t2: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` that also moves tensors to a pretended card or to meta.

    The original refuses tensors that others refer to: a graph, a weak reference, autocast's copies, a weight that
    `weight_norm` computes. Modules move by `.data =` and take them; nobody asks what becomes of their `t2`.
    """
    is_module = str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.nn.")  # past `wrap`'s own
    has_data = is_module and not is_wrapper(t1) and not is_wrapper(t2)
    if has_data and (isinstance(t1, FakeTensor) or isinstance(t2, FakeTensor) or t1.device == t2.device):
        with torch.no_grad():
            set_data(t1, t2.detach())
    elif is_module:
        become(t1, t2)  # from the host to meta, too
    else:
        _exchange(t1, t2)


def observe_mappings(note: Callable[[str, torch.UntypedStorage], None]) -> AbstractContextManager[None]:
    """Call `note` with each file that torch maps into memory, and its storage (`UntypedStorage.from_file`, public):
    `torch.load(mmap=True)` and safetensors do."""

    def from_file(original: Callable[..., Any], filename: Any, *args: Any, **kwargs: Any) -> Any:
        storage = original(filename, *args, **kwargs)
        note(os.path.basename(os.fspath(filename)), storage)
        return storage

    return wrap(torch.UntypedStorage, "from_file", from_file)


def observe_moves(run: Callable[..., Any]) -> AbstractContextManager[None]:
    """Call `run(original, module, ...)` for `Module._apply`, in which `Module.to` and its kind end (since 0.1)."""
    return wrap(torch.nn.Module, "_apply", run)


def parameters_keep_identity() -> AbstractContextManager[None]:
    """Let `Module.to` exchange the contents of parameters instead of making new ones.

    `Module._apply` makes a new Parameter where the moved one is a FakeTensor (torch/nn/modules/module.py), so that an
    optimizer made before the move would hold the old one; a card keeps the object. And let the class of such a
    parameter make another (`type(parameter)(data, requires_grad=False)`, as accelerate does), which is FakeTensor's,
    not Parameter's (torch/nn/parameter.py, since 2.0). `_swap_module_params_on_conversion` is a switch since 2.2.
    """

    def make(original: Callable[..., Any], cls: type, data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, torch.Tensor):  # and no mode
            return torch.nn.Parameter(data, *args, **kwargs)
        return original(cls, data, *args, **kwargs)

    def move(original: Callable[..., Any], module: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def make_plain(tensor: torch.Tensor) -> Any:  # a Parameter is made of it; the class stays in any case
            made = run(tensor)
            return torch.Tensor._make_subclass(torch.Tensor, made) if is_host_subclass(made) else made

        return original(module, make_plain, *args, **kwargs)

    return nested(
        replace(torch.__future__, "_swap_module_params_on_conversion", True),
        wrap(torch.utils, "swap_tensors", swap_moved),
        wrap(FakeTensor, "__new__", make),
        wrap(torch.nn.Module, "_apply", move),
    )


@contextlib.contextmanager
def fakes_are_foreach_tensors() -> Iterator[None]:
    """Let torch choose the form of optimizers for fakes as for plain tensors.

    That of `clip_grad_norm_`, too. It compares types with the lists `_foreach_supported_types`
    (torch/optim/optimizer.py and torch/utils/_foreach_utils.py, since 2.0).
    """
    lists: list[list[Any]] = [_OPTIMIZER_TYPES, _UTILITY_TYPES]
    with restored(*lists):
        for types in lists:
            types.append(FakeTensor)
        yield


_LOADER_SETTINGS: Final = ("pin_memory", "num_workers", "prefetch_factor", "persistent_workers", "timeout")


def loaders_at_home(*, workers: bool) -> AbstractContextManager[None]:
    """Let data loaders pin no memory, which asks the driver.

    Without `workers` they load in this process: others could not be given fakes (`DataLoader._get_iterator`, since
    1.7).
    """

    def get_iterator(original: Callable[[Any], Any], loader: Any) -> Any:
        state = loader.__dict__
        before = {name: state[name] for name in _LOADER_SETTINGS if name in state}
        state["pin_memory"] = False
        if not workers:
            state.update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        try:
            iterator = original(loader)
            iterator._fxmem_pins = bool(before.get("pin_memory"))
            return iterator
        finally:
            state.update(before)

    return wrap(torch.utils.data.DataLoader, "_get_iterator", get_iterator)


def empty_graph() -> Any:
    """A graph of TorchScript with nothing in it (`torch._C.Graph`, since 1.0)."""
    return torch._C.Graph()
