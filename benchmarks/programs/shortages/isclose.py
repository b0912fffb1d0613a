"""Precision and recall of 49,021 images against 50,000: every distance is compared with a tolerance."""

import torch

feat1 = torch.randn(49021, 2048, device="cuda")
feat2 = torch.randn(50000, 2048, device="cuda")


def nearest(features, k=6):
    distances = torch.cdist(features, features)
    return distances.kthvalue(k, dim=-1).values


with torch.no_grad():
    real, fake = nearest(feat1), nearest(feat2)
    distances = torch.cdist(feat1, feat2)
    precision = (
        torch.logical_or(
            distances < real.unsqueeze(1),
            torch.isclose(distances, real.unsqueeze(1)),
        ).any(dim=0).float().mean()
    )  # fmt: skip
