"""Each block compiled by itself, and the optimizer's step."""

import torch

from benchmarks.programs.card_parts import Decoder, train

model = Decoder().cuda().bfloat16()
for block in model.blocks:
    block.compile()
optimizer = torch.optim.AdamW(model.parameters())
optimizer_step = torch.compile(optimizer.step)
train(model, optimizer, step=optimizer_step)
