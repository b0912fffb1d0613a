"""Growth that ends, growth that is none, and its endless twins: what is kept, by whom, and until when."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.records.parts import Growth
from fxmem.show.run_facts import describe_growth, growth_facts

KIB = 1 << 10


def record(body: Callable[[nn.Module, torch.optim.Optimizer], None], **settings: Any) -> fxmem.RecordedProgram:
    with fxmem.record("h100", steps=settings.pop("steps", 4), **settings) as found:
        net = nn.Linear(16, 16).cuda()
        body(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return found


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 16) -> torch.Tensor:
    x = torch.randn(rows, 16, device="cuda")
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return x


def grown(found: fxmem.RecordedProgram) -> Growth:
    (only,) = found.program.grown
    return only


def test_the_programs_own_end_bounds_what_it_keeps() -> None:
    kept_here = []

    def short(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(50):
            kept_here.append(step(net, optimizer))

    def epochs(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loader = torch.utils.data.DataLoader(list(range(20)), batch_size=2)
        for _ in range(3):
            of_epoch = []
            for _, batch in enumerate(loader):
                of_epoch.append(step(net, optimizer, 2 * len(batch)))

    def endless(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        only_added = []
        while True:
            only_added.append(step(net, optimizer))

    def counted(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        number, until_most = 0, []
        while True:
            until_most.append(step(net, optimizer))
            number += 1
            if number >= 30:
                break

    assert [grown(record(each)).ends for each in (short, epochs, endless, counted)] == [50, 10, None, 30]
    found = record(endless)
    assert grown(found).is_endless
    assert "out of memory at about step " in describe_growth(found.profile)
    found = record(short)
    assert describe_growth(found.profile).partition(") ")[2].startswith("until step 50, to ")


def test_longer_and_longer_batches_are_no_growth() -> None:
    """Each is let go when the next one comes; that an optimizer allocates the same each time proves nothing."""

    def lengths(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        rows = 16
        while True:
            x = step(net, optimizer, rows)
            rows += 16
            del x
            batch = [torch.randn(rows, 8, device="cuda") for _ in range(rows // 16)]  # noqa: F841

    found = record(lengths, steps=6)
    assert not found.program.grown
    assert "grow" not in describe_growth(found.profile)


class Pool:
    """A replay pool that counts for itself."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self.pooled: list[torch.Tensor] = []

    def push(self, value: torch.Tensor) -> None:
        """Keep it, or put it in the place of another."""
        if self.count < self.most:
            self.count += 1
            self.pooled.append(value)
        else:
            self.pooled[0] = value


def test_a_pool_that_counts_for_itself_says_where_it_ends() -> None:
    def fill(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pool = Pool(50)
        while True:
            pool.push(step(net, optimizer))

    found = grown(record(fill))
    assert (found.holder, found.until, found.is_endless) == ("pool.pooled", 51, False)


def test_the_history_of_lbfgs_ends() -> None:
    with fxmem.record("h100", steps=4) as found:
        image = torch.rand(16, 16, device="cuda", requires_grad=True)
        optimizer = torch.optim.LBFGS([image], max_iter=1, history_size=100)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = image.square().sum()
            loss.backward()
            return loss

        while True:
            optimizer.step(closure)
    assert (grown(found).holder, grown(found).until) == ("optimizer.state", 101)  # the first step has no pair yet


def test_what_may_come_again_is_not_known_to_go_on() -> None:
    def by_key(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        by_sample: dict[int, torch.Tensor] = {}
        keys = iter([3, 1, 4, 2, 5, 6, 9])
        while True:
            by_sample[next(keys)] = step(net, optimizer)

    found = record(by_key)
    assert "out of memory" not in describe_growth(found.profile)
    assert describe_growth(found.profile).endswith("whether it goes on was not seen: --steps 200")


def test_a_saved_tensor_hook_that_returns_its_argument_leaks() -> None:
    """The node keeps its own result with its graph; the twin detaches it."""

    def hooked(pack: Callable[[torch.Tensor], torch.Tensor]) -> fxmem.RecordedProgram:
        def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            while True:
                x = step(net, optimizer)
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                    net(x).exp()

        return record(train)

    found = hooked(lambda x: x)
    assert found.program.growth_bytes == 2 * KIB  # the input and the result, 16 x 16 floats each
    assert grown(found).is_endless
    assert not hooked(lambda x: x.detach()).program.grown


@pytest.mark.parametrize("is_inner", [False, True])
def test_gradients_that_are_returned_end_steps(*, is_inner: bool) -> None:
    """Without an optimizer, and where no other gradients follow; the chain of updates is a leak."""
    with fxmem.record("h100", steps=4) as found:
        net = nn.Linear(16, 16, bias=False).cuda()
        weights = net.weight
        while True:
            given = {"weight": weights}
            loss = torch.func.functional_call(net, given, (torch.randn(16, 16, device="cuda"),)).exp().sum()
            (gradient,) = torch.autograd.grad(loss, [weights], create_graph=is_inner)
            weights = weights - 0.1 * gradient if is_inner else (weights - 0.1 * gradient).detach().requires_grad_()
            if is_inner:
                loss.backward(retain_graph=True)
    assert len(found.program.steps) == 4
    assert bool(found.program.growth_bytes) == is_inner


def test_a_step_of_torch_func_is_one() -> None:
    with fxmem.record("h100", steps=4) as found:
        net = nn.Linear(16, 16, bias=False).cuda()
        params = dict(net.named_parameters())
        gradients_of = torch.func.grad(lambda given, x: torch.func.functional_call(net, given, (x,)).exp().sum())
        while True:
            gradients = gradients_of(params, torch.randn(16, 16, device="cuda"))
            params = {name: each - 0.01 * gradients[name] for name, each in params.items()}
    assert len(found.program.steps) == 4
    assert grown(found).holder == "graph of params"
    assert grown(found).is_endless


class Cyclic(nn.Linear):
    """A model whose hook leads back to it: 1,050,624 bytes, and as many of gradients."""

    def __init__(self) -> None:
        super().__init__(512, 512)
        self.register_forward_hook(lambda *_: self.extra_repr() and None)


def trials(*, frees: bool = True) -> fxmem.RecordedProgram:
    with fxmem.record("h100", steps=4) as found:
        if not frees:
            gc.disable()
        while True:
            net = Cyclic().cuda()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.randn(16, 512, device="cuda")).sum().backward()
            optimizer.step()
            del net, optimizer
    return found


def test_what_python_would_collect_is_said() -> None:
    (said,) = (each.text for each in trials().profile.assumptions if each.topic == "cycles")
    assert said.startswith("2.00 MiB that a step leaves in reference cycles")


def test_what_was_there_before_and_is_dropped_in_a_cycle_is_freed_within_eight_steps() -> None:
    def drop_old(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        old = [Cyclic().cuda()]
        for number in range(20):
            step(net, optimizer)
            if number == 5:
                old.clear()

    alive = [each.retained_bytes for each in record(drop_old, steps=20).program.rounds]
    assert alive[4] - alive[15] >= 4 * (512 * 512 + 512)
    assert alive[1:] == sorted(alive[1:], reverse=True)


def test_a_program_that_switches_the_collector_off_keeps_its_cycles() -> None:
    found = trials(frees=False)
    assert gc.isenabled()
    assert found.program.growth_bytes == 2 * 4 * (512 * 512 + 512)
    assert grown(found).is_endless
    assert "reference cycles" in describe_growth(found.profile)


def test_a_cached_function_keeps_each_folds_model() -> None:
    def folds(keep: Callable[[nn.Module], Any]) -> fxmem.RecordedProgram:
        with fxmem.record("h100", steps=7) as found:
            while True:
                net = nn.Linear(16, 16).cuda()
                optimizer = torch.optim.AdamW(net.parameters())
                for _ in range(2):
                    optimizer.zero_grad()
                    net(torch.randn(16, 16, device="cuda")).sum().backward()
                    optimizer.step()
                keep(net)
        return found

    cached = functools.lru_cache(lambda net: None)
    (found,) = folds(cached).program.grown_anew
    assert (found.holder, found.nbytes) == ("keep", 2 * 4 * (16 * 16 + 16))
    assert not folds(lambda net: None).program.grown_anew


class Meter:
    """Keeps all, where another file's meter does not."""

    def __init__(self) -> None:
        self.measured: list[torch.Tensor] = []

    def note(self, value: torch.Tensor) -> None:
        """Keep it."""
        self.measured.append(value)


BOUNDED_METER = """
class Meter:
    def __init__(self):
        self.measured = []

    def note(self, value):
        self.measured.append(value)
        if len(self.measured) > 30:
            self.measured.pop(0)
"""


def test_a_bound_is_of_the_class_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bounded_meter.py").write_text(BOUNDED_METER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    bounded = importlib.import_module("bounded_meter")

    def fill(meter: Any) -> Growth:
        def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            while True:
                meter.note(step(net, optimizer))

        return grown(record(body))

    try:
        endless, ending = fill(Meter()), fill(bounded.Meter())
    finally:
        del sys.modules["bounded_meter"]
    assert (endless.until, endless.is_endless) == (None, True)
    assert (ending.until, ending.is_endless) == (31, False)
    assert ending.kept_at.startswith(str(tmp_path))
    assert endless.kept_at.startswith(__file__)


def test_what_a_generator_has_in_its_frame_is_named() -> None:
    def batches(most: int | None) -> Iterator[torch.Tensor]:
        past: Any = [] if most is None else deque(maxlen=most)
        while True:
            past.append(torch.randn(16, 16, device="cuda"))
            yield past[-1]

    def train(most: int | None) -> fxmem.RecordedProgram:
        def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for x in batches(most):  # no variable has the generator
                net(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        return record(body, steps=6)

    found = grown(train(None))
    assert (found.holder, found.nbytes, found.is_endless) == ("batches.past", KIB, True)
    assert not train(2).program.grown


class Kept:
    """Two lists."""

    def __init__(self) -> None:
        self.past: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []


def test_two_lists_of_one_object_are_both_named() -> None:
    """The way up from both leads through the same object."""

    def batches() -> Iterator[torch.Tensor]:
        kept = Kept()
        while True:
            kept.past.append(torch.randn(16, 16, device="cuda"))
            kept.seen.append(torch.randn(32, 16, device="cuda"))
            yield kept.past[-1]

    def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x in batches():
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = {each.holder: each.nbytes for each in record(body, steps=6).program.grown}
    assert found == {"batches.kept.past": KIB, "batches.kept.seen": 2 * KIB}


class Plain:
    """One of very many."""

    def __init__(self, number: int) -> None:
        self.number, self.next = number, None


class Store:
    """What has the list, some levels down."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_a_holder_behind_very_many_objects_is_found() -> None:
    world, last = [Plain(number) for number in range(200_000)], Store(Store(Meter()))

    def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first, after = world, last
        while first:
            after.inner.inner.note(step(net, optimizer))

    found = grown(record(body))
    assert (found.holder, found.nbytes, found.is_endless) == ("after.inner.inner.measured", KIB, True)


def test_what_is_made_anew_now_and_then_is_not_proved_to_go_on() -> None:
    def resets(every: int) -> fxmem.RecordedProgram:
        def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            total, number = torch.zeros((), device="cuda"), 0
            while True:
                number += 1
                total = total + net(step(net, optimizer)).exp().sum()
                if number % every == 0:
                    total = torch.zeros((), device="cuda")

        return record(body)

    def passes(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def run(batches: Iterator[int]) -> None:
            of_pass = []
            for _ in batches:  # who knows how many
                of_pass.append(step(net, optimizer))

        for _ in range(20):
            run(iter(lambda: 0, 1))

    for found in (resets(25), record(passes)):
        assert found.program.growth_bytes
        assert describe_growth(found.profile).endswith("whether it goes on was not seen: --steps 200")


def test_the_programs_end_alone_is_no_proof_that_it_goes_on() -> None:
    def epochs(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        of_all = []
        for _ in range(20):
            for _ in range(30):
                of_all.append(step(net, optimizer))
            of_all.clear()

    found = record(epochs)
    assert (grown(found).ends, grown(found).is_endless) == (600, False)
    assert describe_growth(found.profile).endswith("whether it goes on was not seen: --steps 200")
    assert growth_facts(found.profile.step)[0].text.endswith(", until step 600 at the latest")


def test_what_was_emptied_and_grows_again_is_said_so() -> None:
    def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        emptied, number = [], 0
        while True:
            number += 1
            emptied.append(step(net, optimizer))
            if number % 8 == 0:
                emptied.clear()

    assert describe_growth(record(body, steps=14).profile).endswith(", and has had more: it was emptied in step 9")
    assert "emptied in" not in describe_growth(record(body, steps=7).profile)


def test_what_is_kept_of_each_second_step_grows() -> None:
    def every_second(*, replaces: bool) -> fxmem.RecordedProgram:
        with fxmem.record("h100", enough=lambda rounds: len(rounds) >= 3 and not rounds[-1].may_show_more) as found:
            net = nn.Linear(16, 16).cuda()
            optimizer, sometimes, number = torch.optim.SGD(net.parameters(), lr=0.1), list[torch.Tensor](), 0
            while True:
                number += 1
                x = torch.randn(16, 16, device="cuda")
                net(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number % 2:
                    sometimes[:] = [x] if replaces else [*sometimes, x]
        return found

    found = every_second(replaces=False)
    assert (grown(found).nbytes, grown(found).tensors, grown(found).every) == (KIB // 2, 1, 2)
    assert found.program.growth_bytes == KIB // 2
    assert "1 tensor at least every 2 steps" in growth_facts(found.profile.step)[0].text
    assert not every_second(replaces=True).program.grown


def test_a_cached_function_is_full_at_its_size() -> None:
    cached = functools.lru_cache(20)(lambda number: torch.zeros(16, 16, device="cuda"))

    def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        number = 0
        while True:
            number += 1
            cached(number)
            step(net, optimizer)

    found = grown(record(body))
    assert (found.holder, found.nbytes, found.until) == ("cached", KIB, 20)


@pytest.mark.parametrize("is_emptied", [False, True])
def test_what_is_kept_of_micro_batches(*, is_emptied: bool) -> None:
    def body(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        of_micro_batches = []
        while True:
            for _ in range(3):
                x = torch.randn(16, 16, device="cuda")
                net(x).sum().backward()
                of_micro_batches.append(x)
            optimizer.step()
            optimizer.zero_grad()
            if is_emptied:
                of_micro_batches = []

    found = record(body)
    assert found.program.growth_bytes == (0 if is_emptied else 3 * KIB)
    assert [each.tensors for each in found.program.grown] == ([] if is_emptied else [3])
