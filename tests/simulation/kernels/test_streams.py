"""Streams of a model and of a program, on a card that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import nn

import fxmem
from fxmem.records.profile import Kind, Phase, Profile, Storage


class TwoStreams(nn.Module):
    """One layer on the default stream, one on a side stream."""

    def __init__(self, recorded: bool = False) -> None:
        super().__init__()
        self.main, self.beside = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        self.recorded = recorded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of both."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = self.beside(x)
        torch.cuda.current_stream().wait_stream(side)
        if self.recorded:
            y.record_stream(torch.cuda.current_stream())
        return self.main(x) + y


def of_stream(profile: Profile, number: int) -> list[Storage]:
    return [storage for storage in profile.storages if storage.stream == number]


def test_what_a_side_stream_allocates_is_of_that_stream() -> None:
    real = torch.cuda.Stream, torch.cuda.stream, torch.Event, torch.Tensor.record_stream
    analysis = fxmem.analyze(TwoStreams(), torch.empty(4096, 1024))
    assert (torch.cuda.Stream, torch.cuda.stream, torch.Event, torch.Tensor.record_stream) == real
    profile = analysis.profile
    output = 4096 * 1024 * 4
    # Forward's product, and in backward, which runs on forward's streams, the gradients of that layer.
    sizes = [each.nbytes for each in of_stream(profile, 1) if each.kind is not Kind.WORKSPACE]
    assert sorted(sizes) == [1024 * 4, 1024 * 1024 * 4, output]
    names = {each.name for each in of_stream(profile, 1)}
    assert {"beside.weight.grad", "beside.bias.grad"} <= names
    # Newer releases take one for each call.
    assert names & {"cuBLAS workspace, autograd thread, stream 1", "cuBLAS workspace"}
    assert "main.weight.grad" not in names
    backward = next(span for span in profile.phases if span.phase is Phase.BACKWARD)
    assert any(each.birth >= backward.begin for each in of_stream(profile, 1))
    assert [each.text for each in profile.assumptions if each.topic == "streams"] == [
        "the step allocates on 2 streams, each with free blocks of its own, as the caching allocator has them; "
        "backward runs on forward's streams"
    ]
    assert analysis.peak.reserved_high_bytes is None


def test_a_recorded_stream_makes_reserved_bytes_a_range() -> None:
    analysis = fxmem.analyze(TwoStreams(recorded=True), torch.empty(4096, 1024), keep_outputs=False)
    used = [storage for storage in analysis.profile.storages if storage.used_on]
    assert [(each.nbytes, each.stream, each.used_on) for each in used] == [(4096 * 1024 * 4, 1, (0,))]
    assert analysis.peak.reserved_high_bytes > analysis.peak.reserved_bytes
    assert "where blocks wait for a stream as long as they can" in analysis.table()
    alike = fxmem.analyze(TwoStreams(), torch.empty(4096, 1024), keep_outputs=False)
    assert alike.peak.requested_bytes == analysis.peak.requested_bytes


def test_a_program_reserves_by_stream() -> None:
    with fxmem.record("h100"):
        side = torch.cuda.Stream()
        torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
            torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 60 << 20
        torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 60 << 20
        torch.cuda.set_stream(side)
        assert torch.accelerator.current_stream() == side
        with side, torch.cuda.stream(None):
            assert torch.cuda.current_stream().stream_id == side.stream_id
        assert torch.cuda.ExternalStream(0) == torch.cuda.default_stream()


@pytest.mark.parametrize(("priority", "first"), [(0, 1), (-1, 33)])
def test_the_33rd_stream_is_the_first_again(priority: int, first: int) -> None:
    with fxmem.record("h100"):
        streams = [torch.cuda.Stream(priority=priority) for _ in range(33)]
        torch.empty(1, device="cuda")
    assert [each.stream_id for each in streams] == [*range(first, first + 32), first]


def through_another() -> None:
    """Wait for the default stream by an event of another, which goes on after it."""
    other = torch.cuda.Stream()
    other.wait_event(torch.cuda.current_stream().record_event())
    last = torch.cuda.Stream()
    last.wait_stream(other)
    last.record_event().synchronize()


WAITS: Final[dict[str, tuple[Callable[[], object], int]]] = {
    "not at all": (lambda: None, 4),
    "for another stream": (lambda: torch.cuda.Stream().synchronize(), 4),
    "for an event before": (lambda: None, 2),
    "for an event": (lambda: torch.cuda.current_stream().record_event().synchronize(), 1),
    "until an event has come": (lambda: torch.cuda.current_stream().record_event().query(), 1),
    "for the stream": (lambda: torch.cuda.current_stream().synchronize(), 1),
    "for all": (lambda: torch.cuda.synchronize(), 1),
    "for all by another name": (lambda: torch.accelerator.synchronize(), 1),
    "for a stream that waited": (through_another, 1),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_block_waits_until_the_host_has_waited(how: str) -> None:
    with fxmem.record("h100", steps=1) as run:
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        for _ in range(4):
            early = main.record_event()
            with torch.cuda.stream(side):
                given = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            given.record_stream(main)
            del given
            if how == "for an event before":
                early.synchronize()
            WAITS[how][0]()
    assert run.peak.reserved_bytes == 64 << 20
    assert run.peak.reserved_high_bytes == WAITS[how][1] * (64 << 20)


def test_kernels_of_other_packages_are_given_the_current_stream() -> None:
    with fxmem.record():
        other = torch.cuda.Stream()
        find = torch._C._cuda_getCurrentRawStream
        assert find(0) == 0
        with torch.cuda.stream(other):
            assert find(0) == other.cuda_stream != 0
