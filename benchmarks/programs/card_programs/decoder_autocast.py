"""A small language model under autocast, clipped."""

import torch
from torch import nn

from benchmarks.programs.card_parts import Decoder

model = Decoder().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(5):
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 32000, (4, 1024), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(ids)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
