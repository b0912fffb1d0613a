"""A small language model with accumulation, clipping and evaluation, in the shape of nanoGPT's train.py."""

import contextlib
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
batch, block, vocabulary, width, heads, layers, accumulate = 4, 128, 512, 128, 4, 2, 2
data = torch.randint(0, vocabulary, (10_000,))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = F.softmax(scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((scores @ v).transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for each in self.h:
            x = each(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def get_batch():
    places = torch.randint(len(data) - block, (batch,))
    x = torch.stack([data[i : i + block] for i in places])
    y = torch.stack([data[i + 1 : i + 1 + block] for i in places])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(3)
    for k in range(3):
        x, y = get_batch()
        with context:
            _, loss = model(x, y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


torch.manual_seed(1337)
context = torch.amp.autocast(device_type=device, dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
model = GPT().to(device)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
best = 1e9
x, y = get_batch()
for step in range(10):
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * min(1.0, (step + 1) / 5)
    if step % 2 == 1:
        losses = estimate_loss()
        print(f"step {step}: {losses:.4f}")
        if losses < best:
            best = losses
    for _ in range(accumulate):
        with context:
            logits, loss = model(x, y)
            loss = loss / accumulate
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {step}: loss {loss.item() * accumulate:.4f}")
