"""The world of a rank: a process group of any size, of which this process is one rank, whose collectives answer at
once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.hardware.links import PER_MACHINE
from fxmem.simulation.code.source_lines import describe_place
from fxmem.simulation.ranks.mailbox import Mailbox
from fxmem.simulation.ranks.reducer import DistributedDataParallel

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
