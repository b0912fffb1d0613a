"""The step as a graph of networkx: what is in it, and that algorithms of a user's own run on it."""

from __future__ import annotations

from itertools import chain, combinations

import networkx
import torch
from torch import nn

import fxmem
from fxmem.memory import liveness
from fxmem.memory.graph import node_attributes, to_networkx
from fxmem.records.profile import Node, Profile
from tests.profiles import make_profile, small_profile


def graph_of(profile: Profile) -> networkx.DiGraph:
    return to_networkx(profile, liveness.timeline(profile))


def test_nodes_carry_what_was_predicted_of_them() -> None:
    profile = small_profile()
    graph = graph_of(profile)
    assert list(graph) == list(range(len(profile.nodes)))
    for index, node in enumerate(profile.nodes):
        assert {**graph.nodes[index], "peak_bytes": 0} == {**node_attributes(node), "peak_bytes": 0}
    assert sum(peak for _, peak in graph.nodes(data="peak_bytes")) == liveness.timeline(profile).peak.requested_bytes


def test_an_edge_carries_the_bytes_of_the_storages_it_leads_from() -> None:
    profile = small_profile()
    graph = graph_of(profile)
    for source, _, nbytes in graph.edges(data="bytes"):
        storages = {output.storage for output in profile.nodes[source].outputs} - {None}
        assert nbytes == sum(profile.storages[each].nbytes for each in storages if each is not None)
    assert graph.edges[1, 2]["bytes"] == 32 << 20


def test_inputs_keep_their_order_and_views_are_told_from_reads() -> None:
    call = {"op": "call_method", "target": "view"}
    nodes = [Node(name="a", **call), Node(name="b", **call), Node(name="c", inputs=(1, 0), view_of=0, **call)]
    nodes.append(Node(name="d", inputs=(2,), view_of=0, **call))
    graph = graph_of(make_profile(ticks=1, nodes=nodes))
    assert [(source, edge["position"]) for source, _, edge in graph.in_edges(2, data=True)] == [(1, 0), (0, 1)]
    assert [graph.edges[edge]["views"] for edge in ((0, 2), (1, 2), (2, 3), (0, 3))] == [True, False, False, True]
    assert graph.edges[0, 3]["relation"] == "views"


class Narrow(nn.Module):
    """Wide at both ends, narrow in the middle: that is where a cut is cheapest."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink, self.between, self.grow = nn.Linear(64, 8), nn.Linear(8, 4), nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shrink(x).relu()
        narrow = self.between(x).tanh()
        return self.grow(narrow).relu() + narrow.sum()


def test_a_minimum_cut_by_bytes_runs_on_it_and_is_the_cheapest_of_all_cuts() -> None:
    analysis = fxmem.analyze(Narrow(), torch.zeros(16, 64), target="cpu", mode="infer")
    graph = analysis.to_networkx()
    names = {name: index for index, name in graph.nodes(data="name")}
    first, last = names["x"], names["output"]
    value, (before, after) = networkx.minimum_cut(graph, first, last, capacity="bytes")
    inner = [index for index in graph if index not in (first, last)]
    cuts = [
        sum(nbytes for source, target, nbytes in graph.edges(data="bytes") if source in kept and target not in kept)
        for chosen in chain.from_iterable(combinations(inner, size) for size in range(len(inner) + 1))
        for kept in [{first, *chosen}]
    ]
    assert value == min(cuts) == 16 * 4 * 4
    assert {graph.nodes[index]["module"] for index in before} >= {"shrink"}
    assert names["grow"] in after
