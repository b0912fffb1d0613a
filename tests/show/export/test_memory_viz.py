"""The predicted snapshot: PyTorch's own tools read it, its sums are the report's, and no two tensors lie on one
another."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.memory import allocator, liveness
from fxmem.memory.allocator import AllocatorSettings, CachingAllocator, peak
from fxmem.memory.allocator.peak import AllocatorEvent, LoopRecorder, RecordedStep, trace_step
from fxmem.records.profile import Kind, Profile, Storage
from fxmem.show.export import export
from tests.profiles import CPU, TINY_CARD, deep_profile, make_profile, profiles, small_profile
from tests.show.test_plots import hostile

MIB = 1 << 20
DEFAULT, EXPANDABLE = AllocatorSettings(), AllocatorSettings(expandable_segments=True)
SETTINGS = [
    DEFAULT,
    EXPANDABLE,
    AllocatorSettings(max_split_bytes=20 * MIB),
    AllocatorSettings(per_process_memory_fraction=0.001),
]

# What MemoryViz.js of torch 2.11 reads: the cases of its function `unpickle`.
VIEWERS_OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


def snapshot_bytes(profile: Profile, settings: AllocatorSettings = DEFAULT) -> bytes:
    content = export(profile, liveness.timeline(profile), "memory-viz", settings=settings)
    assert isinstance(content, bytes)
    return content


def snapshot(profile: Profile, settings: AllocatorSettings = DEFAULT) -> dict[str, Any]:
    content: dict[str, Any] = pickle.loads(snapshot_bytes(profile, settings))
    return content


def trace_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    (trace,) = content["device_traces"]
    return list(trace)


def running_sum(trace: list[dict[str, Any]]) -> list[int]:
    """Requested bytes after each event, as the viewer adds them up."""
    sign = {"alloc": 1, "free_completed": -1}
    sums = [0]
    for event in trace:
        sums.append(sums[-1] + sign.get(event["action"], 0) * event["size"])
    return sums


def on_a_card(profile: Profile) -> Profile:
    return profile.model_copy(update={"target": TINY_CARD})


def recorder(profile: Profile, settings: AllocatorSettings) -> LoopRecorder:
    return LoopRecorder(profile, CachingAllocator(settings, device_bytes=profile.target.memory_bytes))


def scaled(profile: Profile, times: int) -> Profile:
    return profile.model_copy(
        update={"storages": tuple(each.model_copy(update={"nbytes": each.nbytes * times}) for each in profile.storages)}
    )


def check_places(content: dict[str, Any]) -> None:
    """No tensor lies on another or outside the segments, and the segments at the end hold what the trace leaves
    behind."""
    live: dict[int, int] = {}
    for event in trace_of(content):
        begin, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert any(s["address"] <= begin and end <= s["address"] + s["total_size"] for s in content["segments"])
            assert all(end <= other or other + size <= begin for other, size in live.items())
            live[begin] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(begin) == event["size"]
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    assert {
        block["address"]: block["requested_size"] for block in blocks if block["state"] == "active_allocated"
    } == live
    for segment in content["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            assert 0 <= block["requested_size"] <= block["size"]
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]


# --- PyTorch's own tools ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory_viz") / "small.PREDICTED.pickle"
    path.write_bytes(snapshot_bytes(small_profile()))
    return path


def viewed(*arguments: str | Path) -> str:
    """What `python -m torch.cuda._memory_viz` prints."""
    command = [sys.executable, "-m", "torch.cuda._memory_viz", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.truth
def test_stats(file: Path) -> None:
    text = viewed("stats", file)
    # After the step: the weight, AdamW's state and the batch, 2 + 4 + 32 MiB; all of it whole blocks.
    assert "total_allocated: 38.0MiB" in text
    replay = allocator.replay(small_profile())
    assert replay.reserved_bytes is not None
    assert f"total_reserved: {replay.reserved_bytes / MIB:.1f}MiB" in text


@pytest.mark.truth
def test_trace(file: Path) -> None:
    lines = viewed("trace", file).splitlines()
    content = snapshot(small_profile())
    assert f"{len(trace_of(content))} entries" in lines
    assert sum("cudaMalloc" in line for line in lines) == len(content["segments"])
    # All ten storages that the step brings, and the three that it finds.
    assert sum(line.startswith("del ") for line in lines) == 10
    assert sum(" = " in line and "cudaMalloc" not in line for line in lines) == 10 + 3


@pytest.mark.truth
def test_segment_plot(file: Path, tmp_path: Path) -> None:
    viewed("segment_plot", file, "-o", tmp_path / "segments.html")
    assert "MemoryViz.js" in (tmp_path / "segments.html").read_text(encoding="utf-8")


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("profile", [small_profile(), deep_profile(5), small_profile(target=CPU)])
def test_the_running_sum_peaks_at_the_reports_requested_bytes(profile: Profile, settings: AllocatorSettings) -> None:
    # Requested, not allocated: an event's size is what was asked for, in PyTorch's traces as in ours.
    content = snapshot(profile, settings)
    assert max(running_sum(trace_of(content))) == liveness.timeline(profile).peak.requested_bytes
    assert (
        f"requested bytes peak at {liveness.timeline(profile).peak.requested_bytes}"
        in content["allocator_settings"]["PREDICTED"]
    )
    check_places(content)


@pytest.mark.parametrize("settings", SETTINGS[:3])
@pytest.mark.parametrize("profile", [small_profile(), deep_profile(5)])
def test_the_segments_sum_up_to_the_reserved_bytes(profile: Profile, settings: AllocatorSettings) -> None:
    content = snapshot(profile, settings)
    assert (
        sum(segment["total_size"] for segment in content["segments"])
        == allocator.replay(profile, settings=settings).reserved_bytes
    )


@pytest.mark.truth
@given(profiles(), st.sampled_from([1, 40_000, 1_000_000]), st.sampled_from(SETTINGS[:3]))
def test_any_step_is_laid_out_as_the_replay_has_it(profile: Profile, times: int, settings: AllocatorSettings) -> None:
    profile = on_a_card(scaled(profile, times))
    content, replay = snapshot(profile, settings), allocator.replay(profile, settings=settings)
    check_places(content)
    assert max(running_sum(trace_of(content))) == replay.requested_bytes
    assert sum(segment["total_size"] for segment in content["segments"]) == replay.reserved_bytes


def test_of_steps_that_differ_the_one_with_the_most_allocated_is_shown() -> None:
    sizes = [(11 * MIB, 2, 3), (4_642_880, 1, 2), (3 * MIB, 0, 2), (13 * MIB, 2, 3), (3 * MIB, 2, 3), (3 * MIB, 0, 2)]
    storages = [Storage(nbytes=nbytes, kind=Kind.TEMPORARY, birth=birth, death=death) for nbytes, birth, death in sizes]
    profile = on_a_card(make_profile(ticks=3, storages=storages))
    replay, loop = allocator.replay(profile), recorder(profile, DEFAULT)
    # From the fourth step on, four steps take turns; of them the seventh has the most.
    peaks = [max(peak.allocated_bytes for peak in loop.run_step()) for _ in range(7)]
    assert (replay.steps, replay.warmup_steps) == (7, 3)
    assert [index for index, peak in enumerate(peaks) if peak == replay.allocated_bytes and index >= 3] == [6]
    seventh = recorder(profile, DEFAULT)
    for _ in range(6):
        seventh.run_step()
    assert trace_step(profile, DEFAULT) == seventh.record_step(steady=True)


def test_a_step_that_does_not_repeat_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_MAX_STEPS", 1)
    content = snapshot(small_profile())
    assert "did not repeat itself" in content["allocator_settings"]["PREDICTED"]
    assert "did not repeat itself" not in snapshot(small_profile(target=CPU))["allocator_settings"]["PREDICTED"]


# --- a step that is not steady ----------------------------------------------------------------------------------------


def first_step(profile: Profile, settings: AllocatorSettings) -> RecordedStep:
    return recorder(profile, settings).record_step(steady=False)


@given(profiles(), st.sampled_from([DEFAULT, EXPANDABLE]))
def test_segments_grow_from_nothing_by_the_recorded_events(profile: Profile, settings: AllocatorSettings) -> None:
    step = first_step(on_a_card(scaled(profile, 1_000_000)), settings)
    assert step.segments_before == ()
    runs: dict[int, int] = {}
    for event in step.events:
        if event.storage is None:
            begins = [begin for begin, size in runs.items() if begin + size == event.address]
            grown = begins[0] if event.action == "segment_map" and begins else event.address
            runs[grown] = runs.get(grown, 0) + event.size
    assert {segment.address: segment.size for segment in step.segments_after} == runs


def test_a_new_segment_comes_before_the_block_in_it() -> None:
    storage = Storage(nbytes=3 * MIB, kind=Kind.PARAMETER, birth=0, death=2)
    step = first_step(on_a_card(make_profile(ticks=2, storages=[storage])), DEFAULT)
    assert [(event.action, event.size) for event in step.events] == [("segment_alloc", 20 * MIB), ("alloc", 3 * MIB)]
    assert step.events[1] == AllocatorEvent("alloc", step.events[0].address, 3 * MIB, 0)


# --- the format -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [small_profile(), deep_profile(200), hostile("日本語" * 400)])
def test_the_viewers_own_reader_knows_every_opcode(profile: Profile) -> None:
    opcodes = list(pickletools.genops(snapshot_bytes(profile)))
    assert {opcode.name for opcode, _, _ in opcodes} <= VIEWERS_OPCODES
    assert opcodes[0][1] == 4
    # JavaScript's numbers are exact up to here.
    assert max(argument for _, argument, _ in opcodes if isinstance(argument, int)) < 1 << 53


def test_the_fields_are_those_of_torchs_snapshots() -> None:
    content = snapshot(small_profile())
    assert set(content) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    for segment in content["segments"]:
        assert set(segment) == {
            "device", "address", "total_size", "stream", "segment_type", "allocated_size", "active_size",
            "requested_size", "segment_pool_id", "is_expandable", "frames", "blocks",
        }  # fmt: skip
        assert segment["segment_type"] in ("small", "large")
        assert all(
            set(block) == {"address", "size", "requested_size", "state", "frames"} for block in segment["blocks"]
        )
    assert all({"action", "addr", "size", "stream", "frames"} <= set(event) for event in trace_of(content))
    assert "time_us" not in trace_of(content)[0]


def test_categories_are_our_kinds_and_the_one_the_viewer_wants() -> None:
    trace = trace_of(snapshot(small_profile()))
    categories = {event["category"] for event in trace if "category" in event}
    assert "unknown" in categories
    assert categories - {"unknown"} == {storage.kind.value for storage in small_profile().storages}
    before = [event["category"] for event in trace if event["action"] == "alloc"][:3]
    assert before == ["parameter", "input", "optimizer_state"]


def test_a_stack_leads_from_the_tensor_to_the_model() -> None:
    (gradient,) = [event for event in trace_of(snapshot(small_profile())) if event.get("category") == "gradient"]
    tensor, op, node, line, *modules = gradient["frames"]
    assert tensor == {
        "filename": "PREDICTED by fxmem",
        "line": 0,
        "name": "gradient block.conv.weight 512x1024 float32",
    }
    assert (op["filename"], op["name"]) == ("backward", "aten.convolution_backward.default")
    assert (node["fx_node_op"], node["fx_node_name"], node["fx_node_target"]) == (
        "call_module",
        "block_conv",
        "block.conv",
    )
    assert node["fx_original_trace"] == "/home/user/project/model.py:17, in forward: x = self.conv(x)"
    assert line == {"filename": "/home/user/project/model.py", "line": 17, "name": "forward"}
    assert modules == [{"filename": "Block", "line": 0, "name": "block"}]


def test_a_free_shows_what_it_frees() -> None:
    stacks: dict[int, Any] = {}
    for event in trace_of(snapshot(small_profile())):
        if event["action"] == "alloc":
            stacks[event["addr"]] = event["frames"]
        elif event["action"].startswith("free"):
            assert event["frames"] == stacks[event["addr"]]


def test_no_name_forges_a_line_of_a_stack() -> None:
    trace = trace_of(snapshot(hostile("a\nb")))
    assert all("\n" not in str(value) for event in trace for frame in event["frames"] for value in frame.values())


def test_a_cpu_step_says_that_its_places_are_not_predicted() -> None:
    assert (
        "places and segments are not predicted for this target"
        in snapshot(small_profile(target=CPU))["allocator_settings"]["PREDICTED"]
    )
    assert "not predicted" not in snapshot(small_profile())["allocator_settings"]["PREDICTED"]


def test_a_tensor_without_elements_has_no_block() -> None:
    storages = [Storage(nbytes=nbytes, kind=Kind.INPUT, birth=0, death=2) for nbytes in (0, 512, 0)]
    content = snapshot(on_a_card(make_profile(ticks=2, storages=storages)))
    assert [event["size"] for event in trace_of(content) if event["action"] == "alloc"] == [512]
