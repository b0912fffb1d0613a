"""Streams and events of the pretended card: which stream each allocation is for, and nothing of time.

A stream is a number: 0 is the default one, 1 to 32 are torch's pool of ordinary priority and 33 to 64 that of high
priority, taken in turn and from the first again after the last (`kStreamsPerPool` in c10/cuda/CUDAStream.cpp); streams
from elsewhere follow. A node of autograd's graph runs on the stream that was current when forward made it
(`Node::stream` in torch/csrc/autograd/function.h); a leaf's gradient is added on the default stream.

What a stream was given is done once the host has waited for it, or for another stream that had (`cudaEventSynchronize`,
`cudaStreamWaitEvent`): blocks that `record_stream` holds back are free then at the latest.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem.records.units import GRAPH_POOL

_POOL: Final = 32
_ELSEWHERE: Final = 1 + 2 * _POOL


Done = Mapping[int, int]
"""By stream, the moment up to which what it was given is done."""


class StreamObserver(Protocol):
    """What streams report to."""

    def note_use(self, tensor: torch.Tensor, stream: int) -> None:
        """`record_stream` names a stream that uses a tensor."""

    def note_wait(self, done: Done | None) -> None:
        """The host has waited until this was done; None: until all was."""


class Streams:
    """The streams of one run on a pretended card."""

    def __init__(self, observer: StreamObserver | None = None) -> None:
        self.current = 0
        """Number of the stream that allocations are for."""
        self._made = [0, 0]
        self._external: dict[int, int] = {}
        self._switches: list[tuple[int, int]] = [(-1, 0)]
        """Number of autograd's next node where a stream became current, and that stream."""
        self._observer = observer
        self._moment = 0
        self._seen: dict[int, dict[int, int]] = {}
        """By stream, what of others is done before what it is given next."""
        self.Stream: Any = type("Stream", (CardStream,), {"_streams": self})
        self.Event: Any = type("Event", (CardEvent,), {"_streams": self})
        self.Context: Any = type("StreamContext", (_Context,), {"_streams": self})
        self.ExternalStream: Any = type("ExternalStream", (self.Stream,), {"_is_external": True})

    def number(self, priority: int = 0) -> int:
        """The number of the next stream of torch's pool for this priority."""
        high = priority < 0
        self._made[high] += 1
        return 1 + high * _POOL + (self._made[high] - 1) % _POOL

    def external_number(self, pointer: int) -> int:
        """The number of a stream that the program names by its address."""
        return self._external.setdefault(pointer, _ELSEWHERE + len(self._external)) if pointer else 0

    def find_number(self, stream: Any) -> int:
        """The number of any stream, a real one of this machine's card among them."""
        return stream.stream_id if isinstance(stream, CardStream) else self.external_number(stream.cuda_stream)

    def set_current(self, stream: Any) -> None:
        """Make a stream the current one."""
        self._enter(self.find_number(stream))

    def current_stream(self, *_: Any, **__: Any) -> Any:
        """The current stream."""
        return self.Stream(number=self.current)

    def default_stream(self, *_: Any, **__: Any) -> Any:
        """The default stream."""
        return self.Stream(number=0)

    def next_moment(self) -> int:
        """A number for this moment, greater than all before."""
        self._moment += 1
        return self._moment

    def given(self, number: int) -> Done:
        """What is done once all is that a stream has been given."""
        return {**self._seen.get(number, {}), number: self.next_moment()}

    def wait(self, number: int, done: Done) -> None:
        """Let a stream go on when this is done."""
        seen = self._seen.setdefault(number, {})
        seen.update({stream: moment for stream, moment in done.items() if moment > seen.get(stream, 0)})

    def wait_on_host(self, done: Done | None = None) -> None:
        """Let the host go on when this is done; None: when all is."""
        if self._observer is not None:
            self._observer.note_wait(done)

    def _enter(self, number: int) -> None:
        if number != self.current:
            self.current = number
            self._switches.append((torch_autograd.next_sequence_number(), number))

    def enter_backward_node(self, sequence: int | None) -> None:
        """Make the stream current that a node of autograd runs on; None for a leaf's gradient."""
        if len(self._switches) > 1:
            found = 0 if sequence is None else bisect.bisect_right(self._switches, (sequence, _ELSEWHERE << 32)) - 1
            self.current = 0 if sequence is None else self._switches[found][1]

    @contextlib.contextmanager
    def keep(self, current: int | None = None) -> Iterator[None]:
        """The current stream, which is another inside if that is given, is as before afterwards."""
        before = self.current
        self.current = before if current is None else current
        try:
            yield
        finally:
            self.current = before

    def graph_pool(self) -> contextlib.AbstractContextManager[None]:
        """Allocate from the pool that all CUDA graphs share."""
        return self.keep(GRAPH_POOL)

    def graph_stream(self) -> contextlib.AbstractContextManager[None]:
        """Allocate from the ordinary pool, for the stream that records CUDA graphs."""
        return self.keep(GRAPH_POOL + 1)

    def patches(self) -> contextlib.AbstractContextManager[None]:
        """Streams and events of `torch`, `torch.cuda` and `torch.accelerator` are those of the pretended card."""

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            if self._observer is not None:
                self._observer.note_use(tensor, self.find_number(stream))

        of_both: dict[str, Any] = {
            "set_stream": self.set_current,
            "current_stream": self.current_stream,
            "synchronize": lambda *_, **__: self.wait_on_host(),
        }
        of_cuda = {
            "Stream": self.Stream,
            "ExternalStream": self.ExternalStream,
            "Event": self.Event,
            "StreamContext": self.Context,
            "stream": self.Context,
            "default_stream": self.default_stream,
        }
        zeros = dict.fromkeys(("current_device_index", "current_device_idx"), lambda *_, **__: 0)
        answers = {
            torch.cuda: of_both | of_cuda,
            torch.accelerator: of_both | zeros,
            torch: {"Stream": self.Stream, "Event": self.Event},
            torch.Tensor: {"record_stream": record_stream},
        }
        places = ((owner, *each) for owner, given in answers.items() for each in given.items())
        raw = torch_common.replace_raw_stream(lambda: int(self.current_stream().cuda_stream))
        return torch_common.nested(torch_common.replace_all(places), raw)


class CardStream:
    """A stream of the pretended card, on which all is done at once."""

    _streams: Streams
    _is_external = False
    device = torch.device("cuda", 0)
    device_index = 0
    device_type = 1

    def __init__(self, *given: Any, priority: int = 0, number: int | None = None, **_: Any) -> None:
        self.priority = priority
        if number is None and self._is_external:
            number = self._streams.external_number(int(given[0]) if given else 0)
        self.stream_id = self.cuda_stream = self._streams.number(priority) if number is None else number
        self._before: list[int] = []

    def __enter__(self) -> CardStream:
        self._before.append(self._streams.current)
        self._streams._enter(self.stream_id)
        return self

    def __exit__(self, *_: Any) -> None:
        self._streams._enter(self._before.pop())

    def wait_stream(self, stream: Any) -> None:
        """Go on after what another stream was given."""
        self._streams.wait(self.stream_id, self._streams.given(self._streams.find_number(stream)))

    def wait_event(self, event: Any) -> None:
        """Go on after an event."""
        event.wait(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        self._streams.wait_on_host(self._streams.given(self.stream_id))

    def is_capturing(self) -> bool:
        """No CUDA graph is captured. Optimizers ask since torch 2.15."""
        return False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return 0, -5

    def record_event(self, event: Any = None) -> Any:
        """An event that has come."""
        event = self._streams.Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all is done: always."""
        self.synchronize()
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CardStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class CardEvent:
    """An event that comes when it is recorded."""

    _streams: Streams
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded = 0.0
        self._done: Done = {}

    def record(self, stream: Any = None) -> None:
        """Let it come, after what a stream, or the current one, was given."""
        self._recorded = time.perf_counter()
        self._done = self._streams.given(self._find_number(stream))

    def wait(self, stream: Any = None) -> None:
        """Let a stream, or the current one, go on after it."""
        self._streams.wait(self._find_number(stream), self._done)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self._streams.wait_on_host(self._done)

    def query(self) -> bool:
        """Whether it has come: always."""
        self.synchronize()
        return True

    def _find_number(self, stream: Any) -> int:
        return self._streams.current if stream is None else self._streams.find_number(stream)

    def elapsed_time(self, other: CardEvent) -> float:
        """Milliseconds to another event, as long as the pretended run took here."""
        return max((other._recorded - self._recorded) * 1e3, 1e-3)


class _Context:
    """`torch.cuda.stream(stream)`: the stream is current inside; None changes nothing."""

    _streams: Streams

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = self._streams.current
        if self.stream is not None:
            self._streams.set_current(self.stream)

    def __exit__(self, *_: Any) -> None:
        self._streams._enter(self._before)
