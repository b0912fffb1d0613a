"""The state and the temporaries of optimizers."""

import torch
import torch.nn.functional as F
from torch import nn, optim


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


kinds = {
    "sgd": lambda p: optim.SGD(p, lr=1e-3),
    "momentum": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p),
    "adam, loop": lambda p: optim.Adam(p, foreach=False),
    "adam, fused": lambda p: optim.Adam(p, fused=True),
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adafactor": lambda p: optim.Adafactor(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "adadelta": lambda p: optim.Adadelta(p),
    "adamax": lambda p: optim.Adamax(p),
    "asgd": lambda p: optim.ASGD(p),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9),
    "rprop": lambda p: optim.Rprop(p),
    "muon": lambda p: optim.Muon([each for each in p if each.ndim == 2]),
}
for name, make in kinds.items():
    torch.cuda.empty_cache()
    model = nn.Sequential(*[Block(1024, 16) for _ in range(4)]).cuda()
    optimizer = make(list(model.parameters()))
    for _ in range(3):
        model(torch.randn(1, 64, 1024, device="cuda")).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        optimizer.zero_grad()
    print(name, torch.cuda.memory_allocated(), *peak)
    del model, optimizer
