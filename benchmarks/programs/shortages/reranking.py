"""The adjacency matrix of 93,820 images of a gallery."""

import torch


def build_adjacency_matrix(initial_rank):
    count = initial_rank.shape[0]
    A = torch.zeros(count, count, device=initial_rank.device)
    return A.scatter_(1, initial_rank, 1.0)


features = torch.randn(93820, 256, device="cuda")
initial_rank = torch.randint(0, 93820, (93820, 26), device="cuda")  # of the 26 nearest, as in the repository
A = build_adjacency_matrix(initial_rank)
