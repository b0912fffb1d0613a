"""The one executor of analyses that do not need each other: joblib's processes on this machine, or a cluster.

Each job runs in a process that may have run others before. Where a single process is as fast, or as much as the memory
holds, jobs run here, one after another.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from fxmem.errors import EnvironmentLacksError, UsageError, one_line

_Result = TypeVar("_Result")
Job = Callable[[], _Result]
"""What runs in another process: it is pickled, and so is its result."""

_START_S: Final = 6.0
"""Seconds until a process of this machine has imported torch and what recordings need (6.2 on two cores, 2.11)."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one job takes."""

    seconds: float
    nbytes: int = 0
    """Of memory; 0 where it is not known."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where jobs run: `loky`, joblib's processes on this machine, or a cluster of dask, by its scheduler's address."""

    name: str = "loky"
    address: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, whose files a job finds as they are here."""
        return self.name == "loky"


_HERE: Final = Backend()
_backend: Final[contextvars.ContextVar[Backend]] = contextvars.ContextVar("backend", default=_HERE)


def read_backend(text: str) -> Backend:
    """Read `loky` or `dask:tcp://HOST:PORT`.

    Raises:
        UsageError: another form.
        EnvironmentLacksError: dask is not installed.
    """
    name, _, address = text.partition(":")
    if name == "loky" and not address:
        return _HERE
    if name != "dask" or "://" not in address:
        raise UsageError(f"expected --backend loky or dask:tcp://HOST:PORT, the scheduler's address; got {text!r}")
    if importlib.util.find_spec("distributed") is None:
        raise EnvironmentLacksError("expected dask's `distributed` to be installed: pip install 'fxmem[dask]'")
    return Backend(name, address)


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Jobs of this thread run there."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def current_backend() -> Backend:
    """Where jobs of this thread run."""
    return _backend.get()


def run_jobs(jobs: Sequence[Job[_Result]], cost: Cost | None = None) -> Iterator[_Result]:
    """Run jobs side by side; their results, in order.

    Args:
        jobs: what is run.
        cost: of one of them; None where it is not known, and then they run side by side.

    Raises:
        What a job raises, once the others have been ended.
        EnvironmentLacksError: the cluster cannot be reached, or lost a job.
    """
    backend = _backend.get()
    workers = count_workers(len(jobs), cost) if backend.is_here else -1
    if workers == 1 or not jobs:
        for job in jobs:
            yield job()
        return
    import joblib  # type: ignore[import-untyped]

    options: dict[str, Any] = {"n_jobs": workers, "batch_size": 1, "pre_dispatch": "all"}
    with contextlib.ExitStack() as stack:
        if backend.is_here:
            stack.enter_context(joblib.parallel_config("loky"))
            options["max_nbytes"] = None
        else:
            stack.enter_context(_connected(backend))
        yield from joblib.Parallel(**options, return_as="generator")(joblib.delayed(_call)(job) for job in jobs)


def _call(job: Job[_Result]) -> _Result:
    return job()


@contextlib.contextmanager
def _connected(backend: Backend) -> Iterator[None]:
    import distributed
    import joblib

    try:
        make: Any = distributed.Client
        client = make(backend.address, timeout=20, set_as_default=False)
    except (OSError, ValueError) as error:
        raise EnvironmentLacksError(
            f"expected dask's scheduler at {backend.address}; it was not reached: {one_line(error)}"
        ) from error
    with client, joblib.parallel_config("dask", client=client):
        yield


def count_workers(jobs: int, cost: Cost | None = None) -> int:
    """How many processes run so many jobs; 1 where more would not be faster, or would not fit the memory."""
    import joblib

    most: int = min(jobs, joblib.cpu_count())
    if cost is not None and cost.nbytes:
        most = min(most, _available_bytes() // cost.nbytes)
    if most < 2:
        return 1
    if cost is not None and cost.seconds * (jobs - math.ceil(jobs / most)) < _START_S:
        return 1
    return most


def largest_child_bytes() -> int:
    """The most that a child of this process had in memory; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of macOS counts in bytes
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit


def _available_bytes() -> int:
    """Memory that the machine has left."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        line = next(each for each in lines if each.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024  # proc(5): kB that stand for KiB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**62
