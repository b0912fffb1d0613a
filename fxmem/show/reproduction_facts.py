"""A shortage under prediction, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fxmem.records.explanation import JoinedLine, Reproduction
from fxmem.records.units import exact_bytes, format_bytes, percent, to_words
from fxmem.show.finding_facts import describe
from fxmem.show.sections import Fact, Facts, Section, Table, TableColumn, make_printable, make_table, numbers

_HOLDERS: Final = 10
_FOUND: Final = 3
NO_LINE: Final = "no line is known"
_SAME: Final = {True: ", the line of the message", False: ", another line than the message names", None: ""}


def reproduction_sections(about: Reproduction, width: int = 100) -> Iterator[Section]:
    """Where it runs out, who holds the memory, and what was tried; tables in text of this width."""
    peak = about.advice.before
    room = f"{exact_bytes(about.room_bytes)} on {about.target}"
    if about.fits:
        outcome = f"fits as it is: {format_bytes(peak.counted_bytes)} of {room}"
    else:
        where = f" at {about.place}{_SAME[about.same_line]}" if about.place else ""
        outcome = f"runs out{where}: {format_bytes(peak.counted_bytes)} at the peak, of {room}"
    facts = [Fact("Predicted", outcome, "predicted", "good" if about.fits else "bad")]
    facts += [Fact("" if index else "Found", describe(each)) for index, each in enumerate(about.found[:_FOUND])]
    if about.lines:
        yield Section(facts=[*make_printable(facts), *joined_facts(about)])
        yield Section(joined_table(about.lines[:_HOLDERS], width))
    else:
        yield Section(facts=make_printable(facts))
        yield Section(_hold_table(about, width))
    if not about.fits:
        yield from _describe_changes(about)


def _hold_table(about: Reproduction, width: int) -> Table:
    heads = [TableColumn("Alive at the predicted peak", is_head=True, width=width - 32, wraps=True)]
    rows = (
        [
            ", ".join(filter(None, [to_words(each.kind), each.place, each.holder and f"held by {each.holder}"])),
            format_bytes(each.nbytes), percent(each.nbytes, about.advice.before.requested_bytes), f"{each.count:,}",
        ]
        for each in about.holders[:_HOLDERS]
    )  # fmt: skip
    return make_table("Alive at the predicted peak", [*heads, *numbers("Bytes", "Share", "Tensors")], rows)


def joined_facts(about: Reproduction) -> Facts:
    """How far a snapshot and the prediction are apart, and the largest lines that one of them alone has."""
    measured, predicted = (sum(each) for each in zip(*map(_both, about.lines), strict=True))
    off = f", {100 * (predicted - measured) / measured:+.1f} %" if measured else ""
    peaks = f"{format_bytes(measured)} requested on the card, {format_bytes(predicted)} predicted{off}"
    facts = [Fact("Peaks", peaks)]
    sides: tuple[tuple[str, Callable[[JoinedLine], tuple[int, int]]], ...] = (
        ("Card only", _both), ("Only here", lambda each: (each.predicted_bytes, each.measured_bytes)),
    )  # fmt: skip
    for name, sizes in sides:
        alone = [(each.place, sizes(each)[0]) for each in about.lines if each.place and not sizes(each)[1]]
        said = ", ".join(f"{place} ({format_bytes(nbytes)})" for place, nbytes in alone[:_FOUND])
        more = f" and {len(alone) - _FOUND} more lines" if len(alone) > _FOUND else ""
        facts.append(Fact(name, f"{said}{more}" if alone else "no line"))
    return make_printable(facts)


def joined_table(lines: Sequence[JoinedLine], width: int = 100) -> Table:
    """What each line holds on the card and under prediction."""
    heads = [TableColumn("Alive at both peaks, by line", is_head=True, width=width - 40, wraps=True)]
    rows = []
    for each in lines:
        measured, predicted = _both(each)
        sign = "-" if predicted < measured else "+" if predicted > measured else ""
        more = f"{sign}{format_bytes(abs(predicted - measured))}"
        rows.append([each.place or NO_LINE, format_bytes(measured), format_bytes(predicted), more])
    return make_table("Alive at both peaks", [*heads, *numbers("Card", "Predicted", "Difference")], rows)


def _both(line: JoinedLine) -> tuple[int, int]:
    return line.measured_bytes, line.predicted_bytes


def _describe_changes(about: Reproduction) -> Iterator[Section]:
    """What makes it fit."""
    advice = about.advice
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
