"""The peak in every count, and by kind."""

from __future__ import annotations

from fxmem.records.profile import Peak
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.facts import peak_counts, share_table
from fxmem.show.html.page import fragment
from fxmem.show.sections import Fact, Section


def view(peak: Peak) -> str:
    """Show a peak."""
    rows = [Fact("Requested", f"{exact_bytes(peak.requested_bytes)} at once, in {peak.phase}")]
    for label, nbytes, _, _, low in peak_counts(peak)[1:]:
        size = "not modelled" if nbytes is None else exact_bytes(nbytes)
        rows.append(Fact(label, size if low is None else f"{format_bytes(low)} to {format_bytes(nbytes)}"))
    rows.append(Fact("Fits", {True: "yes", False: f"no: {peak.shortage}", None: "not known"}[peak.fits]))
    rows += [Fact("Node", peak.node)] if peak.node else []
    return fragment(Section(facts=rows), Section(share_table(peak)))
