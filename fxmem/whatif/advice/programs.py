"""Changes to a program: it runs again with each."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from fxmem.records.plan import Plan
from fxmem.records.profile import Kind, Phase, Report
from fxmem.whatif.advice.changes import expandable_segments
from fxmem.whatif.advice.in_place import growth_changes, release_changes, sort_activations
from fxmem.whatif.advice.optimizer import FORMS, RELEASE, RELEASE_NOTE
from fxmem.whatif.advice.variant import (
    AnyChange,
    Bench,
    Bound,
    NotApplicableError,
    RunWay,
    bound_saving,
    code_for_modules,
    list_refused,
)
from fxmem.whatif.program_step import ProgramCommand, ProgramEdits, ProgramStep

_PLAIN: Final = dict.fromkeys(("ReLU", "ReLU6", "Hardtanh"), "")
"""Activations without a slope, whose results are the same to the bit in place."""
_HALF = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ProgramWay(RunWay):
    """One way of running a program."""

    step: ProgramStep
    """As it is."""
    edits: ProgramEdits

    def edit(self, **changes: Any) -> ProgramWay:
        """Return the way with other edits."""
        return dataclasses.replace(self, edits=dataclasses.replace(self.edits, **changes))

    def is_like(self, other: ProgramWay) -> bool:
        """Whether both have the same edits."""
        return self.edits == other.edits

    def analyse(self) -> ProgramStep:
        """Run the program."""
        return self.step.vary(self.edits)


ProgramChange = AnyChange[ProgramWay, ProgramStep]


class ProgramBench(Bench[ProgramWay, ProgramStep]):
    """Tries changes to a program."""

    def __init__(self, step: ProgramStep) -> None:
        super().__init__(step, ProgramWay(step, step.edits, environ=dict(os.environ)))

    def changes(self) -> Iterator[ProgramChange]:
        """Every change that can be tried."""
        profile = self.step.profile
        bound = functools.partial(bound_saving, self.step, self.start.environ)
        yield _in_place_change(self.step, bound)
        if profile.step.mode == "train":
            kind = profile.target.device
            code = f'with torch.autocast("{kind}", dtype=torch.bfloat16):\n    loss = loss_fn(model(x))'
            yield AnyChange("bf16-autocast", "bfloat16 autocast", "rounding", code, _autocast)
            for form, title, argument in FORMS:
                names = " and ".join(profile.step.program.optimizers if profile.step.program else ())
                code = f"# give {names or 'the optimizer'} this argument\n{argument}"
                key, most = f"{form}-optimizer", bound(of=Phase.OPTIMIZER)
                yield AnyChange(key, title, "none", code, _use_form(form), excludes="optimizer", most=most)
            gradients = [index for index, each in enumerate(profile.storages) if each.kind is Kind.GRADIENT]
            most = bound({*gradients}, of=Phase.OPTIMIZER)
            yield AnyChange(*RELEASE, _release_gradients, note=RELEASE_NOTE, most=most)
        yield from growth_changes(self.step)
        yield from release_changes(self.step)
        if profile.target.device == "cuda":
            yield expandable_segments()

    def takes_long(self, change: ProgramChange) -> bool:
        """See `Bench.takes_long`: a script runs again. A function may have to be run where it is."""
        return isinstance(self.step.program, ProgramCommand)

    def read(self, way: ProgramWay, report: Report) -> ProgramStep:
        """See `Bench.read`."""
        step = way.analyse()
        step.profile = report
        return step

    def plan_code(self, plan: Plan) -> tuple[str, str]:
        """What to write for a plan, and what to know before."""
        budget = plan.after.counted_bytes if plan.budget_bytes is None else plan.budget_bytes
        made = f"plan = fxmem.plan(train, budget={budget})"
        if isinstance(self.step.program, ProgramCommand):
            made = f"# fxmem plan --budget {budget} --json plan.json --run {self.step.program.name}\n"
            made += "plan = fxmem.load_plan('plan.json')"
        return f"import fxmem\n{made}\nmodel = fxmem.checkpoint(model, plan)", "before the model is called"


def _in_place_change(step: ProgramStep, bound: Callable[[set[int]], Bound]) -> ProgramChange:
    allowed, refused = sort_activations(step.profile, lambda node: _PLAIN.get(node.module_type))

    def make(way: ProgramWay, _: ProgramStep) -> ProgramWay:
        if not allowed:
            raise NotApplicableError(
                list_refused(refused) or "the program has no activation modules that could run in place and do not"
            )
        return way.edit(in_place=tuple(allowed))

    inner = [path.partition(".")[2] for path in allowed]
    code = code_for_modules(inner, "module.inplace = True")
    note = f"not {list_refused(refused)}" if refused else ""
    made = (output.storage for node in step.profile.nodes if node.module in allowed for output in node.outputs)
    most = bound({each for each in made if each is not None}) if allowed else None
    return AnyChange("inplace", "activations in place", "none", code, make, note=note, most=most)


def _autocast(way: ProgramWay, step: ProgramStep) -> ProgramWay:
    if any(output.dtype in _HALF for node in step.profile.nodes for output in node.outputs):
        raise NotApplicableError("the program computes in half precision already")
    return way.edit(autocast=True)


def _release_gradients(way: ProgramWay, _: ProgramStep) -> ProgramWay:
    return way.edit(releases_gradients=True)


def _use_form(form: Literal["fused", "forloop"]) -> Callable[[ProgramWay, ProgramStep], ProgramWay]:
    return lambda way, _: way.edit(optimizer_form=form)
