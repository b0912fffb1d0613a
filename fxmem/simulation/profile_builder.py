"""Builds a `Profile` from the log of a finished run: its nodes, operators and storages with their owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from fxmem import __version__
from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.hardware.workspaces import insert_workspaces
from fxmem.memory import liveness
from fxmem.records.profile import (
    Assumption,
    InputTensor,
    Kind,
    Node,
    Op,
    Phase,
    PhaseBytes,
    Profile,
    RecomputedOp,
    RestoredTensor,
    Storage,
    TensorInfo,
)
from fxmem.simulation.assumptions import assumptions, unknowns
from fxmem.simulation.observe.event_log import LOSS, OPTIMIZER
from fxmem.simulation.observers import FakeRun


def build_profile(run: FakeRun) -> Profile:
    """Build the profile of a run."""
    log, tracer, collector = run.log, run.recording.tracer, run.recording.collector
    readers = _find_first_readers(run)
    storages, renumbered = _build_storages(run, readers)
    nodes = _build_nodes(run, storages, renumbered)
    profile = Profile.model_construct(
        fxmem_version=__version__,
        torch_version=torch.__version__,
        model=run.name,
        inputs=tuple(InputTensor(name=label, shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for label, t in run.inputs),
        step=run.step,
        target=run.recording.target,
        ticks=log.tick,
        phases=tuple(log.phases),
        nodes=nodes,
        ops=tuple(
            Op(name=op.name, node=run.row(op.node), phase=op.phase, begin=op.begin, end=op.end, flops=op.flops)
            for op in log.ops
        ),
        storages=storages,
        modules={path: type(module).__name__ for path, module in run.model.named_modules()},
        calls=tuple(sorted(tracer.calls, key=lambda call: (call.first_node, -call.last_node, call.module.count(".")))),
        recomputed=tuple(sorted(tracer.recomputed, key=lambda region: (region.first_node, -region.last_node))),
        recomputed_ops=tuple(RecomputedOp(op=op, read_bytes=nbytes) for op, nbytes in log.recomputed.items()),
        restored=_find_restored(run, nodes, renumbered),
        saved_bytes=sum(log.nbytes[index] for index in log.saved_at_end),
        assumptions=tuple(assumptions(run, readers)),
        unknowns=tuple(unknowns(run)),
    )
    profile = insert_workspaces(profile, collector.settle(), collector.held_bytes())
    noted = (Assumption(topic="model", text=note) for note in run.notes)
    assumed = tuple(dict.fromkeys((*profile.assumptions, *collector.assumptions(), *noted)))
    unknown = (*profile.unknowns, *collector.unknowns())
    profile = profile.model_copy(update={"assumptions": assumed, "unknowns": unknown})
    return _annotate_nodes(profile)


def _annotate_nodes(profile: Profile) -> Profile:
    """Add to each node what only the finished log shows: live bytes, scratch and FLOPs."""
    live, scratch, counted = (
        liveness.node_live_bytes(profile),
        liveness.node_scratch_bytes(profile),
        _sum_node_flops(profile.ops, len(profile.nodes)),
    )
    nodes = (
        node.model_copy(
            update={
                "live_bytes": live[i],
                "scratch_bytes": scratch[i],
                "forward_flops": counted[i][0],
                "backward_flops": counted[i][1],
            }
        )
        for i, node in enumerate(profile.nodes)
    )
    return profile.model_copy(update={"nodes": tuple(nodes)})


def _find_restored(run: FakeRun, nodes: Sequence[Node], renumbered: dict[int, int]) -> tuple[RestoredTensor, ...]:
    """The storages that unpack hooks returned, without those that had been saved unchanged."""
    found = ((run.row(node), renumbered[index]) for node, index in run.log.restored if index in renumbered)
    return tuple(
        RestoredTensor(node=node, storage=storage) for node, storage in found if storage not in nodes[node].saved
    )


def _sum_node_flops(ops: Sequence[Op], nodes: int) -> list[tuple[int | None, int | None]]:
    """FLOPs of each node's forward and backward; None as soon as one op has no formula."""
    sums: list[dict[bool, int | None]] = [{} for _ in range(nodes)]
    for op in ops:
        backward = op.phase is Phase.BACKWARD
        counted = sums[op.node].get(backward, 0)
        sums[op.node][backward] = None if counted is None or op.flops is None else counted + op.flops
    return [(row.get(False, 0), row.get(True, 0)) for row in sums]


# --- storages ---------------------------------------------------------------------------------------------------------


def _build_storages(run: FakeRun, readers: dict[int, int]) -> tuple[tuple[Storage, ...], dict[int, int]]:
    """The storages that were alive at some moment of the step, with their new indices."""
    log = run.log
    storages: list[Storage] = []
    renumbered: dict[int, int] = {}
    for index, nbytes in enumerate(log.nbytes):
        birth, death = log.birth[index], log.death[index]
        if death is not None and death <= birth:
            continue
        node = log.node_of[index] if birth else readers.get(index)
        renumbered[index] = len(storages)
        storages.append(
            Storage(
                nbytes=nbytes,
                kind=log.kind[index] or (Kind.TEMPORARY if birth else Kind.BUFFER),
                birth=birth,
                death=log.tick if death is None else death,
                op=log.op_of[index],
                node=None if node is None else run.row(node),
                name=log.name[index],
                shape=log.shape[index],
                dtype=str(log.dtype[index])[6:],
            )
        )
    return tuple(storages), renumbered


def _find_first_readers(run: FakeRun) -> dict[int, int]:
    """The first node to read each parameter, buffer and input."""
    log, readers = run.log, dict[int, int]()
    for position, node in enumerate(run.nodes):
        if node.op == "call_module":
            module = run.model.get_submodule(str(node.target))
            held = (tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
            read = [log.note_storage(part) for tensor in held for part in torch_wrappers.parts(tensor)]
        elif node.op in ("get_attr", "placeholder"):
            read = [storage for _, _, storage in log.results.get(position, ())]
        else:
            continue
        for storage in read:
            if storage is not None and log.kind[storage] in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT):
                readers.setdefault(storage, position)
    return readers


# --- nodes ------------------------------------------------------------------------------------------------------------


_NOT_YET = PhaseBytes(forward=0, backward=None)
"""A placeholder until the profile exists; pydantic would copy the default for each node."""


def _build_nodes(run: FakeRun, storages: Sequence[Storage], renumbered: dict[int, int]) -> tuple[Node, ...]:
    log, rows = run.log, len(run.nodes) + 2
    position = {node: i for i, node in enumerate(run.nodes)}
    parameters, saved = [0] * rows, [0] * rows
    for storage in storages:
        if storage.kind in (Kind.PARAMETER, Kind.BUFFER) and storage.birth == 0 and storage.node is not None:
            parameters[storage.node] += storage.nbytes
    for index, owner in log.saved_at_end.items():
        saved[run.row(owner)] += log.nbytes[index]
    kept = {
        run.row(node): tuple(renumbered[i] for i in indices if i in renumbered and i in log.saved_at_end)
        for node, indices in log.saved_by_node.items()
    }
    first: dict[int, int] = {}
    nodes: list[Node] = []
    for i, node in enumerate(run.nodes):
        outputs = log.results.get(i, []) if node.op != "output" else []
        held = [storage for _, _, storage in outputs if storage is not None]
        fresh = {s for s in held if log.node_of[s] == i and log.birth[s] > 0 and s not in first}
        view_of = None if fresh else next((first[s] for s in held if s in first), None)
        for index in held:
            first.setdefault(index, i)
        module, module_type = _find_module(node, run.model)
        nodes.append(
            Node(
                name=node.name,
                op=node.op,  # type: ignore[arg-type]  # torch.fx says str; pydantic looks
                target=_target_name(node.target),
                module=module,
                module_type=module_type,
                source=run.recording.tracer.sources[i],
                inputs=tuple(position[n] for n in node.all_input_nodes),
                outputs=tuple(
                    TensorInfo(shape=shape, dtype=dtype, storage=None if s is None else renumbered.get(s))
                    for shape, dtype, s in outputs
                ),
                view_of=view_of,
                params_bytes=parameters[i],
                output_bytes=sum(log.nbytes[s] for s in fresh),
                saved_bytes=saved[i],
                saved=kept.get(i, ()),
                scratch_bytes=_NOT_YET,
                live_bytes=_NOT_YET,
            )
        )
    loss, step = run.row(LOSS), run.row(OPTIMIZER)
    optimizer = "none" if run.optimizer is None else type(run.optimizer).__name__
    nodes.append(
        Node(
            name="loss",
            op="loss",
            target="loss",
            inputs=(loss - 1,),
            params_bytes=parameters[loss],
            saved_bytes=saved[loss],
            saved=kept.get(loss, ()),
        )
    )
    nodes.append(Node(name="optimizer", op="optimizer", target=optimizer, params_bytes=parameters[step]))
    return tuple(nodes)


def _find_module(node: torch.fx.Node, root: torch.nn.Module) -> tuple[str, str]:
    if node.op == "call_module":
        return str(node.target), type(root.get_submodule(str(node.target))).__name__
    stack: dict[str, tuple[str, type]] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", type(root).__name__
    path, cls = next(reversed(stack.values()))
    return path, cls.__name__


def _target_name(target: Any) -> str:
    """As a user would write it."""
    if isinstance(target, (str, torch_common.OpOverload)):
        return str(target)
    name = getattr(target, "__name__", str(target))
    for public, holder in (("torch", torch), ("torch.nn.functional", torch.nn.functional)):
        if getattr(holder, name, None) is target:
            return f"{public}.{name}"
    module = {"_operator": "operator", "torch._C._nn": "torch.nn.functional"}.get(
        target.__module__ or "", target.__module__ or "torch"
    )
    return f"{module}.{getattr(target, '__qualname__', name)}".removeprefix("builtins.")
