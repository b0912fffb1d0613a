"""Kernels of other packages: modules made of rows, in the place of extension modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fxmem
from fxmem.errors import AnalysisError
from fxmem.simulation.kernels.packages import PACKAGES, Package, register
from fxmem.simulation.recording.error_advice import describe_end

_PYTHON = """
import torch
import halving_cuda

class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        half, state = halving_cuda.forward(x)
        ctx.save_for_backward(state)
        return half

    @staticmethod
    def backward(ctx, gradient):
        return halving_cuda.backward(gradient, *ctx.saved_tensors)

@torch.library.custom_op("halving::halve", mutates_args=(), device_types="cuda")
def halve_in_python(x: torch.Tensor) -> torch.Tensor:
    return halving_cuda.forward(x)[0]

@halve_in_python.register_fake
def _(x):
    return x.new_empty((x.shape[0] // 2, x.shape[1]))

halve, unknown = Halve.apply, halving_cuda.quarter
"""


@pytest.fixture
def halving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package whose Python is there, and whose kernels are rows."""
    package = Package(
        module="halving_cuda",
        release="halving 1.2.3",
        python="halving",
        operators="halving",
        install="pip install halving",
        values={"VERSION": 3},
    )

    @package.kernel("halving.cu", "forward", lambda x: 5 * x.numel())
    def _forward(x: torch.Tensor) -> Any:
        scratch = x.new_empty(7000)
        del scratch
        return x.new_empty((x.shape[0] // 2, x.shape[1])), x.new_empty(x.shape[0])

    @package.kernel("halving.cu", "backward")
    def _backward(gradient: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return gradient.new_empty((len(state), gradient.shape[1]))

    (tmp_path / "halving.py").write_text(_PYTHON)
    monkeypatch.syspath_prepend(tmp_path)
    register("halving-cuda", package)
    return package


def _train(width: int) -> Any:
    with fxmem.record(steps=2) as recorded:
        import halving  # type: ignore[import-not-found]

        layer = torch.nn.Linear(width, width, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters())
        while True:
            halving.halve(layer(torch.randn(64, width, device="cuda"))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorded


def test_rows_are_the_kernels_of_a_package_whose_python_runs(halving: Package) -> None:
    profile = _train(32).profile
    calls = {op.name: op.flops for op in profile.ops if op.name.startswith("halving_cuda")}
    assert calls == {"halving_cuda.forward": 5 * 64 * 32, "halving_cuda.backward": None}
    sizes = [each.nbytes for each in profile.storages]
    assert sizes.count(7000 * 4) == 1
    assert sizes.count(64 * 4) == 1  # what the package's own Python saves
    said = [each.text for each in profile.assumptions if each.topic == "kernels"]
    assert said == ["kernels of halving_cuda allocate as in halving 1.2.3: backward, forward"]
    assert not {"halving", "halving_cuda"} & sys.modules.keys()
    with pytest.raises(ModuleNotFoundError):
        __import__("halving_cuda")


def test_operators_in_python_run_as_the_rows_that_they_call(halving: Package) -> None:
    with fxmem.record() as run:
        import halving

        x = torch.ones(64, 32, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        assert torch.ops.halving.halve(x).shape == (32, 32)
        assert torch.cuda.max_memory_allocated() == 64 * 32 * 4 + 28160  # 7,000 numbers in blocks of 512 bytes
    assert halving.halve_in_python(torch.ones(4, 4, device="meta")).shape == (2, 4)  # as ever, outside
    assert "halving_cuda.forward" in {op.name for op in run.profile.ops}


def test_rows_imported_once_serve_the_next_recording(halving: Package) -> None:
    kept = []
    for _ in range(2):
        with fxmem.record() as run:
            import halving

            kept.append(halving.halve)
            kept[0](torch.ones(64, 32, device="cuda", requires_grad=True)).sum().backward()
        said = [each.text for each in run.profile.assumptions if each.topic == "kernels"]
        assert said == ["kernels of halving_cuda allocate as in halving 1.2.3: backward, forward"]


def test_a_package_that_is_not_there_is_named_with_how_to_install_it(halving: Package) -> None:
    said = describe_end(ModuleNotFoundError("No module named 'halving'"))
    assert said.endswith("; its kernels are known, and its Python is enough: pip install halving")
    assert describe_end(EOFError("EOF when reading a line")).endswith("stdin: echo ANSWER | fxmem run")
    said = describe_end(ImportError("the package for FlashAttention2 doesn't seem to be installed"))
    assert said.endswith("SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation flash-attn")
    assert describe_end(ImportError("No module named 'halved'")).endswith("'halved'")
    assert describe_end(ValueError("halving")).endswith("halving")


def test_a_kernel_without_a_row_is_named(halving: Package) -> None:
    with fxmem.record():
        import halving

        with pytest.raises(AnalysisError, match=r"halving_cuda\.quarter has none as of halving 1\.2\.3"):
            halving.unknown(torch.ones(3, device="cuda"))


def test_rows_run_in_a_recording_alone(halving: Package) -> None:
    with fxmem.record(steps=1):
        import halving

        kept = halving.halve
        weight = torch.ones(4, 4, device="cuda", requires_grad=True)
        kept(weight).sum().backward()
        torch.optim.SGD([weight]).step()
    with pytest.raises(RuntimeError, match="stands for a kernel while fxmem records"):
        kept(torch.ones(4, 4))


def test_a_module_is_not_there_without_its_python(halving: Package, tmp_path: Path) -> None:
    (tmp_path / "halving.py").unlink()
    with fxmem.record(), pytest.raises(ModuleNotFoundError):
        __import__("halving_cuda")


@pytest.mark.parametrize("name", list(PACKAGES))
def test_every_row_says_where_it_was_read(name: str) -> None:
    package = PACKAGES.get(name)
    assert package.module.removesuffix("._C").replace("_", "-").lower() == name
    assert package.kernels
    assert all(each.source for each in package.kernels.values())


@pytest.mark.parametrize("per_tensor", [False, True])
def test_the_norm_of_many_tensors_is_one_number_or_one_for_each(per_tensor: bool) -> None:
    lists = [[torch.ones(5), torch.ones(7)]]
    for name in ("amp-c", "transformer-engine-torch"):
        norm = PACKAGES.get(name).kernels["multi_tensor_l2norm"].run
        assert [each.numel() for each in norm(4, torch.zeros(1), lists, per_tensor)] == [1, 2 if per_tensor else 0]


def test_norms_of_apex_keep_statistics_in_float32() -> None:
    kernels = PACKAGES.get("fused-layer-norm-cuda").kernels
    x, weight, bias = torch.empty(3, 4, 8, dtype=torch.bfloat16), torch.empty(8), torch.empty(8)
    out, mean, deviation = kernels["forward_affine_mixed_dtypes"].run(x, (8,), weight, bias, 1e-5)
    assert (out.shape, out.dtype) == (x.shape, torch.float32)
    assert {(each.numel(), each.dtype) for each in (mean, deviation)} == {(12, torch.float32)}
    made = kernels["backward_affine"].run(out, mean, deviation, x, (8,), weight, bias, 1e-5, False)
    assert [each.dtype for each in made] == [torch.bfloat16, torch.float32, torch.float32]
    assert len(kernels["rms_forward_affine"].run(x, (8,), weight, 1e-5)) == 2


@pytest.mark.parametrize(("name", "in_place"), [("masked", False), ("upper-triang-masked", True)])
def test_softmax_of_apex_is_written_over_its_gradient_where_the_mask_is_causal(name: str, in_place: bool) -> None:
    kernels = PACKAGES.get(f"scaled-{name}-softmax-cuda").kernels
    scores = torch.empty(2, 3, 16, 16, dtype=torch.bfloat16)
    kept = kernels["forward"].run(scores, *([] if in_place else [None]), 1.0)
    assert (kept.shape, kept.dtype) == (scores.shape, scores.dtype)
    assert (kernels["backward"].run(scores, kept, 1.0) is scores) == in_place
    if not in_place:
        assert [kernels["get_batch_per_block"].run(4, keys, 2, 3) for keys in (128, 132)] == [8, 4]


# --- FlashAttention-2 -------------------------------------------------------------------------------------------------


def _flash(name: str, *args: Any, package: str = "flash-attn-2-cuda") -> tuple[Any, int, int]:
    """What a row returns on an H100, the most that it allocates meanwhile, and its FLOPs."""
    row = PACKAGES.get(package).kernels[name]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = row.run(*args)
    assert row.flops is not None
    return made, torch.cuda.max_memory_allocated() - before, row.flops(*args)


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_is_as_torchs_own_copy_of_it(heads: int, groups: int, dropout: float) -> None:
    batch, length, size = 2, 2048, 64
    with fxmem.record("h100"):
        q, k, v = (
            torch.empty(batch, length, each, size, device="cuda", dtype=torch.half) for each in (heads, groups, groups)
        )
        made, most, flops = _flash("fwd", q, k, v, None, None, dropout, 0.1, True, -1, -1, 0.0, False, None)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        op = torch.ops.aten._flash_attention_forward
        same = op(q, k, v, None, None, length, length, dropout, True, False, scale=0.1)
        # Torch has one more number of the generator's.
        assert torch.cuda.max_memory_allocated() - before == most + 512
        assert [each.shape for each in made[:2]] == [each.shape for each in same[:2]]
        with FlopCounterMode(display=False) as counter:
            torch.ops.aten._scaled_dot_product_flash_attention(*[q.transpose(1, 2)] * 3, dropout, True)
        assert flops == counter.get_total_flops()
        gradients = [torch.empty_like(each) for each in (q, k, v)]
        out, statistics, _, state = made
        saved = out, q, k, v, out, statistics
        made, most, flops = _flash("bwd", *saved, *gradients, None, dropout, 0.1, True, -1, -1, 0.0, False, None, state)
        assert made[:3] == tuple(gradients)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        op = torch.ops.aten._flash_attention_backward
        own = op(*saved, None, None, length, length, dropout, True, state, same[3], scale=0.1)
        given = sum(each.untyped_storage().nbytes() for each in own)
        assert torch.cuda.max_memory_allocated() - before == most + given
        assert flops == 10 * batch * length * length * heads * size


def test_packed_sequences_have_rows_between_them_in_backward() -> None:
    tokens, heads, size, ends = 300, 4, 40, torch.zeros(4, dtype=torch.int32)
    with fxmem.record("h100"):
        q = torch.empty(tokens, heads, size, device="cuda", dtype=torch.bfloat16)
        lengths = None, ends, ends, None, None, None, None, 128, 128
        made, most, flops = _flash("varlen_fwd", q, q, q, *lengths, 0.0, 0.1, False, True, -1, -1, 0.0, False, None)
        out, statistics, _, state = made
        assert (out.shape, statistics.shape, state.shape) == (q.shape, (heads, tokens), (2,))
        assert flops == 4 * tokens * heads * size * 128
        lengths = ends, ends, None, 128, 128
        rest = 0.0, 0.1, False, True, -1, -1, 0.0, False, None, state
        _, most, _ = _flash("varlen_bwd", out, q, q, q, out, statistics, q, q, q, *lengths, *rest)
        rows = tokens + 3 * 128
        assert most == 4 * (_block(heads * rows) + _block(rows * heads * 64))  # heads are as wide as 64 in float
        deterministic = *rest[:7], True, *rest[8:]
        _, most, _ = _flash("varlen_bwd", out, q, q, q, out, statistics, q, q, q, *lengths, *deterministic)
        copies = -(-132 // (3 * heads))
        assert most == 4 * (_block(heads * rows) + _block(copies * rows * heads * 64))


def _block(numbers: int) -> int:
    return -(-numbers // 128) * 128


def _flash_3(name: str, *args: Any) -> tuple[Any, int, int]:
    return _flash(name, *args, package="flash-attn-3")


def test_flash_attention_3_sums_in_float32_in_backward() -> None:
    batch, length, heads, groups, size = 2, 2048, 8, 2, 128
    none = (None,) * 20
    with fxmem.record("h100"):
        q, k, v = (
            torch.empty(batch, length, each, size, device="cuda", dtype=torch.half) for each in (heads, groups, groups)
        )
        rest = *none, 0.1, True, -1, -1, 0, 0.0, False, None
        made, most, flops = _flash_3("fwd", q, k, v, *rest, 1, None, 0)
        out, statistics = made[:2]
        assert made[2:] == (None, None)
        assert (out.shape, statistics.shape) == (q.shape, (batch, heads, length))
        assert most == 2 * q.numel() + 4 * statistics.numel() + 512  # of the scheduler, 17 numbers
        assert flops == 4 * batch * length * length * heads * size
        parts = _flash_3("fwd", q, k, v, *rest, 3, None, 0)[0][2:]
        assert [each.shape for each in parts] == [(3, batch, heads, length, size), (3, batch, heads, length)]
        with pytest.raises(AnalysisError, match="num_splits of at least 1, got 0"):
            _flash_3("fwd", q, k, v, *rest, 0, None, 0)

        saved = out, q, k, v, out, statistics, *map(torch.empty_like, (q, k, v)), *none[:6]
        made, most, flops = _flash_3("bwd", *saved, 0.1, True, -1, -1, 0.0, False, 0)
        sums = 2 * heads * length + (heads + 2 * groups) * length * size
        assert sum(each.numel() for each in made) == batch * sums
        assert most == 4 * (batch * sums + 32 * batch * heads)  # 32 blocks of 64 queries
        assert flops == 10 * batch * length * length * heads * size
        made = _flash_3("bwd", *saved, 0.1, False, -1, -1, 0.0, False, 0)[0]
        assert made[0].shape == (batch, heads, 26 * 80), "without a mask, blocks of 80"
        made = _flash_3("bwd", out, q, q, q, *saved[4:], 0.1, True, -1, -1, 0.0, True, 0)[0]
        assert made[3:] == (None, None), "each head has its own keys"


def test_flash_attention_3_rounds_packed_sequences_up_together() -> None:
    tokens, heads, size, ends = 300, 4, 40, torch.zeros(4, dtype=torch.int32)
    with fxmem.record("h100"):
        q = torch.empty(tokens, heads, size, device="cuda", dtype=torch.bfloat16)
        lengths = ends, ends, None, None, 128, 128
        statistics = torch.empty(heads, tokens, device="cuda")
        saved = q, q, q, q, q, statistics, None, None, None
        made, most, flops = _flash_3("bwd", *saved, *lengths, 0.1, False, -1, -1, 0.0, False, 0)
        rows = -(-(tokens + 3 * 128) // 128) * 128
        assert [each.shape for each in made[:3]] == [(heads, rows)] * 2 + [(heads, rows * 64)]
        gradients = 3 * (-(-2 * q.numel() // 512) * 512)
        assert most == 4 * heads * rows * (2 + 64) + 512 + gradients
        assert flops == 10 * tokens * heads * size * 128


def test_one_token_takes_the_heads_of_a_group_for_its_queries() -> None:
    batch, heads, groups, keys, size = 2, 8, 2, 4096, 64
    with fxmem.record("h100"):
        q = torch.empty(batch, 1, heads, size, device="cuda", dtype=torch.half)
        cache = torch.empty(batch, keys, groups, size, device="cuda", dtype=torch.half)
        rest = *[None] * 10, 0.1, True, -1, -1, 0.0, True, 0
        (out, statistics), most, flops = _flash("fwd_kvcache", q, cache, cache, *rest)
        assert out.shape == q.shape
        assert statistics.shape == (batch, heads, 1)
        assert flops == 4 * batch * heads * keys * size
        # Keys go in 16 parts, as many as there are blocks of 256: 4 rows of work for 264 places.
        parts = 16 * batch * heads * (1 + size)
        assert most == 4 * parts + 2 * out.numel() + 512


# --- Mamba, experts ---------------------------------------------------------------------------------------------------


def test_a_selective_scan_keeps_a_state_for_each_2048_tokens() -> None:
    rows = PACKAGES.get("selective-scan-cuda").kernels
    u, A, B = (
        torch.empty(2, 24, 5000, dtype=torch.half),
        torch.empty(24, 16),
        torch.empty(2, 1, 16, 5000, dtype=torch.half),
    )
    call = u, u, A, B, B, torch.empty(24), u, torch.empty(24)
    out, states, gated = rows["fwd"].run(*call, True)
    assert (states.shape, states.dtype) == ((2, 24, 3, 32), torch.float32)
    assert out.shape == gated.shape == u.shape
    assert rows["fwd"].flops is not None
    assert rows["fwd"].flops(*call, True) == u.numel() * (9 * 16 + 2)
    made = rows["bwd"].run(*call, u, states, out, None, True, False)
    assert [each.shape for each in made] == [each.shape for each in (*call[:6], call[7], u)]
    assert {each.dtype for each in made[3:5]} == {torch.half}


def test_deterministic_convolutions_sum_weights_by_sequence_or_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = PACKAGES.get("causal-conv1d-cuda").kernels["causal_conv1d_bwd"].run
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with fxmem.record("h100"):
        x, weight = torch.empty(3, 64, 300, device="cuda"), torch.zeros(64, 4, device="cuda")
        for given, rows in ((x, 3), (x.transpose(1, 2).contiguous().transpose(1, 2), 3 * 3)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward(given, weight, None, given, None, None, None, given, weight, None)
            assert torch.cuda.max_memory_allocated() - before == 4 * 64 * 4 * (rows + 1)


def test_sizes_of_experts_on_the_card_are_described_there() -> None:
    multiply = PACKAGES.get("grouped-gemm-backend").kernels["gmm"]
    with fxmem.record("h100"):
        sizes = torch.zeros(64, dtype=torch.int64, device="cuda")
        a, b, c = (torch.empty(each, device="cuda") for each in ((128, 32), (64, 32, 16), (128, 16)))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        multiply.run(a, b, c, sizes, False, False)
        assert torch.cuda.max_memory_allocated() - before == 6 * 512 + 1024
        assert multiply.flops is not None
        assert multiply.flops(a, b, c, sizes, False, False) == 2 * 128 * 32 * 16


def test_the_fastest_configuration_of_a_kernel_is_its_first_and_said() -> None:
    triton = pytest.importorskip("triton")

    def scale_rows() -> None:
        pass

    configs = [triton.Config({"BLOCK": each}) for each in (64, 128)]
    kernel = triton.runtime.autotuner.Autotuner(scale_rows, ["x"], configs, [], None, None)
    with fxmem.record("h100") as run:
        assert kernel.best_config.kwargs["BLOCK"] == 64
        torch.ones(3, device="cuda")
    assert any("the first is taken of Triton's scale_rows" in each.text for each in run.profile.assumptions)
    assert not hasattr(kernel, "best_config")


# --- TransformerEngine ------------------------------------------------------------------------------------------------


class _Product(NamedTuple):
    transA: bool
    transB: bool
    a: tuple[int, ...]
    b: tuple[int, ...]
    result: tuple[int, ...]


@pytest.mark.parametrize(
    "case",
    [
        _Product(True, False, (5, 3), (2, 7, 3), (2, 7, 5)),
        _Product(False, False, (3, 5), (2, 7, 3), (2, 7, 5)),
        _Product(False, True, (7, 5), (7, 3), (3, 5)),
    ],
)
def test_products_have_the_shapes_and_flops_of_torchs(case: _Product) -> None:
    a, b = torch.empty(case.a), torch.empty(case.b)
    with FlopCounterMode(display=False) as counter:
        same = (b.T if case.transB else b) @ (a.T if case.transA else a)
    row = PACKAGES.get("transformer-engine-torch").kernels["generic_gemm"]
    call = a, case.transA, b, case.transB, None, None, None, None, None, False, None, False
    assert row.run(*call)[0].shape == same.shape == case.result
    assert row.flops is not None
    assert row.flops(*call) == counter.get_total_flops()


@pytest.mark.parametrize("layout", ["SBHD_SBHD_SBHD", "BSHD_BSHD_BSHD", "THD_THD_THD"])
@pytest.mark.parametrize("is_new", [False, True], ids=["2.11", "2.20"])
def test_attention_keeps_a_number_for_each_row_of_each_head(layout: str, is_new: bool) -> None:
    rows = PACKAGES.get("transformer-engine-torch")
    values = rows.values
    batch, length, heads, groups, size = 2, 48, 6, 3, 64
    order = {"SBHD": (length, batch), "BSHD": (batch, length), "THD": (batch * length,)}[layout.split("_")[0]]
    whole, form = values["NVTE_QKV_Layout"][f"NVTE_{layout}"], values["NVTE_QKV_Format"].NVTE_QKV_Format_NOT_SET
    masks = values["NVTE_Bias_Type"].NVTE_NO_BIAS, values["NVTE_Mask_Type"].NVTE_CAUSAL_MASK, None, [-1, 0]
    common = (whole, form, form, *masks, True) if is_new else (whole, *masks)
    behind = (whole, form, form, whole, form, form, *masks, True) if is_new else common
    ends = torch.zeros(batch + 1, dtype=torch.int32)
    with fxmem.record("b200"):
        torch.zeros(1, device="cuda")
        q, k, v = (
            torch.empty((*order, each, size), device="cuda", dtype=torch.bfloat16) for each in (heads, groups, groups)
        )
        forward, backward = (rows.kernels[f"fused_attn_{each}"].run for each in ("fwd", "bwd"))
        out, statistics, state = forward(length, length, True, 0.1, 0.0, False, *common, ends, ends, q, k, v)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert (statistics.numel(), statistics.dtype) == (batch * length * heads, torch.float32)
        assert state.numel() == 2
        saved = ends, ends, q, k, v, out, torch.empty_like(out), torch.bfloat16, None, [statistics, state]
        gradients = backward(length, length, 0.1, 0.0, False, *behind, False, *saved)
        assert [each.shape for each in gradients[:3]] == [each.shape for each in (q, k, v)]
        assert all(each.is_contiguous() for each in gradients[:3])


def test_a_release_asks_for_attention_by_one_record_or_by_many_arguments() -> None:
    rows = PACKAGES.get("transformer-engine-torch")
    ask, backends = rows.kernels["get_fused_attn_backend"].run, rows.values["NVTE_Fused_Attn_Backend"]
    half = rows.values["DType"].kBFloat16
    with fxmem.record("h100"):
        torch.zeros(1, device="cuda")
        for size, found in ((128, backends.NVTE_F16_arbitrary_seqlen), (512, backends.NVTE_No_Backend)):
            sizes = 8, 8, 64, 64, size, size
            assert ask(True, half, half, None, None, None, None, 0.0, *sizes, -1, 0, False, False, False) == found
            record = SimpleNamespace(is_training=True, qkv_dtype=half, head_dim_qk=size, head_dim_v=size)
            answer, why = ask(record)
            assert (answer, bool(why)) == (found, size == 512)


def test_quantized_layers_are_refused() -> None:
    class Float8Quantizer:
        pass

    row = PACKAGES.get("transformer-engine-torch").kernels["swiglu"]
    assert row.run(torch.empty(3, 8), None).shape == (3, 4)
    with pytest.raises(AnalysisError, match="got a Float8Quantizer"):
        row.run(torch.empty(3, 8), Float8Quantizer())
