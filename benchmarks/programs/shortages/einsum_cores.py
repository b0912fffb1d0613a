"""Seventeen tensors in one einsum, from the left to the right."""

import torch

torch.backends.opt_einsum.enabled = False  # opt_einsum's path was one contraction of all
big_core = torch.randn(*[2] * 17, dtype=torch.float64, device="cuda")
small_cores = [torch.randn(512, 25, 25, 2, dtype=torch.float64, device="cuda") for _ in range(16)]
letters = "ijklmnopqrstuvwx"
equation = ",".join(f"abc{each}" for each in letters) + f",{letters}y->abcy"
result = torch.einsum(equation, *small_cores, big_core)
