"""The singular vectors of a layer's gradient, all 267,736 of one side."""

import torch
from torch import nn

layer = nn.Linear(256, 267736).cuda()
layer(torch.randn(8, 256, device="cuda")).sum().backward()
U, s, Vh = torch.linalg.svd(layer.weight.grad)
