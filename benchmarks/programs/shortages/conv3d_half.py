"""A convolution in half precision whose input has more than 2**31 numbers."""

import torch
from torch import nn

input = torch.rand((1, 64, 362, 370, 251), device="cuda", dtype=torch.float16)
layer = nn.Conv3d(in_channels=64, out_channels=32, kernel_size=3, stride=1, padding=1).half().cuda()
with torch.no_grad():  # not said
    output = layer(input)
