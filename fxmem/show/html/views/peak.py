"""The peak in every count, and by kind."""

from __future__ import annotations

from fxmem.records.profile import Peak
from fxmem.records.registry import VIEWS
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.html.fragment import Fragment
from fxmem.show.html.tables import share_table
from fxmem.show.sections import Fact, Section


def view(peak: Peak) -> str:
    """Show a peak."""
    process = peak.process_bytes
    rows = [
        Fact("Requested", f"{exact_bytes(peak.requested_bytes)} at once, in {peak.phase}"),
        Fact("Allocated", "not modelled" if peak.allocated_bytes is None else exact_bytes(peak.allocated_bytes)),
        Fact("Reserved", "not modelled" if peak.reserved_bytes is None else exact_bytes(peak.reserved_bytes)),
        Fact(
            "Process",
            "not modelled" if process is None else f"{format_bytes(process.low)} to {format_bytes(process.high)}",
        ),
        Fact("Fits", {True: "yes", False: f"no: {peak.shortage}", None: "not known"}[peak.fits]),
        *([Fact("Node", peak.node)] if peak.node else []),
    ]
    return Fragment([Section(facts=rows), Section(share_table(peak))]).html()


VIEWS.register("peak", view)
