"""A variational autoencoder that samples after each epoch, in the shape of pytorch/examples' vae."""

import sys

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(made, x, mu, logvar):
    error = F.binary_cross_entropy(made, x.view(-1, 784), reduction="sum")
    return error - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


torch.manual_seed(1)
pictures = torch.rand(256, 1, 28, 28)
loader = DataLoader(TensorDataset(pictures, torch.zeros(256, dtype=torch.int64)), batch_size=128, shuffle=True)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    total = 0.0
    for data, _ in loader:
        data = data.to(device)
        optimizer.zero_grad()
        made, mu, logvar = model(data)
        loss = loss_function(made, data, mu, logvar)
        loss.backward()
        total += loss.item()
        optimizer.step()
    print(f"epoch {epoch}: average loss {total / len(loader.dataset):.4f}")
    with torch.no_grad():
        sample = model.decode(torch.randn(64, 20).to(device)).cpu()
