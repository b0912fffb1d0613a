"""A leak of 512 MiB a step until the whole card is full; what the error says."""

import torch
from torch import nn

model = nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = []
try:
    for step in range(1000):  # noqa: B007 (said when memory is out)
        out = model(torch.randn(32768, 4096, device="cuda"))
        out.sum().backward()
        optimizer.step()
        kept.append(out)
except torch.OutOfMemoryError as error:
    print("out of memory in step", step)
    print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())
    print(error)
statistics = torch.cuda.memory_stats()
print("retries", statistics["num_alloc_retries"], "errors", statistics["num_ooms"])
print("free and total", *torch.cuda.mem_get_info())
