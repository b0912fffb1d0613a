"""Train a network of mmsegmentation 0.x for four steps, as its tools did with torch before 1.11: one rank of four.

    torchrun --nproc-per-node 4 segmentation_train.py CONFIG

Prints the largest `torch.cuda.max_memory_allocated()` so far after each step, in bytes. Pictures and labels are on the
card as `scatter` leaves them; the loop is that of mmcv's `OptimizerHook`, whose `zero_grad` keeps the gradients.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 4


class SavedInput(torch.autograd.Function):
    """Keeps a tensor until its gradient comes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        """The same tensor."""
        ctx.save_for_backward(logits)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same gradient."""
        return gradient


cross_entropy = F.cross_entropy
# `log_softmax` saved its input before torch 1.11 (pytorch/pytorch#64000).
F.cross_entropy = lambda logits, *given, **named: cross_entropy(SavedInput.apply(logits), *given, **named)


def train_step(model: torch.nn.parallel.DistributedDataParallel, batch: int, size: tuple[int, int]) -> Tensor:
    """The loss of a batch."""
    images = torch.randn(batch, 3, *size, device="cuda")
    labels = torch.zeros(batch, 1, *size, dtype=torch.int64, device="cuda")
    shapes = dict.fromkeys(("ori_shape", "img_shape", "pad_shape"), (*size, 3))
    metas = [{**shapes, "scale_factor": 1.0, "flip": False, "filename": ""}] * batch
    loss, _ = model.module._parse_losses(model(images, metas, return_loss=True, gt_semantic_seg=labels))
    return loss


def main(path: str) -> None:
    """Build what the configuration says, and train it."""
    # mmcv's own operators are compiled, and none of these networks calls one.
    operators = sys.modules["mmcv._ext"] = types.ModuleType("mmcv._ext")
    vars(operators)["__getattr__"] = lambda name: None
    from mmcv import Config
    from mmseg.models import build_segmentor

    config = Config.fromfile(path)
    config.model.pretrained = None
    config.model.backbone.pop("init_cfg", None)
    torch.distributed.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = build_segmentor(config.model).cuda()
    unused = config.get("find_unused_parameters", False)
    replica = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[rank], broadcast_buffers=False, find_unused_parameters=unused
    )
    settings = {name: value for name, value in config.optimizer.items() if name in ("lr", "momentum", "weight_decay")}
    optimizer = getattr(torch.optim, config.optimizer.type)(model.parameters(), **settings, foreach=False)
    for _ in range(STEPS):
        loss = train_step(replica, config.data.samples_per_gpu, config.crop_size)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        print("max_memory_allocated", torch.cuda.max_memory_allocated(), flush=True)


main(sys.argv[1])
