"""A loss of (N, 1) against (N,): both are broadcast to N x N elements, and the mean is of something else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from fxmem.memory.findings import Finding
from fxmem.records.profile import Profile, Timeline

_LOSSES: Final = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that broadcast their inputs."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each such loss that is of more elements than either of its inputs."""
    alive = set(timeline.alive)
    for index, node in enumerate(profile.nodes):
        if node.target.rpartition(".")[2] not in _LOSSES or len(node.inputs) != 2:
            continue
        given = [profile.nodes[each].outputs[0].shape for each in node.inputs if profile.nodes[each].outputs]
        if len(given) == 2 and (shape := _broadcast(*given)) and math.prod(shape) > max(map(math.prod, given)):
            one, other = ("x".join(map(str, each)) for each in given)
            yield Finding(
                cause="broadcast-loss",
                text=f"the loss is of {one} against {other}, broadcast to {'x'.join(map(str, shape))}",
                place="" if node.source is None else node.source.place,
                nbytes=sum(
                    each.nbytes for at, each in enumerate(profile.storages) if at in alive and each.node == index
                ),
                change="inputs of one shape: .squeeze(-1) of the prediction",
            )


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which both are broadcast; empty where they are not."""
    length = max(len(one), len(other))
    pairs = [*zip((1,) * (length - len(one)) + one, (1,) * (length - len(other)) + other, strict=True)]
    return tuple(map(max, pairs)) if all(a == b or 1 in (a, b) for a, b in pairs) else ()
