"""The mask of blocks of 96,000 tokens, not compiled: every pair of tokens is asked."""

import torch
from torch.nn.attention.flex_attention import create_block_mask


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx  # which one is not said


query = torch.randn(1, 1, 96000, 64, device="cuda", dtype=torch.float16)
block_mask = create_block_mask(causal, 1, 1, 96000, 96000, device=query.device)
