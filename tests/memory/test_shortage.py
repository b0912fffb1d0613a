"""Messages of cards that ran out of memory: read from any text, their numbers, and the cause that follows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from fxmem.memory.shortage import all_formats, find_words, read_messages
from fxmem.records.shortage import Cause, OutOfMemoryMessage
from fxmem.show.shortage_facts import card_parts, describe_cause, shortage_facts, shortage_sections

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PUBLISHED: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/oom_messages.json").read_text())
"""Messages as people published them, with the thread, and the cause that it ended with, where it ended with one.
`graph` is memory that autograd kept for a backward that never came: of that a message has no number."""

FORMATS: list[dict[str, str]] = json.loads((Path(__file__).parents[1] / "data/oom_formats.json").read_text())
"""A line of public threads in each other format, who says it, and what ran out."""


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


PAGE = Path(__file__).parents[2] / "benchmarks/results/oom-messages.md"
FORMS = {
    "Allocation on device": "cudaMallocAsync",
    "MPS": "MPS",
    "cached)": "1.0",
    "reserved in total": "1.4",
    "private pools": "2.3",
    "of which": "2.1",
}


def test_the_page_lists_every_message() -> None:
    """`FXMEM_UPDATE=1` writes its tables anew."""
    text = new = PAGE.read_text(encoding="utf-8")
    formats = [
        f"| [{name_thread(row['thread'])}][f{number}] | {row['source'] or 'PyTorch'} | {row['cause']} |"
        for number, row in enumerate(FORMATS, 1)
    ]
    messages = [list_message(number, row) for number, row in enumerate(PUBLISHED, 1)]
    for head, rows in (("| Thread | Form |", messages), ("| Thread | Says it |", formats)):
        table = text[text.index(head) :].partition("\n\n")[0]
        new = new.replace(table, "\n".join([*table.splitlines()[:2], *rows]))
    for first, listed in (("1", PUBLISHED), ("f1", FORMATS)):
        links = text[text.index(f"\n[{first}]: ") + 1 :].splitlines()[: len(listed)]
        targets = [f"[{first[:-1]}{number}]: {row['thread']}" for number, row in enumerate(listed, 1)]
        new = new.replace("\n".join(links), "\n".join(targets))
    if os.environ.get("FXMEM_UPDATE"):
        PAGE.write_text(new, encoding="utf-8")
    else:
        assert text == new


def name_thread(thread: str) -> str:
    _, project, _, number = thread.rsplit("/", 3)
    return f"Stack Overflow {number}" if "stackoverflow" in thread else f"{project} {number}"


def list_message(number: int, row: dict[str, Any]) -> str:
    message, thread = only(row["message"]), row["thread"]
    form = next((form for words, form in FORMS.items() if words in row["message"]), "no numbers")
    mark = "" if not row["ended"] else "yes" if message.cause == row["ended"] else "**no**"
    answer = f"{row['ended']}: {row['answer']}" if row["ended"] else "no answer"
    return f"| [{name_thread(thread)}][{number}] | {form} | {answer} | {message.cause} | {mark} |"


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


@pytest.mark.parametrize(("held", "cause"), [("1.90 GiB", "other-process"), ("0.40 GiB", "size")])
def test_a_display_is_no_other_process(held: str, cause: str) -> None:
    """Of a card of 4 GiB, 0.4 GiB are a tenth, and what a desktop takes (MyGirlGPT 11)."""
    free, used = ("10.00 MiB", f"Process 7 has {held} memory in use. Including non-PyTorch memory, this process has ")
    used += "2.09 GiB memory in use. " if cause == "other-process" else "3.59 GiB memory in use. "
    allocated = "1.70 GiB" if cause == "other-process" else "3.20 GiB"
    text = NEW.format(free=free, used=used, allocated=allocated, cached="2.00 MiB").replace("16.00 GiB", "4.00 GiB")
    assert in_message(text.replace("1.00 GiB", "20.00 MiB")).cause == cause


MPS = "MPS backend out of memory (MPS allocated: {}, other allocations: {}, max allowed: {}). Tried to allocate {} on"


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        (("9.57 GiB", "17.35 GiB", "27.20 GiB", "292.50 MiB"), "context"),  # ComfyUI 7440
        (("6.04 GB", "1.04 GB", "6.77 GB", "459.07 MB"), "size"),  # clip-interrogator-ext 74
    ],
)
def test_what_metal_holds_beside_the_allocator_is_the_process_s_own(numbers: tuple[str, ...], cause: str) -> None:
    """`currentAllocatedSize` of Metal, less the allocator's: `MPSAllocator.mm`."""
    assert only(MPS.format(*numbers)).cause == cause


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


@pytest.mark.parametrize("row", FORMATS, ids=[f"{row['source']} {number}" for number, row in enumerate(FORMATS)])
def test_what_others_say_has_its_source_and_its_cause(row: dict[str, str]) -> None:
    message = only(f"step 1\n{row['message']}\nstep 2: loss 0.1455, exit code 1")
    assert (message.cause, message.source) == (row["cause"], row["source"])
    assert (message.api == "CPU") == (row["cause"] in {"host", "shm", "files"})
    said = " ".join(each.text for each in shortage_facts(message))
    assert "None" not in said
    assert "CUDA_LAUNCH_BLOCKING" not in said


def test_every_format_is_seen_in_a_thread_and_has_words() -> None:
    sources = {each.source for each in all_formats()}
    assert sources == {"", "cuSOLVER", *(row["source"] for row in FORMATS)}
    assert all(find_words(cause).change for cause in get_args(Cause))


def test_what_a_host_or_a_worker_says_has_its_bytes() -> None:
    asked = {row["source"]: only(row["message"]).requested_bytes for row in FORMATS}
    assert asked["NumPy"] is None
    assert (asked["XLA"], asked["Triton"], asked["mmap"]) == (1740687616, 110592, 4096)
    assert only(FORMATS[-2]["message"]).requested_bytes == 117 * GIB


def test_a_kill_counts_only_where_nothing_else_ran_out() -> None:
    killed = "failed (exitcode: -9) local_rank: 1 (pid: 14447)"
    assert [each.cause for each in read_messages(killed)] == ["host"]
    assert [each.cause for each in read_messages(f"{killed}\nCUDA error: out of memory")] == ["unknown"]
    unnamed = "context_gpu.cu:343: out of memory"
    assert [each.source for each in read_messages(unnamed)] == ["a library"]
    assert [each.source for each in read_messages(f"{unnamed}\nCUDA error: out of memory")] == ["driver"]


@pytest.mark.parametrize(
    "text",
    [
        "Killed process 3 on request",
        "exit code 1370",
        "loss 1455",
        "No space left on device: '/data'",
        "except MemoryError:  # out of memory",
        "DataLoader worker (pid 25902) is killed by signal: Segmentation fault",  # MhLiao/DB 94
        "A worker process was unexpectedly terminated. The exit codes of the workers are {SIGSEGV(-11)}",  # gcpy 86
        "slurmstepd: error: Exceeded step memory limit at some point.",  # galaxy 2309: of jobs that succeeded
        "job 3264830 exceeded MEM usage soft limit",  # cbio-cluster 257: a warning
        "The node had condition: [DiskPressure].",
        "if you run out of memory, lower max_model_len; ran out of memory trying to allocate 2.60GiB, not a failure",
        "    except torch.cuda.OutOfMemoryError:\n        if isinstance(error, torch.OutOfMemoryError):",
        "the loader cannot allocate memory in static TLS block; failed to allocate port 29500, or a node",
        "exit status: 1370; terminated with an error exit status (143)",
        '"OOMKilled": false, "ExitCode": 1',
        "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
        "OSError: [Errno 28] No space left on device",
        "unable to open shared memory object </torch_1_2> in read-write mode: No such file or directory (2)",
        "MemoryError: Integer overflow in ysize",  # openslide-python 31: a size that no memory was asked for
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory "
        "usage. (2) ray stop --force is called.",  # simpleRL-reason 25
        "warning: this may lead to out of memory errors; Retrying after OOM; use checkpoints to avoid CUDA OOM",
        "Worker terminated due to an illegal memory access; GPU memory allocated: 12 GiB",
        "sbatch: error: Memory specification can not be satisfied",  # slurm_exporter 168
        "Allocation of 1234 exceeds 10% of free system memory.",
        "grpc: RESOURCE_EXHAUSTED: Received message larger than max (12 vs. 4)",
        "[MPSNDArray, initWithBuffer:descriptor:] Error: buffer is not large enough. Must be 1 byte",  # pytorch 77851
        "srun: error: node1: task 0: Exited with exit code 1; the paging file is too large for the drive",
        "Exit code: 1073740791 (0xC0000409) - Stack buffer overflow",  # speechlib 54
        "##[error]The runner has received a shutdown signal.",  # karpenter-provider-azure 1768
        "Failed to create CUDAExecutionProvider; failed to allocate an address, cannot allocate tokens",
    ],
)
def test_what_no_memory_ran_out_in_is_no_message(text: str) -> None:
    assert read_messages(text) == ()


def test_a_limit_is_found_within_its_rounding_and_stands_in_the_table() -> None:
    """ROCm/TheRock 2118: 1.05 GiB allowed, 1072.00 MiB reserved, 2.00 MiB asked for."""
    (row,) = [row for row in FORMATS if row["cause"] == "limit" and not row["source"]]
    found = only(row["message"])
    assert ("  limit", "1.05 GiB") in [each[:2] for each in card_parts(found)]
    assert describe_cause(found) == "the process may take no more of the card: 1.05 GiB of 288.0 GiB"
    far = only(row["message"].replace("1.05 GiB allowed", "1.50 GiB allowed"))
    assert far.cause == "free"


def test_two_messages_side_by_side_are_both_read() -> None:
    found = read_messages(f"CUDA error: out of memory; CUDA out of memory. {NEW.format(**CAUSES['size'])}")
    assert [(each.source, each.cause) for each in found] == [("driver", "unknown"), ("", "size")]


FSDP = """\
Traceback (most recent call last):
  File "/data/train.py", line 9, in <module>
    {user}
  File "/env/lib/python3.10/site-packages/torch/distributed/fsdp/{file}", line 483, in {name}
    {code}
torch.OutOfMemoryError: CUDA out of memory. """


@pytest.mark.parametrize(
    ("file", "name", "is_setup"),
    [("fully_sharded_data_parallel.py", "__init__", True), ("fully_sharded_data_parallel.py", "forward", False)],
)
def test_a_smaller_batch_is_no_advice_where_a_model_is_wrapped(file: str, name: str, is_setup: bool) -> None:
    """pytorch 150096 is of the first kind."""
    above = FSDP.format(user="main()", file=file, name=name, code="_auto_wrap(")
    found = only(above + NEW.format(**CAUSES["size"]))
    change = next(each.text for each in shortage_facts(found) if each.label == "To do")
    assert (found.cause, found.is_setup, found.place) == ("size", is_setup, "/data/train.py:9")
    assert ("a smaller batch" in change) is not is_setup
    driver = only(above.partition("torch.OutOf")[0] + "RuntimeError: CUDA error: out of memory")
    changes = [each.text for each in shortage_facts(driver) if each.label == "To do"]
    assert ("a batch plays no part" in changes[0]) is is_setup


@pytest.mark.parametrize("quote", ['"', '\\"'])
def test_a_traceback_within_one_line_of_a_log_has_its_place(quote: str) -> None:
    lines = FSDP.format(user="main()", file="x.py", name="forward", code="f()").replace('"', quote).splitlines()
    text = "\\n".join(lines) + NEW.format(**CAUSES["size"])
    (found,) = read_messages(f'{{"rank": 1, "message": "other"}}\n[rank3]: {{"message": "{text}"}}\n')
    assert (found.place, found.rank, found.line) == ("/data/train.py:9", 3, 2)


def test_where_a_loader_is_interrupted_is_no_place() -> None:
    text = """Traceback (most recent call last):
  File "train.py", line 88, in <module>
    loss.backward()
  File "/env/lib/python3.11/site-packages/torch/utils/data/_utils/signal_handling.py", line 66, in handler
    _error_if_any_worker_fails()
RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. """
    assert (only(text).place, only(text).cause) == ("", "host")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("java.lang.OutOfMemoryError: Java heap space", "host"),
        ("{}: out of memory on device 0", "unknown"),
        ("{}: failed to allocate 12.5 GiB of system memory", "host"),
        ("{}: could not allocate 1024 bytes of VRAM", "unknown"),
        ("{}: not enough VRAM for this model", "unknown"),
        ("{}: the pod was evicted, as it ran low on memory", "host"),
        ("{}: the KV cache pool ran out of memory", "limit"),
        ("{}: Bus error (core dumped)", "shm"),
        ("{}: accept4: Too many open files", "files"),
        ("显存不足", "unknown"),
    ],
)
def test_whose_memory_ran_out_follows_from_the_words_of_its_line(said: str, cause: str) -> None:
    assert [each.cause for each in read_messages(f"step 1\n{said.format('anything')}\nstep 2")] == [cause]
    assert read_messages(f"if you see this: {said.format('anything')}") == ()


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory ",
        "CUDA out of memory. Tried to allocate 2.00 GiB ",
        "pid=(",
        "if out of memory; fail to alloc ",
    ],
)
def test_the_work_is_linear_in_a_line(words: str) -> None:
    """Characters that patterns are tried on, or copied, do not grow with the square of a line."""

    class Counted(str):
        copied = 0

        def __getitem__(self, at: Any) -> str:
            part = super().__getitem__(at)
            Counted.copied += len(part)
            return part

    work = []
    for many in (200, 400):
        Counted.copied = 0
        read_messages(Counted(words * many + "CUDA out of memory" * (not words.startswith("if"))))
        work.append(Counted.copied)
    assert work[1] <= 2.1 * work[0] + 1000


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
        "pinned": "host",
    }
    assert message.cause == other.get(row["situation"], "size")
    file, _, line = message.place.partition(":")
    assert file == f"{row['situation'].replace(' ', '_')}.py"
    wanted = [number for number, text in enumerate(row["program"].splitlines(), 1) if text in row["stderr"]]
    assert int(line) in wanted
