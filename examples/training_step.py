"""A module with its own training step, and a loader: given as they are.

    fxmem analyze examples/training_step.py:Classifier --input examples/training_step.py:loader
    fxmem analyze examples/training_step.py:Classifier --input 64x784 --loss ce --optimizer sgd

`training_step` and `configure_optimizers` are those of Lightning; Lightning itself is not needed. Run as a script, this
file asks what the same step takes with other losses and with an optimizer that exists.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxmem

samples = TensorDataset(torch.zeros(640, 784), torch.zeros(640, dtype=torch.int64))
loader = DataLoader(samples, batch_size=64, shuffle=True, num_workers=2)


class Classifier(nn.Module):
    """A perceptron that knows how it is trained."""

    def __init__(self, width=512):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """The loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self):
        """One optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    images = torch.zeros(64, 784)
    steps = {
        "training_step": fxmem.analyze(Classifier, loader, target="cpu"),
        "loss='ce'": fxmem.analyze(Classifier, images, loss="ce", optimizer="sgd-momentum", target="cpu"),
        "loss='mse'": fxmem.analyze(Classifier, images, loss="mse", optimizer="sgd-momentum", target="cpu"),
    }
    for name, analysis in steps.items():
        print(f"{name:<14} {analysis.profile.step.optimizer} {analysis.peak.requested_bytes:>12,}")
