"""The points that a step fits: sizes and grids with their plot, cards, meshes."""

from __future__ import annotations

from fxmem.records.fits import Fits
from fxmem.show.facts import header_facts
from fxmem.show.html.page import cell_id, fragment
from fxmem.show.plots import sizes_svg, sweep_svg
from fxmem.show.sections import Section
from fxmem.show.text.fits import fits_sections


def view(fits: Fits) -> str:
    """Show what fits."""
    draw = {"largest": sizes_svg, "grid": sweep_svg}.get(fits.space.question)
    plot = "" if draw is None else draw(fits, name=f"fxmem-fits-{cell_id(fits)}")
    answer, head, *rest = fits_sections(fits)
    own = [fact for fact in head.facts if not fact.key]
    return fragment(answer, Section(facts=[*header_facts(fits), *own]), *rest, plot=plot)
