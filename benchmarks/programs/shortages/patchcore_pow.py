"""The distances of the patches of an image to a memory of patches, every difference of them at once."""

import torch


def distance_matrix(x, y, p=2):
    n, m, d = x.size(0), y.size(0), x.size(1)
    x = x.unsqueeze(1).expand(n, m, d)
    y = y.unsqueeze(0).expand(n, m, d)
    return torch.pow(x - y, p).sum(2)


# 11.25 GiB: 25 by 25 patches of an image of 196 by 196 against 3,146; 1,536 features are those of the repository.
x = torch.randn(625, 1536, device="cuda")
train_pts = torch.randn(3146, 1536, device="cuda")
dist = distance_matrix(x, train_pts) ** (1 / 2)
