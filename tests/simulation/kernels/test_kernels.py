"""Which kernels the target would run, on a machine that need not have a GPU."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem._torch.common import TORCH_VERSION
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware.catalogue import target
from fxmem.records.profile import Kind, Target
from fxmem.simulation.kernels import card_emulation, recurrent
from fxmem.simulation.kernels.attention.backend_rules import (
    DEFAULT_ORDER,
    AttentionCall,
    AttentionSettings,
    Operand,
    attention_backend,
    preferred_order,
)
from fxmem.simulation.kernels.attention.backends import attend
from tests import ROOT

FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100, A100, T4 = target("h100"), target("a100"), target("t4")


class Ops(TorchDispatchMode):
    """Remembers every op: its name, and shape, dtype and strides of each tensor it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(
            (
                str(func),
                [(tuple(t.shape), t.dtype, t.stride()) for t in tree_leaves(result) if isinstance(t, torch.Tensor)],
            )
        )
        return result

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def outputs(self, name: str) -> list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]]:
        (found,) = (outputs for called, outputs in self.calls if called == name)
        return found


@contextmanager
def on(card: Target) -> Iterator[FakeTensorMode]:
    """Fake CUDA tensors, and torch answering for a card."""
    with card_emulation.target_kernels(card), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def cuda(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def on_cuda(model: nn.Module) -> nn.Module:
    """Put fake CUDA tensors in place of a meta model's parameters and buffers."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(
                    module,
                    name,
                    nn.Parameter(
                        torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cuda")
                    ),
                )
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                setattr(
                    module, name, torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cuda")
                )
    return model


# --- which attention backend ------------------------------------------------------------------------------------------


def operand(
    *shape: int, dtype: torch.dtype = BF16, stride: tuple[int, ...] | None = None, offset: int = 0, grad: bool = False
) -> Operand:
    dense = tuple(torch.empty(shape, device="meta").stride())
    return Operand(shape, dense if stride is None else stride, dtype, offset, grad)


def call(
    *,
    q: tuple[int, ...] = (2, 8, 64, 64),
    k: tuple[int, ...] | None = None,
    v: tuple[int, ...] | None = None,
    dtype: torch.dtype = BF16,
    grad: bool = True,
    mask: Operand | None = None,
    **rest: Any,
) -> AttentionCall:
    key = q if k is None else k
    value = key if v is None else v
    return AttentionCall(*(operand(*shape, dtype=dtype, grad=grad) for shape in (q, key, value)), mask, **rest)


def grouped(k: tuple[int, ...] = (2, 2, 64, 64), **rest: Any) -> AttentionCall:
    return call(k=k, v=(2, 2, 64, 64), enable_gqa=True, **rest)


def on_sm(
    major: int, minor: int = 0, version: tuple[int, int] = (2, 11), cudnn: int | None = 91900, **rest: Any
) -> AttentionSettings:
    rest.setdefault("order", preferred_order((major, minor), version, cudnn))
    return AttentionSettings((major, minor), version, cudnn, **rest)


MASK = operand(64, 64, dtype=torch.bool)
TABLE: list[tuple[str, AttentionCall, AttentionSettings, SDPBackend, str]] = [
    # id, call, settings, what runs, a part of the reason
    ("halves on Ampere", call(), on_sm(8), FLASH, "flash_attention runs"),
    ("halves on Hopper", call(), on_sm(9), CUDNN, "cudnn_attention runs"),
    ("halves on Blackwell", call(), on_sm(10), CUDNN, "cudnn_attention runs"),
    ("halves on consumer Blackwell", call(), on_sm(12), FLASH, "flash_attention runs"),
    ("Hopper with an old cuDNN", call(), on_sm(9, cudnn=91002), FLASH, "flash_attention runs"),
    ("Hopper with no cuDNN", call(), on_sm(9, cudnn=None), FLASH, "flash_attention runs"),
    ("float16 on Turing", call(dtype=FP16), on_sm(7, 5), EFFICIENT, "flash_attention: not for sm75"),
    ("bfloat16 on Turing", call(), on_sm(7, 5), MATH, "efficient_attention: dtype bfloat16"),
    ("float32", call(dtype=FP32), on_sm(9), EFFICIENT,
     "cudnn_attention: dtype float32; flash_attention: dtype float32"),
    ("float64", call(dtype=torch.float64), on_sm(8), MATH, "efficient_attention: dtype float64"),
    ("a mask", call(mask=MASK), on_sm(8), EFFICIENT, "flash_attention: an attention mask is given"),
    ("a mask on Hopper", call(mask=MASK), on_sm(9), CUDNN, "cudnn_attention runs"),
    ("a mask that learns", call(mask=operand(64, 64, grad=True)), on_sm(9), EFFICIENT,
     "cudnn_attention: the mask requires a gradient"),
    ("a mask of three dimensions", call(mask=operand(8, 64, 64)), on_sm(9), EFFICIENT,
     "cudnn_attention: mask of shape (8, 64, 64)"),
    ("a mask with strides", call(mask=operand(64, 64, stride=(1, 64))), on_sm(8), MATH,
     "efficient_attention: the mask's last dimension is not dense"),
    ("grouped queries", grouped(), on_sm(8), FLASH, "flash_attention runs"),
    ("grouped queries in float32", grouped(dtype=FP32), on_sm(8), MATH,
     "efficient_attention: grouped-query attention is not supported"),
    ("grouped queries, other values", grouped(k=(2, 4, 64, 64)), on_sm(8), MATH,
     "flash_attention: 4 key heads and 2 value heads"),
    ("the same for cuDNN", grouped(k=(2, 4, 64, 64)), on_sm(9), CUDNN, "cudnn_attention runs"),
    ("heads that do not divide", call(k=(2, 3, 64, 64), enable_gqa=True), on_sm(8), MATH,
     "8 query heads are no multiple of 3"),
    ("fewer heads, unsaid", call(k=(2, 2, 64, 64)), on_sm(8), MATH,
     "flash_attention: 8 query, 2 key and 2 value heads"),
    ("batch sizes that differ", call(k=(1, 8, 64, 64)), on_sm(8), MATH, "batch sizes differ"),
    ("causal, unequal lengths", call(k=(2, 8, 32, 64), is_causal=True), on_sm(8), EFFICIENT,
     "flash_attention: causal with 64 queries and 32 keys"),
    ("head size 20", call(q=(2, 8, 64, 20)), on_sm(8), FLASH, "flash_attention runs"),
    ("head size 20 on Hopper", call(q=(2, 8, 64, 20)), on_sm(9), FLASH,
     "cudnn_attention: head sizes 20 and 20 are no multiples of 8"),
    ("head size 264", call(q=(2, 8, 64, 264)), on_sm(8), EFFICIENT, "flash_attention: head size 264 is over 256"),
    ("head size 256 on Hopper", call(q=(2, 8, 64, 256)), on_sm(9), CUDNN, "cudnn_attention runs"),
    ("head size 256 on Blackwell", call(q=(2, 8, 64, 256)), on_sm(10), FLASH,
     "cudnn_attention: head size 256 is over 128"),
    ("latent attention on Blackwell", call(q=(2, 8, 64, 192), v=(2, 8, 64, 128)), on_sm(10), CUDNN,
     "cudnn_attention runs"),
    ("latent attention on Ampere", call(q=(2, 8, 64, 192), v=(2, 8, 64, 128)), on_sm(8), EFFICIENT,
     "flash_attention: head sizes differ"),
    ("head size 20, float32", call(q=(2, 8, 64, 20), dtype=FP32), on_sm(8), EFFICIENT, "efficient_attention runs"),
    ("head size 18, float32", call(q=(2, 8, 64, 18), dtype=FP32), on_sm(8), MATH,
     "efficient_attention: head sizes 18 and 18 are no multiples of 4"),
    ("head size 18, float32, Pascal", call(q=(2, 8, 64, 18), dtype=FP32), on_sm(6), EFFICIENT,
     "efficient_attention runs"),
    ("head size 20, float16, Volta", call(q=(2, 8, 64, 20), dtype=FP16), on_sm(7), MATH, "no multiples of 8"),
    ("head size 200, training on sm89", call(q=(2, 8, 64, 200)), on_sm(8, 9), EFFICIENT,
     "flash_attention: no backward for head size 200 on sm89"),
    ("head size 200, no gradients", call(q=(2, 8, 64, 200), grad=False), on_sm(8, 9), FLASH, "flash_attention runs"),
    ("head size 200 under no_grad", call(q=(2, 8, 64, 200), grad_enabled=False), on_sm(8, 9), FLASH,
     "flash_attention runs"),
    ("head size 200, training on sm80", call(q=(2, 8, 64, 200)), on_sm(8), FLASH, "flash_attention runs"),
    ("head size 256, training on sm120", call(q=(2, 8, 64, 256)), on_sm(12), FLASH, "flash_attention runs"),
    ("the same with dropout", call(q=(2, 8, 64, 256), dropout_p=0.1), on_sm(12), EFFICIENT,
     "flash_attention: no backward for head size 256 on sm120"),
    ("one key", call(q=(2, 8, 1, 64)), on_sm(9), FLASH, "cudnn_attention: one key only"),
    ("one query with dropout", call(q=(2, 8, 1, 64), k=(2, 8, 64, 64), dropout_p=0.1), on_sm(9), FLASH,
     "cudnn_attention: one query only, with dropout"),
    ("no keys", call(k=(2, 8, 0, 64)), on_sm(9), MATH, "flash_attention: a sequence is empty"),
    ("three dimensions", call(q=(8, 64, 64)), on_sm(8), MATH, "query, key and value have [3, 3, 3] dimensions, not 4"),
    ("deterministic", call(), on_sm(9, deterministic=True), FLASH, "cudnn_attention: not deterministic"),
    ("dropout with cuDNN 9.12", call(dropout_p=0.1), on_sm(9, cudnn=91200, order=(CUDNN, FLASH)), FLASH,
     "cudnn_attention: cuDNN 91200 has no dropout"),
    ("flash switched off", call(), on_sm(8, enabled=frozenset({EFFICIENT, MATH})), EFFICIENT,
     "flash_attention: switched off"),
    ("math first", call(), on_sm(8, order=(MATH, FLASH)), MATH, "math runs"),
    # later releases
    ("any Hopper or Blackwell since 2.13", call(), on_sm(10, 1, version=(2, 13)), CUDNN, "cudnn_attention runs"),
    ("not so before", call(), on_sm(10, 1, version=(2, 12)), FLASH, "flash_attention runs"),
    ("dropout 0.1 since 2.12", call(dropout_p=0.1), on_sm(9, version=(2, 12)), FLASH,
     "cudnn_attention: dropout 0.1 is no multiple of 1/16"),
    ("dropout 1/8 since 2.12", call(dropout_p=0.125), on_sm(9, version=(2, 12)), CUDNN, "cudnn_attention runs"),
    ("huge batch since 2.13", call(q=(65536, 8, 64, 64)), on_sm(9, version=(2, 13)), FLASH,
     "cudnn_attention: batch size or heads over 65535"),
    ("huge batch since 2.15", call(q=(65536, 8, 64, 64)), on_sm(8, version=(2, 15)), EFFICIENT,
     "flash_attention: batch size or heads over 65535"),
    ("grouped queries in float32 since 2.14", grouped(dtype=FP32), on_sm(8, version=(2, 14)), EFFICIENT,
     "efficient_attention runs"),
    ("one shared head since 2.14", call(k=(2, 1, 64, 64)), on_sm(8, version=(2, 14)), FLASH, "flash_attention runs"),
    ("three dimensions since 2.14", call(q=(8, 64, 64)), on_sm(8, version=(2, 14)), FLASH, "flash_attention runs"),
    ("head size 256 since 2.14", call(q=(2, 8, 64, 256)), on_sm(10, version=(2, 14), cudnn=92400), CUDNN,
     "cudnn_attention runs"),
    ("head size 200 since 2.14", call(q=(2, 8, 64, 200)), on_sm(9, version=(2, 14), cudnn=92400), FLASH,
     "no backward for head sizes 200 and 200"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "settings", "expected", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_backend(made: AttentionCall, settings: AttentionSettings, expected: SDPBackend, reason: str) -> None:
    choice = attention_backend(made, settings)
    assert choice.backend is expected, choice.reason
    assert reason in choice.reason


def test_query_key_and_value_must_be_dense_in_the_last_dimension() -> None:
    packed = operand(2, 8, 64, 64, stride=(98304, 64, 1536, 1), offset=64)
    strided = operand(2, 8, 64, 64, stride=(32768, 4096, 1, 64))
    assert attention_backend(AttentionCall(packed, packed, packed), on_sm(8)).backend is FLASH
    refused = attention_backend(AttentionCall(packed, strided, packed), on_sm(8))
    assert refused.backend is MATH
    assert "flash_attention: the last dimension of query, key or value is not dense" in refused.reason


def test_since_2_13_storage_offsets_must_be_aligned_for_the_efficient_kernel() -> None:
    shifted = AttentionCall(*[operand(2, 8, 64, 64, dtype=FP32, offset=2)] * 3)
    assert attention_backend(shifted, on_sm(8)).backend is EFFICIENT
    assert attention_backend(shifted, on_sm(8, version=(2, 13))).backend is MATH
    assert attention_backend(shifted, on_sm(7, version=(2, 13))).backend is EFFICIENT


def recorded() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / "tests" / "golden" / "attention_backends.json").read_text(encoding="utf-8")
    )
    return rows


def test_the_choice_is_that_of_torch_itself() -> None:
    """Answers of torch 2.11's own `select_sdp_backend` with cuDNN 9.19, recorded on a machine with no GPU by telling it
    a compute capability."""

    def read(value: list[Any]) -> Operand:
        shape, stride, dtype, grad = value
        return Operand(tuple(shape), tuple(stride), getattr(torch, dtype), 0, grad)

    members = SDPBackend.__members__
    for row in recorded():
        sm = tuple(row["sm"])
        mask = read(row["mask"]) if "mask" in row else None
        options = (
            row.get("dropout", 0.0),
            row.get("causal", False),
            row.get("gqa", False),
            not row.get("no_grad", False),
        )
        made = AttentionCall(read(row["query"]), read(row["key"]), read(row["value"]), mask, *options)
        order = tuple(members[name] for name in row["order"]) if "order" in row else preferred_order(sm, (2, 11), 91900)
        enabled = frozenset(DEFAULT_ORDER) - {members[name] for name in row.get("off", [])}
        settings = AttentionSettings(sm, (2, 11), 91900, order, enabled, row.get("deterministic", False))
        if row["runs"] == "none":
            with pytest.raises(AnalysisError):
                attention_backend(made, settings)
        else:
            assert attention_backend(made, settings).backend is members[row["runs"]], row
    assert Counter(row["runs"] for row in recorded()).keys() == {
        "FLASH_ATTENTION",
        "EFFICIENT_ATTENTION",
        "CUDNN_ATTENTION",
        "MATH",
        "none",
    }


def test_when_nothing_can_run_the_reasons_are_all_there() -> None:
    with pytest.raises(
        AnalysisError, match=r"on sm75.*flash_attention: not for sm75.*cudnn_attention: dtype bfloat16"
    ) as raised:
        attention_backend(call(), on_sm(7, 5, enabled=frozenset({FLASH, CUDNN})))
    assert "math: switched off" in str(raised.value)
    assert "sdpa_kernel" in str(raised.value)


def test_cudnn_goes_first_on_hopper_unless_told_otherwise() -> None:
    assert preferred_order((9, 0), (2, 11), 91900) == (CUDNN, FLASH, EFFICIENT, MATH)
    assert (
        preferred_order((9, 0), (2, 11), 91900, deprioritized=True) == DEFAULT_ORDER == (FLASH, EFFICIENT, MATH, CUDNN)
    )


# --- what runs then ---------------------------------------------------------------------------------------------------


def attention_ops(ops: Ops) -> list[str]:
    return [name for name in ops.names if "attention" in name]


@pytest.mark.parametrize(("card", "kernel"), [(H100, "cudnn"), (A100, "flash"), (T4, None)], ids=["h100", "a100", "t4"])
def test_no_tensor_of_queries_times_keys_where_a_fused_kernel_runs(card: Target, kernel: str | None) -> None:
    length = 256
    with on(card), Ops() as ops:
        x = cuda(2, length, 8 * 64, grad=True)
        q, k, v = (x[..., : heads * 64].unflatten(-1, (heads, 64)).transpose(1, 2) for heads in (8, 2, 2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        node = out.grad_fn
        assert node is not None
        if kernel is not None:
            gradients = node(torch.empty_like(out))
            assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    squares = [name for name, outputs in ops.calls for shape, *_ in outputs if shape[-2:] == (length, length)]
    if kernel is None:
        assert squares
    else:
        assert not squares
        assert attention_ops(ops) == [
            f"aten._scaled_dot_product_{kernel}_attention.default",
            f"aten._scaled_dot_product_{kernel}_attention_backward.default",
        ]


def test_the_memory_efficient_kernel_and_its_backward() -> None:
    with on(A100), Ops() as ops:
        q = cuda(2, 8, 60, 64, dtype=FP32, grad=True)
        mask = cuda(2, 1, 60, 60, dtype=FP32, grad=True)
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        assert out.grad_fn is not None
        gradients = out.grad_fn(torch.empty_like(out))
    assert [g.shape for g in gradients] == [q.shape, q.shape, q.shape, (2, 8, 60, 60)]
    (_, lse, *_rest) = ops.outputs("aten._scaled_dot_product_efficient_attention.default")
    assert lse[0] == (2, 8, 64)  # padded to 32
    assert "aten.constant_pad_nd.default" in ops.names  # strides of 60 are no multiples of 8


def test_a_mask_of_aligned_strides_is_not_padded() -> None:
    with on(A100), Ops() as ops:
        q = cuda(2, 8, 64, 64)
        F.scaled_dot_product_attention(q, q, q, attn_mask=cuda(64, 64, dtype=torch.bool))
    assert "aten.constant_pad_nd.default" not in ops.names
    assert ops.outputs("aten.where.self") == [((64, 64), BF16, (64, 1))]


def test_flash_pads_the_head_size_and_slices_the_result() -> None:
    with on(A100), Ops() as ops:
        q = cuda(2, 8, 64, 20, grad=True)
        out = F.scaled_dot_product_attention(q, q, q)
    assert out.shape == q.shape
    assert [outputs[0][0] for name, outputs in ops.calls if name == "aten.constant_pad_nd.default"] == [
        (2, 8, 64, 24)
    ] * 3
    assert ops.outputs("aten._scaled_dot_product_flash_attention.default")[0][0] == (2, 8, 64, 24)
    assert "aten.slice.Tensor" in ops.names


def test_cudnn_keeps_no_log_sum_exp_where_nothing_wants_a_gradient() -> None:
    name = "aten._scaled_dot_product_cudnn_attention.default"
    with on(H100):
        q = cuda(2, 8, 64, 64, grad=True)
        with Ops() as training:
            F.scaled_dot_product_attention(q, q, q)
        with Ops() as inference, torch.no_grad():
            F.scaled_dot_product_attention(q, q, q)
        with Ops() as wide, torch.no_grad():
            F.scaled_dot_product_attention(q.transpose(1, 2).contiguous().transpose(1, 2), q, q[..., :32])
    assert ((2, 8, 64, 1), FP32, (512, 64, 1, 1)) in training.outputs(name)
    assert [(shape, dtype) for shape, dtype, _ in inference.outputs(name)] == [
        ((2, 8, 64, 64), BF16),
        ((), torch.int64),
        ((), torch.int64),
    ]
    assert wide.outputs(name)[0] == ((2, 8, 64, 32), BF16, (16384, 32, 256, 1))


def memory_events(run: Callable[[], Any]) -> list[int]:
    """Signed bytes of every allocation and free on the CPU, scalars left out; what is freed at the very end comes
    sorted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        run()
    events = [
        (event.start_ns(), event.nbytes())
        for event in trace.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    sizes = [nbytes for _, nbytes in sorted(events, key=lambda event: event[0]) if abs(nbytes) > 8]
    end = max(i for i, nbytes in enumerate(sizes) if nbytes > 0) + 1
    return sizes[:end] + sorted(sizes[end:])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"mask": torch.bool},
        {"mask": None},
        {"dropout_p": 0.3},
        {"scale": -0.5},
        {"scale": 2.0, "is_causal": True},
        {"gqa": True},
    ],
    ids=["plain", "causal", "boolean mask", "additive mask", "dropout", "negative scale", "scale", "grouped"],
)
def test_math_written_out_is_torchs_own_to_the_byte(dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = dict(options)
    heads = 2 if options.pop("gqa", False) else 4
    q = torch.randn(2, 4, 32, 16, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, heads, 48 if "mask" in options else 32, 16, dtype=dtype) for _ in range(2))
    mask = None
    if "mask" in options:
        mask = torch.rand(32, 48) > 0.5 if options.pop("mask") is torch.bool else torch.randn(32, 48, dtype=dtype)
    enable_gqa = heads == 2
    settings = AttentionSettings((8, 0), order=(MATH,))
    results: list[torch.Tensor] = []

    def original() -> None:
        torch.manual_seed(1)
        with sdpa_kernel(MATH):
            results.append(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=enable_gqa, **options))

    def ours() -> None:
        torch.manual_seed(1)
        results.append(attend(settings, q, k, v, mask, enable_gqa=enable_gqa, **options))

    original()  # whatever is allocated once only
    wanted, got = memory_events(original), memory_events(ours)
    assert got == wanted
    assert wanted
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_torch_would_refuse_is_refused() -> None:
    with on(A100):
        q = cuda(2, 8, 64, 64)
        with pytest.raises(RuntimeError, match="one dtype and device"):
            F.scaled_dot_product_attention(q, q.float(), q)
        with pytest.raises(RuntimeError, match="at least 2 dimensions"):
            F.scaled_dot_product_attention(q[0, 0, 0], q[0, 0, 0], q[0, 0, 0])
        with pytest.raises(RuntimeError, match="mask of dtype"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=cuda(64, 64, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="got both"), sdpa_kernel(MATH):
            F.scaled_dot_product_attention(q, q, q, attn_mask=cuda(64, 64), is_causal=True)
        with pytest.raises(RuntimeError, match="multiple of key and value heads"):
            F.scaled_dot_product_attention(q, q[:, :3], q[:, :3], enable_gqa=True)


def test_the_programs_own_switches_and_order_hold() -> None:
    with on(H100):
        q = cuda(2, 8, 64, 64)
        with Ops() as ops:
            with sdpa_kernel(EFFICIENT):
                F.scaled_dot_product_attention(q, q, q)
            with sdpa_kernel([FLASH, CUDNN], set_priority=True):
                F.scaled_dot_product_attention(q, q, q)
            with pytest.raises(AnalysisError), sdpa_kernel(FLASH):
                F.scaled_dot_product_attention(q.float(), q.float(), q.float())
            F.scaled_dot_product_attention(q, q, q)
    assert [name.split("_")[4] for name in attention_ops(ops)] == ["efficient", "flash", "cudnn"]


def test_the_environment_can_put_cudnn_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    with on(H100), Ops() as ops:
        q = cuda(2, 8, 64, 64)
        F.scaled_dot_product_attention(q, q, q)
    assert attention_ops(ops) == ["aten._scaled_dot_product_flash_attention.default"]
    (stated,) = card_emulation.assumptions(H100)
    assert "flash_attention, efficient_attention, math, cudnn_attention" in stated.text


def test_multi_head_attention_and_encoder_layers_take_the_same_way() -> None:
    with on(A100):
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device="cuda")
        x = cuda(2, 10, 64, dtype=FP32)
        with Ops() as ops, torch.no_grad():
            assert layer(x).shape == x.shape
        assert attention_ops(ops) == ["aten._scaled_dot_product_efficient_attention.default"]


def test_attention_of_inference_takes_kernels_of_its_own() -> None:
    """The blocks of an H200: the packed product, the attention, the projection; with weights, the way by hand."""
    made = {}
    for needs_weights in (False, True):
        attention = nn.MultiheadAttention(128, 4, batch_first=True).eval()
        x = torch.zeros(8, 64, 128)
        inputs = {"query": x, "key": x, "value": x, "need_weights": needs_weights}
        found = fxmem.analyze(attention, inputs, mode="infer", target="h200")
        own = [each for each in found.profile.storages if each.birth and each.kind is not Kind.WORKSPACE]
        made[needs_weights] = [storage.nbytes for storage in own]
    assert made[False] == [786_432, 262_144, 262_144]
    assert made[True][:3] == [786_432, 786_432, 524_288]


# --- the context ------------------------------------------------------------------------------------------------------

PATCHED = (
    *(
        (torch.cuda, name)
        for name in (
            "is_available",
            "device_count",
            "get_device_capability",
            "get_rng_state",
            "synchronize",
            "_exchange_device",
        )
    ),
    *(
        (torch.nn.functional, "scaled_dot_product_attention"),
        (torch, "lstm"),
        (torch._VF, "gru"),
        (torch.cuda.amp.common, "amp_definitely_not_available"),
    ),
    *((FakeTensorMode, "avoid_device_init"), (torch.backends.mha, "get_fastpath_enabled")),
)


def test_everything_is_put_back_also_after_an_error() -> None:
    from torch._subclasses import fake_impls

    before = [getattr(owner, name) for owner, name in PATCHED]
    implementations = dict(fake_impls.op_implementations_dict)
    changed = []

    def fail() -> None:
        with card_emulation.target_kernels(H100), card_emulation.target_kernels(A100):
            changed.extend(
                getattr(owner, name) is not original for (owner, name), original in zip(PATCHED, before, strict=True)
            )
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(changed)
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert dict(fake_impls.op_implementations_dict) == implementations
    assert "gru" not in vars(torch._VF)
    assert card_emulation.replacement(F.scaled_dot_product_attention) is None


def test_the_innermost_target_holds() -> None:
    with card_emulation.target_kernels(H100):
        with card_emulation.target_kernels(T4):
            assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_capability() == (9, 0)
        with card_emulation.target_kernels(target("cpu")):
            assert torch.cuda.get_device_capability() == (9, 0)


def test_a_cpu_target_changes_nothing() -> None:
    before = [getattr(owner, name) for owner, name in PATCHED]
    with card_emulation.target_kernels(target("cpu")):
        assert [getattr(owner, name) for owner, name in PATCHED] == before
        assert card_emulation.replacement(F.scaled_dot_product_attention) is None


def test_other_threads_see_torch_unchanged() -> None:
    found: list[Any] = []
    available, builtin = torch.cuda.is_available(), F.scaled_dot_product_attention
    with card_emulation.target_kernels(H100):

        def look() -> None:
            q = torch.ones(1, 1, 2, 4)
            found.extend(
                [
                    torch.cuda.is_available(),
                    card_emulation.replacement(builtin),
                    F.scaled_dot_product_attention(q, q, q).sum().item(),
                ]
            )

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [available, None, 8.0]


def test_a_target_without_capability_is_refused() -> None:
    with (
        pytest.raises(UsageError, match="compute capability"),
        card_emulation.target_kernels(Target(name="odd", device="cuda")),
    ):
        pass


class Watching(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return (card_emulation.replacement(func) or func)(*args, **(kwargs or {}))


def test_who_watches_calls_sees_torchs_own_functions_and_is_told_what_to_run() -> None:
    sdpa, lstm = F.scaled_dot_product_attention, torch.lstm
    with on(A100):
        q, x = cuda(2, 8, 64, 64), cuda(7, 3, 4, dtype=FP32)
        module = flat_rnn(nn.LSTM)
        with Ops() as ops, Watching() as mode:
            F.scaled_dot_product_attention(q, q, q)
            module(x)
    assert mode.seen.count(sdpa) == 1
    assert mode.seen.count(lstm) == 1
    assert {"aten._scaled_dot_product_flash_attention.default", "aten._cudnn_rnn.default"} <= set(ops.names)


def test_a_device_context_is_nobody_who_watches() -> None:
    with on(A100), torch.device("cuda"), Ops() as ops:
        q = torch.empty(2, 8, 64, 64, dtype=BF16)
        F.scaled_dot_product_attention(q, q, q)
    assert attention_ops(ops) == ["aten._scaled_dot_product_flash_attention.default"]


def test_real_tensors_are_left_to_torch() -> None:
    q = torch.randn(1, 2, 8, 4)
    expected = F.scaled_dot_product_attention(q, q, q)
    module = nn.LSTM(4, 8)
    x = torch.randn(5, 1, 4)
    state = module(x)[0]
    with card_emulation.target_kernels(H100):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected)
        assert torch.equal(card_emulation.scaled_dot_product_attention(q, q, q), expected)
        assert torch.equal(module(x)[0], state)
    assert torch.equal(card_emulation.scaled_dot_product_attention(q, q, q), expected)


# --- what torch.cuda answers ------------------------------------------------------------------------------------------


def test_torch_cuda_speaks_of_the_target() -> None:
    with card_emulation.target_kernels(H100):
        assert (torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()) == (True, 1, 0)
        assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability("cuda:0") == (9, 0)
        assert torch.cuda.get_device_name() == H100.full_name
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.minor, properties.total_memory) == (9, 0, H100.memory_bytes)
        assert properties.multi_processor_count == 132
        assert torch.cuda.mem_get_info() == (H100.memory_bytes, H100.memory_bytes)
        assert torch.cuda.is_bf16_supported(including_emulation=False)
        assert torch.cuda.is_tf32_supported()
    with card_emulation.target_kernels(T4):
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
        assert not torch.cuda.is_tf32_supported()


def test_what_would_reach_the_driver_does_not() -> None:
    with on(H100):
        x = cuda(2, 4)
        with torch.cuda.device(0), torch.cuda.device_of(x):
            torch.cuda.set_device(0)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
        with torch.random.fork_rng(), torch.random.fork_rng(devices=[0]):
            torch.manual_seed(0)
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.zeros(2).cuda().is_cuda
        assert torch.tensor([1.0], device="cuda").is_cuda


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_runs(use_reentrant: bool) -> None:
    with on(H100):
        x = cuda(2, 4, grad=True)
        out = checkpoint(lambda y: F.dropout(y.sin(), 0.5), x, use_reentrant=use_reentrant)
        assert out.grad_fn is not None


def test_autocast_is_on_and_nests() -> None:
    with on(A100):
        linear = nn.Linear(4, 4, device="cuda")
        x = cuda(2, 4, dtype=FP32)
        q = cuda(2, 8, 64, 64, dtype=FP32)
        with Ops() as ops, torch.autocast("cuda", dtype=BF16):
            assert linear(x).dtype == linear(x).dtype == BF16
            assert F.scaled_dot_product_attention(q, q, q).dtype is BF16
            with torch.autocast("cuda", enabled=False):
                assert linear(x).dtype is FP32
                assert F.scaled_dot_product_attention(q, q, q).dtype is FP32
            assert linear(x).dtype is BF16
        assert linear(x).dtype is FP32
    casts = [outputs[0][0] for name, outputs in ops.calls if name == "aten._to_copy.default"]
    assert casts.count((4, 4)) == casts.count((4,)) == 1  # the weight and the bias once, from the cache after that
    assert casts.count((2, 4)) == 3
    assert casts.count((2, 8, 64, 64)) == 3


def test_inside_attention_nothing_is_cast_again() -> None:
    with on(A100), torch.autocast("cuda", dtype=BF16), Ops() as ops, sdpa_kernel(MATH):
        q = cuda(2, 2, 16, 8, dtype=FP32)
        assert F.scaled_dot_product_attention(q, q, q).dtype is BF16
    assert {outputs[0][1] for name, outputs in ops.calls if name == "aten.bmm.default"} == {
        FP32
    }  # math computes in float32


def test_transformers_asks_anew_on_both_borders() -> None:
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    before = import_utils.is_torch_cuda_available()
    with card_emulation.target_kernels(H100):
        assert import_utils.is_torch_cuda_available()
    assert import_utils.is_torch_cuda_available() == before == torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_mixture_of_experts_takes_the_grouped_matrix_product(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=50,
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(dtype)
    with on(H100):
        on_cuda(model)
        ids = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        with Ops() as ops:
            model(input_ids=ids, labels=ids)
    grouped = [outputs[0][0] for name, outputs in ops.calls if name == "aten._grouped_mm.default"]
    assert grouped == [(64, 192), (64, 64)]  # 32 tokens, two experts each


def test_grouped_products_have_rows_of_sixteen_bytes() -> None:
    with on(H100), Ops() as ops:
        offs = torch.zeros(4, dtype=torch.int32, device="cuda")
        torch._grouped_mm(cuda(32, 8, dtype=FP32), cuda(4, 8, 6, dtype=FP32), offs=offs)
        torch._grouped_mm(cuda(8, 32, dtype=FP32), cuda(32, 8, dtype=FP32), offs=offs)
        torch._grouped_mm(cuda(4, 8, 16), cuda(4, 16, 8))
    made = [outputs[0] for name, outputs in ops.calls if name == "aten._grouped_mm.default"]
    assert made == [((32, 6), FP32, (8, 1)), ((4, 8, 8), FP32, (64, 8, 1)), ((4, 8, 8), BF16, (64, 8, 1))]


# --- recurrent modules ------------------------------------------------------------------------------------------------

CUDNN_ANSWERS = [
    # mode (0 relu, 1 tanh, 2 LSTM, 3 GRU), input, hidden, projection, layers, directions;
    # steps, batch, bytes per element, dropout; weight elements, reserve bytes
    (2, 256, 512, 0, 1, 1, 128, 8, 4, 0.0, 1576960, 10486016),
    (2, 256, 512, 0, 2, 2, 128, 8, 4, 0.2, 9453568, 46399744),
    (2, 100, 200, 0, 2, 1, 37, 5, 2, 0.0, 563200, 814272),
    (2, 110, 139, 0, 3, 2, 49, 11, 2, 0.5, 1210968, 5169952),
    (2, 256, 512, 128, 2, 2, 128, 8, 4, 0.0, 3424256, 56623360),
    (2, 67, 23, 16, 3, 2, 60, 9, 2, 0.5, 36248, 1106272),
    (3, 256, 512, 0, 2, 1, 128, 8, 4, 0.0, 2758656, 27263232),
    (3, 121, 229, 0, 3, 2, 13, 16, 2, 0.3, 2377020, 3858560),
    (1, 300, 650, 0, 1, 1, 50, 20, 4, 0.0, 618800, 2600256),
    (0, 17, 53, 0, 4, 2, 24, 7, 2, 0.3, 58830, 263008),
]


@pytest.mark.parametrize("row", CUDNN_ANSWERS, ids=lambda row: "-".join(map(str, row[:10])))
def test_sizes_are_those_cudnn_answers(row: tuple[Any, ...]) -> None:
    *shape, steps, batch, itemsize, dropout, weights, reserve = row
    recurrence = recurrent.Recurrence(*shape)
    assert recurrence.weight_elements == weights
    assert recurrence.reserve_bytes(steps * batch, itemsize, dropout) == reserve


def test_a_packed_sequence_has_the_reserve_that_cudnn_answers() -> None:
    """As asked of cuDNN 9.19 for rows in all, in the layout SEQ_MAJOR_PACKED and as padded: the same."""
    assert recurrent.Recurrence(2, 64, 96, 0, 2, 2).reserve_bytes(439, 4, 0.0) == 3_708_928
    assert recurrent.Recurrence(3, 40, 200, 0, 1, 2).reserve_bytes(450, 4, 0.0) == 4_320_256
    assert recurrent.Recurrence(2, 40, 64, 0, 1, 1).reserve_bytes(305, 4, 0.0) == 390_656


RNNS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"batch_first": True, "num_layers": 2, "bidirectional": True, "dropout": 0.2}),
    (nn.LSTM, {"proj_size": 3}),
    (nn.LSTM, {"proj_size": 3, "bias": False}),
    (nn.GRU, {"batch_first": True}),
    (nn.GRU, {"num_layers": 2, "bias": False}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {"nonlinearity": "tanh", "bidirectional": True}),
]


def flat_rnn(cls: type[nn.RNNBase], **options: Any) -> nn.RNNBase:
    module = on_cuda(cls(4, 8, device="meta", **options))
    recurrent.flatten_rnn_weights(module)
    assert isinstance(module, nn.RNNBase)
    return module


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("cls", "options"), RNNS, ids=[f"{cls.__name__} {options}" for cls, options in RNNS])
def test_recurrent_modules_run_forward_and_backward_through_cudnn(
    cls: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    batch_first = options.get("batch_first", False)
    expected = cls(4, 8, **options)(torch.randn(3, 7, 4) if batch_first else torch.randn(7, 3, 4))
    with on(H100):
        module = flat_rnn(cls, **options)
        x = cuda(*((3, 7, 4) if batch_first else (7, 3, 4)), dtype=FP32, grad=True)
        with Ops() as ops:
            result = module(x)
        for got, wanted in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        out = result[0]
        assert out.transpose(0, 1).is_contiguous() == batch_first  # cuDNN writes time first
        reserve, weights = ops.outputs("aten._cudnn_rnn.default")[-2:]
        assert reserve[0] > (7 * 3 * 8,)
        gradients = out.grad_fn.apply(torch.empty(out.shape, device="cuda"), None, None)
        given = [gradient for gradient in gradients if gradient is not None]
        assert given[0].shape == x.shape
        assert [g.shape for g in given[-len(list(module.parameters())) :]] == [p.shape for p in module.parameters()]
    storages = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    assert len(storages) == 1
    assert next(module.parameters()).untyped_storage().nbytes() == 4 * weights[0][0]
    shared = {gradient.untyped_storage()._cdata for gradient in given[-len(list(module.parameters())) :]}
    assert (len(shared) == 1) == options.get("bias", True)


def test_flattening_keeps_the_parameters_and_leaves_others_alone() -> None:
    with on(H100):
        model = on_cuda(nn.Sequential(nn.LSTM(4, 8, device="meta"), nn.Linear(8, 8, device="meta")))
        before = list(model.parameters())
        recurrent.flatten_rnn_weights(model)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert len({parameter.untyped_storage()._cdata for parameter in model.parameters()}) == 3
        mixed = on_cuda(nn.LSTM(4, 8, device="meta"))
        mixed.bias_ih_l0 = nn.Parameter(cuda(32))
        recurrent.flatten_rnn_weights(mixed)
        assert len({parameter.untyped_storage()._cdata for parameter in mixed.parameters()}) == 4


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_weights_in_several_places_are_gathered_on_every_call() -> None:
    with on(H100):
        module = on_cuda(nn.LSTM(4, 8, device="meta"))
        x = cuda(7, 3, 4, dtype=FP32)
        storages = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        out, _ = module(x)
        assert out.grad_fn.saved_tensors[5].untyped_storage()._cdata not in storages
        recurrent.flatten_rnn_weights(module)
        out, _ = module(x)
        flat = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        assert {out.grad_fn.saved_tensors[5].untyped_storage()._cdata} == flat


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_program_may_flatten_its_weights_itself() -> None:
    with on(H100):
        module = flat_rnn(nn.LSTM)
        before = module.weight_ih_l0.untyped_storage()._cdata
        module.flatten_parameters()
        (after,) = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        assert after != before


def test_without_training_nothing_is_reserved() -> None:
    with on(H100):
        module = flat_rnn(nn.LSTM).eval()
        with Ops() as ops:
            out = module(cuda(7, 3, 4, dtype=FP32))[0]
        assert ops.outputs("aten._cudnn_rnn.default")[-2][0] == (0,)
        with pytest.raises(RuntimeError, match="training mode"):
            out.grad_fn.apply(torch.empty_like(out), None, None)


def test_under_autocast_cudnn_gets_float16_whatever_was_asked_for() -> None:
    with on(H100):
        module = flat_rnn(nn.LSTM)
        with Ops() as ops, torch.autocast("cuda", dtype=BF16):
            out, (hidden, cell) = module(cuda(7, 3, 4, dtype=FP32))
        assert {out.dtype, hidden.dtype, cell.dtype} == {FP16}
        assert ops.outputs("aten._cudnn_rnn.default")[-1][:2] == ((448,), FP16)
        gradients = out.grad_fn.apply(torch.empty_like(out), None, None)
        assert {gradient.dtype for gradient in gradients if gradient is not None} == {FP16}
        assert [type(node).__name__ for node, _ in out.grad_fn.next_functions if node is not None] == [
            "CopyBackwards"
        ] * 4


def test_packed_sequences_of_unknown_lengths_are_refused() -> None:
    with on(H100):
        x = cuda(7, 3, 4, dtype=FP32)
        with pytest.raises(DynamicOutputShapeException):
            nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 3]))
        with pytest.raises(AnalysisError, match="packed sequence"):
            recurrent.run_rnn("lstm", (9, 0), x[0], torch.randint(1, 4, (1,)), (), [], True, 1, 0.0, True, False)


def test_what_cudnn_does_not_take_goes_the_native_way() -> None:
    with on(T4), Ops() as old:
        on_cuda(nn.LSTM(4, 8, device="meta", dtype=BF16))(cuda(7, 3, 4))
    with on(H100), torch.backends.cudnn.flags(enabled=False), Ops() as off:
        flat_rnn(nn.LSTM)(cuda(7, 3, 4, dtype=FP32))
    for ops in (old, off):
        assert "aten._cudnn_rnn.default" not in ops.names
        assert ops.names.count("aten._thnn_fused_lstm_cell.default") == 7


def test_cells_run_forward_and_backward() -> None:
    with on(H100):
        x = cuda(3, 4, dtype=FP32, grad=True)
        hidden, _ = nn.LSTMCell(4, 8, device="cuda")(x)
        assert hidden.grad_fn(torch.empty_like(hidden), None)[0].shape == (3, 32)
        state = nn.GRUCell(4, 8, device="cuda")(x, cuda(3, 8, dtype=FP32, grad=True))
        assert [g.shape for g in state.grad_fn(torch.empty_like(state))] == [(3, 24), (3, 24), (3, 8), (24,), (24,)]


# --- batch normalisation and the optimizer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "op"),
    [
        (lambda: nn.BatchNorm2d(8, device="cuda")(cuda(2, 8, 4, 4, dtype=FP32)), "cudnn_batch_norm"),
        (lambda: nn.BatchNorm2d(8, device="cuda").eval()(cuda(2, 8, 4, 4, dtype=FP32)), "cudnn_batch_norm"),
        (lambda: nn.BatchNorm2d(8, device="cuda")(cuda(2, 8, 4, 4, dtype=FP16)), "cudnn_batch_norm"),
        (lambda: nn.BatchNorm2d(8, device="cuda")(cuda(2, 8, 4, 4)), "native_batch_norm"),
        (lambda: nn.BatchNorm2d(8, device="cuda", affine=False)(cuda(2, 8, 4, 4, dtype=FP32)), "native_batch_norm"),
        (lambda: nn.BatchNorm1d(8, device="cuda")(cuda(2, 8, dtype=FP32)), "native_batch_norm"),
        (lambda: nn.BatchNorm1d(8, device="cuda").eval()(cuda(65536, 8, 2, dtype=FP32)), "native_batch_norm"),
        (lambda: nn.BatchNorm1d(8, device="cuda")(cuda(65536, 8, 2, dtype=FP32)), "cudnn_batch_norm"),
    ],
    ids=["float32", "eval", "float16", "bfloat16", "no weights", "two dimensions", "large batch, eval", "large batch"],
)
def test_batch_norm_is_chosen_from_the_fakes_alone(made: Callable[[], torch.Tensor], op: str) -> None:
    with on(H100), Ops() as ops:
        made()
    found = [(name, outputs) for name, outputs in ops.calls if "batch_norm" in name]
    assert [name for name, _ in found] == [f"aten.{op}.default"]
    if op == "cudnn_batch_norm":
        assert found[0][1][3][0] == (0,)  # cuDNN's reserve


def test_the_optimizers_default_form() -> None:
    assert card_emulation.default_foreach(H100)
    assert not card_emulation.default_foreach(target("cpu"))


@pytest.mark.parametrize(
    ("options", "op"),
    [({"foreach": True}, "aten._foreach_addcdiv_.ScalarList"), ({"fused": True}, "aten._fused_adamw_.default")],
    ids=["foreach", "fused"],
)
def test_optimizers_step_on_fakes(options: dict[str, bool], op: str) -> None:
    with on(H100):
        linear = nn.Linear(4, 4, device="cuda")
        for parameter in linear.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer = torch.optim.AdamW(linear.parameters(), **options)
        with Ops() as ops:
            optimizer.step()
    assert op in ops.names


def test_assumptions_name_the_order_and_the_versions() -> None:
    (stated,) = card_emulation.assumptions(A100)
    assert stated.topic == "attention"
    assert "flash_attention, efficient_attention, math, cudnn_attention" in stated.text
    assert torch.__version__ in stated.text
    assert list(card_emulation.assumptions(target("cpu"))) == []


def test_random_calls_run_what_was_chosen() -> None:
    """The op that runs is the one the decision names, over a spread of calls."""
    chance = random.Random(0)
    names = {FLASH: "flash", EFFICIENT: "efficient", CUDNN: "cudnn"}
    ran: Counter[SDPBackend] = Counter()
    for card in (H100, A100, T4, target("rtx4090")):
        with on(card):
            for _ in range(15):
                dtype, head = chance.choice([BF16, FP16, FP32]), chance.choice([16, 20, 64, 128, 256])
                heads, length = chance.choice([2, 8]), chance.choice([1, 33, 64])
                q, k = (
                    cuda(2, 8, length, head, dtype=dtype, grad=chance.random() < 0.5),
                    cuda(2, heads, length, head, dtype=dtype),
                )
                mask = cuda(length, length, dtype=torch.bool) if chance.random() < 0.4 else None
                options: dict[str, Any] = {"enable_gqa": heads != 8, "dropout_p": chance.choice([0, 0.1])}
                with Ops() as ops:
                    F.scaled_dot_product_attention(q, k, k, mask, **options)
                described = AttentionCall(
                    Operand.describe(q),
                    Operand.describe(k),
                    Operand.describe(k),
                    None if mask is None else Operand.describe(mask),
                    options["dropout_p"],
                    False,
                    heads != 8,
                )
                version = torch.backends.cudnn.version()
                assert card.capability is not None
                order = preferred_order(card.capability, TORCH_VERSION, version)
                backend = attention_backend(
                    described, AttentionSettings(card.capability, TORCH_VERSION, version, order)
                ).backend
                ran[backend] += 1
                assert attention_ops(ops) == (
                    [f"aten._scaled_dot_product_{names[backend]}_attention.default"] if backend in names else []
                )
    assert ran.keys() == {FLASH, EFFICIENT, CUDNN, MATH}


@pytest.mark.parametrize(("card", "kept"), [("h100", True), ("t4", False), ("a100", True)])
def test_bfloat16_convolutions_keep_channels_last_where_cudnn_takes_them(card: str, kept: bool) -> None:
    with card_emulation.target_kernels(target(card)), FakeTensorMode():
        x, weight = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)
            for shape in ((2, 8, 16, 16), (8, 8, 3, 3))
        )
        result = F.conv2d(x, weight.requires_grad_(), padding=1)
        assert result.grad_fn is not None
        gradient = result.grad_fn(torch.empty_like(result))[1]
        assert result.is_contiguous(memory_format=torch.channels_last) is kept
        assert gradient.is_contiguous(memory_format=torch.channels_last) is kept
