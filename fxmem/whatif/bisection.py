"""The commit with which a command's peak changed: each that is asked is checked out apart and predicted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fxmem.errors import AnalysisError, UsageError
from fxmem.memory.report_reader import load_report, timeline
from fxmem.records.comparison import Commit
from fxmem.records.profile import Report
from fxmem.records.units import format_bytes

VERBS: Final = ("run", "analyze", "generate")
"""What a command may begin with: they write a report of one step."""
_LEFT_BEHIND: Final = (".git", ".venv", "venv", "__pycache__")
"""What no git knows and no commit needs."""
_SHOWN: Final = 3
"""Lines of an error that are shown of a command that failed."""


class Bisected(NamedTuple):
    """Two commits, one after the other, between which the peak changes."""

    before: Report
    after: Report
    commit: Commit


def bisect(command: str, good: str, bad: str, tell: Callable[[str], None] = lambda _: None) -> Bisected:
    """Find the commit after `good`, up to `bad`, with which the peak of a command changes.

    Commits are those of the first parents; the peak of each that is asked counts as the one of the two that is nearer.
    The repository that this process is in stays as it is: a clone that shares its objects is checked out, with links to
    the files that git does not know. One at which the command fails is passed over.

    Args:
        command: what follows `fxmem`, `run --target rtx4090 train.py`.
        tell: is told what is being done.

    Raises:
        UsageError: no repository, no such commits, no such command.
        AnalysisError: the command fails at one of the two, or the peaks of both are equal.
    """
    words = _read_command(command)
    top = _git("rev-parse", "--show-toplevel")
    first, last = (_git("rev-parse", "--verify", "--quiet", f"{each}^{{commit}}", of=each) for each in (good, bad))
    if subprocess.run(["git", "merge-base", "--is-ancestor", first, last], check=False).returncode:
        raise UsageError(f"expected {good} to be an ancestor of {bad}: the first is the one whose peak is right")
    commits = [first, *_git("rev-list", "--reverse", "--first-parent", f"{first}..{last}").split()]
    with tempfile.TemporaryDirectory(prefix="fxmem-bisect-", ignore_cleanup_errors=True) as name:
        folder = Path(name, Path(top).name)
        _git("clone", "--quiet", "--shared", "--no-checkout", top, str(folder))
        asked = _Asked(words, commits, folder, Path(top), tell)
        begin, end = asked.require(0, good), asked.require(len(commits) - 1, bad)
        peaks = _peak(begin), _peak(end)
        if peaks[0] == peaks[1]:
            raise AnalysisError(f"the peak is {format_bytes(peaks[0])} at {good} and at {bad}: no commit changed it")
        low, high = 0, len(commits) - 1
        while True:
            between = sorted(range(low + 1, high), key=lambda each: abs(2 * each - low - high))
            at = next((each for each in between if asked.report(each) is not None), None)
            if at is None:
                break
            found = asked.require(at, commits[at])
            is_bad = abs(_peak(found) - peaks[1]) < abs(_peak(found) - peaks[0])
            low, high, begin, end = (low, at, begin, found) if is_bad else (at, high, found, end)
    subject = _git("show", "--no-patch", "--format=%s", commits[high])
    commit = Commit(name=commits[high], subject=subject, asked=len(asked.reports), passed_over=high - low - 1)
    return Bisected(begin, end, commit)


def _peak(report: Report) -> int:
    return timeline(report).peak.counted_bytes


def _read_command(command: str) -> list[str]:
    words = shlex.split(command)
    words = words[1:] if words[:1] == ["fxmem"] else words
    if not words or words[0] not in VERBS or any(each.startswith("--json") for each in words):
        raise UsageError(
            f"expected --bisect 'run --target rtx4090 train.py': {', '.join(VERBS)} and its words, without --json; "
            f"got {command!r}"
        )
    return words


def _git(*words: str, of: str = "") -> str:
    """What git answers in this folder. Raises UsageError where it has none."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError("expected git, which finds the commits, on PATH") from error
    if done.returncode:
        what = f"a commit, got {of!r}" if of else "a folder of a git repository"
        raise UsageError(f"expected {what}: {done.stderr.strip() or 'git knows none of that name'}")
    return done.stdout.strip()


class _Asked:
    """The reports of commits that were asked; None where the command failed."""

    def __init__(
        self, words: Sequence[str], commits: Sequence[str], folder: Path, top: Path, tell: Callable[[str], None]
    ) -> None:
        self._words, self._commits, self._folder, self._top, self._tell = words, commits, folder, top, tell
        self._prefix = _git("rev-parse", "--show-prefix")
        self._others = _git("-C", str(top), "ls-files", "--others", "--directory", "-z")
        self._links: list[Path] = []
        self.reports: dict[int, Report | None] = {}
        self.error = ""

    def report(self, at: int) -> Report | None:
        """The report of a commit."""
        if at not in self.reports:
            self._tell(f"asking {self._commits[at][:10]}, one of {len(self._commits)} commits")
            self._check_out(self._commits[at])
            self.reports[at] = self._run()
        return self.reports[at]

    def require(self, at: int, name: str) -> Report:
        """The report of a commit that is called so. Raises AnalysisError where the command fails there."""
        found = self.report(at)
        if found is None:
            raise AnalysisError(f"the command fails at {name}: {self.error}")
        return found

    def _check_out(self, commit: str) -> None:
        for link in self._links:
            link.unlink(missing_ok=True)
        _git("-C", str(self._folder), "checkout", "--quiet", "--force", "--detach", commit)
        places = [self._folder / each.rstrip("/") for each in self._others.split("\0") if each]
        free = [each for each in places if each.parent.is_dir() and not os.path.lexists(each)]
        self._links = [each for each in free if each.name not in _LEFT_BEHIND]
        for link in self._links:
            link.symlink_to(self._top / link.relative_to(self._folder))

    def _run(self) -> Report | None:
        verb, *rest = self._words
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "report.json")
            paths = [str(self._folder), str(self._folder / "src"), os.environ.get("PYTHONPATH", "")]
            done = subprocess.run(
                [sys.executable, "-m", "fxmem", verb, "--quiet", "--json", str(file), *rest],
                cwd=self._folder / self._prefix if (self._folder / self._prefix).is_dir() else self._folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if file.exists() and done.returncode in (0, 4):
                file.write_text(file.read_text("utf-8").replace(f"{self._folder}{os.sep}", ""), "utf-8")
                return load_report(file)
        self.error = " ".join(done.stderr.splitlines()[-_SHOWN:])
        return None
