"""DeepSpeed's ZeRO stage 3, one rank: bfloat16 with its own optimizer around torch's."""

import os

import deepspeed
import torch
from torch import nn

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29553", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())])
configuration = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
print("made", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
for step in range(4):
    torch.cuda.reset_peak_memory_stats()
    loss = engine(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    print(step, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
