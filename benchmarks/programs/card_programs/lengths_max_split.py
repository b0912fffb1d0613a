"""Steps of random lengths; blocks over 64 MiB are not split."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
from benchmarks.programs.card_parts import train_on_lengths

train_on_lengths(200, 10)
