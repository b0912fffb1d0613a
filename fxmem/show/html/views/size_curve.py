"""The largest size that fits, and the curve of peak against size."""

from __future__ import annotations

from fxmem.records.registry import VIEWS
from fxmem.records.sizes import SizeCurve
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.facts import header_facts
from fxmem.show.html.fragment import Fragment, cell_id, make_table
from fxmem.show.html.tables import PageColumn
from fxmem.show.plots import sizes_svg
from fxmem.show.sections import Fact

_COLUMNS = (
    PageColumn("Size", is_number=True),
    PageColumn("Allocated", is_number=True),
    PageColumn("Reserved", is_number=True),
    PageColumn("Fits"),
)


def view(curve: SizeCurve) -> str:
    """Show the largest size that fits."""
    largest = curve.at_largest
    used = "" if largest is None or largest.counted_bytes is None else f", {exact_bytes(largest.counted_bytes)}"
    rows = [
        *header_facts(curve),
        Fact("Varies", f"{curve.dim}: {', '.join(curve.resized)}" if curve.resized else curve.dim),
        Fact(
            "Memory", f"{exact_bytes(curve.memory_bytes)}, {'the budget' if curve.is_budget else 'all of the target'}"
        ),
        Fact("Largest", "none that was tried fits" if curve.largest is None else f"{curve.largest:,}{used}"),
    ]
    if curve.next_above is not None:
        rows.append(Fact("Above", f"{curve.next_above.size:,} does not fit. {curve.next_above.obstacle}"))
    points = [
        [
            f"{point.size:,}",
            format_bytes(point.counted_bytes),
            format_bytes(point.reserved_bytes),
            "yes" if point.fits else "no",
        ]
        for point in curve.points
    ]
    plot = sizes_svg(curve, name=f"fxmem-sizes-{cell_id(curve)}")
    return Fragment(rows, [make_table("Sizes that were analysed", _COLUMNS, points)], plot).html()


VIEWS.register("size-curve", view)
