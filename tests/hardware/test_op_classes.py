"""The table of heavy operators, held against torch and against all that asks it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from fxmem.hardware.op_classes import MAC_OPS, OP_CLASSES, UNKNOWN_MAC_OPS, is_product, scaled_dot_product_ops
from fxmem.hardware.workspaces import uses_cublas
from fxmem.simulation.flops.tables import FORMULAS, NO_ARITHMETIC, UNCOUNTED
from fxmem.simulation.kernels.fake_kernels import ONE_DTYPE

REGISTERED = {str(packet).removeprefix("aten.") for packet in flop_registry if str(packet).startswith("aten.")}


def test_every_operator_is_one_of_torchs() -> None:
    assert [name for name in OP_CLASSES if not hasattr(torch.ops.aten, name)] == []


def test_every_attention_operator_of_torch_is_in_the_table() -> None:
    forward = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_scaled_dot_product_") and "backward" not in name
    }
    assert forward - {"_scaled_dot_product_flash_attention_for_cpu_backward"} <= OP_CLASSES.keys()


@pytest.mark.parametrize("name", sorted(OP_CLASSES))
def test_what_counts_macs_has_a_formula_and_each_formula_of_torchs_counts_macs(name: str) -> None:
    counted = name in FORMULAS or name in REGISTERED
    assert counted or name not in MAC_OPS
    assert not (name in REGISTERED and name not in MAC_OPS)
    assert name not in UNCOUNTED
    assert name not in NO_ARITHMETIC & MAC_OPS


def test_formulas_of_products_count_what_the_table_says_is_one() -> None:
    # Torch's own registry names every product it counts; all of them are rows here.
    assert {name for name in REGISTERED if not name.endswith("_backward")} <= MAC_OPS
    assert {f"{name}_backward" for name in scaled_dot_product_ops()} <= FORMULAS.keys()
    assert FORMULAS.keys() >= UNKNOWN_MAC_OPS


def test_what_runs_on_cublas_is_a_matrix_product() -> None:
    for name, op in OP_CLASSES.items():
        assert uses_cublas(f"aten.{name}.default", "2.11.0") == op.uses_cublas
        assert op.kind == "matrix product" or not op.uses_cublas


def test_what_takes_one_dtype_is_checked() -> None:
    assert {func._schema.name.removeprefix("aten::"): positions for func, positions in ONE_DTYPE.items()} == {
        name: op.one_dtype for name, op in OP_CLASSES.items() if op.one_dtype
    }


def test_products_are_forward_operators_of_aten() -> None:
    assert is_product("aten._scaled_dot_product_efficient_attention.default")
    assert not is_product("aten._scaled_dot_product_efficient_attention_backward.default")
    assert not is_product("aten.dot.default")
    assert not is_product("mylib.mm.default")
    assert not is_product("addmm")
