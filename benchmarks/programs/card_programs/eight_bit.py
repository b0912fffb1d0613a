"""torchao's optimizers of 8 and 4 bits, and weights of 8 bits."""

import torch
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

for make in (AdamW8bit, AdamW4bit):
    torch.cuda.empty_cache()
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
    optimizer = make(model.parameters())
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(make.__name__, step, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
    del model, optimizer
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda().bfloat16()
quantize_(model, Int8WeightOnlyConfig())
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
with torch.no_grad():
    model(torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16))
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
