"""A compiled language model."""

import torch

from benchmarks.programs.card_parts import Decoder, train

model = torch.compile(Decoder().cuda())
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer)
