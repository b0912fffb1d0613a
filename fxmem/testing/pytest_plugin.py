"""The pytest plugin: peaks kept in a file beside the tests, so that a change that takes more memory fails.

    def test_memory(fxmem_peak):
        fxmem_peak(build_model, torch.empty(8, 3, 224, 224, device="meta"), target="rtx4090")

`pytest --fxmem-update` writes the peaks to `fxmem-baseline.json` in the test's folder; commit it. From then on the test
fails when the peak is more than the tolerance above, and says what grew. Tests spread over processes by pytest-xdist
write one file, too.

Until a test asks for the fixture nothing is imported but pytest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from fxmem.simulation.code.profiled_step import ProfiledStep

_Measured = dict[str, Any]
"""One peak on its way from the test's process to the one that writes the file, as plain data."""

_MEASURED = pytest.StashKey[list[_Measured]]()
_COLLECTOR = "fxmem-collector"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options and settings."""
    group = parser.getgroup("fxmem", "fxmem: peak memory")
    update = "write the peaks of the tests that run to the baseline instead of comparing them"
    group.addoption("--fxmem-update", action="store_true", help=update)
    tolerance = "how much a peak may grow (default: the setting fxmem_tolerance)"
    group.addoption("--fxmem-tolerance", metavar="1%|64MiB", help=tolerance)
    parser.addini("fxmem_tolerance", "how much a peak may grow: a share of it, or bytes", default="1%")
    where = "file of the peaks, relative to the folder of the test"
    parser.addini("fxmem_baseline", where, default="fxmem-baseline.json")


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the process that sees every report; a worker of pytest-xdist only measures."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config), _COLLECTOR)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a passed test's report carry what it measured: reports travel between processes."""
    report = yield
    if report.when == "call" and report.passed and _MEASURED in item.stash:
        vars(report)["fxmem_peaks"] = item.stash[_MEASURED]
    return report


@pytest.fixture
def fxmem_peak(request: pytest.FixtureRequest) -> PeakCheck:
    """Checks a step's peak against the baseline: `fxmem_peak(model, inputs, name="", budget=None, tolerance=None,
    **options)`."""
    return PeakCheck(request.node)


class PeakCheck:
    """What the fixture `fxmem_peak` gives a test: a function, called once or more."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._seen: set[str] = set()

    def __call__(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module] | ProfiledStep,
        inputs: Any = None,
        *,
        name: str = "",
        budget: int | str | None = None,
        tolerance: int | float | str | None = None,
        **options: Any,
    ) -> ProfiledStep:
        """Fail the test if the peak has grown since it was written to the baseline.

        Args:
            model: as for `fxmem.analyze`; or what was analysed or recorded already, without inputs and options.
            inputs: as for `fxmem.analyze`.
            name: tells the peaks of one test apart.
            budget: the peak must not be above this either, as for `fxmem.testing.assert_peak_below`.
            tolerance: how much it may grow: "1%", "64MiB", 0; default: the option or the setting.
            options: further ones of `fxmem.analyze`.

        Returns:
            The analysis, for further assertions.
        """
        __tracebackhide__ = True
        from fxmem.testing import peak_checks

        config = self._item.config
        path = self._item.path.parent / str(config.getini("fxmem_baseline"))
        key = self._key(path, name)
        before = None if config.getoption("fxmem_update") else peak_checks.load_baseline(path).peaks.get(key)
        if tolerance is None:
            tolerance = config.getoption("fxmem_tolerance") or config.getini("fxmem_tolerance")
        analysis = peak_checks.find_step(model, inputs, options)
        if budget is not None:
            peak_checks.assert_peak_below(analysis, budget=budget)
        now = peak_checks.make_baseline(analysis)
        if before is not None:
            if found := peak_checks.growth(before, analysis, peak_checks.allowed_growth(tolerance, before)):
                advice = f"If that is meant: pytest --fxmem-update, and commit {_short_path(config, path)}"
                pytest.fail(f"{key}: {found}\n  {advice}", pytrace=False)
        elif not config.getoption("fxmem_update"):
            advice = "run pytest --fxmem-update once, look at the file and commit it"
            pytest.fail(f"{key} has no peak in {_short_path(config, path)}: {advice}", pytrace=False)
        was = None if before is None else before.counted_bytes
        measured = {"path": str(path), "key": key, "peak": now.model_dump(mode="json"), "was": was}
        self._item.stash.setdefault(_MEASURED, []).append({**measured, "is": now.counted_bytes})
        return analysis

    def _key(self, path: Path, name: str) -> str:
        """The test's id, with its file relative to the baseline's folder. So it does not depend on where pytest is
        started."""
        __tracebackhide__ = True
        if name in self._seen:
            what = f"a second one {f'named {name!r}' if name else 'without a name'}: fxmem_peak(..., name='...')"
            pytest.fail(f"expected each peak of a test to have a name of its own, got {what}", pytrace=False)
        self._seen.add(name)
        file = Path(os.path.relpath(self._item.path, path.parent)).as_posix()
        return f"{file}::{self._item.nodeid.partition('::')[2]}{f'#{name}' if name else ''}"


class _Collector:
    """Gathers what tests measured, writes the baseline, and says what fell."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._measured: list[_Measured] = []
        self._written: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured += getattr(report, "fxmem_peaks", [])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._config.getoption("fxmem_update") or not self._measured:
            return
        from fxmem.errors import UsageError

        try:
            self._written += self._write()
        except UsageError as error:
            self._written.append(str(error))
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = list(self._written)
        for each in self._measured:
            if each["was"] is not None and each["is"] < each["was"]:
                fell = f"the peak fell from {each['was']:,} to {each['is']:,} bytes"
                lines.append(f"{each['key']}: {fell}; --fxmem-update holds it there")
        if lines:
            terminalreporter.section("fxmem")
        for line in lines:
            terminalreporter.line(line)

    def _write(self) -> Iterator[str]:
        from fxmem.records.files import write_text
        from fxmem.testing import peak_checks

        for path in sorted({each["path"] for each in self._measured}):
            new = {each["key"]: each["peak"] for each in self._measured if each["path"] == path}
            old = peak_checks.load_baseline(Path(path))
            peaks = dict(sorted({**old.model_dump()["peaks"], **new}.items()))
            write_text(Path(path), type(old).model_validate({"peaks": peaks}).model_dump_json(indent=1) + "\n")
            yield f"wrote {len(new)} of {len(peaks)} peaks to {_short_path(self._config, Path(path))}"


def _short_path(config: pytest.Config, path: Path) -> str:
    return Path(os.path.relpath(path, config.invocation_params.dir)).as_posix()
