"""Which attention kernel the target card runs for one call of `scaled_dot_product_attention`, and the tensors that brings.

The decision (`attention_backend`) is pure: a call described by shapes, strides and dtypes, the settings it meets, and out
comes a backend with the reason. Each rule below is one check of torch and bears its name:

- aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: `select_sdp_backend`, `priority_order`, `can_use_flash_attention`,
  `can_use_mem_efficient_attention`, `can_use_cudnn_attention`;
- aten/src/ATen/native/transformers/sdp_utils_cpp.h (in the wheel, under torch/include): the checks they share.

The calls (`attend`) follow `scaled_dot_product_attention` and `_scaled_dot_product_attention_math` in
aten/src/ATen/native/transformers/attention.cpp: the same operators on the same intermediate tensors in the same order.

Assumptions. torch runs the decision on the card it finds; here it is run for a card that is not there, so the rules had to
be written again. They are those of torch 2.11, with later changes marked by the release that brought them (read off the
2.12 to 2.15 wheels). Held against torch's own C++, made to believe in a card of any compute capability: 24,000 random calls
on 2.11 and 6,000 on 2.15 without a difference, and 3,000 and 2,000 without a difference in the operators called and the
tensors they return (but for one: see `_math`). Not modelled: what 2.15 asks of cuDNN older than 9.26 on Hopper. Nested tensors
are left to torch. External implementations (`torch.nn.attention.activate_flash_attention_impl`) are taken for the built-in ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem import _torch_kernels
from fxmem.errors import AnalysisError, UsageError

__all__ = ["DEFAULT_ORDER", "TORCH_VERSION", "AttentionCall", "Choice", "Operand", "Settings", "attend", "attention_backend", "preferred_order", "settings_on"]

FLASH: Final = SDPBackend.FLASH_ATTENTION
EFFICIENT: Final = SDPBackend.EFFICIENT_ATTENTION
CUDNN: Final = SDPBackend.CUDNN_ATTENTION
MATH: Final = SDPBackend.MATH

DEFAULT_ORDER: Final = (FLASH, EFFICIENT, MATH, CUDNN)
"""`Context::sdp_priority_order` in aten/src/ATen/Context.h, less the backend of other devices."""

_major, _minor = torch.__version__.split(".")[:2]
TORCH_VERSION: Final = int(_major), int(_minor)

_CUDNN_FIRST: Final = (CUDNN, FLASH, EFFICIENT, MATH)
_HALVES: Final = (torch.float16, torch.bfloat16)


# --- what a decision is made from -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """What the rules look at in one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements."""
    dtype: torch.dtype
    storage_offset: int = 0
    """Elements."""
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        """Describe a tensor, real or fake."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, int(tensor.storage_offset()), tensor.requires_grad)


@dataclass(frozen=True)
class AttentionCall:
    """One call. Shapes are (batch, heads, sequence, head size) for the fused kernels; math takes any."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    grad_enabled: bool = True

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def requires_grad(self) -> bool:
        """`input_requires_grad`: whether autograd will want a backward for query, key or value."""
        return self.grad_enabled and any(operand.requires_grad for operand in self.operands)


@dataclass(frozen=True)
class Settings:
    """What a decision depends on besides the call."""

    capability: tuple[int, int]
    """Compute capability of the card."""
    torch_version: tuple[int, int] = (2, 11)
    cudnn_version: int | None = None
    """As `torch.backends.cudnn.version()` writes it, e.g. 91900; None without cuDNN."""
    order: tuple[SDPBackend, ...] = DEFAULT_ORDER
    enabled: frozenset[SDPBackend] = frozenset(DEFAULT_ORDER)
    """Backends not switched off by `torch.backends.cuda.enable_*_sdp` or `torch.nn.attention.sdpa_kernel`."""
    deterministic: bool = False
    """`torch.use_deterministic_algorithms(True)`, and not only as a warning."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and why: what each backend before it in the order lacked."""

    backend: SDPBackend
    reason: str


def preferred_order(
    capability: tuple[int, int], torch_version: tuple[int, int], cudnn_version: int | None, *, deprioritized: bool = False
) -> tuple[SDPBackend, ...]:
    """The order in which backends are tried when the program sets none (`check_prefer_cudnn_attention`).

    On Hopper and data-centre Blackwell cuDNN goes first, if it is newer than 9.15.0; the environment variable
    `TORCH_CUDNN_SDPA_DEPRIORITIZED=1` (`deprioritized`) turns that off. Since 2.13 every 9.x and 10.x card counts.
    """
    major, minor = capability
    hopper_or_blackwell = major in (9, 10) and (minor in (0, 3) or torch_version >= (2, 13))
    prefer_cudnn = not deprioritized and cudnn_version is not None and cudnn_version > 91500 and hopper_or_blackwell
    return _CUDNN_FIRST if prefer_cudnn else DEFAULT_ORDER


def settings_on(
    capability: tuple[int, int], *, cudnn_version: int | None, deprioritized: bool, unset: Collection[tuple[SDPBackend, ...]] = (DEFAULT_ORDER,)
) -> Settings:
    """This process's settings as they would be on a card of `capability`.

    Args:
        capability: of the target.
        cudnn_version: the runtime version there; that of this process unless told otherwise.
        deprioritized: whether `TORCH_CUDNN_SDPA_DEPRIORITIZED` is set.
        unset: the orders this process has when the program sets none. Any other was set by the program
            (`sdpa_kernel(..., set_priority=True)`), and holds on the card too.
    """
    cuda = torch.backends.cuda
    switches = {FLASH: cuda.flash_sdp_enabled, EFFICIENT: cuda.mem_efficient_sdp_enabled, CUDNN: cuda.cudnn_sdp_enabled, MATH: cuda.math_sdp_enabled}
    current = tuple(backend for number in _torch_kernels.sdpa_order() for backend in DEFAULT_ORDER if backend.value == number)
    return Settings(
        capability=capability,
        torch_version=TORCH_VERSION,
        cudnn_version=cudnn_version,
        order=preferred_order(capability, TORCH_VERSION, cudnn_version, deprioritized=deprioritized) if current in unset else current,
        enabled=frozenset(backend for backend, is_enabled in switches.items() if is_enabled()),  # type: ignore[no-untyped-call]
        deterministic=torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


# --- the decision -----------------------------------------------------------------------------------------------------------


def attention_backend(call: AttentionCall, settings: Settings, override: SDPBackend | None = None) -> Choice:
    """The first backend in the order whose rules the call meets (`select_sdp_backend`).

    Args:
        override: run this backend whatever the order; its rules must still hold.

    Raises:
        UsageError: the override cannot run this call.
        AnalysisError: no enabled backend can, where torch would raise too.
    """
    if settings.torch_version >= (2, 14):
        call = _with_batch(call)
    refusals: list[str] = []
    for backend in settings.order if override is None else (override,):
        refusal = _refusal(backend, call, settings)
        if refusal is None:
            return Choice(backend, "; ".join([*refusals, f"{_name(backend)} runs"]))
        refusals.append(f"{_name(backend)}: {refusal}")
    why = "; ".join(refusals)
    sm = _sm(settings)
    if override is not None:
        raise UsageError(f"expected an attention backend that can run this call on {sm}; got {why}. Leave the choice to torch, or change the call.")
    raise AnalysisError(
        f"expected an attention kernel that can run this call on {sm}; none of those enabled can: {why}. "
        "Allow another with torch.nn.attention.sdpa_kernel, or change the call."
    )


def _name(backend: SDPBackend) -> str:
    return str(backend.name).lower()


def _sm(settings: Settings) -> str:
    return "sm{}{}".format(*settings.capability)


Rule = Callable[[AttentionCall, Settings], str | None]
"""A check: None when the call passes, else what it lacks."""


def _refusal(backend: SDPBackend, call: AttentionCall, settings: Settings) -> str | None:
    if backend not in settings.enabled:
        return "switched off"
    return next((refusal for rule in _RULES[backend] if (refusal := rule(call, settings)) is not None), None)


def _with_batch(call: AttentionCall) -> AttentionCall:
    """`normalize_unbatched_input` (since 2.14): three-dimensional inputs get a batch of one."""
    if any(len(operand.shape) != 3 for operand in call.operands):
        return call

    def batched(operand: Operand, dims: int) -> Operand:
        extra = dims - len(operand.shape)
        return Operand((1,) * extra + operand.shape, (0,) * extra + operand.stride, operand.dtype, operand.storage_offset, operand.requires_grad)

    query, key, value = (batched(operand, 4) for operand in call.operands)
    mask = None if call.mask is None else batched(call.mask, 4)
    return AttentionCall(query, key, value, mask, call.dropout_p, call.is_causal, call.enable_gqa, call.grad_enabled)


# Checks that several backends share.


def _check_tensor_shapes(call: AttentionCall, _: Settings) -> str | None:
    dims = [len(operand.shape) for operand in call.operands]
    return None if dims == [4, 4, 4] else f"query, key and value have {dims} dimensions, not 4"


def _check_nonzero_sequence_lengths(call: AttentionCall, _: Settings) -> str | None:
    return "a sequence is empty" if 0 in (call.query.shape[-2], call.key.shape[-2]) else None


def _check_last_dim_stride(ignore_singleton_dim: bool) -> Rule:
    def check_last_dim_stride_equals_1_dense(call: AttentionCall, _: Settings) -> str | None:
        dense = all(operand.stride[-1] == 1 for operand in call.operands) or (ignore_singleton_dim and call.query.shape[-1] == 1)
        if not dense:
            return "the last dimension of query, key or value is not dense"
        return "the mask's last dimension is not dense" if call.mask is not None and call.mask.stride[-1] != 1 else None

    return check_last_dim_stride_equals_1_dense


def _check_batch_and_heads(*, supports_gqa: Callable[[Settings], bool], requires_same_num_heads: bool = True) -> Rule:
    def check_batch_size_and_num_heads_dense(call: AttentionCall, settings: Settings) -> str | None:
        if len({operand.shape[0] for operand in call.operands}) > 1:
            return "batch sizes differ"
        q, k, v = (operand.shape[-3] for operand in call.operands)
        if call.enable_gqa and supports_gqa(settings):
            if requires_same_num_heads and k != v:
                return f"{k} key heads and {v} value heads"
            indivisible = q % k != 0 or (not requires_same_num_heads and q % v != 0)
            return f"{q} query heads are no multiple of {k} key and {v} value heads" if indivisible else None
        if q == k == v or (settings.torch_version >= (2, 14) and q > 0 and k == v == 1):
            return None
        return "grouped-query attention is not supported" if call.enable_gqa else f"{q} query, {k} key and {v} value heads"

    return check_batch_size_and_num_heads_dense


def _check_dtype(allowed: Callable[[Settings], Sequence[torch.dtype]]) -> Rule:
    def check_tensor_dtype(call: AttentionCall, settings: Settings) -> str | None:
        dtypes = {operand.dtype for operand in call.operands}
        if len(dtypes) == 1 and call.query.dtype in allowed(settings):
            return None
        return f"dtype {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"

    return check_tensor_dtype


def _check_sm_version(lowest: tuple[int, int]) -> Rule:
    def check_hardware_support(_: AttentionCall, settings: Settings) -> str | None:
        return None if lowest <= settings.capability <= (12, 1) else f"not for {_sm(settings)}"

    return check_hardware_support


def _low_precision(settings: Settings) -> Sequence[torch.dtype]:
    """`check_dtypes_low_precision`."""
    return _HALVES if settings.capability >= (8, 0) else (torch.float16,)


# Flash attention.


def _check_for_attn_mask(call: AttentionCall, _: Settings) -> str | None:
    return None if call.mask is None else "an attention mask is given"


def _check_head_dim_size_flash(call: AttentionCall, _: Settings) -> str | None:
    sizes = {operand.shape[-1] for operand in call.operands}
    if len(sizes) > 1:
        return "head sizes differ"
    return f"head size {max(sizes)} is over 256" if max(sizes) > 256 else None


def _check_backward_head_dim(call: AttentionCall, settings: Settings) -> str | None:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    few_registers = (8, 6) <= settings.capability <= (8, 9) or (12, 0) <= settings.capability <= (12, 1)
    head_dim = call.query.shape[-1]
    unsupported = 192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0)
    return f"no backward for head size {head_dim} on {_sm(settings)}" if call.requires_grad and few_registers and unsupported else None


def _check_flash_causal_non_square_seqlens(call: AttentionCall, _: Settings) -> str | None:
    q, k = call.query.shape[-2], call.key.shape[-2]
    return f"causal with {q} queries and {k} keys" if call.is_causal and q != k else None


def _check_flash_grid_size(call: AttentionCall, settings: Settings) -> str | None:
    """`check_flash_attention_grid_size` (since 2.15)."""
    return "batch size or heads over 65535" if settings.torch_version >= (2, 15) and max(call.query.shape[:2]) > 65535 else None


# Memory-efficient attention.


def _minimum_gemm_alignment(call: AttentionCall, settings: Settings) -> int:
    """Elements that the CUTLASS kernels read at once (`minimum_gemm_alignment`)."""
    half = call.query.dtype in _HALVES
    tensor_cores = settings.capability >= (8, 0) or (settings.capability >= (7, 0) and half)
    least = 4 if settings.capability >= (8, 0) else 1
    return max(least, 128 // (16 if half else 32)) if tensor_cores else least


def _check_head_dim_size_mem_efficient(call: AttentionCall, settings: Settings) -> str | None:
    q, k, v = (operand.shape[-1] for operand in call.operands)
    alignment = _minimum_gemm_alignment(call, settings)
    if q != k:
        return "head sizes of query and key differ"
    return None if q > 0 and v > 0 and q % alignment == v % alignment == 0 else f"head sizes {q} and {v} are no multiples of {alignment}"


def _check_data_ptr_alignment_mem_efficient(call: AttentionCall, settings: Settings) -> str | None:
    """Since 2.13: storage offsets must be aligned too; the allocator aligns the storages themselves."""
    if settings.torch_version < (2, 13) or settings.capability < (8, 0):
        return None
    alignment = _minimum_gemm_alignment(call, settings)
    aligned = all(operand.storage_offset % alignment == 0 or 0 in operand.shape for operand in call.operands)
    return None if aligned else f"a storage offset is no multiple of {alignment}"


def _efficient_dtypes(settings: Settings) -> Sequence[torch.dtype]:
    return (torch.float16, torch.float32, torch.bfloat16) if settings.capability >= (8, 0) else (torch.float16, torch.float32)


# cuDNN attention.


def _check_cudnn_version(call: AttentionCall, settings: Settings) -> str | None:
    version = settings.cudnn_version
    if version is None or version < 90000:
        return "no cuDNN 9"
    return f"cuDNN {version} has no dropout" if call.dropout_p > 0 and 91100 < version < 91400 else None


def _check_cudnn_deterministic(_: AttentionCall, settings: Settings) -> str | None:
    return "not deterministic" if settings.deterministic else None


def _check_attn_mask_shape(call: AttentionCall, _: Settings) -> str | None:
    mask = call.mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "the mask requires a gradient"
    (batch, heads, queries), keys = call.query.shape[:3], call.key.shape[2]
    shape = mask.shape
    fits = len(shape) >= 2 and shape[-2] in (1, queries) and shape[-1] in (1, keys)
    return None if fits and (len(shape) == 2 or (len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads))) else f"mask of shape {shape}"


def _check_cudnn_dropout(call: AttentionCall, settings: Settings) -> str | None:
    """Since 2.12."""
    whole = call.dropout_p * 16 % 1 == 0
    return None if whole or settings.torch_version < (2, 12) else f"dropout {call.dropout_p} is no multiple of 1/16"


def _check_cudnn_tensor_shapes(call: AttentionCall, settings: Settings) -> str | None:
    qk, v = call.query.shape[-1], call.value.shape[-1]
    limit = _cudnn_head_dim_limit(qk, v, settings)
    if settings.torch_version >= (2, 13) and max(call.query.shape[:2]) > 65535:
        return "batch size or heads over 65535"
    if max(qk, v) > limit:
        return f"head size {max(qk, v)} is over {limit}"
    if qk % 8 or v % 8:
        return f"head sizes {qk} and {v} are no multiples of 8"
    if call.key.shape[-2] == 1:
        return "one key only"
    return "one query only, with dropout" if call.query.shape[-2] == 1 and call.dropout_p != 0 else None


def _cudnn_head_dim_limit(qk: int, v: int, settings: Settings) -> int:
    version = settings.cudnn_version or 0
    if settings.torch_version < (2, 14):
        if settings.capability == (9, 0) and version >= 91000:
            return 256
        return 192 if settings.capability[0] == 10 and version >= 91100 and (qk, v) == (192, 128) else 128
    if _cudnn_takes_head_dim_256(settings):
        return 256
    newest = settings.capability == (9, 0) or settings.capability[0] == 10
    return 192 if newest and version >= 91100 and (qk, v) == (192, 128) else 128


def _cudnn_takes_head_dim_256(settings: Settings) -> bool:
    version = settings.cudnn_version or 0
    least = 92500 if settings.capability == (10, 7) else 92200
    return settings.torch_version >= (2, 14) and version > least and (settings.capability == (9, 0) or settings.capability[0] == 10)


def _check_cudnn_d256_bprop_head_dim(call: AttentionCall, settings: Settings) -> str | None:
    """Since 2.14."""
    if not call.requires_grad or not _cudnn_takes_head_dim_256(settings):
        return None
    qk, v = call.query.shape[-1], call.value.shape[-1]
    return None if max(qk, v) <= 128 or (qk, v) in ((192, 128), (256, 256)) else f"no backward for head sizes {qk} and {v}"


_RULES: Final[dict[SDPBackend, tuple[Rule, ...]]] = {
    FLASH: (
        _check_tensor_shapes,
        _check_for_attn_mask,
        _check_head_dim_size_flash,
        _check_sm_version((8, 0)),
        _check_backward_head_dim,
        _check_flash_causal_non_square_seqlens,
        _check_dtype(_low_precision),
        _check_batch_and_heads(supports_gqa=lambda _: True),
        _check_nonzero_sequence_lengths,
        _check_last_dim_stride(ignore_singleton_dim=True),
        _check_flash_grid_size,
    ),
    EFFICIENT: (
        _check_sm_version((5, 0)),
        _check_tensor_shapes,
        _check_head_dim_size_mem_efficient,
        _check_data_ptr_alignment_mem_efficient,
        _check_nonzero_sequence_lengths,
        _check_last_dim_stride(ignore_singleton_dim=False),
        _check_batch_and_heads(supports_gqa=lambda settings: settings.torch_version >= (2, 14)),
        _check_dtype(_efficient_dtypes),
    ),
    CUDNN: (
        _check_cudnn_version,
        _check_tensor_shapes,
        _check_cudnn_deterministic,
        _check_dtype(_low_precision),
        _check_attn_mask_shape,
        _check_sm_version((8, 0)),
        _check_cudnn_dropout,
        _check_nonzero_sequence_lengths,
        _check_last_dim_stride(ignore_singleton_dim=True),
        _check_batch_and_heads(supports_gqa=lambda _: True, requires_same_num_heads=False),
        _check_cudnn_tensor_shapes,
        _check_cudnn_d256_bprop_head_dim,
    ),
    MATH: (),
}


# --- the calls --------------------------------------------------------------------------------------------------------------


def attend(
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    override: SDPBackend | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` as it runs under `settings`: the kernel chosen there, and the tensors around it.

    Under autocast the inputs are cast first, as the autocast wrapper of this function does (`lower_precision_fp` in
    aten/src/ATen/autocast_mode.h); a leaf weight passed as an input is not put into autocast's weight cache.
    """
    if torch.is_autocast_enabled("cuda"):
        attn_mask = None if attn_mask is None else _lowered(attn_mask)  # C++ evaluates the wrapper's arguments last to first
        value, key, query = _lowered(value), _lowered(key), _lowered(query)
    _validate(query, key, value, attn_mask)
    call = AttentionCall(
        Operand.of(query),
        Operand.of(key),
        Operand.of(value),
        None if attn_mask is None else Operand.of(attn_mask),
        dropout_p,
        is_causal,
        enable_gqa,
        torch.is_grad_enabled(),
    )
    backend = attention_backend(call, settings, override).backend
    with _torch_kernels.without_autocast():
        if backend is not MATH and query.dim() == 3:
            mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
            return _KERNELS[backend](query[None], key[None], value[None], mask, dropout_p, is_causal, scale, enable_gqa)[0]
        return _KERNELS[backend](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _lowered(tensor: Tensor) -> Tensor:
    eligible = tensor.is_cuda and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cuda")) if eligible else tensor


def _validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """`validate_sdpa_input`."""
    tensors = (query, key, value)
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise RuntimeError(f"expected query, key and value of one dtype and device, got {', '.join(f'{t.dtype} on {t.device}' for t in tensors)}")
    if min(tensor.dim() for tensor in tensors) < 2:
        raise RuntimeError(f"expected query, key and value of at least 2 dimensions, got {', '.join(str(t.dim()) for t in tensors)}")
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


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: None, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool) -> Tensor:
    """Head sizes that are no multiple of 8 are padded with zeros, and the result is sliced (`pad_last_dim`, `post_process_flash_output`)."""
    head_dim = q.shape[-1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    padded = [torch.ops.aten.pad.default(tensor, [0, -head_dim % 8]) if head_dim % 8 else tensor for tensor in (q, k, v)]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head_dim] if out.shape[-1] != head_dim else out


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool) -> Tensor:
    """The mask becomes an additive one with strides that are multiples of 8, expanded to (batch, heads, queries, keys) (`preprocess_mask`)."""
    bias = _additive(mask, q.dtype, -math.inf)
    if bias is not None:
        if bias.stride(-1) != 1 or any(stride % 8 for stride in bias.stride()[:-1]):
            keys = bias.shape[-1]
            bias = torch.ops.aten.pad.default(bias, [0, 8 - keys % 8])[..., :keys]
        bias = bias.expand(*q.shape[:3], k.shape[2])
    wanted = (q, k, v) if bias is None or TORCH_VERSION < (2, 15) else (q, k, v, bias)  # the mask's gradient counts in 2.15, and did not in 2.11
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out: Tensor = kernel(q, k, v, bias, _requires_grad(*wanted), dropout_p, is_causal, scale=scale)[0]
    return out


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool) -> Tensor:
    """Blocked positions get float16's lowest number (`convert_boolean_attn_mask_cudnn`)."""
    bias = _additive(mask, q.dtype, -65504.0)
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out: Tensor = kernel(q, k, v, bias, _requires_grad(q, k, v), dropout_p, is_causal, False, scale=scale)[0]
    return out


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool) -> Tensor:
    """`_scaled_dot_product_attention_math`, written out.

    Torch's own composite adds the mask out of place when it sees tensor subclasses such as FakeTensors, one score
    matrix more than on a card. Halves are computed in float32 unless `allow_fp16_bf16_reduction_math_sdp`. The locals
    live as long as those of the C++ function, and the returned tuple's second half is made (and dropped) too.
    """
    bias = _additive(mask, query.dtype, -math.inf)
    dtype = query.dtype
    upcast = dtype in _HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    q, k, v = (tensor.to(torch.float32) if upcast else tensor for tensor in (query, key, value))
    factor = math.sqrt(abs(scale) if scale is not None else 1.0 / math.sqrt(q.shape[-1]))
    scaled = q * (-factor if scale is not None and scale < 0 else factor)
    if is_causal:
        if bias is not None:
            raise RuntimeError("expected either an attention mask or is_causal=True, got both")
        lower = torch.ones((scaled.shape[-2], k.shape[-2]), dtype=torch.bool, device=scaled.device).tril()
        bias = _additive(lower, scaled.dtype, -math.inf)
        del lower
    k_all, v_all = _repeated(scaled, k, v) if enable_gqa else (k, v)
    scores = torch.matmul(scaled, k_all.transpose(-2, -1) * factor)
    if bias is not None:
        scores.add_(bias)
    scores = torch.ops.aten._safe_softmax.default(scores, -1)
    if dropout_p > 0:
        scores = torch.dropout(scores, dropout_p, True)
    weights = scores.to(dtype)
    out = torch.matmul(scores, v_all).to(dtype)
    del weights
    return out


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`pre_process_group_query_attention_input`."""
    q, k, v = query.shape[-3], key.shape[-3], value.shape[-3]
    if q % k or q % v:
        raise RuntimeError(f"expected query heads that are a multiple of key and value heads, got {q}, {k} and {v}")
    if q == k == v:
        return key, value
    return key.repeat_interleave(q // k, dim=-3), value.repeat_interleave(q // v, dim=-3)


_KERNELS: Final[dict[SDPBackend, Callable[..., Tensor]]] = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: _math}
