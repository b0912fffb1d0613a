"""The hierarchy of a step as data, for the page's script to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fxmem.hardware import step_time
from fxmem.memory.figures import bytes_at_peak
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import group, printable
from fxmem.show.graph import labels
from fxmem.show.graph.boxes import Hierarchy, View, find_reads, make_hierarchy
from fxmem.show.graph.labels import NOTE_SIZE, PAD, TITLE_SIZE, UniqueIds, describe_peak, describe_recomputed
from fxmem.show.graph.picture import Box, DrawingOptions, Frame, Picture, count_recomputed
from fxmem.show.svg import fit, text_width

_FIGURE = 118.0
"""Room for a figure beside a box's name, in pixels: `at peak 999.9 MiB`."""
_NOTED = 84.0
"""Room for a figure in a heading."""
_MOST = 340.0

HEATS: dict[str, str] = {
    "saved": "bytes kept for backward",
    "before": "bytes kept for backward without the plan",
    "params": "bytes of parameters and buffers",
    "peak": "of the bytes alive at the peak, those it brought",
    "flops": "FLOPs, forward and backward",
    "time": "estimated time of its operators on the card",
}
"""The quantities that the page can colour boxes by. `time` is there where it can be estimated."""


def hierarchy_data(profile: Profile, timeline: Timeline, options: DrawingOptions) -> dict[str, Any]:
    """What the page's script draws the graph from, as plain JSON.

    `parts` are in preorder, each with the number of parts inside it (`size`); `lines` join those without parts; `home`
    is the part of each node. Bytes and FLOPs are of all equal ones together.

    Args:
        profile: what was predicted.
        timeline: its timeline.
        options: of the drawing that the page begins with.
    """
    return _Writer(make_hierarchy(profile, timeline, options)).write()


class _Writer:
    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._profile = hierarchy.profile
        self._boxes: list[Box] = []
        self._frames: list[Frame] = []
        self._parts: list[dict[str, Any]] = []
        self._ids = UniqueIds("part")
        self._quantities = self._measures()

    def write(self) -> dict[str, Any]:
        """Everything, as JSON."""
        views = list(self._walk(self._hierarchy.views, None, 1))
        home = self._hierarchy.homes(self._boxes)
        reads = find_reads(self._profile, self._hierarchy.where, home, len(self._boxes))
        drawing = self._hierarchy.picture(self._boxes, self._frames, (), home)
        headings = iter(labels.frame_words(drawing, figures=False))
        numbers = [index for index, (view, *_) in enumerate(views) if not view.parts]
        for part, (_, box, frame) in zip(self._parts, views, strict=True):
            self._describe(part, drawing, box)
            if frame is not None:
                words = next(headings)
                note = fit(words.note, NOTE_SIZE, _MOST)
                wide = text_width(words.title, TITLE_SIZE, bold=True) + text_width(note, NOTE_SIZE) + _NOTED
                part |= {"head": words.title, "note": note, "least": round(wide + 30.0, 1)}
                part |= {"region": 1} if words.checkpoint else {}
        return {
            "heats": {name: HEATS[name] for name in self._quantities},
            "parts": self._parts,
            "lines": [[numbers[tail], numbers[head]] for head, tails in enumerate(reads) for tail in sorted(tails)],
            "home": [numbers[home[node]] if node in home else -1 for node in range(len(self._profile.nodes))],
        }

    def _walk(self, views: Sequence[View], frame: int | None, times: int) -> Iterator[tuple[View, Box, Frame | None]]:
        """All views in preorder, with what each is drawn as."""
        for view in views:
            own = times * view.box.alike
            box = Box(**{**vars(view.box), "frame": frame, "times": own})
            part: dict[str, Any] = {"values": [measure(view, own) for measure in self._quantities.values()]}
            self._parts.append(part)
            if view.frame is None or not view.parts:
                self._boxes.append(box)
                yield view, box, None
                continue
            around = Frame(**{**vars(view.frame), "parent": frame})
            self._frames.append(around)
            before = len(self._parts)
            part["open"] = int(self._hierarchy.is_open(view))
            yield view, box, around
            yield from self._walk(view.parts, len(self._frames) - 1, times * around.alike)
            part["size"] = len(self._parts) - before

    def _measures(self) -> dict[str, Callable[[View, int], float | None]]:
        """How each quantity of a view is found, given how often it is there."""
        at_peak = bytes_at_peak(self._profile, self._hierarchy.timeline)
        seconds = step_time.node_seconds(self._profile)
        everywhere = group((place.node, node) for node, place in self._hierarchy.where.items())

        def total(values: Sequence[float], view: View) -> float:
            """Sum over all that the drawn nodes stand for, equal or not."""
            drawn = {self._hierarchy.where[node].node for node in view.nodes}
            return sum(values[node] for one in drawn for node in everywhere[one])

        def flops(view: View, times: int) -> float | None:
            both = view.box.figures.forward + view.box.figures.backward
            return None if both.unknown_calls and not both.known else both.known * times

        found: dict[str, Callable[[View, int], float | None]] = {
            "saved": lambda view, times: view.box.figures.saved * times,
            "params": lambda view, times: view.box.figures.params * times,
            "peak": lambda view, times: total(at_peak, view),
            "flops": flops,
        }
        if self._hierarchy.unplanned is not None:  # what is alive at the peak with the plan is not in the plan
            before = [node.saved_bytes for node in self._hierarchy.unplanned.nodes]
            found = {"before": lambda view, times: total(before, view), **found}
            found = {"saved": found.pop("saved"), **{name: each for name, each in found.items() if name != "peak"}}
        if seconds is not None:
            found["time"] = lambda view, times: float(f"{total(seconds, view):.3g}")
        return found

    def _describe(self, part: dict[str, Any], drawing: Picture, box: Box) -> None:
        nodes = [self._profile.nodes[node] for node in box.shown]
        title, note = labels.name_box(drawing, box, nodes)
        found = [labels.shape_line(nodes, note), describe_recomputed(drawing, box)]
        lines = [printable(line) for line in found if line]
        mark = describe_peak(drawing, box, outside=box.module)
        beside = 0.0 if box.kind in ("input", "output") else _FIGURE
        wide, height = labels.box_size(title, beside, lines, mark)
        width = labels.round_width(wide, _MOST)
        room = width - 2 * PAD
        part |= {
            "id": labels.box_id(self._ids, box, nodes),
            "kind": box.kind,
            "title": fit(title, TITLE_SIZE, room - beside, bold=True),
            "lines": [fit(line, NOTE_SIZE, room) for line in lines],
            "w": width,
            "h": height,
        }
        again = count_recomputed(drawing, box) / len(box.shown)
        part |= {"again": round(again, 2)} if again else {}
        part |= {"mark": fit(mark, NOTE_SIZE, room, bold=True)} if mark else {}
        part |= {"path": printable(box.module)} if box.module else {}
        part |= {"alike": box.alike} if box.alike > 1 else {}
        part |= {"times": box.times} if box.times > 1 else {}
