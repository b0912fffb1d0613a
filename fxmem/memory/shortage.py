"""Find the messages that memory ran out in a text: one error, or the log of a whole job with several ranks.

The forms, by the release of torch that wrote them (`c10/cuda/CUDACachingAllocator.cpp`):

- 1.0 to 1.3: `(GPU 0; 10.73 GiB total capacity; 4.41 GiB already allocated; 1.75 GiB free; 3.78 GiB cached)`, where
  *cached* is what is reserved and not allocated;
- 1.4 to 2.0: `6.70 GiB reserved in total by PyTorch`, where *reserved* has the allocated bytes in it;
- 2.1: `GPU 0 has a total capacity of ... of which ... is free. Process 7 has ... memory in use. Including non-PyTorch
  memory, this process has ... memory in use. Of the allocated memory ... is allocated by PyTorch, and ... is reserved
  by PyTorch but unallocated`;
- 2.3: the same `with ... allocated in private pools (e.g., CUDA Graphs)`.

Other devices write the same with another name. These and all other formats, of libraries, drivers, schedulers and the
host, are tables of `shortage_formats.toml`.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from fxmem.hardware.context import known_context_sizes
from fxmem.records.shortage import Cause, OutOfMemoryMessage, ProcessUse
from fxmem.records.units import group

# --- ways of saying that memory ran out, and what the causes come to in words -----------------------------------------
# The tables of `shortage_formats.toml`.


class Format(NamedTuple):
    """A way of saying it; its fields are described in the file."""

    words: Sequence[str]
    pattern: str
    source: str = ""
    cause: Cause = "unknown"
    api: str = ""
    is_hint: bool = False
    means: str = ""
    change: str = ""
    unless: str = ""
    line: str = ""


class CauseWords(NamedTuple):
    """What a cause is, what to do, and what it comes to for the card of a snapshot."""

    means: str
    change: str
    card: str = "not known"


@cache
def _read() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("shortage_formats.toml").read_text(encoding="utf-8"))


@cache
def find_words(cause: Cause) -> CauseWords:
    """The words of a cause."""
    return CauseWords(**_read()["causes"][cause])


@cache
def all_formats() -> Sequence[Format]:
    """The tables, in their order."""
    return [Format(**row) for row in _read()["formats"]]


@cache
def find_format(source: str) -> Format:
    """The first format of a source; empty is PyTorch's allocator."""
    return next(each for each in all_formats() if each.source == source)


def find_by_line(line: str) -> Format | None:
    """The first format with words for a line that this one has."""
    return next((each for each in all_formats() if each.line and re.search(each.line, line)), None)


@cache
def patterns_by_word(*, is_hint: bool) -> Mapping[str, tuple[re.Pattern[str], Sequence[Format]]]:
    """For each word of hints, or of the others, a pattern with a group for each format of it, and these formats."""
    formats = group((word, each) for each in all_formats() if each.is_hint == is_hint for word in each.words)
    return {word: (re.compile("|".join(f"({each.pattern})" for each in have)), have) for word, have in formats.items()}


# --- the cause of a shortage, by the numbers of its message alone -----------------------------------------------------
# What is asked in this order: does the request fit the card at all; was it refused although the bytes were free (a
# limit, or something that the message does not show); would the allocator's unused bytes have been enough, were they
# in one piece; would the bytes of other processes; would what the process itself holds outside the allocator? Else
# the program is too large for the card.


_ROOM: Final = 32
"""Free bytes beyond the request that are this share of the card, one in so many, are room; less is a full card, of
which the driver keeps a little for itself."""
_IN_PIECES: Final = 10
"""The allocator's unused bytes are the cause where they are this share of what it reserved, one in so many."""
_OTHERS: Final = 4
"""Other processes are the cause where they hold this share of the card, one in so many. On a desktop, the display and
Windows have up to a sixth of a small card."""
_OTHERS_KNOWN: Final = 10
"""The same where the message says what the process has itself."""
_DISPLAY: Final = 1 << 30
"""So much of a card may be its display's, which nobody ends."""
_ROUNDING: Final = 16 << 20
"""What a sum of three sizes may be off, each rounded to 0.01 GiB."""


def find_cause(message: OutOfMemoryMessage) -> OutOfMemoryMessage:
    """The message, with what follows from its numbers."""
    sums = _complete(message)
    return sums.model_copy(update={"cause": _decide(sums)})


def _complete(message: OutOfMemoryMessage) -> OutOfMemoryMessage:
    """Fill in the numbers that follow from the others."""
    allocated, cached, reserved = message.allocated_bytes, message.cached_bytes, message.reserved_bytes
    if reserved is None and allocated is not None and cached is not None:
        reserved = allocated + cached
    elif cached is None and allocated is not None and reserved is not None:
        cached = max(reserved - allocated, 0)
    capacity, free, outside = message.capacity_bytes, message.free_bytes, message.outside_bytes
    if message.api == "MPS":  # the limit is what there is
        free = (
            None
            if None in (message.limit_bytes, allocated, outside)
            else _less(message.limit_bytes, allocated, outside)
        )
    if outside is None and capacity is not None and free is not None and reserved is not None:
        outside = _less(capacity, free, reserved)
    process, others = message.process_bytes, message.others
    if process is None and reserved is not None:
        # In a container the process does not find itself by its number among those of the driver.
        own = [each for each in others if each.nbytes + _ROUNDING >= reserved]
        if len(own) == 1:
            process, others = own[0].nbytes, tuple(each for each in others if each is not own[0])
    asked = message.requested_bytes
    missing = None if asked is None or free is None else asked - free
    return message.model_copy(
        update={
            "cached_bytes": cached,
            "reserved_bytes": reserved,
            "outside_bytes": outside,
            "free_bytes": free,
            "process_bytes": process,
            "others": others,
            "missing_bytes": missing,
            "missing_packed_bytes": None if missing is None or cached is None else missing - cached,
        }
    )


def _less(whole: int | None, *parts: int | None) -> int:
    return max((whole or 0) - sum(each or 0 for each in parts), 0)


def others_bytes(message: OutOfMemoryMessage) -> int | None:
    """What other processes hold of the card; where the process is not told apart, what it cannot be itself."""
    if message.outside_bytes is None or message.reserved_bytes is None:
        return None
    own = (
        most_context_bytes()
        if message.process_bytes is None
        else max(message.process_bytes - message.reserved_bytes, 0)
    )
    return max(message.outside_bytes - own, 0)


def context_bytes(message: OutOfMemoryMessage) -> int | None:
    """What the process holds outside the allocator; None where the message does not tell it from other processes."""
    if message.api == "MPS":  # Metal counts what this process has, and no other's
        return message.outside_bytes
    if message.process_bytes is None or message.reserved_bytes is None:
        return None
    return max(message.process_bytes - message.reserved_bytes, 0)


@functools.cache
def most_context_bytes() -> int:
    """The most that one process without a process group was measured to take beside its allocator."""
    return max(each.nbytes for each in known_context_sizes() if each.state == "working")


def _decide(message: OutOfMemoryMessage) -> Cause:
    asked, capacity, missing = message.requested_bytes, message.capacity_bytes, message.missing_bytes
    if message.cause != "unknown":  # its format says so
        return message.cause
    room = message.limit_bytes if capacity is None else capacity
    if room is None and message.reserved_bytes is not None and message.free_bytes is not None:
        room = message.reserved_bytes + message.free_bytes  # a snapshot does not say how large the card is
    if asked is None or room is None:
        return "unknown"
    if asked > room:
        return "request"
    allocated, cached = message.allocated_bytes or 0, message.cached_bytes or 0
    if allocated > room:  # Windows lends the host's memory
        return "size"
    if missing is None:  # what was free is not said (XPU until 2.13)
        return "size" if allocated + asked > room else "unknown"
    reserved, limit = message.reserved_bytes or 0, message.limit_bytes
    if limit is not None and capacity is not None and reserved + asked + _ROUNDING > limit and missing <= 0:
        return "limit"
    if -missing * _ROOM >= room:
        return "free"
    others, context = others_bytes(message) or 0, context_bytes(message)
    if missing <= cached and cached * _IN_PIECES >= reserved >= others and reserved:
        return "fragmentation"
    enough = missing <= others + cached
    if enough and others >= (room / _OTHERS if context is None else max(room / _OTHERS_KNOWN, _DISPLAY)):
        return "other-process"
    beyond = (context or 0) - most_context_bytes()
    share = _OTHERS if message.api == "MPS" else _OTHERS_KNOWN  # Metal's graphs have up to a fifth
    return "context" if missing <= beyond + cached and beyond * share >= room else "size"


# --- find the messages that memory ran out in a text: one error, or the log of a whole job with several ranks ---------


_SIZE: Final = r"(\d{1,18}(?:\.\d{0,18})?) ?(bytes|B|[KMGT]i?B)"
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_BEFORE, _AFTER = 60, 160
"""Characters of a head before and after its word, at most."""
_LINE: Final = 400
"""Characters of a line in which its rank is looked for."""
_FIELDS: Final = {
    "requested_bytes": rf"(?:[Tt]ried to|trying to|Unable to) allocate {_SIZE}|Requested *: {_SIZE}"
    rf"|(?:memory allocating|to mmap|calloc(?: async)?) {_SIZE}|Required: ?(\d{{1,18}})()",
    "capacity_bytes": rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}|Device limit *: {_SIZE}",
    "free_bytes": rf"{_SIZE}(?: is)? free|Free \(according to CUDA\) *: {_SIZE}",
    "allocated_bytes": rf"{_SIZE} already allocated|{_SIZE} is allocated by PyTorch"
    rf"|(?:MPS|Currently) allocated *: {_SIZE}",
    "private_pool_bytes": rf"{_SIZE} allocated in private pools",
    "cached_bytes": rf"{_SIZE} cached|{_SIZE} is reserved by PyTorch but unallocated",
    "reserved_bytes": rf"{_SIZE} reserved in total",
    "limit_bytes": rf"{_SIZE} allowed|max allowed: {_SIZE}|memory fraction\) *: {_SIZE}",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "outside_bytes": rf"other allocations: {_SIZE}",
}
_PATTERNS: Final = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_OTHER: Final = re.compile(rf"Process (\d{{1,18}}) has {_SIZE} memory in use")
_OF_JOB: Final = re.compile(
    r"(?:\bpid ?[:=] ?|process )(\d{1,18})\b(?!\s+has)|:(\d{1,18}):\d{1,18} \[\d{1,9}\] NCCL", re.IGNORECASE
)
"""A process that the log itself has begun: torchrun's, DeepSpeed's or Ray's words for its own, or NCCL's."""
_DEVICE: Final = re.compile(r"\((?:GPU|NPU) (\d{1,9});|\. (?:GPU|NPU) (\d{1,9}) has a total|on device (\d{1,9}) would")
_RANK: Final = re.compile(r"\brank ?[=:]? ?(\d{1,9})|\[default(\d{1,9})\]|^ *(\d{1,9}): ", re.IGNORECASE)
_PREFIX: Final = re.compile(r"^(?:\[\w+\]:|\([^()]{0,99}pid=[^()]{0,99}\)|\d+:) ?")
"""What launchers write before each line of a rank."""
_APIS: Final = ("HIP", "XPU", "NPU", "MPS")
_UNSET: Final = 1 << 60
"""A size from here on is none: the driver's word for what it does not know, and a limit that nobody set."""
_LONGEST: Final = 2500
"""Characters of a message, with its advice."""
_FRAMES: Final = 50_000
"""Characters of a traceback above it."""
_ANY: Final = "a library"
"""Who says it in words of any program; whose memory it is follows from its line."""
_MOST_HINTS: Final = 100
_Head = tuple[re.Match[str], Format]


def read_messages(text: str) -> tuple[OutOfMemoryMessage, ...]:
    """Every message in a text, in its order; equal ones of a rank once, with their count.

    Nothing is returned for a text without one.
    """
    heads = _find_heads(text)
    ends: dict[int | None, int] = {}
    found: dict[OutOfMemoryMessage, tuple[int, int, _Traceback]] = {}
    line, before, begin = 1, 0, 0
    for index, (head, kind) in enumerate(heads):
        line, before, start = line + text.count("\n", before, head.start()), head.start(), head.start()
        begin = max(begin, text.rfind("\n", begin, start) + 1)
        following = heads[index + 1][0].start() if index + 1 < len(heads) else len(text)
        rank = _find_rank(text[begin : min(start, begin + _LINE)])
        message = _read_message(text, head, kind, rank, min(following, start + _LONGEST))
        first, count, trace = found.get(message, (line, 0, _Traceback()))
        if not any(trace):
            trace = _read_traceback(text, max(start - _FRAMES, ends.get(rank, 0)), start, rank)
        found[message] = first, count + 1, trace
        ends[rank] = head.end()
    said = [_add_traceback(message, *about) for message, about in found.items()]
    said = [*_mark_ranks(said, text)]
    # A line without numbers announces the error that is printed in full elsewhere.
    numbered = any(each.requested_bytes is not None for each in said)
    return tuple(each for each in said if each.source or each.requested_bytes is not None or not numbered)


def _mark_ranks(messages: Sequence[OutOfMemoryMessage], text: str) -> Iterator[OutOfMemoryMessage]:
    """Mark processes beside a rank's own that are other ranks: the log names them, or there are as many, two at least,
    and each has no more than a context."""
    crowded = any(each.others for each in messages)
    named = {int(each[1] or each[2]) for each in _OF_JOB.finditer(text)} if crowded else ()
    ranks = len({each.device for each in messages} - {None})
    for each in messages:
        most = most_context_bytes() if 2 <= len(each.others) == ranks - 1 else 0
        are_ranks = ((other, other.pid in named or other.nbytes <= most) for other in each.others)
        others = tuple(other.model_copy(update={"is_rank": is_rank}) for other, is_rank in are_ranks)
        yield each.model_copy(update={"others": others})


def _find_heads(text: str) -> list[_Head]:
    """Where messages begin, in order; hints only where nothing else is."""
    firm = {head.start(): (head, kind) for head, kind in reversed([*_search(text, is_hint=False)])}
    first = firm or _find_hints(text)
    return [first[start] for start in sorted(first)]


def _search(text: str, *, is_hint: bool) -> Iterator[_Head]:
    for word, (pattern, formats) in patterns_by_word(is_hint=is_hint).items():
        at = text.find(word)
        while at >= 0:
            for head in pattern.finditer(text, max(at - _BEFORE, 0), at + _AFTER):
                yield head, formats[(head.lastindex or 1) - 1]
            at = text.find(word, at + len(word))


def _find_hints(text: str) -> dict[int, _Head]:
    """The first hints, one a line, that are no advice, with whose memory the words around them say."""
    first: dict[int, _Head] = {}
    found = {(hint.source, head.start()): (head, hint) for head, hint in _search(text, is_hint=True)}
    for head, hint in sorted(found.values(), key=lambda each: (each[1].source == _ANY, each[0].start())):
        start, end = head.span()
        begin = text.rfind("\n", max(start - _AFTER, 0), start) + 1 or start - start % _AFTER
        if begin in first or len(first) >= _MOST_HINTS:
            continue
        line = text[begin:start] + "\0" + text[start : end + _AFTER].partition("\n")[0]
        if hint.source != _ANY:
            first[begin] = head, hint
        elif not re.search(find_format(_ANY).unless, line):
            first[begin] = head, find_by_line(line.replace("\0", "")) or hint
    return first


def _read_message(text: str, head: re.Match[str], kind: Format, rank: int | None, end: int) -> OutOfMemoryMessage:
    lines = text[head.start() : end].splitlines()[: 1 if kind.source else None]
    words = " ".join(" ".join([_PREFIX.sub("", each) for each in lines]).split())
    device = _DEVICE.search(words)
    sizes: dict[str, Any] = {name: _read_size(pattern.search(words)) for name, pattern in _PATTERNS.items()}
    found = ((int(each[1]), _to_bytes(each[2], each[3])) for each in _OTHER.finditer(words))
    message = OutOfMemoryMessage(
        line=0,
        api=kind.api or next((api for api in _APIS if api in head[0].upper()), "CUDA"),
        source=kind.source,
        cause=kind.cause,
        device=None if device is None else next(int(each) for each in device.groups() if each),
        rank=rank,
        others=tuple(ProcessUse(pid=pid, nbytes=nbytes) for pid, nbytes in found if 0 < nbytes < _UNSET),
        **sizes,
    )
    return find_cause(message)


def _find_rank(line: str) -> int | None:
    found = _RANK.search(line)
    return None if found is None else next(int(each) for each in found.groups() if each)


def _read_size(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    number, unit = (each for each in match.groups() if each is not None)
    nbytes = _to_bytes(number, unit)
    return None if nbytes >= _UNSET and not match[0].startswith("Tried") else nbytes


def _to_bytes(number: str, unit: str) -> int:
    """Torch writes powers of 1024, MPS under the names of powers of 1000."""
    return round(float(number) * _UNITS[unit[:1].lower()])


# --- the traceback above ----------------------------------------------------------------------------------------------

_INSTALLED: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<frozen|\.\.\.[/\\]torch[/\\]")
_FRAME: Final = re.compile(
    r'File "([^"\n]+)", line (\d+)'  # Python
    r"|│ +(\S+\.py):(\d+) in "  # rich
    r"|^(?:File )?(\S+\.py):(\d+), in "  # IPython since 8
    r"|^(Cell In ?\[\d+\]),? line (\d+)"
    r"|^(<ipython-input-\S+|\S+\.py) in ()"  # IPython before; the line is at the arrow
)
_ARROW: Final = re.compile(r"^-+> ?(\d+) ")
_TRACEBACK: Final = "Traceback (most recent call last):"
_INTERRUPT: Final = "signal_handling.py"
"""Where a DataLoader's worker ends, its process is at no line that has to do with it."""
_ESCAPED: Final = re.compile(r"\\(.)")
_SETUP: Final = re.compile(
    r"[/\\]_?fsdp[/\\]|parallel[/\\]distributed\.py.{0,20} in __init__"  # a model is wrapped,
    r"|modules[/\\]module\.py.{0,20} in (?:_apply|convert|cuda|to)\b"  # moved,
    r"|[/\\]serialization\.py|\bin (?:from_pretrained|load_state_dict|_load_state_dict\w*|load_checkpoint\w*)\b"
)
_STEP: Final = re.compile(r"\bin (?:forward|backward|_?pre_forward\w*|_?pre_backward\w*|step)\b")


class _Traceback(NamedTuple):
    """What the traceback above a message says."""

    place: str = ""
    """The innermost line of the user's own: `file:line`, or empty."""
    is_setup: bool = False
    """Whether it moves, loads or wraps a model there."""
    is_pinned: bool = False
    """Whether it pins memory in its last call."""


def _read_traceback(text: str, least: int, end: int, rank: int | None) -> _Traceback:
    """Read the traceback that ends there."""
    part, place, arrow, below, pins, has_frame = text[least:end], "", "", [], False, False
    one_line, is_one = part.rfind(_TRACEBACK + "\\n"), False  # of a log with escapes
    if one_line >= 0 and (is_one := "\n" not in part[one_line:]):
        part = _ESCAPED.sub(lambda each: "\n" if each[1] == "n" else each[1], part[one_line:])
    for line in reversed(part.split("\n")):
        if not is_one and _find_rank(line[:40]) != rank:
            continue  # another rank's line between
        words = _PREFIX.sub("", line)
        below.append(words)
        pins = pins or (not has_frame and "pin_memory" in words)
        if _INTERRUPT in line:
            return _Traceback()
        if _TRACEBACK in line:
            break
        if (at := _ARROW.match(words)) is not None:
            arrow = at[1]
        elif (frame := _FRAME.search(words)) is not None:
            has_frame = True
            file, number = (each for each in frame.groups() if each is not None)
            if not _INSTALLED.search(file) and (number or arrow):
                place = f"{file}:{number or arrow}"
                break
    return _Traceback(place, any(map(_SETUP.search, below)) and not any(map(_STEP.search, below)), pins and has_frame)


def _add_traceback(message: OutOfMemoryMessage, line: int, count: int, trace: _Traceback) -> OutOfMemoryMessage:
    """The message, with where it stands, and what follows from where it was raised."""
    about: dict[str, Any] = {"line": line, "count": count, "place": trace.place, "is_setup": trace.is_setup}
    if trace.is_pinned and message.source == "driver":
        kind = find_format("pinned memory")
        about |= {"source": kind.source, "cause": kind.cause, "api": kind.api}
    return message.model_copy(update=about)
