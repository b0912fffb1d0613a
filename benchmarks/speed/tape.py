"""What the tape of single operators costs in time, on one core of the CPU: `python -m benchmarks.speed.tape`.

Prints ratios, each of medians of runs that take turns: a real step of a small GPT-2 with a plan over the step without,
beside the FLOPs that run again; and the forward of a chain of `tanh` of four numbers, which is nothing but calls, under
the tape over without, where every result is recorded and where one in twenty is recomputed.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Collection

import torch
import transformers

import fxmem
from fxmem.checkpointing.tape.recorder import rematerialize
from fxmem.checkpointing.tape.values import OpKey

RUNS = 15


def ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """CPU time of the first over the second's."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(RUNS + 2):
        for function, found in zip((one, other), times, strict=True):
            begin = time.process_time()
            function()
            if run > 1:
                found.append(time.process_time() - begin)
    return statistics.median(times[0]) / statistics.median(times[1])


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=2000, bos_token_id=0, eos_token_id=0)
    model, ids = transformers.GPT2LMHeadModel(config).train(), torch.zeros(4, 256, dtype=torch.long)
    analysis = fxmem.analyze(model, {"input_ids": ids, "labels": ids}, target="cpu", optimizer=None)
    for budget in (0.8, 0.6):
        plan = fxmem.plan(analysis, "mincut", budget)
        planned = fxmem.checkpoint(copy.deepcopy(model), plan)

        def step(model: torch.nn.Module) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()

        found = ratio(lambda planned=planned: step(planned), lambda: step(model))
        print(
            f"GPT-2, 4 layers of width 256, 4 x 256 tokens, budget {budget:.0%}: +{plan.extra_fraction or 0:.2%} "
            f"FLOPs, {found:.2f} times as long"
        )
    chain, x = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(400))), torch.zeros(4, requires_grad=True)

    def taped(only: Collection[OpKey] | None) -> None:
        with rematerialize((), (), only=only):
            chain(x)

    for only, what in (None, "all"), ({("aten.tanh.default", n) for n in range(0, 400, 20)}, "one in 20"):
        found = ratio(functools.partial(taped, only), lambda: chain(x))
        print(f"400 calls of tanh on four numbers, {what} recorded: {found:.1f} times as long")


if __name__ == "__main__":
    main()
