"""One of SpeechBrain's small experiments, on a card: started as a program, it stays on the processor."""

import importlib
import sys

import torch

importlib.import_module(sys.argv[1]).main("cuda:0" if torch.cuda.is_available() else "cpu")
