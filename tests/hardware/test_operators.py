"""The rows of operators, held against torch, against each other and against all that asks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from fxmem.hardware.op_classes import MAC_OPS, UNKNOWN_MAC_OPS, is_product
from fxmem.hardware.operators import OPERATORS, Operator, Platform, find_operator, short_name
from fxmem.hardware.operators.products import uses_cublas
from fxmem.hardware.operators.registry import register
from fxmem.simulation.kernels.fake_kernels import ONE_DTYPE
from tests import ROOT

REGISTERED = {str(packet).removeprefix("aten.") for packet in flop_registry if str(packet).startswith("aten.")}
HEAVY = {name: row for name, row in OPERATORS.items() if row.kind is not None}


# --- the rows themselves ----------------------------------------------------------------------------------------------


def forms(name: str) -> Iterator[tuple[Any, str]]:
    """An operator, in place and of lists: one row may stand for all three."""
    if "::" in name:
        namespace, name = name.split("::")
        yield getattr(torch.ops, namespace), name
    else:
        yield from ((torch.ops.aten, form) for form in (name, f"{name}_", f"_foreach_{name}"))


def test_every_row_is_an_operator_of_torch() -> None:
    found = {name for name in OPERATORS if any(hasattr(*form) for form in forms(name))}
    assert [name for name, row in OPERATORS.items() if name not in found and not row.since] == []


def test_a_row_says_where_it_was_read_and_nothing_twice() -> None:
    for name, row in OPERATORS.items():
        assert row.source.endswith((".cpp", ".cu", ".cuh", ".h")), name
        assert not (row.uncounted and row.flops is not None), name
        assert row.complex is None or row.flops is not None, name
        assert not (row.scratch and row.cuda and row.cpu), name


def test_an_operator_has_one_row() -> None:
    with pytest.raises(ValueError, match="one row for relu"):
        register({"Activation.cpp": {"relu": Operator(1)}})
    with pytest.raises(ValueError, match="one row for made_up"):
        register({"MadeUp.cpp": {"made_up* made_up*": Operator(1)}})


def test_a_row_is_found_by_the_operators_name_or_by_its_beginning() -> None:
    assert find_operator("aten.addmm.default") is find_operator("aten::addmm") is OPERATORS["addmm"]
    assert short_name("aten.linalg_svd.U") == "linalg_svd"
    for name in ("linalg_svd", "cholesky_inverse", "fractional_max_pool2d"):
        assert name not in OPERATORS
        found = find_operator(name)
        assert found is not None
        assert found.may_hide(Platform())
    assert find_operator("mylib.addmm.default") is find_operator("mylib::addmm") is None


# --- what the zoo meets -----------------------------------------------------------------------------------------------

UNKNOWN = {
    "_euclidean_dist": "sparse in the zoo, and no kernel of its own",
    "_is_all_true": "a check",
    "_upsample_bicubic2d_aa_backward": "its taps depend on the sizes",
    "_upsample_bilinear2d_aa_backward": "its taps depend on the sizes",
    "_use_cudnn_ctc_loss": "a question to a library",
    "_use_miopen_ctc_loss": "a question to a library",
    "cudnn_grid_sampler": "points outside the input are skipped",
    "cudnn_grid_sampler_backward": "points outside the input are skipped",
    "masked_scatter_backward": "moves as many as the mask picks",
    "unique_consecutive": "orders",
}
"""Operators that the zoo meets, and that have no row: nothing is known of their FLOPs, and no scratch of them."""


def test_what_the_zoo_meets_has_a_row_or_is_known_to_have_none() -> None:
    met = (ROOT / "tests" / "data" / "operators-of-the-zoo.txt").read_text(encoding="utf-8").split()
    assert sorted(set(met)) == met
    without = {
        name
        for name in met
        if all(each not in OPERATORS for each in (name, name.removeprefix("_foreach_").removesuffix("_")))
        and find_operator(name) is None
    }
    assert without <= UNKNOWN.keys()


def test_what_the_zoo_could_not_count_is_uncounted_on_purpose() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("zoo-2*.json"))
    rows = json.loads(newest.read_text(encoding="utf-8"))["rows"]
    names = {short_name(op) for row in rows for op in row["unknown_flops"] if op.startswith("aten.")}
    assert {name for name in names if find_operator(name) is None} <= UNKNOWN.keys()


# --- heavy operators --------------------------------------------------------------------------------------------------


def test_every_heavy_operator_is_one_of_torchs() -> None:
    assert [name for name in HEAVY if not hasattr(torch.ops.aten, name)] == []


def test_every_attention_operator_of_torch_has_a_row() -> None:
    forward = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_scaled_dot_product_") and "backward" not in name
    }
    assert forward - {"_scaled_dot_product_flash_attention_for_cpu_backward"} <= HEAVY.keys()


@pytest.mark.parametrize("name", sorted(HEAVY))
def test_what_counts_macs_has_a_formula_and_each_formula_of_torchs_counts_macs(name: str) -> None:
    row = HEAVY[name]
    counted = bool(row.flops) or name in REGISTERED
    assert counted or name not in MAC_OPS
    assert not (name in REGISTERED and name not in MAC_OPS)
    assert not row.uncounted
    assert row.flops != 0 or name not in MAC_OPS


def test_formulas_of_products_count_what_the_rows_say_is_one() -> None:
    # Torch's own registry names every product it counts; all of them are rows here.
    assert {name for name in REGISTERED if not name.endswith("_backward")} <= MAC_OPS
    of_batches = [name for name in MAC_OPS if name.startswith("_scaled_dot_product_")]
    counted = (*of_batches, *(f"{name}_backward" for name in of_batches), *UNKNOWN_MAC_OPS)
    assert [name for name in counted if not OPERATORS[name].flops] == []


def test_what_runs_on_cublas_is_a_matrix_product() -> None:
    for name, row in OPERATORS.items():
        assert uses_cublas(f"aten.{name}.default", "2.11.0") == row.uses_cublas
        assert row.kind == "matrix product" or not row.uses_cublas


def test_what_takes_one_dtype_is_checked() -> None:
    assert {func._schema.name.removeprefix("aten::"): positions for func, positions in ONE_DTYPE.items()} == {
        name: row.one_dtype for name, row in OPERATORS.items() if row.one_dtype
    }


def test_products_are_forward_operators_of_aten() -> None:
    assert is_product("aten._scaled_dot_product_efficient_attention.default")
    assert not is_product("aten._scaled_dot_product_efficient_attention_backward.default")
    assert not is_product("aten.dot.default")
    assert not is_product("mylib.mm.default")
    assert not is_product("addmm")
