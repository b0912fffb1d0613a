"""Least times of a step on a card: what its arithmetic and its memory traffic take at the card's peak rates.

The roofline of Williams, Waterman and Patterson ("Roofline: an insightful visual performance model for multicore
architectures", CACM 2009): a node takes the longer of its FLOPs at the peak rate and its bytes at the memory's
bandwidth; nodes run one after another. What launches, synchronisation and imperfect kernels cost is left out, so that a
time by itself is a lower bound, and the ratio of two of them the useful figure.
"""

from __future__ import annotations

from collections import defaultdict

from fxmem.hardware.cards import CATALOGUE, Rates
from fxmem.records.profile import Phase, Profile

_Run = tuple[int, Phase, int | None]
"""A node, a phase, and an op of it that takes a time of its own."""


def step_seconds(profile: Profile) -> float | None:
    """The least time of the step on its target; None where the card's rates are not known.

    A node's bytes are what it reads (its inputs' storages and parameters forward, what it saved or is recomputed for it
    and its parameters backward) and the storages it makes; the optimizer reads and writes parameters, gradients and its
    state once. An op that recomputes something takes a time of its own.
    """
    card = CATALOGUE.get(profile.target.name)
    rates = None if card is None else card.rates
    if rates is None:
        return None
    again = {each.op: each.read_bytes for each in profile.recomputed_ops}
    flops: dict[_Run, float] = defaultdict(float)
    moved: dict[_Run, float] = defaultdict(float)
    for index, op in enumerate(profile.ops):
        run = (op.node, op.phase, index if index in again else None)
        flops[run] += (op.flops or 0) / _rate(rates, op.name, _dtype(profile, op.node))
        moved[run] += again.get(index, 0)
    for storage in profile.storages:
        if storage.op is not None:
            op = profile.ops[storage.op]
            moved[op.node, op.phase, storage.op if storage.op in again else None] += storage.nbytes
    for restored in profile.restored:
        moved[restored.node, Phase.BACKWARD, None] += profile.storages[restored.storage].nbytes
    for index, node in enumerate(profile.nodes):
        read = {
            output.storage
            for source in node.inputs
            for output in profile.nodes[source].outputs
            if output.storage is not None
        }
        moved[index, Phase.FORWARD, None] += sum(profile.storages[each].nbytes for each in read) + node.params_bytes
        moved[index, Phase.BACKWARD, None] += (
            sum(profile.storages[each].nbytes for each in node.saved) + node.params_bytes
        )
    # `flops` in order, on which the last digit of a sum depends.
    return sum(max(arithmetic, moved[run] / rates.bandwidth) for run, arithmetic in flops.items())


def _dtype(profile: Profile, node: int) -> str:
    outputs = profile.nodes[node].outputs
    return outputs[0].dtype if outputs else "float32"


def _rate(rates: Rates, op: str, dtype: str) -> float:
    if dtype in ("float16", "bfloat16"):
        return rates.half
    return rates.tf32 if "convolution" in op else rates.fp32
