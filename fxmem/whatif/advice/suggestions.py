"""Advice on saving memory: each change is applied to a stand-in of the model and analysed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Self

from fxmem.errors import AnalysisError, ExceededError, FxmemError, UsageError
from fxmem.hardware.step_time import step_seconds
from fxmem.memory.budget import Budget, BudgetLike, parse_budget
from fxmem.memory.figures import find_outermost
from fxmem.memory.training import find_idle
from fxmem.records.advice import Advice, Effect, Refused, Suggestion
from fxmem.records.pause_gc import pause_gc
from fxmem.records.plan import CurvePoint, Plan
from fxmem.records.profile import Kind, Phase, Profile, Report
from fxmem.records.units import group
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.processes.executor import SideAnswer, SideJobs
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.generation import Generation
from fxmem.whatif.advice.changes import GenerationBench, ModelBench
from fxmem.whatif.advice.programs import ProgramBench
from fxmem.whatif.advice.variant import TABLES, AnyChange, Bench, NotApplicableError, Outcome, analyse_way, replay_way
from fxmem.whatif.program_step import ProgramStep, take_step

_Change = AnyChange[Any, Any]
_Outcome = Outcome[Any, Any]

_WORTH = 1000
"""A change that frees less than this part of the peak is not suggested."""
_SHARES = 100_000
"""A plan that was judged by its allocated bytes alone is asked for by a whole number of such parts of the peak."""
_LONG_RUN = 10_000
"""Steps of a long run."""
_TRIED = 100
"""A change that by the record cannot free this part of the peak is not tried."""
_NOT_OF_THE_MODEL = ("expandable", "release")
"""Changes that an analysis of the changed model does not show."""
_NOT_UNDER_A_PLAN = (*_NOT_OF_THE_MODEL, "inplace-calls", "compile")
"""A plan is not made on top of these: edited lines are not in the graph that it rewrites, and a compiler decides
itself what it recomputes."""
QUICK = tuple(TABLES["quick"])
"""Changes that are tried first: a line or two each, and often worth the most."""
_MENDS = "activation:"
"""How keys of changes begin that do in one call what a finding says is written out: results differ by rounding."""
_EFFECTS: tuple[Effect, ...] = ("none", "rounding", "output", "training")


def advise(
    analysis: ProfiledStep | Callable[[], Any],
    budget: BudgetLike | None = None,
    *,
    plans: bool = True,
    quick: bool = False,
    host_memory: int | str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Advice:
    """Every change that can be tried on this step, with what it is worth.

    Args:
        analysis: of the step as it is, from `analyze`, or from `generate`; or a function that trains as a script does,
            which runs inside `fxmem.record` once for each change.
        budget: as in `fxmem.whatif.verified_plan.plan`; with it, the cheapest set of changes that keeps it is looked
            for, too.
        plans: whether to try checkpoint plans, which take the longest.
        quick: try only changes of one line that often decide (`QUICK`), and no plans.
        host_memory: as in `fxmem.whatif.verified_plan.plan`, for the plans of a model.
        progress: called with a few words on what is being done.
        options: of `fxmem.record` for a function, whose `steps` are 3 unless given.

    Raises:
        UsageError: a budget or an option that cannot be understood.
        AnalysisError: the function raised, or ran nothing on the target.
    """
    tell = progress or (lambda _: None)
    analysis = take_step(analysis, tell, options)
    return try_changes(make_bench(analysis, host_memory), budget, plans=plans, quick=quick, progress=tell)


def make_bench(step: ProfiledStep, host_memory: int | str | None = None) -> Bench[Any, Any]:
    """Where changes to a step are tried; `host_memory` is as for `advise`.

    Raises:
        UsageError: host memory for what has no use for it; what there is of the step is a record.
    """
    if isinstance(step, Analysis):
        return ModelBench(step, host_memory)
    if not isinstance(step, (Generation, ProgramStep)):
        raise UsageError("expected a model or a program to change, got the record of a step")
    is_program = isinstance(step, ProgramStep)
    if host_memory is not None:
        why = "plans of a program are about its modules" if is_program else "in a generation nothing waits for backward"
        raise UsageError(f"expected no host_memory: {why}")
    return ProgramBench(step) if isinstance(step, ProgramStep) else GenerationBench(step)


def try_changes(
    bench: Bench[Any, Any],
    budget: BudgetLike | None,
    *,
    plans: bool,
    quick: bool = False,
    progress: Callable[[str], None],
    found: Callable[[Suggestion], None] = lambda _: None,
    interruptible: bool = False,
    patch: bool = False,
) -> Advice:
    """`advise` for a step on its bench; `found` is called with each suggestion as soon as there is one.

    With `patch`, the changes that have one are tried together as well.

    An interrupt ends it, and where it is `interruptible`, the advice is what has been found by then.
    """
    step = bench.step
    limit = None if budget is None else parse_budget(budget).resolve(step.peak.counted_bytes)
    advisor = _Advisor(bench, limit, progress, found, quick=quick)
    plans = plans and not quick
    together, patched, is_interrupted = None, None, False
    try:
        with advisor:
            advisor.try_singly()
            if plans and step.profile.step.mode == "train":
                advisor.propose_plans()
            advisor.await_others()
        together = advisor.together(plans) if limit is not None else None
        patched = advisor.patched() if patch else None
    except KeyboardInterrupt:
        if not interruptible:
            raise
        is_interrupted = True
        advisor.refuse_untried()
    profile = step.profile
    return Advice(
        **profile.heading(),
        before=step.peak,
        before_flops=_flops(profile),
        before_seconds=step_seconds(profile),
        before_host_bytes=_find_host_bytes(profile),
        before_link_bytes=_count_link_bytes(profile),
        budget_bytes=None if limit is None else limit.nbytes,
        suggestions=tuple(sorted(advisor.suggestions, key=advisor.rank)),
        together=together,
        patched=patched,
        refused=advisor.refused,
        interrupted=is_interrupted,
        assumptions=profile.assumptions,
        findings=step.findings,
    )


class _Advisor:
    """Tries the changes of a bench; a context in which those that take long are tried beside the others.

    Args:
        bench: where changes are tried.
        limit: the budget.
        tell: is told what is being done.
        found: is called with each suggestion.
        quick: whether only changes of one line are tried.
    """

    def __init__(
        self,
        bench: Bench[Any, Any],
        limit: Budget | None,
        tell: Callable[[str], None],
        found: Callable[[Suggestion], None],
        *,
        quick: bool = False,
    ) -> None:
        self.bench, self.limit, self.found = bench, limit, found
        self._tell, self._begun = tell, 0
        self.step = step = bench.step
        changes = [change for change in bench.changes() if not quick or change.key in QUICK]
        self._changes = {change.key: change for change in sorted(changes, key=lambda each: each.key not in QUICK)}
        """Those that often decide first."""
        self._places = {change.key: place for place, change in enumerate(changes)}
        self._useful: dict[str, Suggestion] = {}
        """What each change is worth that is worth something."""
        self._refused: dict[str, Refused] = {}
        self._plans: list[Suggestion] = []
        self._written_plans: list[_Change] = []
        """Those that are edits of the user's own lines."""
        self.variants: dict[tuple[str, ...], Any] = {(): bench.start}
        self.outcomes: dict[tuple[str, ...], _Outcome | FxmemError] = {(): Outcome(bench.start, step, step)}
        jobs = {key: job for key, change in self._changes.items() if (job := self._find_job(change)) is not None}
        self._jobs = SideJobs(jobs, self._tell_of)

    def __enter__(self) -> Self:
        self._jobs.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._jobs.__exit__(*raised)

    @property
    def suggestions(self) -> list[Suggestion]:
        """Single changes in the order of the bench, then plans."""
        return [*(self._useful[key] for key in self._in_order(self._useful)), *self._plans]

    @property
    def refused(self) -> tuple[Refused, ...]:
        """What is not to be had, in the order of the bench."""
        return tuple(self._refused[key] for key in self._in_order(self._refused))

    def _in_order(self, keys: Iterable[str]) -> list[str]:
        return sorted(keys, key=self._places.__getitem__)

    def tell(self, what: str) -> None:
        """Tell what is being done, and look what has been tried beside."""
        self._collect(self._jobs.finished())
        self._tell(what)

    def _tell_of(self, key: str) -> None:
        self._begun += 1
        self._tell(f"{self._begun} of {len(self._changes)}, trying {self._changes[key].title}")

    def try_singly(self) -> None:
        """Try each change by itself, but for those that are tried beside."""
        apart = self._jobs.left
        for key, change in self._changes.items():
            if key not in apart:
                self._collect(self._jobs.finished())
                self._tell_of(key)
                self._consider(change)

    def await_others(self) -> None:
        """Wait for what is tried beside; what no fork can do is tried here."""
        self._collect(self._jobs.wait())

    def refuse_untried(self) -> None:
        """Refuse what has not been tried."""
        for key, change in self._changes.items():
            if key not in self._useful and key not in self._refused:
                self._refuse(change, "not tried: interrupted")

    def _find_job(self, change: _Change) -> Callable[[], str] | None:
        """What tries a change in a fork; None where that is not worth one, or the change does not apply."""
        try:
            if not self.bench.takes_long(change) or self._is_worthless(change):
                return None
            way = self._variant([change])
        except FxmemError:
            return None
        is_replayed = any(way.is_like(each.variant) for each in self.outcomes.values() if isinstance(each, Outcome))
        return None if is_replayed else lambda: way.analyse().report(explains=False).model_dump_json()

    def _collect(self, answers: Iterable[SideAnswer]) -> None:
        for answer in answers:
            change = self._changes[answer.name]
            if answer.is_lost:
                self._tell(f"trying {change.title}")
            elif answer.error is not None:
                self.outcomes[change.key,] = answer.error
            else:
                with pause_gc():
                    report = Report.model_validate_json(answer.text)
                way = self._variant([change])
                self.outcomes[change.key,] = replay_way(way, self.bench.read(way, report))
            self._consider(change)

    def _consider(self, change: _Change) -> None:
        """Suggest a change, or refuse it."""
        try:
            if change.most is not None and self._is_worthless(change):
                most = f"frees at most {change.most.allocated:,} bytes of the peak by the record of the step as it is"
                self._refuse(change, f"{most}; not tried", change.most.allocated)
                return
            suggestion = self._suggestion([change], self._outcome([change]))
        except NotApplicableError as error:
            self._refuse(change, str(error))
            return
        except FxmemError as error:
            self._refuse(change, f"the changed step cannot be analysed: {error}")
            return
        if suggestion.patch and change.effect == "none" and suggestion.same_backward is False:
            self._refuse(change, "changes the gradients: backward runs other operators with it")
            return
        reserved = (self.step.peak.reserved_bytes or 0) - (suggestion.peak.reserved_bytes or 0)
        worth = self.step.peak.counted_bytes // _WORTH
        is_leaner = suggestion.saved_bytes > worth or (suggestion.saved_bytes >= 0 and reserved > worth)
        if is_leaner or suggestion.growth_bytes is not None:
            self._useful[change.key] = suggestion
            self.found(suggestion)
        else:
            self._refuse(change, _describe_worthless(suggestion.saved_bytes))
            del self.outcomes[change.key,]  # in no set, so that its memory can go

    def _is_worthless(self, change: _Change) -> bool:
        """Whether a change can free too little to be tried."""
        return change.most is not None and max(change.most) * _TRIED < self.step.peak.counted_bytes

    def _refuse(self, change: _Change, reason: str, most: int | None = None) -> None:
        self._refused[change.key] = Refused(key=change.key, title=change.title, reason=reason, most_bytes=most)

    def propose_plans(self) -> None:
        """Find checkpoint plans: the one that balances peak and FLOPs, and the one that reaches lowest."""
        self.tell("planning checkpoints")
        try:
            plan = self.bench.plan_ends(self.tell)
        except (ExceededError, AnalysisError):
            return
        points = [plan, *(_move_along(plan, point) for point in plan.curve[-1:])]
        keys = ("checkpoint", "checkpoint-most")
        named = [(each, key) for each, key in zip(points, keys, strict=False) if each.regions]
        found = [self._suggest_plan(point, key) for point, key in named]
        self._written_plans = [each for point, key in named if (each := self.bench.write_plan(point, key)) is not None]
        found = found[:1] if len(found) == 2 and found[0].peak == found[1].peak else found
        for suggestion in (*found, *self._norms()):
            self._plans.append(suggestion)
            self.found(suggestion)

    def _suggest_plan(self, plan: Plan, key: str) -> Suggestion:
        share = min(plan.after.counted_bytes * _SHARES // plan.before.counted_bytes + 1, _SHARES) / _SHARES
        asked = plan.budget_bytes if self.limit is not None and self.limit.bounds_allocator else None
        code, note = self.bench.plan_code(plan, asked or share)
        return Suggestion(
            key=key,
            title=f"activation checkpoints: {plan.extent}",
            effect="none",
            code=code,
            note=note,
            peak=plan.after,
            saved_bytes=self.step.peak.counted_bytes - plan.after.counted_bytes,
            extra_flops=plan.extra_flops,
            step_seconds=plan.after_seconds,
        )

    def _norms(self) -> list[Suggestion]:
        """Norms and activations before convolutions computed again, which costs no convolution."""
        if not self.bench.has_norms():
            return []
        try:
            plan = self.bench.plan(None, "norms", None, self.tell)
        except FxmemError:
            return []
        suggestion = self._suggest_plan(plan, "checkpoint-norms")
        title = f"batch norms and activations computed again ({len(plan.regions)} regions)"
        return [suggestion.model_copy(update={"title": title})] if plan.regions and suggestion.saved_bytes > 0 else []

    def together(self, plans: bool) -> Suggestion | None:
        """Find the cheapest set of changes that keeps the budget, the mildest first. A plan is added where they do not
        suffice."""
        if self._keeps(self._outcome([])):
            return None
        for effect in range(len(_EFFECTS)):
            allowed = [pair for pair in self.candidates() if _EFFECTS.index(pair[1].effect) <= effect]
            chosen, reached = self._add_helpful(
                [change for change, _ in sorted(allowed, key=lambda pair: -pair[1].saved_bytes)]
            )
            if reached is not None and self._keeps(reached):
                return self._suggestion(*self._drop_idle(chosen, reached))
            if not plans or self.step.profile.step.mode != "train":
                continue
            found = self._add_plan(chosen, reached)
            if found is not None:
                return found
        return None

    def patched(self) -> Suggestion | None:
        """The changes of the user's own lines that help together: those that leave the numbers as they are, or mend
        what was found, and where a budget needs them, others. Of what lowers the reserved bytes alone there is need
        where memory is short."""
        is_short, whole = self.limit is not None or self.step.peak.fits is False, self.step.peak.counted_bytes
        useful = [
            each
            for each in sorted(self._useful.values(), key=self.rank)
            if each.patch and (is_short or each.growth_bytes is not None or each.saved_bytes * _TRIED >= whole)
        ]
        plans: list[list[_Change]] = [[], *([each] for each in self._written_plans if is_short)]
        chosen: Sequence[_Change] = ()
        reached: _Outcome | None = None
        for effect, plan in itertools.product(_EFFECTS if is_short else _EFFECTS[:1], plans):
            most = _EFFECTS.index(effect)
            keys = (each.key for each in useful if _EFFECTS.index(each.effect) <= most or each.key.startswith(_MENDS))
            chosen, reached = self._add_helpful([*(self._changes[key] for key in keys), *plan])
            if reached is not None and self._keeps(reached):
                chosen, reached = self._drop_idle(chosen, reached)
                break
        return None if reached is None else self._suggestion(chosen, reached)

    def candidates(self) -> list[tuple[_Change, Suggestion]]:
        """The changes a set is made of. Freezing is not among them: to train less of the model is another task, not
        another way to do this one. Nor is compiling, which takes its time anew for each set."""
        return [
            (self._changes[key], self._useful[key])
            for key in self._in_order(self._useful)
            if self._useful[key].saved_bytes > 0 and not key.startswith(("freeze:", "compile"))
        ]

    def _add_helpful(self, changes: Iterable[_Change]) -> tuple[list[_Change], _Outcome | None]:
        """One change after the other, those that still help, until the budget is kept."""
        chosen: list[_Change] = []
        reached: _Outcome | None = None
        for change in changes:
            if change.excludes and any(other.excludes == change.excludes for other in chosen):
                continue
            tried = self._try_changes([*chosen, change])
            before = Outcome(self.bench.start, self.step, self.step) if reached is None else reached
            if tried is not None and _worth(tried) < _worth(before):
                chosen, reached = [*chosen, change], tried
                if self._keeps(reached):
                    break
        return chosen, reached

    def _drop_idle(self, chosen: Sequence[_Change], reached: _Outcome) -> tuple[Sequence[_Change], _Outcome]:
        """Drop changes that the budget does not need, starting with those that alter numbers most."""
        for change in sorted(chosen, key=lambda c: -_EFFECTS.index(c.effect)):
            fewer = [other for other in chosen if other is not change]
            tried = self._try_changes(fewer) if fewer else None
            if tried is not None and self._keeps(tried):
                chosen, reached = fewer, tried
        return chosen, reached

    def _add_plan(self, chosen: Sequence[_Change], reached: _Outcome | None) -> Suggestion | None:
        """Plan checkpoints on top of those changes that are in the model and the call."""
        chosen = [change for change in chosen if not change.key.startswith(_NOT_UNDER_A_PLAN)]
        reached = self._try_changes(chosen) if chosen else None
        try:
            plan = self.bench.plan(reached, "auto", self.limit, self.tell)
        except FxmemError:
            return None
        suggestion = self._suggest_plan(plan, "checkpoint")
        if not chosen:
            return suggestion
        return suggestion.model_copy(
            update={
                "key": "+".join([*(change.key for change in chosen), "checkpoint"]),
                "title": "; ".join([*(change.title for change in chosen), suggestion.title]),
                "effect": max((change.effect for change in chosen), key=_EFFECTS.index),
                "code": "\n".join([*(change.code for change in sorted(chosen, key=_order)), suggestion.code]),
            }
        )

    def _try_changes(self, changes: Iterable[_Change]) -> _Outcome | None:
        self.tell("trying several changes together")
        try:
            return self._outcome(changes)
        except FxmemError:
            return None

    def _outcome(self, changes: Iterable[_Change]) -> _Outcome:
        """Analyse the step with these changes. No set is analysed twice, nor one that differs only in what an analysis
        does not look at."""
        ordered = sorted(changes, key=_order)
        keys = tuple(change.key for change in ordered)
        if keys not in self.outcomes:
            try:
                known = [each for each in self.outcomes.values() if isinstance(each, Outcome)]
                self.outcomes[keys] = analyse_way(self._variant(ordered), known)
            except FxmemError as error:
                self.outcomes[keys] = error
        found = self.outcomes[keys]
        if isinstance(found, FxmemError):
            raise found
        return found

    def _variant(self, ordered: Sequence[_Change]) -> Any:
        """The changes made, what is shared with another set being the same objects."""
        keys = tuple(change.key for change in ordered)
        if keys not in self.variants:
            self.variants[keys] = ordered[-1].make(self._variant(ordered[:-1]), self.step)
        return self.variants[keys]

    def _keeps(self, reached: _Outcome) -> bool:
        """Whether it is within the budget; without one, whether it fits a card that the step as it is does not."""
        if self.limit is not None:
            return reached.replayed.keeps(self.limit)
        return self.step.peak.fits is False and reached.peak.fits is True

    def rank(self, each: Suggestion) -> tuple[Any, ...]:
        """What grows less comes first; then, where the step does not fit and it does with it, what moves least between
        card and host; then what frees most."""
        fits, growth = self.step.peak.fits is False and each.peak.fits is True, each.growth_bytes
        moved: float = 0
        if fits and self.step.profile.step.mode == "infer":
            moved = math.inf if each.link_bytes is None else each.link_bytes
        return growth is None, growth or 0, not fits, moved, -each.saved_bytes, each.extra_flops or 0

    def _suggestion(self, changes: Sequence[_Change], reached: _Outcome) -> Suggestion:
        flops, before = _flops(reached.profile), _flops(self.step.profile)
        growth = _find_less_growth(self.step, reached.profile)
        less = () if growth is None else (f"it then grows by {growth:,} bytes a step",)
        repeats = self.bench.parts(reached)  # a step of micro-batches runs that often
        return Suggestion(
            key="+".join(change.key for change in changes),
            title="; ".join(change.title for change in changes),
            effect=max((change.effect for change in changes), key=_EFFECTS.index),
            code="\n".join(change.code for change in sorted(changes, key=_order)),
            peak=reached.peak,
            saved_bytes=self.step.peak.counted_bytes - reached.peak.counted_bytes,
            extra_flops=None if flops is None or before is None else 0 if repeats > 1 else flops - before,
            step_seconds=None if repeats > 1 else step_seconds(reached.profile),
            host_bytes=_find_host_bytes(reached.profile),
            link_bytes=_count_link_bytes(reached.profile),
            growth_bytes=growth,
            patch=reached.variant.write_patch(),
            same_backward=_has_same_backward(self.step.profile, reached.profile),
            note="; ".join((*(change.note for change in changes if change.note), *less)),
        )


def _worth(reached: _Outcome) -> tuple[int, int, int]:
    """Less for a better way of running the step: what it grows by, its peak, what is reserved."""
    run, peak = reached.profile.step.program, reached.peak
    growth = 0 if run is None else sum(each.nbytes for each in run.grown)
    return growth, peak.counted_bytes, peak.reserved_bytes or 0


def _has_same_backward(before: Profile, after: Profile) -> bool | None:
    """See `Suggestion.same_backward`. What an optimizer runs may have moved into backward."""
    if before.step.mode != "train":
        return None
    others = {op.name for each in (before, after) for op in each.ops if op.phase is Phase.OPTIMIZER}
    free = _find_free(before, after)
    was, is_now = (_list_backward(each, others, free) for each in (before, after))
    rest = iter(is_now)
    further = Counter(name for name, _ in is_now) - Counter(name for name, _ in was)
    again = {op.name for op in before.ops if op.phase is Phase.FORWARD}
    return all(each in rest for each in was) and further.keys() <= again


def _find_free(before: Profile, after: Profile) -> set[str]:
    """Names of nodes whose backward makes unread gradients alone, and of those that make some of them beside others,
    where these are still made and no more."""

    def list_ops(profile: Profile) -> dict[str, list[str]]:
        return group((profile.nodes[op.node].name, op.name) for op in profile.ops if op.phase is Phase.BACKWARD)

    (idle, needed), was, is_now = find_idle(before), list_ops(before), list_ops(after)
    free = {node.name for index, node in enumerate(before.nodes) if idle and index not in needed}
    makers = free & was.keys()
    readers = {node.name for node in before.nodes if any(before.nodes[each].name in makers for each in node.inputs)}
    return free | {each for each in readers & is_now.keys() if Counter(is_now[each]) <= Counter(was.get(each))}


def _list_backward(profile: Profile, others: Container[str], free: Container[str]) -> list[tuple[str, object]]:
    """The operators of backward in their order, without the others and those of free nodes, with shape and dtype of
    what each makes."""
    made: dict[int, list[tuple[object, str]]] = {}
    for each in profile.storages:
        if each.op is not None and each.kind is not Kind.WORKSPACE:
            made.setdefault(each.op, []).append((each.shape, each.dtype))
    ops = ((index, op) for index, op in enumerate(profile.ops) if op.phase is Phase.BACKWARD)
    kept = ((index, op.name) for index, op in ops if profile.nodes[op.node].name not in free)
    return [(name, made.get(index, [])) for index, name in kept if name not in others]


def _find_less_growth(before: ProfiledStep, after: Profile) -> int | None:
    """How many bytes a step a program grows by, where one of those that grew before grows no more; one that in
    `_LONG_RUN` steps comes to less than a thousandth of the peak does not count."""
    was, is_now = (() if each.step.program is None else each.step.program.grown for each in (before.profile, after))
    left, least = {each.holder for each in is_now}, before.peak.counted_bytes // (_WORTH * _LONG_RUN)
    is_less = any(each.holder not in left and each.nbytes > least for each in was)
    return sum(each.nbytes for each in is_now) if is_less else None


def _order(change: _Change) -> tuple[bool, str]:
    """The order in which changes are made, and their code is written."""
    return change.key.startswith(_NOT_OF_THE_MODEL), change.key


def _move_along(plan: Plan, point: CurvePoint) -> Plan:
    """The plan at another point of its curve."""
    update: dict[str, object] = {"chosen": point.strategy, "application": point.application, "regions": point.regions}
    update |= {"after": point.peak, "extra_flops": point.extra_flops, "after_seconds": point.step_seconds}
    return plan.model_copy(update=update)


def _describe_worthless(saved: int) -> str:
    if saved == 0:
        return "frees nothing here: the peak is elsewhere"
    return f"frees {saved:,} bytes of the peak" if saved > 0 else f"takes {-saved:,} bytes more"


def _find_host_bytes(profile: Profile) -> int | None:
    """See `Suggestion.host_bytes`."""
    run = profile.step.program
    return None if run is None or run.host is None else run.host.peak_bytes


def _count_link_bytes(profile: Profile) -> int | None:
    """See `Suggestion.link_bytes`."""
    first = [each.first_node for each in find_outermost(profile)] if profile.step.program is not None else []
    return sum(op.host_bytes for op in profile.ops if op.node >= min(first)) if first else None


def _flops(profile: Profile) -> int | None:
    counted = [op.flops for op in profile.ops]
    return None if None in counted else sum(flops or 0 for flops in counted)
