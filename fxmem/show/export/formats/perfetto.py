"""A timeline for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" (Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU),
its JSON object form: `M` names process and thread, `X` are slices, `C` counters, `i` an instant.

Nothing was run, so there is no time. One microsecond on the axis is one thing that happens: an operator that begins, or
an allocation, or a free. So every operator can be seen, the ones that allocate nothing included, and no length means a
duration.

- Slices: phase, modules, node, operator, each inside the one before. An operator's slice ends where the next begins:
  what it no longer needs goes before that.
- Counters: the bytes alive in total and of each kind, written where they change.
- An instant stands at the peak.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.show.export.resources import enclosing_modules, module_label, site, title

_PLACE = {"pid": 1, "tid": 1}

Key = tuple[str, str | int]
"""A slice among its siblings: what it is, and which."""


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """The step as JSON of trace events."""
    names = {"process_name": title(profile), "thread_name": "operators"}
    events = [
        *({"ph": "M", "name": what, **_PLACE, "args": {"name": name}} for what, name in names.items()),
        *_slices(profile),
        *_counters(profile, timeline),
        *_peak(profile, timeline),
    ]
    axis = "1 us is one operator, allocation or free; no length is a duration"
    about = {"title": title(profile), "torch": profile.torch_version, "axis": axis}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}, separators=(",", ":"))


def _slices(profile: Profile) -> Iterator[dict[str, Any]]:
    """Slices in the order they open, an outer one before those inside it."""
    slices: list[dict[str, Any]] = []
    opened: list[tuple[Key, dict[str, Any]]] = []

    def close(down_to: int, now: int) -> None:
        while len(opened) > down_to:
            _, last = opened.pop()
            last["dur"] = now - last["ts"]

    for span in profile.phases:
        begin, end = span.begin + span.first_op, span.end + span.last_op
        phase = {"name": span.phase.value, "ts": begin, "dur": end - begin}
        slices.append({"ph": "X", "cat": "phase", **phase, **_PLACE, "args": {}})
        for index in range(span.first_op, span.last_op):
            op = profile.ops[index]
            now = op.begin + index
            way: list[Key] = [("module", path) for path in enclosing_modules(profile.nodes[op.node])]
            way += [("node", op.node), ("operator", index)]
            same = takewhile(lambda pair: pair[0] == pair[1][0], zip(way, opened, strict=False))
            close(len(list(same)), now)
            for key in way[len(opened) :]:
                begun = {"ph": "X", "cat": key[0], "ts": now, "dur": 0, **_PLACE, **_describe(profile, key)}
                opened.append((key, begun))
                slices.append(begun)
        close(0, end)
    yield from slices


def _describe(profile: Profile, key: Key) -> dict[str, Any]:
    what, which = key
    if isinstance(which, str):
        return {"name": module_label(profile, which), "args": {"module": which}}
    if what == "node":
        return {"name": profile.nodes[which].name, "args": _node_arguments(profile.nodes[which])}
    op = profile.ops[which]
    return {"name": op.name, "args": {"flops": "unknown" if op.flops is None else op.flops}}


def _node_arguments(node: Node) -> dict[str, str | int]:
    return {
        "op": node.op,
        "target": node.target,
        "module": node.module,
        "source": site(node.source),
        "params_bytes": node.params_bytes,
        "output_bytes": node.output_bytes,
        "saved_bytes": node.saved_bytes,
    }


def _counters(profile: Profile, timeline: Timeline) -> Iterator[dict[str, Any]]:
    by_kind = {f"bytes alive: {kind.value}": live for kind, live in timeline.by_kind.items()}
    curves = {"bytes alive": timeline.live_bytes, **by_kind}
    begins = [op.begin for op in profile.ops]
    before = dict.fromkeys(curves, 0)
    for tick in range(profile.ticks):
        now = _moment(tick, begins)
        for name, live in curves.items():
            if live[tick] != before[name] or tick == 0:
                before[name] = live[tick]
                yield {"ph": "C", "name": name, "ts": now, **_PLACE, "args": {"bytes": live[tick]}}


def _peak(profile: Profile, timeline: Timeline) -> Iterator[dict[str, Any]]:
    peak = timeline.peak
    if profile.ticks:
        arguments = {"node": peak.node or "none", **{kind.value: nbytes for kind, nbytes in peak.by_kind.items()}}
        name = f"peak: {peak.requested_bytes:,} bytes requested"
        now = _moment(peak.tick, [op.begin for op in profile.ops])
        yield {"ph": "i", "cat": "peak", "s": "g", "name": name, "ts": now, **_PLACE, "args": arguments}


def _moment(tick: int, begins: list[int]) -> int:
    """Where a tick stands on the axis: after the ticks before it and the operators that have begun."""
    return tick + bisect_right(begins, tick)
