"""Which saved results wait in the host's memory: a third choice beside keeping and recomputing.

Copies to the host go over their link one after another while the forward computes, and back while backward does
(`fxmem.checkpointing.tape.host_copies`). A copy costs no time as long as the link keeps up; where it does not, the step
waits. Results are chosen that are alive where the estimated peak is, the dearest to recompute for their bytes first, as
long as the step does not wait longer than it may, until the budget is kept; what is over it then is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxmem.hardware.catalogue import FETCHED_AHEAD, SENT_AHEAD
from fxmem.hardware.step_time import card_ends
from fxmem.planning import tuning
from fxmem.planning.lookups import Floats, Ints, first_saves
from fxmem.planning.operators.choices import RecomputeChoices
from fxmem.records.profile import Phase
from fxmem.records.units import group


@dataclass(frozen=True)
class HostLink:
    """The host's memory, and the card's link to it."""

    nbytes: int
    """Pinned memory that results may take."""
    bytes_per_second: float


@dataclass(frozen=True, eq=False)
class Offloads:
    """A choice of results to offload, with what follows from it."""

    values: tuple[int, ...]
    """In the order they are sent."""
    freed: Floats
    """By tick of the unplanned step, the bytes that are not on the card."""
    waited_seconds: float
    """What the step waits for copies."""
    host_bytes: int
    """Pinned memory that they take."""
    copied: dict[int, list[int]]
    """By op, the bytes of each copy that begins right before it."""
    candidates: tuple[OffloadCandidate, ...]
    """What is known of the values."""

    @property
    def fetched(self) -> list[int]:
        """The values in the order that backward needs them."""
        return [each.value for each in sorted(self.candidates, key=lambda each: each.first_use)]


@dataclass(frozen=True)
class OffloadCandidate:
    """A result that may be offloaded."""

    value: int
    nbytes: int
    sent: int
    """Tick at which autograd first saves it."""
    flow_end: int
    """Tick at which its last reader in forward has run."""
    first_use: int
    """Tick at which backward first needs it, or recomputes from it."""


def pinned_bytes(nbytes: int) -> int:
    """What torch's host allocator takes for a request: the next power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()


class OffloadChoices:
    """The choices there are for one step.

    Args:
        step: what there is to recompute, without offloads.
        link: to the host's memory.
    """

    def __init__(self, step: RecomputeChoices, link: HostLink) -> None:
        self._step, self._link = step, link

    def choose(self, budget: float, most_waited: float) -> Offloads:
        """Choose results until the estimated peak keeps a budget, or no more can be offloaded.

        Args:
            budget: in bytes.
            most_waited: seconds that the step may wait for copies.
        """
        chosen: list[OffloadCandidate] = []
        left, live = list(self._candidates), self._step.live
        found = self._follow(chosen)
        while left:
            alive = live - found.freed
            at = int(alive.argmax())
            if alive[at] <= budget:
                break
            one = next((each for each in left if each.flow_end <= at < each.first_use), None)
            if one is None:
                break
            left.remove(one)
            more = sorted([*chosen, one], key=lambda each: each.sent)
            tried = self._follow(more)
            if tried.waited_seconds <= most_waited and tried.host_bytes <= self._link.nbytes:
                chosen, found = more, tried
        return found

    def settle(self, chosen: Offloads, first: Ints) -> Offloads:
        """The same results, where others are recomputed from them.

        Args:
            chosen: the results.
            first: by value, the tick at which backward first needs it.
        """
        return self._follow(
            [replace(each, first_use=min(each.first_use, int(first[each.value]))) for each in chosen.candidates]
        )

    @cached_property
    def _candidates(self) -> list[OffloadCandidate]:
        """Results that may be offloaded, the dearest to recompute for their bytes first."""
        step, sent = self._step, first_saves(self._step.profile, Phase.FORWARD)
        found: dict[int, OffloadCandidate] = {}
        for number in sorted(range(len(step.values)), key=lambda each: -step.nbytes[each]):
            value, storage, nbytes = step.values[number], step.storages[number], int(step.nbytes[number])
            flow_end, first_use = int(step.flow_end[number]), int(step.first_use[number])
            if (
                (value.saved and not value.overwritten and storage is not None and storage in sent)
                and (nbytes >= tuning.OFFLOAD_LEAST_BYTES and flow_end < first_use)
                and len(found) < tuning.OFFLOAD_MOST_VALUES
            ):
                found.setdefault(storage, OffloadCandidate(number, nbytes, sent[storage], flow_end, first_use))
        return sorted(found.values(), key=lambda each: -step.costs[step.makers[each.value]] / each.nbytes)

    @cached_property
    def _clock(self) -> Floats:
        """By tick of the unplanned step, when the card comes to it."""
        ends = card_ends(self._step.profile, taped=True)
        assert ends is not None  # links are made for cards whose rates are known
        begins = np.concatenate([[0.0], ends])[:-1]
        clock: Floats = np.interp(np.arange(len(self._step.live) + 1), self._begins, begins)
        return clock

    def _follow(self, chosen: Sequence[OffloadCandidate]) -> Offloads:
        """What follows from offloading these, sent in this order."""
        freed = np.zeros(len(self._step.live) + 2)
        begins, waited = self._send(chosen)
        ends, waited_back = self._fetch(chosen)
        for each in chosen:
            begin, end = max(each.flow_end, begins[each]), ends[each]
            if begin < end:
                freed[begin] += each.nbytes
                freed[end] -= each.nbytes
        copies = [(each.sent, each.nbytes) for each in chosen] + [(ends[each], each.nbytes) for each in chosen]
        return Offloads(
            tuple(each.value for each in chosen),
            np.cumsum(freed)[: len(self._step.live)],
            waited + waited_back,
            sum(pinned_bytes(each.nbytes) for each in chosen),
            group((self._op_after(tick), nbytes) for tick, nbytes in copies),
            tuple(chosen),
        )

    def _op_after(self, tick: int) -> int:
        """The first op that begins at a tick or later; if none does, the last of all."""
        return min(int(np.searchsorted(self._begins, tick)), len(self._begins) - 1)

    @cached_property
    def _begins(self) -> Ints:
        """By op, the tick at which it begins."""
        return np.asarray([op.begin for op in self._step.profile.ops], dtype=np.int64)

    def _send(self, chosen: Sequence[OffloadCandidate]) -> tuple[dict[OffloadCandidate, int], float]:
        """By result, the tick at which the program lets go of it; and what forward waits for that."""
        waited, over = 0.0, [0.0] * SENT_AHEAD
        for each in chosen:
            waited += max(0.0, over[-SENT_AHEAD] - self._clock[each.sent] - waited)
            over.append(max(self._clock[each.sent] + waited, over[-1]) + each.nbytes / self._link.bytes_per_second)
        waited += max(0.0, over[-1] - self._clock[self._forward_end] - waited)
        later = [each.sent for each in chosen[SENT_AHEAD:]] + [self._forward_end] * SENT_AHEAD
        return dict(zip(chosen, later, strict=False)), waited

    def _fetch(self, chosen: Sequence[OffloadCandidate]) -> tuple[dict[OffloadCandidate, int], float]:
        """By result, the tick from which on it is on the card again; and what backward waits for that."""
        ordered = sorted(chosen, key=lambda each: each.first_use)
        asked = [self._backward_begin] * FETCHED_AHEAD + [each.first_use for each in ordered]
        begun = [float(self._clock[self._backward_begin])] * FETCHED_AHEAD
        waited = over = 0.0
        for index, each in enumerate(ordered):
            over = max(begun[index], over) + each.nbytes / self._link.bytes_per_second
            now = max(self._clock[each.first_use] + waited, over)
            waited = now - self._clock[each.first_use]
            begun.append(now)
        return {each: max(at - 1, 0) for each, at in zip(ordered, asked, strict=False)}, waited

    @cached_property
    def _backward_begin(self) -> int:
        """The tick at which backward first needs a result of the model's."""
        return int(self._step.first_use[self._step.saved].min(initial=len(self._step.live)))

    @cached_property
    def _forward_end(self) -> int:
        """The tick at which the model's forward is over."""
        units = self._step.units
        return int(units.forward_end[units.first : units.last].max(initial=0))
