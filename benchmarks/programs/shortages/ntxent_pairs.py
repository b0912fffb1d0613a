"""NT-Xent over all pairs: 256 embeddings of one label and 256 of one each."""

import torch

embeddings = torch.nn.functional.normalize(torch.randn(512, 128, device="cuda", requires_grad=True))
similarity = embeddings @ embeddings.t() / 0.5
# Every ordered pair of the 256 alike is positive, and every other pair negative.
anchor = torch.randint(0, 512, (65_280,), device="cuda")
positive = torch.randint(0, 512, (65_280,), device="cuda")
other = torch.randint(0, 512, (196_352,), device="cuda")
negative = torch.randint(0, 512, (196_352,), device="cuda")
positives, negatives = similarity[anchor, positive], similarity[other, negative]
of_anchor = other.unsqueeze(0) == anchor.unsqueeze(1)
denominator = torch.where(of_anchor, negatives.exp(), 0.0).sum(dim=1) + positives.exp()
(-(positives - denominator.log()).mean()).backward()
