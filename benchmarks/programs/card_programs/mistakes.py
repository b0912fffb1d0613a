"""The commonest mistakes of people who fight memory, each beside what they meant, one after another."""

import gc
import os
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18, resnet50
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.programs.card_parts import show


def logits(keep: bool) -> None:
    """Whether the loop holds the logits through backward and the next forward."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=32000,
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        ids = torch.randint(0, 32000, (8, 1024), device="cuda")
        if keep:
            out = model(input_ids=ids, labels=ids, use_cache=False)
            loss = out.loss
        else:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"logits {keep} {step}")


def validation(gradients: bool) -> None:
    """Whether validation keeps a graph, and each loss its own."""
    model = resnet18(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(2):
        model.train()
        for _ in range(2):
            images, labels = torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        show(f"validation {gradients} {epoch} trained")
        model.eval()
        total = 0.0
        with torch.set_grad_enabled(gradients):
            for _ in range(4):
                images, labels = torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
                total += F.cross_entropy(model(images), labels)
        show(f"validation {gradients} {epoch}")


def hook() -> None:
    """A forward hook keeps every activation."""
    model, kept = resnet18().cuda(), []
    model.layer2.register_forward_hook(lambda _, __, out: kept.append(out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        images, labels = torch.randn(16, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (16,), device="cuda")
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(f"hook {step}")


def checkpoint() -> None:
    """A checkpoint that was loaded to the card stays in a variable."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        found = torch.load(path, map_location="cuda")
    show("checkpoint loaded")
    model.load_state_dict(found["model"])
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    show("checkpoint taken")
    for step in range(3):
        loss = model(torch.randn(64, 2048, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"checkpoint {step}")


def embedding(sparse: bool) -> None:
    """A dense gradient of a large table, or one of the rows alone."""
    table = nn.Embedding(500_000, 64, sparse=sparse).cuda()
    optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(table.parameters())
    for step in range(3):
        table(torch.randint(0, 500_000, (4096,)).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"embedding {sparse} {step}")


def inference(gradients: bool) -> None:
    """The graph of an inference that nobody needs."""
    model = resnet50().cuda().eval()
    with torch.set_grad_enabled(gradients):
        for step in range(3):
            out = model(torch.randn(8, 3, 224, 224, device="cuda"))
            show(f"inference {gradients} {step}")
    del out


def growing_cat() -> None:
    """Results that are joined one by one."""
    joined = None
    for step in range(8):
        new = torch.empty(64 * 2**20, device="cuda")
        joined = new if joined is None else torch.cat([joined, new])
        show(f"cat {step}")


def larger_at_the_end() -> None:
    """A larger batch after the last step."""
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.randn(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"larger {step}")
    model.eval()
    with torch.no_grad():
        model(torch.randn(131072, 256, device="cuda"))
    show("larger at the end")


def replay() -> None:
    """Batches that are kept on the card."""
    model, kept = nn.Linear(3 * 64 * 64, 10).cuda(), []
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        images = torch.randn(128, 3 * 64 * 64, device="cuda")
        loss = model(images).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(images)
        show(f"replay {step}")


def too_large() -> None:
    """One request beyond any card, and one beyond the share that the process was given."""
    left, right = torch.randn(2, 160_000, 5, device="cuda"), torch.randn(2, 160_000, 5, device="cuda")
    try:
        torch.cdist(left, right)
    except torch.cuda.OutOfMemoryError as error:
        print(str(error).split(". GPU")[0])
    del left, right
    show("distances")
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        print(str(error).split(". GPU")[0])
    show("share")


TASKS: dict[str, Callable[[], None]] = {
    "logits kept": lambda: logits(True),
    "logits let go": lambda: logits(False),
    "validation with gradients": lambda: validation(True),
    "validation without": lambda: validation(False),
    "hook": hook,
    "checkpoint": checkpoint,
    "embedding": lambda: embedding(False),
    "embedding, sparse": lambda: embedding(True),
    "inference with gradients": lambda: inference(True),
    "inference without": lambda: inference(False),
    "cat": growing_cat,
    "larger": larger_at_the_end,
    "replay": replay,
    "too large": too_large,
}
for name, task in TASKS.items():
    task()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    show(f"after {name}")
