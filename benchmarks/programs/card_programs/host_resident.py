"""What a process has resident on the host as libraries load, a model is made, saved, loaded, trained and fed."""

import os
import tempfile

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def show(what: str) -> None:
    """Resident bytes of this process; the proportional set of its children."""
    here = psutil.Process()
    children = [child.memory_full_info().pss for child in here.children(recursive=True)]
    print("host", what, here.memory_full_info().pss, here.memory_info().rss, children, flush=True)


show("torch imported")
torch.cuda.init()
torch.empty(1, device="cuda")
show("the card in use")
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
show("8 layers of 64 MiB")
with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
    show("saved")
    state = torch.load(os.path.join(folder, "model.pt"))
    show("loaded")
    mapped = torch.load(os.path.join(folder, "model.pt"), mmap=True)
    show("loaded, mapped")
    model.load_state_dict(mapped)
    show("taken over from the map")
    del mapped
model.load_state_dict(state)
del state
show("taken over")
model.cuda()
show("moved to the card")
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(2048, 4096))
show("32 MiB of data")
for workers in (0, 2, 4):
    for number, (x,) in enumerate(DataLoader(data, batch_size=256, num_workers=workers, pin_memory=True)):
        model(x.cuda(non_blocking=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 4:
            show(f"{workers} workers")
image = nn.Conv2d(3, 64, 3).cuda()
image(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
show("a convolution")
