"""Models that stop an analysis where they please, analyses side by side, and many in a row: the process is as it was
before."""

from __future__ import annotations

import gc
import multiprocessing
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import AnalysisError, FxmemError
from fxmem.simulation.processes.fork import one_at_a_time

# --- what an analysis might leave behind ------------------------------------------------------------------------------

OWNERS: tuple[Any, ...] = (
    *(
        torch,
        torch.Tensor,
        torch._C,
        torch._C._autograd,
        torch.nn.Module,
        torch.nn.functional,
        torch.cuda,
        torch.cuda.amp.common,
        torch.autograd,
    ),
    *(
        torch.autograd.Variable,
        torch.autograd.function.FunctionCtx,
        torch.autograd.graph,
        torch.backends.mha,
        torch.backends.cudnn,
        torch.fx,
        torch.fx.Node,
    ),
    *(
        torch.utils.checkpoint,
        torch.utils.checkpoint.CheckpointFunction,
        torch.optim.Optimizer,
        torch.random,
        torch.nn.Parameter,
    ),
)
"""Whatever is patched during an analysis is an attribute of one of these."""


def attributes() -> dict[tuple[str, str], int]:
    """Every attribute of `OWNERS`, by identity."""
    return {(owner.__name__, name): id(value) for owner in OWNERS for name, value in vars(owner).items()}


def process() -> dict[str, Any]:
    """What a program may set and an analysis may touch."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function overrides": torch._C._is_torch_function_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "kernels": (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        ),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "random": (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),  # type: ignore[index]
        "module hooks": [
            len(hooks)
            for name, hooks in vars(nn.modules.module).items()
            if name.startswith("_global_") and isinstance(hooks, dict)
        ],
        "path": list(sys.path),
        "streams": (sys.stdout, sys.stderr),
        "watchers": (sys.gettrace(), sys.getprofile(), threading.excepthook),
        "collector": (gc.isenabled(), gc.callbacks[:]),
        "warnings": list(warnings.filters),
        "names of hosts": socket.getaddrinfo,
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }


class Stops(Exception):
    """An error of the model's own."""


class Backward(torch.autograd.Function):
    """Stops in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: type[BaseException]) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.error


class Model(nn.Module):
    """Raises `error` at `where`."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.where, self.error = where, error
        if where == "forward hook":
            self.first.register_forward_hook(self.stop)
        if where == "backward hook":
            self.first.register_full_backward_hook(self.stop)

    def stop(self, *_: Any) -> Any:
        raise self.error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # What a model may have open, or have set, when it is stopped.
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), torch.autograd.graph.save_on_cpu():
            if self.where == "forward":
                torch.rand(3, device="cpu")
                raise self.error
        x = torch.relu(self.first(x))
        if self.where == "tensor hook":
            x.register_hook(self.stop)
        if self.where == "backward":
            x = Backward.apply(x, self.error)
        if self.where == "checkpoint":
            return torch.utils.checkpoint.checkpoint(self.within, x, use_reentrant=False)
        return self.second(x)

    def within(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 1:
            raise self.error
        return self.second(torch.sin(x))


class Optimizer(torch.optim.SGD):
    """Stops in its step."""

    def step(self, closure: Any = None) -> Any:
        raise type(self).error

    error: type[BaseException]


def stopping(error: type[BaseException]) -> type[Optimizer]:
    return type("Stopping", (Optimizer,), {"error": error})


def loss_of(error: type[BaseException]) -> Callable[[Any], Any]:
    def loss(output: Any) -> Any:
        raise error

    return loss


WHERE = ("forward", "forward hook", "backward hook", "tensor hook", "backward", "checkpoint", "loss", "optimizer")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXMEM_CACHE_DIR", "")


def stopped(model: Model, target: str, precision: Any) -> None:
    """Analyse a model that stops; the model too must be as it was."""
    where, error = model.where, model.error
    options: dict[str, Any] = {"loss": loss_of(error)} if where == "loss" else {}
    options |= {"optimizer": stopping(error)} if where == "optimizer" else {}
    expected = error if error is KeyboardInterrupt else AnalysisError
    with pytest.raises(expected):
        fxmem.analyze(model, torch.zeros(3, 4), target=target, precision=precision, **options)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """What the first analysis imports, and torch fills in when it is first used, is there."""
    for target in ("cpu", "h100"):
        fxmem.analyze(Model("", Stops), torch.zeros(3, 4), target=target, precision="bf16")


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stops])
@pytest.mark.parametrize(("target", "precision"), [("cpu", None), ("h100", "bf16")])
@pytest.mark.parametrize("where", WHERE)
def test_wherever_a_model_stops_the_process_is_as_it_was(
    where: str, target: str, precision: Any, error: type[BaseException]
) -> None:
    model = Model(where, error)
    before, names = process(), attributes()
    stopped(model, target, precision)
    after, now = process(), attributes()
    assert {what: after[what] for what in after if after[what] != before[what]} == {}
    assert {name for name in names.keys() | now.keys() if names.get(name) != now.get(name)} == set()


def test_an_analysis_after_an_interrupted_one_says_the_same() -> None:
    def told() -> str:
        return fxmem.analyze(nn.Linear(4, 2), torch.zeros(3, 4), target="h100").to_json()

    before = told()
    for where in WHERE:
        stopped(Model(where, KeyboardInterrupt), "h100", None)
    assert told() == before


# --- analyses within each other and side by side ----------------------------------------------------------------------


def peak(width: int, target: str = "h100") -> int:
    return fxmem.analyze(
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)), torch.zeros(8, width), target=target
    ).peak.requested_bytes


class Nested(nn.Linear):
    """Analyses another model in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fxmem.analyze(nn.Linear(3, 2), torch.zeros(5, 3), target="cpu")
        return super().forward(x)


def test_an_analysis_within_an_analysis_is_refused() -> None:
    """The outer one would count what the inner one runs."""
    names, alone = attributes(), peak(8)
    with pytest.raises(FxmemError, match="expected no analysis within another"):
        fxmem.analyze(Nested(4, 4), torch.zeros(2, 4), target="cpu")
    assert attributes() == names
    assert peak(8) == alone


@pytest.mark.truth
def test_analyses_in_several_threads_say_what_each_says_alone() -> None:
    widths = list(range(8, 40, 4))
    alone = [peak(width) for width in widths]
    names = attributes()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(peak, widths * 3)) == alone * 3
    assert attributes() == names


def test_training_in_another_thread_is_not_disturbed_and_does_not_disturb() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    stop, losses, errors = threading.Event(), [], []

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            while not stop.is_set() or len(losses) < 50:
                loss = model(torch.ones(3, 4)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        except BaseException as error:
            errors.append(error)

    alone = [peak(width) for width in (8, 16)]
    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert [peak(width) for width in (8, 16)] * 2 == alone * 2
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert losses[-1] <= losses[0]
    assert {type(parameter.data) for parameter in model.parameters()} == {torch.Tensor}


def in_child(widths: list[int]) -> list[int]:
    return [peak(width) for width in widths]


def holding(entered: threading.Event, leave: threading.Event) -> None:
    with one_at_a_time():
        entered.set()
        leave.wait()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_workers_analyse_too_even_if_another_thread_was_at_it() -> None:
    alone = in_child([8, 12])
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=holding, args=(entered, leave))
    thread.start()
    try:
        assert entered.wait(60)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map_async(in_child, [[8, 12], [8, 12], [12, 8]]).get(300) == [alone, alone, alone[::-1]]
    finally:
        leave.set()
        thread.join()


# --- many in a row ----------------------------------------------------------------------------------------------------


@pytest.mark.truth
@pytest.mark.usefixtures("others_frozen")
def test_analyses_in_a_row_keep_nothing() -> None:
    """Objects, not bytes: a leak of one record or one tensor to an analysis is some tens of objects to each."""

    def several(count: int) -> int:
        for _ in range(count):
            peak(8)
        gc.collect()
        return len(gc.get_objects())

    several(4)
    before = several(4)
    assert several(12) - before < 12
