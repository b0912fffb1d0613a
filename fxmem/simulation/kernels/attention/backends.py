"""`scaled_dot_product_attention` with the kernel that the target card runs, and the tensors around it.

The calls follow `scaled_dot_product_attention` and `_scaled_dot_product_attention_math` in
aten/src/ATen/native/transformers/attention.cpp: the same operators on the same intermediate tensors in the same order.
Compared with torch's own C++, made to believe in a card of any compute capability: 3,000 random calls on 2.11 and 2,000
on 2.15 without a difference in the operators called and the tensors they return (but for one: see `_math`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem._torch import kernels as torch_kernels
from fxmem._torch.common import TORCH_VERSION
from fxmem.simulation.kernels.attention.backend_rules import (
    CUDNN,
    EFFICIENT,
    FLASH,
    HALVES,
    MATH,
    AttentionCall,
    AttentionSettings,
    Operand,
    attention_backend,
)

_aten = torch.ops.aten


def attend(  # noqa: PLR0913 - torch's own signature
    settings: AttentionSettings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` as it runs under `settings`: the kernel chosen there, and the tensors around it.

    Under autocast the inputs are cast first, as the autocast wrapper of this function does (`lower_precision_fp` in
    aten/src/ATen/autocast_mode.h); a leaf weight passed as an input is not put into autocast's weight cache.
    """
    if torch.is_autocast_enabled("cuda"):
        # C++ evaluates the wrapper's arguments last to first.
        attn_mask = None if attn_mask is None else _lower(attn_mask)
        value, key, query = _lower(value), _lower(key), _lower(query)
    _validate(query, key, value, attn_mask)
    q, k, v = map(Operand.describe, (query, key, value))
    mask = None if attn_mask is None else Operand.describe(attn_mask)
    call = AttentionCall(q, k, v, mask, dropout_p, is_causal, enable_gqa, torch.is_grad_enabled())
    backend, why = attention_backend(call, settings)
    if backend is MATH:
        settings.on_math(why)
    options = _Options(dropout_p, is_causal, scale, enable_gqa)
    with torch_kernels.without_autocast():
        if backend is not MATH and query.dim() == 3:
            attn_mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
            return _KERNELS[backend](query[None], key[None], value[None], attn_mask, options)[0]
        return _KERNELS[backend](query, key, value, attn_mask, options)


class _Options(NamedTuple):
    """What a call says besides its tensors."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _lower(tensor: Tensor) -> Tensor:
    eligible = tensor.is_cuda and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cuda")) if eligible else tensor


def _validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """`validate_sdpa_input`."""
    tensors = (query, key, value)
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        got = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise RuntimeError(f"expected query, key and value of one dtype and device, got {got}")
    if min(tensor.dim() for tensor in tensors) < 2:
        got = ", ".join(str(t.dim()) for t in tensors)
        raise RuntimeError(f"expected query, key and value of at least 2 dimensions, got {got}")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"expected a mask of dtype bool, float32 or {query.dtype}, got {mask.dtype}")


def _requires_grad(*tensors: Tensor) -> bool:
    """`should_compute_logsumexp`: the kernel keeps what its backward needs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _additive(mask: Tensor | None, dtype: torch.dtype, blocked: float) -> Tensor | None:
    """`convert_boolean_attn_mask_`: False becomes `blocked`, True becomes 0."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(blocked, dtype=dtype, device=mask.device))


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: None, options: _Options) -> Tensor:
    """Pad head sizes that are no multiple of 8 with zeros, and slice the result (`pad_last_dim`,
    `post_process_flash_output`)."""
    head_dim = q.shape[-1]
    scale = 1.0 / math.sqrt(head_dim) if options.scale is None else options.scale
    padded = [_aten.pad.default(tensor, [0, -head_dim % 8]) if head_dim % 8 else tensor for tensor in (q, k, v)]
    kernel = _aten._scaled_dot_product_flash_attention.default
    out: Tensor = kernel(*padded, options.dropout_p, options.is_causal, False, scale=scale)[0]
    return out[..., :head_dim] if out.shape[-1] != head_dim else out


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: _Options) -> Tensor:
    """The mask becomes an additive one with strides that are multiples of 8, expanded to (batch, heads, queries, keys)
    (`preprocess_mask`)."""
    bias = _additive(mask, q.dtype, -math.inf)
    if bias is not None:
        if bias.stride(-1) != 1 or any(stride % 8 for stride in bias.stride()[:-1]):
            keys = bias.shape[-1]
            bias = _aten.pad.default(bias, [0, 8 - keys % 8])[..., :keys]
        bias = bias.expand(*q.shape[:3], k.shape[2])
    # The mask's gradient counts in 2.15, and did not in 2.11.
    wanted = (q, k, v) if bias is None or TORCH_VERSION < (2, 15) else (q, k, v, bias)
    kernel = _aten._scaled_dot_product_efficient_attention.default
    keeps = _requires_grad(*wanted)
    out: Tensor = kernel(q, k, v, bias, keeps, options.dropout_p, options.is_causal, scale=options.scale)[0]
    return out


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: _Options) -> Tensor:
    """Blocked positions get float16's lowest number (`convert_boolean_attn_mask_cudnn`)."""
    bias = _additive(mask, q.dtype, -65504.0)
    kernel = _aten._scaled_dot_product_cudnn_attention.default
    keeps = _requires_grad(q, k, v)
    out: Tensor = kernel(q, k, v, bias, keeps, options.dropout_p, options.is_causal, False, scale=options.scale)[0]
    return out


def _math(*args: Any) -> Tensor:
    return _math_with_weights(*args)[0]


def _math_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    """`_scaled_dot_product_attention_math`, written out.

    Torch's own composite adds the mask out of place when it sees tensor subclasses such as FakeTensors, one score
    matrix more than on a card. Halves are computed in float32 unless `allow_fp16_bf16_reduction_math_sdp`. The locals
    live as long as those of the C++ function, and the returned tuple's second half longer: its caller frees it.
    """
    bias = _additive(mask, query.dtype, -math.inf)
    dtype, scale = query.dtype, options.scale
    # Torch has no types for it.
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    upcast = dtype in HALVES and not allowed
    q, k, v = (tensor.to(torch.float32) if upcast else tensor for tensor in (query, key, value))
    factor = math.sqrt(abs(scale) if scale is not None else 1.0 / math.sqrt(q.shape[-1]))
    scaled = q * (-factor if scale is not None and scale < 0 else factor)
    if options.is_causal:
        if bias is not None:
            raise RuntimeError("expected either an attention mask or is_causal=True, got both")
        lower = torch.ones((scaled.shape[-2], k.shape[-2]), dtype=torch.bool, device=scaled.device).tril()
        bias = _additive(lower, scaled.dtype, -math.inf)
        del lower
    k_all, v_all = _repeat_heads(scaled, k, v) if options.enable_gqa else (k, v)
    scores = torch.matmul(scaled, k_all.transpose(-2, -1) * factor)
    if bias is not None:
        scores.add_(bias)
    scores = _aten._safe_softmax.default(scores, -1)
    if options.dropout_p > 0:
        scores = torch.dropout(scores, options.dropout_p, True)
    weights = scores.to(dtype)
    return torch.matmul(scores, v_all).to(dtype), weights


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`pre_process_group_query_attention_input`."""
    q, k, v = query.shape[-3], key.shape[-3], value.shape[-3]
    if q % k or q % v:
        raise RuntimeError(f"expected query heads that are a multiple of key and value heads, got {q}, {k} and {v}")
    if q == k == v:
        return key, value
    return key.repeat_interleave(q // k, dim=-3), value.repeat_interleave(q // v, dim=-3)


_Kernel = Callable[..., Tensor]
_KERNELS: Final[dict[SDPBackend, _Kernel]] = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: _math}
