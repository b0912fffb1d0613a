"""The graph as GraphML, written by networkx: `networkx.read_graphml` reads it back, Gephi and yEd open it.

Format: http://graphml.graphdrawing.org/specification.html. A node's id is `n` and its index; its attributes are the
columns of the `csv` export, and `peak_bytes`; an attribute that is unknown is left out. An edge goes from a node to one
that reads its result (`relation` is `reads`), or from the owner of a storage to a view of it (`views`); where both
hold, `reads` with `views` true. Attributes of the graph say what was predicted.

The text is ASCII; what XML cannot hold (control characters in a model's own names) is spelled out.
"""

from __future__ import annotations

from fxmem.errors import EnvironmentLacksError
from fxmem.memory.allocator import Settings
from fxmem.memory.figures import bytes_at_peak
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import printable
from fxmem.show.export.csv_rows import Cell, cells
from fxmem.show.export.labels import title

__all__ = ["document"]


def document(profile: Profile, timeline: Timeline, settings: Settings) -> str:
    """The graph as XML.

    Raises:
        EnvironmentLacksError: networkx is not installed.
    """
    try:
        import networkx  # type: ignore[import-untyped]
    except ImportError as error:
        raise EnvironmentLacksError("expected networkx, which is not installed: pip install networkx") from error
    graph = networkx.DiGraph(
        title=printable(title(profile)),
        torch=printable(profile.torch_version),
        requested_bytes=timeline.peak.requested_bytes,
        phase=timeline.peak.phase.value,
        **({} if timeline.peak.node is None else {"node": printable(timeline.peak.node)}),
    )
    for index, (node, nbytes) in enumerate(zip(profile.nodes, bytes_at_peak(profile, timeline), strict=True)):
        graph.add_node(f"n{index}", **_known(cells(node)), peak_bytes=nbytes)
    for index, node in enumerate(profile.nodes):
        for source in node.inputs:
            graph.add_edge(f"n{source}", f"n{index}", relation="reads", views=source == node.view_of)
        if node.view_of is not None and node.view_of not in node.inputs:
            graph.add_edge(f"n{node.view_of}", f"n{index}", relation="views", views=True)
    text = "\n".join(networkx.generate_graphml(graph)) + "\n"
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _known(attributes: dict[str, Cell]) -> dict[str, str | int]:
    return {
        name: printable(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None
    }
