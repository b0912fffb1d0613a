"""A GAN's two optimizers, recorded as they are: any code is a step.

`fxmem run train.py` does the same with a script from the command line.
"""

import torch
from torch import nn

import fxmem

with fxmem.record("rtx4090", steps=3) as run:
    generator = nn.Sequential(nn.Linear(100, 1024), nn.ReLU(), nn.Linear(1024, 3 * 64 * 64)).to("cuda")
    critic = nn.Sequential(nn.Linear(3 * 64 * 64, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1)).to("cuda")
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    for_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
    while True:
        pictures = torch.rand(256, 3 * 64 * 64, device="cuda")
        made = generator(torch.randn(256, 100, device="cuda"))

        for_critic.zero_grad()
        (critic(made.detach()).mean() - critic(pictures).mean()).backward()
        for_critic.step()

        for_generator.zero_grad()
        (-critic(made).mean()).backward()
        for_generator.step()

print(run.ending)
for number, each in enumerate(run.rounds, 1):
    print(f"step {number}: {each.allocated_bytes:,} bytes allocated, in {each.phase} at {each.place}")
print(", ".join(each.phase for each in run.profile.phases))
run.save_html("gan.html")
