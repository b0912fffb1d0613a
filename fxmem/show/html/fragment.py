"""A record as a fragment of HTML for notebooks: facts, tables, a plot, and code to open.

No script and nothing loaded from elsewhere. Text takes the colour of the page around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxmem.records.profile import Record
from fxmem.show.html.page import fill_template
from fxmem.show.palette import LIGHT
from fxmem.show.sections import Section


class Code(NamedTuple):
    """What can be pasted, under a title that opens it."""

    title: str
    code: str
    note: str = ""


@dataclass(frozen=True)
class Fragment:
    """What a notebook shows of a record, in this order."""

    sections: Sequence[Section]
    plot: str = ""
    """SVG, our own."""
    codes: Sequence[Code] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    """Sentences, under titles that open them."""

    def html(self) -> str:
        """The fragment, escaped."""
        return fill_template(
            "fragment", sections=self.sections, plot=self.plot, codes=self.codes, lists=self.lists, palette=LIGHT
        )


def cell_id(record: Record) -> str:
    """A name for elements of this record: other cells of a notebook are in the same document."""
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()[:10]
