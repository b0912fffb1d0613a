"""A step broken down: layer by layer, and by source line."""

from __future__ import annotations

from typing import Literal

from fxmem.records.profile import Bytes, Headed, Kind, Record, Versioned


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


class TensorGroup(Record):
    """Storages of one shape, dtype and kind."""

    count: int
    shape: tuple[int, ...]
    dtype: str
    """Empty for memory no tensor owns."""
    kind: Kind
    nbytes: Bytes
    """Of all of them together."""


class LineFigures(Record):
    """What a line, or what no line did, amounts to. Bytes are requested bytes; forward unless it says backward."""

    calls: int = 0
    """Nodes of the graph that count for it."""
    params_bytes: Bytes = 0
    """Parameters and buffers that are first read here."""
    allocated_bytes: Bytes = 0
    """Everything it allocates, its runs added up, workspaces included."""
    kept_bytes: Bytes = 0
    """Of that, what is still alive when the run that allocated it is over."""
    freed_bytes: Bytes = 0
    """What was there before a run and is gone after it."""
    saved_bytes: Bytes = 0
    """What it is the first to keep for backward (`Node.saved_bytes`)."""
    before_bytes: Bytes | None = None
    """Everything alive when it first runs; None if it runs no operator in forward."""
    after_bytes: Bytes | None = None
    """Everything alive when its last run is over."""
    peak_bytes: Bytes | None = None
    """Most bytes alive during its runs, everything counted."""
    backward_allocated_bytes: Bytes | None = None
    """Everything allocated while its gradients are computed, or while it is recomputed; None if backward does nothing
    for it."""
    backward_peak_bytes: Bytes | None = None
    """Most bytes alive meanwhile, everything counted."""
    came: tuple[TensorGroup, ...] = ()
    """What `kept_bytes` is made of, most bytes first."""
    went: tuple[TensorGroup, ...] = ()
    """What `freed_bytes` is made of."""


class LineRow(LineFigures):
    """A source line."""

    file: str
    line: int
    function: str
    """Of the first run, where a line belongs to several."""
    code: str


class OtherRow(LineFigures):
    """What belongs to no line of the files shown."""

    what: str
    """`loss`, `optimizer`, or `other code`: files that are not shown, and what reads the step's inputs."""


class LineReport(Headed, Versioned):
    """One step by source line."""

    resident_bytes: Bytes
    """Alive before the step: parameters, buffers, inputs, optimizer state."""
    resident: tuple[TensorGroup, ...]
    """What that is made of, most bytes first."""
    files: tuple[str, ...]
    """The files shown, in the order they first run."""
    lines: tuple[LineRow, ...]
    """By file, then by line."""
    rest: tuple[OtherRow, ...]
    forward_allocated_bytes: Bytes
    """Everything the forward allocates, the loss included: the sum over lines and rest, the optimizer left out."""
    forward_left_bytes: Bytes
    """Alive when forward ends: `resident_bytes`, and what lines and rest (the optimizer left out) kept less what they
    freed."""
    saved_bytes: Bytes
    """Of that, kept for backward: the sum over lines and rest."""

    def to_json(self, *, indent: int | None = None) -> str:
        """The report as JSON."""
        return self.model_dump_json(indent=indent)
