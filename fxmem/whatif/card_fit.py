"""Which cards of the catalogue a step fits, by itself or with checkpoints."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.cards import CATALOGUE
from fxmem.hardware.context import room_bytes
from fxmem.hardware.step_time import step_seconds
from fxmem.memory import allocator
from fxmem.records.fits import Fits, Point, Space
from fxmem.records.names import AnyMode
from fxmem.records.plan import Plan
from fxmem.records.profile import Many, Record, Target
from fxmem.records.units import format_bytes
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.processes.executor import run_forked
from fxmem.simulation.step.generation import analyze_any
from fxmem.whatif import verified_plan
from fxmem.whatif.plans.proposals import check_training
from fxmem.whatif.size_search import judge


def cards(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    inputs: Any,
    *,
    mode: AnyMode = "train",
    names: Iterable[str] | None = None,
    plans: bool = False,
    host_memory: int | str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Fits:
    """Which cards of the catalogue a step fits, with what headroom.

    The step is analysed once for each compute capability, because that decides its kernels and their workspaces, and is
    then compared with what a CUDA context leaves of each card of that capability: eight analyses for the whole
    catalogue.

    Args:
        model: as for `fxmem.analyze`.
        inputs: as for `fxmem.analyze`.
        mode: as for `fxmem.analyze`; or "generate" for `fxmem.generate`.
        names: the cards of interest; None for every card of the catalogue.
        plans: whether to look for the cheapest checkpoints with which it fits where it does not by itself. Cards on
            which the step is the same share one search.
        host_memory: as in `fxmem.plan`, for these plans.
        progress: called with a few words on each analysis.
        options: further ones of `fxmem.analyze` or `fxmem.generate`, but `target`.

    Raises:
        UsageError: an unknown card, or one without memory; an option that cannot be understood; plans for a step that
            is not of training.
        AnalysisError: the model cannot be analysed.
    """
    chosen = choose_cards(names)
    return fit_cards(
        analyze_any(model, inputs, mode=mode, target=chosen[0], progress=progress, options=options),
        names=names,
        plans=plans,
        host_memory=host_memory,
        progress=progress,
    )


def fit_cards(
    analysis: ProfiledStep,
    *,
    names: Iterable[str] | None = None,
    plans: bool = False,
    host_memory: int | str | None = None,
    change: Callable[[Any], ProfiledStep] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Fits:
    """`cards` for what is analysed or was run. `change` is applied to it before it is judged.

    A report, which cannot be analysed again, is held against the cards of its own compute capability alone.
    """
    tell = progress or (lambda _: None)
    if plans:
        check_training(analysis)
        if analysis.is_fixed:
            raise UsageError("expected plans for a model or a program: `fxmem plan` plans a report, for its card")
    elif host_memory is not None:
        raise UsageError("expected host_memory with plans=True: it is where plans put results")
    alike: dict[tuple[int, int] | None, list[Target]] = {}
    for card in choose_cards(names):
        if analysis.is_fixed and card.capability != analysis.profile.target.capability:
            if names is None:
                continue
            raise UsageError(
                f"expected cards of the report's compute capability, that of {analysis.profile.target.name}: others "
                f"run other kernels; {card.name} needs the model or the program itself"
            )
        alike.setdefault(card.capability, []).append(card)
    found: list[Point] = []
    steps: list[tuple[ProfiledStep, list[Point]]] = []

    def analyse(group: Sequence[Target]) -> ProfiledStep:
        is_own = analysis.profile.target.capability == group[0].capability
        for_it = analysis if is_own else analysis.vary(target=group[0])
        return for_it if change is None else change(for_it)

    def fit(group: Sequence[Target]) -> _Group:
        analysed = analyse(group)
        fits = tuple(_card_fit(analysed, card) for card in group)
        if plans:
            _file_short(steps, analysed, [each for each in fits if not each.fits])
            fits = tuple(each for each in fits if each.fits)
        return _Group(peak_bytes=analysed.peak.counted_bytes, fits=fits)

    jobs = {str(number): functools.partial(fit, group) for number, group in enumerate(alike.values(), 1)}
    # Plans are made on the analyses themselves, which do not leave a fork.
    answers = {} if plans else dict(run_forked(_Group, jobs))
    for number, (capability, group) in enumerate(alike.items(), 1):
        made = answers.get(str(number)) or fit(group)
        found += made.fits
        what = f"{', '.join(card.name for card in group)}: peak {format_bytes(made.peak_bytes)}"
        tell(f"compute capability {'{}.{}'.format(*capability or ())}, {number} of {len(alike)}: {what}")
    targets = {card.name: card for group in alike.values() for card in group}
    plan_analyses = 0
    for step, short in steps:
        planned, tried = _plan_short(step, short, targets, host_memory, tell)
        found, plan_analyses = [*found, *planned], plan_analyses + tried
    order = sorted(targets.values(), key=lambda card: (card.memory_bytes or 0, card.name))
    by_name = {fit.card: fit for fit in found}
    return Fits(
        **analysis.profile.heading(),
        space=Space(question="cards", planned=plans),
        cards=tuple(order),
        points=tuple(by_name[card.name] for card in order),
        analyses=0 if analysis.is_fixed else len(alike),
        plan_analyses=plan_analyses,
    )


class _Group(Record):
    """What is found of cards of one compute capability."""

    peak_bytes: int
    fits: Many[Point]


def choose_cards(names: Iterable[str] | None) -> list[Target]:
    """The cards of these names, each once; all of the catalogue for None. Raises UsageError where one has no memory."""
    wanted = (
        [card.target for card in CATALOGUE.values() if card.target.device == "cuda"]
        if names is None
        else [catalogue.target(name) for name in names]
    )
    for card in wanted:
        if card.memory_bytes is None or card.device != "cuda":
            raise UsageError(f"expected cards whose memory is known, got {card.name!r}")
    if not wanted:
        raise UsageError("expected at least one card, got none; leave them out for the whole catalogue")
    return list({card.name: card for card in wanted}.values())


def _card_fit(step: ProfiledStep, card: Target) -> Point:
    room = room_bytes(card) or 0
    peak, retries = step.within(room, card)
    return Point(
        card=card.name,
        room_bytes=room,
        phase=peak.phase,
        time=step.estimate_time(card),
        alloc_retries=retries,
        **judge(step, peak, card),
    )


def _file_short(steps: list[tuple[ProfiledStep, list[Point]]], analysis: ProfiledStep, short: list[Point]) -> None:
    """Add cards to those for which the step is the same, call for call."""
    if not short:
        return
    for other, cards in steps:
        if all(
            getattr(analysis.profile, each) == getattr(other.profile, each) for each in ("ops", "storages", "nodes")
        ):
            cards += short
            return
    steps.append((analysis, short))


def _plan_short(
    step: ProfiledStep,
    short: Sequence[Point],
    targets: Mapping[str, Target],
    host_memory: int | str | None,
    tell: Callable[[str], None],
) -> tuple[list[Point], int]:
    """Plan for the cards that the step does not fit; return them and the number of plans analysed."""
    tell(f"planning checkpoints for {', '.join(fit.card for fit in short)}")
    found, tried = verified_plan.plan_budgets(step, [fit.room_bytes for fit in short], host_memory=host_memory)
    fits = []
    for fit in short:
        plan, planned = found.get(fit.room_bytes, (None, None))
        fits.append(
            fit
            if plan is None or planned is None
            else fit.model_copy(update={"plan": _move_plan(plan, targets[fit.card], step, planned)})
        )
    return fits, tried


def _move_plan(plan: Plan, card: Target, before: ProfiledStep, after: ProfiledStep) -> Plan:
    """Return another card's plan of the same step, with this card's times and process bytes."""
    one, other = (step.profile.model_copy(update={"target": card}) for step in (before, after))
    return plan.model_copy(
        update={
            "target": card,
            "before": allocator.complete_timeline(one, os.environ).peak,
            "after": allocator.complete_timeline(other, os.environ).peak,
            "before_seconds": step_seconds(one),
            "after_seconds": step_seconds(other, taped=plan.is_taped),
        }
    )
