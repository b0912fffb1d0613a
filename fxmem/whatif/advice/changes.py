"""Changes to a training step that save memory. Each turns one way of running the step into another.

A change works on a `Variant`, so that several can be made one after the other. Nothing of the user's is touched:
modules are changed on a copy of the tree, tensors on copies on meta.

`code` is what to write. It may use `model`, `x` (the input), `loss_fn` (from the output to the loss), `labels`,
`logits` and `batches`, by the names most programs have for them, and `torch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fxmem.memory.budget import BudgetLike
from fxmem.records.plan import Plan
from fxmem.simulation.analysis import Analysis
from fxmem.whatif import verified_plan
from fxmem.whatif.advice.already_done import made_changes
from fxmem.whatif.advice.dtypes import dtype_changes
from fxmem.whatif.advice.frozen_parts import frozen_changes
from fxmem.whatif.advice.in_place import activation_changes, call_changes
from fxmem.whatif.advice.kernels import kernel_changes
from fxmem.whatif.advice.losses import loss_changes
from fxmem.whatif.advice.optimizer import optimizer_changes
from fxmem.whatif.advice.release import release_changes
from fxmem.whatif.advice.variant import AnyChange, Change, Outcome, Variant, analyse_variant

_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def find_changes(analysis: Analysis) -> Iterator[Change]:
    """Yield every change that can be tried on this step, worth it or not."""
    training = analysis.profile.step.mode == "train"
    yield from activation_changes(analysis)
    yield from call_changes(analysis)
    yield from dtype_changes(analysis)
    yield from kernel_changes(analysis)
    if training:
        yield from optimizer_changes(analysis)
        yield from frozen_changes(analysis)
        yield from loss_changes(analysis)
    yield from release_changes(analysis)
    yield from made_changes(analysis)
    if analysis.profile.target.device == "cuda":
        yield expandable_segments()


def expandable_segments() -> AnyChange[Any, Any]:
    """The change of the allocator, of any step for a card."""
    return AnyChange(
        "expandable-segments",
        "allocator that can extend its segments",
        "none",
        "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'",
        lambda way, _: dataclasses.replace(way, environ={**way.environ, **_EXPANDABLE}),
        note="before anything is put on the card; frees what is reserved and not used; the allocated peak stays",
    )


class ModelBench:
    """Tries changes to the step of a model, on stand-ins of it."""

    def __init__(self, analysis: Analysis) -> None:
        self.step = analysis
        self.start = Variant(analysis.model, analysis.request, dict(os.environ))

    def changes(self) -> Iterator[Change]:
        """Every change that can be tried."""
        return find_changes(self.step)

    def analyse(self, way: Variant, known: Iterable[Outcome[Variant, Analysis]]) -> Outcome[Variant, Analysis]:
        """Analyse a variant."""
        return analyse_variant(way, known)

    def parts(self, reached: Outcome[Variant, Analysis]) -> int:
        """How many micro-batches there are to one of the step as it is."""
        return reached.analysis.request.accumulate // self.step.request.accumulate

    def plan(
        self,
        reached: Outcome[Variant, Analysis] | None,
        strategy: str,
        budget: BudgetLike | None,
        progress: Callable[[str], None],
    ) -> Plan:
        """Plan checkpoints, of the step as it is or of a variant."""
        with contextlib.nullcontext() if reached is None else reached.variant.within():
            base = self.step if reached is None else reached.analysis
            return verified_plan.plan(base, strategy, budget, progress=progress)

    def has_norms(self) -> bool:
        """Whether plans of strategy "norms" are worth a try."""
        return any("batch_norm" in op.name for op in self.step.profile.ops)

    def plan_code(self, plan: Plan) -> tuple[str, str]:
        """What to write for a plan, and what to know before."""
        budget = plan.after.counted_bytes if plan.budget_bytes is None else plan.budget_bytes
        asked = '"norms"' if plan.strategy == "norms" else f"budget={budget}"
        code = (
            "import fxmem\nanalysis = fxmem.analyze(model, x)\n"
            f"plan = fxmem.plan(analysis, {asked})\nmodel = fxmem.checkpoint(model, plan)"
        )
        return code, "analysed as you train: loss, optimizer, precision, target"
