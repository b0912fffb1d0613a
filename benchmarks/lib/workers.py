"""Long-lived worker processes that can be killed.

Each imports what it needs once and runs job after job; it is replaced when a job takes too long or brings it down.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

__all__ = ["Lost", "run_jobs"]

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lost:
    """What became of a job whose worker did not live to answer."""

    reason: str


class _Worker(Generic[Job, Result]):
    """A process that answers each job sent to it with one result."""

    def __init__(self, prepare: Callable[[], None], work: Callable[[Job], Result], limit_s: float) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork of a process that has threads, as torch starts them, may hang
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, prepare, work), daemon=True)
        self.process.start()
        there.close()
        self.limit_s = limit_s
        self.ready = False
        self.job: Job | None = None
        self.deadline = float("inf")
        self.jobs_done = 0

    def send(self, job: Job) -> None:
        self.job, self.deadline = job, time.monotonic() + self.limit_s
        self.pipe.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, prepare: Callable[[], None], work: Callable[[Any], Any]) -> None:
    prepare()
    pipe.send(None)  # ready
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(work(job))


def run_jobs(
    jobs: Iterable[Job],
    work: Callable[[Job], Result],
    *,
    prepare: Callable[[], None],
    workers: int,
    limit_s: float,
    jobs_per_worker: int,
) -> Iterator[tuple[Job, Result | Lost]]:
    """Each job with its result, as they come in.

    Args:
        jobs: picklable.
        work: run in a worker for each job; a function that a fresh process can import.
        prepare: run once in each worker; its time counts for no job.
        workers: processes side by side.
        limit_s: seconds a job may take; then its worker is killed.
        jobs_per_worker: after so many a worker is replaced, and the memory it has gathered goes with it.
    """
    waiting = deque(jobs)
    crew: list[_Worker[Job, Result]] = []
    try:
        while waiting or any(worker.job is not None for worker in crew):
            while len(crew) < min(workers, len(waiting) + sum(worker.job is not None for worker in crew)):
                crew.append(_Worker(prepare, work, limit_s))
            for worker in crew:
                if worker.ready and worker.job is None and waiting:
                    worker.send(waiting.popleft())
            wait([worker.pipe for worker in crew], timeout=_patience(crew))
            for worker in list(crew):
                result = _hear(worker)
                if isinstance(result, _Nothing):
                    continue
                if worker.job is not None:
                    yield worker.job, result
                elif isinstance(result, Lost):
                    raise RuntimeError(f"a worker died before its first job: {result.reason}")
                worker.job, worker.deadline = None, float("inf")
                if isinstance(result, Lost) or worker.jobs_done >= jobs_per_worker:
                    worker.end()
                    crew.remove(worker)
    finally:
        for worker in crew:
            worker.end()


class _Nothing:
    """No news from a worker."""


def _patience(crew: list[_Worker[Job, Result]]) -> float | None:
    """Seconds until the first deadline; None without one."""
    first = min(worker.deadline for worker in crew)
    return None if first == float("inf") else max(0.0, first - time.monotonic())


def _hear(worker: _Worker[Job, Result]) -> Result | Lost | _Nothing:
    if worker.pipe.poll():
        try:
            answer = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            return Lost(f"its process ended with exit code {worker.process.exitcode}")
        if not worker.ready:
            worker.ready = True
            return _Nothing()
        worker.jobs_done += 1
        return answer
    if time.monotonic() > worker.deadline:
        return Lost(f"it took longer than {worker.limit_s:g} s")
    return _Nothing()
