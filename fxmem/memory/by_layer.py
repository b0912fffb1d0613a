"""A model layer by layer: parameters, output shape, multiply-adds, FLOPs, and the memory of activations.

A row is a module, or the calls of one function in a module's own code; a module's figures are the sums of what is below
it, its own parameters included. Rows sum to the model's, the first row.

- *Parameters* are elements of parameters, a parameter shared by several modules counted once, for the module that has
  it first.
- *FLOPs* count a multiply-add as 2 and every other operation as 1 (see `fxmem.simulation.recording.flops` for each
  operator's formula).
- *MACs* are multiply-adds of matrix products, convolutions and attention, half their FLOPs, and nothing else: a ReLU or
  a normalisation has none. Biases are additions and not counted. Recurrent layers are counted in FLOPs only: their MACs
  are unknown.
- *Output* is new memory that results bring; a view or an in-place result brings none. It is what activations take
  without backward, each until Python frees it. *Saved* is what is kept for backward, each storage for the first
  node that keeps it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod

from fxmem.hardware.op_classes import MAC_OPS, UNKNOWN_MAC_OPS
from fxmem.hardware.tensor_layouts import ITEM_BYTES
from fxmem.memory.accepted_steps import HasProfile, read_profile
from fxmem.memory.figures import Flops, sum_flops
from fxmem.memory.module_tree import Branch, ModuleTree, preorder
from fxmem.records.breakdown import Layer, LayerReport
from fxmem.records.profile import Kind, Phase, Profile, Storage

_CALLS = ("call_module", "call_function", "call_method")


def by_layer(step: Profile | HasProfile) -> LayerReport:
    """A step layer by layer; `step` is an `Analysis`, a report, or a profile. Loss and optimizer are left out: they are
    no layers."""
    profile = read_profile(step)
    tree = ModuleTree(profile)
    tree.add_nodes(index for index, node in enumerate(profile.nodes) if node.op in _CALLS)
    tree.add_parameters()
    macs = _macs(profile)
    layers = preorder(
        tree.root, lambda branch: branch.children.values(), lambda branch, below: _layer(profile, macs, branch, below)
    )
    trained = {storage.name for storage in profile.storages if storage.kind is Kind.GRADIENT}
    parameters = [storage for storage in profile.storages if storage.kind is Kind.PARAMETER and storage.birth == 0]
    return LayerReport(
        **profile.heading(),
        layers=tuple(layers),
        trained_params=None
        if profile.step.mode == "infer"
        else sum(_elements(s) for s in parameters if f"{s.name}.grad" in trained),
        input_bytes=sum(storage.nbytes for storage in profile.storages if storage.kind is Kind.INPUT),
    )


def layer_likeness(layer: Layer) -> Hashable:
    """Equal for layers that differ in nothing but their place."""
    return tuple(layer.model_copy(update={"path": "", "name": ""}).__dict__.values())


# --- the tree ---------------------------------------------------------------------------------------------------------


def _layer(profile: Profile, counts: Sequence[Flops], branch: Branch, below: list[Layer]) -> Layer:
    nodes = [profile.nodes[index] for index in branch.nodes]
    macs = sum((counts[index] for index in branch.nodes), Flops())
    forward = sum_flops(node.forward_flops for node in nodes)
    backward = sum_flops(node.backward_flops for node in nodes if node.live_bytes.backward is not None)
    first = next((node.outputs[0] for node in nodes if node.outputs), None)
    parameters = [storage for storage in branch.storages if storage.kind is Kind.PARAMETER]
    own = {
        "params": sum(map(_elements, parameters)),
        "params_bytes": sum(storage.nbytes for storage in parameters),
        "buffers_bytes": sum(storage.nbytes for storage in branch.storages if storage.kind is Kind.BUFFER),
        "macs": macs.known,
        "macs_unknown": macs.unknown_calls,
        "forward_flops": forward.known,
        "forward_flops_unknown": forward.unknown_calls,
        "backward_flops": backward.known,
        "backward_flops_unknown": backward.unknown_calls,
        "output_bytes": sum(node.output_bytes for node in nodes),
        "saved_bytes": sum(node.saved_bytes for node in nodes),
    }
    return Layer(
        path=branch.path,
        name=branch.label,
        type=branch.type,
        kind="call" if branch.kind == "call" else "module",
        depth=branch.depth,
        calls=len(nodes),
        output_shape=None if first is None else first.shape,
        output_dtype="" if first is None else first.dtype,
        **{name: figure + sum(getattr(row, name) for row in below) for name, figure in own.items()},
    )


# --- counts -----------------------------------------------------------------------------------------------------------

_ITEM_BYTES = {**ITEM_BYTES, "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4}


def _elements(storage: Storage) -> int:
    """How many numbers it holds. Not its shape's: several parameters of a recurrent layer are views of one buffer, and
    it has the first one's."""
    item = 1 if storage.dtype.startswith("float8") else _ITEM_BYTES.get(storage.dtype)
    return prod(storage.shape) if item is None else storage.nbytes // item


def _macs(profile: Profile) -> list[Flops]:
    """For each node its forward's multiply-adds, and its operators without a formula."""
    counts = [Flops()] * len(profile.nodes)
    for op in profile.ops:
        if op.phase is not Phase.FORWARD:
            continue
        name = op.name.split(".")[1] if op.name.startswith("aten.") else ""
        if name in UNKNOWN_MAC_OPS or (name in MAC_OPS and op.flops is None):
            counts[op.node] += Flops(unknown_calls=1)
        elif name in MAC_OPS:
            counts[op.node] += Flops(known=(op.flops or 0) // 2)
    return counts
