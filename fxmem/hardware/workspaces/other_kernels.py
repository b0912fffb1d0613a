"""Scratch memory of other CUDA kernels, read in ATen's source.

Only ops whose scratch follows from the shapes are here; each entry names its source, and nothing here was measured.
Temporary storage of CUB (sorting, scanning) is a few bytes per index, decided inside CUB: where it is not at the peak
it is left out, where it would be the peak it is a buffer of unknown size. Arguments are taken to be contiguous, as
torch makes them; `copies.py` has what is copied where they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.hidden_memory import HiddenMemory, RnnSignature, alloc, free, output
from fxmem.hardware.tensor_layouts import ITEM_BYTES, read_layout
from fxmem.records.profile import Target

Shape = tuple[int, ...]
_Rule = Callable[[Sequence[Shape], Sequence[str], Target], HiddenMemory]
Described = tuple[list[Shape], list[str]]
"""Shapes and dtypes of the tensors that a rule looks at."""


@dataclass(frozen=True)
class Kernel:
    """An operator whose kernel allocates something unseen."""

    rule: _Rule
    describe: Callable[[Sequence[Any], Any, bool], Described | None] | None = None
    """From arguments, result, and whether only deterministic kernels may run; None: the kernel that allocates does not
    run. Without this function: every argument that is a tensor."""
    reads_result: bool = False
    """Whether `describe` looks at the result."""


NO_SCRATCH = frozenset({
    "_softmax", "_log_softmax", "_log_softmax_backward_data",  # SoftMax.cu
    "nll_loss_forward", "nll_loss_backward",  # NLLLoss2d.cu, Loss.cu
    "native_layer_norm",  # layer_norm_kernel.cu
    "native_dropout", "native_dropout_backward",  # Dropout.cu
    # DilatedMaxPool2d.cu, AveragePool2d.cu
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    # Activation*.cu: one elementwise kernel
    "gelu", "gelu_backward", "silu", "silu_backward", "threshold_backward", "relu",
    "add", "sub", "mul", "div", "copy_", "fill_", "zero_",  # elementwise; other dtypes are converted inside the kernel
})  # fmt: skip
"""Ops whose CUDA implementation allocates nothing but its results (their calls were listed from the 2.11 binary)."""


def kernel_memory(op: str, shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory | None:
    """The hidden buffers of an ATen op on a CUDA target, in order.

    Args:
        op: the op's name, e.g. `aten.embedding_dense_backward.default`.
        shapes: of its tensor arguments in order; for `embedding_dense_backward` the shape of the result follows them;
            for `sort` those of one row and of the tensor; for the forms of `index_put` those of the indices, where it
            accumulates.
        dtypes: of the same, torch's names.
        target: for kernels that look at the number of multiprocessors.

    Returns:
        None for an op that is not in the table: nothing is known of its scratch.
    """
    name = op.removeprefix("aten.").removeprefix("aten::").split(".")[0]
    if name in NO_SCRATCH:
        return HiddenMemory(events=(output("result"),), source="aten/src/ATen/native/cuda")
    kernel = KERNELS.get(name)
    return None if kernel is None else kernel.rule(shapes, dtypes, target)


def call_memory(
    name: str, args: Sequence[Any], result: Any, target: Target, deterministic: bool
) -> HiddenMemory | None:
    """The hidden buffers of one call, in order; None where nothing is known or nothing is allocated.

    Args:
        name: of the operator, without `aten.` and overload.
        args: its positional arguments.
        result: what it returned.
        target: a CUDA target.
        deterministic: only deterministic kernels may run.
    """
    kernel = KERNELS.get(name)
    describe = _describe_tensors if kernel is None or kernel.describe is None else kernel.describe
    described = describe(args, result, deterministic)
    return None if described is None else kernel_memory(name, *described, target)


def kernel_scratch(op: str, shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> int | None:
    """Most bytes the op has allocated at once beside its results; None for an op that is not in the table."""
    memory = kernel_memory(op, shapes, dtypes, target)
    return None if memory is None else memory.peak_bytes()


def _embedding_dense_backward(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`embedding_dense_backward_cuda`, `embedding_backward_cuda_kernel` (Embedding.cu, EmbeddingBackwardKernel.cu).

    Indices are sorted; rows of the same index are summed in parts of 10, in float, before they are scattered. Up to
    3072 indices are scattered directly. `scale_grad_by_freq` is taken to be off.
    """
    (_, indices, weight), index_bytes = shapes, ITEM_BYTES[dtypes[1]]
    source = "aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu"
    count = prod(indices)
    if count <= 3072:
        return HiddenMemory(events=(output("grad_weight"),), source=source)
    segments = min(count, weight[0])
    parts = count // 10 + segments
    partial = parts * weight[1] * (8 if dtypes[0] == "float64" else 4)
    return HiddenMemory(
        events=(
            alloc("sorted indices", count * index_bytes),
            alloc("original positions", count * index_bytes),
            alloc("range", count * index_bytes),
            *free("range"),
            output("grad_weight"),
            alloc("segment offsets", count * index_bytes),
            alloc("number of segments", 8),
            alloc("parts per segment", segments * index_bytes),
            alloc("offsets of the parts per segment", segments * index_bytes),
            alloc("number of parts", 8),
            alloc("part offsets", parts * index_bytes),
            alloc("partial sums", partial),
        ),
        source=source,
    )


def _layer_norm_backward(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu): partial sums by row block when there are many short
    rows.

    Arguments: grad_out, input, mean, rstd, weight, bias. Constants checked in the 2.11 binary. The sums over the blocks
    replace grad_weight and grad_bias, which were allocated before.
    """
    weight = shapes[4] if len(shapes) > 4 else None
    return _norm_backward(shapes[1], weight, dtypes[1], ("grad_weight", "grad_bias"), target)


def _rms_norm_backward(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """As layer norm's, without the bias. Arguments: grad_out, input, rstd, weight."""
    weight = shapes[3] if len(shapes) > 3 else None
    return _norm_backward(shapes[1], weight, dtypes[1], ("grad_weight",), target)


def _norm_backward(
    shape: Shape, weight: Shape | None, dtype: str, names: Sequence[str], target: Target
) -> HiddenMemory:
    source = "aten/src/ATen/native/cuda/layer_norm_kernel.cu"
    if weight is None:
        return HiddenMemory(events=(output("grad_input"),), source=source)
    grads = (output("grad_input"), *(output(name) for name in names))
    columns = weight[-1]
    rows = prod(shape) // columns
    if not (rows > 64 * 1024 and columns // 32 < device_properties(target).multi_processor_count // 2):
        return HiddenMemory(events=grads, source=source)
    blocks = min((64 * 1024 // 2) // -(-columns // 32), -(-rows // 32))
    nbytes = columns * ITEM_BYTES[dtype]
    partial = (alloc(f"partial {name}", blocks * nbytes) for name in names)
    return HiddenMemory(events=(*grads, *partial, *(alloc(f"summed {name}", nbytes) for name in names)), source=source)


def _softmax_backward(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`softmax_backward_cuda_out` (SoftMax.cu): the kernel wants the product of gradient and output, which is as large
    as either (2.11 binary)."""
    item = max(ITEM_BYTES[dtype] for dtype in dtypes[:2])
    events = (output("grad_input"), alloc("grad_output * output", prod(shapes[0]) * item))
    return HiddenMemory(events=events, source="aten/src/ATen/native/cuda/SoftMax.cu")


def _sort(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`sort_cuda_kernel` (Sort.cpp, Sort.h) and `do_launch_stable_sort_kernel` (SortStable.cu).

    Arguments: one row, then the whole tensor (a single row without it). Rows of up to 4096 are sorted in place in the
    results; the positions come from a range. CUB sorts longer ones and keeps values and positions a second time; from
    128 rows on all rows have their positions, and CUB's own 512 bytes beside them are what published runs left over.
    Fewer rows are sorted as one, with the number of the row beside each position, where what CUB takes is unknown.
    """
    length, total, item = prod(shapes[0]), prod(shapes[-1]), ITEM_BYTES[dtypes[-1]]
    results = (output("values"), output("indices"))
    if length <= 4096:
        events, source = (alloc("range", length * 8), *free("range")), "Sort.cpp"
    else:
        rows, source = total // length, "SortStable.cu"
        if rows == 1 or length >= 1_000_000:
            events = (alloc("positions", length * 8), alloc("CUB's buffers", None))
        elif rows < 128:
            events = (
                alloc("rows and positions", total * 8),
                alloc("rows and positions, sorted", total * 8),
                alloc("CUB's buffers", None),
            )
        else:
            events = (alloc("positions", total * 8), alloc("CUB's values and positions", total * (8 + item) + 512))
    return HiddenMemory(events=(*results, *events), source=f"aten/src/ATen/native/cuda/{source}")


def _group_norm(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`GroupNormKernelImplInternal` (group_norm_kernel.cu): a factor and a summand for each channel of each image.

    Arguments: `(N, C, HxW)`, `(N, G)`, then weight and bias as far as there are any.
    """
    count, channels, positions = shapes[0]
    nbytes = count * channels * _accumulator_bytes(dtypes[0])
    fused = len(shapes) > 2 and positions > 1
    factors = (alloc("factors", nbytes), alloc("summands", nbytes)) if fused else ()
    return HiddenMemory(events=(output("result"), output("mean"), output("rstd"), *factors), source=_GROUP_NORM)


def _group_norm_backward(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu): two sums for each channel of each image, then a
    factor for each of them and two for each group.

    Arguments: `(N, C, HxW)`, `(N, G)` (empty if the input's gradient is not wanted), the weight if there is one.
    Measured steps of a B200 have exactly these bytes more than their tensors (Liger-Kernel's published benchmarks).
    """
    (count, channels, positions), groups, *weight = shapes
    nbytes, of_groups = count * channels * _accumulator_bytes(dtypes[0]), prod(groups) * _accumulator_bytes(dtypes[0])
    sums = (alloc("sums of gradient * input", nbytes), alloc("sums of gradient", nbytes)) if positions > 1 else ()
    factors = (alloc("factors of the gradient", nbytes),) if weight and positions > 1 else ()
    by_group = (alloc("factors of the input", of_groups), alloc("summands", of_groups))
    return HiddenMemory(
        events=(output("grad_input"), output("grad_weight"), output("grad_bias"), *sums, *by_group, *factors),
        source=_GROUP_NORM,
    )


_GROUP_NORM = "aten/src/ATen/native/cuda/group_norm_kernel.cu"


def _accumulator_bytes(dtype: str) -> int:
    """Bytes of a number in the type that a kernel accumulates in (`acc_type`)."""
    return max(4, ITEM_BYTES[dtype])


def _index_put(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`index_put_with_sort_kernel` (Indexing.cu), the one that accumulates: what is put at one place is found by
    sorting.

    Arguments: the indices. They become one linear index, which is sorted with the positions it came from; values are
    taken to be dense and not to be broadcast.
    """
    nbytes = max(prod(shape) for shape in shapes) * 8
    events = (
        alloc("index within bounds", nbytes),
        alloc("linear index", nbytes),
        *free("index within bounds"),
        alloc("sorted indices", nbytes),
        alloc("original positions", nbytes),
        alloc("range", nbytes),
    )
    return HiddenMemory(events=events, source="aten/src/ATen/native/cuda/Indexing.cu")


def _topk(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`should_use_multiblock` (TensorTopK.cu): slices shorter than 400 are searched by one block each, in shared
    memory."""
    several = len(shapes[0]) < 2 or shapes[0][-1] >= 400
    buffers = (alloc("buffers of several blocks for a slice", None),) if several else ()
    return HiddenMemory(
        events=(output("values"), output("indices"), *buffers), source="aten/src/ATen/native/cuda/TensorTopK.cu"
    )


def _foreach_norm(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`foreach_tensor_norm_cuda` (ForeachReduceOp.cu): for each tensor, as many partial norms as the largest has chunks
    of 65,536 elements."""
    chunks = max((-(-prod(shape) // 65536) for shape in shapes), default=0)
    item = 8 if "float64" in dtypes else 4
    events = (alloc("partial norms", len(shapes) * chunks * item), *(output("norm") for _ in shapes))
    return HiddenMemory(events=events, source="aten/src/ATen/native/cuda/ForeachReduceOp.cu")


def _safe_softmax(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`_safe_softmax` (SoftMax.cpp) of the last dimension: which scores are -inf, one byte each, to find the rows that
    are nothing else, and the zero that goes there."""
    scores, rows = prod(shapes[0]), prod(shapes[0][:-1])
    buffers = {"scores that are -inf": scores, "rows of -inf": rows, "zero": ITEM_BYTES[dtypes[0]]}
    return HiddenMemory(
        events=(output("result"), *(alloc(name, nbytes) for name, nbytes in buffers.items())),
        source="aten/src/ATen/native/SoftMax.cpp",
    )


def _ctc_loss_backward(shapes: Sequence[Shape], dtypes: Sequence[str], target: Target) -> HiddenMemory:
    """`ctc_loss_backward_gpu_template` (LossCTC.cu): log_beta, of log_alpha's size, lives beside the gradient."""
    log_alpha, dtype = shapes[-1], dtypes[-1]
    return HiddenMemory(
        events=(alloc("log_beta", prod(log_alpha) * ITEM_BYTES[dtype]), output("grad")),
        source="aten/src/ATen/native/cuda/LossCTC.cu",
    )


RECURRENT = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward"})
_STANDARD, _PERSISTENT, _PERSISTENT_SMALL = 0, 1, 3
_LSTM, _GRU = 2, 3


def recurrent_memory(short: str, args: Sequence[Any], target: Target, *, allow_tf32: bool) -> HiddenMemory:
    """The workspaces of cuDNN's recurrent layers (`_cudnn_rnn`, `_cudnn_rnn_backward` in RNN.cpp): forward's comes
    before the reserve; backward has one for the gradients of its inputs, then one for those of the weights."""
    backward = short.endswith("_backward")
    source, weights, per_layer, flat, hx, cx = args[:6]
    mode, hidden, proj, layers, batch_first, dropout, training, bidirectional = args[10 if backward else 6 :][:8]
    layout = read_layout(source)
    steps, batch = layout.shape[1::-1] if batch_first else layout.shape[:2]
    signature = RnnSignature(
        algorithm=0,
        mode=mode,
        dtype=cast(Any, layout.dtype),
        input_size=layout.shape[-1],
        hidden_size=hidden,
        proj_size=proj,
        num_layers=layers,
        bidirectional=bidirectional,
        steps=steps,
        batch=batch,
        dropout=dropout if training else 0.0,
        training=training,
        allow_tf32=allow_tf32,
    )
    signature = signature.model_copy(update={"algorithm": _rnn_algorithm(signature, target, backward=backward)})
    workspace = alloc("cuDNN RNN workspace", None, signature)
    states = [output("input or its gradient"), *(output("state") for state in (hx, cx) if state is not None)]
    if not backward:
        buffer = [output("weights")] if flat is None else []
        events = [*states, *buffer, workspace, output("reserve")]
        return HiddenMemory(events=tuple(events), source=_RNN)
    # Each of backward's two parts copies an input that is not dense as (steps, batch, features).
    features = layout.shape[-1]
    wanted = (features, batch * features) if batch_first else (batch * features, features)
    is_dense = all(n == 1 or a == b for n, a, b in zip(layout.shape, layout.stride, wanted, strict=False))
    copy = [] if is_dense else [alloc("dense input", prod(layout.shape) * ITEM_BYTES[layout.dtype])]
    events = [*copy, *states, workspace, *free(workspace.name, *(event.name for event in copy))]
    if args[-1][3]:
        # Without biases the gradients are copies out of one buffer, in which cuDNN has room for biases.
        shape = read_layout(flat)
        copied = per_layer in (2, 3)
        buffer = [alloc("gradients of the weights", prod(shape.shape) * ITEM_BYTES[shape.dtype])] if copied else []
        events += [*copy, *buffer, *([] if copied else [output("gradients")]), workspace, *free(workspace.name)]
        events += [output("gradient") for _ in weights] if copied else []
    return HiddenMemory(events=tuple(events), source=_RNN)


_RNN = "aten/src/ATen/native/cudnn/RNN.cpp"


def _rnn_algorithm(layer: RnnSignature, target: Target, *, backward: bool) -> int:
    """`get_algo` (RNN.cpp): `cudnnRNNAlgo_t`."""
    gated = layer.mode in (_LSTM, _GRU)
    small = (128 if gated else 256) if backward else (192 if gated else 384)
    if layer.proj_size or layer.dtype == "float64":
        return _STANDARD
    if layer.hidden_size <= small:
        return _PERSISTENT_SMALL
    fits = layer.num_layers == 1 and not layer.bidirectional and layer.hidden_size <= 1024
    even = layer.hidden_size % 128 == layer.input_size % 128 == 0
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


def _describe(tensors: Sequence[Any]) -> Described:
    layouts = [read_layout(tensor) for tensor in tensors]
    return [layout.shape for layout in layouts], [layout.dtype for layout in layouts]


def is_tensor(value: Any) -> bool:
    """Whether a value has what a tensor's layout is read from."""
    return hasattr(value, "stride") and hasattr(value, "dtype")


def _describe_tensors(args: Sequence[Any], result: Any, deterministic: bool) -> Described:
    return _describe([value for value in args if is_tensor(value)])


def _describe_row(args: Sequence[Any], result: Any, deterministic: bool) -> Described:
    # The overload with `stable` has its dimension by keyword, which is not seen here; nearly everybody sorts along the
    # last.
    row = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
    (shape,), dtypes = _describe(args[:1])
    return [shape[row:][:1], shape], dtypes * 2


def _describe_group_norm(args: Sequence[Any], result: Any, deterministic: bool) -> Described:
    source, weight, bias, count, channels, positions, groups = args[:7]
    layout = read_layout(source)
    affine = [(channels,) for parameter in (weight, bias) if parameter is not None]
    return [(count, channels, positions), (count, groups), *affine], [layout.dtype]


def _describe_group_norm_backward(args: Sequence[Any], result: Any, deterministic: bool) -> Described:
    source, weight, (count, channels, positions, groups, mask) = args[1], args[4], args[5:10]
    of_input: list[Shape] = [(count, groups), *([] if weight is None else [(channels,)])] if mask[0] else [(0,)]
    return [(count, channels, positions), *of_input], [read_layout(source).dtype]


def _describe_indices(args: Sequence[Any], result: Any, deterministic: bool) -> Described | None:
    if not (deterministic or (len(args) > 3 and args[3])):
        return None  # the one that does not accumulate sorts nothing
    return _describe([index for index in args[1] if index is not None])


_PUT = Kernel(_index_put, _describe_indices)
KERNELS: dict[str, Kernel] = {
    "_ctc_loss_backward": Kernel(_ctc_loss_backward),
    "_safe_softmax": Kernel(_safe_softmax),
    "embedding_dense_backward": Kernel(
        _embedding_dense_backward,
        lambda args, result, _: _describe([*filter(is_tensor, args), result]),
        reads_result=True,
    ),
    "native_layer_norm_backward": Kernel(_layer_norm_backward),
    "_fused_rms_norm_backward": Kernel(_rms_norm_backward),
    "_softmax_backward_data": Kernel(_softmax_backward),
    "native_group_norm": Kernel(_group_norm, _describe_group_norm),
    "native_group_norm_backward": Kernel(_group_norm_backward, _describe_group_norm_backward),
    "sort": Kernel(_sort, _describe_row),
    "index_put": _PUT,
    "index_put_": _PUT,
    "_index_put_impl_": _PUT,
    "_unsafe_index_put": _PUT,
    "topk": Kernel(_topk),
    "_foreach_norm": Kernel(_foreach_norm, lambda args, result, _: _describe(args[0])),
}
"""By operator, without `aten.` and overload. One row is all that a further kernel needs."""

_LIBRARIES = ("_linalg_", "linalg_", "_fft_", "cholesky", "_cholesky", "lu_", "fractional_max_pool")
"""Prefixes: LAPACK, cuSOLVER and MAGMA; cuFFT's plans and the FFTs of the CPU; pooling with samples by thread."""
_UNDETERMINED = frozenset({
    "ormqr", "geqrf", "triangular_solve", "histc", "histogram", "multinomial", "masked_select", "isin", "renorm",
    "index_reduce", "_unique", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_embedding_bag_backward",
    "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
})  # fmt: skip
_DETERMINED = frozenset({"linalg_vector_norm", "linalg_cross", "linalg_pinv", "_linalg_check_errors"})


def undetermined_memory(short: str) -> HiddenMemory | None:
    """A buffer of unknown size, where a library or the data decide it; None for another kernel.

    Args:
        short: the operator, without `aten.` and overload.
    """
    if short in _DETERMINED or not (short in _UNDETERMINED or short.startswith(_LIBRARIES)):
        return None
    return HiddenMemory(events=(alloc("temporaries", None),), source="a library")
