"""`ProfiledStep`: a profile and all that can be shown and written of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxmem.errors import UsageError
from fxmem.hardware import step_time
from fxmem.memory import allocator
from fxmem.memory.budget import Budget, MemoryFit, peak_in_room
from fxmem.memory.findings import Finding, find
from fxmem.records.files import write_text
from fxmem.records.profile import Peak, Profile, Report, StepTime, Target, Timeline

if TYPE_CHECKING:
    import networkx  # type: ignore[import-untyped]


class ProfiledStep:
    """The memory of a step, and its reasons, as plain data.

    It prints as a table in a terminal and in a notebook; what prints it is imported only then.
    """

    profile: Profile
    """The step: nodes, ops and storages."""
    is_fixed = True
    """Whether it is what it is: nothing can be run again with something changed."""
    environ: Mapping[str, str] = os.environ
    """Contains the allocator's settings."""

    def vary(self, **changes: Any) -> ProfiledStep:
        """The step with something changed, analysed or run again.

        Raises:
            UsageError: what there is of it is a record.
        """
        raise UsageError(f"expected a model or a program to change {', '.join(changes)} of, got the record of a step")

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Bytes alive at every moment, by kind; for a CUDA target also what the caching allocator makes of it."""
        return allocator.complete_timeline(self.profile, self.environ)

    @property
    def peak(self) -> Peak:
        """The moment with the most bytes alive."""
        return self.timeline.peak

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is probably not meant, first what grows, then what holds most at the peak; found once."""
        return find(self.profile, self.timeline)

    def estimate_time(self, card: Target | None = None, *, taped: bool = False) -> StepTime | None:
        """The estimated time, on another card if one is given; None where its rates are not known.

        It is `taped` where a plan of operators is carried out by the tape.
        """
        profile = self.profile if card is None else self.profile.at(card)
        return step_time.estimate(profile, taped=taped)

    def within(self, room: int, card: Target | None = None) -> MemoryFit:
        """Whether it runs where the allocator has so many bytes; of another card like it, if one is given."""
        profile = self.profile if card is None else self.profile.at(card)
        return MemoryFit(peak_in_room(profile, self.peak, room, self.environ))

    def keeps(self, budget: Budget) -> bool:
        """Whether it stays within a budget."""
        if self.peak.counted_bytes > budget.nbytes:
            return False
        return not budget.bounds_allocator or bool(self.within(budget.nbytes).peak.fits)

    def replay(self, environ: Mapping[str, str], profile: Profile | None = None) -> ProfiledStep:
        """The same step with other settings of the allocator, and with this profile if one is given."""
        return ReallocatedStep(self.profile if profile is None else profile, environ)

    def report(self, *, explains: bool = True) -> Report:
        """The profile, its peak and its time, as `fxmem analyze --json` writes them.

        Args:
            explains: whether what is found in it is looked for, which may replay the allocator several times.
        """
        profile, time = dict(self.profile), self.estimate_time()
        return Report.model_construct(**profile, peak=self.peak, time=time, findings=self.findings if explains else ())

    def to_json(self, path: str | os.PathLike[str] | None = None, *, indent: int | None = None) -> str:
        """The report as JSON; also written to `path` if given (whole or not at all)."""
        text = self.report().model_dump_json(indent=indent)
        if path is not None:
            write_text(Path(path), text + "\n")
        return text

    def save_svg(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write the annotated graph as SVG (whole or not at all); options as in `fxmem.show.graph.DrawingOptions`."""
        from fxmem.show.graph import DrawingOptions, render

        write_text(Path(path), render(self.profile, self.timeline, DrawingOptions(**options)).svg)

    def save_html(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write the report as one page (whole or not at all); options as in `fxmem.show.html.PageOptions`."""
        from fxmem.show.html import PageOptions, report_html

        page = PageOptions(**{"settings": allocator.read_settings(self.environ), **options})
        write_text(Path(path), report_html(self.profile, self.timeline, page))

    def export(self, path: str | os.PathLike[str], *, to: str) -> None:
        """Write the step for another tool (whole or not at all); `to` is a name of `fxmem.show.export.EXPORTERS`."""
        from fxmem.show import export as exporting

        exporting.save(self.profile, self.timeline, Path(path), to, settings=allocator.read_settings(self.environ))

    def to_networkx(self) -> networkx.DiGraph:
        """The step as a graph for algorithms of your own; see `fxmem.memory.graph.to_networkx`."""
        from fxmem.memory.graph import to_networkx

        return to_networkx(self.profile, self.timeline)

    def table(self, *, width: int = 100, depth: int | None = None, color: bool = False) -> str:
        """The report as a table for people, no line wider than `width` characters."""
        from fxmem.show import text as reporting

        return reporting.table(self.profile, self.timeline, width=width, depth=depth, color=color)

    def __str__(self) -> str:
        from fxmem.show import text as reporting
        from fxmem.show.terminal import columns

        return reporting.overview(self.profile, self.timeline, width=columns())

    def __repr__(self) -> str:
        peak = self.peak
        return (
            f"<fxmem.{type(self).__name__} of {self.profile.model} for {self.profile.target.name}: peak "
            f"{peak.requested_bytes:,} bytes in {peak.phase.value}>"
        )

    def _repr_html_(self) -> str:
        from fxmem.show.html import notebook_html

        return notebook_html(self.profile, self.timeline)


class ReallocatedStep(ProfiledStep):
    """A step on a card whose allocator has settings of its own."""

    def __init__(self, profile: Profile, environ: Mapping[str, str]) -> None:
        self.profile, self.environ = profile, environ


class ReportedStep(ProfiledStep):
    """A step as its report has it."""

    profile: Report

    def __init__(self, report: Report) -> None:
        self.profile = report

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Bytes alive at every moment; the peak is the report's."""
        from fxmem.memory import report_reader  # with the records of plans, which no analysis needs

        return report_reader.timeline(self.profile)

    def report(self, *, explains: bool = True) -> Report:
        """The report itself."""
        return self.profile
