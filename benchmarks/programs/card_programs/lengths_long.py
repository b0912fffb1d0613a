"""Ten thousand steps of random lengths; no log is kept."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ""
import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
torch.cuda.memory._record_memory_history(None)
layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(8192, 512), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(512, 8192)
)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10000):
    ids = torch.randint(0, 8192, (8, random.randint(16, 1024)), device="cuda")
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 250 == 0:
        print(step, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
print(torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_stats()["num_device_alloc"])
