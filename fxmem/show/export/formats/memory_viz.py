"""A predicted snapshot for pytorch.org/memory_viz.

It is what `torch.cuda.memory._dump_snapshot` would have written after a step.

Format: the `Snapshot` of `torch.cuda.memory._snapshot` (torch 2.11), a pickle of plain dicts in protocol 4, the newest
that the viewer's own reader (`torch/utils/viz/MemoryViz.js`) takes. Nothing here reads a pickle.

- The trace begins with an empty device: first the segments and blocks that are there before the step, by kind, then the
  step.
- An event's `size` is the bytes requested, as in PyTorch's own traces. So the running sum peaks at
  `Peak.requested_bytes`; what the blocks add by rounding stands in `segments`, which are the state after the step, and
  sum up to `Peak.reserved_bytes`, but for what a program's set-up reserved beyond its step.
- Events have no time: nothing was run.
- For a CUDA target, addresses are those of the caching allocator replayed, but for the origin. For the CPU, whose
  allocator is not modelled, the step is laid out as that allocator would: sizes and order are predicted, places and
  segments are not.

Text of the report goes through `printable`: the viewer has its own decoder, and a name could otherwise forge a line of
a stack.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any

from fxmem.memory.allocator import AllocatorSettings, RecordedStep, trace_step
from fxmem.records.profile import Kind, Profile, Timeline
from fxmem.records.units import printable
from fxmem.show.export import register
from fxmem.show.export.resources import enclosing_modules, site, storage_label, title

_PROTOCOL = 4
_UNKNOWN = "unknown"
"""The category of what has none. The viewer wants it to be among the categories as soon as there is one."""

Frame = dict[str, str | int]


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> bytes:
    """One step in its steady state, as a pickled snapshot."""
    step = trace_step(profile, settings)
    stacks = _Stacks(profile)
    content = {
        "segments": [
            segment.describe(stacks.segment, lambda address: stacks.storage(step.owners_after[address]))
            for segment in step.segments_after
        ],
        "device_traces": [[*_before(step, stacks), *_step_trace(step, stacks)]],
        "allocator_settings": {"PREDICTED": _note(profile, timeline, step), **settings.model_dump(mode="json")},
        "external_annotations": [],
    }
    return pickle.dumps(content, protocol=_PROTOCOL)


def _note(profile: Profile, timeline: Timeline, step: RecordedStep) -> str:
    parts = [printable(title(profile)), "no GPU was used", f"requested bytes peak at {timeline.peak.requested_bytes}"]
    if profile.target.device != "cuda":
        parts.append(
            "places and segments are not predicted for this target: laid out as PyTorch's CUDA allocator would"
        )
    elif not step.steady:
        parts.append("the allocator's state did not repeat itself; a later step may lie elsewhere")
    return "; ".join(parts)


class _Stacks:
    """Stack traces, innermost frame first; equal frames are one object, which the pickle then holds once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.storage = cache(self._storage)
        self._op = cache(self._op_frames)
        self._node = cache(self._node_frames)
        self._module = cache(lambda path: _frame(printable(profile.modules.get(path, "")) or "module", 0, path))
        self.streams = [storage.stream for storage in profile.storages]
        self.kinds = [storage.kind.value for storage in profile.storages]
        self.segment = [_frame("PREDICTED by fxmem", 0, "memory from the driver")]

    def _storage(self, index: int) -> list[Frame]:
        storage = self._profile.storages[index]
        head = _frame("PREDICTED by fxmem", 0, storage_label(storage))
        if storage.op is not None:
            return [head, *self._op(storage.op)]
        return [head] if storage.node is None else [head, *self._node(storage.node)]

    def _op_frames(self, index: int) -> list[Frame]:
        op = self._profile.ops[index]
        return [_frame(op.phase.value, index, op.name), *self._node(op.node)]

    def _node_frames(self, index: int) -> list[Frame]:
        node = self._profile.nodes[index]
        called = _frame("torch.fx", index, node.name)
        called |= {"fx_node_op": node.op, "fx_node_name": printable(node.name)}
        called["fx_node_target"] = printable(node.target)
        frames = [called]
        if (source := node.source) is not None:
            called["fx_original_trace"] = printable(f"{site(source)}, in {source.function}: {source.code}")
            frames.append(_frame(printable(source.file), source.line, source.function or source.code))
        return [*frames, *map(self._module, reversed(enclosing_modules(node)))]


def _frame(file: str, line: int, name: str) -> Frame:
    return {"filename": file, "line": line, "name": printable(name)}


def _before(step: RecordedStep, stacks: _Stacks) -> Iterator[dict[str, Any]]:
    order = {kind.value: place for place, kind in enumerate(Kind)}
    requested = {block.address: block.requested_bytes for segment in step.segments_before for block in segment.blocks}
    for segment in step.segments_before:
        action = "segment_map" if segment.expandable else "segment_alloc"
        yield _event(action, segment.address, segment.size, segment.stream, stacks.segment, _UNKNOWN)
    owners = sorted(step.owners_before.items(), key=lambda owned: (order[stacks.kinds[owned[1]]], owned[1]))
    for address, storage in owners:
        frames, stream = stacks.storage(storage), stacks.streams[storage]
        yield _event("alloc", address, requested[address] or 0, stream, frames, stacks.kinds[storage])


def _step_trace(step: RecordedStep, stacks: _Stacks) -> Iterator[dict[str, Any]]:
    for event in step.events:
        where = event.address, event.size, event.stream
        if event.storage is None:
            yield _event(event.action, *where, stacks.segment, _UNKNOWN)
        elif event.action == "alloc":
            yield _event("alloc", *where, stacks.storage(event.storage), stacks.kinds[event.storage])
        else:  # nothing waits for another stream: a block is free as soon as it is given back
            for action in ("free_requested", "free_completed"):
                yield _event(action, *where, stacks.storage(event.storage))


def _event(
    action: str, address: int, size: int, stream: int, frames: list[Frame], category: str | None = None
) -> dict[str, Any]:
    event = {"action": action, "addr": address, "size": size, "stream": stream, "frames": frames}
    return event if category is None else {**event, "category": category}


register("memory-viz", write, binary=True)
