"""The log of a finished run becomes a `Profile`: what each node brought, kept and cost, each storage with its owner."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from fxmem import __version__
from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.hardware.catalogue import context_size
from fxmem.hardware.workspaces import Collector, CpuCollector, with_workspaces
from fxmem.memory import liveness
from fxmem.records.profile import (
    Assumption,
    InputTensor,
    Kind,
    ModuleCall,
    Node,
    Op,
    Phase,
    PhaseBytes,
    Profile,
    RecomputedOp,
    RecomputedRegion,
    RestoredTensor,
    SourceLine,
    Step,
    Storage,
    Target,
    TensorInfo,
    Unknown,
)
from fxmem.simulation.kernels import card_emulation
from fxmem.simulation.model.accepted_models import COMPILED
from fxmem.simulation.observe.event_log import LOSS, OPTIMIZER, StepLog
from fxmem.simulation.observe.op_recorder import Recorder

__all__ = ["Run", "account"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A step that has been run on FakeTensors, and everything that watched it."""

    name: str
    notes: tuple[str, ...]
    """How the model was built."""
    model: torch.nn.Module
    """The fake one."""
    inputs: tuple[tuple[str, torch.Tensor], ...]
    step: Step
    target: Target
    optimizer: torch.optim.Optimizer | None
    recorder: Recorder
    log: StepLog
    nodes: tuple[torch.fx.Node, ...]
    sources: tuple[SourceLine | None, ...]
    calls: tuple[ModuleCall, ...]
    recomputed: tuple[RecomputedRegion, ...]
    collector: Collector | CpuCollector
    """Of the target's hidden memory."""
    ran_compiled: bool
    """Whether the program called something compiled."""
    cycles: int
    """Storages that only Python's garbage collector freed."""

    def row(self, node: int) -> int:
        """Index in `Profile.nodes` of what the log calls a node: two rows follow the graph's, loss and optimizer."""
        return node if node >= 0 else {LOSS: len(self.nodes), OPTIMIZER: len(self.nodes) + 1}[node]


def account(run: Run) -> Profile:
    """The profile of a run."""
    log = run.log
    readers = _first_readers(run)
    storages, renumbered = _storages(run, readers)
    nodes = _nodes(run, storages, renumbered)
    profile = Profile.model_construct(
        fxmem_version=__version__,
        torch_version=torch.__version__,
        model=run.name,
        inputs=tuple(InputTensor(name=label, shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for label, t in run.inputs),
        step=run.step,
        target=run.target,
        ticks=log.tick,
        phases=tuple(log.phases),
        nodes=nodes,
        ops=tuple(
            Op(name=op.name, node=run.row(op.node), phase=op.phase, begin=op.begin, end=op.end, flops=op.flops)
            for op in log.ops
        ),
        storages=storages,
        modules={path: type(module).__name__ for path, module in run.model.named_modules()},
        calls=run.calls,
        recomputed=run.recomputed,
        recomputed_ops=tuple(RecomputedOp(op=op, read_bytes=nbytes) for op, nbytes in log.recomputed.items()),
        restored=_restored(run, nodes, renumbered),
        saved_bytes=sum(log.nbytes[index] for index in log.saved_at_end),
        assumptions=tuple(_assumptions(run, readers)),
        unknowns=tuple(_unknowns(run)),
    )
    profile = with_workspaces(profile, run.collector.settle(), run.collector.held_bytes())
    noted = (Assumption(topic="model", text=note) for note in run.notes)
    assumed = tuple(dict.fromkeys((*profile.assumptions, *run.collector.assumptions(), *noted)))
    unknown = (*profile.unknowns, *run.collector.unknowns())
    profile = profile.model_copy(update={"assumptions": assumed, "unknowns": unknown})
    return _annotated(profile)


def _annotated(profile: Profile) -> Profile:
    """What only the finished log tells of each node."""
    live, scratch, counted = (
        liveness.node_live_bytes(profile),
        liveness.node_scratch_bytes(profile),
        _node_flops(profile.ops, len(profile.nodes)),
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


def _restored(run: Run, nodes: Sequence[Node], renumbered: dict[int, int]) -> tuple[RestoredTensor, ...]:
    """What unpack hooks gave, but for what had been saved as it was."""
    found = ((run.row(node), renumbered[index]) for node, index in run.log.restored if index in renumbered)
    return tuple(
        RestoredTensor(node=node, storage=storage) for node, storage in found if storage not in nodes[node].saved
    )


def _node_flops(ops: Sequence[Op], nodes: int) -> list[tuple[int | None, int | None]]:
    """FLOPs of each node's forward and backward; None as soon as one op has no formula."""
    sums: list[dict[bool, int | None]] = [{} for _ in range(nodes)]
    for op in ops:
        backward = op.phase is Phase.BACKWARD
        counted = sums[op.node].get(backward, 0)
        sums[op.node][backward] = None if counted is None or op.flops is None else counted + op.flops
    return [(row.get(False, 0), row.get(True, 0)) for row in sums]


# --- storages ---------------------------------------------------------------------------------------------------------


def _storages(run: Run, readers: dict[int, int]) -> tuple[tuple[Storage, ...], dict[int, int]]:
    """The storages that were alive at some moment of the step, and the index each has now."""
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


def _first_readers(run: Run) -> dict[int, int]:
    """The first node to read each parameter, buffer and input."""
    log, readers = run.log, dict[int, int]()
    modules = dict(run.model.named_modules())
    for position, node in enumerate(run.nodes):
        if node.op == "call_module":
            module = modules[str(node.target)]
            held = (tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
            read = [log.index_of(part) for tensor in held for part in torch_wrappers.parts(tensor)]
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
"""Said of a node before the profile is there to tell; pydantic would copy the default for each."""


def _nodes(run: Run, storages: Sequence[Storage], renumbered: dict[int, int]) -> tuple[Node, ...]:
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
        module, module_type = _module_of(node, run.model)
        nodes.append(
            Node(
                name=node.name,
                op=node.op,  # type: ignore[arg-type]  # torch.fx says str; pydantic looks
                target=_target_name(node.target),
                module=module,
                module_type=module_type,
                source=run.sources[i],
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


def _module_of(node: torch.fx.Node, root: torch.nn.Module) -> tuple[str, str]:
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


# --- what was taken for granted, what is not known --------------------------------------------------------------------


def _assumptions(run: Run, readers: dict[int, int]) -> Iterator[Assumption]:
    recorder, log = run.recorder, run.log
    if run.step.mode == "train":
        stepped, left = (
            "the optimizer steps and gradients are set to None",
            "the step ends there; whoever runs it again clears the gradients",
        )
        last = left if run.optimizer is None else stepped
        text = (
            f"one step in its steady state: forward, loss, backward, then {last}; output and loss live until the "
            f"step's function returns"
        )
        yield Assumption(topic="step", text=text)
    else:
        yield Assumption(
            topic="step", text="one forward under no_grad; the output lives until the step's function returns"
        )
    if run.step.accumulate > 1:
        text = (
            f"the last of {run.step.accumulate} micro-batches to one optimizer step: the gradients of those "
            f"before are there when it begins"
        )
        yield Assumption(topic="step", text=text)
    ahead = (
        f"so are {run.step.prefetch} further batches like it"
        if run.step.prefetch
        else "a prefetched next batch is not counted"
    )
    yield Assumption(
        topic="residents", text=f"parameters, buffers and inputs are on the target's device throughout; {ahead}"
    )
    if run.ran_compiled:
        yield Assumption(topic="model", text=COMPILED)
    if run.optimizer is not None:
        yield Assumption(topic="optimizer", text=_describe_optimizer(run.optimizer))
    called = {str(getattr(node.target, "__name__", node.target)) for node in run.nodes}
    if called & {"isfinite", "isnan", "isinf"}:
        yield Assumption(topic="values", text="all numbers are finite, where the program asks (isfinite, isnan, isinf)")
    if recorder.passed_checks or any(op.name == "aten._is_all_true.default" for op in log.ops):
        means = "assert, if …: raise, torch._check_tensor_all, arguments of distributions"
        yield Assumption(topic="values", text=f"what the program checks of its tensors holds ({means})")
    if any(op.name in ("aten.rand.default", "aten.uniform_.default") for op in log.ops):
        middle = "the middle of its range, where the program looks at it (layer drop: the layer is kept)"
        yield Assumption(topic="values", text=f"a single random number drawn on the CPU is {middle}")
    if recorder.made_up_scalars:
        yield Assumption(
            topic="optimizer",
            text="the optimizer reads numbers from tensors; each was taken to be 1, on which no allocation depends",
        )
    if run.cycles > 0:
        text = (
            f"{run.cycles} storages were held by reference cycles until the step's end; a real run frees them "
            f"when Python's garbage collector happens to run"
        )
        yield Assumption(topic="cycles", text=text)
    if run.target.device == "cpu":
        yield Assumption(
            topic="workspace", text="scratch memory inside CPU kernels (oneDNN convolutions above all) is not included"
        )
    unread = sum(
        log.nbytes[i]
        for i, kind in enumerate(log.kind)
        if kind is Kind.PARAMETER and log.birth[i] == 0 and i not in readers
    )
    if unread:
        yield Assumption(
            topic="unread", text=f"{unread} bytes of parameters are read by no node; they are resident all the same"
        )
    # torch's math attention is the only caller of `_safe_softmax`.
    if any("scaled_dot_product" in op.name or op.name.startswith("aten._safe_softmax") for op in log.ops):
        yield from card_emulation.assumptions(run.target)
    context = context_size(run.target, torch.__version__)
    if context is not None:
        yield Assumption(topic="process", text=context[1])


def _unknowns(run: Run) -> Iterator[Unknown]:
    if run.target.device == "cuda" and context_size(run.target, torch.__version__) is None:
        yield Unknown(topic="memory", what="the CUDA context, which a process holds beside what the allocator reserves")
    for op, count in sorted(Counter(op.name for op in run.log.ops if op.flops is None).items()):
        yield Unknown(topic="flops", what=op, count=count)
    layers = sum(op.name == "aten.mkldnn_rnn_layer.default" for op in run.log.ops)
    if layers:
        yield Unknown(
            topic="memory",
            what="oneDNN's workspace tensor of aten.mkldnn_rnn_layer, whose size only oneDNN knows",
            count=layers,
        )


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    form = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "for-loop"
    return f"{type(optimizer).__name__} in its {form} form, its state already there"
