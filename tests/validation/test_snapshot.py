"""Memory snapshots of cards: what the exporter writes is found again, what is changed in one is named, and a hostile
file is refused."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.published.traces import TRACES
from fxmem.__main__ import main
from fxmem.errors import UsageError
from fxmem.memory.allocator import AllocatorSettings, CachingAllocator
from fxmem.records.plain_pickle import PlainPickleError, stream
from fxmem.records.profile import Kind, Profile
from fxmem.records.shared import SharedVerdict
from fxmem.records.validation import LogSide, Quantity, Verdict
from fxmem.show.export import export
from fxmem.show.text.verdict import table
from fxmem.simulation.step.analysis import Analysis, analyze
from fxmem.validation.snapshot import measured_step, read_snapshot
from fxmem.validation.validate import validate
from fxmem.validation.verdict import verdict
from tests.profiles import small_profile

Content = dict[str, Any]
MIB = 1 << 20


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(300, 700), nn.Linear(700, 500), nn.LayerNorm(500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x).relu()))


X = torch.empty(40, 300, device="meta")


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyze(Layers, X, target="rtx4090")


@pytest.fixture
def content(analysis: Analysis) -> Content:
    """The step as the memory viewer gets it: the residents and the step, in the history of an empty device."""
    written = export(analysis.profile, analysis.timeline, "memory-viz", settings=AllocatorSettings())
    assert isinstance(written, bytes)
    found = load(written)
    assert found == pickle.loads(written)
    return dict(found)


def load(content: bytes) -> Any:
    """What a pickle holds, of which nothing is handed on."""
    return stream(content, "no such key", (), lambda at, rows: None)[0]


def held(path: Path, content: Content, **options: Any) -> Verdict:
    path.write_bytes(pickle.dumps(content))
    return validate(Layers, X, snapshot=path, target="rtx4090", **options)


def step_of(content: Content, profile: Profile) -> tuple[list[Any], list[Any]]:
    """The history, cut where the step begins: what is there before has a segment or a kind of its own."""
    (trace,) = content["device_traces"]
    residents = sum(1 for storage in profile.storages if storage.birth == 0 and storage.nbytes)
    places = [at for at, event in enumerate(trace) if event["action"] == "alloc"]
    cut = places[residents - 1] + 1
    return trace[:cut], trace[cut:]


# --- what is in a snapshot --------------------------------------------------------------------------------------------


def test_a_predicted_snapshot_is_found_again_without_a_difference(
    tmp_path: Path, analysis: Analysis, content: Content
) -> None:
    found = held(tmp_path / "step.pickle", content)
    assert found.differences == ()
    assert {each.quantity: each.error for each in found.comparisons} == {Quantity.REQUESTED: 0, Quantity.RESERVED: 0}
    assert (found.judged, found.within_tolerance) == (Quantity.REQUESTED, True)
    assert [share.predicted_bytes for share in found.shares] == [share.measured_bytes for share in found.shares]
    assert found.segments
    assert all(each.predicted == each.measured for each in found.segments)
    assert found.measurement.peak_phase is found.predicted.phase
    text = table(found)
    assert "there before the step" in text
    assert "Segments" in text
    assert "torch" not in text.partition("requested")[0]  # the file does not say which


def test_of_several_steps_the_last_whole_one_counts(tmp_path: Path, analysis: Analysis, content: Content) -> None:
    before, step = step_of(content, analysis.profile)
    evaluated = [  # what the program does after its last step, half a step long
        {"action": action, "addr": 1 << 50, "size": 12_345, "stream": 0, "frames": []}
        for _ in range(20)
        for action in ("alloc", "free_requested", "free_completed")
    ]
    content["device_traces"] = [[], [*before, *map(dict, 3 * step), *evaluated]]
    for segment in content["segments"]:
        segment["device"] = 1
    found = held(tmp_path / "steps.pickle", content)
    assert found.differences == ()
    allocations = sum(1 for event in before + 2 * step if event["action"] == "alloc")
    assert any(f"requests {allocations + 1:,} to " in note for note in found.measurement.notes)


def test_a_block_on_one_side_only_is_named_with_both_sides_lines(
    tmp_path: Path, analysis: Analysis, content: Content
) -> None:
    before, step = step_of(content, analysis.profile)
    at = next(at for at, event in enumerate(step) if event["action"] == "alloc" and event["size"] == 40 * 500 * 4)
    missing = {"addr": step[at]["addr"], "size": step[at]["size"]}
    last = next(
        index
        for index in range(at, len(step))
        if step[index]["action"] == "free_completed" and step[index]["addr"] == missing["addr"]
    )
    frames = [
        {"name": "torch::unwind::unwind()", "filename": "??", "line": 0},
        {"name": "void at::native::(anonymous namespace)::sort_rows<float>(int, float*)", "filename": "??", "line": 0},
        {"name": "train", "filename": "/data/train.py", "line": 27},
    ]
    extra = [
        {"action": action, "addr": 1 << 50, "size": 777, "stream": 0, "frames": frames}
        for action in ("alloc", "free_requested", "free_completed")
    ]
    step = [event for index, event in enumerate(step) if not (at <= index <= last and event["addr"] == missing["addr"])]
    content["device_traces"] = [[*before, *step[: at + 3], *extra, *step[at + 3 :]]]
    found = held(tmp_path / "step.pickle", content)
    mine, theirs = found.differences
    assert (mine.side, mine.nbytes, mine.frames) == (LogSide.PREDICTED, missing["size"], ())
    assert "test_snapshot.py:" in mine.line
    assert (theirs.side, theirs.nbytes) == (LogSide.MEASURED, 777)
    assert theirs.frames == ("at::native::sort_rows<float>", "train (/data/train.py:27)")
    assert "the card's: at::native::sort_rows<float>, train" in " ".join(table(found).split())


def test_what_only_one_side_has_before_the_step_is_named(tmp_path: Path, analysis: Analysis, content: Content) -> None:
    weight = next(each for each in analysis.profile.storages if each.name == "second.weight")
    for segment in content["segments"]:
        for block in segment["blocks"]:
            if block["requested_size"] == weight.nbytes:
                block["state"] = "inactive"
    _, step = step_of(content, analysis.profile)
    content["device_traces"] = [step]  # a history that begins with the step: recorded after the warm-up
    found = held(tmp_path / "step.pickle", content)
    (difference,) = found.differences
    copies = 3  # the weight and AdamW's two averages of it
    assert (difference.side, difference.nbytes, difference.count) == (LogSide.PREDICTED, weight.nbytes, copies)
    assert difference.position is None
    assert "3 blocks there before the step, only predicted: second.weight" in " ".join(table(found).split())
    assert any("older than the history" in note for note in found.measurement.notes)


def test_a_history_that_begins_within_the_step_says_so(tmp_path: Path, analysis: Analysis, content: Content) -> None:
    _, step = step_of(content, analysis.profile)
    content["device_traces"] = [step[len(step) // 4 :]]
    found = held(tmp_path / "step.pickle", content)
    assert any(note.startswith("the step's first ") for note in found.measurement.notes)
    assert {each.side for each in found.differences if each.position is not None} == {LogSide.PREDICTED}


def test_another_programs_history_is_compared_whole(tmp_path: Path) -> None:
    found = validate(
        nn.Linear(3, 2), torch.ones(1, 3), snapshot=write_trace(tmp_path, "sil_mem_snapshot"), target="rtx4090"
    )
    assert not found.within_tolerance
    assert any(note.startswith("where the step begins") for note in found.measurement.notes)


def write_trace(folder: Path, name: str) -> Path:
    """A recorded card's requests, as the snapshot that the card's process would write after them."""
    trace = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    allocator, blocks, sizes, history = CachingAllocator(), {}, {}, []
    for number, nbytes in enumerate(trace["start"]):
        blocks[number], sizes[number] = allocator.malloc(nbytes), nbytes
    number = len(blocks)
    for event in trace["events"]:
        reserved = allocator.reserved_bytes
        if event < 0:
            allocator.free(blocks[-1 - event])
            history.append({"action": "free_requested", "addr": blocks.pop(-1 - event), "size": sizes.pop(-1 - event)})
            continue
        blocks[number], sizes[number] = allocator.malloc(event), event
        if grown := allocator.reserved_bytes - reserved:
            history.append({"action": "segment_alloc", "addr": blocks[number], "size": grown})
        history.append({"action": "alloc", "addr": blocks[number], "size": event})
        number += 1
    state = [{"address": at, "size": sizes[n], "state": "active_allocated"} for n, at in blocks.items()]
    segment = {"device": 0, "address": 0, "total_size": allocator.reserved_bytes, "blocks": state}
    path = folder / f"{name}.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [history]}))
    return path


@pytest.mark.parametrize("name", ["sil_mem_snapshot", "kai_memory_files_memory_ctx128_forward"])
def test_a_recorded_cards_peaks_are_read(tmp_path: Path, name: str) -> None:
    trace = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    found = measured_step(small_profile(), read_snapshot(write_trace(tmp_path, name))).measurement
    sizes, signed = list(trace["start"]), []
    for event in trace["events"]:
        signed.append(event if event > 0 else -sizes[-1 - event])
        sizes += [event] * (event > 0)
    assert found.events == tuple(signed)
    assert found.resident_bytes == sum(trace["start"])
    assert found.peak_bytes == max(accumulate(signed, initial=sum(trace["start"])))
    assert found.reserved_bytes == trace["reserved"]


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_the_command_reads_a_snapshot(
    tmp_path: Path, content: Content, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("step.pickle").write_bytes(pickle.dumps(content))
    Path("own.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(3, 2)\n", encoding="utf-8")
    model = ["validate", "tests.validation.test_snapshot:Layers", "--input", "40x300", "--quiet"]
    assert main([*model, "--snapshot", "step.pickle", "--target", "rtx4090", "--share", "mine.json"]) == 0
    shared = SharedVerdict.model_validate_json(Path("mine.json").read_bytes())
    assert (shared.machine.name, shared.from_snapshot, shared.left_out) == ("rtx4090", True, ())
    assert [each.quantity.value for each in shared.comparisons[0]] == ["requested", "reserved"]
    assert "step.pickle" not in Path("mine.json").read_text(encoding="utf-8")
    assert "within tolerance: 0.0000%" in capsys.readouterr().out
    assert (
        main(["validate", "own.py:build", "--input", "1x3", "--quiet", "--snapshot", "step.pickle", "--target", "t4"])
        == 4
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"snapshot": "x.pickle"}, "the card that the snapshot was made on"),
        ({"snapshot": "x.pickle", "target": "cpu"}, "got the target cpu"),
        ({"snapshot": "x.pickle", "target": "t4"}, "No such file"),
        ({"target": "t4"}, "with snapshot only"),
    ],
)
def test_a_snapshot_comes_with_its_card(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        validate(nn.Linear(3, 2), torch.ones(1, 3), **options)


# --- hostile files ----------------------------------------------------------------------------------------------------


class Evil:
    """Calls something when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("run",)


def nested(depth: int) -> bytes:
    """A dict whose key is a tuple that takes 2 ** depth steps to hash."""
    doubled = b"".join(b"h" + bytes([at]) + b"\x86\x94" for at in range(depth))
    return b"\x80\x04})\x94" + doubled + b"K\x01s."


def laughing(times: int) -> Content:
    """A few entries that are there `times` times `times` times."""
    block = {"size": 1, "state": "active_allocated"}
    segment = {"address": 0, "total_size": 1, "blocks": [block] * times}
    event = {"action": "alloc", "addr": 1, "size": 1}
    return {"device_traces": [[event]], "segments": [segment] * times}


EVENT = {"action": "alloc", "addr": 1, "size": 1}
FOREVER: list[Any] = []
FOREVER.append(FOREVER)
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "only a part of one"),
    "no pickle": (lambda: b"PK\x03\x04", "more than plain data"),
    "a part": (lambda: pickle.dumps({"segments": [], "device_traces": [[EVENT]]})[:-9], "only a part of one"),
    "a global": (lambda: b"\x80\x04cos\nsystem\n.", "more than plain data: instruction 0x63 at byte 2"),
    "a global from the stack": (lambda: pickle.dumps(os.mkdir), "more than plain data"),
    "a call": (lambda: pickle.dumps({"segments": [Evil()]}), "more than plain data"),
    "a call in an old protocol": (lambda: pickle.dumps(Evil(), protocol=0), "more than plain data"),
    "an extension": (lambda: b"\x80\x04\x82\x01.", "more than plain data"),
    "a persistent object": (lambda: b"\x80\x04\x8c\x01aQ.", "more than plain data"),
    "a set": (lambda: pickle.dumps({1, 2}), "more than plain data"),
    "a place far away in the memo": (lambda: b"\x80\x04Nr\xff\xff\xff\xff.", "out of order"),
    "a string that is longer than the file": (lambda: b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f", "only a part of one"),
    "text that is none": (lambda: b"\x80\x04\x8c\x02\xed\xa0.", "no UTF-8"),
    "a number of 255 bytes": (lambda: b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".", "an integer of 255 bytes"),
    "marks without end": (lambda: b"\x80\x04" + b"(" * 10**6, "nested too deeply"),
    "dicts without end": (lambda: b"\x80\x04" + b"}" * 10**6, "more lists and dicts"),
    "two values": (lambda: b"\x80\x04NN.", "no pickle of one value"),
    "a key that takes for ever": (lambda: nested(60), "a key that is no string"),
    "numbers for keys": (lambda: pickle.dumps({1: 1}), "a key that is no string"),
    "items of what is no dict": (lambda: b"\x80\x04N\x8c\x01aNs.", "no dict"),
    "items of what is no list": (lambda: b"\x80\x04NNa.", "no list"),
    "a list": (lambda: pickle.dumps([1]), "holds no snapshot"),
    "a list in itself": (lambda: pickle.dumps({"device_traces": FOREVER, "segments": FOREVER}), "holds no history"),
    "no history": (lambda: pickle.dumps({"device_traces": [[]], "segments": []}), "_record_memory_history"),
    "one block a million times": (lambda: pickle.dumps(laughing(3000)), "more entries"),
    "negative bytes": (lambda: pickle.dumps({"device_traces": [[{**EVENT, "size": -1}]]}), "size is no number"),
    "bytes beyond any card": (lambda: pickle.dumps({"device_traces": [[{**EVENT, "size": 1 << 90}]]}), "size is no"),
    "words for bytes": (lambda: pickle.dumps({"device_traces": [[{**EVENT, "size": "8"}]]}), "size is no number"),
    "long settings": (
        lambda: pickle.dumps(
            {"device_traces": [[EVENT]], "segments": [], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "a" * 999}}
        ),
        "settings that are none",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    make, complaint = HOSTILE[what]
    path = tmp_path / "bad.pickle"
    path.write_bytes(make())
    with pytest.raises(UsageError) as refusal:
        read_snapshot(path)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert os.listdir() == ["bad.pickle"]


def test_settings_that_are_none_are_refused(tmp_path: Path, content: Content) -> None:
    content["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "no_such_setting:1"}
    with pytest.raises(UsageError, match="unknown key 'no_such_setting'"):
        held(tmp_path / "step.pickle", content)


def test_a_changed_file_is_read_or_refused(tmp_path: Path, content: Content) -> None:
    """Bytes changed at random places: nothing but the one error ever comes."""
    good, path, rng = pickle.dumps(content), tmp_path / "changed.pickle", random.Random(7)
    refused = 0
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            read_snapshot(path)
        except UsageError:
            refused += 1
    assert refused > 10


NUMBERS = st.one_of(st.integers(0, 3), st.sampled_from([-1, 512, 1 << 49, 1 << 50, 1 << 64, True, None, "1"]))
FRAMES = st.sampled_from([None, [], [{"name": "f", "filename": "x.py", "line": 1}], [{"name": 1}], [3], 7])
EVENTS = st.fixed_dictionaries(
    {
        "action": st.sampled_from(
            ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom"]
        ),
        "addr": st.integers(0, 3),
        "size": NUMBERS,
    },
    optional={"frames": FRAMES},
)
BLOCKS = st.fixed_dictionaries(
    {"size": NUMBERS, "state": st.sampled_from(["active_allocated", "inactive", 1])},
    optional={"address": NUMBERS, "requested_size": NUMBERS},
)
SEGMENTS = st.fixed_dictionaries(
    {"address": st.integers(0, 3), "total_size": NUMBERS, "blocks": st.lists(BLOCKS, max_size=3)},
    optional={"device": st.integers(0, 1)},
)


@given(
    content=st.fixed_dictionaries(
        {"device_traces": st.lists(st.lists(EVENTS, max_size=6), max_size=2)},
        optional={"segments": st.lists(SEGMENTS, max_size=3), "allocator_settings": st.just({})},
    )
)
def test_odd_allocations_are_compared_or_refused(
    tmp_path_factory: pytest.TempPathFactory, analysis: Analysis, content: Content
) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.pickle"
    path.write_bytes(pickle.dumps(content))
    try:
        step = measured_step(analysis.profile, read_snapshot(path))
        found = verdict(analysis.profile, analysis.timeline.peak, step.measurement, 0.01, step.frames)
    except UsageError:
        return
    assert table(found)
    assert found.model_dump_json()


@pytest.mark.parametrize("history", [[EVENT], [{**EVENT, "action": "free_completed"}, EVENT, EVENT]])
def test_a_history_that_takes_nothing_is_refused(tmp_path: Path, analysis: Analysis, history: list[Content]) -> None:
    path = tmp_path / "nothing.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [history], "segments": []}))
    with pytest.raises(UsageError, match="reserved_bytes would be no number of bytes above zero"):
        measured_step(analysis.profile, read_snapshot(path))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_what_pickle_reads(protocol: int) -> None:
    shared = {"a": [1, 255, 256, 65_536, -1, 1 << 40, -(1 << 40)], "b": (1.5, None), "c": ((), (1,), (1, 2, 3, 4))}
    data = [shared, shared, {"text": "é" * 300, "long": "x" * 70_000}, True, False, [[]], list(range(3000))]
    assert load(pickle.dumps(data, protocol=protocol)) == data
    with pytest.raises(PlainPickleError):
        load(pickle.dumps(Kind.PARAMETER, protocol=protocol))
