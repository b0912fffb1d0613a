"""Steps that write into tensors, views and storages, held to real runs on the CPU to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem.validation.validate import validate


class Net(nn.Module):
    """A layer, and what is done to its result."""

    def __init__(self, change: Callable[[Tensor], Tensor], scales: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 128)
        self.scale = nn.Parameter(torch.ones(128)) if scales else None
        self.change = change

    def forward(self, x: Tensor) -> Any:
        made = self.change(self.layer(x).clone())
        return made if self.scale is None else made * self.scale


def put_in_columns(h: Tensor) -> Tensor:
    h.t()[[1, 5, 9]] = 1.5
    return h


def put_in_a_flat_view(h: Tensor) -> Tensor:
    h.view(-1)[[1, 5, 9]] = 1.5
    return h


def put_in_rows(h: Tensor) -> Tensor:
    h[torch.arange(50)] = h[:50] * 3
    return h


def add_to_a_view_of_a_view(h: Tensor) -> Tensor:
    h[..., None][::2, :, 0] += 1
    return h


def add_to_a_slice_of_a_view(h: Tensor) -> Tensor:
    wide = h[:, None]
    rows = wide[::2]
    rows.add_(1)
    wide[::2] = rows
    return h


def grow_a_tensor(h: Tensor) -> Tensor:
    small = torch.empty(10, 10)
    return small.resize_(600, 600)


def grow_a_tensor_like_another(h: Tensor) -> Tensor:
    grown = torch.empty(4, 4).resize_as_(h)
    return torch.empty(1, 1, 2, 2).resize_as_(grown[None, None], memory_format=torch.contiguous_format)


def grow_the_result(h: Tensor) -> Tensor:
    return h.resize_(600, 600)


def grow_and_go_on(h: Tensor) -> Tensor:
    """Most is there when what the tensor had before is gone."""
    return h.resize_(600, 600).sin().cos()


def give_memory_back_meanwhile(h: Tensor) -> Tensor:
    """Most is there while the storage has none."""
    made, storage = h.sin(), h.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    more = made.cos() * made.tan()
    storage.resize_(nbytes)
    return h.copy_(made + more)


def add_into_what_is_too_small(h: Tensor) -> Tensor:
    out = torch.empty(3)
    torch.add(h, 1, out=out)
    return out


def multiply_into_what_is_too_small(h: Tensor) -> Tensor:
    out = torch.empty(10, 10)
    torch.matmul(h, h.t(), out=out)
    return out


def find_the_largest_into_what_is_too_small(h: Tensor) -> Tensor:
    values, places = torch.empty(3), torch.empty(0, dtype=torch.int64)
    torch.topk(h, 64, out=(values, places))
    return values


@pytest.mark.parametrize(
    "change", [put_in_columns, put_in_a_flat_view, put_in_rows, add_to_a_view_of_a_view, add_to_a_slice_of_a_view]
)
def test_what_is_written_is_differentiated_as_in_a_real_run(change: Callable[[Tensor], Tensor]) -> None:
    found = validate(lambda: Net(change, True), torch.randn(300, 64), optimizer=None, tolerance=2e-5)
    assert found.within_tolerance


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        *(grow_a_tensor, grow_a_tensor_like_another, grow_the_result, grow_and_go_on, give_memory_back_meanwhile),
        *(add_into_what_is_too_small, multiply_into_what_is_too_small, find_the_largest_into_what_is_too_small),
    ],
)
def test_a_storage_grows_as_in_a_real_run(change: Callable[[Tensor], Tensor]) -> None:
    found = validate(lambda: Net(change, False), torch.randn(300, 64), mode="infer", tolerance=1e-4)
    assert found.within_tolerance
