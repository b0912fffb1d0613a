"""One rank of each of torch's ways to train on several cards."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
torch.cuda.set_device(0)
dist.init_process_group("nccl")


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual."""
        return x + self.down(nn.functional.gelu(self.up(x)))


def wrap(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    model = nn.Sequential(*[Block() for _ in range(6)]).cuda()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "ddp, views":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind == "zero":
        model = nn.parallel.DistributedDataParallel(model)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    elif kind == "fsdp1":
        precision = MixedPrecision(torch.bfloat16, torch.bfloat16)
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, use_orig_params=True
        )
    else:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


for kind in sys.argv[1:] or ("ddp", "ddp, views", "zero", "fsdp1", "fsdp2"):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = wrap(kind)
    print(kind, "wrapped", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(torch.randn(2048, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        print(kind, step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    del model, optimizer
dist.destroy_process_group()
