"""A small language model in float32."""

import torch

from benchmarks.programs.card_parts import Decoder, train

model = Decoder().cuda()
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer)
