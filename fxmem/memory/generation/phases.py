"""Prefill and decode, the phases of a generation."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.memory import liveness
from fxmem.records.profile import Phase, PhaseSpan, Profile


def name_phases(profile: Profile, begins: Sequence[int]) -> Profile:
    """The profile of a generation in two phases, prefill and decode; its nodes have their bytes.

    Args:
        profile: a generation.
        begins: the tick at which each token's forward begins.
    """
    border = begins[1] if len(begins) > 1 else profile.ticks
    op = next((i for i, each in enumerate(profile.ops) if each.begin >= border), len(profile.ops))
    first = profile.phases[0].begin if profile.phases else 0
    spans = [PhaseSpan(phase=Phase.PREFILL, begin=first, end=border, first_op=0, last_op=op)]
    if len(begins) > 1:
        last = {"end": profile.ticks, "last_op": len(profile.ops)}
        spans.append(PhaseSpan(phase=Phase.DECODE, begin=border, first_op=op, **last))
    ops = tuple(
        each.model_copy(update={"phase": Phase.PREFILL if index < op else Phase.DECODE})
        for index, each in enumerate(profile.ops)
    )
    named = profile.model_copy(update={"phases": tuple(spans), "ops": ops})
    live, scratch = liveness.node_live_bytes(named), liveness.node_scratch_bytes(named)
    nodes = tuple(
        node.model_copy(update={"live_bytes": live[i], "scratch_bytes": scratch[i]})
        for i, node in enumerate(named.nodes)
    )
    return named.model_copy(update={"nodes": nodes})
