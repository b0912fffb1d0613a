"""A shortage under prediction, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.records.explanation import Reproduction
from fxmem.records.units import exact_bytes, format_bytes, percent, to_words
from fxmem.show.finding_facts import describe
from fxmem.show.sections import Fact, Section, TableColumn, make_printable, make_table, numbers

_HOLDERS: Final = 10
_FOUND: Final = 3
_SAME: Final = {True: ", the line of the message", False: ", another line than the message names", None: ""}


def reproduction_sections(about: Reproduction, width: int = 100) -> Iterator[Section]:
    """Where it runs out, who holds the memory, and what was tried; tables in text of this width."""
    advice, peak = about.advice, about.advice.before
    room = f"{exact_bytes(about.room_bytes)} on {about.target}"
    if about.fits:
        outcome = f"fits as it is: {format_bytes(peak.counted_bytes)} of {room}"
    else:
        where = f" at {about.place}{_SAME[about.same_line]}" if about.place else ""
        outcome = f"runs out{where}: {format_bytes(peak.counted_bytes)} at the peak, of {room}"
    facts = [Fact("Predicted", outcome, "predicted", "good" if about.fits else "bad")]
    facts += [Fact("" if index else "Found", describe(each)) for index, each in enumerate(about.found[:_FOUND])]
    yield Section(facts=make_printable(facts))
    heads = [TableColumn("Alive at the predicted peak", is_head=True, width=width - 32, wraps=True)]
    rows = (
        [
            ", ".join(filter(None, [to_words(each.kind), each.place, each.holder and f"held by {each.holder}"])),
            format_bytes(each.nbytes), percent(each.nbytes, peak.requested_bytes), f"{each.count:,}",
        ]
        for each in about.holders[:_HOLDERS]
    )  # fmt: skip
    yield Section(make_table("Alive at the predicted peak", [*heads, *numbers("Bytes", "Share", "Tensors")], rows))
    if about.fits:
        return
    together = advice.together
    if together is not None:
        used = together.peak.counted_bytes
        worth = f"{format_bytes(used)}, {format_bytes(about.room_bytes - used)} to spare; numbers: {together.effect}"
        code = [Fact("", line) for line in together.code.splitlines()]
        yield Section(facts=make_printable([Fact("Fits with", together.title, tone="good"), Fact("", worth), *code]))
    else:
        best = advice.suggestions[:1]
        least = f"; most: {best[0].title}, which saves {format_bytes(best[0].saved_bytes)}" if best else ""
        missing = f"nothing that was tried{least}; a smaller batch (fxmem max-batch)"
        yield Section(facts=make_printable([Fact("Fits with", missing, tone="bad")]))
