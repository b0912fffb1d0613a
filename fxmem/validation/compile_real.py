"""A model really compiled by `torch.compile` on the CPU, in the prediction's settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.records.parts import CompileSettings


@contextlib.contextmanager
def compile_real(model: nn.Module, settings: CompileSettings | None) -> Iterator[Any]:
    """The model as it is to be called; compiled code and inductor's files are gone afterwards.

    With `as_is` the model comes compiled by its author. Inductor builds its kernels, with this machine's C++ compiler.
    """
    if settings is None:
        yield model
        return
    torch_dynamo.load_compiler()
    with (
        torch_inductor.own_files(),
        torch_inductor.limit_saved(settings.activation_memory_budget),
        torch_dynamo.fresh_dynamo(lambda _: None),
    ):
        if settings.as_is:
            yield model
            return
        options = {**torch_inductor.mode_options(settings.mode), **settings.options}
        yield torch.compile(model, dynamic=settings.dynamic, options=options)
