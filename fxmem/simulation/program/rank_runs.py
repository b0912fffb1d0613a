"""The ranks of a program: each runs in a process of its own, as frameworks keep their groups in module globals."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from fxmem.errors import FxmemError
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Report
from fxmem.simulation.code.profiled_step import ReportedStep
from fxmem.simulation.processes.executor import Cost, current_backend, largest_child_bytes, run_jobs
from fxmem.simulation.processes.sandbox.isolation import Isolation, IsolationSettings
from fxmem.simulation.processes.sandbox.process import run_apart, run_within
from fxmem.simulation.program.launchers import Launch
from fxmem.simulation.program.watch import RunSettings
from fxmem.simulation.ranks.classes import find_classes, with_classes
from fxmem.simulation.ranks.mailbox import Mailbox, MissingMail


@dataclasses.dataclass(frozen=True)
class RankAnswer:
    """What came of a rank's run."""

    report: str = ""
    """As JSON; empty where the run was for what the rank sends alone, or waits for another."""
    raised: bool = False
    """Whether the program ended with an error of its own."""


RunRank = Callable[[Launch, RunSettings, Mailbox, Isolation], RankAnswer]
"""Runs a program as one rank in this process; raises MissingMail where it waits for objects of another."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What came of a rank's process."""

    answer: RankAnswer
    sent: Mapping[int, Sequence[bytes]]
    """What it has sent, by rank."""
    missing: tuple[int, int] | None = None
    """The rank whose objects it waits for, which is to run first, and how many of them it needs."""


@dataclasses.dataclass(frozen=True)
class _Job:
    """A rank's run in a process of its own, which other processes may carry out.

    Its output is shown where it is of the first rank, and else where it fails. The first alone writes and sends for
    real, where that is asked for.
    """

    program: Launch
    settings: RunSettings
    run: RunRank
    mailbox: Mailbox
    isolation: Isolation | None
    """That of the process; None where it is to be apart by itself."""
    is_first: bool
    folder: str = dataclasses.field(default_factory=os.getcwd)
    environment: Mapping[str, str] | None = None
    """Of the process; None for its own."""

    def __call__(self) -> _Outcome:
        """Run it. What the run raises passes through."""
        if self.is_first and self.isolation is not None:
            return _read(run_within(self._answer, self.isolation))
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "output")
            try:
                if self.isolation is not None:
                    found = _read(run_within(self._answer, self.isolation, output))
                else:
                    found = _read(run_apart(self._answer, IsolationSettings(), [self.folder], output).text)
            except FxmemError:
                _show(output)
                raise
            if found.answer.raised:
                _show(output)
        return found

    def _answer(self, isolation: Isolation) -> str:
        """What the process answers, as JSON."""
        answer, missing = RankAnswer(), None
        os.chdir(self.folder)
        if self.environment is not None:
            os.environ.clear()
            os.environ.update(self.environment)
        try:
            answer = self.run(self.program, self.settings, self.mailbox, isolation)
        except MissingMail as waiting:
            missing = waiting.source, waiting.number
        assert self.program.rank is not None
        sent = self.mailbox.sent_by(self.program.rank)
        letters = {str(to): [base64.b64encode(each).decode() for each in found] for to, found in sent.items()}
        return json.dumps({"answer": dataclasses.astuple(answer), "sent": letters, "missing": missing})


def _read(text: str) -> _Outcome:
    found = json.loads(text)
    sent = {int(to): [base64.b64decode(each) for each in letters] for to, letters in found["sent"].items()}
    return _Outcome(RankAnswer(*found["answer"]), sent, found["missing"] and tuple(found["missing"]))


def _show(output: Path) -> None:
    """Write what a rank printed to standard error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(output.read_text(encoding="utf-8", errors="replace"))


_MOST_PARTS: Final = 2
"""Runs of one rank for a letter each; stages of a pipeline send one or two before their first step."""


class _RankFailedError(Exception):
    """A rank's program raised: there are no classes."""

    def __init__(self, report: str) -> None:
        super().__init__()
        self.report = report


def report_ranks(program: Launch, settings: RunSettings, run: RunRank, writes: bool, isolation: Isolation) -> str:
    """Run a program as its ranks; the report of the one that was asked for, or of the largest class, as JSON.

    Where a rank waits for objects of another, the program runs as that one first, as far as it sends them.

    Args:
        program: what is run, with ranks.
        settings: how long, and how.
        run: runs it as one rank, in the process that it is called in.
        writes: whether the program writes its files for real, which the first rank alone does.
        isolation: of this process.

    Raises:
        AnalysisError: ranks wait for each other; or as a rank raises it.
    """
    assert program.ranks is not None
    ranks = _Ranks(program, settings, run, isolation, writes=writes)
    if program.rank is not None:
        return ranks.run_one(program.rank).report
    try:
        found = find_classes(program.ranks, ranks.analyse)
    except _RankFailedError as failed:
        return failed.report
    profile = with_classes(found.largest.profile, found.records)
    assert isinstance(profile, Report)
    return profile.model_dump_json()


class _Ranks:
    """The runs of a program's ranks."""

    def __init__(
        self, program: Launch, settings: RunSettings, run: RunRank, isolation: Isolation, *, writes: bool
    ) -> None:
        self._program, self._settings, self._run = program, settings, run
        self._isolation, self._writes = isolation, writes
        self._first = program.rank or 0
        self._mailbox = Mailbox()
        self._cost: Cost | None = None
        """Of the first rank; None before it has run."""

    def analyse(self, ranks: Sequence[int]) -> Iterator[ReportedStep]:
        """The steps of ranks, which run side by side once the first has run: it may write what others read."""
        if self._cost is None:
            begin = time.monotonic()
            reports = {rank: self._check(self.run_one(rank)) for rank in ranks}
            self._cost = Cost((time.monotonic() - begin) / len(ranks), largest_child_bytes())
        else:
            reports = self._run_all(ranks)
        for rank in ranks:
            with pause_gc():
                step = ReportedStep(Report.model_validate_json(reports.pop(rank)))
            yield step

    def run_one(self, rank: int, settings: RunSettings | None = None) -> RankAnswer:
        """Run one rank, after those whose objects it waits for."""
        while True:
            outcome = self._make_job(rank, settings or self._settings)()
            self._mailbox.adopt(rank, outcome.sent)
            if outcome.missing is None:
                return outcome.answer
            self._send_first(*outcome.missing, rank)

    def _run_all(self, ranks: Sequence[int]) -> dict[int, str]:
        """The reports of ranks, as JSON."""
        reports: dict[int, str] = {}
        waiting = list(ranks)
        with self._settings.watch(lambda: f"{1 + len(reports)} of {1 + len(ranks)} ranks have run"):
            while waiting:
                jobs = [self._make_job(rank, self._settings) for rank in waiting]
                missing: dict[int, tuple[int, int]] = {}
                for rank, outcome in zip(waiting, run_jobs(jobs, self._cost), strict=True):
                    self._mailbox.adopt(rank, outcome.sent)
                    if outcome.missing is not None:
                        missing[rank] = outcome.missing
                    else:
                        reports[rank] = self._check(outcome.answer)
                for rank, (source, number) in missing.items():
                    self._send_first(source, number, rank)
                waiting = list(missing)
        return reports

    def _send_first(self, source: int, number: int, destination: int) -> None:
        """Run a rank as far as it sends what another waits for, unless that is there by now.

        One that sends again and again runs as long as any.
        """
        goes_on = number > _MOST_PARTS
        if not self._mailbox.has(source, destination, number):
            with self._mailbox.awaiting(source, destination, number, goes_on=goes_on):
                self.run_one(source, self._settings if goes_on else dataclasses.replace(self._settings, until="end"))

    def _check(self, answer: RankAnswer) -> str:
        if answer.raised:
            raise _RankFailedError(answer.report)
        return answer.report

    def _make_job(self, rank: int, settings: RunSettings) -> _Job:
        program, backend = dataclasses.replace(self._program, rank=rank), current_backend()
        isolation: Isolation | None = self._isolation
        is_first = rank == self._first and not self._mailbox.is_awaited
        if not is_first:
            settings = dataclasses.replace(settings, watch=contextlib.nullcontext)
            isolation = self._isolation.unsent() if backend.is_here and not self._writes else None
        environment = dict(os.environ) if backend.is_here else None
        return _Job(program, settings, self._run, self._mailbox, isolation, is_first, environment=environment)
