"""A call of `scaled_dot_product_attention` and its settings, as the choice of its kernel sees them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem._torch import kernels as torch_kernels
from fxmem._torch.common import TORCH_VERSION
from fxmem.hardware.releases import read_version
from fxmem.records.profile import Target
from fxmem.simulation.kernels.kernel_settings import cudnn_version, is_deterministic

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
