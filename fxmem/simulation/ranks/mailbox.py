"""Objects that ranks send to each other: each rank runs alone, and finds what others have sent in their own runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.hardware.catalogue import PER_MACHINE
from fxmem.simulation.asked import known_values
from fxmem.simulation.code.round_rule import Enough
from fxmem.simulation.code.source_lines import describe_place
from fxmem.simulation.ranks.reducer import DistributedDataParallel


class MissingMail(BaseException):
    """A rank waits for what another has not sent yet, which is to run first.

    No `Exception`, so that the program's `except Exception` does not swallow it.
    """

    def __init__(self, source: int, number: int) -> None:
        super().__init__(source, number)
        self.source = source
        self.number = number
        """How many of its letters the rank needs."""


class _Writer(pickle.Pickler):
    """Writes objects for another process; of a tensor what it looks like, as fakes of one run mean nothing there."""

    def persistent_id(self, obj: Any) -> Any:
        """Size, stride, dtype and device of a tensor; None of all else."""
        if not isinstance(obj, torch.Tensor):
            return None
        return tuple(obj.shape), tuple(obj.stride()), obj.dtype, obj.device


class _Reader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> torch.Tensor:
        """A tensor that looks so."""
        size, stride, dtype, device = pid
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


class Mailbox:
    """What the ranks of one program have sent to each other, run by run."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], list[bytes]] = defaultdict(list)
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
            written = io.BytesIO()
            _Writer(written).dump(objects)
            letters.append(written.getvalue())
            if self._awaited and self._awaited[-1] == (source, destination, len(letters)):
                raise Enough

    def receive(self, source: int, destination: int) -> list[Any]:
        """The next objects for a rank. Raises MissingMail where they are not there yet."""
        letters, number = self._sent[source, destination], self._read[source, destination]
        if number >= len(letters):
            raise MissingMail(source, number + 1)
        self._read[source, destination] += 1
        found: list[Any] = _Reader(io.BytesIO(letters[number])).load()
        return found

    @property
    def is_awaited(self) -> bool:
        """Whether the run is for objects that another rank waits for, alone."""
        return bool(self._awaited)

    def awaits(self, rank: int) -> bool:
        """Whether a rank waits for what this run is to send, so that it cannot run before."""
        return any(waiting == rank for _, waiting, _ in self._awaited)

    def sent_by(self, rank: int) -> dict[int, list[bytes]]:
        """What a rank has sent in its last run, by rank."""
        return {to: letters for (source, to), letters in self._sent.items() if source == rank and letters}

    def adopt(self, rank: int, sent: Mapping[int, Sequence[bytes]]) -> None:
        """Take over what a rank has sent in a process of its own."""
        self.begin(rank)
        self._sent.update({(rank, to): list(letters) for to, letters in sent.items()})

    def has(self, source: int, destination: int, number: int) -> bool:
        """Whether so many letters of one rank for another are there."""
        return len(self._sent[source, destination]) >= number

    @contextlib.contextmanager
    def awaiting(self, source: int, destination: int, number: int, *, goes_on: bool = False) -> Iterator[None]:
        """The source runs inside, as far as it sends the letters that the destination waits for, unless it goes on.

        Raises:
            AnalysisError: the source waits for the destination in its turn, or sends nothing.
        """
        if self.awaits(source):
            pair = f"{source} and {destination}"
            raise AnalysisError(f"expected ranks that can run: {pair} wait for objects of each other")
        self._awaited.append((source, destination, 0 if goes_on else number))
        try:
            yield
        finally:
            self._awaited.pop()
        if not self.has(source, destination, number):
            raise AnalysisError(
                f"expected rank {source} to send the objects that rank {destination} waits for; it sends none. Run the "
                f"script on as many ranks as it is written for"
            )


def mail_patches(  # noqa: C901 - a function of torch each
    rank: int, mailbox: Mailbox | None, note: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """Objects come and go by the mailbox: `send_object_list`, `recv_object_list`, `broadcast_object_list`,
    `scatter_object_list`.

    Where all give one, ranks would wait for each other: each is taken to give what this one does (`all_gather_object`,
    `gather_object`), which `note` is told.

    The values of a few whole numbers that one rank sends, or that `broadcast` sends, come by it, too: shapes, lengths
    and settings. Broadcast ones that the sender does not know, and that are 0 here until then, are taken to be 1, which
    `note` is told.
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

    def broadcast(
        original: Any, tensor: torch.Tensor, src: Any = None, group: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        work = original(tensor, src, group, *args, **kwargs)
        if _are_few(tensor) and tensor.dtype is not torch.uint8:  # DeepSpeed broadcasts parameters as bytes
            source = torch_distributed.find_rank(group, src, kwargs.get("group_src"))
            if source == rank:
                send([_read_numbers(tensor)], *torch.distributed.get_process_group_ranks(group))
            elif mailbox is not None and (found := mailbox.receive(source, rank)[0]) is not None:
                known_values.overwrite(tensor, found)
            else:
                _open(tensor, note)
        return work

    def send_numbers(tensors: list[torch.Tensor], destination: int) -> None:
        for each in filter(_are_few, tensors):
            send([_read_numbers(each)], destination)

    def receive_numbers(tensors: list[torch.Tensor], source: int) -> None:
        for each in filter(_are_few, tensors):
            found = None if mailbox is None or mailbox.awaits(source) else mailbox.receive(source, rank)[0]
            if found is not None and len(found) == each.numel():
                known_values.overwrite(each, found)
            elif isinstance(each, torch_common.FakeTensor):
                known_values.forget(each)

    functions: tuple[Any, ...] = send_object_list, recv_object_list, broadcast_object_list, scatter_object_list
    functions += _give_alike(rank, note)
    owners = torch.distributed, torch.distributed.distributed_c10d
    return torch_common.nested(
        torch_common.replace_all((owner, each.__name__, each) for each in functions for owner in owners),
        torch_distributed.observe_sends(send_numbers, receive_numbers),
        *(torch_common.wrap(owner, "broadcast", broadcast) for owner in owners),
    )


_FEW: Final = 1024
"""Numbers of a tensor that are passed on."""


def _are_few(tensor: torch.Tensor) -> bool:
    """Whether a tensor has whole numbers that are passed on."""
    return 0 < tensor.numel() <= _FEW and not (tensor.is_floating_point() or tensor.is_complex())


def _read_numbers(tensor: torch.Tensor) -> list[int] | None:
    """The numbers of a tensor, in a row; None where they are not known."""
    value = known_values.find_value(tensor) if isinstance(tensor, torch_common.FakeTensor) else tensor
    with torch_common.no_modes():
        return None if value is None else value.flatten().tolist()


def _open(tensor: torch.Tensor, note: Callable[[str], None]) -> None:
    """Set flags to 1 that are 0 until another rank, which alone has read the data, says what they are."""
    value = known_values.find_value(tensor) if isinstance(tensor, torch_common.FakeTensor) else tensor
    with torch_common.no_modes():
        is_open = value is not None and not value.any()
    if is_open:
        note("whole numbers that another rank broadcasts: 1")
        tensor.fill_(1)


def _give_alike(rank: int, note: Callable[[str], None]) -> tuple[Callable[..., None], ...]:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        note(f"objects of all ranks: each as that of rank {rank}")
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    return all_gather_object, gather_object


# --- the world of a rank ----------------------------------------------------------------------------------------------
# A process group of any size, of which this process is one rank, whose collectives answer at once.


Parallelize = Callable[[torch.nn.Module], Any]
"""The user's own function: shards a module in place, or returns another."""


@dataclasses.dataclass(frozen=True)
class World:
    """A rank's place.

    Raises:
        UsageError: no such rank.
    """

    size: int
    rank: int = 0
    mailbox: Mailbox | None = dataclasses.field(default=None, compare=False)
    """What other ranks have sent; None where they cannot run."""
    per_machine: int = PER_MACHINE
    """How many ranks a machine has."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"expected ranks of at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise UsageError(f"expected a rank of 0 to {self.size - 1}, got {self.rank}")

    @property
    def variables(self) -> dict[str, str]:
        """What torchrun would tell the rank's process."""
        return torch_distributed.rank_variables(self.size, self.rank, self.per_machine)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The world is there: environment variables as torchrun sets them, and a process group. Both are undone.

        Raises:
            UsageError: the caller has a process group of its own.
        """
        with self.prepared():
            torch_distributed.begin_fake_group(torch.distributed.init_process_group, self.size, self.rank)
            yield

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """As `entered`, but that the process group is still to begin."""
        if torch_distributed.is_initialized():
            raise UsageError(
                "expected a process without a process group, since that of the ranks is made up; this one has called "
                "init_process_group. Analyse before it does, after destroy_process_group, or in another process."
            )
        with (
            torch_common.set_environment(self.variables),
            torch_distributed.fakes_are_sharded(),
            torch_distributed.refuse_schedules(_refuse),
            torch_distributed.saves_of_one_rank(),
        ):
            yield


def _refuse(name: str) -> None:
    """Raise an AnalysisError for a schedule that cannot be followed, with what to use instead."""
    raise AnalysisError(
        f"expected a schedule whose backward runs whole, got {name}, which splits it by hooks in C++ that no Python "
        f"engine runs. Use ScheduleInterleaved1F1B"
    )


def shard(model: torch.nn.Module, parallelize: Parallelize) -> torch.nn.Module:
    """What the user's own function makes of a fake model.

    Raises:
        AnalysisError: the function raised, or what it returns cannot be followed; the line says where.
        UsageError: it returns no module.
    """
    device = next((each.device for each in model.parameters()), torch.device("cuda"))
    try:
        replaced = torch_distributed.replace_ddp(DistributedDataParallel)
        with replaced, torch_distributed.default_device(torch.device(device.type)):
            made = parallelize(model)
    except FxmemError:
        raise
    except torch_common.DATA_DEPENDENT as error:
        raise AnalysisError(
            f"expected parallelize to need no values, such as other ranks send, which are not there; it reads "
            f"some{describe_place(error)}. Take them from its environment (RANK, WORLD_SIZE) or a constant"
        ) from error
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "deepspeed":
            raise AnalysisError(
                "expected DeepSpeed to be installed (DS_BUILD_OPS=0 pip install deepspeed), for a script that trains "
                "by it (fxmem run --ranks); here ZeRO-3 is fully_shard, ZeRO-2 with reshard_after_forward=False"
            ) from error
        raise AnalysisError(
            f"expected parallelize to shard the model for ranks that are not there; it raised {one_line(error)}"
            f"{describe_place(error)}"
        ) from error
    made = model if made is None else made
    if not isinstance(made, torch.nn.Module):
        raise UsageError(f"expected parallelize to return a module, or None, got {type(made).__name__}")
    if any(type(each).__name__ == "DeepSpeedEngine" for each in made.modules()):
        raise AnalysisError(
            "expected a model that is sharded by FSDP, DTensor or DistributedDataParallel; this one is an engine of "
            "DeepSpeed, which steps by itself. Run the script that trains it (fxmem run --ranks), or use fully_shard."
        )
    return made
