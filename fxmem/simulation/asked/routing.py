"""How many tokens each expert of a mixture gets: a rule, since it is data.

A router chooses `k` of at most 1,024 experts for each token by `topk`. The places that it finds are given values by the
rule, and what follows from these is known: counts, masks, sizes, and what ranks tell each other of them, who are taken
to route alike. A token never goes to one expert twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem.errors import UsageError, one_line
from fxmem.simulation.asked import known_values

_MOST_EXPERTS: Final = 1 << 10
"""A larger choice is one of words or of boxes."""
_EXPECTED: Final = (
    "expected --routing balanced, worst, or a JSON file with the tokens that each expert gets: a list, or a list for "
    "each layer by its module's name"
)


class Rule(NamedTuple):
    """How tokens are shared out."""

    name: str = "balanced"
    """"balanced": each expert gets its equal share. "worst": those of this rank get all tokens of all ranks. Else the
    file that says how many each gets."""
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """By a layer's module, or "" for all others, how many tokens each expert gets; their shares count."""


BALANCED: Final = Rule()


def read_rule(word: str) -> Rule:
    """Read a rule. Raises UsageError."""
    if word in ("balanced", "worst"):
        return Rule(word)
    try:
        found = json.loads(Path(word).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{_EXPECTED}; got {word!r}: {one_line(error)}") from error
    layers = found if isinstance(found, dict) else {"": found}
    for layer, tokens in layers.items():
        whole = isinstance(tokens, list) and all(type(each) is int and each >= 0 for each in tokens)
        if not whole or not any(tokens):
            of = f" of {layer}" if layer else ""
            raise UsageError(f"{_EXPECTED}; got {word!r}, where the tokens{of} are no list of whole numbers")
    return Rule(word, tuple((layer, tuple(tokens)) for layer, tokens in layers.items()))


class Routing:
    """The routes of one program.

    Args:
        rule: how tokens are shared out.
    """

    def __init__(self, rule: Rule = BALANCED) -> None:
        self._rule = rule
        self._place = 0, 1
        """This rank's number in the group that experts are spread over, and its size, as far as it has been seen."""
        self._routes: dict[int, tuple[int, int]] = {}
        """By where their values lie, how many of how many experts were chosen."""
        self._routers: dict[tuple[int, int], None] = {}
        """Those of them that were counted, or sorted."""
        self._find_module: Callable[[], str | None] = str
        self._is_shared = False
        """Whether ranks have told each other what this one knows."""

    def begin(self, place: tuple[int, int], find_module: Callable[[], str | None]) -> None:
        """Begin the program: this rank's number among all, and their number; what says which module runs, None where
        nothing is routed."""
        self._place, self._find_module = place, find_module

    def note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """After an operator ran on fakes: give a router's choices their values, pass on what ranks tell each other.

        `name` is the operator's, without overload.
        """
        for each in torch_common.iterate_tensors(args) if name in _USES else ():
            value = known_values.find_value(each)
            route = None if value is None else self._routes.get(torch_common.storage_key(value))
            if route is not None:
                self._routers[route] = None
        if name == "aten.topk":
            self._route(result[1], args[0])
        elif name == "aten.scatter":
            _mark(result, *args)
        elif name == "aten.histc":
            _count(result, *args)
        elif name == _WAIT:
            _gather(result, args[0], 1)
        elif (exchange := _EXCHANGES.get(name)) is not None:
            group = next(filter(None, map(torch_distributed.find_group, reversed(args))), None)
            if group is not None:
                known = map(known_values.find_value, torch_common.iterate_tensors(args))
                self._is_shared |= len(group.ranks) > 1 and any(each is not None for each in known)
                place = group.ranks.index(torch.distributed.get_rank()), len(group.ranks)
                self._place = place if name in _SPREAD else self._place
                exchange(args, result, *place)

    def assumptions(self) -> Iterator[str]:
        """By which rule tokens went to experts."""
        what = {
            "balanced": "each expert gets an equal share of the tokens",
            "worst": "this rank's experts get all tokens of all ranks",
        }.get(self._rule.name, f"experts get tokens as in {self._rule.name}")
        for chosen, experts in self._routers:
            yield f"{what}, of {experts} with {chosen} for each token, on all ranks alike (fxmem run --routing)"
        if self._is_shared and not self._routers:
            yield "numbers that this rank knows, and that ranks gather or reduce, are alike on all of them"

    def _route(self, places: torch.Tensor, scores: torch.Tensor) -> None:
        experts = scores.shape[-1] if scores.dim() > 1 else 0
        chosen = places.shape[-1] if places.dim() > 1 else 0
        is_router = 0 < chosen < experts <= _MOST_EXPERTS and scores.dtype.is_floating_point
        if not is_router or places.shape[:-1] != scores.shape[:-1] or not 0 < places.numel() <= known_values.LIMIT:
            return
        module = self._find_module()
        if module is None:
            return
        tokens = places.numel() // chosen
        counts = share_out(self._find_weights(module, experts, chosen), tokens * chosen, tokens)
        with torch_common.no_modes():
            every = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
            value = every.view(chosen, tokens).T.contiguous().view(places.shape)
            known_values.attach(places, value)
            self._routes[torch_common.storage_key(value)] = chosen, experts

    def _find_weights(self, module: str, experts: int, chosen: int) -> Sequence[int]:
        if self._rule.name == "worst":
            rank, size = self._place
            own = experts // size if experts % size == 0 else experts
            first = rank * own % experts
            mine = range(first, first + min(chosen, own))
            return [int(each in mine) for each in range(experts)]
        layers = dict(self._rule.tokens)
        path = f".{module}."
        named = max((each for each in layers if each and f".{each}." in path), key=len, default="")
        found = layers.get(named, ())
        if found and len(found) != experts:
            raise UsageError(f"expected the tokens of {experts} experts in {self._rule.name}, got {len(found)}")
        return found or [1] * experts


def share_out(weights: Sequence[int], whole: int, most: int) -> list[int]:
    """Share out a whole number by weights, each part at most so large: of any first few the sum is right to one.

    What parts have no room for goes to the others, by their weights, and to those without weight last. All together
    have room for the whole.
    """
    parts = [0] * len(weights)
    while left := whole - sum(parts):
        free = [place for place, part in enumerate(parts) if part < most]
        of = [place for place in free if weights[place]] or free
        shares = [weights[place] for place in of] if weights[of[0]] else [1] * len(of)
        ends = [left * end // sum(shares) for end in itertools.accumulate(shares, initial=0)]
        for place, (begin, end) in zip(of, itertools.pairwise(ends), strict=True):
            parts[place] = min(parts[place] + end - begin, most)
    return parts


def _mark(result: torch.Tensor, base: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> None:
    """A mask of the experts that each token goes to, in a tensor that was zero, whatever its size."""
    places = known_values.find_value(index)
    if places is None or isinstance(value, torch.Tensor) or value not in (1, True):
        return
    if known_values.is_known(result) or result.dtype.is_floating_point:
        return
    with torch_common.no_modes():
        known_values.attach(result, torch.zeros(result.shape, dtype=result.dtype).scatter(dim, places, value))


def _count(result: torch.Tensor, places: torch.Tensor, bins: int, low: float = 0, high: float = 0) -> None:
    """A histogram of whole numbers, which the CPU does not make."""
    value = known_values.find_value(places)
    if value is not None and not value.dtype.is_floating_point:
        with torch_common.no_modes():
            known_values.attach(result, value.float().histc(bins, low, high).to(result.dtype))


def _exchange(output: torch.Tensor, source: torch.Tensor, sizes: Sequence[int], rank: int, ranks: int) -> None:
    """From each rank comes what this one sends to itself."""
    value = known_values.find_value(source)
    with torch_common.no_modes():
        parts = () if value is None else torch.split(value, list(sizes)) if sizes else value.chunk(ranks)
        _write(output, [parts[rank]] * ranks if len(parts) == ranks else [])


def _write(output: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Give a tensor what ranks have sent; nothing is known of it where nothing is known of that."""
    with torch_common.no_modes():
        value = torch.cat([each.flatten() for each in parts]) if parts else None
    if value is not None and value.numel() == output.numel():
        known_values.attach(output, value.reshape(output.shape).to(output.dtype))
    elif isinstance(output, torch_common.FakeTensor):
        known_values.forget(output)


def _gather(output: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
    """From each rank comes what this one has."""
    value = known_values.find_value(source)
    _write(output, [] if value is None else [value] * ranks)


def _all_to_all_lists(args: tuple[Any, ...], result: Any, rank: int, ranks: int) -> None:
    for output in args[0]:
        _gather(output, args[1][rank], 1)


def _all_gather_lists(args: tuple[Any, ...], result: Any, rank: int, ranks: int) -> None:
    for outputs, source in zip(args[0], args[1], strict=True):
        for output in outputs:
            _gather(output, source, 1)


def _reduce(output: torch.Tensor, value: torch.Tensor | None, operation: str, ranks: int) -> None:
    """Each rank has what this one has."""
    with torch_common.no_modes():
        if value is not None and operation in ("sum", "product"):
            value = value * ranks if operation == "sum" else value**ranks
        is_known = value is not None and operation in ("sum", "product", "avg", "min", "max", "band", "bor")
        _write(output, [value] if value is not None and is_known else [])


def _all_reduce(args: tuple[Any, ...], result: Any, rank: int, ranks: int) -> None:
    for tensor in args[0]:
        _reduce(tensor, known_values.find_value(tensor), torch_distributed.read_operation(args[2]), ranks)


def _all_reduce_made(args: tuple[Any, ...], result: Any, rank: int, ranks: int) -> None:
    _reduce(result, known_values.find_value(args[0]), torch_distributed.read_operation(args[1]), ranks)


def _reduce_scatter(args: tuple[Any, ...], result: Any, rank: int, ranks: int) -> None:
    output, source, operation = (result, *args[:2]) if isinstance(args[1], str) else args[:2] + args[3:4]
    value = known_values.find_value(source)
    with torch_common.no_modes():
        part = None if value is None else value.chunk(ranks)[rank]
    _reduce(output, part, torch_distributed.read_operation(operation), ranks)


_SPREAD: Final = {
    "c10d.alltoall_base_": lambda args, _, rank, ranks: _exchange(args[0], args[1], args[4], rank, ranks),
    "c10d.alltoall_": _all_to_all_lists,
    "_c10d_functional.all_to_all_single": lambda args, made, *place: _exchange(made, args[0], args[2], *place),
}
"""Collectives by which tokens go to experts."""
_EXCHANGES: Final = {
    **_SPREAD,
    "c10d._allgather_base_": lambda args, _, __, ranks: _gather(args[0], args[1], ranks),
    "c10d.allgather_": _all_gather_lists,
    "_c10d_functional.all_gather_into_tensor": lambda args, made, _, ranks: _gather(made, args[0], ranks),
    **dict.fromkeys(("c10d.allreduce_", "c10d.reduce_"), _all_reduce),
    **dict.fromkeys(("_c10d_functional.all_reduce", "_c10d_functional.all_reduce_"), _all_reduce_made),
    **dict.fromkeys(("c10d._reduce_scatter_base_", "_c10d_functional.reduce_scatter_tensor"), _reduce_scatter),
}
_WAIT: Final = "_c10d_functional.wait_tensor"
_USES: Final = frozenset(f"aten.{each}" for each in "bincount histc scatter scatter_ sort eq".split())
"""Operators that count what goes to each expert, or bring it together."""


def has_rule(name: str) -> bool:
    """Whether there is something to `note` after an operator of this name."""
    short = name.rpartition(".")[0]
    return short in ("aten.topk", _WAIT) or short in _USES or short in _EXCHANGES
