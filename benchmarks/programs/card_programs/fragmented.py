"""Reserved far above allocated: batches of growing length, after each of which something is kept that breaks a block
of the cache."""

import random

import torch
from torch import nn

from benchmarks.programs.card_parts import show

random.seed(0)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32000, 512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 32000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(12):
    ids = torch.randint(0, 32000, (4, 128 * (step + 1)), device="cuda")
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del logits, loss
    kept.append(torch.zeros(24 * 2**18, device="cuda"))
    show(f"{step}")
for number in range(8):
    large = torch.empty(2**28, device="cuda")
    del large
    kept.append(torch.zeros(200 * 2**18, device="cuda"))
    show(f"broken {number}")
statistics = torch.cuda.memory_stats()
print(statistics["inactive_split_bytes.all.current"], statistics["num_device_alloc"], statistics["num_alloc_retries"])
torch.cuda.set_per_process_memory_fraction(
    (torch.cuda.memory_reserved() + 2**20) / torch.cuda.get_device_properties(0).total_memory
)
try:
    torch.empty(torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - 2**25, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    print(str(error))
