"""Ten thousand steps of random lengths; no log is kept."""

import torch

from benchmarks.programs.card_parts import train_on_lengths

torch.cuda.memory._record_memory_history(None)
train_on_lengths(10_000, 250)
