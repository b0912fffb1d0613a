"""Attention in a window of 512, not compiled: all scores of 40,320 tokens are made."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def sliding_window(b, h, q_idx, kv_idx):
    return torch.abs(q_idx - kv_idx) <= 256


q, k, v = (torch.ones(1, 16, 40320, 2, device="cuda", dtype=torch.float16) for _ in range(3))
block_mask = create_block_mask(sliding_window, B=None, H=None, Q_LEN=40320, KV_LEN=40320, device="cuda")
out = flex_attention(q, k, v, block_mask=block_mask)
