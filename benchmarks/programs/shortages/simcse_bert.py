"""SimCSE on BERT: each batch of 12 passes through the model twice, with other dropout."""

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel

model = BertModel(BertConfig(attn_implementation="eager")).cuda()  # transformers 4.17 has no other
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    ids = torch.randint(0, 30522, (12, 512), device="cuda")  # 72 MiB: GELU's input of 12 by 512 tokens
    optimizer.zero_grad()
    first, second = (F.normalize(model(ids).pooler_output) for _ in range(2))
    loss = F.cross_entropy(first @ second.T / 0.05, torch.arange(12, device="cuda"))
    loss.backward()
    optimizer.step()
