"""Plans in other people's training loops: the same losses and weights to the bit, the same state_dict, and resuming."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxmem
from fxmem.records.plan import Plan
from tests.sharded_models import VOCABULARY, Llama, loss, tokens

pytestmark = pytest.mark.truth

APPLICATIONS = ("operators", "modules")
Batch = dict[str, torch.Tensor]
Run = tuple[list[float], dict[str, torch.Tensor]]
"""The loss of each step, and the weights at the end."""


class Sentences(torch.utils.data.Dataset[Batch]):
    """Ten sentences of two lengths."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.randint(0, 128, (20 + index % 2,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": drawn, "labels": drawn.clone()}


def collate(samples: list[Batch]) -> Batch:
    """Sentences padded to 24 tokens: transformers leaves operators out where nothing is padded, and the plan warns."""

    def pad(value: int) -> torch.Tensor:
        rows = [F.pad(sample["input_ids"], (0, 24 - len(sample["input_ids"])), value=value) for sample in samples]
        return torch.stack(rows)

    return {"input_ids": pad(0), "labels": pad(-100), "attention_mask": (pad(-100) != -100).long()}


def hugging_face(*, lora: bool = False) -> Any:
    """A Llama of two layers, with dropout in attention; its cache is off, as recomputation of modules needs it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    if lora:
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
        model = peft.get_peft_model(model, adapters).train()
    return model


@functools.cache
def plan_for(application: str, *, lora: bool = False, precision: str = "fp32") -> Plan:
    """A plan of the very model that is trained, with what the trainer will do to it."""
    batch = collate([Sentences()[i] for i in range(8)])
    analysis = fxmem.analyze(hugging_face(lora=lora), batch, target="cpu", optimizer=None, precision=precision)
    plan = fxmem.plan(analysis, budget=0.85, application=application)
    assert plan.after.requested_bytes < plan.before.requested_bytes
    return plan


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(run: Run, expected: Run) -> None:
    assert run[0] == expected[0]
    assert list(run[1]) == list(expected[1])
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in run[1].items())


def train_with_trainer(model: Any, folder: Path, *, resume: str | None = None, **arguments: Any) -> Run:
    """Accumulation, clipping, evaluation between steps and a checkpoint every second step."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **arguments,
    )
    torch.manual_seed(1)
    trainer = transformers.Trainer(
        model, settings, train_dataset=Sentences(), eval_dataset=Sentences(), data_collator=collate
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights(model)


# peft 0.21 reads a name that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("model", "arguments"),
    [({"precision": "bf16"}, {"bf16": True}), ({"lora": True}, {})],
    ids=["bfloat16", "LoRA"],
)
def test_the_trainer_trains_the_same_model(
    model: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = model.get("lora", False)
    expected = train_with_trainer(hugging_face(lora=lora), tmp_path / "plain", **arguments)
    assert len(expected[0]) == 4
    for application in APPLICATIONS:
        planned = fxmem.checkpoint(hugging_face(lora=lora), plan_for(application, **model))
        assert_same(train_with_trainer(planned, tmp_path / application, **arguments), expected)
    capsys.readouterr()


@pytest.mark.parametrize("application", APPLICATIONS)
def test_the_trainer_resumes_from_the_middle(
    application: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned() -> Any:
        return fxmem.checkpoint(hugging_face(), plan_for(application))

    whole = train_with_trainer(planned(), tmp_path)
    resumed = train_with_trainer(planned(), tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert_same(resumed, whole)
    saved = type(hugging_face()).from_pretrained(tmp_path / "checkpoint-4")
    assert list(saved.state_dict()) == list(whole[1])
    assert all(torch.equal(tensor, whole[1][name]) for name, tensor in saved.state_dict().items())
    capsys.readouterr()


def train_with_lightning(model: Any, folder: Path, precision: Any) -> Run:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """What a user of Lightning writes."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model, list[float]()

        def training_step(self, batch: Batch, index: int) -> torch.Tensor:
            """The loss that the model itself computes."""
            found: torch.Tensor = self.model(**batch).loss
            self.losses.append(found.item())
            return found

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """AdamW."""
            return torch.optim.AdamW(self.parameters(), 1e-3)

    torch.manual_seed(1)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision=precision,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Sentences(), 2, collate_fn=collate))
    return module.losses, weights(model)


def train_with_fabric(model: Any, folder: Path, precision: Any) -> Run:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
    torch.manual_seed(1)
    losses = []
    for batch in torch.utils.data.DataLoader(Sentences(), 2, collate_fn=collate):
        found = wrapped(**batch).loss
        fabric.backward(found)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses, weights(model)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning 2.6 asks torch in a way of older releases
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("train", [train_with_lightning, train_with_fabric], ids=["Trainer", "Fabric"])
@pytest.mark.parametrize(("precision", "planned"), [("32-true", "fp32"), ("bf16-mixed", "bf16")])
def test_lightning_trains_the_same_model(
    train: Callable[[Any, Path, Any], Run], precision: str, planned: str, tmp_path: Path
) -> None:
    expected = train(hugging_face(), tmp_path, precision)
    for application in APPLICATIONS:
        model = fxmem.checkpoint(hugging_face(), plan_for(application, precision=planned))
        assert_same(train(model, tmp_path, precision), expected)


def train_by_hand(model: nn.Module) -> Run:
    """Autocast, a gradient scaler, accumulation over two batches, clipping, and evaluation between steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for rows in (2, 1):
            batch = torch.randint(0, VOCABULARY, (rows, 32), generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                found = loss(model(batch))
            scaler.scale(found / 2).backward()  # type: ignore[no-untyped-call]
            losses.append(found.item())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss(model.eval()(batch)).item())
        model.train()
    return losses, weights(model)


def seeded() -> Llama:
    torch.manual_seed(0)
    return Llama()


@functools.cache
def plan_of_plain_torch(application: str, precision: str = "fp32") -> Plan:
    analysis = fxmem.analyze(
        seeded(), tokens().repeat(4, 1), loss=loss, target="cpu", optimizer=None, precision=precision
    )
    return fxmem.plan(analysis, budget=0.85, application=application)


@pytest.mark.parametrize("application", [*APPLICATIONS, "graph"])
def test_mixed_precision_and_accumulation_by_hand(application: str) -> None:
    planned = fxmem.checkpoint(seeded(), plan_of_plain_torch(application, "bf16"))
    assert_same(train_by_hand(planned), train_by_hand(seeded()))


def sharded(model: Llama) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {"DDP": DistributedDataParallel, "FSDP2": sharded}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_a_rank(rank: int, folder: str, cases: list[tuple[str, str | None]]) -> None:
    """What each of the two processes does: every case, a file with its losses and weights each."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for wrapper, application in cases:
        model = seeded()
        if application:
            model = fxmem.checkpoint(model, fxmem.load_plan(f"{folder}/{application}.json"))
        wrapped, losses = WRAPPERS[wrapper](model), []
        optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            found = loss(wrapped(torch.randint(0, VOCABULARY, (2, 32), generator=generator)))
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(found.item())
        trained = {name: whole(tensor).clone() for name, tensor in wrapped.state_dict().items()}
        torch.save((losses, trained), f"{folder}/{wrapper}-{application}-{rank}.pt")
    torch.distributed.barrier()  # a rank whose peer has gone already may abort while gloo's threads end
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, where there are threads
def test_two_ranks_train_the_same_model_with_ddp_and_fsdp2(tmp_path: Path) -> None:
    for application in APPLICATIONS:
        plan_of_plain_torch(application).to_json(tmp_path / f"{application}.json")
    cases = [(wrapper, application) for wrapper in WRAPPERS for application in (None, *APPLICATIONS)]
    # A fork has all that is imported; where there are cards, none of a process that has run backward runs it too.
    start = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(train_a_rank, (str(tmp_path), cases), nprocs=2, start_method=start)  # type: ignore[no-untyped-call]
    for wrapper in WRAPPERS:
        for rank in range(2):
            expected = torch.load(tmp_path / f"{wrapper}-None-{rank}.pt")
            assert len(expected[0]) == 3
            for application in APPLICATIONS:
                assert_same(torch.load(tmp_path / f"{wrapper}-{application}-{rank}.pt"), expected)
