"""A small GPT in float32 and under bf16 autocast: what the lower precision halves, and what it adds.

Autocast keeps the weights in float32 and casts a copy of each for its multiplications; the copies live until the
forward ends, and what backward needs of them longer still. Attention runs in a fused kernel, which keeps one number per
row of the attention matrix instead of the matrix; which kernel that is, the card, the dtype and the shapes decide.
"""

import torch
import torch.nn.functional as F
from torch import nn

import fxmem

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, TOKENS = 6, 512, 8, 8192, 8, 1024


class Block(nn.Module):
    """Attention and a perceptron, each after a normalisation and added to what came in."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, WIDTH)
        x = x + self.project(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embeddings, the blocks, and a head that gives the loss of predicting the next token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


ids = torch.empty(BATCH, TOKENS, dtype=torch.int64, device="meta")
analyses = [fxmem.analyze(GPT, ids, precision=precision, target="h100") for precision in (None, "bf16")]
kinds = ("parameter", "saved", "temporary", "workspace")
rows = {f"at the peak: {kind}": [a.peak.by_kind.get(kind, 0) for a in analyses] for kind in kinds}
rows["peak"] = [a.peak.requested_bytes for a in analyses]
for name in ("scaled_dot_product_attention", "blocks_0_up", "gelu"):
    nodes = [next(node for node in a.profile.nodes if node.name == name) for a in analyses]
    rows[f"saved by {name.removeprefix('scaled_dot_product_')}"] = [node.saved_bytes for node in nodes]

print(f"{'bytes':<24}{'float32':>16}{'bf16 autocast':>16}")
for label, figures in rows.items():
    print(f"{label:<24}" + "".join(f"{figure:>16,}" for figure in figures))
for a in analyses:
    kernels = [op.name for op in a.profile.ops if "attention" in op.name]
    print(f"attention, autocast {a.profile.step.precision or 'off'}: {kernels[0]}")
