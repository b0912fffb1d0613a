"""transformers' Trainer: steps in bfloat16, an evaluation that gathers logits, a checkpoint."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Texts(Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 50257, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Show(TrainerCallback):
    """The peaks of each step."""

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        print(
            "step", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
        )
        torch.cuda.reset_peak_memory_stats()

    def on_evaluate(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        print(
            "eval", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
        )
        torch.cuda.reset_peak_memory_stats()


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4, bf16=True, report_to=[],
        eval_strategy="steps", eval_steps=2, save_steps=3, logging_steps=1, disable_tqdm=True, skip_memory_metrics=True,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(n_layer=4))
    trainer = Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[Show()])
    trainer.train()
