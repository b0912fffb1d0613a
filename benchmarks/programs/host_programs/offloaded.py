"""An embedding table that stays on the host with its optimizer's state, below a model on the card."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
table, model = nn.Embedding(1_000_000, 64), nn.Linear(64, 10).to(device)
optimizers = torch.optim.AdamW(table.parameters(), foreach=False), torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(table(torch.randint(1_000_000, (256,))).to(device)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
