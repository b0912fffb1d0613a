"""An interrupt ends an analysis between two operators: none is lost, none is raised where C++ calls Python."""

import signal
import weakref

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze

INTERRUPT = signal.SIGINT
_reached: list[str] = []
"""By the forward; the analysis runs a copy of the model."""


class Interrupted(nn.Module):
    """A model during whose forward signals arrive."""

    def __init__(self, times: int, *, while_freeing: bool) -> None:
        super().__init__()
        self.linear, self.times, self.while_freeing = nn.Linear(8, 8), times, while_freeing

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        if self.while_freeing:
            watch = weakref.ref(made.untyped_storage(), lambda _: signal.raise_signal(INTERRUPT))
            del made
            assert watch() is None
        else:
            for _ in range(self.times):
                signal.raise_signal(INTERRUPT)
        _reached.append("after the signals")
        return self.linear(x)


@pytest.mark.parametrize("while_freeing", [False, True])
def test_an_interrupt_is_raised_at_the_next_operator(while_freeing: bool) -> None:
    _reached.clear()
    model = Interrupted(1, while_freeing=while_freeing)
    with pytest.raises(KeyboardInterrupt):
        analyze(model, torch.zeros(2, 8), target="cpu")
    assert _reached == ["after the signals"]
    assert signal.getsignal(INTERRUPT) is signal.default_int_handler


def test_a_second_interrupt_is_raised_at_once() -> None:
    _reached.clear()
    model = Interrupted(2, while_freeing=False)
    with pytest.raises(KeyboardInterrupt):
        analyze(model, torch.zeros(2, 8), target="cpu")
    assert not _reached


def test_an_interrupt_in_the_last_moment_is_not_lost() -> None:
    model = nn.Linear(8, 8)

    def progress(text: str) -> None:
        signal.raise_signal(INTERRUPT)

    with pytest.raises(KeyboardInterrupt):
        analyze(model, torch.zeros(2, 8), target="cpu", mode="infer", progress=progress)
