"""A step captured in a CUDA graph by hand, and replayed."""

import torch

from benchmarks.programs.card_parts import Decoder

model = Decoder(layers=3).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
ids = torch.randint(0, 32000, (4, 512), device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(ids).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = model(ids)
    loss.backward()
    optimizer.step()
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
for _ in range(3):
    ids.copy_(torch.randint(0, 32000, (4, 512)))
    graph.replay()
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
