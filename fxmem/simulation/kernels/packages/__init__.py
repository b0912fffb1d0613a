"""Kernels of other packages as data: one module for each extension module, with its `PACKAGE`.

A package with kernels in C++ has Python around an extension module. Its Python runs as it is; the extension takes no
tensors without data, where it can be loaded at all. In its place stands a module that is made of rows, one a kernel:
what a call returns, made by torch as the kernel allocates it, and its FLOPs. What is saved for backward, the package's
own Python decides.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from fxmem._torch.modules import PatchesOf
from fxmem.records import registry
from fxmem.records.registry import Registry

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A row: one kernel of a package."""

    run: Run
    """Makes the results of a call, from its arguments, and what the kernel allocates beside them."""
    source: str
    """The file of the package in which it was read."""
    flops: Callable[..., int] | None = None
    """Operations of a call, one multiply-add as two, from its arguments; None where they are not counted."""
    is_composed: bool = False
    """Whether its row calls operators of torch that do the same, which are counted."""


@dataclasses.dataclass
class Package:
    """The kernels of one extension module.

    Args:
        module: the extension module, as the package's Python imports it.
        release: the package and the release whose sources were read.
        python: the package's Python, without which nobody imports the module; empty where there is none.
        operators: the namespace of the operators that this Python defines, which run as what their kernels call.
        install: the command that installs this Python without a compiler of CUDA.
        values: what the module has besides kernels: enumerations, numbers.
        environ: variables that the package's Python finds while a program runs.
        patches: of modules of the package's Python, by their names, right after they are imported.
        patches_all: whether its Python has the rows by these patches alone, and never imports the module.
    """

    module: str
    release: str
    python: str = ""
    operators: str = ""
    install: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patches: Mapping[str, PatchesOf] = dataclasses.field(default_factory=dict)
    patches_all: bool = False
    kernels: dict[str, Kernel] = dataclasses.field(default_factory=dict, init=False)
    """By their names in the module."""

    def kernel(
        self,
        source: str,
        names: str = "",
        flops: Callable[..., int] | None = None,
        *,
        takes: str = "",
        is_composed: bool = False,
    ) -> Callable[[Run], Run]:
        """Add a row for each of these names, else for that of the function: a decorator. Arguments as of `Kernel`.

        Args:
            takes: names of the kernel's arguments in their order. The row and its FLOPs are then given a `Call`.

        Raises:
            ValueError: the package has a row of this name.
        """

        def add(run: Run) -> Run:
            order = takes.split()
            row = functools.partial(_bind, run, order) if order else run
            count = functools.partial(_bind, flops, order) if order and flops else flops
            for name in names.split() or [run.__name__]:
                if name in self.kernels:
                    raise ValueError(f"expected one row for {self.module}.{name}, got a second one")
                self.kernels[name] = Kernel(row, source, count, is_composed)
            return run

        return add


Call = types.SimpleNamespace
"""The arguments of a kernel's call by their names; None for one that is not given."""


def _bind(run: Callable[[Call], Any], order: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    return run(Call(**{**dict.fromkeys(order), **dict(zip(order, args, strict=False)), **kwargs}))


PACKAGES: Registry[Package] = registry.PACKAGES
APEX: Final = "pip install --no-build-isolation git+https://github.com/NVIDIA/apex"
"""How apex's Python is installed, of which several packages make use."""


def register(name: str, package: Package) -> None:
    """Add a package's kernels. One of another package is found by an entry point of the group `fxmem.packages`, which
    bears its name and whose loading registers it.

    Raises:
        UsageError: another package has this name.
    """
    PACKAGES.register(name, package)


WITHOUT_ROWS: Final = {"inplace_abn": "nn.BatchNorm2d and its activation in its place save one tensor more a layer"}
"""Packages that programs ask for and whose kernels nobody has written down, with what may stand in their place."""


def find_install(text: str) -> str:
    """How to install the Python of a package that an error's text names; empty where it names none."""
    said = _plain(text)
    for package in map(PACKAGES.get, PACKAGES):
        names = package.module, package.python, package.release.rpartition(" ")[0]
        if package.install and any(_plain(each) in said for each in names):
            return package.install
    return ""


def _plain(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def enumeration(name: str, members: str | Mapping[str, int]) -> Any:
    """An enumeration of an extension module: its members in order, from 0, or with their numbers."""
    numbered = {each: number for number, each in enumerate(members.split())} if isinstance(members, str) else members
    return enum.IntEnum(name, dict(numbered))


def norm_tensors(chunk_size: int, tensors: Sequence[torch.Tensor], per_tensor: Any) -> tuple[torch.Tensor, ...]:
    """What apex's `multi_tensor_l2norm` allocates, and who took it over: the norm of all, and of each where asked for.

    `multi_tensor_l2norm_kernel.cu` of apex 25.09.
    """
    device, count = tensors[0].device, len(tensors) if per_tensor else 0
    chunks = max((math.ceil(each.numel() / chunk_size) for each in tensors), default=0)
    scratch = torch.zeros(320, device=device), torch.zeros(count * chunks, device=device)
    made = torch.empty(1, device=device), torch.empty(count, device=device)
    del scratch
    return made
