"""A checkpoint plan: which parts of a step run twice, what that frees, what it costs.

A *region* is a run of consecutive nodes of the unplanned profile that is checkpointed: of what its nodes save for
backward only the region's inputs stay, and the region is run again when backward reaches it
(`torch.utils.checkpoint`, non-reentrant, early stop on). A selective region also keeps the results of some of its
products, which then do not run again. Regions of a plan do not overlap; a region may hold regions of its own, which are
checkpointed again while the outer one is being recomputed.

A plan for single results of operators (`Application.OPERATORS`) has a region for each part of the model in which
anything is recomputed. Its nodes are not run a second time as a whole: each result that backward needs is recomputed
from what is kept, by the operators that lead to it.

*Extra* FLOPs are those of recomputation: what the planned step runs beyond the unplanned one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, RootModel, model_validator

from fxmem.records.files import write_text
from fxmem.records.parts import Tick
from fxmem.records.profile import (
    Assumption,
    Bytes,
    Flops,
    FlopsChange,
    Headed,
    Many,
    Mapped,
    Peak,
    PhaseSpan,
    Record,
    SourceLine,
    Versioned,
)
from fxmem.records.registry import Viewed
from fxmem.records.units import Application, package_path

StrategyName = Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,39}$")]
"""How regions are chosen: the name of a registered strategy, see `fxmem.planning.regions.strategies`."""


class Edit(Record):
    """A line of the user's own code, and what it becomes."""

    source: SourceLine
    after: str
    """The line with the region's call checkpointed."""


class Result(Record):
    """What one call of an operator makes in forward."""

    operator: str
    """Qualified overload, as a `TorchDispatchMode` around the model's forward sees it: `aten.addmm.default`."""
    number: int
    """How many calls of the same come before it."""
    outputs: Many[int] = (0,)
    """Which of the storages that it makes or writes to, in the order of its results."""
    fetched: Many[int] = Field(default=(), exclude_if=lambda value: not value)
    """Where they are offloaded, for each of the outputs how many results are fetched back before it."""
    stretch: Many[int] = Field(default=(), exclude_if=lambda value: not value)
    """Where the region `frees` them again, the stretch of the forward that they are for: its number within the stretch
    that holds it, after the numbers of all that hold it, the outermost first."""


class Region(Record):
    """Consecutive nodes that are checkpointed together."""

    first_node: int
    """Index into the unplanned profile's nodes."""
    last_node: int
    """One past the last."""
    nodes: Many[str] = ()
    """Names of those nodes; in a GRAPH plan, as `torch.fx.symbolic_trace` names them."""
    modules: Many[str] = ()
    """The module whose call this is, or consecutive children of one `nn.Sequential`, in order; empty if it is no
    module's."""
    source: SourceLine | None = None
    """Where it begins in the user's code."""
    freed_bytes: Bytes = 0
    """What its nodes save for backward and no longer keep through forward: their saved bytes, less its inputs and
    outputs that stay and what it `keeps`."""
    extra_flops: Flops | None = None
    """FLOPs of recomputing it once, up to its last saved tensor; in an OPERATORS plan, of all that is recomputed. None
    where an op has no formula."""
    keeps: Many[int] = ()
    """Of its products (matrix products, convolutions, attention: `fxmem.hardware.op_classes`),
    counted from 0 in the order it runs them, those whose results are kept
    from the first run, so that they are not run again."""
    within: str = ""
    """In an OPERATORS plan, the path of the module that the region is in; empty for the model itself."""
    remakes: Many[Result] = ()
    """In an OPERATORS plan, saved values that are recomputed instead of kept."""
    holds: Many[Result] = ()
    """In an OPERATORS plan, the values kept to recompute those from, beside parameters and inputs."""
    frees: Many[Result] = Field(default=(), exclude_if=lambda value: not value)
    """In an OPERATORS plan, results, saved or not, that are freed at once where they are recomputed for a result of
    another stretch of the forward, and recomputed once more when backward has come to their own."""
    offloads: Many[Result] = ()
    """In an OPERATORS plan, saved values that wait in the host's memory instead, copied there in forward and back in
    backward."""
    random: bool = True
    """Whether it may draw random numbers, so that their generator's state has to be kept for the second run."""
    edit: Edit | None = None
    """None where no line of code makes a call that is just this region."""
    regions: Many[Region] = ()
    """Regions within it."""

    @property
    def title(self) -> str:
        """Its module, its first and last child, or its first and last node."""
        if self.remakes or self.offloads:
            return self.within or "the model"
        if len(self.modules) > 1:
            return f"{self.modules[0]} to {self.modules[-1].rpartition('.')[2]}"
        if self.modules:
            return self.modules[0]
        if not self.nodes:
            return f"nodes {self.first_node} to {self.last_node - 1}"
        return self.nodes[0] if len(self.nodes) == 1 else f"{self.nodes[0]} to {self.nodes[-1]}"


_CODE: Final = """{about}
{saved}import fxmem

model = fxmem.checkpoint(model, fxmem.load_plan("{file}"))  # before training
"""
_KEEP: Final = (
    "# fxmem.keep: of the region's products (matrix products, convolutions, attention), counted from 0 in the",
    "# order they run, the results of these stay in memory and are not computed again.",
)
_NO_LINES: Final = "# This plan is about single results of operators, for which no line of your source stands."


class CurvePoint(Record):
    """One plan on the curve of peak against extra compute."""

    strategy: StrategyName
    application: Application
    regions: Many[Region]
    peak: Peak
    """Of the step with this plan."""
    extra_flops: FlopsChange | None
    """As `Plan.extra_flops`."""
    step_seconds: float | None = None
    """Estimated; see `Plan.before_seconds`."""


class PlannedStep(Record):
    """The step with a plan, as its analysis found it, in short."""

    ticks: Tick
    """How many it has."""
    phases: Many[PhaseSpan]
    moments: Many[tuple[Tick, Bytes]]
    """Ticks, in order, and the bytes alive at each: every tick at which they change, or of too many the lowest and the
    highest of each 256th of the step."""
    saved_bytes: Many[Bytes] = ()
    """By node of the unplanned profile, what it keeps for backward: as `Node.saved_bytes`. Empty where the planned step
    has other nodes."""


class BudgetPoint(Record):
    """A compiled step whose partitioner may keep so much for backward."""

    activation_memory_budget: Annotated[float, Field(ge=0, le=1)]
    """Of `torch._functorch.config`: 1 recomputes nothing but what is free, 0 keeps the least."""
    peak: Peak


def _shorten_paths(value: Any) -> Any:
    """A dumped record with the files of its `SourceLine`s named relatively."""
    if isinstance(value, list):
        return [_shorten_paths(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "file" in value and "line" in value:
        file, folder = Path(package_path(value["file"])), Path.cwd()
        return {**value, "file": str(file.relative_to(folder) if file.is_relative_to(folder) else file)}
    return {key: _shorten_paths(item) for key, item in value.items()}


class Plan(Viewed, Headed, Versioned):
    """Where checkpoints go, what they free and what they cost."""

    strategy: StrategyName
    """The requested strategy."""
    chosen: StrategyName
    """The strategy whose regions these are; differs from `strategy` under `auto`."""
    application: Application
    budget_bytes: Bytes | None
    """What the step's peak has to stay within; None: no budget was given."""
    regions: Many[Region]
    """In the order they run; none: the step stays as it is."""
    before: Peak
    """Peak of the step without the plan."""
    after: Peak
    """Peak of the step with the plan."""
    analysed: bool
    """Whether `after` is an analysis of the model with the plan applied; else it is the planner's estimate."""
    forward_flops: Flops | None
    """FLOPs of the unplanned forward; None where an op has no formula."""
    extra_flops: FlopsChange | None
    """FLOPs of the step with the plan beyond the unplanned step's: what it runs again. Negative where the program has
    checkpoints of its own and the plan recomputes less than they do."""
    before_seconds: float | None = Field(default=None)
    """Estimated time of the unplanned step (`fxmem.hardware.step_time`); None where the card's rates are not known."""
    after_seconds: float | None = None
    """The same for the step with the plan."""
    host_bytes: Bytes = 0
    """Pinned host memory that offloaded results take, each in the next power of two of bytes, as torch's host allocator
    gives it."""
    curve: Many[CurvePoint] = ()
    """Plans of which none is better than another in both peak and extra FLOPs, largest peak first; empty if a budget
    was given."""
    planned: PlannedStep | None = Field(default=None, exclude_if=lambda value: value is None)
    """The step with the plan; None where `after` is an estimate."""
    parameters: int | None = None
    """Elements of the parameters of the model it was made for; None where that was not counted."""
    operators: Mapped[str, int] = Field(default_factory=dict)
    """In an OPERATORS plan, how often the planned forward calls each operator: a changed program is noticed by it."""
    assumptions: Many[Assumption] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, fields: Any) -> Any:
        """Plans that 0.1 saved have a certificate, which nothing reads any more."""
        return {name: fields[name] for name in fields if name != "certificate"} if isinstance(fields, dict) else fields

    @property
    def extra_fraction(self) -> float | None:
        """Extra FLOPs over the forward's; None where either is unknown."""
        if self.extra_flops is None or not self.forward_flops:
            return None
        return self.extra_flops / self.forward_flops

    @property
    def is_taped(self) -> bool:
        """Whether a tape notes the forward's operators to carry it out."""
        return bool(self.regions) and self.application is Application.OPERATORS

    @property
    def extent(self) -> str:
        """How much is recomputed, in words: `6 regions of whole modules`."""
        count, results = sum(1 for _ in self.all_regions()), sum(len(region.remakes) for region in self.regions)
        if self.application is Application.OPERATORS:
            sent = sum(len(region.offloads) for region in self.regions)
            parts = f"in {count} part{'s' if count > 1 else ''} of the model"
            if not sent:
                again = ", some more than once" if any(region.frees for region in self.regions) else ""
                return f"{results} result{'s' if results > 1 else ''} of operators {parts}{again}"
            waiting = f"{sent} result{'s' if sent > 1 else ''} of operators in the host's memory"
            return f"{waiting}, {results} recomputed, {parts}" if results else f"{waiting}, {parts}"
        where = "whole modules" if self.application is Application.MODULES else "the traced graph"
        return f"{count} region{'s' if count > 1 else ''} of {where}"

    def all_regions(self) -> Iterator[Region]:
        """Every region, each before those within it."""
        pending = list(reversed(self.regions))
        while pending:
            region = pending.pop()
            yield region
            pending += reversed(region.regions)

    def to_json(self, path: str | Path | None = None, *, indent: int | None = None) -> str:
        """The plan as JSON; also written to `path` if given (whole or not at all).

        Files below the working directory are named from there on, those of installed packages from the package on: a
        plan is committed beside the code, and the same on every machine.
        """
        text = RootModel[Any](_shorten_paths(self.model_dump(mode="json"))).model_dump_json(indent=indent)
        if path is not None:
            write_text(Path(path), text + "\n")
        return text

    def to_code(self, file: str | None = None) -> str:
        """The edits that make the user's own source do this, by file: in a comment the line as it is, then its edit.

        A region that no single line stands for is named in a comment, before the code that carries out the whole plan;
        `file` is where it is saved.
        """
        if not self.regions:
            return "# nothing to change\n"
        saved = "" if file else "# Save it (fxmem plan ... --json plan.json), then:\n"
        names = {"saved": saved, "file": file or "plan.json"}
        if self.application is Application.OPERATORS:
            return _CODE.format(about=_NO_LINES, **names)
        edits: dict[tuple[str, int, str], tuple[Edit, list[Region]]] = {}
        others: list[Region] = []
        for region in self.all_regions():
            if region.edit is None:
                others.append(region)
            else:
                source = region.edit.source
                edits.setdefault((source.file, source.line, region.edit.after), (region.edit, []))[1].append(region)
        lines = ["# Imports that the lines below need:"] if edits else []
        lines += ["import functools", ""] if any("functools." in edit.after for edit, _ in edits.values()) else []
        lines += ["from torch.utils.checkpoint import checkpoint"] if edits else []
        if any("fxmem." in edit.after for edit, _ in edits.values()):
            lines += ["", "import fxmem"]
        lines += [""] if edits else []
        for edit, regions in sorted(edits.values(), key=lambda pair: (pair[0].source.file, pair[0].source.line)):
            titles = ", ".join(region.title for region in regions)
            lines.append(f"# {edit.source.place}, in {edit.source.function}: {titles}, in place of")
            lines += [f"#     {line}" for line in edit.source.code.splitlines()]
            lines += _KEEP if "fxmem.keep(" in edit.after else []
            lines += [*edit.after.splitlines(), ""]
        if others:
            titles = ", ".join(region.title for region in others)
            wrapped = textwrap.wrap(titles, 96, break_long_words=False)
            about = ["# No single line stands for these:", *(f"#   {line}" for line in wrapped)]
            about += ["# This carries out the whole plan, instead of the edits above:"] if edits else []
            lines.append(_CODE.format(about="\n".join(about), **names))
        return "\n".join(lines).rstrip("\n") + "\n"


class CompilePlan(Headed, Versioned):
    """Which `activation_memory_budget` keeps a compiled step within a budget, and what else would."""

    budget_bytes: Bytes
    """What the step's peak has to stay within."""
    eager: Peak
    """Of the step that is not compiled."""
    plan: Plan | None
    """fxmem's own plan of the step that is not compiled, for the same budget; None where none keeps it."""
    chosen: float
    """The largest `activation_memory_budget` of those analysed whose peak keeps the budget."""
    points: Many[BudgetPoint]
    """Those analysed, largest `activation_memory_budget` first."""
    assumptions: Many[Assumption] = ()

    @property
    def after(self) -> Peak:
        """The peak with the chosen one."""
        return next(each.peak for each in self.points if each.activation_memory_budget == self.chosen)
