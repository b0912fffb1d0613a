"""The graph for Model Explorer.

Format: `GraphCollection` of the visualizer's `input_graph.ts` (https://github.com/google-ai-edge/model-explorer/wiki).
Modules are its layers: namespaces divided by `/`. A node's colour is its part of the bytes alive at the peak.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.figures import bytes_at_peak
from fxmem.memory.graph import to_networkx
from fxmem.memory.module_tree import call_name
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.records.units import exact_bytes, format_bytes, format_flops, format_shape
from fxmem.show.export.resources import enclosing_modules, site, title
from fxmem.show.graph.labels import heat_step
from fxmem.show.svg import LIGHT

if TYPE_CHECKING:
    from networkx import DiGraph  # type: ignore[import-untyped]

GRAPH_ID = "step"


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """The collection of one graph as JSON."""
    peak = None if timeline.peak.op is None else profile.ops[timeline.peak.op].node
    graph = to_networkx(profile, timeline)
    at_peak = bytes_at_peak(profile, timeline)
    largest = max(at_peak, default=0)
    nodes = [
        _node(profile, graph, index, at_peak[index], heat_step(at_peak[index], largest), is_peak=index == peak)
        for index in graph
    ]
    highest = _bytes(timeline.peak.requested_bytes)
    whole = {"what": title(profile), "peak": highest, "saved": _bytes(profile.saved_bytes)}
    layers = {_namespace(path): {"class": class_name} for path, class_name in profile.modules.items() if path}
    step = {"id": GRAPH_ID, "nodes": nodes, "groupNodeAttributes": {"": whole, **layers}}
    return json.dumps({"label": title(profile), "graphs": [step]}, separators=(",", ":"))


def _node(
    profile: Profile, graph: DiGraph, index: int, at_peak: int, step: int | None, *, is_peak: bool
) -> dict[str, Any]:
    node = profile.nodes[index]
    modules = enclosing_modules(node)
    described: dict[str, Any] = {
        "id": str(index),
        "label": call_name(node),
        "namespace": _namespace(modules[-1]) if modules else "",
        "attrs": _attributes(node, at_peak, is_peak=is_peak),
        "incomingEdges": [
            {"sourceNodeId": str(source), "sourceNodeOutputId": "0", "targetNodeInputId": str(edge["position"])}
            for source, _, edge in graph.in_edges(index, data=True)
            if edge["relation"] == "reads"
        ],
        "outputsMetadata": [
            {"id": str(place), "attrs": [{"key": "tensor_shape", "value": f"{out.dtype}[{format_shape(out.shape)}]"}]}
            for place, out in enumerate(node.outputs)
        ],
    }
    style = {"backgroundColor": LIGHT.shades[step].fill} if step else {}
    style |= {"borderColor": LIGHT.peak} if is_peak else {}
    return {**described, "style": style} if style else described


def _attributes(node: Node, at_peak: int, *, is_peak: bool) -> list[dict[str, Any]]:
    values: dict[str, Any] = {
        "peak": "the peak falls here" if is_peak else "",
        "name": node.name,
        "op": node.op,
        "target": node.target,
        "module": node.module,
        "class": node.module_type,
        "source": site(node.source),
        "code": "" if node.source is None else node.source.code,
        "parameters": _bytes(node.params_bytes),
        "output": _bytes(node.output_bytes),
        "saved": _bytes(node.saved_bytes),
        "alive at the peak": _bytes(at_peak),
        "scratch, forward": _bytes(node.scratch_bytes.forward),
        "scratch, backward": _bytes(node.scratch_bytes.backward),
        "live, forward": _bytes(node.live_bytes.forward),
        "live, backward": _bytes(node.live_bytes.backward),
        "FLOPs, forward": format_flops(node.forward_flops),
        "FLOPs, backward": format_flops(node.backward_flops),
        "view of": "" if node.view_of is None else {"type": "node_ids", "nodeIds": [str(node.view_of)]},
    }
    return [{"key": key, "value": value} for key, value in values.items() if value != ""]


def _namespace(path: str) -> str:
    return path.replace("/", "_").replace(".", "/")


def _bytes(nbytes: int | None) -> str:
    """The rounded figure, and the exact one where they differ; nothing where there is none."""
    if nbytes is None:
        return ""
    return format_bytes(nbytes) if nbytes < 1024 else exact_bytes(nbytes)
