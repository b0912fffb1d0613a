"""Pinned memory: the caching allocator of the host, in its powers of two."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def show(what: str) -> None:
    """What is pinned now."""
    kept = torch.cuda.host_memory_stats()
    print(what, *(kept[f"{name}_bytes.current"] for name in ("allocated", "active")), kept["num_host_alloc"])


torch.cuda.init()
show("none")
one = torch.empty(3_000_000, dtype=torch.uint8, pin_memory=True)
show("3 MB")
two = torch.randn(1_000_000).pin_memory()
show("and 4 MB")
del one
show("the first freed")
three = torch.empty(2_500_000, dtype=torch.uint8, pin_memory=True)
show("2.5 MB")
data = TensorDataset(torch.randn(256, 3, 96, 96), torch.arange(256))
model = torch.nn.Conv2d(3, 8, 3).cuda()
for images, _ in DataLoader(data, batch_size=32, pin_memory=True):
    model(images.cuda(non_blocking=True)).sum().backward()
show("a loader's batches")
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved())
