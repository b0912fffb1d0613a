"""Transformers' Trainer on a GPT-2 of its default size, as its documentation shows it."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = torch.randint(0, 50_257, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_steps=20,
    logging_steps=1,
    report_to=[],
    bf16=True,
    disable_tqdm=True,
)
Trainer(model=GPT2LMHeadModel(GPT2Config()), args=arguments, train_dataset=Tokens()).train()
