"""Where steps with other settings come from: another size, card, precision, mesh or checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, Final

from torch import nn

from fxmem import checkpointing
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.fits import NONE, Settings
from fxmem.records.names import PRECISIONS, AnyMode, Application
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Target
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.ranks import Mesh, MeshPlan, find_blocks, read_mesh
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.step.analysis import Analysis, analyze_step
from fxmem.simulation.step.generation import AnyAnalysis, Generation, analyze_any
from fxmem.simulation.step.model.fake_model import shadow_model
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif.program_step import ProgramStep
from fxmem.whatif.resize import Resizing, find_resizing

BLOCKS: Final = "blocks"
"""Checkpoints at each repeated block of a model."""
CONTEXT: Final = "context"
"""The dimension of a generation that is its prompt and its new tokens together."""

Change = Callable[[Any], AnyAnalysis]
"""What is done to a step before it is judged, e.g. `lambda analysis: apply_regions(analysis, regions,
application)`."""


class StepSource:
    """A program, which takes a size and a card; or a report, which is what it is."""

    plans: Mapping[str, Plan] = {}

    def __init__(self, step: ProfiledStep) -> None:
        self.step = step

    def at(self, card: Target, **settings: Any) -> Settings:
        """Settings that are the step's own but for these."""
        return Settings(card=card.name, **settings)

    def run(self, at: Settings, card: Target) -> ProfiledStep:
        """The step with these settings on the card. A program runs where its profile is asked for."""
        step = self.step
        if isinstance(step, ProgramStep) and at.size is not None:
            return ProgramStep(step.program.at_size(at.size, card))
        return step if step.is_fixed or step.profile.target.capability == card.capability else step.vary(target=card)

    def count_samples(self, at: Settings) -> int | None:
        """Samples of an optimizer step on all ranks; None where they are not known."""


@dataclasses.dataclass(eq=False)
class ModelSource:
    """A model's step or generation."""

    model: nn.Module
    request: StepRequest
    """As it is given."""
    repeat: Callable[[nn.Module, Any], AnyAnalysis] = analyze_step
    step: AnyAnalysis | None = None
    """The same, analysed."""
    dim: str | int = "batch"
    """The dimension of a size."""
    plans: Mapping[str, Plan] = dataclasses.field(default_factory=dict)
    """By the names that checkpoints have."""
    change: Change | None = None
    sharding: MeshPlan = dataclasses.field(default_factory=lambda: MeshPlan(Mesh()))
    """The settings of FSDP in a mesh."""

    @classmethod
    def of(cls, step: AnyAnalysis, **settings: Any) -> ModelSource:
        """The source of an analysed step."""
        return cls(step.model, step.request, step.repeat, step, **settings)

    @cached_property
    def sizes(self) -> Resizing:
        """The dimensions of a size. Raises UsageError where there are none."""
        return self._resizing("seq" if self.dim == CONTEXT else self.dim)

    @cached_property
    def lengths(self) -> Resizing:
        """The dimensions of a length, likewise."""
        return self._resizing("seq")

    def _resizing(self, dim: str | int) -> Resizing:
        return find_resizing(named_arguments(self.model, self.request.args, self.request.kwargs), dim)

    @cached_property
    def new_tokens(self) -> int:
        """The tokens of a size that are not of the prompt."""
        if self.dim != CONTEXT:
            return 0
        if not isinstance(self.step, Generation):
            raise UsageError("expected dim='context' with mode='generate'; the length of a step's sequences is seq")
        return self.step.request.new_tokens

    def at(self, card: Target, **settings: Any) -> Settings:
        """Settings that are the step's own but for these."""
        request = self.request
        mesh = str(request.parallelize.mesh) if isinstance(request.parallelize, MeshPlan) else NONE
        own = {"precision": request.precision or NONE, "mesh": mesh, "accumulate": request.accumulate}
        return Settings(card=card.name, **{**own, **settings})

    def run(self, at: Settings, card: Target, model: nn.Module | None = None) -> AnyAnalysis:
        """The step with these settings on the card; of another model if one is given."""
        request, own = self.request, self.at(self.request.resolved_target)
        changes: dict[str, Any] = {}
        if (card.capability, card.torch) != (request.resolved_target.capability, request.resolved_target.torch):
            changes["target"] = card
        if at.size is not None and at.size != self.sizes.size + self.new_tokens:
            if at.size <= self.new_tokens:
                raise AnalysisError(f"a context of {at.size} has no room for a prompt and {self.new_tokens} new tokens")
            changes |= _resize(self.sizes, request, at.size - self.new_tokens)
        if at.length is not None:
            changes |= _resize(self.lengths, dataclasses.replace(request, **changes), at.length)
        if at.precision != own.precision:
            changes["precision"] = None if at.precision == NONE else PRECISIONS[at.precision]
        if at.accumulate != own.accumulate:
            changes["accumulate"] = at.accumulate
        if at.mesh not in (own.mesh, NONE):
            mesh = read_mesh(at.mesh)
            plan = self.sharding if "fsdp" in mesh.dimensions else MeshPlan(Mesh())
            changes |= {"parallelize": dataclasses.replace(plan, mesh=mesh), "ranks": mesh.size, "rank": 0}
        model = self._checkpoint(at.checkpoints) if model is None else model
        if self.step is not None and model is self.model and not changes:
            step = self.step
        else:
            step = self.repeat(model, dataclasses.replace(request, **changes))
        return step if self.change is None else self.change(step)

    @cache  # noqa: B019 - a source lives no longer than its models
    def _checkpoint(self, checkpoints: str) -> nn.Module:
        """The model with these checkpoints."""
        if checkpoints == NONE:
            return self.model
        if checkpoints in self.plans:
            plan = self.plans[checkpoints]
            return checkpointing.apply(shadow_model(self.model), plan.regions, plan.application)
        blocks = {id(block) for block in find_blocks(self.model)}
        paths = [path for path, module in self.model.named_modules() if id(module) in blocks]
        if not paths:
            raise UsageError("expected a model with repeated blocks, got none; name a plan of `fxmem plan`")
        regions = [Region(first_node=0, last_node=1, modules=(path,)) for path in paths]
        return checkpointing.apply(shadow_model(self.model), regions, Application.MODULES)

    def count_samples(self, at: Settings) -> int | None:
        """Samples of an optimizer step on all ranks; None where they are not known."""
        shapes = [each.shape for each in self.step.profile.inputs if each.shape] if self.step is not None else []
        size = at.size or (shapes[0][0] if shapes else None)
        mesh = Mesh() if at.mesh == NONE else read_mesh(at.mesh)
        return None if size is None else size * at.accumulate * (mesh.size // mesh.tp)


Source = StepSource | ModelSource


def take_step(
    model: Any,
    inputs: Any,
    *,
    mode: AnyMode = "train",
    target: str | Target,
    progress: Callable[[str], None] | None,
    options: dict[str, Any],
) -> ProfiledStep:
    """What was analysed already, or a model's step or generation. Raises UsageError for options of the first."""
    if not isinstance(model, ProfiledStep):
        return analyze_any(model, inputs, mode=mode, target=target, progress=progress, options=options)
    if inputs is not None or options:
        raise UsageError(f"expected no inputs and no {', '.join(options) or 'options'} of a step that was analysed")
    return model


def open_source(step: ProfiledStep, **settings: Any) -> Source:
    """The source of what is analysed, or was run; settings are those of `ModelSource`."""
    return ModelSource.of(step, **settings) if isinstance(step, (Analysis, Generation)) else StepSource(step)


def _resize(varied: Resizing, request: StepRequest, size: int) -> dict[str, Any]:
    args, kwargs = varied.resize(request.args, request.kwargs, size)
    return {"args": args, "kwargs": kwargs}
