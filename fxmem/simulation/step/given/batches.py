"""Batches as people have them: tensors, dicts, data loaders and data sets; and how a model takes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fxmem.errors import FxmemError, UsageError, closest
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.recording.error_advice import user_code_error

DATASET_BATCH: Final = 8
"""Items of a data set that make a batch."""
WHOLE: Final = frozenset({"batch", "data", "inputs", "sample", "samples", "batched_inputs"})
"""Names of a forward's argument that takes a batch as it comes."""


class Batch(NamedTuple):
    """The arguments of a model's forward, and how they were found."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    rest: tuple[Any, ...] = ()
    """What came with the batch and forward does not take: labels, most often."""


def read_batch(inputs: Any) -> Batch:
    """Read `inputs` as `fxmem.analyze` takes them.

    Raises:
        UsageError: none of the forms.
        AnalysisError: the data set raised.
    """
    if is_loader(inputs):
        batch, note = first_batch(inputs)
        args, kwargs = _split(batch)
        return Batch(args, kwargs, (note,))
    if isinstance(inputs, list) or not isinstance(inputs, Mapping | tuple | torch.Tensor):
        raise UsageError(
            "expected inputs to be a tensor, a tuple (positional), a dict (keyword), a DataLoader or a Dataset, got "
            f"{type(inputs).__name__}{'; say tuple(inputs)' if isinstance(inputs, list) else ''}"
        )
    return Batch(*_split(inputs))


def is_loader(value: Any) -> bool:
    """Whether batches come out of it."""
    return isinstance(value, DataLoader | Dataset)


def first_batch(source: Any) -> tuple[Any, str]:
    """The first batch of a DataLoader, or of a Dataset, and a note on it. No worker is started.

    Random states stay as they were, those of the loader's own generators included.

    Raises:
        AnalysisError: the data set raised, or has nothing in it.
    """
    if isinstance(source, DataLoader):
        alone = _without_workers(source)
        generators = [source.generator, getattr(source.sampler, "generator", None)]
        note = f"the inputs are the first batch of the {type(source).__name__} that was given"
    else:
        alone = DataLoader(source, batch_size=DATASET_BATCH)
        generators = []
        note = f"the inputs are the first {DATASET_BATCH} items of the {type(source).__name__}; a DataLoader says more"
    states = [(generator, generator.get_state()) for generator in generators if generator is not None]
    try:
        with process_unchanged():
            return next(iter(alone)), note
    except StopIteration:
        raise UsageError(f"expected a batch from the {type(source).__name__}; there is none in it") from None
    except FxmemError:
        raise
    except Exception as error:
        raise user_code_error(error, f"the first batch of the {type(source).__name__}") from error
    finally:
        for generator, state in states:
            generator.set_state(state)


def _without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    ways: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if isinstance(loader.dataset, IterableDataset):
        ways = {"batch_size": loader.batch_size}
    elif loader.batch_sampler is None:
        ways = {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, collate_fn=loader.collate_fn, **ways)


def _split(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def fit_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """The same arguments, as the model's forward takes them.

    A dict whose keys are no arguments is given whole where forward takes one; of a tuple that is too long, forward gets
    as much as it takes.
    """
    given, signature = Batch(args, kwargs), forward_signature(model)
    if signature is None or _binds(signature, args, kwargs):
        return given
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = [each for each in signature.parameters.values() if each.kind in positional]
    needed = [each.name for each in places if each.default is each.empty]
    first = needed[0] if len(needed) == 1 else None
    is_whole = first is not None and (len(kwargs) > 1 or first in WHOLE)
    note = f"forward takes one argument `{first}`: the batch is given whole"
    if kwargs and not args and is_whole and _binds(signature, (kwargs,), {}):
        return Batch((dict(kwargs),), {}, (note,))
    if not kwargs and len(args) > len(places) > 0:
        if first in WHOLE and len(places) == 1:
            return Batch((args,), {}, (note,))
        return Batch(args[: len(places)], {}, (), args[len(places) :])
    return given


def forward_signature(model: nn.Module) -> inspect.Signature | None:
    """What a model's forward takes; None where Python does not know."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def _binds(signature: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def misnamed_input(model: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """Which given name forward does not have, in words; empty if there is none."""
    signature = forward_signature(model)
    parameters = {} if signature is None else signature.parameters
    wrong = next((name for name in kwargs if name not in parameters), None)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if wrong is None or takes_any or signature is None:
        return ""
    return f"forward has no argument {wrong!r}{closest(wrong, parameters)}; it takes ({', '.join(parameters)})"
