"""Which cards of the catalogue a step fits, by itself or with checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxmem.errors import UsageError
from fxmem.hardware.step_time import step_seconds
from fxmem.memory import allocator
from fxmem.records.fits import Fits, Point, Space
from fxmem.records.plan import Plan
from fxmem.records.profile import Target
from fxmem.records.units import AnyMode
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.whatif import verified_plan
from fxmem.whatif.fits import Measuring, choose_cards
from fxmem.whatif.plan_search import check_training
from fxmem.whatif.source import open_source, take_step


def cards(
    model: ProfiledStep | torch.nn.Module | Callable[[], torch.nn.Module],
    inputs: Any = None,
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
        model: as for `fxmem.analyze`; or what it returned, without inputs and options. A report, which cannot be
            analysed again, is held against the cards of its own compute capability alone.
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
    tell, chosen = progress or (lambda _: None), choose_cards(names)
    largest = max(chosen, key=lambda card: card.memory_bytes or 0)
    step = take_step(model, inputs, mode=mode, target=largest, progress=progress, options=options)
    if plans:
        check_training(step)
        if step.is_fixed:
            raise UsageError("expected plans for a model or a program: `fxmem plan` plans a report, for its card")
    elif host_memory is not None:
        raise UsageError("expected host_memory with plans=True: it is where plans put results")
    own = step.profile.target
    others = [card.name for card in chosen if step.is_fixed and card.capability != own.capability]
    if others and names is not None:
        raise UsageError(
            f"expected cards of the report's compute capability, that of {own.name}: others run other kernels; "
            f"{others[0]} needs the model or the program itself"
        )
    order = sorted(chosen, key=lambda card: (card.memory_bytes or 0, card.name))
    source, kept = open_source(step), [card for card in order if card.name not in others]
    work = Measuring(source, Space(question="cards", planned=plans), chosen)
    asked = [source.at(card) for card in chosen if card in kept]
    found = {each.card: each for made in work.measure(asked, tell) for each in made}
    plan_analyses, targets = 0, {card.name: card for card in chosen}
    for alike, short in _join_alike(work.steps):
        tell(f"planning checkpoints for {', '.join(fit.card for fit in short)}")
        made, tried = verified_plan.plan_budgets(alike, [fit.room_bytes for fit in short], host_memory=host_memory)
        plan_analyses += tried
        for fit in short:
            if fit.room_bytes in made:
                plan = _move_plan(*made[fit.room_bytes], targets[fit.card], alike)
                found[fit.card] = fit.model_copy(update={"plan": plan})
    analyses = 0 if step.is_fixed else work.analyses
    points = [found[card.name] for card in kept]
    return work.record(step.profile, points, cards=tuple(kept), analyses=analyses, plan_analyses=plan_analyses)


def _join_alike(steps: Iterable[tuple[ProfiledStep, Sequence[Point]]]) -> list[tuple[ProfiledStep, list[Point]]]:
    """The cards that are too small, those together for which the step is the same, call for call."""
    joined: list[tuple[ProfiledStep, list[Point]]] = []
    for step, points in steps:
        short = [each for each in points if not each.fits]
        same = (cards for other, cards in joined if _key(other) == _key(step))
        if short and (cards := next(same, None)) is not None:
            cards += short
        elif short:
            joined.append((step, short))
    return joined


def _key(step: ProfiledStep) -> tuple[Any, ...]:
    return step.profile.ops, step.profile.storages, step.profile.nodes


def _move_plan(plan: Plan, after: ProfiledStep, card: Target, before: ProfiledStep) -> Plan:
    """Return another card's plan of the same step, with this card's times and process bytes."""
    one, other = (step.profile.at(card) for step in (before, after))
    return plan.model_copy(
        update={
            "target": card,
            "before": allocator.complete_timeline(one, os.environ).peak,
            "after": allocator.complete_timeline(other, os.environ).peak,
            "before_seconds": step_seconds(one),
            "after_seconds": step_seconds(other, taped=plan.is_taped),
        }
    )
