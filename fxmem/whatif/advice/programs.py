"""Changes to a program: it runs again with each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

from fxmem.memory import allocator
from fxmem.memory.budget import BudgetLike
from fxmem.records.plan import Plan
from fxmem.simulation.profiled_step import ProfiledStep
from fxmem.whatif.advice.changes import expandable_segments
from fxmem.whatif.advice.in_place import sort_activations
from fxmem.whatif.advice.optimizer import FORMS, RELEASE, RELEASE_NOTE
from fxmem.whatif.advice.release import release_changes
from fxmem.whatif.advice.uses import free_after_last_use
from fxmem.whatif.advice.variant import AnyChange, NotApplicableError, Outcome, code_for_modules, list_refused
from fxmem.whatif.program_edits import AS_IT_IS, ProgramEdits
from fxmem.whatif.program_plan import plan_program

_PLAIN: Final = dict.fromkeys(("ReLU", "ReLU6", "Hardtanh"), "")
"""Activations without a slope, whose results are the same to the bit in place."""
_HALF = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ProgramWay:
    """One way of running a program."""

    edits: ProgramEdits
    environ: Mapping[str, str]
    """Where the allocator's settings are found."""
    released: frozenset[str] = frozenset()
    """Names of nodes whose results the program frees after their last use."""

    def edit(self, **changes: Any) -> ProgramWay:
        """Return the way with other edits."""
        return dataclasses.replace(self, edits=dataclasses.replace(self.edits, **changes))


ProgramChange = AnyChange[ProgramWay, ProfiledStep]


class ProgramBench:
    """Tries changes to a program.

    Args:
        run: runs it with edits.
        command: how `fxmem` is told to run it; empty for a function.
    """

    def __init__(self, run: Callable[[ProgramEdits], ProfiledStep], command: str = "") -> None:
        self._run = run
        self._command = command
        self.start = ProgramWay(AS_IT_IS, dict(os.environ))
        self.step = run(self.start.edits)

    def changes(self) -> Iterator[ProgramChange]:
        """Every change that can be tried."""
        profile = self.step.profile
        yield _in_place_change(self.step)
        if profile.step.mode == "train":
            kind = profile.target.device
            code = f'with torch.autocast("{kind}", dtype=torch.bfloat16):\n    loss = loss_fn(model(x))'
            yield AnyChange("bf16-autocast", "bfloat16 autocast", "rounding", code, _autocast)
            for form, title, argument in FORMS:
                names = " and ".join(profile.step.program.optimizers if profile.step.program else ())
                code = f"# give {names or 'the optimizer'} this argument\n{argument}"
                yield AnyChange(f"{form}-optimizer", title, "none", code, _use_form(form), excludes="optimizer")
            yield AnyChange(*RELEASE, lambda way, _: way.edit(releases_gradients=True), note=RELEASE_NOTE)
        yield from release_changes(self.step)
        if profile.target.device == "cuda":
            yield expandable_segments()

    def analyse(
        self, way: ProgramWay, known: Iterable[Outcome[ProgramWay, ProfiledStep]]
    ) -> Outcome[ProgramWay, ProfiledStep]:
        """Run the program in this way. A known run with the same edits is taken instead."""
        step = next((each.analysis for each in known if each.variant.edits == way.edits), None)
        step = self._run(way.edits) if step is None else step
        profile = free_after_last_use(step.profile, way.released)
        return Outcome(way, step, profile, allocator.complete_timeline(profile, way.environ).peak)

    def parts(self, reached: Outcome[ProgramWay, ProfiledStep]) -> int:
        """How many micro-batches there are to one of the program as it is."""
        return 1

    def plan(
        self,
        reached: Outcome[ProgramWay, ProfiledStep] | None,
        strategy: str,
        budget: BudgetLike | None,
        progress: Callable[[str], None],
    ) -> Plan:
        """Plan checkpoints, of the program as it is or on top of edits."""
        edits, step = (self.start.edits, self.step) if reached is None else (reached.variant.edits, reached.analysis)
        return plan_program(self._run, strategy, budget, edits=edits, before=step, progress=progress)[0]

    def has_norms(self) -> bool:
        """Plans of strategy "norms" are of graphs."""
        return False

    def plan_code(self, plan: Plan) -> tuple[str, str]:
        """What to write for a plan, and what to know before."""
        budget = plan.after.counted_bytes if plan.budget_bytes is None else plan.budget_bytes
        made = f"plan = fxmem.plan(train, budget={budget})"
        if self._command:
            made = f"# fxmem plan --budget {budget} --json plan.json --run {self._command}\n"
            made += "plan = fxmem.load_plan('plan.json')"
        return f"import fxmem\n{made}\nmodel = fxmem.checkpoint(model, plan)", "before the model is called"


def _in_place_change(step: ProfiledStep) -> ProgramChange:
    allowed, refused = sort_activations(step.profile, lambda node: _PLAIN.get(node.module_type))

    def make(way: ProgramWay, _: ProfiledStep) -> ProgramWay:
        if not allowed:
            raise NotApplicableError(
                list_refused(refused) or "the program has no activation modules that could run in place and do not"
            )
        return way.edit(in_place=tuple(allowed))

    inner = [path.partition(".")[2] for path in allowed]
    code = code_for_modules(inner, "module.inplace = True")
    note = f"not {list_refused(refused)}" if refused else ""
    return AnyChange("inplace", "activations in place", "none", code, make, note=note)


def _autocast(way: ProgramWay, step: ProfiledStep) -> ProgramWay:
    if any(output.dtype in _HALF for node in step.profile.nodes for output in node.outputs):
        raise NotApplicableError("the program computes in half precision already")
    return way.edit(autocast=True)


def _use_form(form: Literal["fused", "forloop"]) -> Callable[[ProgramWay, ProfiledStep], ProgramWay]:
    return lambda way, _: way.edit(optimizer_form=form)
