"""Objects that ranks send to each other: each rank runs alone, and finds what others have sent in their own runs."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem.errors import AnalysisError
from fxmem.simulation.asked import known_values
from fxmem.simulation.round_rule import Enough


class MissingMail(BaseException):
    """A rank waits for what another has not sent yet, which is to run first.

    No `Exception`, so that the program's `except Exception` does not swallow it.
    """

    def __init__(self, source: int) -> None:
        super().__init__(source)
        self.source = source


class _Tensor:
    """What a tensor among the objects looks like; fakes of one run mean nothing in another."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size, self._stride = tuple(tensor.shape), tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device

    def make(self) -> torch.Tensor:
        """A tensor that looks so."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)


class Mailbox:
    """What the ranks of one program have sent to each other, run by run."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], list[list[Any]]] = defaultdict(list)
        self._read: Counter[tuple[int, int]] = Counter()
        self._awaited: list[tuple[int, int, int]] = []

    def begin(self, rank: int) -> None:
        """Begin the run of a rank: what it sent in an earlier one is forgotten, what it got is there to read again."""
        for pair in [each for each in self._sent if each[0] == rank]:
            del self._sent[pair]
        for pair in [each for each in self._read if each[1] == rank]:
            del self._read[pair]

    def send(self, source: int, destinations: Iterable[int], objects: list[Any]) -> None:
        """Keep objects for other ranks. Raises Enough where the run is for these alone."""
        for destination in destinations:
            if destination == source:
                continue
            letters = self._sent[source, destination]
            letters.append([torch_common.tree_map_only(torch.Tensor, _Tensor, each) for each in objects])
            if self._awaited and self._awaited[-1] == (source, destination, len(letters)):
                raise Enough

    def receive(self, source: int, destination: int) -> list[Any]:
        """The next objects for a rank. Raises MissingMail where they are not there yet."""
        letters, number = self._sent[source, destination], self._read[source, destination]
        if number >= len(letters):
            raise MissingMail(source)
        self._read[source, destination] += 1
        return [torch_common.tree_map_only(_Tensor, _Tensor.make, each) for each in letters[number]]

    @contextlib.contextmanager
    def awaiting(self, source: int, destination: int) -> Iterator[None]:
        """The source runs inside, as far as it sends what the destination waits for.

        Raises:
            AnalysisError: the source waits for the destination in its turn, or sends nothing.
        """
        if any(waiting == source for _, waiting, _ in self._awaited):
            pair = f"{source} and {destination}"
            raise AnalysisError(f"expected ranks that can run: {pair} wait for objects of each other")
        number = self._read[source, destination] + 1
        self._awaited.append((source, destination, number))
        try:
            yield
        finally:
            self._awaited.pop()
        if len(self._sent[source, destination]) < number:
            raise AnalysisError(
                f"expected rank {source} to send the objects that rank {destination} waits for; it sends none. Run the "
                f"script on as many ranks as it is written for"
            )


def mail_patches(
    rank: int, mailbox: Mailbox | None, note: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """Objects come and go by the mailbox: `send_object_list`, `recv_object_list`, `broadcast_object_list`,
    `scatter_object_list`.

    Where all give one, ranks would wait for each other: each is taken to give what this one does (`all_gather_object`,
    `gather_object`), which `note` is told.
    """

    def receive(source: int, into: list[Any]) -> None:
        if mailbox is None:
            raise AnalysisError(
                f"expected a block that needs no objects of other ranks; rank {rank} waits for those of rank {source}, "
                f"and a block cannot run as another rank first. Use `fxmem run --ranks`, or give PipelineStage its "
                f"input_args and output_args."
            )
        into[:] = mailbox.receive(source, rank)

    def send(objects: list[Any], *destinations: int) -> None:
        if mailbox is not None:
            mailbox.send(rank, destinations, objects)

    def send_object_list(
        object_list: list[Any], dst: Any = None, group: Any = None, *_: Any, group_dst: Any = None, **__: Any
    ) -> None:
        send(object_list, torch_distributed.find_rank(group, dst, group_dst))

    def recv_object_list(
        object_list: list[Any], src: Any = None, group: Any = None, *_: Any, group_src: Any = None, **__: Any
    ) -> int:
        source = torch_distributed.find_rank(group, src, group_src)
        receive(source, object_list)
        return source

    def broadcast_object_list(
        object_list: list[Any], src: Any = None, group: Any = None, *_: Any, group_src: Any = None, **__: Any
    ) -> None:
        source = torch_distributed.find_rank(group, src, group_src)
        if source != rank:
            receive(source, object_list)
        else:
            send(object_list, *torch.distributed.get_process_group_ranks(group))

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Any = None,
        src: Any = None,
        group: Any = None,
        group_src: Any = None,
    ) -> None:
        source = torch_distributed.find_rank(group, src, group_src)
        if source != rank:
            receive(source, scatter_object_output_list)
            return
        members = torch.distributed.get_process_group_ranks(group)
        for member, each in zip(members, scatter_object_input_list, strict=True):
            if member == rank:
                scatter_object_output_list[0] = each
            else:
                send([each], member)

    functions: tuple[Any, ...] = send_object_list, recv_object_list, broadcast_object_list, scatter_object_list
    functions += _give_alike(rank, note)
    owners = torch.distributed, torch.distributed.distributed_c10d
    replaced = torch_common.replace_all((owner, each.__name__, each) for each in functions for owner in owners)
    broadcast = functools.partial(_broadcast, rank, note)
    return torch_common.nested(replaced, *(torch_common.wrap(owner, "broadcast", broadcast) for owner in owners))


_MOST_FLAGS: Final = 64
"""Whole numbers of a tensor that may be flags."""


def _broadcast(
    rank: int,
    note: Callable[[str], None],
    original: Callable[..., Any],
    tensor: Any,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
) -> Any:
    """`broadcast`: whole numbers that are 0 until another rank says what they are, as it alone has read the data, are
    taken to be 1 then. All other numbers are taken to be on all ranks what they are on this."""
    work = original(tensor, src, group, async_op, group_src)
    if torch_distributed.find_rank(group, src, group_src) == rank or tensor.dtype.is_floating_point:
        return work
    if 0 < tensor.numel() <= _MOST_FLAGS:
        value = known_values.find_value(tensor) if isinstance(tensor, torch_common.FakeTensor) else tensor
        with torch_common.no_modes():
            is_open = value is not None and not value.any()
        if is_open:
            note("whole numbers that another rank broadcasts: 1")
            tensor.fill_(1)
    return work


def _give_alike(rank: int, note: Callable[[str], None]) -> tuple[Callable[..., None], ...]:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        note(f"objects of all ranks: each as that of rank {rank}")
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    return all_gather_object, gather_object
