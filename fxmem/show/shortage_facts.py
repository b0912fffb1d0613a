"""A message of a card that ran out of memory, in words: the cause, what held the card, what each number means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fxmem.memory.shortage import context_bytes, find_format, find_words, most_context_bytes, others_bytes
from fxmem.records.shortage import OutOfMemoryMessage
from fxmem.records.units import format_bytes, percent
from fxmem.show.sections import Fact, Facts, Section, TableColumn, make_printable, make_table, numbers

_MOST: Final = 16
"""Messages that are listed."""
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


def describe_change(message: OutOfMemoryMessage) -> str:
    """What to do."""
    if message.is_setup and message.cause in {"size", "unknown"}:
        alone = "see who has the card (nvidia-smi); if it is this program alone: "
        return alone * (message.cause == "unknown") + _SET_UP
    return find_format(message.source).change or find_words(message.cause).change


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


def shortage_facts(message: OutOfMemoryMessage) -> Facts:
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
    return make_printable([*facts, *([] if of_job else [Fact("To do", describe_change(message), "change")])])


def shortage_sections(messages: Sequence[OutOfMemoryMessage], width: int = 100) -> Iterator[Section]:
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
        notes += [Fact("", _describe_others(each)) for each in beside[:_MOST]]
    crowded = [_describe_ranks(each) for each in messages if any(other.is_rank for other in each.others)]
    yield Section(facts=[*notes, *shortage_facts(first), *(Fact("Ranks", words) for words in crowded[:1])])
    parts = list(card_parts(first))
    if parts:
        heads = [TableColumn("Of the card", is_head=True, width=15), *numbers("Bytes", "Share")]
        columns = [*heads, TableColumn("What it is", width=width - 36, wraps=True)]
        yield Section(make_table("What the card's memory was in", columns, parts), notes=[_ROUNDED])
    if len(messages) > 1:
        heads = numbers("Line", "Rank", "Device", "Asked", "Free", "Allocated")
        rows = map(_message_row, messages[:_MOST])
        more = [f"and {len(messages) - _MOST} more in --json"] if len(messages) > _MOST else []
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
