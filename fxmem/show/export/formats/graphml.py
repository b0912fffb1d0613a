"""The graph for networkx, Gephi and yEd.

GraphML (http://graphml.graphdrawing.org/specification.html), written by networkx from the graph that
`fxmem.memory.graph.to_networkx` describes; `networkx.read_graphml` reads it back. A node's id is `n` and its index; an
attribute that is unknown is left out. The text is ASCII; what XML cannot hold (control characters in a model's own
names) is spelled out.
"""

from __future__ import annotations

from typing import Any

from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.graph import to_networkx
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import printable
from fxmem.show.export.resources import title


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """The graph as XML."""
    import networkx  # type: ignore[import-untyped]  # slow

    graph = networkx.relabel_nodes(to_networkx(profile, timeline), "n{}".format)
    graph.graph = _drop_unknown({"title": title(profile), **graph.graph})
    for attributes in (*graph.nodes.values(), *graph.edges.values()):
        known = _drop_unknown(attributes)
        attributes.clear()
        attributes.update(known)
    text = "\n".join(networkx.generate_graphml(graph)) + "\n"
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _drop_unknown(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: printable(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None
    }
