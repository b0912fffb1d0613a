"""Bytes that single calls read and write, against sums on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.simulation.recording.flops import moved_bytes

X = torch.ones(10, 10)  # 400 bytes
V = torch.ones(10)
ROWS = torch.tensor([1, 2])  # 16 bytes


class Traffic(TorchDispatchMode):
    """Adds up what the calls move."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += moved_bytes(func, args, kwargs or {}, out)
        return out


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: X + X[:1], 400 + 40 + 400),
        (lambda: X + X, 3 * 400),  # a call that looks the same may be given two tensors
        (lambda: X + X[:1].expand(10, 10), 400 + 40 + 400),
        (lambda: X.clone().relu_(), 2 * 400 + 2 * 400),
        (lambda: torch.empty(10, 10).copy_(X), 400 + 400),
        (lambda: torch.empty(10, 10).zero_(), 400),
        (lambda: torch.zeros(10, 10), 400),
        (lambda: X.view(100), 0),
        (lambda: torch.ops.aten._unsafe_view(X, [100]), 0),
        (lambda: torch.cat([X, X[:5]]), 600 + 600),
        (lambda: X @ X[:, :2], 400 + 80 + 80),
        (lambda: torch.nn.functional.embedding(ROWS, X), 2 * 80 + 16),
        (lambda: X[ROWS], 2 * 80 + 16),
        (lambda: torch.native_batch_norm(X, None, None, V, V, False, 0.1, 1e-5), 400 + 2 * 40 + 400),
        (lambda: torch.native_batch_norm(X, None, None, None, None, True, 0.1, 1e-5), 2 * 400 + 400 + 2 * 40),
        # It also writes the running statistics.
        (
            lambda: torch.ops.aten._native_batch_norm_legit(X, None, None, V.clone(), V.clone(), True, 0.1, 1e-5),
            4 * 40 + 2 * 400 + 2 * 40 + 2 * 40 + 400 + 2 * 40,
        ),
        (lambda: torch._foreach_mul_([torch.empty(10), torch.empty(5)], 2.0), 2 * 60),
        (lambda: torch._foreach_add([torch.empty(10), torch.empty(5)], 2.0), 2 * 60),
    ],
)
def test_what_a_call_moves(call: Callable[[], Any], expected: int) -> None:
    with Traffic() as traffic:
        call()
    assert traffic.total == expected


def test_rows_that_are_put_are_read_and_written_and_the_rest_is_left() -> None:
    target, rows = torch.zeros(1000, 10), torch.ones(2, 10)
    with Traffic() as traffic:
        target.index_copy_(0, ROWS, rows)
    assert traffic.total == 3 * 80 + 16
