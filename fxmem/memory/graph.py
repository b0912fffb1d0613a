"""The step as a graph of networkx, for algorithms of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxmem.memory.figures import bytes_at_peak
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.records.units import format_shape

if TYPE_CHECKING:
    import networkx  # type: ignore[import-untyped]


def to_networkx(profile: Profile, timeline: Timeline) -> networkx.DiGraph:
    """The step as a graph: nodes with their predictions, edges with the bytes that cross them.

    A node is its index into `profile.nodes`. Its attributes are those of `node_attributes`, and `peak_bytes`: of the
    bytes alive at the peak, those that it brought.

    An edge leads from a node to one that reads its result (`relation` is "reads", `position` its place among the
    reader's inputs), or from the owner of a storage to a view of it ("views"); where both hold, "reads" with `views`
    True. Its `bytes` are those of the storages it leads from, each counted once, and whole where the results are views.

    The graph's attributes describe the peak. Texts are the model's own, untrusted and not escaped.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
    """
    from networkx import DiGraph  # slow to import

    peak = timeline.peak
    graph = DiGraph(torch=profile.torch_version, requested_bytes=peak.requested_bytes, phase=peak.phase.value)
    if peak.node is not None:
        graph.graph["node"] = peak.node
    for index, (node, nbytes) in enumerate(zip(profile.nodes, bytes_at_peak(profile, timeline), strict=True)):
        graph.add_node(index, **node_attributes(node), peak_bytes=nbytes)
    results = ({output.storage for output in node.outputs if output.storage is not None} for node in profile.nodes)
    crossing = [sum(profile.storages[storage].nbytes for storage in storages) for storages in results]
    for index, node in enumerate(profile.nodes):
        for position, source in enumerate(node.inputs):
            views = source == node.view_of
            graph.add_edge(source, index, relation="reads", views=views, position=position, bytes=crossing[source])
        if node.view_of is not None and node.view_of not in node.inputs:
            graph.add_edge(node.view_of, index, relation="views", views=True, bytes=crossing[node.view_of])
    return graph


def node_attributes(node: Node) -> dict[str, str | int | None]:
    """Every field of a node as a number or a text; several values in one text are divided by spaces."""
    lines = {"source": node.source, "called_from": node.called_from}
    parts = ("file", "line", "function", "code")
    return {
        **{name: getattr(node, name) for name in ("name", "op", "target", "module", "module_type")},
        **{f"{key}_{part}": getattr(line, part, None) for key, line in lines.items() for part in parts},
        "inputs": " ".join(map(str, node.inputs)),
        "output_shapes": " ".join(format_shape(output.shape) for output in node.outputs),
        "output_dtypes": " ".join(output.dtype for output in node.outputs),
        "output_storages": " ".join(
            "none" if output.storage is None else str(output.storage) for output in node.outputs
        ),
        "view_of": node.view_of,
        **{name: int(getattr(node, name)) for name in ("leads_to_gradients", "lacks_backward")},
        **{f"{name}_bytes": getattr(node, f"{name}_bytes") for name in ("params", "buffers", "output", "saved")},
        "saved_storages": " ".join(map(str, node.saved)),
        "scratch_forward_bytes": node.scratch_bytes.forward,
        "scratch_backward_bytes": node.scratch_bytes.backward,
        "forward_flops": node.forward_flops,
        "backward_flops": node.backward_flops,
        "live_forward_bytes": node.live_bytes.forward,
        "live_backward_bytes": node.live_bytes.backward,
    }
