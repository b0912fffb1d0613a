"""One call of a region: run in forward, and recomputed in backward exactly as it was.

`torch.utils.checkpoint` (non-reentrant, early stop on) recomputes under the same autocast and, where asked to, from
the same state of the random generators. What it leaves to its caller is done here:

- batch norm's statistics are updated by the first run only;
- results of products that the plan keeps are handed out and not computed again;
- modules are in `train()` or `eval()` as they were in the first run;
- lists and dicts among the arguments are those of the first run, whatever their owner has done to them since;
- every tensor among the arguments is saved as a tensor, so that a region around this one can free it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_device_states

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem.checkpointing.audit import Audit
from fxmem.checkpointing.op_signature import read_signature
from fxmem.hardware.op_classes import is_product

# --- save and restore the states of random generators for recomputation -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Generators:
    """States of the default random generators: the CPU's, and those of the devices that an operator runs on."""

    cpu: torch.Tensor
    device_type: str
    devices: tuple[int, ...]
    states: tuple[torch.Tensor, ...]

    @staticmethod
    def now(tensors: Iterable[torch.Tensor]) -> Generators:
        """As they are, for an operator on these tensors."""
        found = [tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
        kind = found[0].type if found else "cpu"
        return Generators._read(kind, tuple(sorted({device.index or 0 for device in found if device.type == kind})))

    @staticmethod
    def _read(kind: str, devices: tuple[int, ...]) -> Generators:
        states = tuple(torch.get_device_module(kind).get_rng_state(device) for device in devices)
        return Generators(torch.get_rng_state(), kind, devices, states)

    def restore(self) -> None:
        """Have them so again."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=self.device_type)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """As they were, within; afterwards as they are."""
        now = self._read(self.device_type, self.devices)
        self.restore()
        try:
            yield
        finally:
            now.restore()


# --- results of a region's products, kept from its first run for its second: selective checkpointing ------------------
# It is what `torch.utils.checkpoint.create_selective_checkpoint_contexts` does (torch/utils/checkpoint.py, since
# 2.4), with three differences. There, a kept result leaves the random generators where they were before it, so that
# what draws after it in the second run (the dropout after an attention that drops out itself) draws other numbers
# than in the first, and gradients are silently wrong; here the generators go on from where they were in the first
# run. There, a second backward through the region raises, and so does a result that something has written to since;
# here the product is run again then. And which results are kept is said by their number, not by their operator.


def keep(
    *numbers: int,
) -> Callable[[], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: the region keeps the results of
    some of its products.

    Args:
        numbers: of the products (matrix products, convolutions, attention: `fxmem.hardware.op_classes`), counted from 0
            in the order the region runs them.
    """
    return functools.partial(_keeping_contexts, numbers)


def _keeping_contexts(numbers: tuple[int, ...]) -> tuple[Keeping, Reusing]:
    results: Results = {}
    return Keeping(numbers, results), Reusing(results)


@dataclass(frozen=True)
class _Result:
    """What a product gave."""

    value: Any
    versions: tuple[int, ...]
    """Of its tensors, which count how often they were written to."""
    generators: Generators | None
    """After it, if it drew."""


Results = dict[int, _Result]
"""By number of the product."""


class Keeping(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    """Around a region's first run.

    Args:
        keeps: numbers of the products whose results are kept.
        results: where to.
    """

    def __init__(self, keeps: Collection[int], results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps, self._results, self._number = frozenset(keeps), results, -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        signature = read_signature(func)
        if is_product(signature.name):
            self._number += 1
            if self._number in self._keeps:
                # Autograd gives the result itself the graph, which keeps what is kept alive.
                value = torch_common.detached_sharing_version(result)
                generators = Generators.now(torch_common.iterate_tensors((args, kwargs))) if signature.draws else None
                self._results[self._number] = _Result(value, _versions(value), generators)
        return result


class Reusing(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    """Around a region's second run: hands each kept result out, once. A third run (`retain_graph`) runs everything."""

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results, self._number = results, -1

    def __enter__(self) -> Any:
        self._number = -1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_product(read_signature(func).name):
            self._number += 1
            kept = self._results.pop(self._number, None)
            if kept is not None and kept.versions == _versions(kept.value):
                if kept.generators is not None:
                    kept.generators.restore()
                return kept.value
        return func(*args, **(kwargs or {}))


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(torch_autograd.version(tensor) for tensor in torch_common.iterate_tensors(value))


# --- one call of a region: run in forward, and recomputed in backward exactly as it was -------------------------------


@dataclass
class Recomputation:
    """How one region is run."""

    where: str
    """What to call it in a message."""
    random: bool
    """Whether the generators' states are kept for the second run."""
    keeps: tuple[int, ...] = ()
    """Of its products, by number, those whose results are kept; see `keeping`."""
    audited: bool = False
    """Whether a run of it was watched and nothing was found that must not be run twice."""

    def __call__(
        self,
        modules: Callable[[], Iterable[nn.Module]],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`function(*args, **kwargs)`, recomputed in backward; `modules` are those it may call.

        Raises UsageError if it does what must not be done twice.
        """
        if torch.compiler.is_compiling():  # the compiler keeps effects on buffers out of what it recomputes by itself
            return checkpoint(
                functools.partial(function, **kwargs), *args, use_reentrant=False, preserve_rng_state=self.random
            )
        held = list(dict.fromkeys(inner for module in modules() for inner in module.modules()))  # each once
        audit = None if self.audited else Audit(self.where, held, args, kwargs, random=self.random)
        run = _Run(function, args, kwargs, audit)
        del args, kwargs
        again = _RecomputeContext(held)
        result = checkpoint(
            run,
            *run.leaves.pop(),
            use_reentrant=False,
            early_stop=True,
            preserve_rng_state=self.random,
            context_fn=functools.partial(_contexts, again, self.keeps),
        )
        again.note_versions()
        if audit is not None:
            self.audited = audit.has_passed()
        return result


class _Run:
    """Calls the function first with its arguments, later with copies of their containers."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], audit: Audit | None
    ) -> None:
        found: list[Any] = []
        self._function = function
        self._shape = _flatten((args, kwargs), found)
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = args, kwargs
        self._audit = audit
        self.leaves = [found]
        """What `_shape` stands for, in a list, so that the code that takes it is its only owner."""

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = self._given or _unflatten(self._shape, leaves)
        audit, self._given, self._audit = self._audit, None, None
        del leaves
        with audit or contextlib.nullcontext():
            return self._function(*args, **kwargs)


@dataclass(frozen=True)
class _Leaf:
    """Stands for the leaf with this number."""

    number: int


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """Replace everything in `value` that is no plain container by a mark. What was there is added to `leaves`, each
    object once.

    Unlike a pytree's, objects of other classes than these are leaves: a key-value cache, say, is shared and not copied.
    Each once, because what autograd has saved twice comes back as two objects, and programs ask whether two arguments
    are one: `nn.MultiheadAttention(x, x, x)` multiplies once, or three times.
    """
    if type(value) in (tuple, list):
        return type(value)(_flatten(item, leaves) for item in value)
    if type(value) is dict:
        return {key: _flatten(item, leaves) for key, item in value.items()}
    for number, leaf in enumerate(leaves):
        if leaf is value:
            return _Leaf(number)
    leaves.append(value)
    return _Leaf(len(leaves) - 1)


def _unflatten(shape: Any, leaves: Sequence[Any]) -> Any:
    if type(shape) in (tuple, list):
        return type(shape)(_unflatten(item, leaves) for item in shape)
    if type(shape) is dict:
        return {key: _unflatten(item, leaves) for key, item in shape.items()}
    return leaves[shape.number]


def _contexts(
    again: _RecomputeContext, keeps: tuple[int, ...]
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """`context_fn` of `torch.utils.checkpoint`: around the first run what keeps results, if any are to be kept."""
    if not keeps:
        return contextlib.nullcontext(), again
    keeping, again.reusing = keep(*keeps)()
    return keeping, again


class _RecomputeContext:
    """Context of each recomputation: modules in the mode of the first run, statistics untouched.

    Entered as often as backward needs the region (`retain_graph`).
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._training = [(module, module.training) for module in modules]
        self._entered: list[contextlib.ExitStack] = []
        self.reusing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """What hands the results out that the first run kept."""
        self._versions: list[tuple[nn.Module, str, torch.Tensor, int]] = []

    def note_versions(self) -> None:
        """Note how often the parameters were written to when the first run had ended."""
        self._versions = [
            (module, name, parameter, torch_autograd.version(parameter))
            for module, _ in self._training
            for name, parameter in torch_modules.own_parameters(module).items()
            if parameter is not None
        ]

    def _check_versions(self) -> None:
        """Raise as autograd itself does for a saved tensor: the second run would compute with other numbers."""
        for module, name, parameter, version in self._versions:
            if torch_autograd.version(parameter) != version:
                raise RuntimeError(
                    f"parameter {name} {tuple(parameter.shape)} of {type(module).__name__} has been written to between "
                    "forward and backward, so what is checkpointed cannot be recomputed; write to it after backward, "
                    "or fxmem.uncheckpoint(model)"
                )

    def __enter__(self) -> None:
        self._check_versions()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.reusing)
            for module, training in self._training:
                if module.training != training:
                    stack.callback(setattr, module, "training", module.training)
                    module.training = training
            stack.enter_context(keep_statistics(module for module, _ in self._training))
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().close()


@contextlib.contextmanager
def keep_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Running statistics of the modules come out as they went in, whatever runs inside.

    Batch norm: statistics become `(1 - momentum) * statistics + momentum * batch's`, so with a momentum of 0 they stay,
    and the kernel still saves what the first run's saved; with no counter of batches `momentum=None` means 0, too
    (torch/nn/modules/batchnorm.py). Instance norm averages over the batch, which may round: it gets copies to write to.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            if not isinstance(module, torch_common.NormBase) or not module.track_running_stats or not module.training:
                continue
            buffers = torch_modules.own_buffers(module)
            if isinstance(module, torch_common.InstanceNorm):
                for name in ("running_mean", "running_var"):
                    stack.callback(buffers.__setitem__, name, buffers[name])
                    buffers[name] = _copy(buffers[name])
            else:
                stack.callback(buffers.__setitem__, "num_batches_tracked", buffers.get("num_batches_tracked"))
                stack.callback(setattr, module, "momentum", module.momentum)
                # SyncBatchNorm insists on a counter, but reads it only where there is no momentum.
                buffers["num_batches_tracked"] = (
                    _copy(module.num_batches_tracked) if isinstance(module, nn.SyncBatchNorm) else None
                )
                module.momentum = 0.0
        yield


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
