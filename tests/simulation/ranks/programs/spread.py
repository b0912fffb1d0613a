"""A training script on ranks of the CPU, over gloo: `spread.py KIND`, in STORE a file for the ranks to meet.

A kind is a configuration of `tests/sharded_models.py`, one of DistributedDataParallel, or a pipeline.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.sharded_models import BATCH, COMPILED, CONFIGURATIONS, SEQUENCE, VOCABULARY, Llama, loss

dist.init_process_group(
    "gloo",
    init_method=f"file://{os.environ.get('STORE', '')}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
rank, world, kind = dist.get_rank(), dist.get_world_size(), sys.argv[1]
STEPS, PAUSE = 6, float(os.environ.get("PAUSE", "0"))
batch = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


class Stage(nn.Module):
    """A block, with the embedding before the first and the logits after the last."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        whole = Llama(1)
        self.block = whole.layers[0]
        self.embedding = whole.embedding if index == 0 else None
        self.output = whole.output if index == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next stage's input."""
        x = self.block(x if self.embedding is None else self.embedding(x))
        return x if self.output is None else self.output(x)


def train(model: nn.Module, accumulate: int = 1, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Steps of some micro-batches."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        for _ in range(accumulate):
            loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE)


def train_stages(schedule: Any, parameters: Any) -> None:
    """Steps of a pipeline of four micro-batches."""
    optimizer = torch.optim.AdamW(parameters)
    whole = batch.repeat(4, 1)
    for _ in range(STEPS):
        schedule.step(*([whole] if rank == 0 else []), target=whole if rank == world - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE)


if kind in ("1f1b", "gpipe", "interleaved"):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    def stage_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), target.view(-1))

    count = world * (2 if kind == "interleaved" else 1)
    numbers = range(rank, count, world)
    stages = [PipelineStage(Stage(each, count), each, count, torch.device("cpu")) for each in numbers]
    if kind == "interleaved":
        schedule: Any = ScheduleInterleaved1F1B(stages, 4, loss_fn=stage_loss)
    else:
        schedule = (Schedule1F1B if kind == "1f1b" else ScheduleGPipe)(stages[0], 4, loss_fn=stage_loss)
    train_stages(schedule, [each for stage in stages for each in stage.submod.parameters()])
elif kind == "main gradients":
    # As trainers do it: hooks on `AccumulateGrad` move gradients to a buffer of their own, of which each rank keeps a
    # part; collectives go as one, objects and what is on the host by a second group.
    from torch.distributed.distributed_c10d import _coalescing_manager

    beside = dist.new_group(range(world), backend="gloo")
    shapes: list[Any] = [None] * world
    model = Llama().to(torch.bfloat16)
    parameters = list(model.parameters())
    dist.all_gather_object(shapes, [each.shape for each in parameters], group=beside)
    assert shapes == [shapes[0]] * world
    sinks = []
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape)

        def to_main(*_: Any, parameter: Any = parameter) -> None:
            """The gradient goes to its own buffer."""
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        sink = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        sink.register_hook(to_main)
        sinks.append(sink)  # a sink that nobody keeps goes, and its hooks with it
    shards = [torch.zeros(each.numel() // world) for each in parameters]
    optimizer = torch.optim.AdamW(shards)
    for _ in range(STEPS):
        loss(model(batch)).backward()
        for shard in shards:
            shard.grad = torch.empty_like(shard)
        with _coalescing_manager(group=beside, async_ops=True) as reduced:
            for shard, each in zip(shards, parameters, strict=True):
                dist.reduce_scatter_tensor(shard.grad, each.main_grad.view(-1), group=beside, async_op=True)
        reduced.wait()
        del reduced
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), _coalescing_manager(async_ops=True) as gathered:
            for shard, each in zip(shards, parameters, strict=True):
                dist.all_gather_into_tensor(each.data.view(-1), shard.to(torch.bfloat16), async_op=True)
                each.main_grad.zero_()
        gathered.wait()
        del gathered
        time.sleep(PAUSE)
elif kind == "ddp":
    train(nn.parallel.DistributedDataParallel(Llama()))
elif kind == "zero-1":
    from torch.distributed.optim import ZeroRedundancyOptimizer

    spread = nn.parallel.DistributedDataParallel(Llama())
    train(spread, optimizer=ZeroRedundancyOptimizer(spread.parameters(), torch.optim.AdamW))
elif kind == "ddp, views":
    train(nn.parallel.DistributedDataParallel(Llama(), gradient_as_bucket_view=True, bucket_cap_mb=0.1))
elif kind == "ddp, hook":

    def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """A future that has its result."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    hooked = nn.parallel.DistributedDataParallel(Llama(), bucket_cap_mb=0.1)
    hooked.register_comm_hook(None, lambda state, bucket: done(bucket.buffer().clone()))
    train(hooked)
elif kind.startswith("ring"):
    from tests.simulation.ranks.programs.ring import Attention, set_rotate_method

    set_rotate_method(kind.partition(", ")[2] or "allgather")
    model = nn.Sequential(Attention(), Attention())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(2, 64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE)
elif kind.startswith("experts"):
    from tests.simulation.ranks.programs.experts import Experts

    counts = (0, 0, 0, 0, 256, 256, 0, 0) if kind == "experts, worst" else ()  # of the second of two ranks
    model = nn.Sequential(Experts(world, counts), Experts(world, counts))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE)
else:
    _, _, shard, settings = (CONFIGURATIONS | COMPILED)[kind]
    train(shard("cpu")(Llama()), **settings)
