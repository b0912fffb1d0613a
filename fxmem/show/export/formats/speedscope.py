"""Flame graphs of the peak for speedscope.app.

They show what is alive at the peak, and what is saved for backward, by module, node and tensor.

Format: speedscope's own (https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources, schema at
https://www.speedscope.app/file-format-schema.json), two `sampled` profiles in bytes. A sample is a storage, or a node;
its weight is its bytes, its stack the model, the modules around it, the node, the storage. Samples stand in the order
of the graph, so the time order shows the model from its first layer to its last; "left heavy" puts the largest first.

The first profile's weights sum up to `Peak.requested_bytes`, the second's to `Profile.saved_bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fxmem import __version__
from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.figures import owners_at_peak
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.resources import enclosing_modules, module_label, storage_label, title

Stack = tuple[int, ...]
"""Indices into the frames, outermost first."""


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """Both profiles as JSON."""
    frames = _Frames(profile)
    alive: dict[tuple[int, Stack], int] = {}
    for storage, owner in owners_at_peak(profile, timeline):
        # What belongs to no node comes first: it was there before the model ran.
        place = -1 if owner is None else owner
        key = place, (*frames.way(owner), frames.label_frame(storage_label(storage)))
        alive[key] = alive.get(key, 0) + storage.nbytes
    by_place = sorted(alive.items(), key=lambda entry: entry[0][0])
    saved = ((frames.way(index), node.saved_bytes) for index, node in enumerate(profile.nodes))
    document = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "version": "0.0.1",
        "exporter": f"fxmem {__version__}",
        "name": title(profile),
        "activeProfileIndex": 0,
        "profiles": [
            _make_profile("bytes alive at the peak", ((stack, nbytes) for (_, stack), nbytes in by_place)),
            _make_profile("bytes saved for backward", saved),
        ],
        "shared": {"frames": frames.listed},
    }
    return json.dumps(document, separators=(",", ":"))


def _make_profile(name: str, samples: Iterable[tuple[Stack, int]]) -> dict[str, Any]:
    weighing = [(stack, nbytes) for stack, nbytes in samples if nbytes]
    weights = [nbytes for _, nbytes in weighing]
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": [stack for stack, _ in weighing],
        "weights": weights,
    }


class _Frames:
    """The frames that stacks point into, each once."""

    def __init__(self, profile: Profile) -> None:
        self.listed: list[dict[str, str | int]] = []
        self._profile = profile
        self._known: dict[tuple[str, str | int], int] = {}

    def way(self, node: int | None) -> Stack:
        """The model, the modules around a node, and the node; without one, the model alone."""
        model = self._frame(("model", ""), self._profile.model)
        if node is None:
            return (model,)
        called = self._profile.nodes[node]
        way = [self._frame(("module", each), module_label(self._profile, each)) for each in enclosing_modules(called)]
        source = called.source
        place: dict[str, str | int] = {} if source is None else {"file": source.file, "line": source.line}
        return (model, *way, self._frame(("node", node), called.name, place))

    def label_frame(self, label: str) -> int:
        """A frame that is nothing but its name."""
        return self._frame(("storage", label), label)

    def _frame(self, key: tuple[str, str | int], name: str, place: dict[str, str | int] | None = None) -> int:
        if key not in self._known:
            self._known[key] = len(self.listed)
            self.listed.append({"name": name or "(no name)", **(place or {})})
        return self._known[key]
