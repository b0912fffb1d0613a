"""A mixture of experts by hand, each over the tokens that are sent to it; and one grouped product for all."""

import torch
from torch import nn

torch.manual_seed(0)


class Experts(nn.Module):
    """Eight feed-forward networks, two for each token."""

    def __init__(self, width: int = 1024, count: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weighted sum of two experts."""
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, which = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        return out


model = Experts().cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
weights = nn.Parameter(torch.randn(8, 1024, 4096, device="cuda", dtype=torch.bfloat16))
ends = torch.arange(512, 4097, 512, device="cuda", dtype=torch.int32)
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    torch._grouped_mm(x, weights, offs=ends).float().square().mean().backward()
    weights.grad = None
    print("grouped", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
left, right = torch.randn(4096, 1024, device="cuda"), torch.randn(2048, 1024, device="cuda")
one = torch.tensor(1.0, device="cuda")
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    torch._scaled_mm(
        left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t(), one, one, out_dtype=torch.bfloat16
    )
    print("fp8", torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
    torch._int_mm(left.to(torch.int8), right.to(torch.int8).t())
    print("int8", torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
