"""The rule by which rounds of a program are found, recorded or measured for real.

A round ends when every optimizer with parameters on the target has stepped: a GAN's generator and discriminator, all
micro-batches of one step. One that steps within another's step counts with that. Without an optimizer, each call of a
model after a backward begins one; where no backward accumulates gradients, after one that returns them
(`torch.autograd.grad`, `torch.func.grad`). What runs before the first call of a module is set-up. Where a program is
recorded, another pass of the loop around what returned gradients begins one, too, whatever it calls.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxmem._torch import common as torch_common
from fxmem.simulation.code.source_lines import program_modules, variables
from fxmem.simulation.code.source_uses import Named

_AGAIN: Final = 20
"""Steps of one optimizer after which another that has not stepped is not waited for."""


class Enough(BaseException):
    """As much of the program has run as was asked for.

    No `Exception`, so that a training loop's `except Exception` does not swallow it.
    """


class RoundRule:
    """Finds where set-up and rounds end; what is to be done there is a subclass's."""

    def __init__(self, *, compiles: bool = False) -> None:
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped: Counter[int] = Counter()
        self._in_step = 0
        self._backwards = 0
        """Of the round; those that return gradients count until one accumulates them."""
        self._accumulates = False
        self._is_setup = True
        self._is_marked = False
        self.compiles = compiles
        """Whether what the program compiles is compiled."""

    # --- a subclass's -------------------------------------------------------------------------------------------------

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has a parameter on the target."""
        raise NotImplementedError

    def _end_setup(self) -> None:
        """Set-up is over."""
        raise NotImplementedError

    def _end_round(self) -> None:
        """A round is over."""
        raise NotImplementedError

    def _note_optimizer(self) -> None:
        """The program makes an optimizer."""

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, within no other's step."""

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, within no other's step."""

    # --- what the program does ----------------------------------------------------------------------------------------

    def module_called(self, module: torch.nn.Module) -> None:
        """A module on the target is about to be called, within no other."""
        if self._is_setup:
            self._is_setup = False
            self._end_setup()
        waits = self._backwards and not self._in_step and not self._is_marked
        if waits and not any(map(self._counts, list(self.optimizers))):
            self._finish_round()  # nothing steps: the program changes its parameters itself

    def mark_step(self) -> None:
        """End a round where the program says so, and from here on there alone."""
        self._is_setup, self._is_marked = False, True
        self._finish_round()

    def backward_begins(self) -> None:
        """A backward that accumulates gradients begins."""
        self._is_setup = False

    def backward_ends(self, *, accumulates: bool = True) -> None:
        """A backward is over; within it, recomputed modules begin no round."""
        if accumulates and not self._accumulates:
            self._backwards, self._accumulates = 0, True
        self._backwards += accumulates or not self._accumulates

    @contextlib.contextmanager
    def observe_optimizers(self) -> Iterator[None]:
        """Watch every optimizer that is made or steps inside."""

        def init(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._note_optimizer()
            original(optimizer, *args, **kwargs)
            self.optimizers.add(optimizer)

        with (
            register_optimizer_step_pre_hook(self._make_hook(self._step_begins)),
            register_optimizer_step_post_hook(self._make_hook(self._step_ends)),
            torch_common.wrap(torch.optim.Optimizer, "__init__", init),
        ):
            yield

    def _make_hook(self, hook: Callable[..., None]) -> Callable[..., None]:
        """The hook, which dynamo does not trace into."""
        return torch.compiler.disable(hook) if self.compiles else hook  # type: ignore[no-untyped-call]

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_step:
            self._begin_step(optimizer)
        self._in_step += 1

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step -= 1
        if self._in_step:
            self._stepped[id(optimizer)] += 1  # within another's, as ZeroRedundancyOptimizer's own does: not waited for
            return
        self._end_step(optimizer)
        if not self._counts(optimizer):
            return
        self.optimizers.add(optimizer)
        self._stepped[id(optimizer)] += 1
        if not self._is_marked and (not self._find_waiting() or self._stepped[id(optimizer)] > _AGAIN):
            self._finish_round()

    def _find_waiting(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose step the round still waits for."""
        return [each for each in list(self.optimizers) if self._counts(each) and not self._stepped[id(each)]]

    def _finish_round(self) -> None:
        self._stepped.clear()
        self._backwards = 0
        self._end_round()


def stepped_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer steps."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


# --- which functions, classes and modules have something as their own, by the objects that run and hold it ------------


Owner = type | types.CodeType | None
"""The class of the object that has something as an attribute, or the function whose variable it is; None: a variable
of the functions that run or of a module."""
_WORD: Final = re.compile(r"[A-Za-z_]\w*")


def split_path(path: str) -> list[str]:
    """`meter` and `values` of `graph of meter.values[3]`."""
    return _WORD.findall(re.sub(r"\[.*?\]", "", re.sub(r"^((graph|frames|hook) of )+", "", path)))


def find_names(path: str, owner: Owner, frames: Sequence[types.FrameType]) -> frozenset[Named]:
    """What the program's code calls what holds something; nothing where that is not known.

    Args:
        path: what a search has called it.
        owner: who has it.
        frames: of the program's functions that run, the innermost first.
    """
    words = split_path(path)
    if not words:
        return frozenset()
    if owner is not None:
        scopes = _find_scopes(owner, getattr(owner, "co_filename", ""))
        return frozenset(Named(file, scope, words[-1]) for file, scope in scopes)
    found = frozenset(_find_variables(words[-1], frames)) if len(words) == 1 else frozenset()
    return found or frozenset(_find_global(words, frames))


def _find_variables(name: str, frames: Sequence[types.FrameType]) -> Iterator[Named]:
    """The running functions' variables with this name, or with the value of the innermost of these."""
    value: object = None
    for frame in frames:
        own, code, file = variables(frame), frame.f_code, frame.f_code.co_filename
        if value is None:
            value = own.get(name, frame.f_globals.get(name))
        for each in {each for each in own if value is not None and own[each] is value}:
            scopes = _find_scopes(code, file) if each in code.co_freevars else [(file, _scope_of(code))]
            yield from (Named(path, scope, each) for path, scope in scopes)
        if value is not None and frame.f_globals.get(name) is value:
            yield Named(file, "", name)


def _find_global(words: Sequence[str], frames: Sequence[types.FrameType]) -> Iterator[Named]:
    """A variable of a module, or of a class."""
    owner, name = ".".join(words[:-1]), words[-1]
    for module, scope in program_modules():
        if owner == module or not owner:
            yield Named(scope["__file__"], "", name)
    for frame in frames:
        if isinstance(cls := frame.f_globals.get(owner), type):
            yield from (Named(file, scope, name) for file, scope in _find_scopes(cls, ""))


@functools.lru_cache(maxsize=4096)
def _find_scopes(owner: type | types.CodeType, of_code: str) -> tuple[tuple[str, str], ...]:
    """A class and those it inherits from, each with its file; a function and those around it: its file is given, for
    equal code of two files is one to the cache."""
    if isinstance(owner, types.CodeType):
        inner, parts = _scope_of(owner), []
        while inner:
            parts.append(inner)
            inner = inner.rpartition(".<locals>.")[0]
        return tuple((of_code, each) for each in parts)
    classes = [(vars(sys.modules.get(each.__module__) or functools).get("__file__"), each) for each in owner.__mro__]
    return tuple((file, each.__qualname__) for file, each in classes if isinstance(file, str))


def _scope_of(code: types.CodeType) -> str:
    return "" if code.co_name == "<module>" else code.co_qualname
