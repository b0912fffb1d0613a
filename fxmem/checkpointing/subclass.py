"""A module that runs its `forward` differently, and is still the user's module.

`become` makes an instance one of a subclass of its class with the same name. So `isinstance`, `repr`, hooks,
`state_dict` and attributes are as before, and `copy.deepcopy` and `pickle` give copies that behave alike on their own
parameters; a function put on the instance would call the first module's forever and could not be pickled.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

_WAY = "_fxmem_checkpointing"


class Way(Protocol):
    """How a module's `forward` is carried out. Stored on the instance, copied and pickled with it."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `forward(module, *args, **kwargs)`, `forward` being the class's own."""


def find_way(module: nn.Module) -> Way | None:
    """How a module runs its `forward`, if not as its class says."""
    way: Way | None = vars(module).get(_WAY) if hasattr(type(module), "_fxmem_original") else None
    return way


def become(module: nn.Module, way: Way) -> None:
    """From now on `module` runs its `forward` in this way."""
    cls: Any = type(module)
    module.__class__ = _subclass(cls)
    vars(module)[_WAY] = way


def restore(module: nn.Module) -> None:
    """Undo `become`, if it was done."""
    if find_way(module) is not None:
        del vars(module)[_WAY]
        cls: Any = type(module)
        module.__class__ = cls._fxmem_original


@functools.cache
def _subclass(cls: Any) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_WAY].run(self, cls.forward, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        with _set_class(self, cls):
            reduced: Any = self.__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        return _rebuild, (make, arguments, vars(self)[_WAY]), *rest

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        way = vars(self)[_WAY]
        with _set_class(self, cls):
            copied = copy.deepcopy(self, memo)
        become(copied, copy.deepcopy(way, memo))
        return copied

    namespace = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {"__reduce_ex__": reduce, "_fxmem_original": cls, "forward": forward}
    if hasattr(cls, "__deepcopy__"):
        namespace["__deepcopy__"] = deepcopy
    made: type[nn.Module] = types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(namespace))
    return made


@contextlib.contextmanager
def _set_class(module: nn.Module, cls: type[nn.Module]) -> Iterator[None]:
    now, module.__class__ = module.__class__, cls
    try:
        yield
    finally:
        module.__class__ = now


def _rebuild(make: Callable[..., nn.Module], arguments: tuple[Any, ...], way: Way) -> nn.Module:
    """What `pickle` and `copy` call; the state follows."""
    module = make(*arguments)
    become(module, way)
    return module
