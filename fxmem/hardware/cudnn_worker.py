"""Asks cuDNN which workspace a layer would take on a GPU that is not there.

`python -m fxmem.hardware.cudnn_worker`, for convolutions and recurrent layers.

Run in a process of its own: cuDNN aborts the process when a library it wants is missing, and it brings 300 MB along.
JSON lines in, JSON lines out. The first line says what to load and for which device,

    {"libraries": [[path, required], …], "device": {…}, "heuristic": "instant" | "b", "smaller": true | false}

and is answered by `{"cudnn": 91900}` or `{"error": "…"}`. Each further line is one convolution, answered in order as
soon as it is known, so that a crash costs one answer and not all:

    {"op": "fwd" | "dgrad" | "wgrad", "x": [[dims], [strides]], "w": …, "y": …, "padding": […], "stride": […],
     "dilation": […], "dtype": "float32", "allow_tf32": true, "deterministic": false, "blocked_engines": []}
    {"workspace": bytes | null, "smaller": [bytes, …], "knobs": [[type, value], …], "error": "…" | null}

or one recurrent layer, `{"op": "rnn", …}` with the fields of `RnnSignature`.

It needs cuDNN 9.8 or later, neither a driver nor a GPU, and mirrors torch's `Conv_v8.cpp` with `benchmark=False`:
configurations of heuristic mode INSTANT (B if `TORCH_CUDNN_USE_HEURISTIC_MODE_B=1`), less those with a numerical note
torch refuses, less the engines of torch's errata list; the first whose execution plan finalizes is the one that runs.
If none does, the same over the fallback list. A heuristic that fails is an error, as it is in torch. Where there is no
memory for a plan's workspace torch goes on to the next one: where that is asked for, `smaller` has the workspaces of
those that follow, each smaller than all before it, down to one that always finds room.

A recurrent layer's is what `cudnnGetRNNTempSpaceSizes` fills in. It wants a handle, which wants a driver; given a block
of zeros with the compute capability in its place, it returns an error and fills in the size all the same. Where that
place is, is cuDNN's own business: so first two sizes that an H100 was measured to take are asked for, and if these are
not answered, nothing is.

Attribute and descriptor numbers are those of `cudnn_graph_v9.h`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class _Attribute(NamedTuple):
    """An attribute of a descriptor."""

    number: int
    """`cudnnBackendAttributeName_t`."""
    type: int
    """`cudnnBackendAttributeType_t`."""
    c_type: Any


_POINTER = 15, ctypes.c_void_p
_ATTRIBUTES = {
    name: _Attribute(int(number), *kind)
    for kind, names in {
        (1, ctypes.c_int): "CONVOLUTION_COMP_TYPE=100 TENSOR_DATA_TYPE=901",
        (3, ctypes.c_int64): """CONVOLUTION_DILATIONS=102 CONVOLUTION_FILTER_STRIDES=103 CONVOLUTION_POST_PADDINGS=104
            CONVOLUTION_PRE_PADDINGS=105 CONVOLUTION_SPATIAL_DIMS=106 EXECUTION_PLAN_WORKSPACE_SIZE=402
            KNOB_CHOICE_KNOB_VALUE=601 TENSOR_BYTE_ALIGNMENT=900 TENSOR_DIMENSIONS=902 TENSOR_STRIDES=903
            TENSOR_UNIQUE_ID=906 ENGINE_GLOBAL_INDEX=1301""",
        (7, ctypes.c_int): "CONVOLUTION_CONV_MODE=101",
        (8, ctypes.c_int): "ENGINEHEUR_MODE=200",
        (9, ctypes.c_int): "KNOB_CHOICE_KNOB_TYPE=600",
        (11, ctypes.c_int): "ENGINE_NUMERICAL_NOTE=1303",
        _POINTER: """ENGINEHEUR_OPERATION_GRAPH=201 ENGINEHEUR_RESULTS=202 ENGINEHEUR_DEVICEPROP=204
            ENGINECFG_ENGINE=300 ENGINECFG_KNOB_CHOICES=302 EXECUTION_PLAN_ENGINE_CONFIG=401
            EXECUTION_PLAN_DEVICEPROP=407 OPERATIONGRAPH_OPS=801""",
        (24, ctypes.c_char): "DEVICEPROP_JSON_REPRESENTATION=2702",
    }.items()
    for name, number in (word.split("=") for word in names.split())
}
"""By name without the prefix `CUDNN_ATTR_`: a descriptor's kind, and what of it."""
_KINDS = {
    **{"CONVOLUTION": 1, "ENGINE": 2, "ENGINECFG": 3, "ENGINEHEUR": 4, "EXECUTION_PLAN": 5, "KNOB_CHOICE": 7},
    **{"fwd": 10, "wgrad": 11, "dgrad": 12, "OPERATIONGRAPH": 15, "TENSOR": 17, "DEVICEPROP": 38},
}
"""`cudnnBackendDescriptorType_t`, those of operations by our names."""
_FIRST_OF_OPERATION = {"fwd": 700, "dgrad": 706, "wgrad": 712}
"""The first of six attributes in a row: alpha, beta, convolution, filter, x, y."""
_DATA_TYPE = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_HEURISTIC = {"instant": 0, "b": 1, "fallback": 2}
_CROSS_CORRELATION = 1
_ALIGNMENT = 32
"""torch passes an address's alignment, at most 32 bytes; blocks of its allocator are aligned to 512."""
_SMALL = 1 << 20
"""A workspace that finds room wherever a step's tensors do: no smaller one is looked for."""
_MOST_KNOBS = 64
"""More than there are kinds of knobs."""
_NOTE_TENSOR_CORE, _NOTE_DOWN_CONVERT_INPUTS, _NOTE_NONDETERMINISTIC = 0, 1, 4
_HANDLE_BYTES, _CAPABILITY_AT = 1 << 16, 104
"""A block as large as a handle at least, and where in it cuDNN 9.19 has the compute capability."""
_MEASURED_LSTM: dict[str, Any] = {
    **dict.fromkeys(("algorithm", "proj_size"), 0),
    **{"mode": 2, "input_size": 256, "hidden_size": 512, "num_layers": 2, "bidirectional": False},
    **{"steps": 128, "batch": 8, "dropout": 0.0, "training": True, "allow_tf32": True},
}
_MEASURED_BYTES = {"float32": 43_319_616, "bfloat16": 30_048_576}
"""Its workspace on an H100, by dtype (benchmarks/results/gpu, cuDNN 9.19)."""
_DOUBLE_BIAS, _PADDED_IO = 2, 1
_PADDED_LAYOUT, _PACKED_LAYOUT = 0, 1
"""`cudnnRNNDataLayout_t`, both with the steps first."""
_TENSOR_OP_MATH, _FMA_MATH = 1, 3


class CudnnError(Exception):
    """A call into cuDNN failed; the message is cuDNN's."""


class _Descriptor:
    """A backend descriptor that destroys itself, and keeps alive what it refers to."""

    def __init__(self, library: Cudnn, kind: str) -> None:
        self.library = library
        self.kind = kind
        self.pointer = ctypes.c_void_p()
        self.references: list[_Descriptor] = []
        library.call("cudnnBackendCreateDescriptor", ctypes.c_int(_KINDS[kind]), ctypes.byref(self.pointer))

    def __del__(self) -> None:
        if self.pointer:
            self.library.handle.cudnnBackendDestroyDescriptor(self.pointer)

    def set(self, attribute: _Attribute, *values: Any) -> None:
        """`cudnnBackendSetAttribute`."""
        number, kind, c_type = attribute
        if c_type is ctypes.c_void_p:
            self.references += values
            values = tuple(value.pointer for value in values)
        count, array = ctypes.c_int64(len(values)), (c_type * len(values))(*values)
        sizes = ctypes.c_int(number), ctypes.c_int(kind), count
        self.library.call("cudnnBackendSetAttribute", self.pointer, *sizes, array)

    def finalize(self, **attributes: Any) -> _Descriptor:
        """Set attributes, each to a value or several, by their names without the kind; `cudnnBackendFinalize`."""
        for name, value in attributes.items():
            self.set(_ATTRIBUTES[f"{self.kind}_{name}"], *(value if isinstance(value, list) else [value]))
        self.library.call("cudnnBackendFinalize", self.pointer)
        return self

    def get(self, name: str, most: int, into: Sequence[_Descriptor] = ()) -> tuple[int, Any]:
        """`cudnnBackendGetAttribute`: how many elements there are, and up to `most` of them."""
        number, kind, c_type = _ATTRIBUTES[f"{self.kind}_{name}"]
        array, count = (c_type * max(most, 1))(*(each.pointer for each in into)), ctypes.c_int64()
        sizes = ctypes.c_int(number), ctypes.c_int(kind), ctypes.c_int64(most), ctypes.byref(count)
        self.library.call("cudnnBackendGetAttribute", self.pointer, *sizes, array if most else None)
        return count.value, array

    def get_descriptors(self, name: str, kind: str, most: int) -> list[_Descriptor]:
        """The same for descriptors of a kind."""
        made = [_Descriptor(self.library, kind) for _ in range(most)]
        count, _ = self.get(name, most, made)
        return made[:count]


class Cudnn:
    """cuDNN's backend API, as far as one convolution needs it."""

    def __init__(self, libraries: Sequence[tuple[str, bool]]) -> None:
        """Load shared libraries in order, cuDNN last.

        Args:
            libraries: path or name, and whether to go on without it.

        Raises:
            OSError: a required one cannot be loaded.
        """
        for path, required in libraries:
            try:
                self.handle: Any = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError:
                if required:
                    raise
        self.handle.cudnnGetVersion.restype = ctypes.c_size_t
        self.handle.cudnnGetErrorString.restype = ctypes.c_char_p
        self.version: int = self.handle.cudnnGetVersion()
        self.device: _Descriptor | None = None
        self.capability = 0
        """Of the device, 100 * major + 10 * minor."""

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a `cudnnStatus_t`."""
        function: Callable[..., int] = getattr(self.handle, name)
        status = function(*arguments)
        if status:
            raise CudnnError(f"{name}: {self.handle.cudnnGetErrorString(status).decode(errors='replace')}")

    def select_device(self, properties: dict[str, Any]) -> None:
        """Answer from now on for the device with these properties."""
        self.capability = properties.get("deviceVer", 0)
        characters = [bytes([byte]) for byte in json.dumps(properties).encode()]
        self.device = _Descriptor(self, "DEVICEPROP").finalize(JSON_REPRESENTATION=characters)

    def plans(
        self, convolution: dict[str, Any], heuristic: str, *, smaller: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Workspace bytes of the plan torch would run, and of the smaller ones that it goes on to, if wanted; the first
        one's knobs. No bytes where there is no plan."""
        graph, sizes, knobs = self._graph(convolution), list[int](), list[tuple[int, int]]()
        for mode in (heuristic, "fallback"):
            try:
                for nbytes, config in self._finalized(convolution, graph, mode):
                    if not sizes:
                        knobs = _read_knobs(config)
                    if not sizes or nbytes < sizes[-1]:
                        sizes.append(nbytes)
                    if nbytes <= _SMALL or not smaller:
                        return sizes, knobs
            except CudnnError:
                if not sizes:
                    raise
        return sizes, knobs

    def _finalized(
        self, convolution: dict[str, Any], graph: _Descriptor, mode: str
    ) -> Iterator[tuple[int, _Descriptor]]:
        """The plans of a heuristic mode that can be run, in its order: workspace bytes, and the configuration."""
        heuristics = _Descriptor(self, "ENGINEHEUR")
        heuristics.finalize(OPERATION_GRAPH=graph, MODE=_HEURISTIC[mode], DEVICEPROP=self.device)
        for each in heuristics.get_descriptors("RESULTS", "ENGINECFG", heuristics.get("RESULTS", 0)[0]):
            each.references.append(heuristics)
            (engine,) = each.get_descriptors("ENGINE", "ENGINE", 1)
            count, notes = engine.get("NUMERICAL_NOTE", 32)
            blocked = engine.get("GLOBAL_INDEX", 1)[1][0] in convolution["blocked_engines"]
            if blocked or _is_refused(set(notes[:count]), convolution):
                continue
            plan = _Descriptor(self, "EXECUTION_PLAN")
            try:
                plan.finalize(ENGINE_CONFIG=each, DEVICEPROP=self.device)
                _, workspace = plan.get("WORKSPACE_SIZE", 1)
            except CudnnError:
                continue
            yield int(workspace[0]), each

    def rnn_workspace(self, layer: dict[str, Any]) -> int | None:
        """Workspace bytes of a recurrent layer; None where this cuDNN does not say."""
        return (self._temporary_bytes(layer, self.capability) or None) if self._answers_without_driver else None

    @functools.cached_property
    def _answers_without_driver(self) -> bool:
        asked = ((dtype, self._temporary_bytes({**_MEASURED_LSTM, "dtype": dtype}, 900)) for dtype in _MEASURED_BYTES)
        return dict(asked) == _MEASURED_BYTES

    def _temporary_bytes(self, layer: dict[str, Any], capability: int) -> int:
        """`cudnnGetRNNTempSpaceSizes` with the descriptors of torch's `RNN.cpp`; 0 where it fills in nothing."""
        block = (ctypes.c_char * _HANDLE_BYTES)()
        struct.pack_into("i", block, _CAPABILITY_AT, capability)
        handle, dropout, rnn, data = ctypes.cast(block, ctypes.c_void_p), *(ctypes.c_void_p() for _ in range(3))
        for name, pointer in (("Dropout", dropout), ("RNN", rnn), ("RNNData", data)):
            self.call(f"cudnnCreate{name}Descriptor", ctypes.byref(pointer))
        dtype, hidden = layer["dtype"], layer["hidden_size"]
        kind, steps, batch = _DATA_TYPE[dtype], layer["steps"], layer["batch"]
        probability = ctypes.c_float(layer["dropout"])
        no_states = (None, ctypes.c_size_t(0), ctypes.c_ulonglong(0))
        self.call("cudnnSetDropoutDescriptor", dropout, handle, probability, *no_states)
        math = _TENSOR_OP_MATH if dtype in ("float16", "bfloat16") else 0
        if dtype == "float32" and not layer["allow_tf32"]:
            math = _FMA_MATH
        shape = (layer["input_size"], hidden, layer["proj_size"] or hidden, layer["num_layers"])
        precision = _DATA_TYPE["float64" if dtype == "float64" else "float32"]
        way = (layer["algorithm"], layer["mode"], _DOUBLE_BIAS, int(layer["bidirectional"]), 0)
        packed = layer.get("batch_sizes")
        is_padded, layout = (_PADDED_IO, _PADDED_LAYOUT) if packed is None else (0, _PACKED_LAYOUT)
        self.call("cudnnSetRNNDescriptor_v8", rnn, *way, kind, precision, math, *shape, dropout, is_padded)
        each = [sum(size > i for size in packed or [batch] * steps) for i in range(batch)]
        lengths, fill = (ctypes.c_int * batch)(*each), ctypes.c_double()
        size = (steps, batch, shape[0])
        self.call("cudnnSetRNNDataDescriptor", data, kind, layout, *size, lengths, ctypes.byref(fill))
        workspace, reserve = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.byref(workspace), ctypes.byref(reserve)
        self.handle.cudnnGetRNNTempSpaceSizes(handle, rnn, int(layer["training"]), data, *sizes)
        return workspace.value

    def _graph(self, convolution: dict[str, Any]) -> _Descriptor:
        double = convolution["dtype"] == "float64"
        window = _Descriptor(self, "CONVOLUTION").finalize(
            COMP_TYPE=_DATA_TYPE["float64" if double else "float32"],
            CONV_MODE=_CROSS_CORRELATION,
            SPATIAL_DIMS=len(convolution["stride"]),
            PRE_PADDINGS=convolution["padding"],
            POST_PADDINGS=convolution["padding"],
            DILATIONS=convolution["dilation"],
            FILTER_STRIDES=convolution["stride"],
        )
        tensors = [
            _Descriptor(self, "TENSOR").finalize(
                DATA_TYPE=_DATA_TYPE[convolution["dtype"]],
                DIMENSIONS=convolution[side][0],
                STRIDES=convolution[side][1],
                UNIQUE_ID=ord(side),
                BYTE_ALIGNMENT=_ALIGNMENT,
            )
            for side in "wxy"
        ]
        operation, first = _Descriptor(self, convolution["op"]), _FIRST_OF_OPERATION[convolution["op"]]
        scalar = (5, ctypes.c_double) if double else (4, ctypes.c_float)
        values = ((scalar, 1.0), (scalar, 0.0), *((_POINTER, each) for each in (window, *tensors)))
        for number, (kind, value) in enumerate(values, first):
            operation.set(_Attribute(number, *kind), value)
        return _Descriptor(self, "OPERATIONGRAPH").finalize(OPS=operation.finalize())


def _read_knobs(config: _Descriptor) -> list[tuple[int, int]]:
    """The choices of a configuration, by `cudnnBackendKnobType_t`."""
    choices = config.get_descriptors("KNOB_CHOICES", "KNOB_CHOICE", _MOST_KNOBS)
    knobs = ([choice.get(name, 1)[1][0] for name in ("KNOB_TYPE", "KNOB_VALUE")] for choice in choices)
    return [(int(knob), int(value)) for knob, value in knobs]


def _is_refused(notes: set[int], convolution: dict[str, Any]) -> bool:
    """`filterEngineConfigs`."""
    tensor_cores_forbidden = convolution["dtype"] == "float32" and not convolution["allow_tf32"]
    return (
        (convolution["deterministic"] and _NOTE_NONDETERMINISTIC in notes)
        or _NOTE_DOWN_CONVERT_INPUTS in notes
        or (tensor_cores_forbidden and _NOTE_TENSOR_CORE in notes)
    )


def _answer(cudnn: Cudnn, convolution: dict[str, Any], header: dict[str, Any]) -> dict[str, Any]:
    try:
        if convolution["op"] == "rnn":
            nbytes = cudnn.rnn_workspace(convolution)
            error = None if nbytes else "cuDNN has no answer for it without a driver"
            return {"workspace": nbytes, "knobs": [], "error": error}
        sizes, knobs = cudnn.plans(convolution, header["heuristic"], smaller=header["smaller"])
    except CudnnError as error:
        return {"workspace": None, "knobs": [], "error": str(error)}
    if not sizes:
        return {"workspace": None, "knobs": [], "error": "cuDNN has no plan for it"}
    return {"workspace": sizes[0], "smaller": sizes[1:], "knobs": knobs, "error": None}


def main() -> int:
    """Serve standard input until it ends. Exit code 0, also when cuDNN cannot be loaded: that is an answer."""
    header = json.loads(sys.stdin.readline())
    try:
        cudnn = Cudnn([(path, required) for path, required in header["libraries"]])
        cudnn.select_device(header["device"])
    except (OSError, AttributeError, CudnnError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 0
    print(json.dumps({"cudnn": cudnn.version}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(cudnn, json.loads(line), header)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
