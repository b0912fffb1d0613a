"""Kernels of TransformerEngine for PyTorch in half precision: products, norms, activations, attention, optimizers.

Read in release 2.11.0 (c188b533), files of transformer_engine/pytorch/csrc/extensions; what 2.20 calls otherwise, in
d0067d0d. Its fp8 and its overlap of communication with products are not here.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError
from fxmem.simulation.kernels.packages import Call, Package, enumeration, norm_tensors

aten = torch.ops.aten

_WITHOUT_MAX512: Final = (2, 16)
"""Since this release there is no engine for short sequences any more."""
_DTYPES = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
_ENUMERATIONS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_BACKENDS = {name: number for name, number in _ENUMERATIONS["NVTE_Fused_Attn_Backend"].items() if "max512" not in name}
"""Those of the newest release, whose Python wants no other member."""


def _load_here(common: Any) -> torch_common.Patches:
    """The extension is imported, where the package would look for its file."""

    def load(_: str) -> None:
        extension = __import__(PACKAGE.module)
        release = importlib.metadata.version("transformer_engine")
        if tuple(map(int, release.split(".")[:2])) >= _WITHOUT_MAX512:
            vars(extension)["NVTE_Fused_Attn_Backend"] = enumeration("NVTE_Fused_Attn_Backend", _BACKENDS)

    yield torch_common.replace(common, "load_framework_extension", load)


def _pass_on(extensions: Any) -> torch_common.Patches:
    """What is not in the extension is looked up there: the package imports all of its names at once."""
    unknown: Any = vars(sys.modules[PACKAGE.module])["__getattr__"]
    vars(extensions)["__getattr__"] = unknown
    return iter(())


def _take_fakes(utils: Any) -> torch_common.Patches:
    """A backend is chosen by the type of the tensors, which is plain on a card."""

    def choose(original: Any, attention_params: Any) -> Any:
        if attention_params.qkv_type is torch_common.FakeTensor:
            attention_params.qkv_type = torch.Tensor
        return original(attention_params)

    yield torch_common.wrap(utils, "get_attention_backend", choose)


PACKAGE = Package(
    module="transformer_engine_torch",
    release="TransformerEngine 2.11.0",
    python="transformer_engine",
    install="pip install --no-deps transformer-engine==2.11.0",
    values={name: enumeration(name, members) for name, members in _ENUMERATIONS.items()},
    environ={"NVTE_PROJECT_BUILDING": "1"},  # its Python then looks for no library beside itself
    patches={
        "transformer_engine.common": _load_here,
        "transformer_engine.pytorch.cpp_extensions": _pass_on,
        "transformer_engine.pytorch.attention.dot_product_attention.utils": _take_fakes,
    },
)
kernel = PACKAGE.kernel


def _plain(*given: Any) -> None:
    """Refuse what is quantized."""
    for each in given:
        if each is not None and type(each).__name__.endswith(("Quantizer", "Storage", "Float8Tensor")):
            raise AnalysisError(
                f"expected TransformerEngine's layers in float16 or bfloat16, got a {type(each).__name__}, for which "
                f"there are no rows. Leave its fp8 recipe out"
            )


# --- products ---------------------------------------------------------------------------------------------------------


_PRODUCT = """A transA B transB D quantizer output_dtype bias bias_type gelu gelu_in grad workspace workspace_size
accumulate use_split_accumulator comm_overlap comm_type extra_output"""
_PRODUCTS = "A transA B transB D D_type m_splits bias bias_type single_output pre_gelu_out grad"


def _product_flops(A: Tensor, transA: bool, B: Tensor) -> int:
    inner = A.shape[-1] if transA else A.numel() // A.shape[-1]
    return 2 * A.numel() * B.numel() // max(inner, 1)


@kernel("gemm.cpp", flops=lambda call: _product_flops(call.A, call.transA, call.B), takes=_PRODUCT)
def generic_gemm(call: Call) -> Any:
    """Column-major: the result is B times A, each transposed as the flag says. The workspace is the caller's."""
    A, B = call.A, call.B
    _plain(A, B, call.quantizer)
    if call.comm_overlap is not None:
        raise AnalysisError("expected products apart from communication; TransformerEngine's userbuffers have no rows")
    rows = (B.shape[-1],) if call.transB else tuple(B.shape[:-1])
    shape = (*rows, A.numel() // A.shape[-1] if call.transA else A.shape[-1])
    dtype = A.dtype if call.output_dtype is None else _DTYPES[int(call.output_dtype)]
    out = torch.empty(shape, dtype=dtype, device=B.device) if call.D is None else call.D
    has_bias = call.bias is not None and call.grad
    of_bias = torch.empty(B.shape[-1], dtype=out.dtype, device=B.device) if has_bias else None
    before = torch.empty(shape, dtype=out.dtype, device=B.device) if call.gelu and not call.grad else None
    return out, of_bias, before, call.extra_output


def _grouped_flops(call: Call) -> int:
    return sum(_product_flops(a, call.transA, b) for a, b in zip(call.A, call.B, strict=True))


@kernel("gemm.cpp", flops=_grouped_flops, takes=_PRODUCTS)
def te_general_grouped_gemm(call: Call) -> Any:
    """A product for each expert, written to what is given."""
    _plain(*call.A, *call.B)
    if call.D is None:
        raise AnalysisError("expected te_general_grouped_gemm with its outputs; without them it has no row")
    return call.bias


@kernel("transpose.cpp")
def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A contiguous copy with its first two dimensions exchanged."""
    return tensor.new_empty((tensor.shape[1], tensor.shape[0], *tensor.shape[2:])) if out is None else out


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm(x: Tensor, out: Any, dtype: Any, statistics: int) -> list[Any]:
    rows = x.numel() // x.shape[-1]
    kept = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(statistics)]
    made = torch.empty(x.shape, dtype=_DTYPES[int(dtype)], device=x.device) if out is None else out
    return [made, *([None] * (2 - statistics)), *kept]


@kernel("normalization.cpp", flops=lambda x, *_, **__: 4 * x.numel())
def rmsnorm_fwd(x: Tensor, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any, *_: Any) -> Any:
    """The result, and the inverse deviation of each row."""
    _plain(x, weight, quantizer)
    return _norm(x, ln_out, otype, 1)


@kernel("normalization.cpp", flops=lambda x, *_, **__: 7 * x.numel())
def layernorm_fwd(x: Tensor, weight: Any, bias: Any, eps: float, ln_out: Any, quantizer: Any, *rest: Any) -> Any:
    """The result, mean and inverse deviation of each row."""
    _plain(x, weight, quantizer)
    return _norm(x, ln_out, rest[0], 2)


def _norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, weights: int) -> list[Tensor]:
    """The kernel sums the weights' gradients in float32, a row for each of its blocks, of which there is taken to be
    one on each multiprocessor (rmsnorm_bwd_semi_cuda_kernel.cu)."""
    kept = gradient.contiguous(), x.contiguous()
    made = [torch.empty_like(kept[1]), *(torch.empty_like(weight) for _ in range(weights))]
    blocks = torch.cuda.get_device_properties().multi_processor_count
    scratch = torch.empty(weights * blocks * weight.numel(), dtype=torch.float32, device=x.device)
    del scratch, kept
    return made


@kernel("normalization.cpp", "rmsnorm_bwd", lambda dz, *_: 9 * dz.numel())
def _rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *_: Any) -> Any:
    return _norm_backward(dz, x, gamma, 1)


@kernel("normalization.cpp", "rmsnorm_bwd_add")
def _rmsnorm_bwd_add(dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, *_: Any) -> Any:
    return _norm_backward(dz, x, gamma, 1)


@kernel("normalization.cpp", "layernorm_bwd", lambda dz, *_: 12 * dz.numel())
def _layernorm_bwd(dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, *_: Any) -> Any:
    return _norm_backward(dz, x, gamma, 2)


# --- activations ------------------------------------------------------------------------------------------------------


@kernel("activation.cpp", "gelu qgelu relu srelu silu")
def _activation(x: Tensor, quantizer: Any, *_: Any, **__: Any) -> Tensor:
    _plain(x, quantizer)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@kernel("activation.cpp", "geglu qgeglu reglu sreglu swiglu clamped_swiglu")
def _gated(x: Tensor, quantizer: Any, *_: Any, **__: Any) -> Tensor:
    _plain(x, quantizer)
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


_GRADIENTS = """dgelu dgeglu dqgelu dqgeglu drelu dreglu dsrelu dsreglu dsilu dswiglu clamped_dswiglu"""


@kernel("activation.cpp", _GRADIENTS)
def _activation_backward(grad: Tensor, fwd_input: Tensor, quantizer: Any, *_: Any, **__: Any) -> Tensor:
    _plain(grad, quantizer)
    return torch.empty(fwd_input.shape, dtype=fwd_input.dtype, device=fwd_input.device)


@kernel("bias.cpp", "dbias_dgelu dbias_dsilu dbias_drelu dbias_dqgelu dbias_dsrelu")
def _bias_and_activation_backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    made = _activation_backward(grad, fwd_input, quantizer)
    return [torch.empty(made.shape[-1], dtype=made.dtype, device=made.device), made]


# --- attention --------------------------------------------------------------------------------------------------------


def _by_heads(tensor: Tensor, layout: str) -> Tensor:
    """A view `[batch, heads, length, size]`."""
    if layout.startswith("T"):
        return tensor.unsqueeze(0).transpose(1, 2)
    return tensor.permute(1, 2, 0, 3) if layout.startswith("SB") else tensor.transpose(1, 2)


def _as_given(tensor: Tensor, layout: str) -> Tensor:
    """What `_by_heads` made, as it was."""
    if layout.startswith("T"):
        return tensor.transpose(1, 2).squeeze(0)
    return tensor.permute(2, 0, 1, 3) if layout.startswith("SB") else tensor.transpose(1, 2)


def _layout(qkv_layout: Any) -> tuple[str, str]:
    """Of queries, and of keys and values."""
    parts: list[str] = qkv_layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")
    return parts[0], parts[-1]


@kernel("attention.cpp")
def get_fused_attn_backend(*given: Any) -> Any:
    """cuDNN's engine for any length, by the head sizes that `nvte_get_fused_attn_backend` allows with cuDNN 9.11 or
    later (common/fused_attn/fused_attn.cpp); its conditions on masks, biases and windows are taken to hold.

    Since 2.20 it is given one record, and says in words why there is none.
    """
    is_record = len(given) == 1
    asked = given[0] if is_record else None
    training, dtype, *sizes = (
        (asked.is_training, asked.qkv_dtype, asked.head_dim_qk, asked.head_dim_v)
        if asked is not None
        else (given[0], given[1], given[12], given[13])
    )
    backends, capability = PACKAGE.values["NVTE_Fused_Attn_Backend"], torch.cuda.get_device_capability()
    fits = max(sizes) <= 128 or (max(sizes) <= 256 and capability == (9, 0))
    fits = fits or not training or (sizes == [192, 128] and capability >= (10, 0))
    runs = int(dtype) in (5, 6) and capability >= (8, 0) and not any(size % 8 for size in sizes)
    if runs and fits:
        found, why = backends.NVTE_F16_arbitrary_seqlen, ""
    else:
        found, why = backends.NVTE_No_Backend, "heads of another size or type than cuDNN's attention takes"
    return (found, why) if is_record else found


def _layout_and_mask(given: Sequence[Any]) -> tuple[Any, bool]:
    """The layout of queries, keys and values, and whether the mask is causal: releases pass them in other places."""
    layout = next(each for each in given if isinstance(each, PACKAGE.values["NVTE_QKV_Layout"]))
    mask = next(each for each in given if isinstance(each, PACKAGE.values["NVTE_Mask_Type"]))
    return layout, "CAUSAL" in mask.name


@kernel("attention.cpp", is_composed=True)
def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, *rest: Any
) -> Any:
    """cuDNN's attention, as torch calls it: the same workspace and FLOPs. Statistics, and the generator's state."""
    layout, causal = _layout_and_mask(rest)
    Q, K, V = _find_tensors(rest)[2:5]  # behind both sequences' ends
    of_queries, of_keys = _layout(layout)
    views = _by_heads(Q, of_queries), _by_heads(K, of_keys), _by_heads(V, of_keys)
    operator = aten._scaled_dot_product_cudnn_attention.default
    dropout = p_dropout if is_training else 0.0
    out, statistics, *_ = operator(*views, None, is_training, dropout, causal, False, scale=attn_scale)
    result = [_as_given(out, of_queries)]
    if is_training:
        state = torch.empty(2, dtype=torch.int64, device=Q.device)
        result += [statistics.reshape(*views[0].shape[:3], 1), state]
    return result


@kernel("attention.cpp", is_composed=True)
def fused_attn_bwd(max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, *rest: Any) -> Any:
    """Gradients of queries, keys and values, and of what else takes part, which has none here."""
    layout, causal = _layout_and_mask(rest)
    Q, K, V, out, dout = _find_tensors(rest)[2:7]
    of_queries, of_keys = _layout(layout)
    queries = [_by_heads(each, of_queries) for each in (dout, Q)]
    keys = [_by_heads(each, of_keys) for each in (K, V)]
    # Windows are a list of numbers.
    statistics, state = next(each for each in rest if isinstance(each, list) and isinstance(each[0], Tensor))[:2]
    seed, offset = state[0], state[1]
    made = aten._scaled_dot_product_cudnn_attention_backward.default(
        *(*queries, *keys, _by_heads(out, of_queries), statistics, seed, offset, None, None, None),
        *(max_seqlen_q, max_seqlen_kv, p_dropout, causal),
        scale=attn_scale,
    )
    return [_as_given(each, of) for each, of in zip(made, (of_queries, of_keys, of_keys), strict=True)] + [None, None]


def _find_tensors(given: Sequence[Any]) -> list[Any]:
    """Tensors among arguments, none of them quantized."""
    _plain(*(each for each in given if not isinstance(each, (int, float, list, tuple))))
    return [each for each in given if isinstance(each, Tensor)]


_SOFTMAX = (
    "scaled_softmax scaled_masked_softmax scaled_upper_triang_masked_softmax scaled_aligned_causal_masked_softmax"
)


@kernel("softmax.cpp", " ".join(f"{each}_forward" for each in _SOFTMAX.split()))
def _softmax(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@kernel("softmax.cpp", " ".join(f"{each}_backward" for each in _SOFTMAX.split()))
def _softmax_backward(grad: Tensor, *_: Any) -> Tensor:
    return grad  # which is written over


@kernel("apply_rope.cpp", "fused_rope_forward fused_rope_backward", lambda x, *_: 3 * x.numel())
def _rope(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@kernel("apply_rope.cpp")
def fused_qkv_rope_forward(qkv: Tensor, q_freqs: Any, k_freqs: Any, start: Any, split: Any, *_: Any) -> Any:
    """Queries, keys and values of what was one product."""
    length, batch, heads = qkv.shape[:3]
    sizes = (heads * split[0] // split[1], split[1]), (heads, split[1]), (heads, split[2])
    return tuple(qkv.new_empty((length, batch, *each)) for each in sizes)


@kernel("apply_rope.cpp")
def fused_qkv_rope_backward(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, *_: Any) -> Tensor:
    """The gradient of what was one product."""
    length, batch, heads, _size = v_grad.shape
    width = (q_grad.numel() + k_grad.numel() + v_grad.numel()) // (length * batch * heads)
    return v_grad.new_empty((length, batch, heads, width))


# --- optimizers, dropout, what the card is asked ----------------------------------------------------------------------


_IN_PLACE = """multi_tensor_adam multi_tensor_adam_param_remainder multi_tensor_adam_capturable
multi_tensor_adam_capturable_master multi_tensor_sgd multi_tensor_scale"""


@kernel("multi_tensor/adam.cpp, sgd.cpp, scale.cpp", _IN_PLACE)
def _update(*_: Any, **__: Any) -> None:
    """Lists of tensors are written to; nothing is allocated."""


@kernel("multi_tensor/l2norm.cpp")
def multi_tensor_l2norm(chunk_size: int, noop_flag: Tensor, lists: Any, per_tensor: Any = None) -> Any:
    """The norm of all, and of each where that is asked for."""
    return norm_tensors(chunk_size, lists[0], per_tensor)


@kernel("multi_tensor/l2norm.cpp")
def multi_tensor_unscale_l2norm(chunk_size: int, noop: Tensor, lists: Any, inv_scale: Any, per: Any = None) -> Any:
    """The same of what is multiplied by a number."""
    return norm_tensors(chunk_size, lists[0], per)


@kernel("dropout.cpp")
def dropout_fwd(x: Tensor, dropout_probability: float, out: Tensor | None = None) -> Any:
    """The result, and a mask of a bit for each element."""
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    return [made, torch.empty(math.ceil(x.numel() / 8), dtype=torch.uint8, device=x.device)]


@kernel("dropout.cpp")
def dropout_bwd(grad: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None) -> Tensor:
    """The gradient of what dropout took."""
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device) if grad_input is None else grad_input


@kernel("misc.cpp")
def get_cudnn_version() -> int:
    """That of the cuDNN that torch has."""
    return int(torch.backends.cudnn.version() or 91900)  # type: ignore[no-untyped-call]


@kernel("misc.cpp")
def get_cublasLt_version() -> int:
    """That of the CUDA that torch is built for."""
    major, minor = map(int, (torch.version.cuda or "13.0").split("."))
    return major * 10000 + minor * 100


@kernel("pybind.cpp", "get_num_cublas_streams")
def _streams() -> int:
    return 4  # common/util/multi_stream.cpp


@kernel("pybind.cpp", "device_supports_multicast ubuf_built_with_mpi")
def _no(*_: Any) -> bool:
    return False


@kernel("pybind.cpp")
def get_stream_priority_range(device: int = -1) -> tuple[int, int]:
    """The least and the greatest priority."""
    return 0, -5
