"""The bytes of a checkpoint's weights as its `quantization_config` declares them: packed tensors, scales, zeros.

What is packed are the weights of linear layers, and of experts that are kept in one tensor with one matrix for each.
The embeddings, the head, norms, biases and what the configuration leaves out stay in the model's dtype. The layouts are
those of the checkpoints' files: GPTQ's and AWQ's `qweight`, `qzeros` and `scales` in words of 32 bits; bitsandbytes'
`Params4bit` with `absmax` and `Int8Params` with `SCB`; `weight_scale_inv` of blockwise FP8; blocks and scales of MXFP4;
compressed-tensors' `weight_packed` and `weight_scale`. Where a layout is not known, the bytes are None.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch import nn

from fxmem.simulation.engines.layers import Stage, find_layers, find_shape, is_split_inside, is_whole

_INT32, _FLOAT32, _INT64 = 4, 4, 8


class PackedWeights(NamedTuple):
    """What a quantised checkpoint's weights take."""

    method: str
    """`quant_method`, with its bits where the configuration says them."""
    nbytes: int | None
    """All weights and buffers, packed where they are; None where this layout is not known."""
    config: Mapping[str, Any]
    """The `quantization_config`."""


class _Matrix(NamedTuple):
    path: str
    copies: int
    """Matrices in the tensor: one, or one for each expert."""
    rows: int
    """Of the output."""
    columns: int
    """Of the input."""
    element_size: int
    is_expert: bool


def pack_weights(model: nn.Module, config: Mapping[str, Any]) -> PackedWeights:
    """The bytes of a model's weights as a `quantization_config` packs them.

    Args:
        model: on meta, its weights unpacked, in the dtype of what is not packed.
        config: of the checkpoint.
    """
    method, bits = str(config.get("quant_method", "an unnamed method")), config.get("bits")
    if method == "bitsandbytes":
        bits = next((each for each in (4, 8) if config.get(f"load_in_{each}bit")), None)
    name = f"{method}, {bits} bits" if isinstance(bits, int) else method
    total = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    try:
        for each in _matrices(model):
            if _is_packed(each, method, config, model):
                total += each.copies * (_LAYOUTS[method](each, config) - each.rows * each.columns * each.element_size)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # no such layout, or a field that is none
        return PackedWeights(name, None, config)
    return PackedWeights(name, total, config)


def pack_stage(model: Any, config: Mapping[str, Any] | None, stage: Stage) -> int | None:
    """The bytes of the weights that one card of a serving engine has.

    Layers are split by rows or by columns, the tables of tokens by tokens, in multiples of 64; norms, routers and the
    biases of what is split by columns are whole on each card.

    Args:
        model: a decoder of transformers on meta, its weights unpacked.
        config: the `quantization_config` of its checkpoint; None: as they are.
        stage: what the card has of the model.

    Returns:
        None where the layout of what is packed is not known.
    """
    method = str((config or {}).get("quant_method"))
    matrices = {f"{each.path}{'' if each.is_expert else '.weight'}": each for each in _matrices(model)}
    head, names = model.get_output_embeddings(), {id(module): path for path, module in model.named_modules()}
    layers, tables = f"{names[id(find_layers(model))]}.", {id(model.get_input_embeddings().weight): stage.is_first}
    tables[id(head.weight)] = stage.is_last or tables.get(id(head.weight), False)
    parts: Counter[str] = Counter()
    try:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            nbytes, matrix = tensor.numel() * tensor.element_size(), matrices.get(name)
            if id(tensor) in tables:
                rows = math.ceil(tensor.shape[0] / 64) * 64 // stage.tensor
                parts[name] += tables[id(tensor)] * rows * (nbytes // tensor.shape[0])
            elif not _is_in(stage, name, layers):
                continue
            elif matrix is None:
                parts[name] += nbytes // _count_parts(name, stage)
            else:
                parts[_name_merged(matrix)] += _pack_part(matrix, method, config, model, stage)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # no such layout, or a field that is none
        return None
    return sum(map(_allocate, parts.values()))


def _is_in(stage: Stage, name: str, layers: str) -> bool:
    """Whether a stage has a tensor: of its layers, and in the last what is outside of layers."""
    return (
        int(name.removeprefix(layers).partition(".")[0]) in stage.layers if name.startswith(layers) else stage.is_last
    )


def _pack_part(matrix: _Matrix, method: str, config: Mapping[str, Any] | None, model: Any, stage: Stage) -> int:
    """The bytes of what a card has of a matrix."""
    if not is_whole(matrix.path):
        split = "columns" if is_split_inside(matrix.path) else "rows"
        matrix = matrix._replace(**{split: getattr(matrix, split) // stage.tensor})
    if config is not None and _is_packed(matrix, method, config, model):
        return matrix.copies * _LAYOUTS[method](matrix, config)
    return matrix.copies * matrix.rows * matrix.columns * matrix.element_size


def _name_merged(matrix: _Matrix) -> str:
    """The engine's name of a matrix: queries, keys and values are one, and so are an MLP's gate and what it opens."""
    alone = matrix.is_expert or is_whole(matrix.path) or is_split_inside(matrix.path)
    return matrix.path if alone else f"{matrix.path.rpartition('.')[0]}.merged"


def _allocate(nbytes: int) -> int:
    """What torch's allocator counts for a tensor: a segment is not split where at most 1 MiB of it is over."""
    over = -nbytes % (2 << 20)
    return nbytes + over if nbytes > 10 << 20 and over <= 1 << 20 else nbytes


def _count_parts(name: str, stage: Stage) -> int:
    """Over how many cards a bias is split; what is no bias, as a norm, is whole."""
    path, _, last = name.rpartition(".")
    is_split = last == "bias" and not is_split_inside(path) and not is_whole(path) and "norm" not in path
    return stage.tensor if is_split or last.endswith("up_proj_bias") else 1


class _UnknownLayoutError(LookupError):
    """A layout of a known method that is not known."""


# --- what is packed ---------------------------------------------------------------------------------------------------


def _matrices(model: nn.Module) -> Iterator[_Matrix]:
    """The weights of linear layers, and tensors with a matrix for each expert."""
    for path, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if (shape := find_shape(module)) is not None:
            yield _Matrix(path, 1, *shape, weight.element_size(), False)
        elif "expert" in path.rpartition(".")[2].lower():
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.dim() == 3:
                    experts, rows, columns = parameter.shape
                    parts = 2 if "gate_up" in name and rows % 2 == 0 else 1  # two matrices in the checkpoint
                    yield _Matrix(name, experts * parts, rows // parts, columns, parameter.element_size(), True)


def _is_packed(matrix: _Matrix, method: str, config: Mapping[str, Any], model: nn.Module) -> bool:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left_out = next((config[key] for key in _LEFT_OUT if config.get(key)), None)
    if head is not None and model.get_submodule(matrix.path if not matrix.is_expert else "") is head:
        return bool(method == "gptq" and config.get("lm_head"))
    packs_experts = {"mxfp4": True, "bitsandbytes": False}.get(method, matrix.is_expert)  # alone, or none of them
    if packs_experts is not matrix.is_expert:
        return False
    return not any(_matches(matrix.path, str(pattern)) for pattern in left_out or ())


_LEFT_OUT: Final = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")


def _matches(path: str, pattern: str) -> bool:
    """Whether a module that is left out is this one, or has it inside."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], path) is not None
    parts = re.escape(pattern).replace(r"\*", "[^.]*")
    return re.search(rf"(^|\.){parts}(\.|$)", path) is not None


# --- layouts ----------------------------------------------------------------------------------------------------------


def _gptq(matrix: _Matrix, config: Mapping[str, Any]) -> int:
    """`qweight`, `qzeros`, `scales` in half precision, and `g_idx`, the group of each column."""
    bits, groups = int(config["bits"]), _groups(matrix, config["group_size"])
    words = matrix.columns * bits // 32 * matrix.rows + groups * (matrix.rows * bits // 32)
    return words * _INT32 + groups * matrix.rows * 2 + matrix.columns * _INT32


def _awq(matrix: _Matrix, config: Mapping[str, Any]) -> int:
    """`qweight`, `qzeros` and `scales` in half precision."""
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise _UnknownLayoutError
    bits, groups = int(config.get("bits", 4)), _groups(matrix, config.get("group_size", 128))
    return (matrix.columns + groups) * (matrix.rows * bits // 32) * _INT32 + groups * matrix.rows * 2


def _bitsandbytes(matrix: _Matrix, config: Mapping[str, Any]) -> int:
    """Halves of bytes with a scale for each 64, themselves quantised or not; or bytes with a scale for each row."""
    elements = matrix.rows * matrix.columns
    if config.get("load_in_8bit"):
        return elements + matrix.rows * _FLOAT32
    if not config.get("load_in_4bit"):
        raise _UnknownLayoutError
    blocks = math.ceil(elements / 64)
    scales = blocks * _FLOAT32
    if config.get("bnb_4bit_use_double_quant"):
        scales = blocks + math.ceil(blocks / 256) * _FLOAT32 + 256 * _FLOAT32 + _FLOAT32
    return math.ceil(elements / 2) + scales + 16 * _FLOAT32


def _fp8(matrix: _Matrix, config: Mapping[str, Any]) -> int:
    """Bytes, with a scale in single precision for each block, or for the matrix, and for what it is given."""
    size: list[int] | None = config.get("weight_block_size")
    if size is None:
        return matrix.rows * matrix.columns + _FLOAT32 * (2 if config.get("activation_scheme") == "static" else 1)
    blocks = math.ceil(matrix.rows / size[0]) * math.ceil(matrix.columns / size[1])
    return matrix.rows * matrix.columns + blocks * _FLOAT32


def _mxfp4(matrix: _Matrix, config: Mapping[str, Any]) -> int:
    """Halves of bytes, and a byte of scale for each 32."""
    elements = matrix.rows * matrix.columns
    return elements // 2 + elements // 32


def _compressed_tensors(matrix: _Matrix, config: Mapping[str, Any]) -> int:
    """Words of 32 bits or bytes. Scales in the dtype of the weights, and the shape of what is packed in words."""
    (group,) = config["config_groups"].values()
    weights = group["weights"]
    if set(group.get("targets", ())) != {"Linear"}:
        raise _UnknownLayoutError
    bits, strategy = int(weights["num_bits"]), weights["strategy"]
    if strategy not in ("tensor", "channel", "group"):
        raise _UnknownLayoutError
    of_a_row = _groups(matrix, weights["group_size"] if strategy == "group" else -1)
    scales = 1 if strategy == "tensor" else matrix.rows * of_a_row
    layout, symmetric = config.get("format"), weights.get("symmetric", True)
    if weights.get("actorder") not in (None, False, "weight", "static"):  # the group of each column is kept, too
        raise _UnknownLayoutError
    if layout == "pack-quantized":
        columns = math.ceil(matrix.columns * bits / 32)
        zeros = 0 if symmetric else math.ceil(matrix.rows * bits / 32) * of_a_row * _INT32
        return matrix.rows * columns * _INT32 + scales * matrix.element_size + 2 * _INT64 + zeros
    if layout in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8 and symmetric:
        return matrix.rows * matrix.columns + scales * matrix.element_size
    raise _UnknownLayoutError


def _groups(matrix: _Matrix, size: int) -> int:
    """Groups of a row's columns; -1 is one group."""
    return math.ceil(matrix.columns / size) if size > 0 else 1


_LAYOUTS: Final[dict[str, Callable[[_Matrix, Mapping[str, Any]], int]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}
"""The bytes of one matrix, by `quant_method`."""
