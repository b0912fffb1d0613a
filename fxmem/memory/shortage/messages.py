"""Find the messages that memory ran out in a text: one error, or the log of a whole job with several ranks.

The forms, by the release of torch that wrote them (`c10/cuda/CUDACachingAllocator.cpp`):

- 1.0 to 1.3: `(GPU 0; 10.73 GiB total capacity; 4.41 GiB already allocated; 1.75 GiB free; 3.78 GiB cached)`, where
  *cached* is what is reserved and not allocated;
- 1.4 to 2.0: `6.70 GiB reserved in total by PyTorch`, where *reserved* has the allocated bytes in it;
- 2.1: `GPU 0 has a total capacity of ... of which ... is free. Process 7 has ... memory in use. Including non-PyTorch
  memory, this process has ... memory in use. Of the allocated memory ... is allocated by PyTorch, and ... is reserved
  by PyTorch but unallocated`;
- 2.3: the same `with ... allocated in private pools (e.g., CUDA Graphs)`.

Other devices write the same with another name; MPS (`aten/src/ATen/mps/MPSAllocator.mm`) and the allocator
`cudaMallocAsync` (`c10/cuda/CUDAMallocAsyncAllocator.cpp`) have words of their own. What libraries and the driver say
by themselves has no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fxmem.memory.shortage.cause import find_cause, most_context_bytes
from fxmem.records.shortage import OutOfMemoryMessage, ProcessUse

_SIZE: Final = r"(\d{1,18}(?:\.\d{1,18})?) ?(bytes|B|[KMGT]i?B)"
_UNITS: Final = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_HEAD: Final = re.compile(
    r"(?P<api>CUDA|HIP|XPU|NPU|MPS)(?: backend)? out of memory\b"
    r"|(?P<async>Allocation on device \d+ would exceed allowed memory)"
    r"|(?P<driver>(?:CUDA|HIP)(?: driver)? error: out of memory|cuda runtime error \(2\) ?: out of memory)"
    r"|(?P<cublas>(?:CUBLAS|HIPBLAS)_STATUS_ALLOC_FAILED)|(?P<cudnn>CUDNN_STATUS_ALLOC_FAILED)"
    r"|(?P<nccl>Cuda failure (?:2 )?'out of memory')"
    r"|(?P<host>DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (?P<bytes>\d{1,18}) b)"
)
_WORDS: Final = ("out of memory", "_STATUS_ALLOC_FAILED", "would exceed allowed memory", "DefaultCPUAllocator: ")
"""One of these is in each. A log of gigabytes is searched for them ten times as quickly."""
_BEFORE, _AFTER = 40, 120
"""Characters of a head before and after its word, at most."""
_SOURCES: Final = {"driver": "driver", "cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL"}
_FIELDS: Final = {
    "requested_bytes": rf"Tried to allocate {_SIZE}|Requested *: {_SIZE}",
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
_PREFIX: Final = re.compile(r"^(?:\[\w+\]:|\([^()]*pid=[^()]*\)|\d+:) ?")
"""What launchers write before each line of a rank."""
_UNSET: Final = 1 << 60
"""A size from here on is none: the driver's word for what it does not know, and a limit that nobody set."""
_LONGEST: Final = 2500
"""Characters of a message, with its advice."""
_FRAMES: Final = 50_000
"""Characters of a traceback above it."""


def read_messages(text: str) -> tuple[OutOfMemoryMessage, ...]:
    """Every message in a text, in its order; equal ones of a rank once, with their count.

    Nothing is returned for a text without one.
    """
    heads = _find_heads(text)
    ends: dict[int | None, int] = {}
    found: dict[OutOfMemoryMessage, tuple[int, int, str]] = {}
    line, begin = 1, 0
    for index, head in enumerate(heads):
        line, begin = line + text.count("\n", begin, head.start()), head.start()
        following = heads[index + 1].start() if index + 1 < len(heads) else len(text)
        message = _read_message(text, head, min(following, head.start() + _LONGEST))
        first, count, place = found.get(message, (line, 0, ""))
        above = max(head.start() - _FRAMES, ends.get(message.rank, 0))
        found[message] = first, count + 1, place or _find_place(text, above, head.start(), message.rank)
        ends[message.rank] = head.end()
    said = [
        message.model_copy(update={"line": first, "count": count, "place": place})
        for message, (first, count, place) in found.items()
    ]
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


def _find_heads(text: str) -> list[re.Match[str]]:
    heads = {}
    for word in _WORDS:
        at = text.find(word)
        while at >= 0:
            head = _HEAD.search(text, max(at - _BEFORE, 0), at + _AFTER)
            if head is not None:
                heads[head.start()] = head
            at = text.find(word, at + len(word))
    return [heads[start] for start in sorted(heads)]


def _read_message(text: str, head: re.Match[str], end: int) -> OutOfMemoryMessage:
    above = text[text.rfind("\n", 0, head.start()) + 1 : head.start()]
    rank = _find_rank(above)
    if head["host"]:
        message = OutOfMemoryMessage(line=0, api="CPU", rank=rank, requested_bytes=int(head["bytes"]))
        return find_cause(message)
    source = next((name for group, name in _SOURCES.items() if head[group]), "")
    lines = text[head.start() : end].splitlines()
    words = " ".join(" ".join([_PREFIX.sub("", each) for each in lines]).split())
    device = _DEVICE.search(words)
    sizes: dict[str, Any] = (
        {} if source else {name: _read_size(pattern.search(words)) for name, pattern in _PATTERNS.items()}
    )
    found = () if source else ((int(each[1]), _to_bytes(each[2], each[3])) for each in _OTHER.finditer(words))
    others = (ProcessUse(pid=pid, nbytes=nbytes) for pid, nbytes in found if 0 < nbytes < _UNSET)
    message = OutOfMemoryMessage(
        line=0,
        api=head["api"] or ("HIP" if "HIP" in head[0] else "CUDA"),
        source=source,
        device=None if device is None else next(int(each) for each in device.groups() if each),
        rank=rank,
        others=tuple(others),
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
    return round(float(number) * _UNITS[unit[0].lower()])


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


def _find_place(text: str, least: int, end: int, rank: int | None) -> str:
    """The innermost line of the user's own in the traceback that ends there: `file:line`, or empty."""
    arrow = ""
    while end > least:
        begin = text.rfind("\n", least, end) + 1 or least
        line, end = text[begin:end], begin - 1
        if _find_rank(line[:40]) != rank:
            continue  # another rank's line between
        if "Traceback (most recent call last)" in line:
            break
        words = _PREFIX.sub("", line)
        if (at := _ARROW.match(words)) is not None:
            arrow = at[1]
        elif (frame := _FRAME.search(words)) is not None:
            file, number = (each for each in frame.groups() if each is not None)
            if not _INSTALLED.search(file) and (number or arrow):
                return f"{file}:{number or arrow}"
    return ""
