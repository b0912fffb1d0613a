"""A compiled language model whose batches change their length."""

import torch

from benchmarks.programs.card_parts import Decoder, train

model = torch.compile(Decoder().cuda())
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, lengths=(1024, 768, 512, 896, 640))
