"""A step's record as a function of the lengths of its inputs, proved on a few analysed ones.

Compared are the allocator's log and the operators before kernels' own memory is put in: the analysed steps have to be
alike in all but their sizes. Of each size a form is found that gives it in all of them. What a kernel has for itself is
no such function: its row is asked anew, with the shapes of its call. What no sample shows is not seen: an operator that
torch takes between two samples and at neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from fxmem.hardware.hidden_memory import HiddenMemory
from fxmem.hardware.workspaces import BareLog, Collector, CpuCollector, Seen, SeenOp, insert_workspaces
from fxmem.memory.lengths.forms import Features, find_form, find_sum
from fxmem.memory.lengths.step_forms import LengthsUnproved, flatten, rebuild
from fxmem.records.profile import Profile

POWERS: Final = {1: ((0,), (1,), (2,)), 2: ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (1, 2))}
"""By how many lengths vary, the products that a size may be a sum of: all of the first degree in each length, and what
compares samples with samples, or positions with positions of each sample."""


class LoggedStep(NamedTuple):
    """An analysed step, and what one of another size is made from."""

    profile: Profile
    log: BareLog
    collector: Collector | CpuCollector


class ProfileForms:
    """A step whose sizes are functions of one or two lengths.

    Args:
        samples: lengths of the inputs, and the step analysed with them. The first of them, one to a product of
            `POWERS`, have to determine a sum of these; others check it.

    Raises:
        LengthsUnproved: the samples are not alike, or a size follows no form.
    """

    def __init__(self, samples: Sequence[tuple[Features, LoggedStep]]) -> None:
        self._lengths = [lengths for lengths, _ in samples]
        self._template = first = samples[0][1]
        read = [_read(step) for _, step in samples]
        if any(outline != read[0][1] for _, outline in read[1:]):
            raise LengthsUnproved("the operators, or the order of their allocations, differ from size to size")
        known = functools.cache(self._find_form)
        self._forms = [known(values) for values in zip(*(sizes for sizes, _ in read), strict=True)]
        back = {new: old for old, new in enumerate(first.log.moved)}
        self._spans = [(back.get(each.birth, 0), back[each.death], each.free_by) for each in _own_storages(first)]
        self._back = back

    def _find_form(self, values: tuple[int | None, ...]) -> Callable[[Features], int | None]:
        points = [(lengths, n) for lengths, n in zip(self._lengths, values, strict=True) if n is not None]
        if not points:
            return lambda _: None
        form = find_form(points) or find_sum(points, POWERS[len(self._lengths[0])], (1,) * len(self._lengths[0]))
        if form is None or len(points) < len(values):
            raise LengthsUnproved(f"a size follows no form: {', '.join(map(str, values))}")
        return functools.cache(form.at)

    def at(self, lengths: Features) -> Profile:
        """The step with inputs of these lengths: its operators and storages; nodes keep a sample's figures."""
        sizes = iter([form(lengths) for form in self._forms])
        made, log, collector = self._template
        own = [each.model_copy(update={"nbytes": next(sizes)}) for each in _own_storages(self._template)]
        ops = [
            each.model_copy(update={"flops": next(sizes), "moved_bytes": next(sizes), "host_bytes": next(sizes)})
            for each in made.ops
        ]
        step = made.step
        if step.ranks is not None:
            moved = tuple(each.model_copy(update={"moved_bytes": next(sizes)}) for each in step.ranks.collectives)
            ranks = step.ranks.model_copy(update={"collectives": moved, "host_bytes": next(sizes), "classes": ()})
            step = step.model_copy(update={"ranks": ranks})
        seen, _ = dict(collector.seen), collector.begin()
        for index, each in seen.items():
            collector.note_seen(index, _resize_call(each.seen, collector, sizes), each.phase, each.stream)
        hidden = insert_workspaces(log.ops, log.phases, log.ticks, collector.resolve(), collector.find_held())
        collector.seen = seen
        for number, (birth, death, free_by) in enumerate(self._spans):
            update = {"birth": hidden.moved[birth] if birth else 0, "death": hidden.moved[death]}
            if free_by is not None:
                update["free_by"] = hidden.moved[self._back[free_by]]
            own[number] = own[number].model_copy(update=update)
        spans = (op.model_copy(update={"begin": b, "end": e}) for op, (b, e) in zip(ops, hidden.ops, strict=True))
        changed = {"storages": (*own, *hidden.storages), "ops": tuple(spans), "step": step}
        return made.model_copy(update={**changed, "ticks": hidden.ticks, "phases": hidden.phases})


def _own_storages(step: LoggedStep) -> Sequence[Any]:
    """Those that a tensor owns; what kernels have for themselves comes after them."""
    storages, own = step.profile.storages, set(step.log.moved)
    hidden = next((n for n, each in enumerate(storages) if each.death not in own), None)
    return storages if hidden is None else storages[:hidden]


def _resize_call(seen: Seen, collector: CpuCollector, sizes: Iterator[int | None]) -> Seen:
    """What a call of another size hides."""
    if seen.call is not None:
        numbers, tree = flatten(seen.call)
        name, args, result = rebuild(tree, [next(sizes) or 0 for _ in numbers])
        found = collector.find_hidden(name, args, result)
        assert found is not None  # the operator has a row
        return found.after_resizing(seen.resizes) if seen.resizes else found
    if seen.memory is None:
        return seen
    events = tuple(each.model_copy(update={"nbytes": next(sizes)}) for each in seen.memory.events)
    return Seen(seen.name, seen.multiplies, seen.multiplies_lt, HiddenMemory(events=events))


def _read(step: LoggedStep) -> tuple[list[int | None], Any]:
    """Every size of a step, in the order of `ProfileForms.at`, and all else that decides its peak and its time."""
    profile, log, collector = step
    own = _own_storages(step)
    sizes: list[int | None] = [each.nbytes for each in own]
    for op in profile.ops:
        sizes += (op.flops, op.moved_bytes, op.host_bytes)
    if (ranks := profile.step.ranks) is not None:
        sizes += (*(each.moved_bytes for each in ranks.collectives), ranks.host_bytes)
    calls = []
    for index, each in collector.seen.items():
        numbers, outline = _read_call(each)
        sizes += numbers
        calls.append((index, each.phase, each.stream, outline))
    back = {new: old for old, new in enumerate(log.moved)}
    outline = (
        profile.target, log.ops, log.phases, log.ticks, calls,
        [op.name for op in profile.ops],
        [(e.kind, back.get(e.birth, 0), back[e.death], e.op, e.dtype, e.stream, e.used_on, e.free_by) for e in own],
        [(each.name, [output.dtype for output in each.outputs]) for each in profile.nodes],
        [each.op for each in profile.recomputed_ops],
        None if ranks is None else [(each.kind, each.group, each.count) for each in ranks.collectives],
    )  # fmt: skip
    return sizes, outline


def _read_call(each: SeenOp) -> tuple[list[Any], Any]:
    seen = each.seen
    if seen.call is not None:
        numbers, tree = flatten(seen.call)
        return [*numbers], (tree, seen.resizes)
    events = () if seen.memory is None else seen.memory.events
    return [event.nbytes for event in events], [(event.action, event.name, event.signature) for event in events]
