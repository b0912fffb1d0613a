"""A data set in memory, of which four workers decode chunks that wait in shared memory for a slow program."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Chunks(Dataset):
    """Records in memory, decoded many at a time."""

    def __init__(self) -> None:
        self.records = [torch.randint(256, (1 << 16,), dtype=torch.uint8).numpy().tobytes() for _ in range(12_000)]

    def __len__(self) -> int:
        return len(self.records) // 128

    def __getitem__(self, index: int) -> torch.Tensor:
        chunk = torch.empty(8, 1 << 16)
        for row in range(len(chunk)):
            record = bytearray(self.records[index * 128 + row])
            chunk[row] = torch.frombuffer(record, dtype=torch.uint8)
        return chunk


device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(1 << 16, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, x in enumerate(DataLoader(Chunks(), batch_size=None, num_workers=4, prefetch_factor=16)):
    time.sleep(2)
    model(x.to(device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        break
