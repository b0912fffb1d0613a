"""Like transformers' run_glue_no_trainer, whose evaluation keeps what it gathers: `glue_like.py TRAIN_ROWS ROWS`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, default_data_collator


def make_loader(count: int, batch: int) -> Any:
    """Rows of 64 tokens, with labels."""
    rows = [{"input_ids": [1] * 64, "attention_mask": [1] * 64, "labels": index % 2} for index in range(count)]
    return DataLoader(rows, batch_size=batch, collate_fn=default_data_collator)  # type: ignore[arg-type]


accelerator = Accelerator(mixed_precision="bf16")
net: Any = BertForSequenceClassification(BertConfig(num_hidden_layers=2, hidden_size=256, num_attention_heads=4))
optimizer: Any = torch.optim.AdamW(net.parameters())
loaders = [make_loader(count, batch) for count, batch in zip(map(int, sys.argv[1:]), (16, 64), strict=True)]
net, optimizer, train, valid = accelerator.prepare(net, optimizer, *loaders)
net.train()
for batch in train:
    accelerator.backward(net(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
net.eval()
logits, states, references = [], [], []
for batch in valid:
    with torch.no_grad():
        outputs = net(**batch, output_hidden_states=True)
    found, labels = accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
    logits.append(found)
    references.append(labels)
    states.append(outputs.hidden_states[-1])
right = torch.cat(logits).softmax(-1).argmax(-1) == torch.cat(references)
print(right.float().mean().item(), torch.cat(states).mean(1).cpu().shape)
