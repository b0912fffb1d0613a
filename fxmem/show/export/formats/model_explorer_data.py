"""Numbers to load over that graph.

Format: Model Explorer's `GraphNodeData` by graph, a file of its own because the tool takes it so
(https://github.com/google-ai-edge/model-explorer/wiki).
"""

from __future__ import annotations

import json

from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.figures import bytes_at_peak
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.formats.model_explorer import GRAPH_ID
from fxmem.show.svg import LIGHT


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """Each node's part of the bytes alive at the peak, as JSON; the more bytes, the darker the colour."""
    values = {str(index): {"value": nbytes} for index, nbytes in enumerate(bytes_at_peak(profile, timeline)) if nbytes}
    shades = [LIGHT.shades[0], LIGHT.shades[-1]]
    gradient = [{"stop": stop, "bgColor": shade.fill, "textColor": shade.text} for stop, shade in enumerate(shades)]
    data = {"name": "bytes alive at the peak", "results": values, "gradient": gradient}
    return json.dumps({GRAPH_ID: data}, separators=(",", ":"))
