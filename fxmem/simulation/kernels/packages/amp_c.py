"""Apex's kernels over lists of tensors: its optimizers, scaling, norms.

Read in csrc/*.cu of apex 25.09.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxmem.simulation.kernels.packages import APEX, Package, norm_tensors

PACKAGE = Package(module="amp_C", release="apex 25.09", python="apex", install=APEX)

_IN_PLACE = """multi_tensor_scale multi_tensor_sgd multi_tensor_axpby multi_tensor_adam multi_tensor_adam_capturable
multi_tensor_adam_capturable_master multi_tensor_adagrad multi_tensor_novograd multi_tensor_lamb_stage1_cuda
multi_tensor_lamb_stage2_cuda update_scale_hysteresis"""


@PACKAGE.kernel("multi_tensor_*.cu", _IN_PLACE)
def _update(*_: Any, **__: Any) -> None:
    """Lists of tensors are written to; nothing is allocated."""


@PACKAGE.kernel("multi_tensor_lamb.cu, multi_tensor_lamb_mp.cu", "multi_tensor_lamb multi_tensor_lamb_mp")
def _lamb(chunk_size: int, noop: Tensor, lists: Any, *_: Any) -> None:
    """The norms of parameters and of their updates live until the call returns."""
    kept = norm_tensors(chunk_size, lists[1], True), norm_tensors(chunk_size, lists[0], True)
    del kept


@PACKAGE.kernel("multi_tensor_l2norm_kernel.cu", "multi_tensor_l2norm multi_tensor_l2norm_mp")
def _norm(chunk_size: int, noop: Tensor, lists: Any, per_tensor: Any = None) -> Any:
    return norm_tensors(chunk_size, lists[0], per_tensor)


@PACKAGE.kernel("multi_tensor_l2norm_scale_kernel.cu", "multi_tensor_l2norm_scale multi_tensor_unscale_l2norm")
def _norm_of_scaled(chunk_size: int, noop: Tensor, lists: Any, scale: Any, per_tensor: Any = None) -> Any:
    return norm_tensors(chunk_size, lists[0], per_tensor)
