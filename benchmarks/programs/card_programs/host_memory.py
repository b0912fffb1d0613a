"""What a process has resident on the host, by kind, and at most since the line before: in KiB, as libraries load,
models are saved and loaded in every way, memory is pinned, and workers feed it."""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KEYS = ("RssAnon", "RssShmem", "RssFile", "VmRSS", "VmHWM", "VmPin", "VmLck")


def status() -> dict[str, int]:
    """Of this process, in KiB."""
    with open("/proc/self/status") as file:
        return {line.split(":")[0]: int(line.split()[1]) for line in file if line.startswith(KEYS)}


def show(what: str) -> None:
    """All of it, and the highest resident set since the last time."""
    found = status()
    pinned = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}
    kept = [
        pinned.get(f"{name}.{which}") for name in ("allocated_bytes", "active_bytes") for which in ("current", "peak")
    ]
    print("host", what, {key: found.get(key) for key in KEYS}, "pinned", kept, flush=True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def children() -> None:
    """Each child's resident and proportional set."""
    own = os.getpid()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/{own}/task/{task}/children") as file:
            for child in file.read().split():
                with open(f"/proc/{child}/smaps_rollup") as rollup:
                    found = {line.split(":")[0]: int(line.split()[1]) for line in rollup if " kB" in line}
                print(
                    "worker",
                    {
                        key: found.get(key)
                        for key in ("Rss", "Pss", "Pss_Anon", "Pss_Shmem", "Private_Clean", "Private_Dirty")
                    },
                    flush=True,
                )


class Images(Dataset):
    """A set that is in memory."""

    def __init__(self) -> None:
        self.kept = torch.randn(256, 3, 256, 256)  # 201 MB

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.kept[index % 256] + 1


show("torch imported")
torch.cuda.init()
show("cuda init")
torch.ones(1, device="cuda")
show("first tensor")
a = torch.randn(2048, 2048, device="cuda")
(a @ a).sum().item()
show("a product")
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])  # 512 MiB
show("8 layers of 64 MiB")
model.cuda()
show("on the card")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 4096, device="cuda")
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
show("two steps")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.pt")
    torch.save(model.state_dict(), path)
    show("torch.save of 512 MiB on the card")
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, path)
    show("torch.save of 1536 MiB on the card")
    state = torch.load(path, map_location="cuda")
    show("torch.load to the card")
    del state
    state = torch.load(path, map_location="cpu")
    show("torch.load to the host")
    del state
    state = torch.load(path, map_location="cuda", mmap=True)
    show("torch.load mapped to the card")
    del state
    os.remove(path)
    from safetensors.torch import load_file, save_file

    path = os.path.join(folder, "model.safetensors")
    save_file(model.state_dict(), path)
    show("safetensors save_file of 512 MiB on the card")
    state = load_file(path, device="cuda")
    show("safetensors load_file to the card")
    del state
    state = load_file(path)
    show("safetensors load_file to the host")
    del state
    os.remove(path)
    kept = [p.detach().cpu() for p in model.parameters()]
    show(".cpu() of 512 MiB")
    del kept, model, optimizer
    torch.cuda.empty_cache()
    from transformers import GPT2Config, GPT2LMHeadModel

    show("transformers imported")
    big = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=1024, n_head=16))  # 0.6 GB
    show("GPT-2 medium made on the host")
    big.save_pretrained(folder)
    show("save_pretrained from the host")
    big.cuda()
    show("moved")
    big.save_pretrained(folder)
    show("save_pretrained from the card")
    del big
    torch.cuda.empty_cache()
    big = GPT2LMHeadModel.from_pretrained(folder)
    show("from_pretrained to the host")
    big.cuda()
    show("moved")
    del big
    big = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)
    show("from_pretrained in bfloat16")
    del big
    try:
        big = GPT2LMHeadModel.from_pretrained(folder, device_map="cuda")
        show("from_pretrained to the card")
        del big
    except Exception as error:
        print("device_map", type(error).__name__, str(error)[:200])
pinned = torch.empty(300_000_000, dtype=torch.uint8, pin_memory=True)
pinned.fill_(1)
show("300 MB pinned")
del pinned
show("300 MB pinned freed")
data = Images()
show("201 MB of data")
for workers in (0, 2, 4):
    loader = DataLoader(data, batch_size=32, num_workers=workers, pin_memory=True)
    for number, batch in enumerate(loader):
        batch = batch.cuda(non_blocking=True)
        time.sleep(0.05)
        if number == 6:
            show(f"{workers} workers pinned")
            children()
    del loader, batch
    show(f"{workers} workers gone")
