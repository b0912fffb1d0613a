"""The 50 neighbours of each of 12.4 million points: their numbers are cloned."""

import torch

# 4.64 GiB are 50 numbers of 64 bits for so many; "about 10M", K is 50.
points = torch.randn(1, 12_450_000, 3, device="cuda")
dists = torch.empty(1, 12_450_000, 50, device="cuda")
idxs = torch.zeros(1, 12_450_000, 50, dtype=torch.int64, device="cuda")
tmp_idxs = idxs.clone().detach()
tmp_idxs[idxs < 0] = 0
neighbours = points[0, tmp_idxs[0]]
