"""Steps of random lengths, in segments that grow."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
from benchmarks.programs.card_parts import train_on_lengths

train_on_lengths(200, 10)
