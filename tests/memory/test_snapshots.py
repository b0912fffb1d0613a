"""Memory snapshots of any length: read in pieces as they are read whole, and what they say."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from fxmem.errors import UsageError
from fxmem.memory.snapshots import is_pickle, read_dump, report_dump
from fxmem.memory.snapshots.reader import StackFrame, find_place
from fxmem.records.plain_pickle import PlainPickleError, References, stream
from fxmem.records.shortage import Explanation, GrownLine, SnapshotReport
from fxmem.show.html import snapshot_html
from fxmem.show.shortage_facts import hold_table, snapshot_facts, snapshot_sections

Content = dict[str, Any]
MIB = 1 << 20
FIELDS = ("action", "addr", "size", "frames")


def frame(line: int, file: str = "/data/train.py", name: str = "step") -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


LINES = {line: frame(line) for line in range(40)}


def event(action: str, address: int, nbytes: int, *lines: int, **more: Any) -> dict[str, Any]:
    frames = [LINES[line] for line in lines]
    return {"action": action, "addr": address, "size": nbytes, "stream": 0, "frames": frames, "time_us": 7, **more}


def segment(address: int, nbytes: int, *blocks: tuple[int, str, int], device: int = 0) -> dict[str, Any]:
    """A segment of blocks: bytes, state, and the line that allocated them."""
    found = []
    for size, state, line in blocks:
        frames = [LINES[line]] if state != "inactive" else []
        found.append({"address": address, "size": size, "requested_size": size, "state": state, "frames": frames})
        address += size
    return {"device": device, "address": found[0]["address"], "total_size": nbytes, "blocks": found}


def report_of(path: Path, trace: list[Any], *segments: Any, **more: Any) -> SnapshotReport:
    path.write_bytes(pickle.dumps({"segments": list(segments), "device_traces": [trace], **more}))
    return report_dump(read_dump(path))


# --- reading in pieces ------------------------------------------------------------------------------------------------


def made_up(seed: int, events: int = 1500) -> Content:
    """Histories of two devices with everything that a dump of torch has."""
    choose = random.Random(seed)
    traces = []
    for _ in range(2):
        trace = []
        for number in range(choose.randrange(events)):
            frames = [choose.choice(list(LINES.values())) for _ in range(choose.choice((0, 1, 3, 1200)))]
            action = choose.choice(("alloc", "free_requested", "segment_alloc", "snapshot"))
            entry = event(action, choose.randrange(1 << choose.choice((3, 30, 47))), choose.randrange(1 << 33))
            entry["frames"] = frames
            trace.append(entry)
            if action == "free_requested":
                trace.append({**entry, "action": "free_completed"})  # which has the same list
            if number % 400 == 7:
                trace.append({"action": "oom", "device_free": 5, "size": 9, "stream": 0, "frames": frames})
        traces.append(trace)
    annotations = [{"stage": "END", "name": "Optimizer.step#A", "device": 0, "time_us": 7}] * 3
    return {"segments": [], "device_traces": traces, "external_annotations": annotations}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_events_are_those_that_pickle_reads(seed: int, protocol: int) -> None:
    content = made_up(seed, 300 if protocol == 2 else 1500)
    found: dict[int, list[Any]] = {}
    rest, resolve = stream(
        pickle.dumps(content, protocol), "device_traces", FIELDS, lambda at, rows: found.setdefault(at, []).extend(rows)
    )
    for at, trace in enumerate(content["device_traces"]):
        rows = [(*row[:3], resolve(row[3]) if isinstance(row[3], References) else row[3]) for row in found.get(at, [])]
        assert rows == [tuple(entry.get(field) for field in FIELDS) for entry in trace]
    assert rest == {**content, "device_traces": [[], []]}


def test_what_was_handed_on_cannot_be_referred_to() -> None:
    entry = event("alloc", 1, 2)
    with pytest.raises(PlainPickleError, match="refers to an entry of its history"):
        stream(
            pickle.dumps({"device_traces": [[entry, event("alloc", 3, 4)]], "more": entry}),
            "device_traces",
            FIELDS,
            ignore,
        )


def ignore(at: int, rows: list[Any]) -> None:
    """Take nothing."""


def test_a_changed_file_is_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    written, choose, path = pickle.dumps(made_up(1, 40)), random.Random(0), tmp_path / "changed.pickle"
    outcomes = set()
    for _ in range(250):
        changed = bytearray(written)
        for _ in range(choose.choice((1, 1, 3))):
            changed[choose.randrange(2, len(changed))] = choose.randrange(256)
        path.write_bytes(bytes(changed[: choose.choice((len(changed), choose.randrange(3, len(changed))))]))
        try:
            report_dump(read_dump(path))
            outcomes.add("read")
        except UsageError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x80\x04\x95", "is no pickle, or only a part of one"),
        (pickle.dumps([1]), "holds no snapshot: segments is missing"),
        (pickle.dumps({"segments": [], "device_traces": []}), "holds no history; call torch.cuda.memory"),
        (pickle.dumps({"segments": [], "device_traces": [[event("snapshot", 0, 0)]]}), "holds no history"),
        (pickle.dumps({"segments": [], "device_traces": [[1, 2]]}), "history of something else than events"),
        (pickle.dumps({"segments": [], "device_traces": [[event("alloc", 0, -1)]]}), "size is no number of bytes"),
        (pickle.dumps({"segments": [], "device_traces": [[event("alloc", 1 << 64, 1)]]}), "addr is no number"),
        (pickle.dumps({"segments": [1], "device_traces": [[event("alloc", 0, 1)]]}), "blocks is missing"),
        (pickle.dumps({"segments": [], "device_traces": [[event("alloc", 0, 1)]], "x": Path}), "more than plain data"),
    ],
)
def test_what_is_no_snapshot_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    assert is_pickle(path)
    with pytest.raises(UsageError, match=why):
        read_dump(path)


def test_only_a_regular_file_that_begins_as_one_is_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"out of memory")
    assert not any(map(is_pickle, (tmp_path, tmp_path / "a", tmp_path / "none", Path("/dev/null"))))


# --- what it says -----------------------------------------------------------------------------------------------------


def test_who_holds_the_peak(tmp_path: Path) -> None:
    trace = [
        event("alloc", 100, 3 * MIB, 1, 9),
        event("alloc", 200, 5 * MIB, 2, 9),
        event("free_requested", 900, 7 * MIB),  # older than the history
        event("free_completed", 900, 7 * MIB),
        event("alloc", 300, 11 * MIB, 1, 8),  # the peak: 13 older, 3, 5, 11
        event("free_requested", 200, 5 * MIB),
        event("alloc", 400, MIB),
        event("free_completed", 200, 5 * MIB),  # late: another block had to come from elsewhere
        event("free_requested", 300, 11 * MIB),
        event("free_completed", 300, 11 * MIB),
        event("free_requested", 400, MIB),
        event("free_completed", 400, MIB),
    ]
    report = report_of(
        tmp_path / "a",
        trace,
        segment(50, 13 * MIB, (13 * MIB, "active_allocated", 3)),
        segment(100, 3 * MIB, (3 * MIB, "active_allocated", 1)),
    )
    assert (report.peak_bytes, report.peak_event, report.events) == (32 * MIB, 4, 12)
    assert report.older_bytes == 13 * MIB
    assert [(each.place, each.nbytes, each.count) for each in report.lines] == [
        ("/data/train.py:1", 14 * MIB, 2),
        ("/data/train.py:3", 13 * MIB, 1),
        ("/data/train.py:2", 5 * MIB, 1),
    ]
    assert report.stacks[1].frames == ("step (/data/train.py:1)", "step (/data/train.py:8)")
    assert report.waiting_bytes == 5 * MIB


STEP = [event("alloc", 1, MIB, 1), event("free_requested", 1, MIB, 1)]


@pytest.mark.parametrize("annotated", [False, True])
def test_a_line_that_keeps_more_and_more_is_named_and_a_steady_one_is_not(tmp_path: Path, annotated: bool) -> None:
    trace, ends = [], []
    for step in range(8):
        for each in (*STEP, event("alloc", 1000 + step, 7, 2, 9)):
            trace.append({**each, "time_us": len(trace)})
        ends.append({"stage": "END", "name": "Optimizer.step#SGD", "device": 0, "time_us": len(trace)})
    held = segment(1000, 80, *[(10, "active_allocated", 2)] * 8)
    report = report_of(tmp_path / "a", trace, held, **({"external_annotations": ends} if annotated else {}))
    assert report.steps == (8 if annotated else 0)
    grown = (7, 49) if annotated else (6, 42)
    assert report.grown == (GrownLine(place="/data/train.py:2", nbytes=grown[1], blocks=grown[0]),)
    steady = report_of(tmp_path / "b", STEP * 8, segment(1, MIB, (MIB, "inactive", 0)))
    assert steady.grown == ()


def test_what_lies_in_pieces_and_what_is_in_the_way(tmp_path: Path) -> None:
    broken = segment(0, 100, (40, "inactive", 0), (10, "active_allocated", 4), (50, "inactive", 0))
    whole = segment(1000, 64, (64, "inactive", 0))
    full = segment(2000, 32, (30, "active_allocated", 5), (2, "active_awaiting_free", 5))
    report = report_of(tmp_path / "a", [event("alloc", 2000, 30, 5)], broken, whole, full)
    assert (report.reserved_bytes, report.allocated_bytes, report.cached_bytes) == (196, 40, 154)
    assert (report.releasable_bytes, report.largest_free_bytes) == (64, 64)
    assert [(each.place, each.nbytes, each.free_bytes) for each in report.in_the_way] == [("/data/train.py:4", 10, 90)]
    assert [[piece.state for piece in each.pieces] for each in report.segments] == [
        ["free", "used", "free"], ["free"], ["used", "waiting"],
    ]  # fmt: skip


def test_a_request_that_was_refused_has_its_cause(tmp_path: Path) -> None:
    refused = {"action": "oom", "device_free": 3 * MIB, "size": 20 * MIB, "stream": 0, "frames": [LINES[7]]}
    trace = [event("alloc", 100, 40 * MIB, 1), refused]
    held = segment(100, 100 * MIB, (40 * MIB, "active_allocated", 1), (60 * MIB, "inactive", 0))
    report = report_of(tmp_path / "a", trace, held)
    (message,) = report.shortages
    assert (message.place, message.cause) == ("/data/train.py:7", "fragmentation")
    assert (message.requested_bytes, message.free_bytes) == (20 * MIB, 3 * MIB)
    assert (message.allocated_bytes, message.reserved_bytes) == (40 * MIB, 100 * MIB)


@pytest.mark.parametrize(
    ("free", "asked", "before", "words"),
    [
        (3, 20, 3, "had the bytes, in pieces: 40.0 MiB allocated, 60.0 MiB unused in pieces, 3.00 MiB free"),
        (3, 90, 3, "really full: "),
        (90, 20, 90, "had the bytes free, which this process may not have"),
        (3, 200, 3, "too small for it, were it empty: "),
        (3, 70, 4000, "full of another process: "),
    ],
)
def test_a_snapshot_says_in_words_how_the_card_was(
    free: int, asked: int, before: int, words: str, tmp_path: Path
) -> None:
    refused = [
        {"action": "oom", "device_free": left * MIB, "size": size * MIB, "stream": 0, "frames": [LINES[7]]}
        for left, size in ((free, asked), (before, 5000))
    ]
    held = segment(100, 100 * MIB, (40 * MIB, "active_allocated", 1), (60 * MIB, "inactive", 0))
    report = report_of(tmp_path / "a", [event("alloc", 100, 40 * MIB, 1), *refused], held)
    facts = {each.label: each.text for each in snapshot_facts(report)}
    assert facts["Card"].startswith(words)
    has_other = before > free
    assert facts["Card"].endswith(" less than at another refusal" if has_other else "other processes (nvidia-smi)")
    assert facts["To do"]


def test_without_a_history_the_segments_say_who_holds_the_card(tmp_path: Path) -> None:
    """As torch 2.0 wrote one at an out of memory (Yiyi-philosophy/LLM-inference, oom_snapshot.pickle): the stack of a
    block is the newest of its own history."""
    held = segment(0, 100 * MIB, *[(MIB, "active_allocated", 0)] * 70, (30 * MIB, "active_allocated", 0))
    for number, block in enumerate(held["blocks"]):
        frames = [LINES[3 if number % 2 else 4]]
        block |= {"frames": None, "history": [{"addr": 0, "real_size": MIB, "frames": frames}, {"frames": [LINES[9]]}]}
    other = segment(1 << 40, 7 * MIB, (7 * MIB, "active_allocated", 5), device=1)
    report = report_of(tmp_path / "a", [], other, held, segment(1 << 41, 2 * MIB, (2 * MIB, "inactive", 0)))
    assert (report.device, report.events, report.peak_bytes, report.reserved_bytes) == (0, 0, 100 * MIB, 102 * MIB)
    assert [(each.place, each.nbytes, each.count) for each in report.lines] == [
        ("/data/train.py:4", 65 * MIB, 36),
        ("/data/train.py:3", 35 * MIB, 35),
    ]
    assert report.sizes == ((MIB, 70), (30 * MIB, 1))
    said = {each.label: each.text for each in snapshot_facts(report)}
    assert said["Alive"].endswith(
        "(104,857,600 bytes) when it was written, 98.0 % of what is reserved; it has no history"
    )
    assert said["Blocks"] == "70 of 1.00 MiB, 1 of 30.0 MiB"
    assert not {"Peak", "Grows", "Older"} & said.keys()
    assert hold_table(report, report.lines).columns[0].heading == "Alive, by line"
    page = snapshot_html(Explanation(source="a", snapshot=report))
    assert "Bytes over the history" not in page


def test_the_device_with_the_longest_history_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    traces = [[event("alloc", 1, 5, 1)], [event("alloc", 1, 7, 1), event("alloc", 2, 9, 1)], []]
    held = segment(1, 16, (16, "active_allocated", 1), device=1)
    path.write_bytes(pickle.dumps({"segments": [held], "device_traces": traces}))
    report = report_dump(read_dump(path))
    assert (report.device, report.others, report.events) == (1, 1, 2)


def test_a_stack_without_a_line_of_the_users_is_named_by_what_it_has() -> None:
    kernel = StackFrame("void at::native::(anonymous namespace)::sort_rows<float>(int)", "??", 0)
    call = StackFrame("at::_ops::mm::call(at::Tensor const&)", "??", 0)
    node = StackFrame("torch::autograd::generated::MmBackward0::apply(std::vector)", "Functions.cpp", 0)
    package = StackFrame("step", "/env/lib/python3.12/site-packages/torch/optim/adam.py", 9)
    assert find_place([kernel, call, node]) == "MmBackward0"
    assert find_place([kernel, call]) == "mm"
    assert find_place([kernel]) == "sort_rows"
    assert find_place([kernel, package]) == "torch/optim/adam.py:9"
    assert find_place([]) == ""


def test_a_snapshot_of_an_h200_says_what_the_card_said(tmp_path: Path) -> None:
    """`benchmarks/programs/card_programs/fragmented.py` printed the same peaks
    (`benchmarks/results/gpu/h200-runs-2026-11-27.json.gz`)."""
    path = tmp_path / "fragmented.pickle"
    path.write_bytes(gzip.decompress((Path(__file__).parents[1] / "data/h200_fragmented.pickle.gz").read_bytes()))
    found = report_dump(read_dump(path))
    assert found.peak_bytes == 4_600_036_360
    assert found.reserved_peak_bytes == 21_634_220_032
    said = {each.label: each.text for each in snapshot_facts(found)}
    above = "15.9 GiB more than was ever requested: kept in cache, or in pieces (fragmentation)"
    assert said["Reserved"] == f"20.1 GiB (21,634,220,032 bytes) at most, {above}"
    *_, stacks = snapshot_sections(found)
    assert [each.text[:3] for each in stacks.facts[1:]] == ["1. ", "2. ", "3. "]
    assert hold_table(found, found.lines).rows[-1].cells[1].text == "14.9 GiB"
    (refused,) = found.shortages
    assert (refused.requested_bytes, refused.place.rpartition("/")[2]) == (18_556_716_032, "fragmented.py:37")
    assert [(each.place.rpartition("/")[2], each.nbytes) for each in found.grown] == [("fragmented.py:24", 264 << 20)]
