"""Single operators as models of their own, so that their logs show every buffer a kernel takes and nothing else.

Operands are the model's parameters: a step without an optimizer gives each a gradient and begins anew without it. The
loss hands the operator a gradient of ones, whatever its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.accuracy.cases import Case

__all__ = ["Operator", "gradient_of_ones", "probes"]

_Held = Callable[[], Mapping[str, torch.Tensor]]
"""Makes the indices and masks of an operator."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Operator(nn.Module):
    """An operator on operands of its own."""

    def __init__(
        self,
        call: Callable[..., Any],
        operands: Sequence[torch.Tensor],
        *,
        held: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.operands = nn.ParameterList(nn.Parameter(tensor) for tensor in operands)
        self.call = call  # a module becomes a submodule
        for name, tensor in (held or {}).items():
            self.register_buffer(name, tensor)

    def forward(self) -> torch.Tensor:
        """The operator's first result. Indices and masks are arguments by name."""
        held = dict(self.named_buffers(recurse=False))
        found = self.call(*self.operands, **held)
        return found[0] if isinstance(found, tuple) else found


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(out)
        return out.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return torch.ones_like(out)


def gradient_of_ones(out: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient with respect to `out` is one everywhere, and which computes nothing."""
    made: torch.Tensor = _Ones.apply(out)
    return made


def probes(case: Case, device: Literal["meta", "cpu"], *, tiny: bool = False) -> dict[str, Callable[[], Operator]]:
    """By name, what builds each operator of a case of the family `ops`.

    Args:
        case: its `kw` give the dtype, and for convolutions the layers.
        device: `meta` for a prediction, `cpu` for values.
        tiny: sizes a CPU takes no time for.
    """
    dtype = _DTYPES[case.kw["dtype"]]
    if case.model == "convs":
        return dict(_convolutions(case, dtype, device, 2 if tiny else 32))
    return _Misc(dtype, device, tiny).probes()


def _convolutions(case: Case, dtype: torch.dtype, device: str, batch: int) -> Any:
    layout = torch.channels_last if case.channels_last else torch.contiguous_format

    def make(channels: int, out: int, kernel: int, stride: int, size: int) -> Operator:
        module = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False, device=device, dtype=dtype).to(
            memory_format=layout
        )
        x = torch.randn(batch, channels, size, size, device=device, dtype=dtype).to(memory_format=layout)
        return Operator(module, [x])

    for channels, out, kernel, stride, size in case.kw["layers"]:
        yield (
            f"{channels}>{out} {kernel}x{kernel}/{stride} @{size}",
            functools.partial(make, channels, out, kernel, stride, size),
        )


class _Misc:
    """Operators of transformers, vision and audio models at sizes of a middling layer."""

    def __init__(self, dtype: torch.dtype, device: str, tiny: bool) -> None:
        self.dtype, self.device = dtype, device
        self.batch, self.tokens, self.heads, self.width = (1, 64, 2, 64) if tiny else (4, 2048, 16, 64)

    def probes(self) -> dict[str, Callable[[], Operator]]:
        """All of them."""
        return {**self._pointwise_and_norms(), **self._indexed(), **self._spatial(), **self._recurrent_and_attention()}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _module(self, module: Callable[..., nn.Module], *shape: int) -> Callable[[], Operator]:
        def make() -> Operator:
            return Operator(module(), [self._normal(*shape)])

        return make

    def _function(
        self,
        call: Callable[..., Any],
        *shapes: Sequence[int],
        held: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> Callable[[], Operator]:
        return lambda: Operator(call, [self._normal(*shape) for shape in shapes], held=held() if held else None)

    def _pointwise_and_norms(self) -> dict[str, Callable[[], Operator]]:
        b, s, h, d = self.batch, self.tokens, self.heads, self.width
        on = {"device": self.device, "dtype": self.dtype}
        return {
            "linear+bias": self._module(lambda: nn.Linear(1024, 4096, **on), b, s, 1024),
            "linear": self._module(lambda: nn.Linear(1024, 4096, bias=False, **on), b, s, 1024),
            "matmul": self._function(torch.matmul, (b, h, s, d), (b, h, d, s)),
            "layer_norm": self._module(lambda: nn.LayerNorm(1024, **on), b, s, 1024),
            "rms_norm": self._module(lambda: nn.RMSNorm(1024, **on), b, s, 1024),
            "group_norm": self._module(lambda: nn.GroupNorm(32, 256, **on), 8, 256, 64, 64),
            "batch_norm": self._module(lambda: nn.BatchNorm2d(256, **on), 8, 256, 64, 64),
            "softmax": self._function(lambda x: F.softmax(x, -1), (b, h, s, 512)),
            "gelu": self._function(F.gelu, (b, s, 4096)),
            "dropout": self._function(lambda x: F.dropout(x, 0.1), (b, s, 1024)),
        }

    def _indexed(self) -> dict[str, Callable[[], Operator]]:
        b, s = self.batch, self.tokens

        def below(high: int, *shape: int) -> _Held:
            return lambda: {"index": torch.randint(high, shape, device=self.device)}

        return {
            "embedding": self._function(lambda w, index: F.embedding(index, w), (32000, 1024), held=below(32000, b, s)),
            "cross_entropy": self._function(
                lambda x, index: F.cross_entropy(x, index).reshape(1), (b * s, 32000), held=below(32000, b * s)
            ),
            "index_put-gather": self._function(
                lambda x, index: torch.gather(x, 1, index[..., None].expand(-1, -1, 64)),
                (b, s, 64),
                held=below(s, b, s),
            ),
            "cumsum": self._function(lambda x: x.cumsum(1), (b, s, 1024)),
            "sort": self._function(lambda x: x.sort(-1)[0], (b, s, 256)),
            "topk": self._function(lambda x: x.topk(8, -1)[0], (b, s, 256)),
        }

    def _spatial(self) -> dict[str, Callable[[], Operator]]:
        on = {"device": self.device, "dtype": self.dtype}
        return {
            "max_pool": self._module(lambda: nn.MaxPool2d(3, 2, 1), 8, 64, 112, 112),
            "adaptive_avg_pool": self._module(lambda: nn.AdaptiveAvgPool2d(7), 8, 512, 28, 28),
            "interpolate": self._function(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (8, 64, 56, 56)),
            "conv_transpose": self._module(lambda: nn.ConvTranspose2d(256, 128, 2, 2, **on), 8, 256, 28, 28),
            "depthwise": self._module(lambda: nn.Conv2d(256, 256, 3, padding=1, groups=256, **on), 8, 256, 56, 56),
            "conv1d": self._module(lambda: nn.Conv1d(256, 256, 3, padding=1, **on), 8, 256, 3000),
            "conv3d": self._module(lambda: nn.Conv3d(64, 64, 3, padding=1, **on), 2, 64, 8, 56, 56),
        }

    def _recurrent_and_attention(self) -> dict[str, Callable[[], Operator]]:
        b, s, h, d = self.batch, self.tokens, self.heads, self.width
        on = {"device": self.device, "dtype": self.dtype}
        qkv = ((b, h, s, d),) * 3
        grouped = ((b, h, s, d), *((b, max(1, h // 4), s, d),) * 2)
        attention = F.scaled_dot_product_attention
        found = {
            "lstm": self._module(lambda: nn.LSTM(256, 512, 2, batch_first=True, **on), 8, 128, 256),
            "gru": self._module(lambda: nn.GRU(256, 512, batch_first=True, **on), 8, 128, 256),
            "sdpa": self._function(attention, *qkv),
            "sdpa-causal": self._function(lambda q, k, v: attention(q, k, v, is_causal=True), *qkv),
            "sdpa-dropout": self._function(lambda q, k, v: attention(q, k, v, dropout_p=0.1), *qkv),
            "sdpa-mask": self._function(
                lambda q, k, v, mask: attention(q, k, v, attn_mask=mask),
                *qkv,
                held=lambda: {"mask": torch.zeros(b, 1, s, s, **on)},
            ),
            "sdpa-gqa": self._function(lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True), *grouped),
            "mha-module": self._self_attention,
        }
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        ):
            found[f"sdpa-{backend.name}"] = self._function(functools.partial(_attention_by, backend), *qkv)
        return found

    def _self_attention(self) -> Operator:
        module = _SelfAttention(nn.MultiheadAttention(1024, 16, batch_first=True, device=self.device, dtype=self.dtype))
        return Operator(module, [self._normal(self.batch, self.tokens, 1024)])


class _SelfAttention(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found


def _attention_by(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
