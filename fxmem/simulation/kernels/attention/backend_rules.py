"""Which attention kernel the target card runs: torch's own checks, for a card that is not there.

Each rule below is one check of torch and bears its name:

- aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: `select_sdp_backend`, `priority_order`,
  `can_use_flash_attention`, `can_use_mem_efficient_attention`, `can_use_cudnn_attention`;
- aten/src/ATen/native/transformers/sdp_utils_cpp.h (in the wheel, under torch/include): the checks they share.

Assumptions. torch runs the decision on the card it finds; here it is run for a card that is not there, so the rules had
to be written again. They are those of torch 2.11, with later changes marked by the release that brought them (read off
the 2.12 to 2.15 wheels). Compared with torch's own C++, made to believe in a card of any compute capability: 24,000
random calls on 2.11 and 6,000 on 2.15 without a difference. Not modelled: what 2.15 asks of cuDNN older than 9.26 on
Hopper. Nested tensors are left to torch. External implementations (`torch.nn.attention.activate_flash_attention_impl`)
are taken for the built-in ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem._torch import kernels as torch_kernels
from fxmem._torch.common import TORCH_VERSION
from fxmem.errors import NoKernelError
from fxmem.hardware.releases import read_version
from fxmem.records.profile import Target
from fxmem.simulation.kernels.kernel_settings import cudnn_version, is_deterministic

# --- a call of `scaled_dot_product_attention` and its settings, as the choice of its kernel sees them -----------------


FLASH: Final = SDPBackend.FLASH_ATTENTION
EFFICIENT: Final = SDPBackend.EFFICIENT_ATTENTION
CUDNN: Final = SDPBackend.CUDNN_ATTENTION
MATH: Final = SDPBackend.MATH

DEFAULT_ORDER: Final = (FLASH, EFFICIENT, MATH, CUDNN)
"""`Context::sdp_priority_order` in aten/src/ATen/Context.h, less the backend of other devices."""

_CUDNN_FIRST: Final = (CUDNN, FLASH, EFFICIENT, MATH)
HALVES: Final = (torch.float16, torch.bfloat16)


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
    def describe(cls, tensor: Tensor) -> Operand:
        """Describe a tensor, real or fake."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, int(tensor.storage_offset()), tensor.requires_grad)


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
class AttentionSettings:
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
    on_math: Callable[[str], None] = field(default=lambda _: None, compare=False)
    """Told why a call that math runs is not another kernel's."""


class BackendChoice(NamedTuple):
    """The backend that runs, and why: what each backend before it in the order lacked."""

    backend: SDPBackend
    reason: str


def preferred_order(
    capability: tuple[int, int],
    torch_version: tuple[int, int],
    cudnn_version: int | None,
    *,
    deprioritized: bool = False,
) -> tuple[SDPBackend, ...]:
    """The order in which backends are tried when the program sets none (`check_prefer_cudnn_attention`).

    On Hopper and data-centre Blackwell cuDNN goes first, if it is newer than 9.15.0; the environment variable
    `TORCH_CUDNN_SDPA_DEPRIORITIZED=1` (`deprioritized`) turns that off. Since 2.13 every 9.x and 10.x card counts.
    """
    major, minor = capability
    hopper_or_blackwell = major in (9, 10) and (minor in (0, 3) or torch_version >= (2, 13))
    prefer_cudnn = not deprioritized and cudnn_version is not None and cudnn_version > 91500 and hopper_or_blackwell
    return _CUDNN_FIRST if prefer_cudnn else DEFAULT_ORDER


def order_of_this_process(
    capability: tuple[int, int], release: tuple[int, int] = TORCH_VERSION, cudnn_version: int | None = None
) -> tuple[SDPBackend, ...]:
    """`preferred_order` in this environment, of a release of torch with its cuDNN; by default of those here."""
    version: int | None = cudnn_version or torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return preferred_order(capability, release, version, deprioritized=deprioritized)


def read_settings(target: Target, unset: Collection[tuple[SDPBackend, ...]]) -> AttentionSettings:
    """This process's settings as they would be on a target.

    Args:
        target: a CUDA target with a compute capability.
        unset: the orders this process has when the program sets none. Any other was set by the program
            (`sdpa_kernel(..., set_priority=True)`), and holds on the card too.
    """
    cuda: Any = torch.backends.cuda
    enabled = {
        FLASH: cuda.flash_sdp_enabled(),
        EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        CUDNN: cuda.cudnn_sdp_enabled(),
        MATH: cuda.math_sdp_enabled(),
    }
    backends = {backend.value: backend for backend in DEFAULT_ORDER}
    current = tuple(backends[number] for number in torch_kernels.sdpa_order() if number in backends)
    capability = target.capability or (0, 0)
    release = read_version(target.torch) if target.torch else TORCH_VERSION
    version = cudnn_version(target) or None
    return AttentionSettings(
        capability=capability,
        torch_version=release,
        cudnn_version=version,
        order=order_of_this_process(capability, release, version) if current in unset else current,
        enabled=frozenset(backend for backend, is_enabled in enabled.items() if is_enabled),
        deterministic=is_deterministic(),
    )


# --- which attention kernel the target card runs: torch's own checks, for a card that is not there --------------------


def attention_backend(call: AttentionCall, settings: AttentionSettings) -> BackendChoice:
    """The first backend in the order whose rules the call meets (`select_sdp_backend`).

    Raises:
        NoKernelError: no enabled backend can run this call, where torch would raise too.
    """
    if settings.torch_version >= (2, 14):
        call = _add_batch(call)
    refusals: list[str] = []
    for backend in settings.order:
        name, refusal = str(backend.name).lower(), _refusal(backend, call, settings)
        if refusal is None:
            return BackendChoice(backend, "; ".join([*refusals, f"{name} runs"]))
        refusals.append(f"{name}: {refusal}")
    raise NoKernelError(
        "No available kernel. Aborting execution.\n"
        f"expected an attention kernel that can run this call on {_sm(settings)}; none of those enabled can: "
        f"{'; '.join(refusals)}. Allow another with torch.nn.attention.sdpa_kernel, or change the call."
    )


def can_run(backend: SDPBackend, call: AttentionCall, settings: AttentionSettings) -> bool:
    """Whether a call meets a backend's rules."""
    return _refusal(backend, call, settings) is None


def _sm(settings: AttentionSettings) -> str:
    return "sm{}{}".format(*settings.capability)


Rule = Callable[[AttentionCall, AttentionSettings], str | None]
"""A check: None when the call passes, else what it lacks."""


def _refusal(backend: SDPBackend, call: AttentionCall, settings: AttentionSettings) -> str | None:
    if backend not in settings.enabled:
        return "switched off"
    return next((refusal for rule in _RULES[backend] if (refusal := rule(call, settings)) is not None), None)


def _add_batch(call: AttentionCall) -> AttentionCall:
    """`normalize_unbatched_input` (since 2.14): three-dimensional inputs get a batch of one."""
    if any(len(operand.shape) != 3 for operand in call.operands):
        return call

    def add_batch_dim(operand: Operand) -> Operand:
        extra = 4 - len(operand.shape)
        return replace(operand, shape=(1,) * extra + operand.shape, stride=(0,) * extra + operand.stride)

    query, key, value = map(add_batch_dim, call.operands)
    return replace(
        call, query=query, key=key, value=value, mask=None if call.mask is None else add_batch_dim(call.mask)
    )


# Checks that several backends share.


def _check_tensor_shapes(call: AttentionCall, _: AttentionSettings) -> str | None:
    dims = [len(operand.shape) for operand in call.operands]
    return None if dims == [4, 4, 4] else f"query, key and value have {dims} dimensions, not 4"


def _check_nonzero_sequence_lengths(call: AttentionCall, _: AttentionSettings) -> str | None:
    return "a sequence is empty" if 0 in (call.query.shape[-2], call.key.shape[-2]) else None


def _check_last_dim_stride(ignore_singleton_dim: bool) -> Rule:
    def check_last_dim_stride_equals_1_dense(call: AttentionCall, _: AttentionSettings) -> str | None:
        is_dense = all(operand.stride[-1] == 1 for operand in call.operands)
        if not is_dense and not (ignore_singleton_dim and call.query.shape[-1] == 1):
            return "the last dimension of query, key or value is not dense"
        return "the mask's last dimension is not dense" if call.mask is not None and call.mask.stride[-1] != 1 else None

    return check_last_dim_stride_equals_1_dense


def _check_batch_and_heads(
    *, supports_gqa: Callable[[AttentionSettings], bool], requires_same_num_heads: bool = True
) -> Rule:
    def check_batch_size_and_num_heads_dense(call: AttentionCall, settings: AttentionSettings) -> str | None:
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
        heads = f"{q} query, {k} key and {v} value heads"
        return "grouped-query attention is not supported" if call.enable_gqa else heads

    return check_batch_size_and_num_heads_dense


def _check_dtype(allowed: Callable[[AttentionSettings], Sequence[torch.dtype]]) -> Rule:
    def check_tensor_dtype(call: AttentionCall, settings: AttentionSettings) -> str | None:
        dtypes = {operand.dtype for operand in call.operands}
        if len(dtypes) == 1 and call.query.dtype in allowed(settings):
            return None
        return f"dtype {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"

    return check_tensor_dtype


def _check_sm_version(lowest: tuple[int, int]) -> Rule:
    def check_hardware_support(_: AttentionCall, settings: AttentionSettings) -> str | None:
        return None if lowest <= settings.capability <= (12, 1) else f"not for {_sm(settings)}"

    return check_hardware_support


def _low_precision(settings: AttentionSettings) -> Sequence[torch.dtype]:
    """`check_dtypes_low_precision`."""
    return HALVES if settings.capability >= (8, 0) else (torch.float16,)


# Flash attention.


def _check_for_attn_mask(call: AttentionCall, _: AttentionSettings) -> str | None:
    return None if call.mask is None else "an attention mask is given"


def _check_head_dim_size_flash(call: AttentionCall, _: AttentionSettings) -> str | None:
    sizes = {operand.shape[-1] for operand in call.operands}
    if len(sizes) > 1:
        return "head sizes differ"
    return f"head size {max(sizes)} is over 256" if max(sizes) > 256 else None


def _check_backward_head_dim(call: AttentionCall, settings: AttentionSettings) -> str | None:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    few_registers = (8, 6) <= settings.capability <= (8, 9) or (12, 0) <= settings.capability <= (12, 1)
    head_dim = call.query.shape[-1]
    unsupported = 192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0)
    refused = call.requires_grad and few_registers and unsupported
    return f"no backward for head size {head_dim} on {_sm(settings)}" if refused else None


def _check_flash_causal_non_square_seqlens(call: AttentionCall, _: AttentionSettings) -> str | None:
    q, k = call.query.shape[-2], call.key.shape[-2]
    return f"causal with {q} queries and {k} keys" if call.is_causal and q != k else None


def _check_flash_grid_size(call: AttentionCall, settings: AttentionSettings) -> str | None:
    """`check_flash_attention_grid_size` (since 2.15)."""
    too_large = settings.torch_version >= (2, 15) and max(call.query.shape[:2]) > 65535
    return "batch size or heads over 65535" if too_large else None


# Memory-efficient attention.


def _minimum_gemm_alignment(call: AttentionCall, settings: AttentionSettings) -> int:
    """Elements that the CUTLASS kernels read at once (`minimum_gemm_alignment`)."""
    half = call.query.dtype in HALVES
    tensor_cores = settings.capability >= (8, 0) or (settings.capability >= (7, 0) and half)
    least = 4 if settings.capability >= (8, 0) else 1
    return max(least, 128 // (16 if half else 32)) if tensor_cores else least


def _check_head_dim_size_mem_efficient(call: AttentionCall, settings: AttentionSettings) -> str | None:
    q, k, v = (operand.shape[-1] for operand in call.operands)
    alignment = _minimum_gemm_alignment(call, settings)
    if q != k:
        return "head sizes of query and key differ"
    aligned = q > 0 and v > 0 and q % alignment == v % alignment == 0
    return None if aligned else f"head sizes {q} and {v} are no multiples of {alignment}"


def _check_data_ptr_alignment_mem_efficient(call: AttentionCall, settings: AttentionSettings) -> str | None:
    """Since 2.13: storage offsets must be aligned too; the allocator aligns the storages themselves."""
    if settings.torch_version < (2, 13) or settings.capability < (8, 0):
        return None
    alignment = _minimum_gemm_alignment(call, settings)
    aligned = all(operand.storage_offset % alignment == 0 or 0 in operand.shape for operand in call.operands)
    return None if aligned else f"a storage offset is no multiple of {alignment}"


# cuDNN attention.


def _check_cudnn_version(call: AttentionCall, settings: AttentionSettings) -> str | None:
    version = settings.cudnn_version
    if version is None or version < 90000:
        return "no cuDNN 9"
    return f"cuDNN {version} has no dropout" if call.dropout_p > 0 and 91100 < version < 91400 else None


def _check_cudnn_deterministic(_: AttentionCall, settings: AttentionSettings) -> str | None:
    return "not deterministic" if settings.deterministic else None


def _check_attn_mask_shape(call: AttentionCall, _: AttentionSettings) -> str | None:
    mask = call.mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "the mask requires a gradient"
    (batch, heads, queries), keys = call.query.shape[:3], call.key.shape[2]
    shape = mask.shape
    fits = len(shape) >= 2 and shape[-2] in (1, queries) and shape[-1] in (1, keys)
    fits &= len(shape) == 2 or (len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads))
    return None if fits else f"mask of shape {shape}"


def _check_cudnn_dropout(call: AttentionCall, settings: AttentionSettings) -> str | None:
    """Since 2.12."""
    whole = call.dropout_p * 16 % 1 == 0
    return None if whole or settings.torch_version < (2, 12) else f"dropout {call.dropout_p} is no multiple of 1/16"


def _check_cudnn_tensor_shapes(call: AttentionCall, settings: AttentionSettings) -> str | None:
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


def _cudnn_head_dim_limit(qk: int, v: int, settings: AttentionSettings) -> int:
    version, is_hopper = settings.cudnn_version or 0, settings.capability == (9, 0)
    before_2_14 = settings.torch_version < (2, 14)
    if _cudnn_takes_head_dim_256(settings) or (before_2_14 and is_hopper and version >= 91000):
        return 256
    takes_192 = settings.capability[0] == 10 or (is_hopper and not before_2_14)
    return 192 if takes_192 and version >= 91100 and (qk, v) == (192, 128) else 128


def _cudnn_takes_head_dim_256(settings: AttentionSettings) -> bool:
    least = 92500 if settings.capability == (10, 7) else 92200
    takes = settings.capability == (9, 0) or settings.capability[0] == 10
    return settings.torch_version >= (2, 14) and (settings.cudnn_version or 0) > least and takes


def _check_cudnn_d256_bprop_head_dim(call: AttentionCall, settings: AttentionSettings) -> str | None:
    """Since 2.14."""
    if not call.requires_grad or not _cudnn_takes_head_dim_256(settings):
        return None
    qk, v = call.query.shape[-1], call.value.shape[-1]
    has_backward = max(qk, v) <= 128 or (qk, v) in ((192, 128), (256, 256))
    return None if has_backward else f"no backward for head sizes {qk} and {v}"


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
        _check_dtype(lambda settings: (*_low_precision(settings), torch.float32)),
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
