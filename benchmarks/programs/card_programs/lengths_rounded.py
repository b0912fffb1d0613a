"""Steps of random lengths; sizes rounded up to quarters of powers of two."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "roundup_power2_divisions:4"
from benchmarks.programs.card_parts import train_on_lengths

train_on_lengths(200, 10)
