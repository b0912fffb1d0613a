"""The bytes of Python objects that a dataset keeps: what each forked worker copies once it has read all of them.

To read an object counts its references, which is written in its head; the worker gets a copy of that page
(pytorch#13246). So a string or a number counts whole, a list or an array with its head alone: its items are read and
not written. Of large collections a sample is looked at. Whether the others are the same objects again follows from how
many of the sample are. Classes, functions, modules and tensors are left out.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import sys
import types
from collections import deque
from typing import Any, Final

import torch

_SAMPLE: Final = 1 << 13
"""Objects that are looked at of one collection."""
_FEW: Final = 64
"""A collection of no more has each of its own looked into as it is."""
_MOST: Final = 1 << 17
"""Objects that are looked at in all."""
_PAGE: Final = 4096
_ALIGNED: Final = 16
_IS_COLLECTED: Final = 1 << 14
"""Py_TPFLAGS_HAVE_GC: Python's collector has 16 bytes before each of the type."""
_WHOLE: Final = (str, bytes, int, float, complex, tuple)
"""What these keep is beside their head."""
_LEFT_OUT: Final = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
    *(torch.Tensor, torch.nn.Module),
)


@dataclasses.dataclass
class _Drawn:
    """An object of the sample: for how many it stands, its bytes, and how often it was drawn."""

    weight: float
    nbytes: int
    row: int
    """By which drawn item of a collection it was reached; from there once more is no other draw."""
    times: int = 1


def count_copied(dataset: Any) -> int | None:
    """The bytes of pages that a forked process copies where it reads all of a dataset; None: too many to look at."""
    kinds: dict[type, dict[int, _Drawn]] = {}
    waiting: deque[tuple[Any, float, int, int]] = deque([(dataset, 1.0, _SAMPLE, 0)])
    draw, left, rows = random.Random(0), _MOST, itertools.count(1)
    while waiting:
        each, weight, most, row = waiting.popleft()
        kind = kinds.setdefault(type(each), {})
        if (again := kind.get(id(each))) is not None:
            again.times += again.row != row
            continue
        kind[id(each)] = _Drawn(weight, _head_bytes(each), row)
        left -= 1
        if not left:
            return None
        length, inside = _look_inside(each, most, draw)
        share = most if length <= _FEW else max(most // max(len(inside), 1), 1)
        for items in inside:
            row = next(rows) if length > most else row
            weight_of_one = weight * max(length / most, 1.0)
            waiting.extend((one, weight_of_one, share, row) for one in items if not issubclass(type(one), _LEFT_OUT))
    return int(sum(_estimate(list(each.values())) for each in kinds.values()))


def _estimate(drawn: list[_Drawn]) -> float:
    """The bytes of all objects of a kind: of those drawn again as they are, of the others as many as these stand for,
    or as the share that was drawn twice tells (Chao 1984)."""
    once = [each for each in drawn if each.times == 1]
    twice = sum(each.times == 2 for each in drawn)
    nbytes = float(sum(each.nbytes for each in drawn if each.times > 1))
    if once:
        count = stand_for = sum(each.weight for each in once)
        if twice:
            count = min(count, len(once) + len(once) ** 2 / (2 * twice))
        nbytes += count * sum(each.weight * each.nbytes for each in once) / stand_for
    return nbytes


def _head_bytes(value: Any) -> int:
    """The bytes of a value that may be written where it is read, in blocks of Python's allocator."""
    kind = type(value)
    collected = _ALIGNED * bool(kind.__flags__ & _IS_COLLECTED)
    nbytes = sys.getsizeof(value) if issubclass(kind, _WHOLE) else kind.__basicsize__ + collected
    return min(-(-nbytes // _ALIGNED) * _ALIGNED, _PAGE)


def _look_inside(value: Any, most: int, draw: random.Random) -> tuple[int, list[tuple[Any, ...]]]:
    """How many items a value keeps, and so many of them at most; a key and its value are one."""
    kind = type(value)
    if issubclass(kind, (str, bytes, int, float, complex)):
        return 0, []
    base: Any = next((each for each in (list, tuple) if issubclass(kind, each)), None)  # none of a user's own methods
    if "numpy" in sys.modules and issubclass(kind, sys.modules["numpy"].ndarray):
        base = sys.modules["numpy"].ndarray
        value = base.reshape(value if value.dtype.hasobject and value.dtype.names is None else value[:0], -1)
    if base is not None:
        length = base.__len__(value)
        places = range(length) if length <= most else sorted(draw.sample(range(length), most))
        return length, [(base.__getitem__(value, place),) for place in places]
    if issubclass(kind, dict):
        length = len(value)
        step = max(-(-length // most), 1)
        return length, list(itertools.islice(dict.items(value), draw.randrange(step), None, step))
    found = gc.get_referents(value)
    return len(found), [(each,) for each in (found if len(found) <= most else draw.sample(found, most))]
