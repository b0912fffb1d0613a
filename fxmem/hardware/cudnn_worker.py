"""Asks cuDNN which workspace a layer would take on a GPU that is not there.

`python -m fxmem.hardware.cudnn_worker`, for convolutions and recurrent layers.

Run in a process of its own: cuDNN aborts the process when a library it wants is missing, and it brings 300 MB along.
JSON lines in, JSON lines out. The first line says what to load and for which device,

    {"libraries": [[path, required], …], "device": {…}, "heuristic": "instant" | "b"}

and is answered by `{"cudnn": 91900}` or `{"error": "…"}`. Each further line is one convolution, answered in order as
soon as it is known, so that a crash costs one answer and not all:

    {"op": "fwd" | "dgrad" | "wgrad", "x": [[dims], [strides]], "w": …, "y": …, "padding": […], "stride": […],
     "dilation": […], "dtype": "float32", "allow_tf32": true, "deterministic": false, "blocked_engines": []}
    {"workspace": bytes | null, "knobs": [[type, value], …], "error": "…" | null}

or one recurrent layer, `{"op": "rnn", …}` with the fields of `RnnSignature`.

It needs cuDNN 9.8 or later, neither a driver nor a GPU, and mirrors torch's `Conv_v8.cpp` with `benchmark=False`:
configurations of heuristic mode INSTANT (B if `TORCH_CUDNN_USE_HEURISTIC_MODE_B=1`), less those with a numerical note
torch refuses, less the engines of torch's errata list; the first whose execution plan finalizes is the one that runs.
If none does, the same over the fallback list. A heuristic that fails is an error, as it is in torch. When memory is
short torch goes on to the next plan with a smaller workspace; that is not modelled.

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
from enum import IntEnum
from typing import Any


class _Type(IntEnum):
    """`cudnnBackendAttributeType_t`."""

    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    BACKEND_DESCRIPTOR = 15
    CHAR = 24


class _Kind(IntEnum):
    """`cudnnBackendDescriptorType_t`."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    OPERATION_FORWARD = 10
    OPERATION_BACKWARD_FILTER = 11
    OPERATION_BACKWARD_DATA = 12
    OPERATIONGRAPH = 15
    TENSOR = 17
    DEVICEPROP = 38


class _Attribute(IntEnum):
    """`cudnnBackendAttributeName_t`, without the prefix `CUDNN_ATTR_`."""

    CONVOLUTION_COMP_TYPE = 100
    CONVOLUTION_CONV_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_FILTER_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINEHEUR_DEVICEPROP = 204
    ENGINECFG_ENGINE = 300
    ENGINECFG_KNOB_CHOICES = 302
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    EXECUTION_PLAN_DEVICEPROP = 407
    KNOB_CHOICE_KNOB_TYPE = 600
    KNOB_CHOICE_KNOB_VALUE = 601
    OPERATIONGRAPH_OPS = 801
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTE = 1303
    DEVICEPROP_JSON_REPRESENTATION = 2702


_OPERATION = {
    "fwd": (_Kind.OPERATION_FORWARD, 700),
    "dgrad": (_Kind.OPERATION_BACKWARD_DATA, 706),
    "wgrad": (_Kind.OPERATION_BACKWARD_FILTER, 712),
}
"""Descriptor kind, and the first of six attributes in a row: alpha, beta, convolution, filter, x, y."""
_DATA_TYPE = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_HEURISTIC = {"instant": 0, "b": 1, "fallback": 2}
_CROSS_CORRELATION = 1
_ALIGNMENT = 32
"""torch passes an address's alignment, at most 32 bytes; blocks of its allocator are aligned to 512."""
_MOST_KNOBS = 64
"""More than there are kinds of knobs."""
_NOTE_TENSOR_CORE, _NOTE_DOWN_CONVERT_INPUTS, _NOTE_NONDETERMINISTIC = 0, 1, 4

_C_TYPE: dict[_Type, Any] = {
    _Type.DATA_TYPE: ctypes.c_int,
    _Type.INT64: ctypes.c_int64,
    _Type.FLOAT: ctypes.c_float,
    _Type.DOUBLE: ctypes.c_double,
    _Type.CONVOLUTION_MODE: ctypes.c_int,
    _Type.HEUR_MODE: ctypes.c_int,
    _Type.KNOB_TYPE: ctypes.c_int,
    _Type.NUMERICAL_NOTE: ctypes.c_int,
    _Type.BACKEND_DESCRIPTOR: ctypes.c_void_p,
    _Type.CHAR: ctypes.c_char,
}


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
_TENSOR_OP_MATH, _FMA_MATH = 1, 3


class CudnnError(Exception):
    """A call into cuDNN failed; the message is cuDNN's."""


class _Descriptor:
    """A backend descriptor that destroys itself, and keeps alive what it refers to."""

    def __init__(self, library: Cudnn, kind: _Kind) -> None:
        self.library = library
        self.pointer = ctypes.c_void_p()
        self.references: list[_Descriptor] = []
        library.call("cudnnBackendCreateDescriptor", ctypes.c_int(kind), ctypes.byref(self.pointer))

    def __del__(self) -> None:
        if self.pointer:
            self.library.handle.cudnnBackendDestroyDescriptor(self.pointer)

    def set(self, attribute: int, kind: _Type, *values: Any) -> _Descriptor:
        """`cudnnBackendSetAttribute`."""
        if kind is _Type.BACKEND_DESCRIPTOR:
            self.references += values
            values = tuple(value.pointer for value in values)
        array = (_C_TYPE[kind] * len(values))(*values)
        self.library.call(
            "cudnnBackendSetAttribute",
            self.pointer,
            ctypes.c_int(attribute),
            ctypes.c_int(kind),
            ctypes.c_int64(len(values)),
            array,
        )
        return self

    def finalize(self) -> _Descriptor:
        """`cudnnBackendFinalize`."""
        self.library.call("cudnnBackendFinalize", self.pointer)
        return self

    def get(self, attribute: _Attribute, kind: _Type, capacity: int, into: Any = None) -> tuple[int, Any]:
        """`cudnnBackendGetAttribute`: how many elements there are, and up to `capacity` of them."""
        array = (_C_TYPE[kind] * max(capacity, 1))() if into is None else into
        count = ctypes.c_int64()
        arguments = (
            self.pointer,
            ctypes.c_int(attribute),
            ctypes.c_int(kind),
            ctypes.c_int64(capacity),
            ctypes.byref(count),
        )
        self.library.call("cudnnBackendGetAttribute", *arguments, array if capacity else None)
        return count.value, array


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
        text = json.dumps(properties).encode()
        characters = (bytes([byte]) for byte in text)
        self.device = (
            _Descriptor(self, _Kind.DEVICEPROP)
            .set(_Attribute.DEVICEPROP_JSON_REPRESENTATION, _Type.CHAR, *characters)
            .finalize()
        )

    def plan(self, convolution: dict[str, Any], heuristic: str) -> tuple[int, list[tuple[int, int]]] | None:
        """Workspace bytes and knobs of the plan torch would run; None when there is no plan."""
        graph = self._graph(convolution)
        for mode in (heuristic, "fallback"):
            for configuration in self._configurations(graph, mode):
                engine, notes = self._describe(configuration)
                if engine in convolution["blocked_engines"] or _is_refused(notes, convolution):
                    continue
                plan = _Descriptor(self, _Kind.EXECUTION_PLAN)
                try:
                    plan.set(_Attribute.EXECUTION_PLAN_ENGINE_CONFIG, _Type.BACKEND_DESCRIPTOR, configuration)
                    plan.set(_Attribute.EXECUTION_PLAN_DEVICEPROP, _Type.BACKEND_DESCRIPTOR, self.device).finalize()
                    _, workspace = plan.get(_Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, _Type.INT64, 1)
                except CudnnError:
                    continue
                return int(workspace[0]), self._knobs(configuration)
        return None

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
        self.call("cudnnSetRNNDescriptor_v8", rnn, *way, kind, precision, math, *shape, dropout, _PADDED_IO)
        lengths, fill = (ctypes.c_int * batch)(*[steps] * batch), ctypes.c_double()
        self.call(*("cudnnSetRNNDataDescriptor", data, kind, 0, steps, batch, shape[0], lengths, ctypes.byref(fill)))
        workspace, reserve = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.byref(workspace), ctypes.byref(reserve)
        self.handle.cudnnGetRNNTempSpaceSizes(handle, rnn, int(layer["training"]), data, *sizes)
        return workspace.value

    def _graph(self, convolution: dict[str, Any]) -> _Descriptor:
        double = convolution["dtype"] == "float64"
        window = _Descriptor(self, _Kind.CONVOLUTION)
        window.set(_Attribute.CONVOLUTION_COMP_TYPE, _Type.DATA_TYPE, _DATA_TYPE["float64" if double else "float32"])
        window.set(_Attribute.CONVOLUTION_CONV_MODE, _Type.CONVOLUTION_MODE, _CROSS_CORRELATION)
        window.set(_Attribute.CONVOLUTION_SPATIAL_DIMS, _Type.INT64, len(convolution["stride"]))
        for attribute, name in (
            (_Attribute.CONVOLUTION_PRE_PADDINGS, "padding"),
            (_Attribute.CONVOLUTION_POST_PADDINGS, "padding"),
            (_Attribute.CONVOLUTION_DILATIONS, "dilation"),
            (_Attribute.CONVOLUTION_FILTER_STRIDES, "stride"),
        ):
            window.set(attribute, _Type.INT64, *convolution[name])
        kind, first = _OPERATION[convolution["op"]]
        operation, scalar = _Descriptor(self, kind), _Type.DOUBLE if double else _Type.FLOAT
        operation.set(first, scalar, 1.0).set(first + 1, scalar, 0.0)
        operation.set(first + 2, _Type.BACKEND_DESCRIPTOR, window.finalize())
        for offset, side in enumerate("wxy", start=3):
            operation.set(first + offset, _Type.BACKEND_DESCRIPTOR, self._tensor(side, convolution))
        graph = _Descriptor(self, _Kind.OPERATIONGRAPH)
        return graph.set(_Attribute.OPERATIONGRAPH_OPS, _Type.BACKEND_DESCRIPTOR, operation.finalize()).finalize()

    def _tensor(self, side: str, convolution: dict[str, Any]) -> _Descriptor:
        dims, strides = convolution[side]
        tensor = _Descriptor(self, _Kind.TENSOR)
        tensor.set(_Attribute.TENSOR_DATA_TYPE, _Type.DATA_TYPE, _DATA_TYPE[convolution["dtype"]])
        tensor.set(_Attribute.TENSOR_DIMENSIONS, _Type.INT64, *dims).set(
            _Attribute.TENSOR_STRIDES, _Type.INT64, *strides
        )
        tensor.set(_Attribute.TENSOR_UNIQUE_ID, _Type.INT64, ord(side)).set(
            _Attribute.TENSOR_BYTE_ALIGNMENT, _Type.INT64, _ALIGNMENT
        )
        return tensor.finalize()

    def _configurations(self, graph: _Descriptor, mode: str) -> Iterator[_Descriptor]:
        heuristic = _Descriptor(self, _Kind.ENGINEHEUR)
        heuristic.set(_Attribute.ENGINEHEUR_OPERATION_GRAPH, _Type.BACKEND_DESCRIPTOR, graph)
        heuristic.set(_Attribute.ENGINEHEUR_MODE, _Type.HEUR_MODE, _HEURISTIC[mode])
        heuristic.set(_Attribute.ENGINEHEUR_DEVICEPROP, _Type.BACKEND_DESCRIPTOR, self.device)
        heuristic.finalize()
        count, _ = heuristic.get(_Attribute.ENGINEHEUR_RESULTS, _Type.BACKEND_DESCRIPTOR, 0)
        configurations = [_Descriptor(self, _Kind.ENGINECFG) for _ in range(count)]
        array = _pointers(configurations)
        count, _ = heuristic.get(_Attribute.ENGINEHEUR_RESULTS, _Type.BACKEND_DESCRIPTOR, count, array)
        for configuration in configurations[:count]:
            configuration.references.append(heuristic)
            yield configuration

    def _describe(self, configuration: _Descriptor) -> tuple[int, set[int]]:
        engine = _Descriptor(self, _Kind.ENGINE)
        configuration.get(_Attribute.ENGINECFG_ENGINE, _Type.BACKEND_DESCRIPTOR, 1, _pointers([engine]))
        _, index = engine.get(_Attribute.ENGINE_GLOBAL_INDEX, _Type.INT64, 1)
        count, notes = engine.get(_Attribute.ENGINE_NUMERICAL_NOTE, _Type.NUMERICAL_NOTE, 32)
        return int(index[0]), set(notes[:count])

    def _knobs(self, configuration: _Descriptor) -> list[tuple[int, int]]:
        choices = [_Descriptor(self, _Kind.KNOB_CHOICE) for _ in range(_MOST_KNOBS)]
        count, _ = configuration.get(
            _Attribute.ENGINECFG_KNOB_CHOICES, _Type.BACKEND_DESCRIPTOR, _MOST_KNOBS, _pointers(choices)
        )
        found = []
        for choice in choices[:count]:
            _, knob = choice.get(_Attribute.KNOB_CHOICE_KNOB_TYPE, _Type.KNOB_TYPE, 1)
            _, value = choice.get(_Attribute.KNOB_CHOICE_KNOB_VALUE, _Type.INT64, 1)
            found.append((int(knob[0]), int(value[0])))
        return found


def _pointers(descriptors: Sequence[_Descriptor]) -> Any:
    return (ctypes.c_void_p * max(len(descriptors), 1))(*(descriptor.pointer for descriptor in descriptors))


def _is_refused(notes: set[int], convolution: dict[str, Any]) -> bool:
    """`filterEngineConfigs`."""
    tensor_cores_forbidden = convolution["dtype"] == "float32" and not convolution["allow_tf32"]
    return (
        (convolution["deterministic"] and _NOTE_NONDETERMINISTIC in notes)
        or _NOTE_DOWN_CONVERT_INPUTS in notes
        or (tensor_cores_forbidden and _NOTE_TENSOR_CORE in notes)
    )


def _answer(cudnn: Cudnn, convolution: dict[str, Any], heuristic: str) -> dict[str, Any]:
    try:
        if convolution["op"] == "rnn":
            nbytes = cudnn.rnn_workspace(convolution)
            error = None if nbytes else "cuDNN has no answer for it without a driver"
            return {"workspace": nbytes, "knobs": [], "error": error}
        plan = cudnn.plan(convolution, heuristic)
    except CudnnError as error:
        return {"workspace": None, "knobs": [], "error": str(error)}
    if plan is None:
        return {"workspace": None, "knobs": [], "error": "cuDNN has no plan for it"}
    return {"workspace": plan[0], "knobs": plan[1], "error": None}


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
        print(json.dumps(_answer(cudnn, json.loads(line), header["heuristic"])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
