"""Gradients of four batches a step, and a moving average of the weights."""

import copy

import torch

from benchmarks.programs.card_parts import Decoder

model = Decoder(layers=4).cuda()
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        (model(torch.randint(0, 32000, (2, 1024), device="cuda")) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.01)
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
