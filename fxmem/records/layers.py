"""A model layer by layer: one row per module, and per function called in a module's own code."""

from __future__ import annotations

from typing import Literal

from fxmem.records.profile import Bytes, Headed, Record, Versioned

__all__ = ["Layer", "LayerReport"]


class Layer(Record):
    """A module, or the calls of one function in its own code; of a module, everything below it included."""

    path: str
    """Dotted path of the module; of calls, of the module whose code made them. Empty for the model itself."""
    name: str
    """Last segment of the path, or the function's name."""
    type: str
    """Class of a module; empty for calls."""
    kind: Literal["module", "call"]
    depth: int
    """Modules above it."""
    calls: int
    """How often the layer was called; 0 for a module that only holds others, or that is never called."""
    output_shape: tuple[int, ...] | None
    """Of the first tensor of the first call; None for a module that is no node of the graph."""
    output_dtype: str
    params: int
    params_bytes: Bytes
    buffers_bytes: Bytes
    macs: int
    """Multiply-adds of forward."""
    macs_unknown: int
    """Operators that have an unknown number of them, not in `macs`."""
    forward_flops: int
    forward_flops_unknown: int
    """Nodes with an operator without a formula, which are not in `forward_flops`."""
    backward_flops: int
    """Recomputation of checkpointed regions included."""
    backward_flops_unknown: int
    output_bytes: Bytes
    saved_bytes: Bytes


class LayerReport(Headed, Versioned):
    """One step layer by layer."""

    layers: tuple[Layer, ...]
    """A tree in preorder, the model first; modules in the order of their first call, those never called last."""
    trained_params: int | None
    """Of the parameters, those that get a gradient; None at inference."""
    input_bytes: Bytes

    @property
    def total(self) -> Layer:
        """The model."""
        return self.layers[0]

    def to_json(self, *, indent: int | None = None) -> str:
        """The report as JSON."""
        return self.model_dump_json(indent=indent)
