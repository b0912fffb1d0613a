"""An interrupt ends an analysis wherever it comes: none is lost or ends the process, and torch is as it was."""

import signal
import sys
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.simulation.code.source_lines import error_place
from tests.simulation.step.model.test_hostile_models import attributes, process

MODEL = nn.Linear(8, 8)


def analyze() -> None:
    fxmem.analyze(MODEL, torch.zeros(2, 8), target="h100", optimizer=None)


def record() -> None:
    with fxmem.record("h100"):
        nn.Linear(8, 8).cuda()(torch.zeros(2, 8).cuda()).sum().backward()


def run_observed(run: Callable[[], None], observe: Callable[[CodeType], None]) -> None:
    """Run with every call of a Python function shown to `observe`, from within it."""

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            observe(frame.f_code)

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)


LOSE = ("find_torch_dispatch_rule", "__torch_dispatch__", "_on_death")
"""Where C++ calls Python an exception would end the process, or be lost."""


@pytest.mark.truth
@pytest.mark.parametrize("run", [analyze, record])
def test_wherever_an_interrupt_comes_it_is_raised_and_the_process_is_as_it_was(run: Callable[[], None]) -> None:
    for _ in range(3):
        run()  # until all caches are filled
    calls: list[CodeType] = []
    run_observed(run, calls.append)
    names = [each.co_name for each in calls]
    assert set(LOSE) <= set(names)
    # Each function that sets a state or puts it back, once; the rest is a sample of all calls.
    first = {code: index for index, code in reversed(list(enumerate(calls)))}
    chosen = {index for code, index in first.items() if code.co_name in (*LOSE, "__enter__", "__exit__")}
    asked = [index for index, name in enumerate(names) if name == "find_torch_dispatch_rule"]
    before, was = process(), attributes()
    for moment in sorted({*chosen, *asked[:: len(asked) // 4], *range(0, len(calls) * 9 // 10, len(calls) // 6)}):
        left = [moment]

        def interrupt(_: CodeType, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            run_observed(run, interrupt)
        after, now = process(), attributes()
        assert {what: after[what] for what in after if after[what] != before[what]} == {}, calls[moment]
        assert {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)} == set(), calls[moment]


class Frees(nn.Linear):
    """Is interrupted in a callback of what it frees, then sleeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        watch = weakref.ref(made.untyped_storage(), lambda _: signal.raise_signal(signal.SIGINT))
        del made
        assert watch() is None
        time.sleep(600)
        raise AssertionError("it slept on")


def test_an_interrupt_that_a_callback_drops_wakes_a_model_that_sleeps() -> None:
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        fxmem.analyze(Frees(8, 8), torch.zeros(2, 8), target="cpu")
    assert sys.unraisablehook is before


def interrupted() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_may_come_where_python_has_no_line() -> None:
    """As at the end of a `with`: `tb_lineno` is None there."""
    code, units = interrupted.__code__, len(interrupted.__code__.co_code) // 2
    table = bytes(0x80 | 15 << 3 | min(units - at, 8) - 1 for at in range(0, units, 8))  # of no line (PEP 626)
    work = FunctionType(code.replace(co_linetable=table), globals())
    with pytest.raises(KeyboardInterrupt) as raised, fxmem.record("h100"):
        work()
    assert raised.value.__traceback__ is not None
    innermost = raised.value.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    assert innermost.tb_lineno is None
    assert error_place(raised.value).endswith(f"test_interrupts.py:{code.co_firstlineno}")
