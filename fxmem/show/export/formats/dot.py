"""The drawn graph for Graphviz."""

from __future__ import annotations

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Profile, Timeline
from fxmem.show.graph import dot_source


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """The drawing with its default options, in the DOT language."""
    return dot_source(profile, timeline)
