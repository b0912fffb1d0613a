"""Advice to a rank's step says what to write in the function that shards the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxmem
from fxmem.whatif.advice.changes import ModelBench
from fxmem.whatif.advice.variant import Change, NotApplicableError
from tests.sharded_models import Llama, fsdp, loss, tokens


def shard_mine(model: Any) -> Any:
    return fsdp("cuda")(model)


def make_bench(**ranks: Any) -> tuple[ModelBench, dict[str, Change]]:
    bench = ModelBench(fxmem.analyze(lambda: Llama(1), tokens(), loss=loss, rank=1, **ranks))
    return bench, {change.key: change for change in bench.changes()}


def write_code(bench: ModelBench) -> tuple[str, str]:
    return bench.plan_code(fxmem.plan(bench.step, "sqrt"), 0.5)


def test_the_whole_model_is_changed_before_the_users_function_shards_it() -> None:
    bench, changes = make_bench(ranks=2, parallelize=shard_mine)
    frozen = [change.note for key, change in changes.items() if key.startswith("freeze:")]
    assert frozen
    for note in (*frozen, changes["bf16-weights"].note):
        assert note.startswith("in shard_mine, before it shards the model; before the optimizer is made")
    assert changes["bf16-autocast"].code.startswith("with torch.autocast(")
    assert "shard_mine" not in changes["expandable-segments"].note
    code, note = write_code(bench)
    assert "fxmem.analyze(model, x, ranks=2, rank=1, parallelize=shard_mine)\n" in code
    assert note.startswith("the last line in shard_mine, before it shards the model; ")


def test_a_function_without_a_name_is_described() -> None:
    _, changes = make_bench(ranks=2, parallelize=lambda model: fsdp("cuda")(model))
    assert changes["bf16-weights"].note.startswith(
        "in the function that shards the model, before it shards the model; "
    )


def test_a_mesh_takes_half_precision_by_fsdps_policy_once() -> None:
    bench, changes = make_bench(mesh={"fsdp": 2}, reshard_after_forward=False)
    assert "mp_policy=policy" in changes["bf16-autocast"].code
    code, note = write_code(bench)
    assert 'fxmem.analyze(model, x, mesh={"fsdp": 2}, rank=1, reshard_after_forward=False)\n' in code
    assert note.startswith("the last line before the model is sharded; ")
    half, same = make_bench(mesh={"fsdp": 2}, precision="bf16")
    for key in ("bf16-autocast", "bf16-weights"):
        with pytest.raises(NotApplicableError, match="in half precision already"):
            same[key].make(half.start, half.step)


def test_one_cards_advice_is_as_it_was() -> None:
    bench = ModelBench(fxmem.analyze(lambda: Llama(1), tokens(), loss=loss))
    notes = {change.key: change.note for change in bench.changes()}
    assert notes["bf16-weights"].startswith("before the optimizer is made")
    assert write_code(bench)[0].startswith("import fxmem\nanalysis = fxmem.analyze(model, x)\n")
    assert not torch.distributed.is_initialized()
