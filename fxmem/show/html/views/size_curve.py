"""The largest size that fits, and the curve of peak against size."""

from __future__ import annotations

from fxmem.records.registry import VIEWS
from fxmem.records.sizes import SizeCurve
from fxmem.show.facts import header_facts
from fxmem.show.html.page import cell_id, fragment
from fxmem.show.plots import sizes_svg
from fxmem.show.sections import Section
from fxmem.show.text.sizes import curve_sections


def view(curve: SizeCurve) -> str:
    """Show the largest size that fits."""
    plot = sizes_svg(curve, name=f"fxmem-sizes-{cell_id(curve)}")
    answer, head, *rest = curve_sections(curve)
    own = [fact for fact in head.facts if not fact.key]
    return fragment(answer, Section(facts=[*header_facts(curve), *own]), *rest, plot=plot)


VIEWS.register("size-curve", view)
