"""Estimated time of a step on a card: what its operators compute and move, at the rates that cards really reach.

The roofline of Williams, Waterman and Patterson ("Roofline: an insightful visual performance model for multicore
architectures", CACM 2009), operator by operator: each takes the longer of its FLOPs and its bytes, and a launch.
Operators run one after another, while Python issues them: a step takes no less than that. The shares of a card's rates
that products, convolutions and all else reach are fitted to published step times, and so is the interval
(`benchmarks/published/step_time.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxmem.hardware.catalogue import CATALOGUE, FETCHED_AHEAD, SENT_AHEAD, Rates, Reached, host_bytes_per_second
from fxmem.hardware.op_classes import is_product
from fxmem.records.profile import Op, Phase, Profile, Step, StepTime, Target

_HALF = ("float16", "bfloat16")
_QUICKER = 0.5
"""What issuing an operator takes at the low end of the interval: CPUs differ, and so do modules around operators."""
_COPY = 2
"""What Python takes for a copy on a stream of its own, in multiples of issuing an operator: the copy, and the streams
that wait for each other. Not measured."""
_TAPE, _CHECKPOINT = 4, 7
"""What Python takes beside issuing an operator, in multiples of that: where the tape of a plan of operators notes it,
and where a checkpointed region recomputes it. Fitted to nine planned steps on an H100, of which Python bounds six."""
COMPARED = (
    "times are estimates by the rates that vendors publish; float32 matrix products run without TF32, torch's default, "
    "so that a card with more CUDA cores can be ahead of a larger one"
)
"""What to know of times of several cards."""


def estimate(profile: Profile, *, taped: bool = False) -> StepTime | None:
    """The time of the step on its target, as an interval; None where `op_seconds` is None, and for a compiled step, of
    which none was fitted.

    The interval holds eight of ten measured step times. A step of several micro-batches is the last of them. `taped` as
    for `step_seconds`.
    """
    seconds, least = step_seconds(profile, taped=taped), step_seconds(profile, taped=taped, issue=_QUICKER)
    if seconds is None or least is None:
        return None
    low, high = CATALOGUE[profile.target.name].reached[profile.step.mode].spread
    return StepTime(seconds=seconds, low_seconds=least * low, high_seconds=seconds * high)


def step_seconds(
    profile: Profile,
    *,
    taped: bool = False,
    issue: float = 1.0,
    recomputed: Mapping[int, Sequence[int]] | None = None,
    copied: Mapping[int, Sequence[int]] | None = None,
) -> float | None:
    """The middle of `estimate`; None where that is None.

    Args:
        profile: of the step.
        taped: whether a plan of operators is applied, whose tape notes each operator of the forward.
        issue: scales what Python takes.
        recomputed: of a plan that the profile is without, by op, those that are recomputed right before it.
        copied: of the same plan, by op, the bytes of each copy to the host or back that begins right before it.
    """
    ends = card_ends(profile, taped=taped, issue=issue, recomputed=recomputed, copied=copied)
    return ends[-1] if ends else None


def card_ends(
    profile: Profile,
    *,
    taped: bool = False,
    issue: float = 1.0,
    recomputed: Mapping[int, Sequence[int]] | None = None,
    copied: Mapping[int, Sequence[int]] | None = None,
) -> list[float] | None:
    """By op, when the card has run it, in seconds from the step's begin; arguments as for `step_seconds`.

    None where `estimate` is None.
    """
    taken = op_seconds(profile)
    if taken is None or profile.step.compiled is not None:
        return None
    python = card_seconds = 0.0  # when Python has issued an operator, and when the card has run it
    again = {each.op for each in profile.recomputed_ops}
    begin = issue * CATALOGUE[profile.target.name].reached[profile.step.mode].issue_seconds
    one_more, link = begin * _count_issues(taped), _HostLink(host_bytes_per_second(profile.target))
    ends = []
    for index, op in enumerate(profile.ops):
        for nbytes in copied.get(index, ()) if copied else ():
            python += _COPY * begin
            card_seconds = link.copy(nbytes, op.phase, max(card_seconds, python))
        for each in recomputed.get(index, ()) if recomputed else ():
            python += one_more
            card_seconds = max(card_seconds, python) + taken[each]
        is_copy = link.carries(op)
        python += _count_op_issues(op, taped, index in again, is_copy) * begin
        if op.repeats is not None:
            card_seconds = max(card_seconds + taken[index], python)
        else:
            card_seconds = max(card_seconds, python)
            card_seconds = link.copy(op.host_bytes, op.phase, card_seconds) if is_copy else card_seconds + taken[index]
        ends.append(card_seconds)
    return ends


def _count_op_issues(op: Op, taped: bool, is_again: bool, is_copy: bool) -> int:
    """What Python takes for an op of the step, in multiples of issuing one."""
    if op.repeats is not None:
        return op.repeats[1] - op.repeats[0]
    if is_copy:
        return _COPY
    if taped:
        return 1 + _TAPE * (op.phase is Phase.FORWARD)
    return _count_issues(taped) if is_again else 1


class _HostLink:
    """The link to the host's memory, which carries copies while the card computes.

    Args:
        rate: bytes a second in one direction; None: not known, and copies count as operators.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._ends: list[float] = []
        """When each copy is over."""

    def carries(self, op: Op) -> bool:
        """Whether an op is a copy beside the card's own work."""
        return bool(op.host_bytes and op.stream and self._rate)

    def copy(self, nbytes: int, phase: Phase, now: float) -> float:
        """Begin a copy, waiting for the one that must be over by then; when the card goes on."""
        assert self._rate is not None  # or it carries none
        ahead = FETCHED_AHEAD if phase is Phase.BACKWARD else SENT_AHEAD
        now = max(now, self._ends[-ahead]) if len(self._ends) >= ahead else now
        self._ends.append(max(now, self._ends[-1] if self._ends else 0.0) + nbytes / self._rate)
        return now


def recompute_seconds(profile: Profile, *, taped: bool = False) -> list[float] | None:
    """By op, what recomputing it in backward adds to the step: the longer of the card's time and Python's.

    None where `estimate` is None. Where Python is far ahead of the card, it is less: the card's time alone.
    """
    taken = op_seconds(profile)
    if taken is None or profile.step.compiled is not None:
        return None
    issued = CATALOGUE[profile.target.name].reached[profile.step.mode].issue_seconds * _count_issues(taped)
    return [max(issued, seconds) for seconds in taken]


def _count_issues(taped: bool) -> int:
    """What Python takes to recompute an operator, in multiples of issuing one."""
    return 1 if taped else 1 + _CHECKPOINT


def node_seconds(profile: Profile) -> list[float] | None:
    """What the card takes for the operators of each node; None where `op_seconds` is None."""
    taken = op_seconds(profile)
    if taken is None:
        return None
    seconds = [0.0] * len(profile.nodes)
    for op, each in zip(profile.ops, taken, strict=True):
        seconds[op.node] += each
    return seconds


def op_seconds(profile: Profile) -> list[float] | None:
    """What the card takes for each operator; None where its rates or an op's bytes are not known.

    No rate is known of bfloat16 products on cards from before compute capability 8.0.
    """
    card = CATALOGUE.get(profile.target.name)
    if card is None or card.rates is None or not profile.ops:
        return None
    seconds: list[float] = []
    reached, link = card.reached[profile.step.mode], host_bytes_per_second(profile.target)
    for op, dtype in zip(profile.ops, list_dtypes(profile), strict=True):
        if op.moved_bytes is None or _lacks_rate(profile.target, op, dtype):
            return None
        if op.repeats is not None:
            seconds.append(sum(seconds[slice(*op.repeats)]))
            continue
        waited = op.host_bytes / link if link and not op.stream else 0.0
        seconds.append(max(_op_seconds(op, op.moved_bytes, dtype in _HALF, reached, card.rates), waited))
    return seconds


def has_rates(target: Target) -> bool:
    """Whether the time of a step on the target can be estimated."""
    card = CATALOGUE.get(target.name)
    return card is not None and card.rates is not None


def time_assumption(target: Target, step: Step) -> str | None:
    """What an estimate of a step's time on a target rests on, in words; None where there is none."""
    if not has_rates(target) or step.compiled is not None:
        return None
    grounds = CATALOGUE[target.name].reached[step.mode].grounds
    return (
        "estimated, each operator at the longer of its arithmetic and its memory traffic, with the shares of the "
        f"card's rates that {grounds} reach; the interval holds 8 of 10 of their steps. Loading data is not in it"
    )


def list_dtypes(profile: Profile) -> list[str]:
    """By op, what it computes in: the dtype of what it makes, else of what its node returns, maybe by other ops."""
    made = {each.op: each.dtype for each in reversed(profile.storages) if each.dtype}
    of_node = [node.outputs[0].dtype if node.outputs else "" for node in profile.nodes]
    return [made.get(index, of_node[op.node]) for index, op in enumerate(profile.ops)]


def _lacks_rate(target: Target, op: Op, dtype: str) -> bool:
    """Whether an op multiplies bfloat16 on a card from before 8.0: its tensor cores have none, and no rate is published
    of what cuBLAS runs instead."""
    before = target.capability is not None and target.capability < (8, 0)
    return before and dtype == "bfloat16" and is_product(op.name)


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
