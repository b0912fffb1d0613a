"""`apply`: regions onto a model. Everything is checked before anything is changed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxmem._torch import modules as torch_modules
from fxmem._torch import wrappers as torch_wrappers
from fxmem.checkpointing import subclass
from fxmem.checkpointing.fx_rewrite import Rewritten
from fxmem.checkpointing.recompute import Recomputation
from fxmem.checkpointing.tape.recorder import ByOperator
from fxmem.errors import PlanWarning, UsageError, closest
from fxmem.records.plan import Plan, Region
from fxmem.records.units import Application


def checkpoint(model: nn.Module, plan: Plan) -> nn.Module:
    """Make `model` train as `plan` says, and return it.

    The model itself is changed, not a copy: some of its modules, or it, get a subclass of their class. Parameters,
    buffers, `state_dict` keys, hooks, `isinstance`, `copy.deepcopy`, `pickle` and `torch.save` are as before;
    `uncheckpoint` undoes it. Wrap it in DistributedDataParallel afterwards. Recomputation takes place while the module
    that is a region (in a GRAPH plan: the model) is in `train()` and gradients are on. A model with a GRAPH plan calls
    its leaf modules itself while it trains: hooks that are put on other modules later do not run then.

    Raises:
        UsageError: no plan, or one for another model; the model is checkpointed already, or cannot be rewritten. On
            the first training step: a region does something that must not be done twice.

    Warns with PlanWarning where a plan of operators frees less than it promised: made by another release of torch; on
    the first training step, for another program than the one that runs.
    """
    if not isinstance(plan, Plan):
        raise UsageError(f"expected a plan, as fxmem.load_plan(path) reads it from a file; got {plan!r}")
    if plan.application is Application.OPERATORS:
        _check_program(model, plan)
    return apply(model, plan.regions, plan.application, plan.operators)


def _check_program(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan of operators of another model; warn of one of another release of torch."""
    elements = sum(parameter.numel() for parameter in model.parameters())
    if plan.parameters not in (None, elements):
        raise UsageError(
            f"this plan is for another model: {plan.model} of {plan.parameters:,} parameters, but this "
            f"{type(model).__name__} has {elements:,}; plan again for the model as it is, its adapters included"
        )
    if plan.torch_version.split(".")[:2] != torch.__version__.split(".")[:2]:
        warnings.warn(
            f"this plan names operators of torch {plan.torch_version}; this is torch {torch.__version__}, which may "
            "run others; plan again with it",
            PlanWarning,
            stacklevel=3,
        )


def uncheckpoint(model: nn.Module) -> nn.Module:
    """Undo `checkpoint` and return the model; one that is not checkpointed is returned as it is."""
    for module in model.modules():
        subclass.restore(module)
    return model


def apply(
    model: nn.Module, regions: Sequence[Region], application: Application, operators: Mapping[str, int] | None = None
) -> nn.Module:
    """Make `model`, real, on meta or of FakeTensors, recompute these regions; see `checkpoint`.

    `operators`: as `Plan.operators`; without them the first step is not compared with the planned one.
    """
    for path, module in model.named_modules():
        if subclass.find_way(module) is not None:
            raise UsageError(
                f"expected a model without checkpoints, but {_describe_path(path)} has been checkpointed before; "
                f"fxmem.uncheckpoint(model) undoes that"
            )
    if not regions:
        return model
    if application is not Application.MODULES:
        _check_forward(model, "")
    if application is Application.OPERATORS:
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(devices) > 1:  # backward has a thread for each, and they would recompute at once
            raise UsageError(
                f"expected a model on one device for a plan with application 'operators', got parameters on "
                f"{', '.join(devices)}; plan with application='modules'"
            )
        subclass.become(model, ByOperator.collect(regions, dict(operators or {})))
    elif application is Application.GRAPH:
        rewritten = Rewritten(tuple(regions))
        rewritten.prepare(model)
        subclass.become(model, rewritten)
    else:
        for module, way in _ways(model, regions):
            subclass.become(module, way)
    return model


# --- modules ----------------------------------------------------------------------------------------------------------


@dataclass
class _Whole:
    """A module that is a region."""

    recomputation: Recomputation
    within: _Slices | None = None

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `subclass.Way`."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(module, *args, **kwargs)
        run = functools.partial(forward if self.within is None else self.within.forward, module)
        return self.recomputation(lambda: (module,), run, args, kwargs)


@dataclass
class _Slice:
    """Consecutive children `[first, last)` of an `nn.Sequential` that are a region, and slices within it."""

    first: int
    last: int
    recomputation: Recomputation
    slices: tuple[_Slice, ...] = ()


@dataclass
class _Slices:
    """An `nn.Sequential` of which slices are regions."""

    slices: tuple[_Slice, ...]

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `subclass.Way`."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(module, *args, **kwargs)
        return self.forward(module, *args, **kwargs)

    def forward(self, module: nn.Module, input: Any) -> Any:
        """`nn.Sequential.forward`."""
        children = [child for child in torch_modules.own_modules(module).values() if child is not None]
        return _run_slices(children, 0, len(children), self.slices, input)


def _run_slices(children: list[nn.Module], first: int, last: int, slices: tuple[_Slice, ...], x: Any) -> Any:
    at = first
    for region in (*slices, None):
        for child in children[at : last if region is None else region.first]:
            x = child(x)
        if region is not None:
            run = functools.partial(_run_slices, children, region.first, region.last, region.slices)
            x = region.recomputation(functools.partial(list, children[region.first : region.last]), run, (x,), {})
            at = region.last
    return x


def _ways(model: nn.Module, regions: Sequence[Region]) -> list[tuple[nn.Module, subclass.Way]]:
    """For each module that is to run differently, how."""
    whole: dict[nn.Module, Recomputation] = {}
    slices: dict[nn.Sequential, list[_Slice]] = {}
    for region in _all(regions):
        if not region.modules:
            raise UsageError(
                f"expected regions that are modules, but {describe(region)} is none; "
                "this is a plan for application 'graph'"
            )
        modules = [_submodule(model, path) for path in region.modules]
        where = f"region {describe(region)}"
        if len(modules) == 1:
            _check_forward(modules[0], region.modules[0])
            known = whole.setdefault(modules[0], Recomputation(where, region.random, region.keeps))
            known.random = known.random or region.random
        else:
            parent, first = _parent(model, region, modules)
            recomputation = Recomputation(where, region.random, region.keeps)
            slices.setdefault(parent, []).append(_Slice(first, first + len(modules), recomputation))
    trees: dict[nn.Module, _Slices] = {parent: _Slices(_nest(found)) for parent, found in slices.items()}
    ways: list[tuple[nn.Module, subclass.Way]] = [
        (module, _Whole(recomputation, trees.pop(module, None))) for module, recomputation in whole.items()
    ]
    return [*ways, *trees.items()]


def describe(region: Region) -> str:
    """A region by its modules, or else by its nodes."""
    names = region.modules or region.nodes or (f"node {region.first_node}", f"node {region.last_node - 1}")
    return _describe_path(names[0]) if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _describe_path(path: str) -> str:
    return path or "the model"


def _all(regions: Iterable[Region]) -> Iterator[Region]:
    for region in regions:
        yield region
        yield from _all(region.regions)


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        paths = [known for known, _ in model.named_modules()]
        raise UsageError(
            f"this plan is for another model: {type(model).__name__} has no module {path!r}{closest(path, paths)}"
        ) from None


def _check_forward(module: nn.Module, path: str) -> None:
    if torch_wrappers.wrapped_module(module) is not None:
        raise UsageError(
            f"{_describe_path(path)} is a model that torch.compile has wrapped; checkpoint the model first and compile "
            "it afterwards, or compile it in place with model.compile()"
        )
    if "forward" in vars(module):
        raise UsageError(
            f"{_describe_path(path)} has a forward of its own in place of its class's ({type(module).__name__}); "
            "remove it before checkpointing"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            f"{_describe_path(path)} is a ScriptModule, whose forward Python does not run; "
            "checkpoint the module it was made from"
        )


def _parent(model: nn.Module, region: Region, modules: list[nn.Module]) -> tuple[nn.Sequential, int]:
    """The `nn.Sequential` whose consecutive children a region's modules are, and the position of the first."""
    path = region.modules[0].rpartition(".")[0]
    parent = _submodule(model, path)
    prefix = f"{path}." if path else ""
    names = [f"{prefix}{name}" for name, child in torch_modules.own_modules(parent).items() if child is not None]
    first = names.index(region.modules[0]) if region.modules[0] in names else len(names)
    if not isinstance(parent, nn.Sequential) or tuple(names[first : first + len(modules)]) != region.modules:
        raise UsageError(
            f"expected consecutive children of one nn.Sequential, but {describe(region)} are not, in this "
            f"{type(parent).__name__}"
        )
    if getattr(type(parent), "_fxmem_original", type(parent)).forward is not nn.Sequential.forward:
        raise UsageError(
            f"{_describe_path(path)} is an nn.Sequential with a forward of its own ({type(parent).__name__}), "
            "which may not run its children in order"
        )
    _check_forward(parent, path)
    return parent, first


def _nest(slices: list[_Slice]) -> tuple[_Slice, ...]:
    """The same with each inside the smallest that contains it; of equal ones, one."""
    outer: list[_Slice] = []
    open_slices: list[_Slice] = []
    for one in sorted(slices, key=lambda s: (s.first, -s.last)):
        while open_slices and open_slices[-1].last <= one.first:
            open_slices.pop()
        around = open_slices[-1] if open_slices else None
        if around is not None and around.last < one.last:
            raise UsageError(
                f"{around.recomputation.where} and {one.recomputation.where} overlap; regions lie beside or within "
                f"one another"
            )
        if around is not None and (around.first, around.last) == (one.first, one.last):
            around.recomputation.random = around.recomputation.random or one.recomputation.random
            continue
        if around is None:
            outer.append(one)
        else:
            around.slices = (*around.slices, one)
        open_slices.append(one)
    return tuple(outer)
