"""DLRM with one table of embeddings of 2 GiB as a parameter, one rank of eight."""

import itertools

import torch
import torch.distributed as dist
from torch import nn


def layers(*widths):
    parts = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(4 << 20, 128))
        self.bottom, self.top = layers(13, 512, 256, 128), layers(506, 1024, 1024, 512, 256, 1)

    def forward(self, numbers, ids):
        dense = self.bottom(numbers)
        features = torch.cat([dense.unsqueeze(1), self.table[ids]], dim=1)
        pairs = torch.bmm(features, features.mT)
        row, column = torch.triu_indices(27, 27, device="cuda")
        return self.top(torch.cat([dense, pairs[:, row, column]], dim=1))


dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(Recommender().cuda())
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(4):
    ids = torch.randint(0, 4 << 20, (32768, 26), device="cuda")  # 262,144 on eight cards: the workload's batch
    targets = torch.rand(32768, 1, device="cuda")
    optimizer.zero_grad()
    logits = model(torch.rand(32768, 13, device="cuda"), ids)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, targets)
    loss.backward()
    optimizer.step()
