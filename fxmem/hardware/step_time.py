"""Estimated time of a step on a card: what its operators compute and move, at the rates that cards really reach.

The roofline of Williams, Waterman and Patterson ("Roofline: an insightful visual performance model for multicore
architectures", CACM 2009), operator by operator: each takes the longer of its FLOPs and its bytes, and a launch.
Operators run one after another, while Python issues them: a step takes no less than that. The shares of a card's rates
that products, convolutions and all else reach are fitted to published step times, and so is the interval
(`benchmarks/step_time.py`).
"""

from __future__ import annotations

from fxmem.hardware.cards import CATALOGUE, Rates, Reached
from fxmem.records.profile import Op, Phase, Profile, Step, StepTime, Target

_QUICKER = 0.5
"""What issuing an operator takes at the low end of the interval: CPUs differ, and so do modules around operators."""
_TAPE, _CHECKPOINT = 4, 7
"""What Python takes beside issuing an operator, in multiples of that: where the tape of a plan of operators notes it,
and where a checkpointed region recomputes it. Fitted to nine planned steps on an H100, of which Python bounds six."""


def estimate(profile: Profile) -> StepTime | None:
    """The time of the step on its target, as an interval; None where the card's rates or an op's bytes are not known,
    and for a compiled step, of which none was fitted.

    The interval holds eight of ten measured step times. A step of several micro-batches is the last of them.
    """
    seconds, least = step_seconds(profile), step_seconds(profile, issue=_QUICKER)
    if seconds is None or least is None:
        return None
    low, high = CATALOGUE[profile.target.name].reached[profile.step.mode].spread
    return StepTime(seconds=seconds, low_seconds=least * low, high_seconds=seconds * high)


def step_seconds(profile: Profile, *, taped: bool = False, issue: float = 1.0) -> float | None:
    """The middle of `estimate`; None where that is None.

    Args:
        profile: of the step.
        taped: whether a plan of operators is applied, whose tape notes each operator of the forward.
        issue: scales what Python takes.
    """
    card = CATALOGUE.get(profile.target.name)
    if card is None or card.rates is None or not profile.ops or profile.step.compiled is not None:
        return None
    reached = card.reached[profile.step.mode]
    python = card_seconds = 0.0  # when Python has issued an operator, and when the card has run it
    again = {each.op for each in profile.recomputed_ops}
    for index, op in enumerate(profile.ops):
        if op.moved_bytes is None:
            return None
        extra = _TAPE * (op.phase is Phase.FORWARD) if taped else _CHECKPOINT * (index in again)
        python += issue * reached.issue_seconds * (1 + extra)
        taken = _op_seconds(op, op.moved_bytes, is_half(profile, op), reached, card.rates)
        card_seconds = max(card_seconds, python) + taken
    return card_seconds


def node_seconds(profile: Profile) -> list[float] | None:
    """What the card takes for the operators of each node; None where `estimate` is None."""
    card = CATALOGUE.get(profile.target.name)
    if card is None or card.rates is None or not profile.ops:
        return None
    seconds = [0.0] * len(profile.nodes)
    for op in profile.ops:
        if op.moved_bytes is None:
            return None
        half = is_half(profile, op)
        seconds[op.node] += _op_seconds(op, op.moved_bytes, half, card.reached[profile.step.mode], card.rates)
    return seconds


def has_rates(target: Target) -> bool:
    """Whether the time of a step on the target can be estimated."""
    card = CATALOGUE.get(target.name)
    return card is not None and card.rates is not None


def time_assumption(target: Target, step: Step) -> str | None:
    """What an estimate of a step's time on a target rests on, in words; None where there is none."""
    card = CATALOGUE.get(target.name)
    if card is None or card.rates is None or step.compiled is not None:
        return None
    return (
        "estimated, each operator at the longer of its arithmetic and its memory traffic, with the shares of the "
        f"card's rates that {card.reached[step.mode].grounds} reach; the interval holds 8 of 10 of their steps. "
        "Loading data is not in it"
    )


def is_half(profile: Profile, op: Op) -> bool:
    """Whether an op computes in half precision: whether its node returns that."""
    outputs = profile.nodes[op.node].outputs
    return bool(outputs) and outputs[0].dtype in ("float16", "bfloat16")


def _op_seconds(op: Op, moved: int, half: bool, reached: Reached, rates: Rates) -> float:
    """What the card takes for one operator."""
    flops = op.flops or 0
    if not moved and not flops:
        return 0.0
    if "convolution" in op.name:
        rate, bandwidth = reached.convolutions * (rates.half if half else rates.tf32), reached.convolution_bandwidth
    else:
        rate, bandwidth = reached.products * (rates.half if half else rates.fp32), reached.bandwidth
    return max(flops / rate, moved / (bandwidth * rates.bandwidth)) + reached.launch_seconds
