"""A template against every window of an image."""

import torch

x = torch.rand(1, 3, 1000, 1000).cuda()
t = torch.rand(1, 3, 100, 100).cuda()
y = x.unfold(dimension=2, size=t.shape[2], step=1).unfold(dimension=3, size=t.shape[3], step=1)
ssd = torch.einsum("xcijkl,xckl->xcij", y, t)
ssd *= -2
ssd += torch.einsum("xcijkl, xcijkl->xcij", y, y)
ssd += torch.einsum("xcij, xcij", t, t)
