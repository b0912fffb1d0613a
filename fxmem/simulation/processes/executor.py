"""The one executor of analyses that do not need each other: joblib's processes on this machine, a cluster, or forks.

Each job runs in a process that may have run others before; in a fork of this one where it cannot be pickled, or where
this process has something else to do meanwhile (`SideJobs`). Where a single process is as fast, or as much as the
memory holds, jobs run here, one after another.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import torch

from fxmem.errors import EnvironmentLacksError, FxmemError, UsageError, one_line
from fxmem.records.profile import Record
from fxmem.simulation.processes.fork import (
    Forked,
    answer_work,
    format_answer,
    may_run_backward,
    parse_answer,
    read_answer,
)

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer", bound=Record)
Job = Callable[[], _Result]
"""What runs in another process: it is pickled, and so is its result."""

_LOOK_S: Final = 0.2
"""Seconds of waiting for one fork until the others are looked at."""
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


class SideAnswer(NamedTuple):
    """What came of a job in a fork."""

    name: str
    text: str = ""
    error: FxmemError | None = None
    """What it raised."""
    is_lost: bool = False
    """Whether the fork could not do it: the system ended it, or torch works in no fork here."""


class SideJobs:
    """A context in which jobs run in forks of this process, while it does other things.

    Nothing is imported or pickled for them. There are as many at a time as there are cores beside this process's own,
    and as the memory holds if each comes to need as much as this process has. Leaving the context ends them.

    Args:
        jobs: by name; the first begins first. Each returns a text.
        tell: is called with the name of one that begins.
    """

    def __init__(self, jobs: Mapping[str, Job[str]], tell: Callable[[str], None] = lambda _: None) -> None:
        self._jobs, self._tell = dict(jobs), tell
        self._beside = self._most = 0
        self._running: dict[str, tuple[Forked, Path]] = {}
        if self._jobs and hasattr(os, "fork") and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._most = count_workers(len(self._jobs) + 1, Cost(math.inf, _own_bytes()))
            self._beside = self._most - 1

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="fxmem-answer-", ignore_cleanup_errors=True)
        self._begin(self._beside)
        return self

    def __exit__(self, *raised: object) -> None:
        for process, _ in self._running.values():
            process.kill()
        self._folder.cleanup()

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the jobs that have given no answer yet."""
        return (*self._running, *self._jobs)

    def finished(self) -> Iterator[SideAnswer]:
        """The answers of jobs that are over by now; others begin in their places."""
        for name in [*self._running]:
            process, path = self._running[name]
            if process.wait(0) is not None:
                yield self._take(name, process, path)
        self._begin(self._beside)

    def wait(self) -> Iterator[SideAnswer]:
        """The answers of all that is left, as they come. On a single core these jobs are lost: they would wait as long
        for each other here."""
        while self._running or (self._most > 1 and self._jobs):
            self._begin(self._most)
            for name, (process, path) in [*self._running.items()]:
                if process.wait(_LOOK_S) is not None:
                    yield self._take(name, process, path)
        for name in [*self._jobs]:
            del self._jobs[name]
            yield SideAnswer(name, is_lost=True)

    def _begin(self, most: int) -> None:
        while self._jobs and len(self._running) < most:
            name = next(iter(self._jobs))
            job, path = self._jobs.pop(name), Path(self._folder.name, str(len(self._jobs)))
            self._tell(name)
            self._running[name] = Forked(functools.partial(_answer_apart, job, path)), path

    def _take(self, name: str, process: Forked, path: Path) -> SideAnswer:
        code = process.wait(0) or 0
        process.kill()
        del self._running[name]
        if parse_answer(path) is None:
            return SideAnswer(name, is_lost=True)
        try:
            return SideAnswer(name, read_answer(path, code)["text"])
        except FxmemError as error:
            return SideAnswer(name, error=error)
        except RuntimeError:
            return SideAnswer(name, is_lost=True)


def run_forked(kind: type[_Answer], jobs: Mapping[str, Job[_Answer]]) -> Generator[tuple[str, _Answer], None, None]:
    """Run jobs side by side in forks of this process, as `SideJobs` does; names and records of this kind, as they come.

    For what this process alone has, such as a model that was built here: a cluster could not be given it, and would
    import torch for longer than most such jobs take. What no fork can do runs here.

    Raises:
        What a job raises, once the others have been ended.
    """
    with SideJobs({name: functools.partial(_write, job) for name, job in jobs.items()}) as side:
        for answer in side.wait():
            if answer.error is not None:
                raise answer.error
            yield answer.name, jobs[answer.name]() if answer.is_lost else kind.model_validate_json(answer.text)


def _write(job: Job[Record]) -> str:
    return job().model_dump_json()


def _answer_apart(job: Job[str], path: Path) -> int:
    """Write what a job answers, in a fork; nothing where no backward would run.

    OpenMP would wait for threads that only the process that is forked from has.
    """
    torch.set_num_threads(1)
    if may_run_backward():
        path.write_bytes(format_answer(answer_work(job)))
    return 0


def count_workers(jobs: int, cost: Cost | None = None) -> int:
    """How many processes run so many jobs; 1 where more would not be faster, or would not fit the memory."""
    import joblib

    most: int = min(jobs, joblib.cpu_count())
    if cost is not None and cost.nbytes:
        most = min(most, _available_bytes() // cost.nbytes)
    if most < 2 or (cost is not None and cost.seconds * (jobs - math.ceil(jobs / most)) < _START_S):
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


def _own_bytes() -> int:
    """Memory that this process has; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])  # proc(5): resident
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _available_bytes() -> int:
    """Memory that the machine has left."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        line = next(each for each in lines if each.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024  # proc(5): kB that stand for KiB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**62
