"""One forward and loss of a model for real, on the CPU, for what it reads of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem.errors import AnalysisError, FxmemError, one_line
from fxmem.simulation.asked.real_reads import RealReads, hangs_on_values
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.step.model.real_model import real_model, real_values
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import run_forward, set_training


def read_really(model: torch.nn.Module, request: StepRequest) -> RealReads:
    """Run forward and loss of a copy on the CPU, and keep what is read.

    Raises:
        UsageError: the model cannot be copied, or has an index or a mask without values.
        AnalysisError: it raised.
    """
    reads = RealReads()
    with process_unchanged(), torch.device("cpu"):
        torch.manual_seed(0)
        made = real_model(model)
        args, kwargs = real_values((request.args, request.kwargs))
        step = dataclasses.replace(request, args=args, kwargs=kwargs)
        set_training(made, request.mode)
        try:
            with _Watch(reads), _WatchLists(reads):
                run_forward(made, step, "cpu")
        except FxmemError:
            raise
        except Exception as error:
            raise AnalysisError(f"the model on real values raised {one_line(error)}") from error
    return reads


class _Watch(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, reads: RealReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if hangs_on_values(func, args):
            self._reads.note(func, args)
        return func(*args, **(kwargs or {}))


class _WatchLists(TorchFunctionMode):
    """Sees `tolist`: of a real tensor it is no operator, of a fake one many."""

    def __init__(self, reads: RealReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.tolist:
            for number in args[0].detach().flatten():
                self._reads.note(torch_fakes.NUMBER_OF, (number,))
        return func(*args, **(kwargs or {}))
