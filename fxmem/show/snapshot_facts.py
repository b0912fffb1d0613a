"""A memory snapshot in words: who held the memory at the peak, what grew, what lay in pieces, what was freed late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fxmem.records.snapshot import Holder, SnapshotReport
from fxmem.records.units import exact_bytes, format_bytes, percent
from fxmem.show.sections import Fact, Facts, Section, Table, TableColumn, make_printable, make_table, numbers
from fxmem.show.shortage_facts import describe_card, describe_cause, describe_change

_LINES: Final = 12
_STACKS: Final = 4
_MOST: Final = 6
_FRAMES: Final = 6
_IN_PIECES: Final = 10
"""Unused bytes are said to lie in pieces where they are this share of what is reserved, one in so many."""
UNKNOWN: Final = "not known: older than the history, or no stack was recorded"


def snapshot_facts(report: SnapshotReport) -> Facts:
    """What a person wants to know first."""
    facts = []
    for each in report.shortages[:1]:
        more = f"; {len(report.shortages) - 1} more" if len(report.shortages) > 1 else ""
        where = f" at {each.place}" if each.place else ""
        facts.append(Fact("Refused", f"{exact_bytes(each.requested_bytes or 0)}{where}{more}", "refused", "bad"))
        facts.append(Fact("Cause", describe_cause(each), "cause", "bad"))
        facts.append(Fact("Card", describe_card(each), "card"))
        facts.append(Fact("To do", describe_change(each), "change"))
    if report.events:
        words = f"requested at once, at event {report.peak_event:,} of {report.events:,}"
    else:
        share = percent(report.allocated_bytes, report.reserved_bytes)
        words = f"when it was written, {share} of what is reserved; it has no history"
    facts.append(Fact("Peak" if report.events else "Alive", f"{exact_bytes(report.peak_bytes)} {words}", "peak"))
    if not report.events:
        sizes = [f"{count:,} of {format_bytes(nbytes)}" for nbytes, count in report.sizes]
        facts.append(Fact("Blocks", ", ".join([*sizes[:_MOST], *["..."] * (len(sizes) > _MOST)]), "blocks"))
    above = report.reserved_peak_bytes - report.peak_bytes
    more = f", {format_bytes(above)} more than was ever requested: kept in cache, or in pieces (fragmentation)"
    beside = more if above * 4 > report.peak_bytes else ""
    at_most, of_it = (" at most", "of the peak by") if report.events else ("", "by")
    facts.append(Fact("Reserved", f"{exact_bytes(report.reserved_peak_bytes)}{at_most}{beside}", "reserved"))
    if (most := next((each for each in report.lines if each.place), None)) is not None:
        facts.append(Fact("Most", f"{format_bytes(most.nbytes)} {of_it} {most.place}", "most"))
    if report.older_bytes and report.events:
        facts.append(
            Fact("Older", f"{format_bytes(report.older_bytes)} of the peak are older than the history", "older")
        )
    between = (
        f"{report.steps} steps of the optimizer"
        if len(report.marks) >= 3 and report.steps >= 3
        else "the last three quarters of the history"
    )
    if report.grown:
        for index, grown in enumerate(report.grown[:_MOST]):
            more = f"{format_bytes(grown.nbytes)} more, {count_blocks(grown.blocks)}"
            words = f"{grown.place or UNKNOWN} keeps {more}, over {between}"
            facts.append(Fact("" if index else "Grows", words, "grows", "bad"))
    elif report.events:
        facts.append(Fact("Grows", f"no line keeps more and more over {between}", "grows"))
    facts += _describe_pieces(report)
    if report.waiting_bytes:
        words = f"{exact_bytes(report.waiting_bytes)} at most were freed, and waited for another stream"
        facts.append(Fact("Freed late", words, "late"))
    if report.others:
        facts.append(Fact("Devices", f"of device {report.device}, whose history is longest; {report.others} more"))
    if report.allocator_settings:
        facts.append(Fact("Settings", report.allocator_settings))
    return make_printable(facts)


def _describe_pieces(report: SnapshotReport) -> Iterator[Fact]:
    cached = report.cached_bytes
    words = (
        f"{format_bytes(cached)} of the {format_bytes(report.reserved_bytes)} reserved at the end "
        f"({percent(cached, report.reserved_bytes)}); {format_bytes(report.releasable_bytes)} of them in whole "
        f"segments, the largest piece {format_bytes(report.largest_free_bytes)}"
    )
    in_pieces = (cached - report.releasable_bytes) * _IN_PIECES > report.reserved_bytes
    yield Fact("Unused", f"{words}{': fragmentation' if in_pieces else ''}", "unused", "bad" if in_pieces else "")
    for each in report.in_the_way[: _MOST // 2] if in_pieces else ():
        yield Fact(
            "", f"{each.place or UNKNOWN}: {count_blocks(each.count)} of {format_bytes(each.nbytes)} keep "
            f"{format_bytes(each.free_bytes)} around them from being given back", "unused",
        )  # fmt: skip


def snapshot_sections(report: SnapshotReport, width: int = 100) -> Iterator[Section]:
    """Everything a table or a page has of a snapshot; tables in text of this width."""
    yield Section(facts=snapshot_facts(report))
    yield Section(hold_table(report, report.lines[:_LINES], width), label="")
    shown = [each for each in report.stacks[:_STACKS] if each.frames]
    notes = [
        f"{number}. {format_bytes(each.nbytes)} in {count_blocks(each.count)}: {' < '.join(each.frames[:_FRAMES])}"
        for number, each in enumerate(shown, 1)
    ]
    if notes:
        yield Section(facts=[Fact("Stacks", "innermost first"), *(Fact("", note) for note in notes)])


def count_blocks(count: int) -> str:
    """So many blocks, in words."""
    return f"{count:,} block{'s' * (count != 1)}"


def hold_table(report: SnapshotReport, holders: Sequence[Holder], width: int = 100) -> Table:
    """Who held what at the peak."""
    what = f"Alive{' at the peak' * bool(report.events)}"
    heads = [TableColumn(f"{what}, by line", is_head=True, width=width - 32, wraps=True)]
    rows = [
        [each.place or UNKNOWN, format_bytes(each.nbytes), percent(each.nbytes, report.peak_bytes), f"{each.count:,}"]
        for each in holders
    ]
    rest = report.lines[len(holders) :] if holders and holders[0] in report.lines else ()
    if rest:
        nbytes = sum(each.nbytes for each in rest)
        rows.append([f"{len(rest)} more lines", format_bytes(nbytes), percent(nbytes, report.peak_bytes), ""])
    if (unused := (report.reserved_at_peak_bytes or 0) - report.peak_bytes) > 0:
        rows.append(["unused: reserved by the allocator beside them", format_bytes(unused), "", ""])
    return make_table(what, [*heads, *numbers("Bytes", "Share", "Blocks")], rows)
