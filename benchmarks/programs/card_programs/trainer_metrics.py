"""transformers' Trainer with `compute_metrics`: what an evaluation gathers on the card, by epoch."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks.programs.card_parts import show


class Texts(Dataset):
    """Random tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 50257, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Show(TrainerCallback):
    """The peaks of each part."""

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        show("step")

    def on_evaluate(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        show("evaluated")


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, per_device_eval_batch_size=8, num_train_epochs=2, bf16=True,
        report_to=[], eval_strategy="epoch", save_strategy="no", disable_tqdm=True, skip_memory_metrics=True,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(n_layer=2))
    Trainer(
        model, arguments, train_dataset=Texts(32), eval_dataset=Texts(100), callbacks=[Show()],
        compute_metrics=lambda found: {"first": float(found.predictions[0, 0, 0])},
    ).train()  # fmt: skip
