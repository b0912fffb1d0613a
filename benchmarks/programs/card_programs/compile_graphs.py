"""A compiled language model in CUDA graphs."""

import torch

from benchmarks.programs.card_parts import Decoder, train

model = torch.compile(Decoder().cuda(), mode="reduce-overhead")
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer)
