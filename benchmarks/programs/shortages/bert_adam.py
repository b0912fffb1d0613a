"""BERT with Adam where other processes have most of the card."""

import torch
from transformers import BertConfig, BertForSequenceClassification

# 352 MiB is the table of the multilingual model in blocks of 2 MiB. The batch is not said.
model = BertForSequenceClassification(BertConfig(vocab_size=119547)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-5)
for _ in range(3):
    ids = torch.randint(0, 119547, (4, 32), device="cuda")
    labels = torch.zeros(4, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    loss = model(ids, labels=labels).loss
    loss.backward()
    optimizer.step()
