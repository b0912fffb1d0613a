"""A training script with DeepSpeed on ranks of the CPU: `DS_ACCELERATOR=cpu zero.py KIND`, in STORE a file to meet."""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any, Final

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

WIDTH, DEPTH, BATCH, SEQUENCE = 256, 4, 4, 64
STEPS: Final = 6
ADAM: Final[dict[str, Any]] = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
CPU: Final = {"device": "cpu", "pin_memory": False}
SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 1_000_000),
    "stage3_prefetch_bucket_size": 100_000,
    "stage3_param_persistence_threshold": 1_000,
}
"""Buckets that these few parameters fill."""
KINDS: Final[dict[str, dict[str, Any]]] = {
    **{f"ZeRO-{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    **{
        f"ZeRO-{stage}, bf16": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}} for stage in (1, 2, 3)
    },
    "ZeRO-2, accumulation": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
    "ZeRO-3, accumulation": {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2},
    "ZeRO-1, clipping": {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0},
    "ZeRO-2, gradients one by one": {"zero_optimization": {"stage": 2, "contiguous_gradients": False}},
    "ZeRO-2, optimizer offloaded": {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
    "ZeRO-3, all offloaded": {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
    "ZeRO-2, checkpointed": {"zero_optimization": {"stage": 2}},
    "ZeRO-3, checkpointed": {"zero_optimization": {"stage": 3}},
    "pipeline": {"zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 4},
    "pipeline, ZeRO-1, bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 4,
    },
    "pipeline, checkpointed": {"zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 4},
}
STAGES: Final = 2
"""Of a pipeline."""


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next block's input."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Checkpointed(nn.Sequential):
    """Blocks by DeepSpeed's own checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last block's output."""
        for block in self:
            x = deepspeed.checkpointing.checkpoint(block, x)
        return x


def train_by_stages(kind: str, settings: dict[str, Any]) -> None:
    """Train as a stage of DeepSpeed's own pipeline."""
    deepspeed.init_distributed(dist_backend="gloo")
    net = PipelineModule(
        [LayerSpec(Block) for _ in range(DEPTH)],
        num_stages=STAGES,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        activation_checkpoint_interval=int(kind.endswith("checkpointed")),
    )
    engine, _, _, _ = deepspeed.initialize(model=net, config=settings)
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    batches = ((torch.zeros(BATCH, SEQUENCE, WIDTH, dtype=dtype),) * 2 for _ in itertools.count())
    for _ in range(STEPS):
        engine.train_batch(data_iter=batches)
        time.sleep(float(os.environ.get("PAUSE", "0")))


def main(kind: str) -> None:
    """Train as one rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("LOCAL_RANK", str(rank))
    dist.init_process_group("gloo", init_method=f"file://{os.environ.get('STORE', '')}", rank=rank, world_size=world)
    torch.manual_seed(0)
    wanted = KINDS[kind]
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": ADAM,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **wanted,
        "zero_optimization": {**SMALL, **wanted["zero_optimization"]},
    }
    if kind.startswith("pipeline"):
        train_by_stages(kind, settings)
        return
    cls = Checkpointed if kind.endswith("checkpointed") else nn.Sequential
    model = cls(*(Block() for _ in range(DEPTH)))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    dtype = torch.bfloat16 if "bf16" in wanted else torch.float32
    for _ in range(STEPS):
        for _ in range(wanted.get("gradient_accumulation_steps", 1)):
            x = torch.zeros(BATCH, SEQUENCE, WIDTH, dtype=dtype)
            x.requires_grad_(cls is Checkpointed)  # a checkpoint whose inputs need no gradient runs without one
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
        time.sleep(float(os.environ.get("PAUSE", "0")))


if __name__ == "__main__":
    main(sys.argv[1])
