"""The batch of an epoch that decides, and ten thousand steps of such batches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fxmem.hardware.context import room_bytes
from fxmem.hardware.hidden_memory import HiddenMemory
from fxmem.hardware.workspaces import Collector, CpuCollector, Signature
from fxmem.memory.allocator import AllocatorSettings, read_settings
from fxmem.memory.allocator_acts import Act
from fxmem.memory.lengths import BlockRequest, Features, Lengths, LengthsUnproved, LongRun, StepForms, replay_lengths
from fxmem.records.parts import LengthChange, LongestBatch
from fxmem.records.profile import Round, Target
from fxmem.simulation.kernels.kernel_settings import ask_workspaces
from fxmem.simulation.run.loader_watch import Epoch, Shapes, count_elements, exceed, find_lengths

LONG_RUN: Final = 10_000
"""Steps of a long run."""
MOST_REQUESTS: Final = 1_000_000
"""Requests of its replay, which takes seconds."""
MOST_COMPARED: Final = 150_000
"""Requests of the replay of each change."""
_LEAST_WEIGHED: Final = 20
_MOST_WEIGHED: Final = 200
"""Different batches, the largest, whose peaks are looked for, and as many more that are longer in another length."""
_SETTINGS: Final = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8",
)
_PADDINGS: Final = (64, 256)


class RecordedLengths(NamedTuple):
    """What was recorded of a program whose batches have different lengths."""

    epoch: Epoch
    handed: Sequence[Shapes]
    """All batches that the program got, in order."""
    per_step: int
    """Batches of a step."""
    natural_steps: int
    """Steps whose batches were the program's own."""
    trace: Sequence[Sequence[Act]]
    """Set-up, then each step."""
    rounds: Sequence[Round]
    """Each step."""
    collector: Collector | CpuCollector
    target: Target
    environ: dict[str, str]

    def look(self, name: str, args: Sequence[object], result: object) -> HiddenMemory | None:
        """What a call hides."""
        seen = self.collector.find_hidden(name, args, result)
        return None if seen is None else seen.memory

    def ask(self, signatures: Sequence[Signature]) -> dict[Signature, int | None]:
        """How much workspace cuDNN has for these."""
        return ask_workspaces(signatures, self.target)


def find_longest(recorded: RecordedLengths) -> LongestBatch | None:
    """The batch that decides, and a long run; None where all batches have the same lengths."""
    epoch, shapes, known = recorded.epoch, recorded.epoch.shapes, recorded.epoch.shapes or recorded.handed
    if not (epoch.varies if shapes else len(set(known)) > 1):
        return None
    largest = max(range(len(known)), key=lambda number: (count_elements(known[number]), -number))
    shape = max(known[largest], key=math.prod, default=())
    plain = LongestBatch(
        place=epoch.of.place,
        batches=len(shapes),
        epochs=epoch.reads,
        stopped=epoch.stopped,
        number=largest + 1 if shapes else 0,
        shape=shape,
    )
    if not shapes:
        return plain
    try:
        try:
            return _Study(recorded, shapes, "").describe(plain)
        except LengthsUnproved:
            left_out = "the last batch of the epoch is left out: its sizes follow no form"
            return _Study(recorded, shapes[:-1], left_out).describe(plain)
    except (LengthsUnproved, ValueError) as error:
        return plain.model_copy(update={"unproved": str(error), **_find_run(recorded)})


def _find_run(recorded: RecordedLengths) -> dict[str, object]:
    """The heaviest batch of those that were run, and what others may need."""
    shapes, is_card = recorded.epoch.shapes, recorded.target.device == "cuda"
    lengths, known = find_lengths(shapes), {each: number for number, each in reversed([*enumerate(shapes)])}
    steps = zip(recorded.rounds, _chunks(recorded.handed, recorded.per_step), strict=False)
    ran = [(over, [known[each] for each in batches]) for over, batches in steps if known.keys() >= {*batches}]
    if not ran:
        return {}
    peaks = [(over.allocated_bytes or 0) if is_card else over.requested_bytes for over, _ in ran]
    (over, numbers), left = ran[peaks.index(max(peaks))], min(over.retained_bytes or 0 for over, _ in ran)
    number = max(numbers, key=lambda each: count_elements(shapes[each]))
    met = {lengths[each]: own - left for own, (_, numbers) in zip(peaks, ran, strict=True) for each in numbers}
    most = max(min(own * exceed(each, at) ** 2 for at, own in met.items()) for each in {*lengths})
    return {
        "number": number + 1,
        "shape": max(shapes[number], key=math.prod),
        "requested_bytes": over.requested_bytes,
        "allocated_bytes": over.allocated_bytes if is_card else None,
        "ran": len(met),
        "most_bytes": max(*peaks, left + round(most)),
    }


class _Study:
    """A program whose sizes are proved.

    Raises:
        LengthsUnproved: they follow no form.
        ValueError: its batches differ otherwise than by lengths.
    """

    def __init__(self, recorded: RecordedLengths, shapes: Sequence[Shapes], note: str) -> None:
        self._recorded, self._shapes, self._note = recorded, shapes, note
        self._lengths = lengths = Lengths(shapes)
        steps = [*_chunks(recorded.handed, recorded.per_step)][1 : len(recorded.trace) - 1]
        known = [lengths.features(each) if all(map(lengths.tell, each)) else None for each in steps]
        features = [None, None, *known]  # in the first step optimizers make their state
        features += [None] * (len(recorded.trace) - len(features))
        self._forms = StepForms(recorded.trace, features, recorded.look, recorded.ask)
        self._first = self._forms.models[0]
        self._epoch = [lengths.features(each) for each in _chunks(shapes, recorded.per_step)]
        """The lengths of each step of an epoch."""
        self._settings = read_settings(recorded.environ)
        if self._first > recorded.natural_steps:
            raise LengthsUnproved("expected steps that are alike from the third on")

    def describe(self, plain: LongestBatch) -> LongestBatch:
        """The record, with what is proved."""
        recorded = self._recorded
        number = self._find_heaviest()
        # The step of the epoch that the batch is in, from 0; the last whole one for what is in none.
        step = min(number // self._recorded.per_step, max(len(self._shapes) // self._recorded.per_step - 1, 0))
        steps, is_card = self._epoch, recorded.target.device == "cuda"
        peaks = self._peak([steps[max(step - 1, 0)], steps[step]])
        fields: dict[str, object] = {
            "number": number + 1,
            "shape": max(self._shapes[number], key=math.prod),
            "requested_bytes": peaks[0],
        }
        if self._note:
            fields["stopped"] = "; ".join(filter(None, (plain.stopped, self._note)))
        if recorded.epoch.reads > 1:
            fields["most_bytes"] = self._peak([tuple(map(max, *steps))] * 2)[is_card]
        if is_card:
            fields |= {"allocated_bytes": peaks[1], **self._run_long()}
        return plain.model_copy(update=fields)

    def _find_heaviest(self) -> int:
        """The batch with the highest peak, in steps of batches like it."""
        first_with: dict[Features, int] = {}
        for number, batch in enumerate(self._shapes):
            first_with.setdefault(self._lengths.features([batch]), number)
        by_size = sorted(first_with, key=lambda each: -count_elements(self._shapes[first_with[each]]))
        size = self._recorded.per_step
        most = min(max(MOST_COMPARED // len(self._forms.step(by_size[0] * size)), _LEAST_WEIGHED), _MOST_WEIGHED)
        weighed = by_size[:most]
        for each in by_size[most:]:
            if len(weighed) < 2 * most and all(exceed(each, other) > 1 for other in weighed):
                weighed.append(each)
        self._forms.ask_ahead(each * size for each in weighed)
        return -max((find_peak(self._forms.step(each * size)), -first_with[each]) for each in weighed)[1]

    def _peak(self, steps: Sequence[Features]) -> tuple[int, int]:
        """Requested and allocated bytes of the last of these steps."""
        run = replay_lengths(self._forms, steps, self._settings, recorded=self._first)
        return run.requested_bytes[-1], run.allocated_bytes[-1]

    # --- the long run -------------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Features]:
        """The lengths of all steps after the recorded ones. Further epochs have the same batches; where the sampler
        draws them in another order each time, in one that is drawn here."""
        epoch = self._epoch
        yield from epoch[self._first :]
        for number in itertools.count():
            if not self._recorded.epoch.is_ordered:
                epoch = random.Random(number).sample(epoch, len(epoch))
            yield from epoch

    def _run_long(self) -> dict[str, object]:
        room = room_bytes(self._recorded.target)
        steps = [*itertools.islice(self._steps(), LONG_RUN - self._first)]
        whole = self._replay(steps, self._settings, MOST_REQUESTS, room)
        found: dict[str, object] = {
            "steps": whole.steps,
            "reserved_bytes": max(whole.reserved_bytes),
            "full_at": whole.steps + 1 if whole.is_full else None,
        }
        if max(whole.reserved_bytes) * 100 < max(whole.allocated_bytes) * 105:
            return found
        as_is = self._replay(steps, self._settings, MOST_COMPARED)
        count = max(as_is.steps - self._first, 0)
        steps = steps[:count]
        environ = self._recorded.environ
        conf = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        changes = {
            text: self._replay(steps, AllocatorSettings.from_string(",".join(filter(None, (conf, text)))))
            for text in _SETTINGS
            if text.partition(":")[0] not in conf
        }
        for multiple in _PADDINGS:
            padded = [self._pad(each, multiple) for each in steps]
            if padded != steps:
                changes[f"lengths padded to multiples of {multiple}"] = self._replay(padded, self._settings)
        largest_first = sorted(steps, key=sum, reverse=True)
        if largest_first != steps:
            changes["the longest batches first"] = self._replay(largest_first, self._settings)
        listed = [LengthChange(change=each, reserved_bytes=max(run.reserved_bytes)) for each, run in changes.items()]
        return found | {
            "compared_steps": as_is.steps,
            "compared_bytes": max(as_is.reserved_bytes),
            "changes": tuple(sorted(listed, key=lambda each: each.reserved_bytes)),
        }

    def _replay(
        self,
        steps: Sequence[Features],
        settings: AllocatorSettings,
        most: int | None = None,
        capacity: int | None = None,
    ) -> LongRun:
        target, first = self._recorded.target, self._first
        if most is None:
            self._forms.ask_ahead({*steps})
        if settings.garbage_collection_threshold is not None and settings.per_process_memory_fraction == 1:
            capacity = room_bytes(target)
        return replay_lengths(
            self._forms,
            steps,
            settings,
            capacity_bytes=capacity,
            device_bytes=target.memory_bytes,
            most_requests=most,
            recorded=first,
        )

    def _pad(self, features: Features, multiple: int) -> Features:
        """The lengths rounded up to a multiple; sizes of batches stay."""
        is_batch = itertools.cycle(self._lengths.are_outer)
        return tuple(n if outer else -(-n // multiple) * multiple for n, outer in zip(features, is_batch, strict=False))


def find_peak(requests: Sequence[BlockRequest]) -> int:
    """The most bytes that a step has at once beyond what it finds, where the steps before were like it."""
    left: dict[int, int] = {}
    for _ in range(2):  # the first for what it leaves to the second, by slot
        found, left = left, {}
        live = most = sum(found.values())
        for nbytes, age, slot, _ in requests:
            if nbytes >= 0:
                left[slot] = nbytes
                live += nbytes
                most = max(most, live)
            elif nbytes == -1:
                live -= left.pop(slot, 0) if age == 0 else found.get(slot, 0)
    return most


def _chunks(batches: Sequence[Shapes], size: int) -> Iterator[Sequence[Shapes]]:
    """The batches of each whole step."""
    for begin in range(0, len(batches) - size + 1, size):
        yield batches[begin : begin + size]


def explain_longest(longest: LongestBatch) -> Iterator[str]:
    """What is taken for granted of a long run."""
    if longest.ran or longest.requested_bytes is None:
        yield from ["memory grows with the lengths of a batch, at most with the square of each"] * bool(longest.ran)
        return
    yield (
        "after the third step the program was given the longest, the smallest, other batches of its loader and the "
        "last; sizes at other lengths follow by forms that these and one more step confirm"
    )
    if longest.steps > longest.batches:
        yield f"further epochs have the batches of the {'first' if longest.epochs == 1 else 'epochs that were read'}"
    yield "evaluations and checkpoints of later steps are not in the long run"
