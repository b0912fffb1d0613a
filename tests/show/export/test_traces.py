"""Timelines and flame graphs: they keep to their published formats, and their sums are the report's."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import jsonschema
import pytest
from hypothesis import given

from fxmem.memory import liveness
from fxmem.records.profile import Kind, Profile, Storage
from fxmem.show.export import export
from tests.profiles import deep_profile, make_profile, profiles, small_profile

MIB = 1 << 20


def read(profile: Profile, to: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(export(profile, liveness.timeline(profile), to))  # type: ignore[arg-type]
    return content


# --- Perfetto and Chrome: the Trace Event Format ----------------------------------------------------------------------

NUMBER, TEXT = {"type": "integer", "minimum": 0}, {"type": "string"}
PLACE = {"pid": {"type": "integer"}, "tid": {"type": "integer"}}


def event_schema(phase: str, required: dict[str, Any]) -> dict[str, Any]:
    properties = {"ph": {"const": phase}, "name": TEXT, "cat": TEXT, **PLACE, **required}
    return {
        "type": "object",
        "properties": properties,
        "required": ["ph", "name", "pid", "tid", *required],
        "additionalProperties": False,
    }


# Written from the format's description ("Trace Event Format", Google), for the four phases that are used: complete
# events have a start and a length in microseconds, counters a series of numbers, instants a scope of global, process or
# thread, metadata a name of a process or thread.
TRACE = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    event_schema("X", {"ts": NUMBER, "dur": NUMBER, "args": {"type": "object"}}),
                    event_schema(
                        "C",
                        {
                            "ts": NUMBER,
                            "args": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}},
                        },
                    ),
                    event_schema("i", {"ts": NUMBER, "s": {"enum": ["g", "p", "t"]}, "args": {"type": "object"}}),
                    event_schema("M", {"args": {"type": "object", "required": ["name"], "properties": {"name": TEXT}}}),
                ]
            },
        },
    },
}


def events(profile: Profile, phase: str) -> list[dict[str, Any]]:
    return [event for event in read(profile, "perfetto")["traceEvents"] if event["ph"] == phase]


def curve(profile: Profile, name: str) -> dict[int, int]:
    """A counter's value from each moment on at which it is written."""
    return {event["ts"]: event["args"]["bytes"] for event in events(profile, "C") if event["name"] == name}


def moments(profile: Profile) -> list[int]:
    """Where each tick stands: one step after the ticks before it and the operators that have begun."""
    return [tick + sum(op.begin <= tick for op in profile.ops) for tick in range(profile.ticks)]


@pytest.mark.parametrize("profile", [small_profile(), deep_profile(3), make_profile(ticks=0)])
def test_a_trace_keeps_to_the_format(profile: Profile) -> None:
    trace = read(profile, "perfetto")
    jsonschema.validate(trace, TRACE)
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "M"] == ["process_name", "thread_name"]


@pytest.mark.parametrize(
    "broken",
    [{"ph": "X", "ts": 0}, {"ph": "X", "dur": 1}, {"ph": "C"}, {"ph": "i", "ts": 0, "s": "x"}, {"ph": "B", "ts": 0}],
)
def test_the_format_refuses_what_is_not_of_it(broken: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"traceEvents": [{"name": "a", "pid": 1, "tid": 1, "args": {"bytes": 1}, **broken}]}, TRACE)


@pytest.mark.truth
@given(profiles())
def test_slices_lie_inside_one_another(profile: Profile) -> None:
    around: list[tuple[int, int]] = []
    for event in events(profile, "X"):
        begin, end = event["ts"], event["ts"] + event["dur"]
        # A viewer opens slices in the order of the file and stacks what overlaps: each must end within those still
        # open.
        while around and around[-1][1] <= begin:
            around.pop()
        assert all(left <= begin and end <= right for left, right in around)
        around.append((begin, end))


@given(profiles())
def test_every_operator_can_be_seen_once(profile: Profile) -> None:
    shown = [event for event in events(profile, "X") if event["cat"] == "operator"]
    assert [event["name"] for event in shown] == [op.name for op in profile.ops]
    assert all(event["dur"] > 0 for event in shown)
    assert [event["name"] for event in events(profile, "X") if event["cat"] == "phase"] == [
        span.phase.value for span in profile.phases
    ]


@given(profiles())
def test_counters_are_the_timeline(profile: Profile) -> None:
    timeline = liveness.timeline(profile)
    for name, live in (
        ("bytes alive", timeline.live_bytes),
        *((f"bytes alive: {kind.value}", live) for kind, live in timeline.by_kind.items()),
    ):
        written = curve(profile, name)
        now, found = None, []
        for moment in moments(profile):
            now = written.get(moment, now)
            found.append(now)
        assert found == list(live)


@pytest.mark.parametrize("profile", [small_profile(), deep_profile(3)])
def test_an_instant_stands_at_the_peak(profile: Profile) -> None:
    (instant,) = events(profile, "i")
    peak = liveness.timeline(profile).peak
    counter = curve(profile, "bytes alive")
    assert max(counter.values()) == peak.requested_bytes
    assert counter[instant["ts"]] == peak.requested_bytes
    assert f"{peak.requested_bytes:,}" in instant["name"]
    assert {kind: instant["args"][kind] for kind in peak.by_kind} == peak.by_kind
    at_peak = [
        event["name"]
        for event in events(profile, "X")
        if event["cat"] == "operator" and event["ts"] < instant["ts"] <= event["ts"] + event["dur"]
    ]
    assert peak.op is not None
    assert at_peak == [profile.ops[peak.op].name]


def test_slices_follow_the_modules() -> None:
    shown = [(event["cat"], event["name"]) for event in events(small_profile(), "X")]
    assert shown[:5] == [
        ("phase", "forward"),
        ("module", "block (Block)"),
        ("node", "block_conv"),
        ("operator", "aten.convolution.default"),
        ("node", "block_act"),
    ]
    conv = next(event for event in events(small_profile(), "X") if event["name"] == "block_conv")
    assert (conv["args"]["saved_bytes"], conv["args"]["source"]) == (32 * MIB, "/home/user/project/model.py:17")
    swish = next(event for event in events(small_profile(), "X") if event["name"] == "custom.swish.default")
    assert swish["args"]["flops"] == "unknown"


# --- speedscope -------------------------------------------------------------------------------------------------------

# Written from speedscope's specification (github.com/jlfwong/speedscope, src/lib/file-format-spec.ts, MIT), the sampled
# profiles alone. speedscope publishes a schema made from it, https://www.speedscope.app/file-format-schema.json, which
# files written here satisfied (speedscope 1.25.0).
FRAME = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "file": {"type": "string"}, "line": {"type": "number"}},
}
SAMPLED = {
    "type": "object",
    "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
    "properties": {
        "type": {"const": "sampled"},
        "name": {"type": "string"},
        "unit": {"const": "bytes"},
        "startValue": {"type": "number"},
        "endValue": {"type": "number"},
        "samples": {"type": "array", "items": {"type": "array", "items": NUMBER}},
        "weights": {"type": "array", "items": NUMBER},
    },
}
SPEEDSCOPE = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "version": {"type": "string"},
        "name": {"type": "string"},
        "exporter": {"type": "string"},
        "activeProfileIndex": {"type": "number"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {"frames": {"type": "array", "items": FRAME}},
        },
        "profiles": {"type": "array", "items": SAMPLED},
    },
}


def stacks(document: dict[str, Any], index: int) -> dict[tuple[str, ...], int]:
    """Names from the outermost frame to the innermost, and their bytes."""
    frames, profile = document["shared"]["frames"], document["profiles"][index]
    return {
        tuple(frames[frame]["name"] for frame in stack): weight
        for stack, weight in zip(profile["samples"], profile["weights"], strict=True)
    }


def check_sums(profile: Profile) -> None:
    document = read(profile, "speedscope")
    jsonschema.validate(document, SPEEDSCOPE)
    totals = [list(accumulate(each["weights"], initial=0))[-1] for each in document["profiles"]]
    assert totals == [each["endValue"] for each in document["profiles"]]
    assert totals == [liveness.timeline(profile).peak.requested_bytes, profile.saved_bytes]
    used = {frame for each in document["profiles"] for stack in each["samples"] for frame in stack}
    assert all(frame < len(document["shared"]["frames"]) for frame in used)


@pytest.mark.parametrize("profile", [small_profile(), deep_profile(3), make_profile(ticks=0)])
def test_flame_graphs_keep_to_the_format_and_sum_up(profile: Profile) -> None:
    check_sums(profile)


@pytest.mark.truth
@given(profiles())
def test_flame_graphs_of_any_profile(profile: Profile) -> None:
    check_sums(profile)


def test_a_stack_leads_from_the_model_to_the_tensor() -> None:
    document = read(small_profile(), "speedscope")
    alive, kept = stacks(document, 0), stacks(document, 1)
    assert alive["Small", "block (Block)", "block_conv", "gradient block.conv.weight 512x1024 float32"] == 2 * MIB
    assert alive["Small", "block (Block)", "block_conv", "workspace"] == 64 * MIB
    assert alive["Small", "optimizer", "optimizer state block.conv.weight.exp_avg 512x1024 float32"] == 4 * MIB
    assert kept == {
        ("Small", "block (Block)", "block_conv"): 32 * MIB,
        ("Small", "block (Block)", "block_act"): 32 * MIB,
    }
    frame = next(frame for frame in document["shared"]["frames"] if frame["name"] == "block_conv")
    assert (frame["file"], frame["line"]) == ("/home/user/project/model.py", 17)


def test_what_belongs_to_no_node_hangs_at_the_model_and_comes_first() -> None:
    storages = [
        Storage(nbytes=3, kind=Kind.PARAMETER, birth=0, death=1, name="w"),
        Storage(nbytes=4, kind=Kind.PARAMETER, birth=0, death=1, name="w"),
    ]
    assert stacks(read(make_profile(ticks=1, storages=storages), "speedscope"), 0) == {("Toy", "parameter w"): 7}
