"""The Trainer of Hugging Face on a tiny GPT-2, recorded as it is: the library's own loop, clipping and logs."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fxmem

tokens = [{"input_ids": row, "labels": row} for row in torch.randint(1000, (64, 128))]
with fxmem.record("rtx4090", steps=2) as run:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=128, n_embd=128, n_layer=2, n_head=2))
    settings = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, bf16=True, logging_steps=1, report_to=[], disable_tqdm=True
    )
    Trainer(model, settings, train_dataset=tokens).train()

print(run.ending)
for number, each in enumerate(run.rounds, 1):
    print(f"step {number}: {each.allocated_bytes:,} bytes allocated, in {each.phase}")
print(f"parameters: {sum(each.nbytes for each in run.profile.storages if each.kind == 'parameter'):,} bytes")
for each in run.made_up:
    print(f"made up: {each.kind}, {each.what}")
