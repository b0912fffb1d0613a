"""Builds a `Profile` from the log of a finished run: its nodes, operators and storages with their owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.fx

from fxmem import __version__
from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem._torch import wrappers as torch_wrappers
from fxmem.hardware.workspaces import BareLog, TimedOp, insert_workspaces
from fxmem.memory import liveness
from fxmem.records.profile import (
    Assumption,
    InputTensor,
    Kind,
    ModuleCall,
    Node,
    Op,
    Phase,
    Profile,
    RecomputedOp,
    RestoredTensor,
    Storage,
    TensorInfo,
)
from fxmem.simulation.recording.assumptions import assumptions, unknowns
from fxmem.simulation.recording.observe.event_log import LOSS, OPTIMIZER, LoggedStorage, StepLog
from fxmem.simulation.recording.observe.fx_tracer import CALLED_FROM
from fxmem.simulation.recording.recording import FinishedRun, Recording


def build_profile(recording: Recording) -> Profile:
    """Build the profile of the last run of a recording."""
    return build_step(recording)[0]


def build_step(recording: Recording) -> tuple[Profile, BareLog]:
    """The same, with the log as it was before hidden buffers were put in."""
    with torch_common.no_modes(), torch_common.pause_observers():
        return _build_profile(recording.subject.describe())


def _build_profile(run: FinishedRun) -> tuple[Profile, BareLog]:
    log, tracer, collector = run.log, run.recording.tracer, run.recording.collector
    readers = _find_first_readers(run)
    ops = [TimedOp(run.row(op.node), op.begin, op.end, op.stream) for op in log.ops]
    memory = collector.resolve(_most_bytes(log.storages, log.tick))
    is_loop = not run.is_program or run.step.mode == "train"
    hidden = insert_workspaces(ops, log.phases, log.tick, memory, collector.find_held(), is_loop=is_loop)
    storages, renumbered = _build_storages(run, readers, hidden.moved)
    noted = (Assumption(topic="model", text=note) for note in run.notes)
    profile = Profile.model_construct(
        fxmem_version=__version__,
        torch_version=torch.__version__,
        model=run.name,
        inputs=tuple(InputTensor(name=label, shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for label, t in run.inputs),
        step=run.step.model_copy(update={"ranks": run.recording.collectives.record()}),
        target=run.recording.target,
        ticks=hidden.ticks,
        phases=hidden.phases,
        nodes=(None,) * (len(run.nodes) + 2),  # their live bytes follow from all else
        ops=tuple(
            Op(
                name=op.name,
                node=node,
                phase=op.phase,
                begin=begin,
                end=end,
                flops=op.flops,
                moved_bytes=op.moved_bytes,
                host_bytes=op.host_bytes,
                stream=op.stream,
                repeats=op.repeats,
            )
            for op, (node, *_), (begin, end) in zip(log.ops, ops, hidden.ops, strict=True)
        ),
        storages=(*storages, *hidden.storages),
        modules={path: type(module).__name__ for path, module in run.model.named_modules()},
        calls=tuple(sorted(tracer.calls, key=lambda call: (call.first_node, -call.last_node, call.module.count(".")))),
        recomputed=tuple(sorted(tracer.recomputed, key=lambda region: (region.first_node, -region.last_node))),
        recomputed_ops=tuple(RecomputedOp(op=op, read_bytes=nbytes) for op, nbytes in log.recomputed.items()),
        cudnns=collector.asked_cudnns(),
        saved_bytes=log.sum_bytes(run.recording.nodes.saved_at_end),
        assumptions=tuple(dict.fromkeys((*assumptions(run, readers), *collector.assumptions(), *noted))),
        unknowns=(*unknowns(run), *collector.unknowns()),
    )
    nodes = _build_nodes(run, profile, storages, renumbered)
    nodes, calls = _find_backwards(run, profile, nodes)
    step = profile.step.model_copy(update={"outputs_bytes": _find_outputs_bytes(run, profile, hidden.moved)})
    profile = profile.model_copy(
        update={"step": step, "nodes": nodes, "calls": calls, "restored": _find_restored(run, nodes, renumbered)}
    )
    return profile, BareLog(ops, tuple(log.phases), log.tick, hidden.moved)


def _most_bytes(storages: Iterable[LoggedStorage], end: int) -> int:
    """The most that is alive at once."""
    change: Counter[int] = Counter()
    for each in storages:
        change[each.birth] += each.nbytes
        change[end if each.death is None else each.death] -= each.nbytes
    return max(accumulate(change[tick] for tick in sorted(change)), default=0)


def _find_outputs_bytes(run: FinishedRun, profile: Profile, moved: Sequence[int]) -> int:
    """By how much the peak is higher for what the loop's variables hold of the step before, or would be."""
    if not run.replaced:
        return 0
    live = liveness.live_bytes(profile)
    sign = -1 if run.step.keep_outputs else 1
    other = list(live)
    for tick, nbytes in run.replaced:
        until = moved[tick]
        other[:until] = [each + sign * nbytes for each in other[:until]]
    return sign * (max(other) - max(live))


def _find_restored(run: FinishedRun, nodes: Sequence[Node], renumbered: dict[int, int]) -> tuple[RestoredTensor, ...]:
    """The storages that unpack hooks returned, without those that had been saved unchanged."""
    found = ((run.row(node), renumbered[index]) for node, index in run.recording.nodes.restored if index in renumbered)
    return tuple(
        RestoredTensor(node=node, storage=storage) for node, storage in found if storage not in nodes[node].saved
    )


def _find_backwards(
    run: FinishedRun, profile: Profile, nodes: Sequence[Node]
) -> tuple[tuple[Node, ...], tuple[ModuleCall, ...]]:
    """The nodes and the calls, with those of modules that a backward could come through and none did."""
    ledger = run.recording.nodes
    used = [index in ledger.differentiated for index in range(len(nodes))]
    for op in profile.ops:
        used[op.node] = used[op.node] or op.phase is Phase.BACKWARD
    for index in reversed(range(len(run.nodes))):  # without the row of the loss, which reads the last node of all
        for each in nodes[index].inputs if used[index] and index not in ledger.without_gradient else ():
            used[each] = True

    def lack(of: Node | ModuleCall, first: int, last: int) -> dict[str, bool]:
        is_free = of.leads_to_gradients and not ledger.goes_back and not any(used[first:last])
        return {"lacks_backward": True} if is_free else {}

    layers = {at: lack(each, at, at + 1) for at, each in enumerate(nodes) if each.op == "call_module"}
    return (
        tuple(each.model_copy(update=layers[at]) if layers.get(at) else each for at, each in enumerate(nodes)),
        tuple(each.model_copy(update=lack(each, each.first_node, each.last_node)) for each in profile.calls),
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


def _build_storages(
    run: FinishedRun, readers: dict[int, int], moved: Sequence[int]
) -> tuple[tuple[Storage, ...], dict[int, int]]:
    """The storages that were alive at some moment of the step, with their new indices; `moved` has the ticks."""
    log = run.log
    storages: list[Storage] = []
    there = (index for index, each in enumerate(log.storages) if each.death is None or each.death > each.birth)
    renumbered = {index: number for number, index in enumerate(there)}
    is_read, is_discarded = _find_read(run)
    for index in renumbered:
        found = log.storages[index]
        birth, death = found.birth, found.death
        node = found.node if birth else readers.get(index)
        copied = run.is_program and (found.holder or found.kind is Kind.PARAMETER)
        storages.append(
            Storage(
                nbytes=found.nbytes,
                kind=_find_kind(run, index),
                birth=moved[birth] if birth else 0,
                death=moved[log.tick if death is None else death],
                op=_find_op(log, found),
                node=None if node is None else run.row(node),
                name=found.name,
                holder="" if found.name else found.holder,
                made_at="" if found.name else found.called_at if birth else found.made_at,
                is_frozen=found.is_frozen,
                is_read=is_read(index),
                is_discarded=is_discarded(index),
                copy_of=renumbered.get(log.reads.copied_from.get(index, -1)) if copied else None,
                is_derived=found.is_derived,
                is_bounded=found.is_bounded and found.kind not in (Kind.GRADIENT, Kind.PARAMETER, Kind.OPTIMIZER_STATE),
                shape=found.shape,
                dtype=str(found.dtype)[6:],
                stream=found.stream,
                used_on=tuple(log.waits.used_on.get(index, ())),
                free_by=moved[log.waits.free_by[index]] if index in log.waits.free_by else None,
            )
        )
    return tuple(storages), renumbered


def _find_read(run: FinishedRun) -> tuple[Callable[[int], bool], Callable[[int], bool]]:
    """Whether a storage of a program is read beside the backward, and is none of those that optimizers work with; and
    whether it is a gradient that the step frees unread since its last backward."""
    if not run.is_program:
        return (lambda _: False), (lambda _: False)
    log, results = run.log, run.recording.nodes.results
    attributes = (position for position, node in enumerate(run.nodes) if node.op == "get_attr" and node.users)
    of_attributes = {index for each in attributes for _, _, index in results.get(each, ()) if index is not None}
    read = log.reads.read | dict.fromkeys(of_attributes, log.tick)
    backwards = [span for span in log.phases if span.phase is Phase.BACKWARD]
    end = max((span.end for span in backwards), default=0)

    def is_read(index: int) -> bool:
        storage = log.storages[index]
        return index in read and storage.birth < end and storage.kind not in (Kind.PARAMETER, Kind.OPTIMIZER_STATE)

    def is_discarded(index: int) -> bool:
        birth, death = log.storages[index].birth, log.storages[index].death
        if log.storages[index].kind is not Kind.GRADIENT or death is None:
            return False
        there = [span for span in backwards if birth < span.end and span.begin <= death]
        # What ends within a backward was accumulated into another, or stepped there.
        return bool(there) and there[-1].end <= death and read.get(index, -1) < there[-1].begin

    return is_read, is_discarded


def _find_op(log: StepLog, found: LoggedStorage) -> int | None:
    """The operator that ran when a storage was found; None between two of them, as of what the host hands over."""
    runs = found.op is not None and found.op < len(log.ops) and log.ops[found.op].begin <= found.birth
    return found.op if runs else None


def _find_kind(run: FinishedRun, index: int) -> Kind:
    storage = run.log.storages[index]
    if storage.kind is Kind.SAVED and not storage.birth and not run.is_program and storage.held_kind is Kind.BUFFER:
        return Kind.BUFFER  # a module keeps it, whatever graph does so too
    if storage.kind is not None:
        return storage.kind
    if run.log.storages[index].is_communicated and storage.held_kind in (None, Kind.BUFFER, Kind.OUTPUT):
        return Kind.COMMUNICATION
    if run.recording.collectives.world is not None and _outlives_backward(run.log, storage):
        return Kind.GRADIENT  # a whole one that FSDP has not sent yet
    return Kind.TEMPORARY if storage.birth else storage.held_kind or Kind.BUFFER


def _outlives_backward(log: StepLog, storage: LoggedStorage) -> bool:
    """Whether a storage was made in a backward and is there after it."""
    ends = (each.end for each in log.phases if each.phase is Phase.BACKWARD and each.begin <= storage.birth < each.end)
    end = next(ends, None)
    return end is not None and (storage.death is None or storage.death > end)


def _find_first_readers(run: FinishedRun) -> dict[int, int]:
    """The first node to read each parameter, buffer and input."""
    log, readers = run.log, dict[int, int]()
    dropped = _find_storages_by_module(run) if run.is_program else {}
    positions = {node: position for position, node in enumerate(run.nodes)}
    for node, position in positions.items():
        if node.op == "call_module":
            held = torch_modules.all_tensors(run.model.get_submodule(str(node.target)))
            read = [log.note_storage(part) for tensor in held for part in torch_wrappers.parts(tensor)]
            read = read or dropped.get(str(node.target), [])
        elif node.op in ("get_attr", "placeholder"):
            read = [storage for _, _, storage in run.recording.nodes.results.get(position, ())]
        else:
            continue
        # A program that averages weights reads what modules have; the module that has them may read them later.
        is_outside = run.is_program and node.op == "get_attr" and not node.meta.get("nn_module_stack")
        users = (each for each in node.users if each in positions and each.meta.get("nn_module_stack"))
        within = next(users, None) if is_outside else node
        reader = position if within is None else positions[within]
        for storage in read:
            if (
                storage is not None
                and storage not in log.real.mapped
                and log.storages[storage].kind in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)
                and not (within is None and "." in log.storages[storage].name)
            ):
                readers[storage] = min(readers.get(storage, reader), reader)
    return readers


def _share_flat_parameters(run: FinishedRun) -> dict[int, dict[int, int]]:
    """By storage of several parameters, as ZeRO has them one after another: the bytes that each node reads first."""
    found: dict[int, dict[int, int]] = {}
    seen = set[int]()
    for position, node in enumerate(run.nodes):
        if node.op != "call_module":
            continue
        for parameter in run.model.get_submodule(str(node.target)).parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            for part in torch_wrappers.parts(parameter):
                index = run.log.note_storage(part)
                if index is not None and part.nbytes < run.log.storages[index].nbytes:
                    shares = found.setdefault(index, {})
                    shares[position] = shares.get(position, 0) + part.nbytes
    return found


def _find_storages_by_module(run: FinishedRun) -> dict[str, list[int | None]]:
    """What each module of a program had, by its path and the names: the program may have dropped it by now."""
    found: dict[str, list[int | None]] = {}
    for index, storage in enumerate(run.log.storages):
        path = storage.name if storage.kind in (Kind.PARAMETER, Kind.BUFFER) else ""
        while path := path.rpartition(".")[0]:
            found.setdefault(path, []).append(index)
    return found


# --- nodes ------------------------------------------------------------------------------------------------------------


def _build_nodes(
    run: FinishedRun, profile: Profile, storages: Sequence[Storage], renumbered: dict[int, int]
) -> tuple[Node, ...]:
    """The nodes of a profile that has all else; `storages` are without the hidden ones."""
    live, scratch = liveness.node_live_bytes(profile), liveness.node_scratch_bytes(profile)
    flops = _sum_node_flops(profile.ops, len(profile.nodes))
    log, ledger, rows = run.log, run.recording.nodes, len(run.nodes) + 2
    position = {node: i for i, node in enumerate(run.nodes)}
    parameters, buffers, saved = [0] * rows, [0] * rows, [0] * rows
    flat = {renumbered[index]: shares for index, shares in _share_flat_parameters(run).items() if index in renumbered}
    for number, storage in enumerate(storages):
        if storage.kind in (Kind.PARAMETER, Kind.BUFFER) and storage.birth == 0 and storage.node is not None:
            shares = flat.get(number, {})
            shares = shares if sum(shares.values()) <= storage.nbytes else {}
            for reader, nbytes in shares.items():
                parameters[reader] += nbytes
            parameters[storage.node] += storage.nbytes - sum(shares.values())
            buffers[storage.node] += storage.nbytes if storage.kind is Kind.BUFFER else 0
    for index, owner in ledger.saved_at_end.items():
        saved[run.row(owner)] += log.storages[index].nbytes
    kept = {
        run.row(node): tuple(renumbered[i] for i in indices if i in renumbered and i in ledger.saved_at_end)
        for node, indices in ledger.saved.items()
    }

    def sum_up(row: int) -> dict[str, Any]:
        """The figures of a row."""
        return {
            "params_bytes": parameters[row],
            "buffers_bytes": buffers[row],
            "saved_bytes": saved[row],
            "saved": kept.get(row, ()),
            "scratch_bytes": scratch[row],
            "live_bytes": live[row],
            "forward_flops": flops[row][0],
            "backward_flops": flops[row][1],
        }

    alike = {op.node: {like.node for like in log.ops[slice(*op.repeats)]} for op in log.ops if op.repeats is not None}
    first: dict[int, int] = {}
    nodes: list[Node] = []
    for i, node in enumerate(run.nodes):
        outputs = ledger.results.get(i, []) if node.op != "output" else []
        held = [storage for _, _, storage in outputs if storage is not None]
        fresh = {s for s in held if log.storages[s].node == i and log.storages[s].birth > 0 and s not in first}
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
                called_from=node.meta.get(CALLED_FROM),
                inputs=tuple(position[n] for n in node.all_input_nodes),
                outputs=tuple(
                    TensorInfo(shape=shape, dtype=dtype, storage=None if s is None else renumbered.get(s))
                    for shape, dtype, s in outputs
                ),
                view_of=view_of,
                output_bytes=sum(nodes[each].output_bytes for each in alike.get(i, ())) or log.sum_bytes(fresh),
                leads_to_gradients=node.op.startswith("call_") and i not in ledger.without_gradient,
                **sum_up(i),
            )
        )
    loss, step = run.row(LOSS), run.row(OPTIMIZER)
    optimizer = "none" if run.optimizer is None else type(run.optimizer).__name__
    nodes.append(Node(name="loss", op="loss", target="loss", inputs=(loss - 1,), **sum_up(loss)))
    nodes.append(Node(name="optimizer", op="optimizer", target=optimizer, **sum_up(step)))
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
