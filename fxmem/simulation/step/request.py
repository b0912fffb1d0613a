"""`StepRequest`: one step of a model, and how it is to be run.

The Python API and the command line make it once; prediction, validation and both measurements take it as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.records.parts import CompileSettings
from fxmem.records.profile import Profile, Target
from fxmem.records.units import AS_IS, PRECISIONS, Mode, Precision, Values, ZeroGrad
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.kernels.kernel_settings import KernelSettings
from fxmem.simulation.ranks.mailbox import Parallelize, World
from fxmem.simulation.ranks.mesh_plan import MeshPlan

Loss = Callable[[Any], torch.Tensor]
"""Takes the model's output, gives the scalar to differentiate."""
OptimizerSpec = str | type[Optimizer] | Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None
"""A name, a class, one that exists, a factory of parameters, or None."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepRequest:
    """The call `model(*args, **kwargs)` as one step, with every setting but the model.

    Raises:
        UsageError: a setting that cannot be understood, or two that exclude each other.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Tensors real, meta or fake, nested as the model takes them."""
    name: str = ""
    """What the model is called in the record; empty for the name of its class."""
    notes: tuple[str, ...] = ()
    """How the model was built: these join the assumptions."""
    mode: Mode = "train"
    """`train` for forward, loss, backward and optimizer; `infer` for forward under `no_grad`."""
    loss: Loss | None = None
    """Output -> scalar tensor; None for the output's `.loss`, else the sum of its floating-point tensors."""
    optimizer: OptimizerSpec = "adamw"
    """See `fxmem.simulation.step.step.make_optimizer`; None for a step without one."""
    precision: Precision | None = None
    """Dtype of autocast; None for none."""
    settings: KernelSettings | None = None
    """Which kernels may run; None for torch's flags as they are in this process."""
    accumulate: int = 1
    """Micro-batches to one optimizer step. The step is the last of them: the gradients of those before exist."""
    prefetch: int = 0
    """Further batches like the inputs that are on the device throughout the step."""
    zero_grad: ZeroGrad = "after-step"
    """When gradients are cleared. `before-backward`: between forward and backward, through which those of the step
    before live."""
    set_to_none: bool = True
    """Whether clearing gradients frees them, as `zero_grad(set_to_none=True)`, or fills them with zeros."""
    keep_outputs: bool | None = None
    """Whether the loop's variables hold output and loss of the step before until the new ones replace them, as in most
    training loops that people write; not where a step is a function of its own. None: where it trains."""
    inference_mode: bool = False
    """At inference, run under `torch.inference_mode` rather than `torch.no_grad`."""
    values: Values = "bound"
    """What decides where the model asks for values: `bound`, the largest shapes there can be; `real`, what the same
    forward and loss read on the CPU, of these inputs or, where they have no values, of made-up ones."""
    target: str | Target = "h100"
    """The device that the step is predicted for."""
    compile: CompileSettings | None = None
    """What `torch.compile` is given; None for eager code."""
    ranks: int | None = None
    """How many ranks there are, of which the step is that of one; None for one card alone."""
    rank: int | None = None
    """Which rank the step is of; None for one of each class of equal ranks, of which the largest is shown."""
    parallelize: Parallelize | None = None
    """Makes the model that of one rank."""

    def __post_init__(self) -> None:
        if self.mode not in ("train", "infer"):
            raise UsageError(f"expected mode 'train' or 'infer', got {self.mode!r}")
        object.__setattr__(self, "precision", _read_precision(self.precision))
        for name, given, least in (("accumulate", self.accumulate, 1), ("prefetch", self.prefetch, 0)):
            if given < least:
                raise UsageError(f"expected {name} to be at least {least}, got {given}")
        if self.accumulate > 1 and self.mode == "infer":
            raise UsageError("expected accumulate with a training step: at inference there are no gradients")
        if self.values not in get_args(Values):
            raise UsageError(f"expected values 'bound' or 'real', got {self.values!r}")
        if self.zero_grad not in get_args(ZeroGrad):
            raise UsageError(f"expected zero_grad 'after-step' or 'before-backward', got {self.zero_grad!r}")
        if self.accumulate > 1 and self.zero_grad == "before-backward":
            why = "of several micro-batches the last clears none"
            raise UsageError(f"expected accumulate=1 with zero_grad='before-backward': {why}")
        if self.inference_mode and self.mode == "train":
            raise UsageError("expected inference_mode with mode 'infer': under it nothing can be trained")

        if (self.ranks is None) != (self.parallelize is None):
            what = "how many ranks, and the function that shards the model"
            raise UsageError(f"expected ranks and parallelize together: {what}")
        if self.ranks is not None and self.compile is not None:
            _check_compiled_ranks(self.compile, self.parallelize)
        if self.world is None and self.rank is not None:
            raise UsageError(f"expected rank {self.rank} with ranks: how many there are")

    @functools.cached_property
    def world(self) -> World | None:
        """The place of the rank; None for one card alone. Raises UsageError if there is no such rank."""
        return None if self.ranks is None else World(self.ranks, self.rank or 0)

    @property
    def keeps_outputs(self) -> bool:
        """Whether output and loss of the step before live until the new ones replace them."""
        return self.mode == "train" if self.keep_outputs is None else self.keep_outputs

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients outlive the step, into the next one."""
        return self.mode == "train" and (self.zero_grad == "before-backward" or not self.set_to_none)

    @functools.cached_property
    def resolved_target(self) -> Target:
        """The target itself where it was given by name. Raises UsageError if the name is not known."""
        return catalogue.target(self.target) if isinstance(self.target, str) else self.target


def _check_compiled_ranks(settings: CompileSettings, parallelize: object) -> None:
    """Refuse what cannot be compiled on ranks. Raises UsageError."""
    if not isinstance(parallelize, MeshPlan):
        if not settings.as_is:
            why = "the function compiles the blocks, then it shards them"
            raise UsageError(f"expected compile {AS_IS!r} with parallelize: {why}")
    elif parallelize.mesh.tp > 1 or "fsdp" not in parallelize.mesh.dimensions:
        raise UsageError(
            f"expected a mesh of fsdp, alone or with replicate, with compile, got {parallelize.mesh}: give your own "
            f"function as parallelize, and compile {AS_IS!r}; graphs split by DistributedDataParallel are not followed"
        )


def _read_precision(precision: Any) -> Precision | None:
    """The precision that a name or a dtype of torch means."""
    name = str(precision).removeprefix("torch.")
    if precision is not None and name not in PRECISIONS:
        raise UsageError(f"expected precision None, 'bf16' or 'fp16', got {precision!r}")
    return None if precision is None else PRECISIONS[name]


# --- `AnalysedModel`: what a model takes, which can be analysed again with something changed --------------------------


RequestT = TypeVar("RequestT", bound=StepRequest)


class AnalysedModel(ProfiledStep, Generic[RequestT]):
    """The memory of what a model was asked for, and its reasons."""

    is_fixed = False

    def __init__(
        self, profile: Profile, model: nn.Module, request: RequestT, repeat: Callable[[nn.Module, RequestT], Self]
    ) -> None:
        self.profile: Profile = profile
        """The step: nodes, ops and storages."""
        self.model = model
        """The model that was analysed, as it was given."""
        self.request = request
        """What it was asked for."""
        self.repeat = repeat
        """Analyses another model or request."""

    def vary(self, model: nn.Module | None = None, **changes: Any) -> Self:
        """Analyse another model, or with other settings: any field of its request."""
        return self.repeat(self.model if model is None else model, dataclasses.replace(self.request, **changes))
