"""Results of a region's products, kept from its first run for its second: selective checkpointing.

It is what `torch.utils.checkpoint.create_selective_checkpoint_contexts` does (torch/utils/checkpoint.py, since 2.4),
with three differences. There, a kept result leaves the random generators where they were before it, so that what draws
after it in the second run (the dropout after an attention that drops out itself) draws other numbers than in the first,
and gradients are silently wrong; here the generators go on from where they were in the first run. There, a second
backward through the region raises, and so does a result that something has written to since; here the product is run
again then. And which results are kept is said by their number, not by their operator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem.checkpointing.op_signature import read_signature
from fxmem.checkpointing.rng_states import Generators
from fxmem.hardware.op_classes import is_product


def keep(
    *numbers: int,
) -> Callable[[], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: the region keeps the results of
    some of its products.

    Args:
        numbers: of the products (matrix products, convolutions, attention: `fxmem.hardware.op_classes`), counted from 0
            in the order the region runs them.
    """
    return functools.partial(_contexts, numbers)


def _contexts(numbers: tuple[int, ...]) -> tuple[Keeping, Reusing]:
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

    def is_untouched(self) -> bool:
        """Whether nothing has written to it."""
        return self.versions == _versions(self.value)


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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        signature = read_signature(func)
        if is_product(signature.name):
            self._number += 1
            if self._number in self._keeps:
                # Autograd gives the result itself the graph, which keeps what is kept alive.
                value = torch_common.detached_sharing_version(result)
                given = torch_common.iterate_tensors((args, kwargs))
                generators = Generators.now(given) if signature.draws else None
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_product(read_signature(func).name):
            self._number += 1
            kept = self._results.pop(self._number, None)
            if kept is not None and kept.is_untouched():
                if kept.generators is not None:
                    kept.generators.restore()
                return kept.value
        return func(*args, **(kwargs or {}))


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(torch_autograd.version(tensor) for tensor in torch_common.iterate_tensors(value))
