"""`nn.LSTM`, `nn.GRU` and `nn.RNN` on a card that is not there: forward and backward through cuDNN's operators, on
FakeTensors.

torch refuses these on a machine with no GPU, because it asks cuDNN for buffer sizes in the midst of the call. What
happens on a card (aten/src/ATen/native/cudnn/RNN.cpp, `_cudnn_impl`, `_cudnn_rnn`, `_cudnn_rnn_backward`):

- `Module.to("cuda")` ends in `flatten_parameters()`: all weights of one module become views of ONE buffer
  (`flatten_rnn_weights`).
- Forward keeps, for backward, a *reserve* buffer whose size cuDNN decides; it is there in training mode even under
  `no_grad`.
- Backward returns the weights' gradients as views of one buffer, too. A module without biases gets copies instead,
  because cuDNN always has room for biases.
- Under autocast the weights are cast and flattened anew on every call, to float16 whatever autocast's dtype
  (aten/src/ATen/cudnn/AutocastRNN.cpp).

Sizes. `weight_elements` and `reserve_bytes` are what `cudnnGetRNNWeightSpaceSize` and `cudnnGetRNNTempSpaceSizes` of
cuDNN 9.19 answer: equal on 3,600 random shapes over the four cell types, float32, float16 and bfloat16, one and two
directions, with and without projection and dropout; the answers are the same for compute capabilities 7.0 to 12.0 and
for every algorithm torch picks.

cuDNN's workspace is asked for as convolutions' are (`fxmem.hardware.cudnn_worker`): an LSTM and a GRU take on an H100,
in float32 and bfloat16, what it answers.

A packed sequence has as many steps as rows: what its reserve takes follows from their number (equal to cuDNN's answers
for the layout SEQ_MAJOR_PACKED). Its batch sizes are the host's, and known where the lengths were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fxmem._torch import common as torch_common
from fxmem._torch import kernels as torch_kernels
from fxmem.errors import AnalysisError
from fxmem.simulation.asked import known_values
from fxmem.simulation.kernels.fake_kernels import answers

_MODES: Final = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""`cudnnRNNMode_t` of each torch function."""
_GATES: Final = (1, 1, 4, 3)
"""Matrices per layer and direction, for input and hidden state each, by mode."""
_RESERVED: Final = ((1,), (1,), (4, 1), (6,))
"""Tensors of (sequence, batch, hidden) kept per layer and direction, in the groups cuDNN aligns, by mode: for the LSTM
its four gates, then its cell."""
_LSTM: Final = 2


def _align(nbytes: int) -> int:
    return -(-nbytes // 32) * 32


@dataclass(frozen=True)
class Recurrence:
    """The shape of one recurrent module, in cuDNN's terms."""

    mode: int
    input_size: int
    hidden_size: int
    proj_size: int
    """0 for none."""
    num_layers: int
    directions: int

    @property
    def output_size(self) -> int:
        """Features that one direction hands on."""
        return self.proj_size or self.hidden_size

    @property
    def weight_elements(self) -> int:
        """Elements of the flat weight buffer; cuDNN has two biases per gate whether or not the module has any."""
        gates = _GATES[self.mode]
        total = 0
        for layer in range(self.num_layers):
            features = self.output_size * self.directions if layer else self.input_size
            total += gates * self.hidden_size * (features + self.output_size + 2) + self.proj_size * self.hidden_size
        return total * self.directions

    def reserve_bytes(self, rows: int, itemsize: int, dropout: float) -> int:
        """Bytes that forward keeps for backward of so many rows, the steps of each sequence.

        Per layer and direction the gates' results (and an LSTM's cell states, and with a projection the state before
        and after it), between layers what one hands to the next, and one bit per element of each dropout mask.
        """
        states = rows * itemsize
        groups = [count * self.hidden_size for count in _RESERVED[self.mode]]
        groups += [self.hidden_size, self.proj_size] if self.proj_size else []
        kept = sum(_align(self.num_layers * self.directions * states * features) for features in groups)
        between = _align((self.num_layers - 1) * self.directions * states * self.hidden_size)
        mask = _align(-(-self.directions * rows * self.output_size // 8)) if dropout > 0 else 0
        return 256 + kept + between + (self.num_layers - 1) * self.directions * mask


# --- weights ----------------------------------------------------------------------------------------------------------


def flatten_rnn_weights(model: torch.nn.Module) -> None:
    """Give each RNN in `model` one flat weight buffer, as `Module.to("cuda")` does: its weights become views of it and
    stay the same objects.

    Left alone, as by `RNNBase.flatten_parameters`: weights of several dtypes, of a dtype cuDNN does not take, or shared
    among each other. Call it on a fake model, before anything looks at its storages.
    """
    for module in model.modules():
        weights = torch_kernels.rnn_weights(module)
        if not weights or not isinstance(module, torch.nn.RNNBase) or not all(weight.is_cuda for weight in weights):
            continue
        if len({weight.dtype for weight in weights}) > 1 or len({id(weight) for weight in weights}) < len(weights):
            continue
        if not torch.backends.cudnn.is_acceptable(weights[0]):  # type: ignore[no-untyped-call]
            continue
        sizes = module.input_size, module.hidden_size, module.proj_size, module.num_layers
        shape = Recurrence(_MODES[module.mode.lower()], *sizes, 1 + module.bidirectional)
        with torch.no_grad():
            flat = weights[0].new_empty(shape.weight_elements)
            for weight, view in zip(weights, _views(flat, weights), strict=True):
                weight.data = view


def _views(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Where the weights lie in a flat buffer. cuDNN has an order of its own; for memory any will do."""
    offsets = itertools.accumulate((weight.numel() for weight in weights), initial=0)
    strides = [torch_common.contiguous_strides(weight.shape) for weight in weights]
    return [
        flat.as_strided(weight.shape, stride, offset)
        for weight, stride, offset in zip(weights, strides, offsets, strict=False)
    ]


def _flat_buffer(weights: Sequence[Tensor], elements: int) -> Tensor | None:
    """`try_get_weight_buf`: the one storage that holds all weights; None when they do not lie in one."""
    nbytes = elements * weights[0].element_size()
    is_one = len({torch_common.storage_key(weight) for weight in weights}) == 1
    if not is_one or weights[0].untyped_storage().nbytes() < nbytes:
        return None
    with torch.no_grad():
        return weights[0].detach().as_strided((elements,), (1,), 0)


# --- the call ---------------------------------------------------------------------------------------------------------


def run_rnn(name: str, capability: tuple[int, int], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """What `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` (`name`) returns for fakes on a CUDA card of `capability`.

    Arguments are torch's: `(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)`, or
    `(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional)` of a packed sequence.

    Raises:
        AnalysisError: for a packed sequence whose lengths are not known.
    """
    builtin = torch_kernels.RNN_FUNCTIONS[name]
    is_packed = isinstance(args[3], tuple | list)
    batch_sizes = known_values.find_value(args[1]) if is_packed else None
    if is_packed and batch_sizes is None:
        raise AnalysisError(
            f"expected padded input to {name}; got a packed sequence, whose batch sizes are known only from the data. "
            "Analyse with padded input (batch_first or not), which is an upper bound."
        )
    input = args[0]
    if not _uses_cudnn(input, capability):
        with torch.backends.cudnn.flags(enabled=False):
            return tuple(builtin(*args, **kwargs))
    if batch_sizes is not None:
        with torch_common.no_modes():
            args, kwargs = (input, *args[2:], False), {**kwargs, "batch_sizes": tuple(batch_sizes.tolist())}
    return _cudnn_rnn(_MODES[name], *args, **kwargs)


def _uses_cudnn(input: Tensor, capability: tuple[int, int]) -> bool:
    """`use_cudnn` in aten/src/ATen/native/RNN.cpp."""
    dtypes = [torch.float64, torch.float32, torch.float16] + ([torch.bfloat16] if capability >= (8, 0) else [])
    return torch.backends.cudnn.enabled and input.dtype in dtypes and input.numel() > 0


def _cudnn_rnn(  # noqa: PLR0913 - torch's own signature
    mode: int,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: tuple[int, ...] = (),
) -> tuple[Tensor, ...]:
    """`_cudnn_impl`, with the autocast wrapper of `_cudnn_rnn` in between."""
    hidden, cell = (hx[0], hx[1]) if mode == _LSTM else (hx, None)
    assert isinstance(hidden, Tensor)
    hidden_size, proj_size = hidden.shape[2], 0
    if cell is not None and cell.shape[2] != hidden_size:
        hidden_size, proj_size = cell.shape[2], hidden_size
    shape = Recurrence(mode, input.shape[-1], hidden_size, proj_size, num_layers, 1 + bidirectional)
    weights = list(params)
    flat = _flat_buffer(weights, shape.weight_elements)
    if torch.is_autocast_enabled("cuda"):
        input, hidden, cell = _half(input), _half(hidden), None if cell is None else _half(cell)
        if weights[0].dtype not in (torch.float16, torch.float64):
            flat, weights = _half_weights(weights, shape)
    call = _Call(shape, (4 if has_biases else 2) + (proj_size > 0), batch_first, float(dropout), train, batch_sizes)
    with torch_kernels.without_autocast():
        run: Any = CudnnRnn.apply
        output, hidden, cell = run(call, flat, input, hidden, cell, *weights)
    return (output, hidden, cell) if mode == _LSTM else (output, hidden)


def _half(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.to(torch.float16)


def _half_weights(weights: Sequence[Tensor], shape: Recurrence) -> tuple[Tensor, list[Tensor]]:
    """`_cudnn_rnn_cast_reflatten`: a new flat float16 buffer, and views of it that the weights are copied into with
    autograd."""
    flat = torch.zeros(shape.weight_elements, dtype=torch.float16, device=weights[0].device)
    with torch.no_grad():
        halves = [
            torch.empty(0, dtype=flat.dtype, device=flat.device).set_(view)  # type: ignore[call-overload]
            for view in _views(flat, weights)
        ]
    return flat, [half.copy_(weight) for half, weight in zip(halves, weights, strict=True)]


@dataclass(frozen=True)
class _Call:
    shape: Recurrence
    weights_per_layer: int
    batch_first: bool
    dropout: float
    train: bool
    batch_sizes: tuple[int, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The tail that `_cudnn_rnn` and `_cudnn_rnn_backward` share: mode ... batch_sizes, dropout_state."""
        shape = self.shape
        return (
            *(shape.mode, shape.hidden_size, shape.proj_size, shape.num_layers),
            *(self.batch_first, self.dropout, self.train, shape.directions == 2, list(self.batch_sizes), None),
        )


class CudnnRnn(torch.autograd.Function):
    """`_cudnn_rnn` and its autograd node `CudnnRnnBackward0` in Python: torch's own node, called by hand, would copy
    the reserve as if it were run twice."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, flat: Tensor | None, input: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """`_cudnn_rnn`."""
        # The contiguous (sequence, batch, features) copy that cuDNN reads; the tensor itself where it is one.
        packed = (input.transpose(0, 1) if call.batch_first else input).contiguous()
        output, hy, cy, reserve, buffer = torch.ops.aten._cudnn_rnn.default(
            input, list(weights), call.weights_per_layer, flat, hx, cx, *call.arguments
        )
        del packed
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, hx, cx, output, reserve, buffer, *weights)
        return output, hy, cy

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """`_cudnn_rnn_backward`."""
        call = ctx.call
        if not call.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        input, hx, cx, output, reserve, buffer, *weights = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output, memory_format=torch.contiguous_format)
        grad_hy = torch.zeros_like(hx) if grad_hy is None else grad_hy
        if cx is None:
            grad_cy = None
        elif grad_cy is None:
            grad_cy = torch.zeros_like(cx)
        wanted = [ctx.needs_input_grad[i] for i in (2, 3, 4)] + [any(ctx.needs_input_grad[5:])]
        grads = torch.ops.aten._cudnn_rnn_backward.default(
            *(input, weights, call.weights_per_layer, buffer, hx, cx, output, grad_output, grad_hy, grad_cy),
            *(*call.arguments, reserve, wanted),
        )
        grad_input, grad_hx, grad_cx, grad_weights = grads
        return None, None, grad_input, grad_hx, grad_cx, *(grad_weights or [None] * len(weights))


# --- what the operators return ----------------------------------------------------------------------------------------


@answers("_cudnn_rnn_flatten_weight")
def _fake_flatten_weight(_: Any, weights: Sequence[Tensor], *rest: Any) -> Tensor:
    """Result of `_cudnn_rnn_flatten_weight`, for programs that call `flatten_parameters()` themselves: a new buffer
    each time."""
    _stride, input_size, mode, hidden_size, proj_size, num_layers, _batch_first, bidirectional = rest
    shape = Recurrence(mode, input_size, hidden_size, proj_size, num_layers, 1 + bidirectional)
    flat = weights[0].new_empty(shape.weight_elements)
    for weight, view in zip(weights, _views(flat, weights), strict=True):
        weight.set_(view)  # type: ignore[call-overload]
    return flat


@answers("_cudnn_rnn")
def _fake_cudnn_rnn(_: Any, input: Tensor, *rest: Any) -> Any:
    """Results of `_cudnn_rnn`, with cuDNN's reserve and the memory layout it writes; torch's meta kernel has an empty
    one and neither."""
    _weight, _stride, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, *rest_of_call = rest
    batch_first, dropout, train, bidirectional, batch_sizes, *_ = rest_of_call
    shape = Recurrence(mode, input.shape[-1], hidden_size, proj_size, num_layers, 1 + bidirectional)
    rows = (input.shape[1], input.shape[0]) if batch_first else input.shape[:-1]
    batch = batch_sizes[0] if batch_sizes else rows[1]
    layers = num_layers * shape.directions
    output = input.new_empty((*rows, shape.output_size * shape.directions))
    hy = hx.new_empty((layers, batch, shape.output_size))
    cy = hx.new_empty(0) if cx is None else cx.new_empty((layers, batch, hidden_size))
    buffer = input.new_empty(shape.weight_elements) if weight_buf is None else weight_buf
    nbytes = shape.reserve_bytes(math.prod(rows), input.element_size(), dropout) if train else 0
    reserve = input.new_empty(nbytes, dtype=torch.uint8)
    return output.transpose(0, 1) if batch_first else output, hy, cy, reserve, buffer


@answers("_cudnn_rnn_backward")
def _fake_cudnn_rnn_backward(_: Any, input: Tensor, weight: Sequence[Tensor], *rest: Any) -> Any:
    """Results of `_cudnn_rnn_backward`, for which torch has no meta kernel."""
    weight_stride0, weight_buf, hx, cx, batch_first, output_mask = *rest[:4], rest[12], rest[-1]
    grad_input = input.new_empty((input.transpose(0, 1) if batch_first else input).shape)
    grad_input = grad_input.transpose(0, 1) if batch_first else grad_input
    grad_hx = hx.new_empty(hx.shape)
    grad_cx = None if cx is None else cx.new_empty(cx.shape)
    if not output_mask[3]:
        return grad_input, grad_hx, grad_cx, []
    if weight_stride0 in (2, 3):
        return grad_input, grad_hx, grad_cx, [w.new_empty(w.shape) for w in weight]
    return grad_input, grad_hx, grad_cx, _views(weight_buf.new_empty(weight_buf.shape), weight)
