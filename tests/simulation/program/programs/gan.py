"""Two networks that train each other, with a picture drawn between, in the shape of pytorch/examples' dcgan."""

import sys

import torch
from torch import nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
noise_size, width, batch = 64, 16, 16


def weights_init(module) -> None:
    name = type(module).__name__
    if "Conv" in name:
        torch.nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        torch.nn.init.normal_(module.weight, 1.0, 0.02)
        torch.nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(noise_size, width * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(width * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 2, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1, 1).squeeze(1)


torch.manual_seed(2)
netG, netD = Generator().to(device), Discriminator().to(device)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed = torch.randn(batch, noise_size, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
pictures = torch.randn(batch * 4, 3, 16, 16)
for step, data in enumerate(pictures.split(batch)):
    netD.zero_grad()
    real = data.to(device)
    label = torch.full((batch,), 1.0, dtype=real.dtype, device=device)
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    noise = torch.randn(batch, noise_size, 1, 1, device=device)
    fake = netG(noise)
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    errD = errD_real + errD_fake
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    output = netD(fake)
    errG = criterion(output, label)
    errG.backward()
    print(f"{step}: {errD.item():.4f} {errG.item():.4f} {output.mean().item():.4f}")
    optimizerG.step()
    if step % 2 == 0:
        fake = netG(fixed)
        drawn = fake.detach().cpu()
