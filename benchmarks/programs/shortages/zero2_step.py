"""The optimizer of one rank of eight, ZeRO stage 2: a Llama of 7B in half precision, an eighth of the rest."""

import torch
from torch import nn

parameters = 6_738_415_616
weights = torch.zeros(parameters, dtype=torch.float16, device="cuda")
part = nn.Parameter(torch.zeros(parameters // 8, device="cuda"))  # float32, flat
optimizer = torch.optim.AdamW([part], foreach=False)
for _ in range(2):
    part.grad = torch.zeros_like(part)  # what backward has reduced; its activations are gone
    optimizer.step()
    weights[: part.numel()].copy_(part.detach())
    optimizer.zero_grad()
