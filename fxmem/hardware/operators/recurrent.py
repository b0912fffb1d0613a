"""Recurrent layers and cells: their FLOPs, and the workspaces of cuDNN's."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.hidden_memory import HiddenEvent, RnnSignature, alloc, free, output
from fxmem.hardware.operators.registry import Call, NamedCall, Operator, layouts_among
from fxmem.hardware.tensor_layouts import TensorLayout, read_layout
from fxmem.records.profile import Target

_STANDARD, _PERSISTENT, _PERSISTENT_SMALL = 0, 1, 3
_LSTM, _GRU = 2, 3
_CELLS = {0: (1, 1, 2), 1: (1, 1, 4), 2: (4, 18, 24), 3: (3, 14, 17)}
"""By cuDNN's mode (relu, tanh, LSTM, GRU): gates, then operations per hidden element beyond the gates' sums, forward
and backward.

LSTM: three sigmoids (4 each), tanh, c = f c + i g (3), h = o tanh(c) (2). GRU: two sigmoids, r (U h), tanh, h = (1 - z)
n + z h (4). Backward, both: the two gradients that meet in h (1). LSTM: tanh(c), do = dh tanh(c) (1), dc += dh o (1 -
tanh(c) tanh(c)) (5), di, df, dg and the next dc (4), four gates' derivatives (3 each). GRU: dn, dz (2 each), the next
dh (1), tanh' (3), dr, d(U h) (1 each), two sigmoids' (3 each).
"""


def _memory(call: Call) -> list[HiddenEvent]:
    """The workspaces of cuDNN's recurrent layers (`_cudnn_rnn`, `_cudnn_rnn_backward` in RNN.cpp): forward's comes
    before the reserve; backward has one for the gradients of its inputs, then one for those of the weights."""
    args, backward = call.args, call.name.endswith("_backward")
    source, weights, per_layer, flat, hx, cx = args[:6]
    *settings, packed = args[10 if backward else 6 :][:9]
    mode, hidden, proj, layers, batch_first, dropout, training, bidirectional = settings
    layout = read_layout(source)
    steps, batch = layout.shape[1::-1] if batch_first else layout.shape[:2]
    if packed:
        steps, batch = len(packed), packed[0]
    signature = RnnSignature(
        algorithm=0, mode=mode, dtype=cast(Any, layout.dtype), input_size=layout.shape[-1], hidden_size=hidden,
        proj_size=proj, num_layers=layers, bidirectional=bidirectional, steps=steps, batch=batch,
        dropout=dropout if training else 0.0, training=training,
        allow_tf32=call.platform.settings.allow_tf32_in_rnn, batch_sizes=tuple(packed) if packed else None,
    )  # fmt: skip
    signature = signature.model_copy(update={"algorithm": _rnn_algorithm(signature, call.card, backward=backward)})
    workspace = alloc("cuDNN RNN workspace", None, signature)
    states = [output("input or its gradient"), *(output("state") for state in (hx, cx) if state is not None)]
    if not backward:
        return [*states, *([output("weights")] if flat is None else []), workspace, output("reserve")]
    # Each of backward's two parts copies an input that is not dense as (steps, batch, features), the first the gradient
    # of the output, too.
    copy, of_gradient = (
        [alloc(name, each.nbytes)] if not (packed or _is_time_major(each, batch_first)) else []
        for name, each in (("dense input", layout), ("dense gradient", read_layout(args[7])))
    )
    copies = [*copy, *of_gradient]
    events = [*copies, *states, workspace, *free(workspace.name, *(each.name for each in reversed(copies)))]
    if args[-1][3]:
        # Without biases the gradients are copies out of one buffer, in which cuDNN has room for biases.
        copied = per_layer in (2, 3)
        buffer = alloc("gradients of the weights", read_layout(flat).nbytes) if copied else output("gradients")
        events += [*copy, buffer, workspace, *free(workspace.name, *(each.name for each in copy))]
        events += [output("gradient") for _ in weights] if copied else []
    return events


def _is_time_major(layout: TensorLayout, batch_first: bool) -> bool:
    """Whether a sequence lies in memory as (steps, batch, features)."""
    order = (1, 0, 2) if batch_first else (0, 1, 2)
    shape, strides = ([sizes[dim] for dim in order] for sizes in (layout.shape, layout.stride))
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, (shape[1] * shape[2], shape[2], 1), strict=True))


def _rnn_algorithm(layer: RnnSignature, target: Target, *, backward: bool) -> int:
    """`get_algo` (RNN.cpp): `cudnnRNNAlgo_t`."""
    gated = layer.mode in (_LSTM, _GRU)
    small = (128 if gated else 256) if backward else (192 if gated else 384)
    if layer.proj_size or layer.dtype == "float64":
        return _STANDARD
    if layer.hidden_size <= small:
        return _PERSISTENT_SMALL
    fits = layer.num_layers == 1 and not layer.bidirectional and layer.hidden_size <= 1024
    even = layer.hidden_size % 128 == layer.input_size % 128 == 0 and layer.batch_sizes is None
    return _PERSISTENT if layer.dtype == "float16" and fits and even and _persists(layer, target) else _STANDARD


def _persists(layer: RnnSignature, target: Target) -> bool:
    """`use_persist_device_heuristics` (RNN.cpp)."""
    (major, minor), batch = target.capability or (0, 0), layer.batch
    if major == 7:
        even = (batch % 16 == 0 and batch not in (80, 112)) or batch == 8
        long = any(layer.steps >= steps and batch <= most for steps, most in ((40, 128), (20, 96), (10, 32)))
        return minor != 5 and even and long
    if major < 8 or minor == 6 or device_properties(target).multi_processor_count < 98 or layer.mode == _GRU:
        return False
    wide = layer.mode != _LSTM and batch >= 96 and layer.hidden_size >= 896
    return batch % 8 == 0 and batch <= 128 and not wide


def _rnn_flops(c: NamedCall, weights: Sequence[TensorLayout]) -> int:
    """Per step: the products, the biases, the sum of a gate's two products, and the cell."""
    gates, pointwise, _ = _CELLS[c.mode]
    products, biases = _products_and_biases(weights)
    return _steps(c) * (products + biases + _hidden_elements(c, weights) * (gates + pointwise))


def _rnn_backward_flops(c: NamedCall, weights: Sequence[TensorLayout], weights_too: bool = True) -> int:
    """Every product once for its input and once for its weight, every bias summed."""
    _, _, pointwise = _CELLS[c.mode]
    products, biases = _products_and_biases(weights)
    return _steps(c) * (products + (products + biases) * weights_too + _hidden_elements(c, weights) * pointwise)


def _cell_flops(c: NamedCall, mode: int) -> int:
    """A cell by itself takes the gates' two products and sums them with the biases."""
    gates, pointwise, _ = _CELLS[mode]
    n: int = c.input_gates.numel
    return n * (1 + len(layouts_among((c.input_bias, c.hidden_bias)))) + n // gates * pointwise


def _products_and_biases(weights: Sequence[TensorLayout]) -> tuple[int, int]:
    return 2 * sum(w.numel for w in weights if w.rank == 2), sum(w.numel for w in weights if w.rank == 1)


def _steps(c: NamedCall) -> int:
    """Time steps times batch, packed sequences included."""
    return prod(c.input.shape[:-1])


def _hidden_elements(c: NamedCall, weights: Sequence[TensorLayout]) -> int:
    """Hidden elements of all layers and directions: each has two matrices with a row per gate and element (a projection
    has fewer)."""
    rows: int = _CELLS[c.mode][0] * c.hidden_size
    return sum(w.rank == 2 and w.shape[0] == rows for w in weights) // 2 * (rows // _CELLS[c.mode][0])


def _mkldnn_weights(c: NamedCall) -> list[TensorLayout]:
    """Two matrices and two biases. They are numbered from 0 in the forward op and from 1 in the backward one."""
    weights = layouts_among([getattr(c, f"weight{i}", None) for i in range(5)])
    return weights if c.has_biases else weights[:2]


ROWS = {
    "cudnn/RNN.cpp": {
        "_cudnn_rnn": Operator(
            lambda c: _rnn_flops(c, c.weight),
            kind="recurrent layer",
            cuda=_memory,
            order=(0, 1, 2, 4, 3),  # the weights' buffer before the reserve
        ),
        "_cudnn_rnn_backward": Operator(lambda c: _rnn_backward_flops(c, c.weight, c.output_mask[3]), cuda=_memory),
    },
    "mkldnn/RNN.cpp": {
        "mkldnn_rnn_layer": Operator(lambda c: _rnn_flops(c, _mkldnn_weights(c)), kind="recurrent layer"),
        "mkldnn_rnn_layer_backward": Operator(lambda c: _rnn_backward_flops(c, _mkldnn_weights(c))),
    },
    "cuda/RNN.cu": {
        "_thnn_fused_lstm_cell": Operator(lambda c: _cell_flops(c, _LSTM)),
        "_thnn_fused_gru_cell": Operator(lambda c: _cell_flops(c, _GRU)),
        "_thnn_fused_lstm_cell_backward_impl": Operator(lambda c: (23 + 4 * c.has_bias) * c.cx.numel),
        "_thnn_fused_gru_cell_backward": Operator(lambda c: (16 + 6 * c.has_bias) * c.read),
    },
}
