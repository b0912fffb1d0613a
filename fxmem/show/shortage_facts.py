"""A message of a card that ran out of memory, in words: the cause, what held the card, what each number means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fxmem.memory.shortage import context_bytes, find_format, find_words, most_context_bytes, others_bytes
from fxmem.records.shortage import Holder, JoinedLine, OutOfMemoryMessage, Reproduction, SnapshotReport
from fxmem.records.units import exact_bytes, format_bytes, percent, to_words
from fxmem.show.plan_facts import describe
from fxmem.show.sections import Fact, Facts, Section, Table, TableColumn, make_printable, make_table, numbers

_MOST_SAID: Final = 16
"""Messages that are listed."""


# --- a message of a card that ran out of memory, in words -------------------------------------------------------------
_NO_FREE: Final = "the message does not say what was free"
_ROUNDED: Final = "Sizes are the message's, which rounds them; what it does not say is the difference of what it says."

_SET_UP: Final = (
    "a batch plays no part, as a model is moved, loaded or wrapped there: fewer bits, weights loaded once on the CPU "
    "or the meta device, a part of the model on each card (FSDP's device_id, device_map)"
)

_OTHERS: Final = {False: "another process", True: "another rank of the job"}
_OWN_CARD: Final = (
    "torch.cuda.set_device(local_rank) before all else that uses the card, also before init_process_group, and "
    "torch.load with map_location; or CUDA_VISIBLE_DEVICES of one card for each rank"
)


def describe_change(message: OutOfMemoryMessage, *, is_tried: bool = False) -> str:
    """What to do; what tries it is left out where that was done."""
    if message.is_setup and message.cause in {"size", "unknown"}:
        alone = "see who has the card (nvidia-smi); if it is this program alone: "
        return alone * (message.cause == "unknown") + _SET_UP
    words = find_format(message.source).change or find_words(message.cause).change
    return words.partition("; `fxmem explain ")[0] if is_tried else words


def describe_cause(message: OutOfMemoryMessage) -> str:
    """The cause, and the numbers it rests on."""
    return f"{find_words(message.cause).means}{_describe_grounds(message)}"


def describe_card(message: OutOfMemoryMessage) -> str:
    """How the card was when a request of a snapshot was refused: full, in pieces, or another process's."""
    sizes = {"allocated": message.allocated_bytes, "unused in pieces": message.cached_bytes, "free": message.free_bytes}
    parts = ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in sizes.items() if nbytes is not None)
    gone = f"{format_bytes(others)} less than at another refusal" if (others := others_bytes(message)) else ""
    more = gone or "no snapshot has other processes (nvidia-smi)"
    return f"{find_words(message.cause).card}: {parts}; {more}"


def _describe_grounds(message: OutOfMemoryMessage) -> str:
    if message.source:
        refused = f"{message.source} had no room beside PyTorch's allocator, and says no more"
        return f": {find_format(message.source).means or refused}"
    asked, missing = format_bytes(message.requested_bytes), message.missing_bytes
    cached, allocated = format_bytes(message.cached_bytes), format_bytes(message.allocated_bytes)
    match message.cause:
        case "request":
            most = (message.reserved_bytes or 0) + (message.free_bytes or 0)  # as much as a snapshot says
            return f": {asked} of {format_bytes(message.capacity_bytes or message.limit_bytes or most)}"
        case "fragmentation":
            lacking = f", where {format_bytes(missing)} are missing" if missing is not None and missing > 0 else ""
            return f": {cached} are reserved and unused{lacking}"
        case "other-process":
            return f": {format_bytes(others_bytes(message))}, and this one {allocated}"
        case "context":
            return f": {format_bytes(context_bytes(message))}"
        case "limit":
            return f": {format_bytes(message.limit_bytes)} of {format_bytes(message.capacity_bytes)}"
        case "free":
            return f": {format_bytes(message.free_bytes)} free when it was asked for {asked}"
        case "size":
            return _describe_size(message, allocated)
        case _:
            return ": the message has no numbers" if message.requested_bytes is None else f": {_NO_FREE}"


def _describe_size(message: OutOfMemoryMessage, allocated: str) -> str:
    room = message.capacity_bytes or message.limit_bytes or 0
    if (message.allocated_bytes or 0) > room:
        return f": {allocated} allocated on {format_bytes(room)}; the driver lends the host's memory, and has no more"
    packed, missing = message.missing_packed_bytes, message.missing_bytes
    if missing is None:
        asked = format_bytes(message.requested_bytes)
        return f": {allocated} are allocated, {asked} more are above its {format_bytes(room)}; {_NO_FREE}"
    if missing <= 0:
        asked, free = format_bytes(message.requested_bytes), format_bytes(message.free_bytes)
        return f": {allocated} are allocated, and the driver gives no {asked} of the last {free}"
    if packed is not None and packed <= 0:
        return (
            f", or all but: {allocated} are allocated. What is unused, {format_bytes(message.cached_bytes)}, would be "
            f"enough for this request in one piece, and leave {format_bytes(-packed)} for later ones"
        )
    return f": {allocated} are allocated, and {format_bytes(packed if packed is not None else missing)} are missing"


def shortage_facts(message: OutOfMemoryMessage, *, is_tried: bool = False) -> Facts:
    """What a person wants to know first."""
    where = [f"at {message.place}"] if message.place else []
    where += [f"on {'NPU' if message.api == 'NPU' else 'GPU'} {message.device}"] if message.device is not None else []
    where += [f"in rank {message.rank}"] if message.rank is not None else []
    facts = [Fact("Cause", describe_cause(message), "cause", "bad")]
    if message.requested_bytes is not None:
        facts.append(Fact("Refused", " ".join([format_bytes(message.requested_bytes), *where]), "refused"))
    elif where:
        facts.append(Fact("Where", " ".join(where), "refused"))
    if message.missing_bytes is not None and message.missing_bytes > 0:
        packed = message.missing_packed_bytes
        rest = "nothing" if packed is None or packed <= 0 else format_bytes(packed)
        packs = "" if packed is None else f"; {rest} if all that is cached were used"
        facts.append(Fact("Missing", f"{format_bytes(message.missing_bytes)} more than was free{packs}", "missing"))
    of_job = message.cause == "other-process" and message.others and all(each.is_rank for each in message.others)
    change = Fact("To do", describe_change(message, is_tried=is_tried), "change")
    return make_printable([*facts, *([] if of_job else [change])])


def shortage_sections(
    messages: Sequence[OutOfMemoryMessage], width: int = 100, *, is_tried: bool = False
) -> Iterator[Section]:
    """The first message in full, and a line for each where there are several; in text of this width."""
    first = messages[0]
    notes = []
    if len(messages) > 1:
        causes = dict.fromkeys(each.cause for each in messages)
        named = [each for each in messages if each.cause != "other-process"]
        beside = [each for each in named if not all(other.is_rank for other in each.others)]
        same = "all for the same cause" if len(causes) == 1 else f"of {len(causes)} causes"
        if beside and len(causes) == 1:
            same = f"all for the same cause, and in {len(beside)} another process takes memory, too"
        ranks = {each.rank for each in messages} - {None}
        of = f" of {len(ranks)} ranks" if len(ranks) > 1 else ""
        notes = [Fact("Messages", f"{len(messages)}{of}, {same}; this is the first, in line {first.line}")]
        notes += [Fact("", _describe_others(each)) for each in beside[:_MOST_SAID]]
    crowded = [_describe_ranks(each) for each in messages if any(other.is_rank for other in each.others)]
    notes += [*shortage_facts(first, is_tried=is_tried), *(Fact("Ranks", words) for words in crowded[:1])]
    yield Section(facts=notes)
    parts = list(card_parts(first))
    if parts:
        heads = [TableColumn("Of the card", is_head=True, width=15), *numbers("Bytes", "Share")]
        columns = [*heads, TableColumn("What it is", width=width - 36, wraps=True)]
        yield Section(make_table("What the card's memory was in", columns, parts), notes=[_ROUNDED])
    if len(messages) > 1:
        heads = numbers("Line", "Rank", "Device", "Asked", "Free", "Allocated")
        rows = map(_message_row, messages[:_MOST_SAID])
        more = [f"and {len(messages) - _MOST_SAID} more in --json"] if len(messages) > _MOST_SAID else []
        yield Section(make_table("Every message", [*heads, TableColumn("Cause")], rows), notes=more)


def _describe_ranks(message: OutOfMemoryMessage) -> str:
    """The other ranks of the job that have opened the card of this one."""
    sizes = [each.nbytes for each in message.others if each.is_rank]
    what = f"{len(sizes)} other ranks open" if len(sizes) > 1 else "another rank opens"
    return f"{what} {_name_card(message)}, too, and take {format_bytes(sum(sizes))} there: {_OWN_CARD}"


def _name_card(message: OutOfMemoryMessage) -> str:
    rank = "" if message.rank is None else f" of rank {message.rank}"
    return f"{'the card' if message.device is None else f'GPU {message.device}'}{rank}"


def _describe_others(message: OutOfMemoryMessage) -> str:
    """The processes that a message names beside its own."""
    named = " and ".join(f"process {each.pid} has {format_bytes(each.nbytes)}" for each in message.others)
    return f"line {message.line}: {named} on {_name_card(message)}"


def _message_row(message: OutOfMemoryMessage) -> list[str]:
    counts = ("" if each is None else str(each) for each in (message.line, message.rank, message.device))
    sizes = (message.requested_bytes, message.free_bytes, message.allocated_bytes)
    return [*counts, *("" if each is None else format_bytes(each) for each in sizes), message.cause]


def card_parts(message: OutOfMemoryMessage) -> Iterator[tuple[str, str, str, str]]:
    """What the card's memory was in: name, bytes, share and meaning of each part that the message lets one know."""
    capacity = message.capacity_bytes or message.limit_bytes
    if capacity is None:
        return
    context, others = context_bytes(message), others_bytes(message)
    outside, named = message.outside_bytes, sum(each.nbytes for each in message.others)
    parts: list[tuple[str, int | None, str]] = [
        ("allocated", message.allocated_bytes, "blocks that tensors of the program hold"),
        ("  private pools", message.private_pool_bytes, "of these, for CUDA graphs"),
        ("cached", message.cached_bytes, "reserved by the allocator, in no tensor: pieces between blocks in use"),
    ]
    if context is not None and outside is not None:
        parts.append(("context", min(context, outside), "of this process beside the allocator: CUDA, libraries, NCCL"))
        parts += [(f"process {each.pid}", each.nbytes, _OTHERS[each.is_rank]) for each in message.others]
        unnamed = max((others or 0) - named, 0) or None
        parts.append(("others", unnamed, "processes that the message does not name, the display"))
    else:
        most = format_bytes(most_context_bytes())
        meaning = f"this process's CUDA context (measured: up to {most}), and other processes"
        parts.append(("outside", outside, "what other programs take" if message.api == "MPS" else meaning))
        parts += [(f"  process {each.pid}", each.nbytes, _OTHERS[each.is_rank]) for each in message.others]
    parts.append(("free", message.free_bytes, "what the driver had left"))
    if message.capacity_bytes is not None:
        parts.append(("  limit", message.limit_bytes, "of the card, what this process may reserve"))
    for name, nbytes, meaning in parts:
        if nbytes is not None:
            yield name, format_bytes(nbytes), percent(nbytes, capacity), meaning
    yield "all", format_bytes(capacity), "", "the card" if message.capacity_bytes else "what the program may take"


# --- a memory snapshot in words ---------------------------------------------------------------------------------------
# Who held the memory at the peak, what grew, what lay in pieces, what was freed late.


_LINES: Final = 12
_STACKS: Final = 4
_MOST_BLOCKS: Final = 6
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
        facts.append(
            Fact("Blocks", ", ".join([*sizes[:_MOST_BLOCKS], *["..."] * (len(sizes) > _MOST_BLOCKS)]), "blocks")
        )
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
        for index, grown in enumerate(report.grown[:_MOST_BLOCKS]):
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
    for each in report.in_the_way[: _MOST_BLOCKS // 2] if in_pieces else ():
        yield Fact(
            "", f"{each.place or UNKNOWN}: {count_blocks(each.count)} of {format_bytes(each.nbytes)} keep "
            f"{format_bytes(each.free_bytes)} around them from being given back", "unused",
        )  # fmt: skip


def snapshot_sections(report: SnapshotReport, width: int = 100) -> Iterator[Section]:
    """Everything a table or a page has of a snapshot; tables in text of this width."""
    yield Section(facts=snapshot_facts(report))
    yield Section(hold_table(report, report.lines[:_LINES], width), label="")
    notes = [
        f"{number}. {format_bytes(each.nbytes)} in {count_blocks(each.count)}: {' < '.join(each.frames[:_FRAMES])}"
        for number, each in enumerate([each for each in report.stacks[:_STACKS] if each.frames], 1)
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


# --- a shortage under prediction, in words ----------------------------------------------------------------------------


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
