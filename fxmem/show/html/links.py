"""What joins the parts of a page: ticks and nodes."""

from __future__ import annotations

import json
from bisect import bisect_right
from typing import Any

from fxmem.memory.samples import samples
from fxmem.records.profile import Kind, Phase, Profile, Timeline
from fxmem.records.units import to_words


def link_data(profile: Profile, timeline: Timeline, *, columns: int) -> dict[str, Any]:
    """What the page's script needs, as plain JSON. It has two moments a column, so its size does not grow with the
    step.

    Args:
        profile: what was predicted.
        timeline: its timeline.
        columns: pixels that the plotted timeline is wide.
    """
    taken = samples(timeline.live_bytes, columns)
    # Ops that allocate nothing begin where another does; the one that holds the tick is the one that matters.
    allocating = [index for index, op in enumerate(profile.ops) if op.end > op.begin]
    begins = [profile.ops[index].begin for index in allocating]
    at = [bisect_right(begins, sample.tick) - 1 for sample in taken]
    ops = [None if place < 0 else profile.ops[allocating[place]] for place in at]
    names: dict[str, int] = {}
    peak = timeline.peak.tick
    return {
        "ticks": len(timeline.live_bytes),
        "phases": [[span.phase.value, span.begin, span.end] for span in profile.phases],
        "tick": [sample.tick for sample in taken],
        "begin": [round(sample.begin, 1) for sample in taken],
        "live": [timeline.live_bytes[sample.tick] for sample in taken],
        # In KiB: they are read to three digits.
        "kinds": [
            [to_words(kind), [round(timeline.by_kind[kind][sample.tick] / 1024) for sample in taken]]
            for kind in Kind
            if kind in timeline.by_kind
        ],
        "node": [-1 if op is None else op.node for op in ops],
        "op": [-1 if op is None else names.setdefault(op.name, len(names)) for op in ops],
        "during": [int(op is not None and sample.tick < op.end) for op, sample in zip(ops, taken, strict=True)],
        "names": list(names),
        "start": next((index for index, sample in enumerate(taken) if sample.tick == peak), 0),
        "spans": _spans(profile),
    }


def script_json(value: object) -> str:
    """JSON as it may stand inside `<script>`. It is ASCII without `<`, so nothing in it ends the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _spans(profile: Profile) -> list[list[list[int]]]:
    """For each node, the ticks from its first to its last op. Backward is apart from the rest; ranges are half-open."""
    found: list[dict[bool, list[int]]] = [{} for _ in profile.nodes]
    for op in profile.ops:
        span = found[op.node].setdefault(op.phase is Phase.BACKWARD, [op.begin, op.end])
        span[0], span[1] = min(span[0], op.begin), max(span[1], op.end)
    return [[spans[backward] for backward in (False, True) if backward in spans] for spans in found]
