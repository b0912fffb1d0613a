"""A record as a fragment of HTML for notebooks: facts, tables, a plot, and code to open.

No script and nothing loaded from elsewhere. Text takes the colour of the page around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fxmem.records.profile import Record
from fxmem.show.html.page import fill_template
from fxmem.show.palette import LIGHT
from fxmem.show.sections import Section

Code = tuple[str, str, str]
"""What can be pasted, under a title that opens it, and a note on it."""


def fragment(
    *sections: Section, plot: str = "", codes: Sequence[Code] = (), lists: Sequence[tuple[str, Sequence[str]]] = ()
) -> str:
    """What a notebook shows of a record, in this order, escaped.

    Args:
        sections: tables and facts.
        plot: SVG, our own.
        codes: what can be pasted.
        lists: sentences, under titles that open them.
    """
    return fill_template("fragment", sections=sections, plot=plot, codes=codes, lists=lists, palette=LIGHT)


def cell_id(record: Record) -> str:
    """A name for elements of this record: other cells of a notebook are in the same document."""
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()[:10]
