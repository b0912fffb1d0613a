"""Kernels of other packages: modules made of rows, in the place of extension modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fxmem
from fxmem.errors import AnalysisError
from fxmem.simulation.kernels.packages import PACKAGES, Package, register

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

halve, unknown = Halve.apply, halving_cuda.quarter
"""


@pytest.fixture
def halving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """A package whose Python is there, and whose kernels are rows."""
    package = Package(module="halving_cuda", release="halving 1.2.3", python="halving", values={"VERSION": 3})

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
    yield package
    PACKAGES._registered.pop("halving-cuda")


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
    assert package.module.replace("_", "-").lower() == name
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
def test_attention_keeps_a_number_for_each_row_of_each_head(layout: str) -> None:
    rows = PACKAGES.get("transformer-engine-torch")
    values = rows.values
    batch, length, heads, groups, size = 2, 48, 6, 3, 64
    order = {"SBHD": (length, batch), "BSHD": (batch, length), "THD": (batch * length,)}[layout.split("_")[0]]
    common = values["NVTE_QKV_Layout"][f"NVTE_{layout}"], None, values["NVTE_Mask_Type"].NVTE_CAUSAL_MASK, None, (-1, 0)
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
        gradients = backward(length, length, 0.1, 0.0, False, *common, False, *saved)
        assert [each.shape for each in gradients[:3]] == [each.shape for each in (q, k, v)]
        assert all(each.is_contiguous() for each in gradients[:3])


def test_quantized_layers_are_refused() -> None:
    class Float8Quantizer:
        pass

    row = PACKAGES.get("transformer-engine-torch").kernels["swiglu"]
    assert row.run(torch.empty(3, 8), None).shape == (3, 4)
    with pytest.raises(AnalysisError, match="got a Float8Quantizer"):
        row.run(torch.empty(3, 8), Float8Quantizer())
