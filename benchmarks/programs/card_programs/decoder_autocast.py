"""A small language model under autocast, clipped."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A causal decoder block."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then a feed-forward block."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self, layers: int = 6, width: int = 768) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = self.run(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return block(x)


model = Decoder().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(5):
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 32000, (4, 1024), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(ids)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
