"""One rank of many: what its report says, what is left as it was, what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble
from torch.distributed.tensor._sharding_prop import ShardingPropagator

import fxmem
from fxmem._torch import distributed as torch_distributed
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import analyze as analyze_verb
from fxmem.cli.verbs import run as run_verb
from fxmem.cli.verbs import show as show_verb
from fxmem.cli.verbs import validate as validate_verb
from fxmem.errors import AnalysisError, UsageError
from fxmem.memory.report_reader import load_report
from fxmem.records.profile import Kind
from tests.sharded_models import SEQUENCE, VOCABULARY, WIDTH, Llama, fsdp, fsdp_tp, hsdp, loss, tokens, tp
from tests.verbs import called


def analyze(**settings: Any) -> fxmem.Analysis:
    return fxmem.analyze(Llama, tokens(), loss=loss, **{"ranks": 8, "rank": 0, "parallelize": fsdp("cuda"), **settings})


def test_a_rank_says_what_is_sharded_and_what_is_communicated(tmp_path: Path) -> None:
    analysis = analyze(rank=5)
    profile, model = analysis.profile, Llama()
    parameters = {each.name: each.nbytes for each in profile.storages if each.kind is Kind.PARAMETER}
    whole = {name: each.numel() * 4 for name, each in model.named_parameters()}
    assert parameters.keys() == whole.keys()
    assert parameters["layers.0.attention.q.weight"] == whole["layers.0.attention.q.weight"] // 8
    assert parameters["output.weight"] == 32 * WIDTH * 4  # 250 rows, padded to eight times 32
    layer = sum(each.numel() for each in model.layers[0].parameters()) * 4
    gathered = [each.nbytes for each in profile.storages if each.kind is Kind.UNSHARDED]
    assert gathered.count(WIDTH * WIDTH * 4) == 2 * 3 * 4  # a layer's four, for forward and again for backward
    buffers = {each.nbytes for each in profile.storages if each.kind is Kind.COMMUNICATION}
    assert layer in buffers
    assert len({each.stream for each in profile.storages}) == 3  # the default one, of copies in, of reductions
    ranks = profile.step.ranks
    assert ranks is not None
    assert (ranks.world, ranks.rank, [(each.name, each.size) for each in ranks.groups]) == (8, 5, [("all ranks", 8)])
    moved = {each.kind: (each.count, each.moved_bytes) for each in ranks.collectives}
    rest = 4 * WIDTH + 2 * 256 * WIDTH * 4  # the last norm, and embedding and output of 256 rows
    assert moved["reduce-scatter"] == (4, (3 * layer + rest) * 7 // 8)
    text = analysis.table()
    assert "Rank        5 of 8" in text
    assert "Sends       all ranks: " in text
    assert profile.target.ranks == 8
    assert not any("NCCL" in each.what for each in profile.unknowns)  # of the one group it is in the process's bytes
    assert "with the CUDA context and NCCL" in text
    analysis.to_json(tmp_path / "rank.json")
    assert load_report(tmp_path / "rank.json") == analysis.report()


def test_the_worlds_size_costs_nothing() -> None:
    few, many = analyze(), analyze(ranks=1024)
    assert [each.name for each in few.profile.ops] == [each.name for each in many.profile.ops]


@pytest.mark.truth
def test_dtensor_runs_an_operator_over_global_shapes_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def count(self: Any, schema: Any) -> Any:
        runs.append(schema.op)
        return original(self, schema)

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", count)
    monkeypatch.setattr(torch_distributed, "_RESULTS", {})
    first, second = (analyze(ranks=2, rank=rank, parallelize=tp("cuda")) for rank in (0, 1))
    assert torch.ops.aten.mm.default in runs or torch.ops.aten.linear.default in runs
    seen = len(runs)
    third = analyze(ranks=2, rank=1, parallelize=tp("cuda"))
    assert len(runs) == seen
    assert first.profile.storages == second.profile.storages == third.profile.storages


def test_tensors_of_global_shape_are_nobodys() -> None:
    analysis = analyze(ranks=4, rank=3, parallelize=tp("cuda"))
    largest = max(each.nbytes for each in analysis.profile.storages if each.kind is not Kind.WORKSPACE)
    padded = -(-VOCABULARY // 4) * 4
    assert largest == 2 * SEQUENCE * padded * 4  # the logits, which are gathered; weights are quarters


@pytest.mark.truth
@pytest.mark.parametrize(
    ("shard", "groups"),
    [(hsdp("cuda"), {("replicate", 2), ("fsdp", 4)}), (fsdp_tp("cuda", checkpoint=True), {("fsdp", 4), ("tp", 2)})],
    ids=["hsdp", "fsdp x tp"],
)
def test_a_mesh_has_groups_by_name(shard: Any, groups: set[tuple[str, int]]) -> None:
    ranks = analyze(parallelize=shard).profile.step.ranks
    assert ranks is not None
    assert {(each.name, each.size) for each in ranks.groups} == groups


def left_by_torch() -> tuple[Any, ...]:
    return (
        torch.distributed.is_initialized(),
        DeviceMesh.__init__,
        torch.UntypedStorage.resize_,
        torch.cuda.Stream,
        os.environ.get("RANK"),
        os.environ.get("WORLD_SIZE"),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        sys.excepthook,
    )


def test_without_a_mesh_all_ranks_shard_on_their_cards() -> None:
    def alone(model: nn.Module) -> None:
        fully_shard(model)

    def on_a_mesh(model: nn.Module) -> None:
        fully_shard(model, mesh=init_device_mesh("cuda", (8,)))

    assert analyze(parallelize=alone).profile.storages == analyze(parallelize=on_a_mesh).profile.storages


@pytest.mark.truth
def test_torch_is_left_as_it_was_also_after_an_error() -> None:
    before = left_by_torch()

    def parallelize(model: nn.Module) -> None:
        fsdp("cuda")(model)
        raise ValueError("no more")

    with pytest.raises(AnalysisError, match=r"it raised ValueError: no more at .*test_rank.py:\d+ in parallelize"):
        analyze(parallelize=parallelize)
    assert left_by_torch() == before
    first = analyze().peak
    assert left_by_torch() == before
    analyze(parallelize=fsdp_tp("cuda"))
    assert analyze().peak == first


def too_few(model: nn.Module) -> None:
    init_device_mesh("cuda", (3, 2))


def asks_others(model: nn.Module) -> None:
    torch.distributed.all_gather_object([None] * 8, "mine")


def reads_a_sum(model: nn.Module) -> None:
    total = torch.ones(1, device="cuda")
    torch.distributed.all_reduce(total)
    fsdp("cuda", reshard=bool(total.item() > 4))(model)


class DeepSpeedEngine(nn.Module):
    """Known by its name."""


def wraps_in_deepspeed(model: nn.Module) -> nn.Module:
    return DeepSpeedEngine()


def imports_deepspeed(model: nn.Module) -> None:
    raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")


def bubbles_to_zero(model: nn.Module) -> None:
    ScheduleInterleavedZeroBubble([], 8)


REFUSED = [
    ({"parallelize": None}, UsageError, "ranks and parallelize together"),
    ({"ranks": None, "rank": None}, UsageError, "ranks and parallelize together"),
    ({"ranks": 0}, UsageError, "ranks of at least 1"),
    ({"rank": 8}, UsageError, "a rank of 0 to 7, got 8"),
    ({"parallelize": lambda model: 1}, UsageError, "return a module, or None, got int"),
    ({"ranks": 4, "parallelize": too_few}, AnalysisError, "in too_few"),
    ({"parallelize": asks_others}, AnalysisError, "to need no values, such as other ranks send"),
    ({"parallelize": reads_a_sum}, AnalysisError, "in reads_a_sum: `fsdp("),
    ({"parallelize": wraps_in_deepspeed}, AnalysisError, "an engine of DeepSpeed"),
    ({"parallelize": imports_deepspeed}, AnalysisError, "ZeRO-3 is fully_shard"),
    ({"parallelize": bubbles_to_zero}, AnalysisError, "Use ScheduleInterleaved1F1B"),
]


@pytest.mark.parametrize(("settings", "kind", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_makes_no_rank_is_refused_in_one_line(settings: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        analyze(**settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_a_process_group_of_the_callers_is_left_alone() -> None:
    with torch_distributed.group_of_its_own():
        torch_distributed.begin_fake_group(torch.distributed.init_process_group, 2, 1)
        with pytest.raises(UsageError, match="without a process group"):
            analyze()
        assert torch.distributed.get_rank() == 1


KNOWN = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
for operation in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
    tensor = torch.tensor([1, 2], device="cuda")
    dist.all_reduce(tensor, op=operation)
    found.append(tensor.tolist())
part = torch.zeros(1, dtype=torch.int64, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(ranks, device="cuda"))
found += [part.tolist(), dist.nn.functional.all_reduce(torch.tensor([3], device="cuda")).tolist()]
assert found == [[4, 8], [1, 16], [1, 2], [1, 2], [4 * rank], [12]], found
model = torch.nn.Linear(4, 4).cuda()
model(torch.randn(2, 4, device="cuda")).sum().backward()
torch.optim.SGD(model.parameters()).step()
"""
"""What gloo gives four processes, but for the average, which it does not know."""


def test_what_ranks_reduce_is_known_where_it_is_known_of_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KNOWN)
    code, text = called(run_verb, "--ranks", "4", "--rank", "2", "--full", str(tmp_path / "train.py"))
    assert code == 0, text
    assert "gather or reduce, are alike on all of them" in " ".join(text.split())


SPAWNED = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(card, cards):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:2345", world_size=cards, rank=card)
    assert (card, dist.get_rank(), 256 // cards, int(256 / cards)) == (3, 3, 64, 64), (card, cards)
    torch.cuda.set_device(card)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda(card), device_ids=[card])
    net(torch.ones(256 // cards, 8).cuda()).sum().backward()
    torch.optim.SGD(net.parameters()).step()

if __name__ == "__main__":
    cards = torch.cuda.device_count()
    mp.spawn(work, (cards,), nprocs=cards)
"""


def test_a_script_that_starts_a_process_for_each_card_divides_its_batch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    code, text = called(run_verb, "--ranks", "4", "--rank", "3", str(tmp_path / "train.py"))
    assert code == 0, text


def test_the_command_line_takes_the_scripts_own_function(tmp_path: Path) -> None:
    own, report = tmp_path / "own.py", tmp_path / "rank.json"
    own.write_text("from tests.sharded_models import Llama as build, fsdp, loss\nparallelize = fsdp('cuda')\n")
    inputs = ("--input", f"2x{SEQUENCE}:int64", "--loss", f"{own}:loss")
    ranks = ("--ranks", "8", "--rank", "2", "--parallelize", f"{own}:parallelize")
    code, _ = called(analyze_verb, f"{own}:build", *inputs, *ranks, "--json", str(report))
    assert code == 0
    assert load_report(report).peak == analyze(rank=2).peak
    assert "autocast: off; rank 2 of 8" in called(show_verb, str(report), "--full")[1]
    assert "rank 2 of 8" in called(show_verb, "--by", "line", str(report))[1]


def test_a_verb_without_ranks_says_so() -> None:
    with pytest.raises(UsageError, match="no option --mesh: fxmem validate takes no rank"):
        Parser(prog="fxmem validate").add_arguments(validate_verb.ARGUMENTS).refuse(["--mesh", "fsdp=8"])
    with pytest.raises(UsageError, match="no option --rnks, did you mean --ranks"):
        Parser(prog="fxmem run").add_arguments(run_verb.ARGUMENTS).refuse(["--rnks", "8"])
