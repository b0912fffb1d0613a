"""Training steps, an evaluation with gradients and one without, logits gathered."""

import torch

from benchmarks.programs.card_parts import Decoder

model = Decoder().cuda()
optimizer = torch.optim.AdamW(model.parameters())


def evaluate() -> torch.Tensor:
    """Losses of four batches, kept."""
    return torch.stack([model(torch.randint(0, 32000, (8, 1024), device="cuda")) for _ in range(4)])


for step in range(5):
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 32000, (4, 1024), device="cuda")
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
model.eval()
for grad in (True, False):
    torch.cuda.reset_peak_memory_stats()
    with torch.set_grad_enabled(grad):
        losses = evaluate()
    print(grad, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
model.train()
for step in range(5):
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 32000, (4, 1024), device="cuda")
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
