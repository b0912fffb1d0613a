"""Messages of cards that ran out of memory: read from any text, their numbers, and the cause that follows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from fxmem.memory.shortage import read_messages
from fxmem.records.shortage import OutOfMemoryMessage
from fxmem.show.shortage_facts import card_parts, describe_cause, shortage_sections

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PUBLISHED: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/oom_messages.json").read_text())
"""Messages as people published them, with the thread, and the cause that it ended with, where it ended with one.
`graph` is memory that autograd kept for a backward that never came: of that a message has no number."""


def only(text: str) -> OutOfMemoryMessage:
    (message,) = read_messages(text)
    return message


def in_message(numbers: str) -> OutOfMemoryMessage:
    return only(f"RuntimeError: CUDA out of memory. {numbers}")


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["thread"].partition(".com/")[2] for row in PUBLISHED])
def test_every_number_of_a_published_message_is_explained(row: dict[str, Any]) -> None:
    message = only(row["message"])
    said = {f"{size:.2f} {unit}" for size, unit in map(read, sizes_of(row["message"]))}
    found = {f"{size:.2f} {unit}" for size, unit in map(scale, numbers_of(message)) if unit}
    assert not {each for each in said - found if not unknown(each)}
    capacity = message.capacity_bytes
    if capacity is not None and (message.allocated_bytes or 0) <= capacity and message.cause != "unknown":
        names = [name for name, *_ in card_parts(message)]
        assert (names[0], names[-1]) == ("allocated", "all")


def test_most_published_causes_are_named() -> None:
    ended = [row for row in PUBLISHED if row["ended"]]
    named = [row for row in ended if only(row["message"]).cause == row["ended"]]
    assert (len(named), len(ended), len(PUBLISHED)) == (36, 50, 73)


PAGE = Path(__file__).parents[2] / "docs/oom-messages.md"
FORMS = {
    "Allocation on device": "cudaMallocAsync",
    "MPS": "MPS",
    "cached)": "1.0",
    "reserved in total": "1.4",
    "private pools": "2.3",
    "of which": "2.1",
}


def test_the_page_lists_every_message() -> None:
    """`FXMEM_UPDATE=1` writes its table anew."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| Thread |") :].partition("\n\n")[0]
    links = text[text.index("\n[1]: ") + 1 :].splitlines()[: len(PUBLISHED)]
    rows = [list_message(number, row) for number, row in enumerate(PUBLISHED, 1)]
    new = "\n".join([*table.splitlines()[:2], *rows])
    targets = [f"[{number}]: {row['thread']}" for number, row in enumerate(PUBLISHED, 1)]
    if os.environ.get("FXMEM_UPDATE"):
        PAGE.write_text(text.replace(table, new).replace("\n".join(links), "\n".join(targets)), encoding="utf-8")
    else:
        assert table == new
        assert links == targets


def list_message(number: int, row: dict[str, Any]) -> str:
    message, thread = only(row["message"]), row["thread"]
    _, project, _, thread_number = thread.rsplit("/", 3)
    name = f"Stack Overflow {thread_number}" if "stackoverflow" in thread else f"{project} {thread_number}"
    form = next((form for words, form in FORMS.items() if words in row["message"]), "no numbers")
    mark = "" if not row["ended"] else "yes" if message.cause == row["ended"] else "**no**"
    answer = f"{row['ended']}: {row['answer']}" if row["ended"] else "no answer"
    return f"| [{name}][{number}] | {form} | {answer} | {message.cause} | {mark} |"


def sizes_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r"([\d.]+) (bytes|[KMG]i?B)", text)


def read(size: tuple[str, str]) -> tuple[float, str]:
    return float(size[0]), size[1].replace("iB", "B")


def unknown(size: str) -> bool:
    """Whether the driver says so that it does not know."""
    return size.startswith(("17179869184.00", "0.00"))


def numbers_of(message: OutOfMemoryMessage) -> list[int]:
    fields = [getattr(message, name) for name in type(message).model_fields if name.endswith("_bytes")]
    return [*(each for each in fields if each), *(each.nbytes for each in message.others)]


def scale(nbytes: int) -> tuple[float, str]:
    """As torch writes it, which changes the unit at 1024 of it."""
    for unit, name in ((GIB, "GB"), (MIB, "MB"), (KIB, "KB")):
        if nbytes > unit:
            return nbytes / unit, name
    return nbytes, "bytes"


def test_cached_is_beside_what_is_allocated_and_reserved_has_it_within() -> None:
    old = in_message("Tried to allocate 1.00 GiB (GPU 0; 8.00 GiB total capacity; 5.00 GiB already allocated; "
                     "0 bytes free; 512.00 MiB cached)")  # fmt: skip
    later = in_message("Tried to allocate 1.00 GiB (GPU 0; 8.00 GiB total capacity; 5.00 GiB already allocated; "
                       "0 bytes free; 5.50 GiB reserved in total by PyTorch)")  # fmt: skip
    for message in (old, later):
        assert (message.cached_bytes, message.reserved_bytes) == (512 * MIB, 5 * GIB + 512 * MIB)
        assert message.outside_bytes == 2 * GIB + 512 * MIB
        assert (message.missing_bytes, message.missing_packed_bytes) == (GIB, 512 * MIB)


NEW = (
    "Tried to allocate 1.00 GiB. GPU 3 has a total capacity of 16.00 GiB of which {free} is free. {used}Of the "
    "allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated."
)
CAUSES = {
    "size": {"free": "512.00 MiB", "used": "", "allocated": "15.00 GiB", "cached": "10.00 MiB"},
    "fragmentation": {"free": "512.00 MiB", "used": "", "allocated": "11.00 GiB", "cached": "4.00 GiB"},
    "free": {"free": "5.00 GiB", "used": "", "allocated": "8.00 GiB", "cached": "10.00 MiB"},
    "other-process": {
        "free": "512.00 MiB",
        "used": "Process 7 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has 6.50 GiB memory "
        "in use. ",
        "allocated": "6.00 GiB",
        "cached": "10.00 MiB",
    },
    "context": {
        "free": "512.00 MiB",
        "used": "Including non-PyTorch memory, this process has 15.40 GiB memory in use. ",
        "allocated": "6.00 GiB",
        "cached": "10.00 MiB",
    },
    "limit": {
        "free": "8.00 GiB", "used": "", "allocated": "7.80 GiB", "cached": "10.00 MiB"
    },
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause(cause: str) -> None:
    text = NEW.format(**CAUSES[cause])
    if cause == "limit":
        text = text.replace("Of the", "8.00 GiB allowed; Of the")
    message = in_message(text)
    assert message.cause == cause
    assert message.device == 3


def test_a_request_that_no_card_holds_and_one_of_the_host() -> None:
    text = NEW.format(**CAUSES["size"]).replace("1.00 GiB", "16.01 GiB")
    assert describe_cause(in_message(text)) == "the request alone is larger than the card: 16.0 GiB of 16.0 GiB"
    host = only("RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 67108864 bytes.")  # fmt: skip
    assert (host.cause, host.api, host.requested_bytes) == ("host", "CPU", 64 * MIB)


def test_a_process_in_a_container_is_found_among_those_of_the_driver() -> None:
    used = "Process 562167 has 15.45 GiB memory in use. "
    message = in_message(NEW.format(**{**CAUSES["size"], "used": used}))
    assert message.others == ()
    assert message.process_bytes == round(15.45 * GIB)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("RuntimeError: CUDA error: out of memory", "driver"),
        ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/THCStorage.cu:58", "driver"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuBLAS"),
        ("node1:7:19 [0] enqueue.cc:74 NCCL WARN Cuda failure 'out of memory'", "NCCL"),
    ],
)
def test_what_a_library_says_has_no_numbers(text: str, source: str) -> None:
    message = only(text)
    assert (message.source, message.cause, message.requested_bytes) == (source, "unknown", None)


LOG = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/data/train.py", line 30, in <module>
[rank0]:   File "/data/train.py", line 20, in <module>
[rank1]:   File "/env/lib/python3.12/site-packages/torch/nn/modules/module.py", line 9, in _call_impl
[rank0]: torch.OutOfMemoryError: CUDA out of memory. {0}
[rank1]: torch.OutOfMemoryError: CUDA out of memory. {0}
[rank1]: torch.OutOfMemoryError: CUDA out of memory. {0}
torch.OutOfMemoryError: CUDA out of memory.
"""


def test_the_log_of_a_job_has_a_message_of_each_rank_once() -> None:
    found = read_messages("step 1\n" * 5 + LOG.format(NEW.format(**CAUSES["size"])))
    assert [(each.rank, each.place, each.line, each.count) for each in found] == [
        (0, "/data/train.py:20", 11, 1),
        (1, "/data/train.py:30", 12, 2),
    ]


def test_a_process_beside_one_of_several_ranks_is_named() -> None:
    """Every message is of the same cause by its numbers, and yet one card has something else on it."""
    numbers = {
        rank: f"GPU {rank} has a total capacity of 79.11 GiB of which {free} GiB is free. {other}Including non-PyTorch "
        "memory, this process has 73.90 GiB memory in use. Of the allocated memory 67.62 GiB is allocated by PyTorch, "
        "and 4.41 GiB is reserved by PyTorch but unallocated."
        for rank, free, other in ((0, 5.21, ""), (1, 2.05, "Process 901223 has 3.16 GiB memory in use. "))
    }
    head = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB."
    found = read_messages("\n".join(f"[rank{rank}]: {head} {each}" for rank, each in numbers.items()))
    assert [each.cause for each in found] == ["size", "size"]
    said = [each.text for each in next(shortage_sections(found)).facts]
    assert said[0].startswith("2 of 2 ranks, all for the same cause, and in 1 another process takes memory, too; ")
    assert said[1] == "line 2: process 901223 has 3.16 GiB on GPU 1 of rank 1"
    assert "or all but: 67.6 GiB are allocated. What is unused, 4.41 GiB, would be enough" in said[2]
    alone = [each.text for each in next(shortage_sections(found[:1])).facts]
    assert not any("process 901223" in each for each in alone)


CROWDED = (
    "CUDA out of memory. Tried to allocate 0.91 GiB. GPU {rank} has a total capacity of {all} GiB of which 0.31 GiB is "
    "free. {others}Including non-PyTorch memory, this process has {own} GiB memory in use. Of the allocated memory "
    "{own} GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("said", ["(pid: {})", "Sending process {} closing signal SIGTERM", "n7:{}:9 [1] NCCL INFO x"])
def test_another_rank_that_opens_the_card_is_named_where_the_log_has_it(said: str) -> None:
    text = "Process 17 has 504.00 MiB memory in use. Process 18 has 504.00 MiB memory in use. "
    message = CROWDED.format(rank=0, all=8, own=6, others=text)
    (found,) = read_messages(f"{message}\n{said.format(17)}\n{said.format(18)}")
    facts = next(shortage_sections([found])).facts
    assert facts[-1].text.startswith("2 other ranks open GPU 0, too, and take 0.98 GiB there: torch.cuda.set_device")
    assert found.cause == "other-process"
    assert "end them" not in " ".join(each.text for each in facts)
    assert [row[3] for row in card_parts(found) if row[0].startswith("process")] == ["another rank of the job"] * 2
    (found,) = read_messages(f"{message}\n{said.format(19)}")
    assert not any(each.is_rank for each in found.others)


@pytest.mark.parametrize(("mib", "are_ranks"), [(504, True), (2504, False)])
def test_as_many_contexts_as_other_ranks_are_theirs(mib: int, are_ranks: bool) -> None:
    text = f"Process 17 has {mib}.00 MiB memory in use. Process 18 has {mib}.00 MiB memory in use. "
    numbers = {"all": 80, "own": 79}
    lines = [CROWDED.format(rank=rank, others="" if rank else text, **numbers) for rank in range(3)]
    found = read_messages("\n".join(f"[rank{rank}]: {line}" for rank, line in enumerate(lines)))
    assert [each.is_rank for each in found[0].others] == [are_ranks] * 2
    said = " ".join(each.text for each in next(shortage_sections(found)).facts)
    assert ("2 other ranks open GPU 0 of rank 0, too" in said) == are_ranks
    assert ("in 1 another process takes memory" in said) != are_ranks


WRAPPED = """\
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate
[rank0]: 1.00 GiB. GPU 0 has a total
[rank0]: capacity of 16.00 GiB of which 512.00 MiB is free.
"""
TRACEBACKS = {
    "notebook": "<ipython-input-5-ab> in <module>\n      2 x\n----> 3 model(x)\n\n~/site-packages/torch/a.py in f()\n"
    "----> 9     return g\n",
    "newer notebook": "Cell In[5], line 3\n      2 x\nFile ~/site-packages/torch/a.py:7, in f(self)\n",
    "rich": "│ /data/train.py:15 in main          │\n│ /env/lib/python3.10/site-packages/t.py:3 in f │\n",
}
PLACES = {"notebook": "<ipython-input-5-ab>:3", "newer notebook": "Cell In[5]:3", "rich": "/data/train.py:15"}


def test_a_message_that_a_terminal_wrapped() -> None:
    message = only(WRAPPED)
    assert (message.requested_bytes, message.capacity_bytes, message.free_bytes) == (GIB, 16 * GIB, 512 * MIB)


@pytest.mark.parametrize("kind", TRACEBACKS)
def test_the_line_of_the_users_own_is_found_in(kind: str) -> None:
    assert only(f"{TRACEBACKS[kind]}RuntimeError: CUDA error: out of memory").place == PLACES[kind]


def test_a_text_without_a_message_has_none() -> None:
    assert read_messages("nothing of the kind: out of disk space") == ()


CARD: list[dict[str, str]] = json.loads((Path(__file__).parents[1] / "data/h200_messages.json").read_text())
"""What torch 2.11 wrote on an H200, by the situation that a small program made there."""


@pytest.mark.parametrize("row", CARD, ids=[row["situation"] for row in CARD])
def test_what_a_card_wrote_has_the_cause_that_its_program_made(row: dict[str, str]) -> None:
    message = only(row["stderr"])
    other = {
        "another process": "other-process",
        "size": "request",
        "fraction": "limit",
        "context full": "unknown",  # the driver's own words, without a number
        "pinned": "unknown",
    }
    assert message.cause == other.get(row["situation"], "size")
    file, _, line = message.place.partition(":")
    assert file == f"{row['situation'].replace(' ', '_')}.py"
    wanted = [number for number, text in enumerate(row["program"].splitlines(), 1) if text in row["stderr"]]
    assert int(line) in wanted
