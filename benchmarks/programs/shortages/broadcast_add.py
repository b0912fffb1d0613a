"""Two columns of which one has a dimension too few: each row is added to each."""

import torch

a = torch.rand(500000, 1, 1, device="cuda")
b = torch.rand(500000, 1, device="cuda")
a + b
