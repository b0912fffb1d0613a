"""Plans of our own for a mesh of ranks: what they wrap, what they refuse, what lies on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fxmem
from fxmem.cli.verbs import analyze as analyze_verb
from fxmem.errors import UsageError
from fxmem.memory.report_reader import load_report
from fxmem.records.profile import Kind
from fxmem.simulation.ranks.mesh_plan import MeshPlan, find_blocks, read_mesh
from tests.sharded_models import Llama, loss, tokens
from tests.verbs import called


def small_llama(**settings: Any) -> LlamaForCausalLM:
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**fields, **heads, use_cache=False, **settings))


def analyze_llama(**settings: Any) -> fxmem.Analysis:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    build = settings.pop("build", small_llama)
    return fxmem.analyze(build, {"input_ids": ids, "labels": ids}, rank=0, **settings)


def parameters(analysis: fxmem.Analysis) -> dict[str, int]:
    return {each.name: each.nbytes for each in analysis.profile.storages if each.kind is Kind.PARAMETER}


def notes(analysis: fxmem.Analysis) -> str:
    return "\n".join(each.text for each in analysis.profile.assumptions)


def test_a_model_of_transformers_is_spread_by_its_own_plan() -> None:
    analysis = analyze_llama(mesh={"fsdp": 2, "tp": 4}, precision="bf16")
    ranks = analysis.profile.step.ranks
    assert ranks is not None
    assert ranks.world == 8
    assert {(each.name, each.size, each.spread) for each in ranks.groups} == {("tp", 4, 1), ("fsdp", 2, 4)}
    held = parameters(analysis)
    assert held["model.layers.0.self_attn.q_proj.weight"] == 64 * 64 * 4 // 8
    assert held["model.layers.1.mlp.down_proj.weight"] == 64 * 128 * 4 // 8
    assert held["lm_head.weight"] == 512 * 64 * 4 // 8
    assert held["model.norm.weight"] == 64 * 4 // 2  # replicated over tp
    assert analysis.profile.step.precision is None
    said = notes(analysis)
    assert "fully_shard on 2 LlamaDecoderLayer and the model" in said
    assert "splits 16 of 21 layers" in said
    assert "bf16 is FSDP2's MixedPrecisionPolicy" in said


def test_tied_weights_stay_tied_under_tensor_parallel() -> None:
    held = parameters(analyze_llama(build=lambda: small_llama(tie_word_embeddings=True), mesh="tp=2"))
    assert held["model.embed_tokens.weight"] in (512 * 64 * 4, 512 * 64 * 4 // 2)
    assert "lm_head.weight" not in held


def test_what_is_offloaded_is_counted_on_the_host() -> None:
    analysis = analyze_llama(mesh="fsdp=2", offload="cpu")
    weights = sum(each.numel() for each in small_llama().parameters()) * 4 // 2
    steps = 4 * len(list(small_llama().parameters()))
    ranks = analysis.profile.step.ranks
    assert ranks is not None
    assert ranks.host_bytes == 4 * weights + steps  # parameters, gradients, two averages, and the steps' numbers
    assert not parameters(analysis)
    assert "Host" in analysis.table()


@pytest.mark.truth
def test_a_step_sends_as_often_as_it_gathers() -> None:
    def gathers(reshard: bool | None) -> int:
        ranks = analyze_llama(mesh="fsdp=4", reshard_after_forward=reshard).profile.step.ranks
        assert ranks is not None
        return next(each.count for each in ranks.collectives if each.kind == "all-gather")

    assert [gathers(None), gathers(True), gathers(False)] == [2 * 2 + 1, 2 * 2 + 2, 2 + 1]


def test_replicas_alone_are_those_of_ddp() -> None:
    ranks = analyze_llama(mesh="replicate=4").profile.step.ranks
    assert ranks is not None
    assert {each.kind for each in ranks.collectives} == {"all-reduce"}


def partly_checkpointed() -> nn.Module:
    model = Llama(3)
    model.layers[0].__class__ = type("Block", (type(model.layers[0]),), {})
    return model


_LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")
BLOCKS: list[tuple[Callable[[], nn.Module], dict[str, int]]] = [
    (small_llama, {"LlamaDecoderLayer": 2}),
    (partly_checkpointed, {"Block": 3}),
    (torchvision.models.resnet18, {"BasicBlock": 8}),
    (torchvision.models.densenet121, {"_DenseLayer": 58}),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), {}),
    (lambda: nn.Transformer(16, 2, 3, 2, batch_first=True), dict(zip(_LAYERS, (3, 2), strict=True))),
]


@pytest.mark.parametrize(("build", "expected"), BLOCKS, ids=lambda value: str(value)[:24])
def test_blocks_are_what_repeats(build: Callable[[], nn.Module], expected: dict[str, int]) -> None:
    with torch.device("meta"):
        kinds = [type(each).__name__ for each in find_blocks(build())]
    assert {kind: kinds.count(kind) for kind in kinds} == expected


EXPERTS = MixtralConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=64, num_local_experts=2)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mesh": "fsdb=8"}, "got 'fsdb'; closest: fsdp"),
    ({"mesh": "fsdp=8,fsdp=2"}, "got fsdp twice"),
    ({"mesh": "fsdp"}, "NAME=RANKS"),
    ({"mesh": {"fsdp": 0}}, "fsdp of at least 1 rank in the mesh, got 0"),
    ({"mesh": 8}, "expected a mesh such as"),
    ({"mesh": "fsdp=2,cp=4"}, "context parallel is not analysed: tp=N"),
    ({"mesh": "ep=4"}, "expert parallel is not analysed"),
    ({"mesh": "zero3=4"}, "say fsdp=N"),
    ({"mesh": "pp=4"}, "fxmem run --ranks"),
    ({"mesh": "tp=2,replicate=4"}, "say fsdp=4,tp=2"),
    ({"mesh": "fsdp=8", "ranks": 12}, "expected a mesh of 12 ranks, got fsdp=8 of 8; leave --ranks"),
    ({"mesh": "fsdp=8", "ranks": 16}, "replicate=2 beside it would make 16"),
    ({"mesh": "fsdp=8", "parallelize": print}, "expected a mesh or parallelize"),
    ({"mesh": "tp=3"}, "expected tp that divides num_attention_heads=8, got tp=3; closest: tp=2"),
    ({"mesh": "tp=8"}, "num_key_value_heads=4, got tp=8; closest: tp=4"),
    ({"mesh": "tp=2", "offload": "cpu"}, "expected offload with fsdp in the mesh"),
    ({"mesh": "fsdp=2", "offload": "disk"}, "expected offload 'cpu', got 'disk'"),
    ({"offload": "cpu"}, "expected offload with a mesh"),
    ({"mesh": "fsdp=2,tp=2", "build": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1))}, "GPT2LMHeadModel has none"),
    ({"mesh": "tp=2", "build": lambda: MixtralForCausalLM(EXPERTS)}, "model.layers.0.mlp.experts as moe_tp_experts"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_mesh_that_cannot_be_is_refused_in_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        analyze_llama(**settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


@pytest.mark.truth
def test_the_command_line_takes_a_mesh(tmp_path: Path) -> None:
    own, report = tmp_path / "own.py", tmp_path / "rank.json"
    own.write_text("from tests.sharded_models import Llama as build, loss\n")
    step = (f"{own}:build", "--input", "2x32:int64", "--loss", f"{own}:loss", "--rank", "2", "--json", str(report))
    code, _ = called(analyze_verb, *step, "--mesh", "fsdp=2,tp=2", "--no-reshard-after-forward", "--precision", "bf16")
    assert code == 0
    plan = MeshPlan(read_mesh("fsdp=2,tp=2"), reshard_after_forward=False, precision="bf16")
    direct = fxmem.analyze(Llama, tokens(), loss=loss, ranks=4, rank=2, parallelize=plan)
    assert load_report(report).peak == direct.peak
