"""The cards that a step fits."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.records.registry import VIEWS
from fxmem.records.sizes import CardFit, CardFits
from fxmem.records.units import format_bytes, format_seconds
from fxmem.show.facts import describe_inputs
from fxmem.show.html.fragment import Fragment, make_table
from fxmem.show.html.tables import PageColumn
from fxmem.show.sections import Fact
from fxmem.show.text.sizes import TIGHT, describe_fit, describe_step

_COLUMNS = (
    PageColumn("Card", is_head=True),
    *(PageColumn(each, is_number=True) for each in ("Memory", "Allocated", "Reserved", "Headroom", "Time")),
    PageColumn("Fits"),
)


def view(fits: CardFits) -> str:
    """Show which cards a step fits."""
    rows = [
        Fact("Model", fits.model),
        Fact("Inputs", describe_inputs(fits.inputs)),
        Fact("Step", describe_step(fits.step)),
        Fact("Cards", f"{len(fits.fitting)} of {len(fits.cards)} fit"),
    ]
    verdicts = [describe_fit(card) for card in fits.cards]
    if "tight" in verdicts:
        rows.append(Fact("tight", TIGHT))
    return Fragment(rows, [make_table("Cards", _COLUMNS, [[*_cells(card)] for card in fits.cards])]).html()


def _cells(card: CardFit) -> Iterator[str]:
    yield card.target.name
    yield format_bytes(card.target.memory_bytes)
    yield format_bytes(card.requested_bytes if card.allocated_bytes is None else card.allocated_bytes)
    yield format_bytes(card.reserved_bytes)
    yield format_bytes(card.headroom_bytes)
    yield "unknown" if card.time is None else format_seconds(card.time.seconds)
    yield describe_fit(card)


VIEWS.register("card-fits", view)
