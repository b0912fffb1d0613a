"""Steps of random lengths in a part of the card; old blocks go at 60 % of it."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "garbage_collection_threshold:0.6"
import torch

from benchmarks.programs.card_parts import train_on_lengths

torch.cuda.set_per_process_memory_fraction(0.1)
train_on_lengths(200, 10)
