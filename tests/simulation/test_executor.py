"""Jobs in forks beside this process: their answers, their errors, and what becomes of those that are lost."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

from fxmem.errors import UsageError
from fxmem.records.profile import Record
from fxmem.simulation.processes import executor
from fxmem.simulation.processes.descendants import find_children
from fxmem.simulation.processes.executor import SideAnswer, SideJobs, run_forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(executor, "count_workers", lambda jobs, cost: min(jobs, count))


def process() -> str:
    return str(os.getpid())


def refuse() -> NoReturn:
    raise UsageError("expected another optimizer")


def end() -> NoReturn:
    os._exit(9)


def fail() -> NoReturn:
    sys.stderr = io.StringIO()  # its traceback is not this test's
    raise ZeroDivisionError


def test_jobs_run_in_forks_and_begin_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    begun: list[str] = []
    with SideJobs({"first": process, "second": process}, begun.append) as jobs:
        assert begun == ["first"], "one core is this process's own"
        assert jobs.left == ("first", "second")
        found = {each.name: each for each in jobs.wait()}
        assert jobs.left == ()
    assert begun == ["first", "second"]
    processes = {each.text for each in found.values()}
    assert len(processes) == 2
    assert process() not in processes


def test_what_a_job_raises_is_its_answer_and_what_ends_a_fork_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 4)
    jobs: dict[str, Callable[[], str]] = {"refused": refuse, "ended": end, "failed": fail}
    with SideJobs(jobs) as running:
        found = {each.name: each for each in running.wait()}
    assert isinstance(found["refused"].error, UsageError)
    assert str(found["refused"].error) == "expected another optimizer"
    assert found["ended"] == SideAnswer("ended", is_lost=True)
    assert found["failed"] == SideAnswer("failed", is_lost=True)


class Word(Record):
    """What a job answers."""

    text: str


def test_forked_jobs_answer_by_name_and_what_a_fork_loses_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    here = process()
    jobs: dict[str, Callable[[], Word]] = {
        "slow": lambda: Word(text=str(time.sleep(0.3))),
        "quick": lambda: Word(text="quick"),
        "lost": lambda: Word(text=here if process() == here else end()),
    }
    found = {name: each.text for name, each in run_forked(Word, jobs)}
    assert found == {"slow": "None", "quick": "quick", "lost": here}
    assert [*run_forked(Word, {})] == []
    long: dict[str, Callable[[], Word]] = {
        "refused": lambda: Word(text=refuse()),
        "long": lambda: Word(text=str(time.sleep(1000))),
    }
    before = {*find_children()}  # what asks cuDNN may be there
    with pytest.raises(UsageError, match="another optimizer"):
        next(run_forked(Word, long))
    assert {*find_children()} <= before


def test_on_one_core_and_where_no_backward_runs_in_a_fork_jobs_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    cores(monkeypatch, 1)
    with SideJobs({"only": process}, begun.append) as jobs:
        assert [*jobs.finished()] == []
        assert [*jobs.wait()] == [SideAnswer("only", is_lost=True)]
    assert begun == []
    cores(monkeypatch, 2)
    monkeypatch.setattr(executor, "may_run_backward", lambda: False)
    with SideJobs({"only": process}) as jobs:
        assert [*jobs.wait()] == [SideAnswer("only", is_lost=True)]


def fill() -> str:
    signal.alarm(30)  # a fork that waits for ever is ended, and its job lost
    return str(int(torch.ones(1 << 22).sum()))


def test_large_tensors_are_filled_in_a_fork_of_a_process_whose_threads_did(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.ones(1 << 22).sum() == 1 << 22
        with SideJobs({"fill": fill}) as jobs:
            assert [*jobs.wait()] == [SideAnswer("fill", "4194304")]
    finally:
        torch.set_num_threads(before)


def test_leaving_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    before = {*find_children()}
    with SideJobs({"long": lambda: str(time.sleep(1000))}) as jobs:
        assert [*jobs.finished()] == []
        assert len({*find_children()} - before) == 1
    assert {*find_children()} <= before
