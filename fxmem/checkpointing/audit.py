"""Watches the first run of a region for reasons not to recompute it.

Refused, each with the region's name and what to do:

- a write in place to a tensor that was there before the region: its input, a buffer, a cache. The second run would
  start from the changed value. Batch and instance norm's own statistics are excepted (see `recompute`);
- a number or a buffer that the region puts in place of another on a module (a counter, a moving average), and lists,
  dicts and sets that it makes longer; tensors that it adds to an argument of a class of its own (a key-value cache);
- collectives: the ranks of a job need not recompute in the same order;
- results whose shape depends on values;
- `torch.utils.checkpoint` inside it: it would be recomputed within a recomputation;
- random numbers of Python or NumPy, and torch's where the plan says there are none: nothing winds those back.

Not seen: what the region does to files, to global variables, or deep inside objects that are no module's attribute or
argument.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from typing import Any

import torch
from torch import nn

from fxmem._torch import checkpoint as torch_checkpoint
from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem.checkpointing.op_signature import find_argument, find_tensors, read_signature
from fxmem.errors import UsageError

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "symm_mem"})
_SAME_STORAGE = frozenset({"aten.lift_fresh.default"})
"""Ops that return their argument and that nevertheless make a tensor: the argument is a literal's."""
_MOMENTUM = ("momentum", "exponential_average_factor")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_PYTHONS_OWN = frozenset(vars(nn.Module()))
"""Attributes every module has."""


class Audit(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    """Entered around the one run that is watched; `has_passed` afterwards gives the verdict.

    Args:
        where: the region, for messages.
        modules: those it may call.
        args, kwargs: what it is given.
        random: whether the generators' states are kept for its second run.
    """

    def __init__(
        self, where: str, modules: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], *, random: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where, self._modules, self._random = where, modules, random
        self._found: list[str] = []
        self._filled = False
        self._born: set[int] = set()
        given = [(str(name), value) for name, value in (*enumerate(args), *kwargs.items())]
        named = [(name, tensor) for name, value in given for tensor in torch_common.iterate_tensors(value)]
        parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        self._norms: dict[int, nn.Module] = {}
        self._names = {_key(tensor): f"its input {name}" for name, tensor in named}
        for module in modules:
            for name, buffer in torch_modules.own_buffers(module).items():
                if buffer is not None:
                    self._names[_key(buffer)] = f"buffer {name} of {type(module).__name__}"
                    if name in _STATISTICS and isinstance(module, torch_common.NormBase):
                        self._norms[_key(buffer)] = module
        tensors = (*(tensor for _, tensor in named), *parameters)
        self._fake = any(isinstance(tensor, torch_common.FakeTensor) for tensor in tensors)
        self._opaque = [(name, value) for name, value in given if _is_opaque(value)]
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Any:
        self._before = [_attributes(module) for module in self._modules]
        self._cached = [_reachable(value) for _, value in self._opaque]
        self._generators = self._generator_states()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch_checkpoint.observe_checkpoints(self._refuse_checkpoint))
            super().__enter__()  # type: ignore[no-untyped-call]
            self._entered = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._entered.close()
        if error is None:
            self._compare()
        self._modules, self._opaque, self._norms = [], [], {}

    def has_passed(self) -> bool:
        """Whether nothing was found and nothing was left to find out in a further run.

        Raises UsageError with what was found first.
        """
        if self._found:
            raise UsageError(f"{self._where} must not be recomputed: {self._found[0]}")
        return not self._filled

    def _refuse_checkpoint(self, function: Any) -> None:
        if type(function).__module__.rpartition(".")[0] != __name__.rpartition(".")[0]:
            self._found.append(
                "it uses torch.utils.checkpoint itself; turn that off (gradient_checkpointing_disable(), "
                "set_grad_checkpointing(False)) before planning"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = read_signature(func)
        if func.namespace in _COLLECTIVES:
            self._found.append(
                f"it communicates ({func}), and the ranks of a job need not recompute in the same order; cut around it"
            )
        elif torch.Tag.dynamic_output_shape in func.tags and _has_dynamic_shape(func, args, kwargs):
            self._found.append(f"the shape of what {func} returns depends on values; cut around it")
        switch = signature.switch
        statistics = signature.statistics if switch and find_argument(switch, args, kwargs) else ()
        for tensor in find_tensors((*signature.written, *statistics), args, kwargs):
            self._write(func, tensor, args, kwargs)
        given = {_key(tensor) for tensor in torch_common.iterate_tensors((args, kwargs))}
        result = func(*args, **kwargs)
        if signature.name in _SAME_STORAGE:
            given = set()
        self._born.update(key for tensor in torch_common.iterate_tensors(result) if (key := _key(tensor)) not in given)
        return result

    def _write(self, func: Any, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = _key(tensor)
        if key in self._born:
            return
        norm = self._norms.get(key)
        momenta = [place for place in read_signature(func).places if place[1] in _MOMENTUM]
        momentum = find_argument(momenta[0], args, kwargs) if momenta else None
        if norm is None:
            named = self._names.get(key, "a tensor made before it")
            self._found.append(f"{func} writes in place to {named}; let the region end before that, or begin after it")
        elif momentum is not None and norm.momentum not in (None, momentum):
            self._found.append(
                f"{type(norm).__name__} updates its statistics with momentum {momentum} while its own is "
                f"{norm.momentum}"
            )

    def _generator_states(self) -> list[Any]:
        states: list[Any] = [random.getstate()]
        numpy_random = getattr(sys.modules.get("numpy"), "random", None)
        if numpy_random is not None:
            states.append(numpy_random.get_state()[1].tobytes())
        if not self._random and not self._fake:
            states.append(torch.get_rng_state().numpy().tobytes())
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        return states

    def _compare(self) -> None:
        now = self._generator_states()
        if now[0] != self._generators[0]:
            self._found.append("it draws from Python's random, whose state is not wound back; draw from torch")
        elif now != self._generators:
            self._found.append(
                "it draws random numbers, and their generator's state is not kept for its second run; plan again in "
                "train() mode, or draw from torch"
            )
        for module, before in zip(self._modules, self._before, strict=True):
            self._compare_attributes(module, before)
        for (name, value), cached in zip(self._opaque, self._cached, strict=True):
            after = _reachable(value)
            if len(after) != len(cached) or any(_is_changed(a, b) for a, b in zip(cached, after, strict=True)):
                self._found.append(
                    f"it writes to its argument {name} ({type(value).__name__}); turn the cache off (use_cache=False)"
                )

    def _compare_attributes(self, module: nn.Module, before: dict[str, Any]) -> None:
        for name, new in _attributes(module).items():
            old = before.get(name)
            if old is None and new is not None:
                self._filled = True
            elif not _may_replace(old, new, name in torch_modules.own_buffers(module)):
                self._found.append(
                    f"it changes {name} of {type(module).__name__} on each run, and would change it twice in a step; "
                    "keep that outside of regions"
                )


# --- ops --------------------------------------------------------------------------------------------------------------


def _key(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in; of one without a storage (sparse tensors, some subclasses), which tensor it
    is."""
    try:
        return torch_common.storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _has_dynamic_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func.name().startswith("aten::index"):
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in torch_common.iterate_tensors(args[1]))
    return kwargs.get("output_size") is None


# --- what a region finds and leaves -----------------------------------------------------------------------------------


def _is_opaque(value: Any) -> bool:
    return not isinstance(
        value, (torch.Tensor, str, bytes, int, float, complex, type(None), tuple, list, dict, type)
    ) and not callable(value)


def _snapshot(value: Any) -> Any:
    """Something to compare later, which keeps no tensor alive."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)
    return (value, len(value)) if isinstance(value, (list, dict, set)) else value


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {
        name: value
        for name, value in vars(module).items()
        if name not in _PYTHONS_OWN and not name.startswith("_fxmem")
    }
    return {name: _snapshot(value) for name, value in (*own.items(), *torch_modules.own_buffers(module).items())}


def _may_replace(old: Any, new: Any, is_buffer: bool) -> bool:
    if isinstance(old, weakref.ref) and isinstance(new, weakref.ref):
        tensor = new()
        return old() is tensor or (not is_buffer and tensor is not None and tensor.requires_grad)
    pairs = isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) == 2
    if pairs and isinstance(old[0], (list, dict, set)):
        return old[0] is not new[0] or old[1] == new[1]
    numbers = (int, float)
    return (
        old is new or not (isinstance(old, numbers) and isinstance(new, numbers)) or isinstance(new, bool) or old == new
    )


def _reachable(value: Any, depth: int = 5) -> list[Any]:
    """The tensors and numbers in an object's attributes, through containers and objects. Tensors are weakly
    referenced."""
    if isinstance(value, torch.Tensor):
        return [weakref.ref(value)]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [value]
    if depth == 0 or isinstance(value, nn.Module):
        return []
    holder = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    parts = value if isinstance(value, (tuple, list)) else holder.values()
    return [found for part in parts for found in _reachable(part, depth - 1)]


def _is_changed(before: Any, after: Any) -> bool:
    if isinstance(before, weakref.ref) and isinstance(after, weakref.ref):
        return before() is not after()
    return bool(before != after)
