"""The cards that a step fits."""

from __future__ import annotations

from fxmem.records.registry import VIEWS
from fxmem.records.sizes import CardFits
from fxmem.show.html.page import fragment
from fxmem.show.text.sizes import card_sections


def view(fits: CardFits) -> str:
    """Show which cards a step fits."""
    return fragment(*card_sections(fits))


VIEWS.register("card-fits", view)
