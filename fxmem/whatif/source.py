"""Where steps with other settings come from: another size, card, precision, mesh or checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import Any, Final

import torch
from torch import nn

from fxmem import checkpointing
from fxmem._torch.common import iterate_tensors, tree_map_only
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.fits import NONE, Settings
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Target
from fxmem.records.units import PRECISIONS, AnyMode, Application, format_shape
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.ranks import Mesh, MeshPlan, find_blocks, read_mesh
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.step.analysis import Analysis, analyze_step
from fxmem.simulation.step.fake_model import shadow_model
from fxmem.simulation.step.generation import AnyAnalysis, Generation, analyze_any
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif.program_step import ProgramStep

# --- inputs of another size: the dimensions that vary together, and the arguments with them changed -------------------


@dataclass(frozen=True)
class Resizing:
    """Dimensions of a step's inputs that vary together."""

    size: int
    """What they are."""
    axes: Mapping[int, tuple[int, ...]]
    """Number of a tensor, in the order of the arguments, to its dimensions."""
    names: tuple[str, ...]
    """Each as `NAME:AXIS`."""

    def resize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the dimensions of that size; a tensor that changes is on meta, laid out as it was."""
        numbers = count()
        made: dict[int, torch.Tensor] = {}

        def resize_tensor(tensor: torch.Tensor) -> torch.Tensor:
            axes = self.axes.get(next(numbers), ())
            if not axes:
                return tensor
            if id(tensor) not in made:  # one tensor that is passed twice stays one
                made[id(tensor)] = _resize(tensor, axes, size)
            return made[id(tensor)]

        return tuple(tree_map_only(torch.Tensor, resize_tensor, each) for each in args), {
            name: tree_map_only(torch.Tensor, resize_tensor, each) for name, each in kwargs.items()
        }


def resize_sequences(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with sequences of that length. Raises UsageError if there are none, or for a length below 1."""
    if length < 1:
        raise UsageError(f"expected sequences of at least 1, got {length}")
    return find_resizing(named_arguments(model, args, kwargs), "seq").resize(args, kwargs, length)


def find_resizing(arguments: Sequence[tuple[str, Any]], dim: str | int) -> Resizing:
    """Which dimensions of the named arguments `dim` means; see `fxmem.max_batch`.

    Raises:
        UsageError: it cannot be understood, or the inputs have no such dimension, or dimensions of several sizes.
    """
    tensors = list(_name_tensors(arguments))
    if not tensors:
        raise UsageError("expected inputs with a tensor to resize, got none")
    match dim:
        case "batch":
            places = _shared_dims(tensors, 0)
        case "seq":
            places = _sequence(tensors)
        case int() if not isinstance(dim, bool):
            places = _shared_dims(tensors, dim)
        case str() if ":" in dim:
            places = [_place(tensors, pair.strip(), dim) for pair in dim.split(",")]
        case str() if dim.isdecimal():
            places = _shared_dims(tensors, int(dim))
        case _:
            raise UsageError(
                f"expected a dimension as batch, seq, a number or NAME:AXIS[,NAME:AXIS]; got {dim!r}; "
                f"the inputs are {_list_tensors(tensors)}"
            )
    sizes = {tensors[number][1].shape[axis] for number, axis in places}
    if len(sizes) > 1 or 0 in sizes:
        raise UsageError(
            f"expected dimensions of one size above 0, got {', '.join(map(str, sorted(sizes)))} for {dim!r}; the "
            f"inputs are {_list_tensors(tensors)}"
        )
    axes: dict[int, tuple[int, ...]] = {}
    for number, axis in places:
        axes[number] = (*axes.get(number, ()), axis)
    return Resizing(size=sizes.pop(), axes=axes, names=tuple(f"{tensors[number][0]}:{axis}" for number, axis in places))


_Tensors = Sequence[tuple[str, torch.Tensor]]


def _name_tensors(arguments: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, by the argument's name; one of several in an argument also by its number
    there."""
    for name, argument in arguments:
        tensors = list(iterate_tensors(argument))
        yield from (
            (name if len(tensors) == 1 else f"{name}.{number}", tensor) for number, tensor in enumerate(tensors)
        )


def _list_tensors(tensors: _Tensors) -> str:
    return ", ".join(
        f"{name} {format_shape(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in tensors
    )


def _shared_dims(tensors: _Tensors, axis: int) -> list[tuple[int, int]]:
    shape = tensors[0][1].shape
    if not 0 <= axis < len(shape):
        raise UsageError(
            f"expected a dimension that the first input has, got {axis}; the inputs are {_list_tensors(tensors)}"
        )
    return [
        (number, axis)
        for number, (_, tensor) in enumerate(tensors)
        if tensor.dim() > axis and tensor.shape[axis] == shape[axis]
    ]


def _sequence(tensors: _Tensors) -> list[tuple[int, int]]:
    def is_tokens(tensor: torch.Tensor) -> bool:
        return tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex()

    shape = next((tensor.shape for _, tensor in tensors if is_tokens(tensor)), None)
    if shape is None:
        raise UsageError(
            f"expected a 2-d integer input (tokens) for the dimension seq; the inputs are {_list_tensors(tensors)}: "
            "write NAME:AXIS[,NAME:AXIS]"
        )
    alike = (
        number
        for number, (_, tensor) in enumerate(tensors)
        if tensor.shape == shape or (is_tokens(tensor) and tensor.shape[1] == shape[1])
    )
    return [(number, 1) for number in alike]


def _place(tensors: _Tensors, pair: str, dim: str) -> tuple[int, int]:
    name, _, axis = pair.rpartition(":")
    number = next((number for number, (known, _) in enumerate(tensors) if known == name), None)
    if number is None or not axis.removeprefix("-").isdecimal():
        raise UsageError(
            f"expected NAME:AXIS[,NAME:AXIS] with inputs of {_list_tensors(tensors)}; got {pair!r} in {dim!r}"
        )
    rank = tensors[number][1].dim()
    if not -rank <= int(axis) < rank:
        raise UsageError(
            f"expected an axis of {name} from 0 to {rank - 1}, got {axis} in {dim!r}; "
            f"the inputs are {_list_tensors(tensors)}"
        )
    return number, int(axis) % rank


# --- where steps with other settings come from: another size, card, precision, mesh or checkpoints --------------------


def _resize(tensor: torch.Tensor, axes: tuple[int, ...], size: int) -> torch.Tensor:
    shape = [size if axis in axes else old for axis, old in enumerate(tensor.shape)]
    formats = [
        torch.contiguous_format,
        *({4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])),
    ]
    layout = next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)
    settings: dict[str, Any] = {"dtype": tensor.dtype, "device": "meta", "requires_grad": tensor.requires_grad}
    try:
        if layout is not None:
            return torch.empty(shape, memory_format=layout, **settings)
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
        return torch.empty_permuted(shape, order, **settings)
    except RuntimeError as error:  # more bytes than an address can say
        raise AnalysisError(f"no tensor can be as large as {format_shape(shape)}") from error


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
            return ProgramStep(step.program.at_sizes([at.size, *([] if at.length is None else [at.length])], card))
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
            changes |= _resize_inputs(self.sizes, request, at.size - self.new_tokens)
        if at.length is not None:
            changes |= _resize_inputs(self.lengths, dataclasses.replace(request, **changes), at.length)
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
        return checkpoint_blocks(self.model)

    def count_samples(self, at: Settings) -> int | None:
        """Samples of an optimizer step on all ranks; None where they are not known."""
        shapes = [each.shape for each in self.step.profile.inputs if each.shape] if self.step is not None else []
        size = at.size or (shapes[0][0] if shapes else None)
        mesh = Mesh() if at.mesh == NONE else read_mesh(at.mesh)
        return None if size is None else size * at.accumulate * (mesh.size // mesh.tp)


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """A model whose repeated blocks are checkpointed, each by itself. Raises UsageError where there are none."""
    blocks = {id(block) for block in find_blocks(model)}
    paths = [path for path, module in model.named_modules() if id(module) in blocks]
    if not paths:
        raise UsageError("expected a model with repeated blocks, got none; `fxmem plan` finds what to checkpoint")
    regions = [Region(first_node=0, last_node=1, modules=(path,)) for path in paths]
    return checkpointing.apply(shadow_model(model), regions, Application.MODULES)


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


def _resize_inputs(varied: Resizing, request: StepRequest, size: int) -> dict[str, Any]:
    args, kwargs = varied.resize(request.args, request.kwargs, size)
    return {"args": args, "kwargs": kwargs}
