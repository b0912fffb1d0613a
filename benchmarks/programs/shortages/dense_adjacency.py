"""A graph of 400,000 nodes as a dense matrix."""

import torch

nodes = 400_500  # "around 400k"; 597.53 GiB are those of 400,500
edge_index = torch.randint(0, nodes, (2, 4_000_000), device="cuda")
size = [1, nodes, nodes]
adj = torch.zeros(size, dtype=torch.float32, device=edge_index.device)
