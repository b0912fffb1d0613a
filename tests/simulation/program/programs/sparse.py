"""Tables that are looked up twice, in bags, and over micro-batches; their gradients are the rows that were read."""

import torch
from torch import nn

ROWS, WIDTH = 100_000, 32


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.items = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")

    def forward(self, user, friend, items):
        return (self.users(user) * self.users(friend) * self.items(items)).sum(-1)


model = Tower()
adam = torch.optim.SparseAdam(model.users.parameters(), lr=1e-2)
adagrad = torch.optim.Adagrad(model.items.parameters(), lr=1e-2)
for step in range(4):
    torch.manual_seed(step)  # the same rows, whatever numbers the parameters took
    for _ in range(2):
        ids = torch.randint(0, ROWS, (2, 700)), torch.randint(0, ROWS, (700, 5))
        model(*ids[0], ids[1]).square().mean().backward()
    for optimizer in (adam, adagrad):
        optimizer.step()
        optimizer.zero_grad()
