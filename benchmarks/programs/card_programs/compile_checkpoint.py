"""A compiled language model with checkpointed blocks."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.card_parts import Decoder, train


class Checkpointed(Decoder):
    """Each block runs again in backward."""

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One block, checkpointed."""
        return checkpoint(block, x, use_reentrant=False)


model = torch.compile(Checkpointed().cuda())
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer)
