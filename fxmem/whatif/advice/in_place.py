"""Results that need not be kept: activations in place, and what is released after its last use."""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fxmem.memory.figures import find_line
from fxmem.memory.liveness import find_idle
from fxmem.records.advice import Effect
from fxmem.records.profile import Kind, Node, Profile, SourceLine
from fxmem.records.units import to_words
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.fake_model import shadow_model
from fxmem.whatif.advice.statements import calls_in_place
from fxmem.whatif.advice.variant import AnyChange, Change, NotApplicableError, Variant, code_for_modules, list_refused

# --- who needs the results of a forward -------------------------------------------------------------------------------


_SEVERAL_VIEWS = (
    "chunk",
    "split",
    "tensor_split",
    "unbind",
    "hsplit",
    "vsplit",
    "dsplit",
    "split_with_sizes",
    "unsafe_chunk",
    "unsafe_split",
)
"""Calls whose results autograd lets nothing write to where they are views (`CreationMeta::MULTI_OUTPUT_NODE`,
torch/csrc/autograd/variable.h)."""


class Uses:
    """Which nodes keep and which read each storage of a forward."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._keepers: dict[int, set[int]] = {}
        self._readers: dict[int, set[int]] = {}
        for index, node in enumerate(profile.nodes):
            for storage in node.saved:
                self._keepers.setdefault(storage, set()).add(index)
            for source in node.inputs:
                for output in profile.nodes[source].outputs:
                    if output.storage is not None:
                        self._readers.setdefault(output.storage, set()).add(index)

    def obstacle(self, index: int) -> str:
        """Why the node at `index` must not overwrite what it reads; empty if it may."""
        nodes = self._profile.nodes
        for source in nodes[index].inputs:
            made_by = [nodes[parent] for parent in nodes[source].inputs if nodes[source].target.endswith("getitem")]
            if any(parent.target.rpartition(".")[2] in _SEVERAL_VIEWS for parent in made_by):
                return f"its input is one of several views that {made_by[0].name} made"
            for storage in {output.storage for output in nodes[source].outputs}:
                reason = self._of_storage(storage, index)
                if reason:
                    return reason
        return ""

    def _of_storage(self, storage: int | None, index: int) -> str:
        if storage is None:
            return "its input has no storage of its own"
        nodes, record = self._profile.nodes, self._profile.storages[storage]
        if record.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OUTPUT) or not record.birth:
            return f"its input is {to_words(record.kind)} of the step"
        if record.is_read or record.holder:
            return "the program keeps its input"
        kept = self._keepers.get(storage, set()) - {index}
        if kept:
            return f"{nodes[min(kept)].name} keeps its input for backward"
        readers = self._readers.get(storage, set()) | {index}
        if max(readers) > index:
            return f"{nodes[max(readers)].name} reads its input afterwards"
        for region in self._profile.recomputed:
            again = sorted(reader for reader in readers if region.first_node <= reader < region.last_node)
            if again and record.node is not None and not region.first_node <= record.node < region.last_node:
                return f"{nodes[again[0]].name} is checkpointed, and reads its input again in backward"
        return ""


_MODULES = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.ELU, nn.CELU, nn.SELU)
"""Their backward needs the output alone (tools/autograd/derivatives.yaml), so nothing is lost when it overwrites the
input."""
_ROUNDING_MODULES = (nn.ELU, nn.CELU, nn.SELU)
"""Their derivative is computed from the output where that overwrites the input, otherwise from the input, and rounds
differently."""

_WITH_KEYWORD = {
    function: function.__name__ for function in (F.relu, F.leaky_relu, F.relu6, F.hardtanh, F.elu, F.celu, F.selu)
}
_INSTEAD: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): getattr(torch, f"{name}_") for name in ("relu", "selu", "celu", "sigmoid", "tanh")},
    **{getattr(torch.Tensor, name): getattr(torch.Tensor, f"{name}_") for name in ("relu", "sigmoid", "tanh")},
}
"""What runs in place instead. As of the modules, backward needs the output alone (tools/autograd/derivatives.yaml)."""
_FUNCTIONS = {
    **{f"torch.nn.functional.{name}": name for name in _WITH_KEYWORD.values()},
    **{f"torch.{name}": name for name in ("relu", "selu", "celu", "sigmoid", "tanh")},
}
_FROM_THE_RESULT = ("elu", "celu", "selu")
"""Their derivative is computed from the output where that overwrites the input, otherwise from the input, and rounds
differently."""
_METHODS = ("relu", "sigmoid", "tanh")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PASSING_ON = (F.__file__, sys.modules[TorchFunctionMode.__module__].__file__)
"""Files of torch that lie between a program's line and the function it called."""

_Place = tuple[str, int, str]
"""File, line, and last part of the function's name."""


def activation_changes(analysis: Analysis) -> Iterator[Change]:
    """Activations that overwrite their input, where autograd allows it."""
    allowed, refused = _sort_modules(analysis)

    def make(variant: Variant, _: Analysis) -> Variant:
        if not allowed:
            raise NotApplicableError(
                list_refused(refused) or "the model has no activation modules that could run in place and do not"
            )
        model = shadow_model(variant.model)
        for path in allowed:
            vars(model.get_submodule(path))["inplace"] = True
        return dataclasses.replace(variant, model=model)

    code = code_for_modules(allowed, "module.inplace = True")
    effect: Effect = (
        "rounding"
        if any(isinstance(analysis.model.get_submodule(path), _ROUNDING_MODULES) for path in allowed)
        else "none"
    )
    yield Change(
        "inplace", "activations in place", effect, code, make, note=f"not {list_refused(refused)}" if refused else ""
    )


def _sort_modules(analysis: Analysis) -> tuple[tuple[str, ...], dict[str, str]]:
    """Activation modules that may overwrite their input, and of the others why not."""
    modules = dict(analysis.model.named_modules())

    def reason(node: Node) -> str | None:
        module = modules[node.module]
        if not isinstance(module, _MODULES) or module.inplace:
            return None
        is_negative = getattr(module, "negative_slope", 1) < 0 or getattr(module, "alpha", 1) < 0
        return "a negative slope needs the input" if is_negative else ""

    return sort_activations(analysis.profile, reason)


def sort_activations(profile: Profile, reason: Callable[[Node], str | None]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Paths of activation modules that may overwrite their input, and of the others why not.

    `reason`: for the node of a module, why it may not; empty for nothing, None for another module or one in place.
    """
    uses = Uses(profile)
    found: dict[str, str] = {}
    for index, node in enumerate(profile.nodes):
        own = reason(node) if node.op == "call_module" else None
        if own is not None:
            found[node.module] = found.get(node.module, "") or own or uses.obstacle(index)
    return tuple(path for path, why in found.items() if not why), {path: why for path, why in found.items() if why}


# --- calls ------------------------------------------------------------------------------------------------------------


def call_changes(analysis: Analysis) -> Iterator[Change]:
    """Lines that call an activation which may overwrite its input, where autograd allows it."""
    allowed, refused = _sort_calls(analysis)
    why = list_refused({f"{file}:{line}": reason for (file, line, _), reason in refused.items()})

    def make(variant: Variant, _: Analysis) -> Variant:
        if not allowed:
            raise NotApplicableError(why or "no line calls an activation that could run in place and does not")
        model = shadow_model(variant.model)
        vars(model)["forward"] = _in_place(model.forward, frozenset(allowed))
        return dataclasses.replace(variant, model=model)

    code = "\n".join(_describe_calls(allowed))
    effect: Effect = "rounding" if any(name in _FROM_THE_RESULT for _, _, name in allowed) else "none"
    yield Change(
        "inplace-calls",
        "activations called as functions in place",
        effect,
        code,
        make,
        note=f"not {why}" if refused else "",
    )


def _sort_calls(analysis: Analysis) -> tuple[dict[_Place, bool], dict[_Place, str]]:
    """Find the lines whose calls may all overwrite their input, with whether they take `inplace=`; and for the other
    lines why they may not."""
    profile = analysis.profile
    uses = Uses(profile)
    keyword: dict[_Place, bool] = {}
    reasons: dict[_Place, str] = {}
    for index, node in enumerate(profile.nodes):
        name = (
            _FUNCTIONS.get(node.target)
            if node.op == "call_function"
            else node.target
            if node.op == "call_method" and node.target in _METHODS
            else None
        )
        if name is None or node.source is None or node.source.file.startswith("<") or node.view_of is not None:
            continue
        place = node.source.file, node.source.line, name
        again = any(region.first_node <= index < region.last_node for region in profile.recomputed)
        reason = "it is checkpointed, and runs again in backward" if again else uses.obstacle(index)
        keyword[place] = node.target.startswith("torch.nn.functional.")
        reasons[place] = reasons.get(place, "") or reason
    return {place: keyword[place] for place, reason in reasons.items() if not reason}, {
        place: reason for place, reason in reasons.items() if reason
    }


def _describe_calls(calls: Mapping[_Place, bool]) -> Iterator[str]:
    for file in dict.fromkeys(file for file, _, _ in calls):
        there = {(line, name): keyword for (other, line, name), keyword in calls.items() if other == file}
        for line, text in calls_in_place(file, there):
            asked = (
                f"{name}(..., inplace=True)" if keyword else f"torch.{name}_"
                for (at, name), keyword in there.items()
                if at == line
            )
            yield f"# {file}:{line}\n" + (text or f"# {' and '.join(asked)}, by whatever name it is called here")


def _in_place(forward: Callable[..., Any], places: frozenset[_Place]) -> Callable[..., Any]:
    def forward_in_place(*args: Any, **kwargs: Any) -> Any:
        with _InPlace(places):
            return forward(*args, **kwargs)

    return forward_in_place


class _InPlace(TorchFunctionMode):
    """Runs the calls of some lines in place."""

    def __init__(self, places: frozenset[_Place]) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_KEYWORD and self._meant(_WITH_KEYWORD[func]):
            return func(*args, **{**kwargs, "inplace": True})
        if func in _INSTEAD and self._meant(func.__name__):
            return _INSTEAD[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _meant(self, name: str) -> bool:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename in _PASSING_ON:
            frame = frame.f_back
        return frame is not None and (frame.f_code.co_filename, frame.f_lineno, name) in self._places


# --- results that the program keeps after their last use, or after every step -----------------------------------------


Release = Callable[[frozenset[str], int, str], Callable[[Any, Any], Any]]
"""From names of nodes, the first one's index, and what holds their results, to how a way frees these."""


def free_by_record(names: frozenset[str], *_: Any) -> Callable[[Any, Any], Any]:
    """Free the results of nodes after their last use where the record is replayed."""
    return lambda variant, _: dataclasses.replace(variant, released=variant.released | names)


def release_changes(analysis: ProfiledStep, release: Release = free_by_record) -> Iterator[AnyChange[Any, Any]]:
    """Yield a change for each line whose results are alive at the peak without need. Nothing saves them for backward,
    and nothing reads them any more."""
    profile, peak = analysis.profile, analysis.peak
    made_by = (profile.storages[index].node for index in find_idle(profile, peak.tick))
    lines: dict[tuple[str, int] | None, list[int]] = {}
    sources: dict[tuple[str, int] | None, SourceLine | None] = {}
    for index in dict.fromkeys(each for each in made_by if each is not None):
        source = find_line(profile, index)
        key = None if source is None else (source.file, source.line)
        lines.setdefault(key, []).append(index)
        sources[key] = source
    for key, indices in lines.items():
        source, nodes = sources[key], [profile.nodes[index] for index in indices]
        where, code = ("the function that runs the step", "") if source is None else (source.place, source.code)
        names = frozenset(node.name for node in nodes)
        holder = _find_holder(profile, nodes)
        yield AnyChange(
            f"release:{nodes[0].name}",
            f"free what {where} made after its last use",
            "none",
            # The whole of a result is freed, an attribute of a longer-lived object.
            f"del {holder.partition('[')[0]}  # after its last use" if holder else write_release(code),
            release(names, indices[0], holder),
            note=f"held by {holder or 'a local name or by the output'} until the {profile.phases[-1].phase.value} ends",
        )


def _find_holder(profile: Profile, nodes: Iterable[Node]) -> str:
    """What a program calls the results of these nodes, where it keeps them to the end of the step; empty for none."""
    made = (output.storage for node in nodes for output in node.outputs)
    return next((held for each in made if each is not None and (held := profile.storages[each].holder)), "")


def write_release(code: str) -> str:
    """Return the code that frees the result of that line of code."""
    try:
        statement = ast.parse(code).body[0] if code else None
    except SyntaxError:  # a line of several
        statement = None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if isinstance(target, ast.Name):
        return f"del {target.id}  # after its last use"
    return "# keep no name for it, and return without it"
