"""Convolutions on a graph: a sparse matrix of its edges, some of them twice, times dense features."""

import torch
from torch import nn

NODES, EDGES = 2000, 9000

torch.manual_seed(0)
edges = torch.sparse_coo_tensor(torch.randint(0, NODES, (2, EDGES)), torch.ones(EDGES), (NODES, NODES))
features = torch.randn(NODES, 50)
weight, bias = nn.Parameter(torch.randn(50, 64)), nn.Parameter(torch.randn(64))
optimizer = torch.optim.Adam([weight, bias])
for _ in range(3):
    hidden = torch.spmm(edges, features @ weight)
    hidden = torch.sparse.mm(edges, hidden.relu()) + edges @ hidden
    torch.sparse.addmm(bias, edges, hidden).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
