"""What a program imports for the first time while it is recorded, and who has it afterwards."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxmem

IMPORTS = """
from builtins import open as opened
from os import environ, makedirs, remove, rename, replace
from random import random
from shutil import copyfile, rmtree
from time import sleep, time

from safetensors.torch import load_file, save_file
from torch import Tensor, compile, load, randn, save, tensor
from torch.accelerator import synchronize as accelerator_synchronize
from torch.amp import GradScaler
from torch.autograd import backward, grad
from torch.cuda import device_count, is_available, max_memory_allocated, memory_stats, synchronize
from torch.distributed import all_reduce, get_rank, init_process_group
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

def keep(tensors, path, write=save_file):
    write(tensors, path)

class Keeper:
    write = staticmethod(save)
"""


@pytest.mark.parametrize("ranks", [None, 4])
def test_what_is_imported_meanwhile_is_real_afterwards(
    ranks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_meanwhile.py").write_text(IMPORTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_meanwhile", raising=False)
    real = torch.save
    with fxmem.record("h100", steps=1, ranks=ranks):
        module = importlib.import_module("imported_meanwhile")
        assert module.save is not real
        net = nn.Linear(4, 4).cuda()
        net(torch.randn(2, 4, device="cuda")).sum().backward()
        torch.optim.SGD(net.parameters()).step()
    found = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    importlib.reload(module)
    own = {"keep", "Keeper"}
    assert [name for name, value in found.items() if vars(module)[name] is not value and name not in own] == []
    # What no module has by name calls what was there.
    found["keep"]({"weight": torch.ones(3)}, tmp_path / "kept.safetensors")
    found["Keeper"].write(torch.ones(3), tmp_path / "kept.pt")
    assert torch.equal(module.load_file(tmp_path / "kept.safetensors")["weight"], torch.ones(3))
    assert torch.equal(torch.load(tmp_path / "kept.pt"), torch.ones(3))
    assert {"kept.pt", "kept.safetensors"} < set(os.listdir(tmp_path))


WRAPS = """
import functools

import torch

real = torch.compile
calls = []

@functools.wraps(real)
def noted(*args, **kwargs):
    calls.append(args)
    return real(*args, **kwargs)

torch.compile = noted
"""


def test_what_a_library_wraps_when_it_is_imported_stays_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning does with `torch.compile`."""
    (tmp_path / "wraps_meanwhile.py").write_text(WRAPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wraps_meanwhile", raising=False)
    monkeypatch.setattr(torch, "compile", torch.compile)
    with fxmem.record("h100", steps=1):
        module = importlib.import_module("wraps_meanwhile")
        net = nn.Linear(4, 4).cuda()
        net(torch.randn(2, 4, device="cuda")).sum().backward()
        torch.optim.SGD(net.parameters()).step()
    assert torch.compile is module.noted
    assert torch.compile(nn.Linear(4, 4), backend="eager")(torch.ones(2, 4)).shape == (2, 4)
    assert len(module.calls) == 1


TYPES = """
import torch

def find_shapes(tree):
    tree_type = type(tree)
    if tree_type is dict:
        return [shape for each in tree.values() for shape in find_shapes(each)]
    if tree_type is list or tree_type is tuple:
        return [shape for each in tree for shape in find_shapes(each)]
    if tree_type is torch.Tensor:
        return [tuple(tree.shape)]
    raise ValueError("Not supported")

def find_classes(net, device):
    x = torch.ones(2, 4, device=device)
    kinds = [x, x.cpu(), net(x), net.weight, net.weight.detach(), net, 3, x.shape]
    return [type(each) for each in kinds] + [type(x) in (torch.nn.Parameter, torch.Tensor)]
"""
OTHER_TYPES = """
class Meta(type):
    pass

def asks(x):
    return isinstance(x, type) or type(x) is torch.Tensor
"""


def test_a_module_that_compares_the_class_of_a_tensor_finds_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenFold does, which takes nested inputs apart by `tree_type is torch.Tensor`."""
    for name, text in {"asks_for_types": TYPES, "has_other_types": TYPES + OTHER_TYPES}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with fxmem.record("h100"):
        module = importlib.import_module("asks_for_types")
        net = nn.Linear(4, 4).cuda()
        x = torch.ones(2, 4, device="cuda")
        shapes = module.find_shapes({"a": [x, x.cpu()], "b": (net(x),)})
        classes = module.find_classes(net, "cuda")
        assert type(importlib.import_module("has_other_types").Meta) is type  # which keeps Python's own
    assert not hasattr(module, "type")
    x, net = torch.ones(2, 4), nn.Linear(4, 4)
    assert shapes == module.find_shapes({"a": [x, x.cpu()], "b": (net(x),)})
    assert classes == module.find_classes(net, "cpu")
