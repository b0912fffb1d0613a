"""A generator and a discriminator with a gradient penalty, in turns."""

import torch
from torch import nn

generator = nn.Sequential(
    nn.ConvTranspose2d(128, 256, 4), nn.BatchNorm2d(256), nn.ReLU(), nn.ConvTranspose2d(256, 128, 4, 2, 1),
    nn.BatchNorm2d(128), nn.ReLU(), nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
).cuda()  # fmt: skip
critic = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
    nn.Conv2d(128, 256, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4096, 1),
).cuda()  # fmt: skip
first = torch.optim.Adam(generator.parameters(), betas=(0.0, 0.9))
second = torch.optim.Adam(critic.parameters(), betas=(0.0, 0.9))
for step in range(4):
    torch.cuda.reset_peak_memory_stats()
    real = torch.randn(128, 3, 32, 32, device="cuda")
    with torch.no_grad():
        fake = generator(torch.randn(128, 128, 1, 1, device="cuda"))
    mixed = torch.lerp(real, fake, torch.rand(128, 1, 1, 1, device="cuda")).requires_grad_()
    slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
    loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
    second.zero_grad()
    loss.backward()
    second.step()
    loss = -critic(generator(torch.randn(128, 128, 1, 1, device="cuda"))).mean()
    first.zero_grad()
    loss.backward()
    first.step()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
