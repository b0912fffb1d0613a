"""Which batch of an epoch decides, and what a long run over batches of different lengths reserves.

`fxmem run train.py` says it of any script with a `DataLoader`; this one is such a script, and runs itself that way.
"""

import random
import subprocess
import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import fxmem

if __name__ == "__main__" and not torch.cuda.is_available():
    print(f"fxmem {fxmem.__version__}", flush=True)
    command = [sys.executable, "-m", "fxmem", "run", "--target", "rtx4090", "--depth", "0", __file__]
    sys.exit(subprocess.run(command, check=False).returncode)

drawn = random.Random(0)
torch.manual_seed(0)
texts = [torch.arange(drawn.randint(16, 400)) for _ in range(400)]
loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=lambda each: pad_sequence(each, batch_first=True))
net = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1000)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for ids in loader:
    tokens = ids.cuda()
    loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
