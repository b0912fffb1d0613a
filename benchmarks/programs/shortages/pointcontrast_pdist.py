"""The distances of 32,768 points to 8,192, every difference of them at once."""

import torch

A = torch.randn(32768, 32, device="cuda", requires_grad=True)
B = torch.randn(8192, 32, device="cuda", requires_grad=True)
D2 = torch.sum((A.unsqueeze(1) - B.unsqueeze(0)).pow(2), 2)
D2.min(1).values.mean().backward()
