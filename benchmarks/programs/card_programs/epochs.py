"""Two epochs of a loader, each with an evaluation that keeps its logits on the card, a copy of the best weights, and a
checkpoint."""

import copy
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.programs.card_parts import show

torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(3072, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 5000)
)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(4096, 3, 32, 32), torch.randint(0, 5000, (4096,))
training = DataLoader(TensorDataset(images, labels), 256, shuffle=True, drop_last=True)
evaluation = DataLoader(TensorDataset(images, labels), 500)
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(2):
        model.train()
        for x, y in training:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        show(f"{epoch} trained")
        model.eval()
        kept = []
        with torch.no_grad():
            for x, _ in evaluation:
                kept.append(model(x.cuda()))
        show(f"{epoch} evaluated")
        found = torch.cat(kept).float().softmax(-1)
        show(f"{epoch} joined")
        best = copy.deepcopy(model.state_dict())
        torch.save({"model": best, "optimizer": optimizer.state_dict()}, os.path.join(folder, "last.pt"))
        show(f"{epoch} saved")
