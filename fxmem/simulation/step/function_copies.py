"""Functions that a model carries along, made to work on its copy.

`copy.deepcopy` copies a model's modules and tensors but neither functions nor the hooks of tensors. A hook or a patched
`forward` that is a closure over the model would go on reading and writing the original: its weights, its caches, the
dictionary its features are put in.

A function is made anew where a variable it closes over, a default argument or a global it names is part of the model,
or is a container or an optimizer of such parts, or a container with nothing in it yet (where features will go);
containers are copied once for all functions. Everything else stays what it is.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import modules as torch_modules

_DEPTH = 3
"""How deep containers are looked into."""
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_HOOKS = "hooks"
"""Ends the names of the dictionaries in which modules keep hooks (torch/nn/modules/module.py)."""


class Rebinder:
    """Remakes functions for one copy of a model.

    Args:
        memo: what `copy.deepcopy` was given and has filled: the copy of each object by the original's id.
        foreach: the form of optimizers that functions hold, where nothing else says so; None leaves it to torch.
    """

    def __init__(self, memo: dict[int, Any], *, foreach: bool | None = None) -> None:
        self._memo = memo
        self._foreach = foreach
        self._remade: dict[int, Any] = {}
        self._kept: list[Any] = []  # ids stay theirs while the objects live

    def model(self, original: nn.Module) -> None:
        """Rebuild what the copy's modules refer to. Parameters and buffers get the hooks of the original's."""
        for module in original.modules():
            made = self._memo.get(id(module))
            if isinstance(made, nn.Module):
                for name, value in list(vars(made).items()):
                    if isinstance(value, dict) and name.endswith(_HOOKS):
                        value.update({key: self.function(hook) for key, hook in value.items()})
                    elif isinstance(value, (types.FunctionType, functools.partial)):
                        vars(made)[name] = self.function(value)
            for _, tensor in torch_modules.own_tensors(module):
                self._tensor_hooks(tensor)

    def function(self, function: Any) -> Any:
        """`function` for the copy; itself where it has nothing to do with the model."""
        if id(function) in self._memo:
            return self._memo[id(function)]
        if id(function) in self._remade:
            return self._remade[id(function)]
        self._kept.append(function)
        if isinstance(function, types.MethodType):
            owner = function.__self__
            copied = self._memo[id(owner)] if id(owner) in self._memo else self._object(owner)
            made: Any = function if copied is owner else types.MethodType(function.__func__, copied)
        elif isinstance(function, functools.partial):
            keywords = {k: self._value(v) for k, v in function.keywords.items()}
            made = functools.partial(self.function(function.func), *map(self._value, function.args), **keywords)
        elif isinstance(function, types.FunctionType):
            made = self._closure(function)
        else:
            made = self._object(function)
        self._remade[id(function)] = made
        return made

    def _object(self, value: Any) -> Any:
        """Copy a function's object, its attributes replaced by the model copy's; the object itself if none is."""
        moved = {name: self._memo[id(each)] for name, each in _attributes(value).items() if id(each) in self._memo}
        if not moved or isinstance(value, nn.Module):
            return value
        made = self._memo[id(value)] = copy.copy(value)
        vars(made).update(moved)
        return made

    def _tensor_hooks(self, tensor: torch.Tensor) -> None:
        made = self._memo.get(id(tensor))
        if made is None or made is tensor or id(tensor) in self._remade:
            return
        self._kept.append(tensor)
        self._remade[id(tensor)] = made
        for hook in list((torch_autograd.tensor_hooks(tensor) or {}).values()):
            made.register_hook(self.function(hook))
        for hook in torch_autograd.accumulation_hooks(tensor):
            made.register_post_accumulate_grad_hook(self.function(hook))

    def _closure(self, function: types.FunctionType) -> Any:
        self._remade[id(function)] = function  # one that closes over itself
        cells = function.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        values = [self._value(value) for value in contents]
        defaults = tuple(self._value(value) for value in function.__defaults__ or ())
        # Other functions may go on using the module's own functions, which are left alone.
        named = {name: value for name, value in _globals(function).items() if not isinstance(value, _FUNCTIONS)}
        moved = {name: new for name, value in named.items() if (new := self._value(value)) is not value}
        keywords = {name: self._value(value) for name, value in (function.__kwdefaults__ or {}).items()}
        before = (*contents, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if all(a is b for a, b in zip(before, (*values, *defaults, *keywords.values()), strict=True)) and not moved:
            return function
        closure = tuple(
            cell if new is old else types.CellType(new) for cell, old, new in zip(cells, contents, values, strict=True)
        )
        scope = {**function.__globals__, **moved} if moved else function.__globals__
        made = types.FunctionType(function.__code__, scope, function.__name__, defaults or None, closure or None)
        made.__kwdefaults__ = keywords or None
        return functools.update_wrapper(made, function)

    def _value(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, _FUNCTIONS):
            return self.function(value)
        is_container = isinstance(value, (dict, list, set, tuple))
        if isinstance(value, Optimizer) or (is_container and self._concerns_the_model(value)):
            return self._copy(value)
        return value

    def _copy(self, value: Any) -> Any:
        self._kept.append(value)
        try:
            made = copy.deepcopy(value, self._memo)
        except Exception:  # holds something that cannot be copied: shared with the original, as functions are
            return value
        for optimizer in _optimizers(made, _DEPTH):
            # It comes back with the first step, on the copy's device and in the form chosen here.
            optimizer.state.clear()
            for group in optimizer.param_groups:
                if self._foreach is not None and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = self._foreach
        return made

    def _concerns_the_model(self, value: Any) -> bool:
        return (not value and isinstance(value, (dict, list, set))) or any(
            id(item) in self._memo or isinstance(item, (torch.Tensor, Optimizer)) for item in _items(value, _DEPTH)
        )


def tensors_behind(function: Any) -> Iterator[nn.Module | torch.Tensor]:
    """The modules and tensors that a function has at hand.

    It is one or a method of one, closes over them, has them as default arguments or names them as globals; directly, in
    a container or through a function that it has at hand itself. A function that it names as a global is not looked
    into, as `Rebinder` does not copy one.
    """
    pending = [(each, _DEPTH) for each in (function, *_attributes(function).values())]
    seen: set[int] = set()
    while pending:
        value, depth = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (nn.Module, torch.Tensor)):
            yield value
        elif isinstance(value, types.FunctionType):
            named = (each for each in _globals(value).values() if not isinstance(each, _FUNCTIONS))
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            pending += [(each, _DEPTH) for each in (*named, *map(_content, value.__closure__ or ()), *defaults)]
        elif isinstance(value, types.MethodType):
            pending += [(each, depth) for each in (value.__self__, *_attributes(value.__self__).values())]
        elif isinstance(value, functools.partial):
            pending += [(each, depth) for each in (value.func, *value.args, *value.keywords.values())]
        elif depth:
            pending += [(item, depth - 1) for item in _items(value, 1)]


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object of a class of the user's own."""
    others = (nn.Module, torch.Tensor, type, types.ModuleType)
    return {} if isinstance(value, others) else getattr(value, "__dict__", {})


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """What a function names of its module."""
    scope = function.__globals__
    return {name: scope[name] for name in _names(function.__code__) if name in scope}


def _items(value: Any, depth: int) -> Iterator[Any]:
    inside: Iterable[Any] = value if isinstance(value, (list, set, tuple)) else ()
    for item in (*value.keys(), *value.values()) if isinstance(value, dict) else inside:
        yield item
        if depth > 1:
            yield from _items(item, depth - 1)


def _optimizers(value: Any, depth: int) -> Iterator[Optimizer]:
    return (item for item in (value, *_items(value, depth)) if isinstance(item, Optimizer))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
