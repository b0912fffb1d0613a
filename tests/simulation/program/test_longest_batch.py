"""The lengths of an epoch, the batch that decides, and a long run."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fxmem._torch import kernels as torch_kernels
from fxmem.hardware import catalogue
from fxmem.hardware.hidden_memory import HiddenMemory
from fxmem.memory.lengths import Features, StepForms
from fxmem.records.parts import LongestBatch
from fxmem.records.units import STEPS
from fxmem.show.facts import find_fit
from fxmem.show.run_facts import describe_longest, longest_facts
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch
from fxmem.simulation.run import longest_batch
from fxmem.simulation.run.listeners.lengths import LengthsWatch
from fxmem.simulation.run.loader_watch import LoaderWatch, read_epoch
from tests.memory.test_lengths import signed_sizes
from tests.simulation.program import varied

MIB = 1 << 20


@functools.cache
def run(kind: str = "", card: str = "h100", steps: int | None = None, memory_bytes: int = 0) -> RecordedProgram:
    target = catalogue.target(card)
    if memory_bytes:
        target = target.model_copy(update={"memory_bytes": memory_bytes})
    device = "cpu" if card == "cpu" else "cuda"
    with pytest.MonkeyPatch.context() as patched:
        if kind or steps:  # the others' long run is as long as every program's
            patched.setattr(longest_batch, "LONG_RUN", 300)
        return launch(Launch(varied.__file__, (device, kind)), target, RunSettings(steps, reads_epoch=True)).recorded


def found(recorded: RecordedProgram) -> LongestBatch:
    longest = recorded.program.longest
    assert longest is not None
    return longest


def own_order() -> list[tuple[int, ...]]:
    """The shapes of an epoch's batches as the program gets them."""
    torch.manual_seed(0)
    varied.Net()
    return [tuple(each.shape) for each in varied.make_loader()]


def test_the_longest_batch_is_named_by_its_place_in_the_programs_own_order() -> None:
    shapes, longest = own_order(), found(run())
    most = max(shapes)
    assert (longest.batches, longest.shape, longest.stopped) == (len(shapes), most, "")
    assert shapes[longest.number - 1] == most
    line = Path(varied.__file__).read_text(encoding="utf-8").splitlines()[int(longest.place.rpartition(":")[2]) - 1]
    assert "enumerate(make_loader())" in line


def test_its_peak_by_arithmetic_is_that_of_the_step_that_was_run() -> None:
    """Without it among the steps that are compared."""
    rounds, longest = run().rounds, found(run())
    assert len(rounds) == STEPS + 6  # the largest, the smallest, two others, the last, and one more
    assert rounds[STEPS].requested_bytes == max(each.requested_bytes for each in rounds)
    assert abs(rounds[STEPS].requested_bytes - (longest.requested_bytes or 0)) <= 8  # a loss of the step before
    assert longest.allocated_bytes == rounds[STEPS].allocated_bytes


def test_a_long_run_is_replayed_and_what_changes_save() -> None:
    profile, longest = run().profile, found(run())
    assert longest.steps == 10_000
    assert (longest.reserved_bytes or 0) >= (run().rounds[-1].reserved_bytes or 0)
    assert run().peak.reserved_bytes == longest.reserved_bytes
    head, *_ = longest_facts(profile)
    assert head.label == "Longest"
    assert f"batch {longest.number} of 101" in head.text
    assert "reserved after 10,000 steps" in head.text
    assert any(each.topic == "lengths" for each in profile.assumptions)


def test_the_steps_of_several_batches_are_followed() -> None:
    longest = found(run("accumulate"))
    assert not longest.unproved
    assert longest.allocated_bytes


def test_batches_of_one_length_have_none() -> None:
    assert run("fixed").program.longest is None
    assert len(run("fixed").rounds) == STEPS


def test_sizes_that_follow_no_form_have_the_peak_of_those_that_were_run() -> None:
    longest = found(run("odd"))
    assert longest.unproved.startswith("expected sizes that follow the lengths, got ")
    assert longest.requested_bytes == max(each.requested_bytes for each in run("odd").rounds)
    assert longest.reserved_bytes is None
    assert (
        f", the most of {longest.ran} that were run; no peak is known of lengths that were not run"
        in describe_longest(longest)
    )


def test_a_stream_that_is_read_once_is_left_alone() -> None:
    longest = found(run("iterable"))
    assert longest.stopped == "an iterable data set that may not be read twice"
    assert len(run("iterable").rounds) == STEPS
    assert describe_longest(longest).startswith("not known: the loader (")


def test_a_number_of_steps_is_kept() -> None:
    recorded = run(steps=7)
    assert len(recorded.rounds) == 7
    assert found(recorded).requested_bytes


def test_a_card_that_is_full_later_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    code, longest = run("accumulate")._code, found(run("accumulate"))
    (watch,) = (each for each in code.watch.listeners if isinstance(each, LengthsWatch))
    full = longest.model_copy(update={"full_at": 7412})
    monkeypatch.setattr(watch, "_longest", full)
    later = RecordedProgram(code)
    assert find_fit(later.profile, later.peak).exit_code == 4
    assert later.peak.shortage == "It runs out at step 7,412"
    assert "; out of memory at step 7,412" in describe_longest(full)


# --- nothing of the program's is used up ------------------------------------------------------------------------------


@contextlib.contextmanager
def watching(watch: LoaderWatch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in watch.patches():
            stack.enter_context(patch)
        yield


@pytest.mark.parametrize("own", [True, False], ids=["its own generator", "torch's generator"])
def test_random_states_and_the_pass_under_way_stay(own: bool) -> None:
    def batches(watch: LoaderWatch | None) -> tuple[list[int], list[object]]:
        torch.manual_seed(1)
        random.seed(1)
        generator = torch.Generator().manual_seed(5) if own else None
        loader = DataLoader(
            varied.make_texts(40), batch_size=4, shuffle=True, generator=generator, collate_fn=varied.collate
        )
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch.shape[1])
            if watch is not None and number < STEPS:
                watch.end_round()
        return seen, [torch.rand(1).item(), random.random(), generator and generator.get_state().sum().item()]

    watch = LoaderWatch(reads=True)
    with watching(watch):
        got = batches(watch)
    assert got == batches(None)
    assert watch.epoch is not None
    assert [shape[0][1] for shape in watch.epoch.shapes] == got[0]


def test_reading_stops_in_time_and_says_so() -> None:
    watch = LoaderWatch()
    with watching(watch):
        next(iter(varied.make_loader()))
        epoch = read_epoch(next(iter(watch._last.values())), most=5)
    assert (len(epoch.shapes), epoch.stopped) == (5, "stopped at 5")


# --- beside a real run ------------------------------------------------------------------------------------------------


WRAPPED = 8
"""Bytes of a Python number that an operator takes as a tensor; fakes have none."""


def real_log(lengths: list[int]) -> list[int]:
    """What the CPU's allocator reports of these steps."""
    torch.manual_seed(0)
    net = varied.Net()
    optimizer = torch.optim.AdamW(net.parameters())
    varied.train_on(net, optimizer, torch.zeros(4, 50, dtype=torch.int64))
    with torch_kernels.profiler() as profiled:
        for each in lengths:
            ids = torch.empty(4, each, dtype=torch.int64).zero_()
            varied.train_on(net, optimizer, ids)
    pending, events = torch_kernels.event_tree(profiled), []
    while pending:
        entry = pending.pop()
        pending += entry.children
        if torch_kernels.is_allocation(entry) and abs(entry.extra_fields.alloc_size) > WRAPPED:
            events.append((entry.start_time_ns, entry.extra_fields.alloc_size))
    return [nbytes for _, nbytes in sorted(events, key=lambda each: each[0])]


@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.truth)])
def test_steps_of_random_lengths_on_the_cpu_are_the_real_ones_event_by_event(steps: int) -> None:
    recorded = run(card="cpu", steps=9)
    code = recorded._code
    loader, _ = code.watch.parts.loaders.find_training()
    assert loader is not None
    known: list[Features | None] = [
        None,
        None,
        *((shapes[0][1],) for shapes in code.watch.parts.loaders.handed(loader)[1:9]),
    ]

    def look(name: str, args: Sequence[Any], result: Any) -> HiddenMemory | None:
        seen = code.recording.collector.find_hidden(name, args, result)
        return None if seen is None else seen.memory

    forms = StepForms(code.machine.trace.rounds[:10], known, look, lambda signatures: {})
    drawn = random.Random(7)
    lengths = [drawn.randint(16, 400) for _ in range(steps)]
    first, predicted = (
        [each for each in signed_sizes([forms.step((each,)) for each in some]) if abs(each) > WRAPPED]
        for some in (lengths[:1], lengths)
    )
    predicted = predicted[len(first) :]
    freed_at_return = next(place for place, nbytes in enumerate(predicted) if nbytes > 0)  # after the optimizer's step
    real = real_log(lengths)[: -freed_at_return or None]
    assert len(predicted) > 70 * (steps - 1)
    assert predicted == real[-len(predicted) :]
