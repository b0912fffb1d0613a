"""Results that wait in the host's memory: the same bits, and off the card."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxmem.checkpointing import apply, uncheckpoint
from fxmem.checkpointing.tape.host_copies import HostCopies, HostCopy, HostMemory
from fxmem.planning import OperatorValue
from fxmem.records.plan import Region
from fxmem.records.units import Application
from tests.checkpointing.test_regions import IMAGES, blocks, same, trained
from tests.random_models import BATCH, WIDTH, RandomModel
from tests.remade import results, seen

pytestmark = pytest.mark.usefixtures("others_frozen")


def everything(
    model: nn.Module, *args: Any, of: Callable[[OperatorValue], bool] = lambda _: True, remakes: bool = False
) -> list[Region]:
    """All of `of` that is saved is offloaded; `remakes`: the rest is recomputed, from what is offloaded or kept."""
    calls, values = seen(model, *args)
    sent = [value for value in values if value.saved and not value.overwritten and of(value)]
    rest = [value for value in values if value.saved and value not in sent] if remakes else []
    held = results(calls, sent) if remakes else ()
    return [Region(first_node=0, last_node=1, offloads=results(calls, sent), remakes=results(calls, rest), holds=held)]


def offloaded(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """A copy of the model, its results offloaded."""
    return apply(copy.deepcopy(model), everything(model, *args, **options), Application.OPERATORS)


def saved_on_the_device(model: nn.Module, *args: Any) -> int:
    """Bytes that are alive between forward and backward, beside copies, parameters and what is given."""
    out = model(*args)
    gc.collect()
    copies = [each._host for each in gc.get_objects() if type(each) is HostCopy]
    known = {each.untyped_storage()._cdata for each in (*model.parameters(), *args, *copies)}
    alive = (each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor)
    found = {each._cdata: each.nbytes() for each in alive if each._cdata not in known}
    del out
    return sum(found.values())


MIXED = blocks(
    nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(4, 4, 1), nn.Sigmoid()
)


@pytest.mark.parametrize("remakes", [False, True])
def test_gradients_are_the_same_bits(remakes: bool) -> None:
    names = {"of": lambda value: value.call % 2 == 0} if remakes else {}
    assert same(
        trained(copy.deepcopy(MIXED), IMAGES), trained(offloaded(MIXED, IMAGES, remakes=remakes, **names), IMAGES)
    )


@pytest.mark.truth
@pytest.mark.parametrize("first", [0, 20])
def test_random_programs(first: int) -> None:
    def left_behind(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        found = model(torch.randn(BATCH, WIDTH))
        sum(each.square().sum() for each in (found if isinstance(found, tuple) else (found,))).backward()  # type: ignore[union-attr]
        return [torch.get_rng_state(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]

    for seed in range(first, first + 20):
        torch.manual_seed(seed)
        model, chance, x = RandomModel(seed).train(), random.Random(seed), torch.randn(BATCH, WIDTH)
        try:
            expected = left_behind(copy.deepcopy(model))
        except RuntimeError:  # a program that autograd itself refuses
            continue
        some = lambda _: chance.random() < 0.5  # noqa: B023, E731
        for planned in (offloaded(model, x), offloaded(model, x, of=some, remakes=True)):
            assert all(map(torch.equal, expected, left_behind(planned))), seed


@pytest.mark.truth
def test_what_is_offloaded_is_not_on_the_device_between_forward_and_backward() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(6)))
    x = torch.randn(256, 64)
    kept = apply(copy.deepcopy(model), everything(model, x, of=lambda _: False, remakes=False), Application.OPERATORS)
    before, after = saved_on_the_device(kept, x), saved_on_the_device(offloaded(model, x), x)
    assert before - after == 5 * x.nbytes  # the last is the model's result, which its caller has


def test_backward_twice_and_of_second_order() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid()), torch.randn(4, 6)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        out = model(x).square().sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        weights = list(model.parameters())
        (first,) = torch.autograd.grad(out, weights[:1], create_graph=True)
        return [weights[0].grad, *torch.autograd.grad(first.square().sum(), weights[:1])]  # type: ignore[list-item]

    assert all(map(torch.equal, gradients(copy.deepcopy(model)), gradients(offloaded(model, x))))


def _skip(out: torch.Tensor) -> None:
    assert out.isfinite().all()


def _retain(out: torch.Tensor) -> None:
    out.sum().backward(retain_graph=True)


def _stop(out: torch.Tensor) -> None:
    def raise_it(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    out.register_hook(raise_it)
    with pytest.raises(KeyboardInterrupt):
        out.sum().backward()


@pytest.mark.truth
@pytest.mark.parametrize("use", [_skip, _retain, _stop])
def test_copies_of_a_graph_that_backward_does_not_walk_are_freed(use: Callable[[torch.Tensor], None]) -> None:
    model = offloaded(MIXED, IMAGES)
    for _ in range(3):
        use(model(IMAGES))
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is HostCopy]


def test_host_memory_is_used_again() -> None:
    memory, x = HostMemory(), torch.randn(8)
    first = HostCopies(memory).send(x, 0)
    address = first._host.data_ptr()
    del first
    assert HostCopies(memory).send(x + 1, 0)._host.data_ptr() == address
    assert copy.deepcopy(memory)._free == {}


def test_host_memory_does_not_grow_with_sizes_that_change() -> None:
    memory = HostMemory()
    for size in range(8, 20):
        kept = [HostCopies(memory).send(torch.zeros(size), place) for place in range(2)]
        del kept
    assert sum(len(each) for each in memory._free.values()) == 2


def test_a_fetch_begins_the_next_in_the_plans_order() -> None:
    copies = HostCopies(HostMemory())
    made = [copies.send(torch.full((4,), float(number)), 3 - number) for number in range(4)]
    stand_ins = [each.represent(torch.zeros(4)) for each in made]
    copies.begin_backward()
    assert [each._fetched is not None for each in made] == [False, False, True, True]
    assert stand_ins[3].find_tensor().tolist() == [3.0] * 4
    assert [each._fetched is not None for each in made] == [False, True, True, False]
    assert [each.find_tensor()[0].item() for each in reversed(stand_ins)] == [3.0, 2.0, 1.0, 0.0]


def test_the_program_waits_for_a_fetch_that_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block is free for the program then, and the copy must not write there any more."""
    waited: list[str] = []
    stream = type("", (), {"wait_event": lambda _, event: waited.append(event)})
    monkeypatch.setattr("fxmem.checkpointing.tape.host_copies._copy", lambda stream, to, source: f"of {to.numel()}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream())
    copies = HostCopies(HostMemory())
    copy = copies.send(torch.zeros(8), 0)
    copies.finish()
    kept = copy.represent(torch.zeros(8))
    copies.begin_backward()
    assert waited == ["of 8"]  # what was sent
    del copy, kept
    gc.collect()
    assert waited == ["of 8", "of 8"]


def test_several_tensors_on_one_storage_come_back_once() -> None:
    whole = torch.arange(6.0)
    found = HostCopies(HostMemory()).send(whole, 0)
    both = [found.represent(whole[:3]), found.represent(whole.view(2, 3).t())]
    first = both[0].find_tensor()
    alive = weakref.ref(first.untyped_storage())
    second = both[1].find_tensor()
    assert first.data_ptr() == second.data_ptr()
    assert second.tolist() == [[0, 3], [1, 4], [2, 5]]
    del first, second
    assert alive() is None


def test_what_is_written_to_while_it_is_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8)
    copies = HostCopies(HostMemory())
    monkeypatch.setattr("fxmem.checkpointing.tape.host_copies._copy", lambda stream, to, source: object())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("", (), {"wait_event": lambda *_: None})())
    copies.send(x, 0)
    x.add_(1)
    with pytest.raises(RuntimeError, match="while it was being copied to the host"):
        copies.finish()


def test_the_model_is_copied_saved_and_restored(tmp_path: Any) -> None:
    model = offloaded(MIXED, IMAGES)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = trained(copy.deepcopy(MIXED), IMAGES)
    for each in (copy.deepcopy(model), loaded, uncheckpoint(copy.deepcopy(model))):
        assert same(expected, trained(each, IMAGES))
