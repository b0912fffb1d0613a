"""Profiles of very long steps, made by hand: what models of thousands of layers would give, without running them.

Three forms, after what programs look like. `blocks` is a stack of residual blocks in modules of their own (norm,
linear, activation, linear, add); `mirror` adds an edge from each block of the first half to its mirror image in the
second, as a U-Net has, so that half of all results are waited for at the middle; `loop` is the same program written as
a loop over functions: no modules, one set of weights, one source line for each call. In each, a step trains: forward
keeps what backward reads, backward frees it in the opposite order, an optimizer with foreach's temporaries ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fxmem.memory import liveness
from fxmem.records.profile import (
    InputTensor,
    Kind,
    ModuleCall,
    Node,
    Op,
    Phase,
    PhaseSpan,
    Profile,
    Report,
    SourceLine,
    Step,
    Storage,
    Target,
    TensorInfo,
)

__all__ = ["EVENTS_PER_BLOCK", "FORMS", "Form", "long_report"]

Form = Literal["blocks", "mirror", "loop"]
FORMS: tuple[Form, ...] = ("blocks", "mirror", "loop")

EVENTS_PER_BLOCK = 50
"""Allocations and frees that a block adds to the log, about."""

_SHAPE = (8, 512, 1024)
_NBYTES = 8 * 512 * 1024 * 4
_CALLS = (("norm", "LayerNorm", 0), ("fc1", "Linear", 4), ("act", "GELU", 0), ("fc2", "Linear", 4), ("add", "", 0))
"""Name, class (of a module) and MiB of weight of each call in a block."""
_Kept = tuple[int, int, int, int]
"""A node, the two storages that it keeps for backward, and MiB of its weight."""
_CARD = Target(name="h100", device="cuda", full_name="NVIDIA H100", memory_bytes=80 << 30, capability=(9, 0))


@dataclass
class _Log:
    """The step as it is written, event by event."""

    tick: int = 1
    storages: list[dict[str, object]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)

    def resident(self, nbytes: int, kind: Kind, name: str, node: int | None = None) -> int:
        self.storages.append(
            {
                "nbytes": nbytes,
                "kind": kind,
                "birth": 0,
                "name": name,
                "node": node,
                "shape": (nbytes // 4,),
                "dtype": "float32",
            }
        )
        return len(self.storages) - 1

    def run(self, name: str, node: int, phase: Phase, *sizes: tuple[int, Kind, str], flops: int = 0) -> list[int]:
        """An op that allocates these."""
        begin, first = self.tick, len(self.storages)
        for nbytes, kind, of in sizes:
            row = {
                "nbytes": nbytes,
                "kind": kind,
                "birth": self.tick,
                "name": of,
                "node": node,
                "op": len(self.ops),
                "shape": _SHAPE,
                "dtype": "float32",
            }
            self.storages.append(row)
            self.tick += 1
        self.ops.append(Op(name=name, node=node, phase=phase, begin=begin, end=self.tick, flops=flops))
        return list(range(first, len(self.storages)))

    def free(self, *indices: int) -> None:
        for index in indices:
            self.storages[index]["death"] = self.tick
            self.tick += 1

    def close(self, phase: Phase) -> None:
        begin, first = (self.phases[-1].end, self.phases[-1].last_op) if self.phases else (1, 0)
        self.phases.append(PhaseSpan(phase=phase, begin=begin, end=self.tick, first_op=first, last_op=len(self.ops)))


def long_report(events: int, form: Form = "blocks") -> Report:
    """A training step of about so many events.

    Its sizes differ from block to block (of seven widths), so that the allocator has blocks of many sizes to look
    through.
    """
    count = max(events // EVENTS_PER_BLOCK, 2)
    log, modules = _Log(), {"": "Long"}
    log.resident(_NBYTES, Kind.INPUT, "x", 0)
    weights = _weights(log, 1 if form == "loop" else count, modules, form)
    nodes = [
        Node(name="x", op="placeholder", target="x", outputs=(TensorInfo(shape=_SHAPE, dtype="float32", storage=0),))
    ]
    kept: list[_Kept] = []
    calls = []
    for block in range(count):
        first = len(nodes)
        for number in range(len(_CALLS)):
            twins = _twins(block, count) if form == "mirror" and number == len(_CALLS) - 1 else ()
            nodes.append(_call(log, kept, len(nodes), block, number, first - 1, twins, form))
        if form != "loop":
            calls.append(ModuleCall(module=f"layers.{block}", first_node=first, last_node=len(nodes)))
    nodes.append(Node(name="loss", op="loss", target="sum", inputs=(len(nodes) - 1,), output_bytes=4, forward_flops=0))
    log.run("aten.sum.default", len(nodes) - 1, Phase.FORWARD, (4, Kind.OUTPUT, ""))
    log.close(Phase.FORWARD)
    gradients = _backward(log, kept, weights)
    nodes.append(Node(name="optimizer", op="optimizer", target="AdamW", forward_flops=0))
    _optimize(log, len(nodes) - 1, gradients)
    return _written(log, nodes, modules, calls)


def _call(
    log: _Log, kept: list[_Kept], node: int, block: int, number: int, before: int, twins: tuple[int, ...], form: Form
) -> Node:
    """Run one call of a block forward; what came before the block is `before`."""
    call, class_name, mib = _CALLS[number]
    is_module, wide = bool(class_name) and form != "loop", 1 + block % 7
    path = "" if form == "loop" else f"layers.{block}" + (f".{call}" if class_name else "")
    sizes = (_NBYTES // wide, 4096 * wide)
    out, mask = log.run(
        f"aten.{call}.default", node, Phase.FORWARD, *((nbytes, Kind.SAVED, "") for nbytes in sizes), flops=mib << 24
    )
    log.free(*log.run("aten.copy.default", node, Phase.FORWARD, (1 << 20, Kind.TEMPORARY, "")))
    kept.append((node, out, mask, mib))
    line = 10 + number if form == "loop" else 20 + 10 * (block % 40) + number
    return Node(
        name=f"{call}_{block}",
        op="call_module" if is_module else "call_function",
        target=path if is_module else f"torch.{call}",
        module=path,
        module_type=class_name if is_module else "Block" if path else "Long",
        inputs=(node - 1,) if class_name else (node - 1, before, *twins),
        outputs=(TensorInfo(shape=_SHAPE, dtype="float32", storage=out),),
        source=SourceLine(file="/home/user/model.py", line=line, function="forward"),
        params_bytes=mib << 20 if form != "loop" or not block else 0,
        output_bytes=sizes[0],
        saved=(out, mask),
        saved_bytes=sum(sizes),
        forward_flops=mib << 24,
        backward_flops=mib << 25,
    )


def _twins(block: int, count: int) -> tuple[int, ...]:
    """In the second half, the node that ended the block as far from the middle in the first."""
    twin = count - 1 - block
    return ((twin + 1) * len(_CALLS),) if twin < block - 1 else ()


def _weights(log: _Log, blocks: int, modules: dict[str, str], form: Form) -> list[str]:
    names = []
    if form != "loop":
        modules["layers"] = "ModuleList"
    for block in range(blocks):
        for number, (call, class_name, mib) in enumerate(_CALLS):
            if form != "loop":
                modules[f"layers.{block}{'.' + call if class_name else ''}"] = class_name or "Block"
            if mib:
                names.append(f"layers.{block}.{call}.weight")
                log.resident(mib << 20, Kind.PARAMETER, names[-1], 1 + block * len(_CALLS) + number)
                log.resident(mib << 20, Kind.OPTIMIZER_STATE, f"{names[-1]}.exp_avg")
    return names


def _backward(log: _Log, kept: list[_Kept], weights: list[str]) -> list[int]:
    gradients: list[int] = []
    waiting = list(weights)
    (coming,) = log.run("aten.expand.default", kept[-1][0] + 1, Phase.BACKWARD, (_NBYTES, Kind.TEMPORARY, ""))
    for node, out, mask, mib in reversed(kept):
        (going,) = log.run("aten.mul.Tensor", node, Phase.BACKWARD, (_NBYTES, Kind.TEMPORARY, ""), flops=mib << 25)
        if mib and waiting:
            gradients += log.run("aten.mm.default", node, Phase.BACKWARD, (mib << 20, Kind.GRADIENT, waiting.pop()))
        log.free(coming, out, mask)
        coming = going
    log.free(coming)
    log.close(Phase.BACKWARD)
    return gradients


def _optimize(log: _Log, node: int, gradients: list[int]) -> None:
    sizes = [int(str(log.storages[each]["nbytes"])) for each in gradients]
    for name in ("aten._foreach_sqrt.default", "aten._foreach_div.List"):
        log.free(*log.run(name, node, Phase.OPTIMIZER, *((nbytes, Kind.TEMPORARY, "") for nbytes in sizes)))
    log.free(*gradients)
    log.close(Phase.OPTIMIZER)


def _written(log: _Log, nodes: list[Node], modules: dict[str, str], calls: list[ModuleCall]) -> Report:
    storages = tuple(Storage.model_validate({"death": log.tick, **row}) for row in log.storages)
    profile = Profile(
        fxmem_version="0", torch_version="2.11.0", model="Long",
        inputs=(InputTensor(name="x", shape=_SHAPE, dtype="float32"),), target=_CARD,
        step=Step(mode="train", optimizer="AdamW", loss="sum of the output", precision=None), ticks=log.tick,
        phases=tuple(log.phases), nodes=tuple(nodes), ops=tuple(log.ops), storages=storages, modules=modules,
        calls=tuple(calls), saved_bytes=sum(node.saved_bytes for node in nodes),
    )  # fmt: skip
    return Report.model_construct(**dict(profile), peak=liveness.timeline(profile).peak)
