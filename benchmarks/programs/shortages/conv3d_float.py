"""A convolution in float32 whose input has more than 2**31 numbers."""

import torch
from torch import nn

conv = nn.Conv3d(256, 64, kernel_size=(3, 3, 3), stride=(1, 1, 1)).to("cuda:0")
x = torch.rand([1, 256, 5, 1090, 1922], dtype=torch.float32, device="cuda:0")
out = conv(x)
