"""What a model reads of its tensors in a real run.

Some models decide by their data: which experts run, how many boxes there are, when a loop ends. Their forward and loss
run once on the CPU, on a copy with real values (`fxmem.simulation.step.model.real_run`); what each operator reads whose
result hangs on values is kept. The fake run then finds these values where it comes to the same line.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation.asked import known_values
from fxmem.simulation.asked.bounded_shapes import picks_by_mask
from fxmem.simulation.code.source_lines import user_frame

_Place = tuple[Any, str, int]
"""Operator, file and line of the program."""
_HANGING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_SELECTIONS = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default})
_NO_KERNELS = frozenset({"prim", "prims", "profiler"})


class RealReads:
    """Values that a real run has read, by place, in order."""

    def __init__(self) -> None:
        self._found: dict[_Place, list[list[torch.Tensor]]] = {}
        self._next: collections.Counter[_Place] = collections.Counter()

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Keep what an operator of the real run reads."""
        self._found.setdefault(_place(func), []).append([each.detach().clone() for each in find_deciding(func, args)])

    def begin(self) -> None:
        """Another run of the same program begins."""
        self._next.clear()

    def give(self, func: Any, args: tuple[Any, ...]) -> None:
        """Give an operator's fakes the values that they had in the real run. None where it came here less often."""
        if not hangs_on_values(func, args):
            return
        place = _place(func)
        number, known = self._next[place], self._found.get(place, [])
        self._next[place] += 1
        fakes = list(find_deciding(func, args))
        if number >= len(known) or [t.shape for t in fakes] != [t.shape for t in known[number]]:
            return
        for fake, value in zip(fakes, known[number], strict=True):
            if isinstance(fake, torch_common.FakeTensor) and not known_values.is_known(fake):
                known_values.attach(fake, value)


def find_deciding(func: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors whose values decide: of a selection the mask, of other operators all."""
    return torch_common.iterate_tensors(args[1:] if func in _SELECTIONS else args)


def hangs_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator's result, or its shape, may follow from values."""
    if func is torch.ops.aten.index.Tensor:
        return picks_by_mask(func, args)
    if func.namespace == "aten":
        return not _HANGING.isdisjoint(func.tags)
    return func.namespace not in _NO_KERNELS


def _place(func: Any) -> _Place:
    frame = user_frame(sys._getframe(1))
    return (func, "", 0) if frame is None else (func, frame.f_code.co_filename, frame.f_lineno)
