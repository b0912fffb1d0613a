"""A training script with Megatron-LM's core on ranks of the CPU: `megatron_core.py KIND`, in STORE a file to meet.

The core runs there but for three things, which stand in here: the name of its device, the random numbers that ranks
share (no dropout asks for some), and the wait for a card after a message. Not on a CPU are its distributed optimizer
and half precision, which ask for parameters of `torch.cuda`'s types, sequence parallel, whose norm is of another
package, its own checkpoints, which read a card's generator, and experts, whose router has a kernel of another package.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

VOCABULARY, TOKENS, BATCH, MICRO_BATCHES = 1024, 64, 4, 4
STEPS: Final = 6
KINDS: Final[dict[str, dict[str, Any]]] = {
    "data parallel": {},
    "tensor parallel": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "interleaved pipeline": {"pipeline": 2, "virtual": 2},
    "data parallel, overlapped": {"buffers": {"overlap_grad_reduce": True, "bucket_size": 500_000}},
    "tensor and data parallel": {"tensor": 2},
    "pipeline of tensor parallel": {"tensor": 2, "pipeline": 2},
}


class OnCpu(TorchFunctionMode):
    """What is made on a card is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with another device."""
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def stand_in() -> None:
    """Let the core run on a CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def batches() -> Iterator[tuple[torch.Tensor, ...]]:
    """Token ids, their positions, and a causal mask."""
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    while True:
        ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % VOCABULARY
        yield ids, torch.arange(TOKENS).expand(BATCH, TOKENS), mask


def forward(data: Iterator[tuple[torch.Tensor, ...]], model: Any) -> tuple[torch.Tensor, Any]:
    """A stage's output, and its loss."""
    ids, positions, mask = next(data)
    return model(ids, positions, mask, labels=ids), partial(average)


def average(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of a micro-batch."""
    return losses.float().mean(), {}


def main(kind: str) -> None:
    """Train as one rank."""
    stand_in()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("LOCAL_RANK", str(rank))
    dist.init_process_group("gloo", init_method=f"file://{os.environ.get('STORE', '')}", rank=rank, world_size=world)
    wanted = KINDS[kind]
    sizes = {name: wanted.get(name, 1) for name in ("tensor", "pipeline")}
    virtual = wanted.get("virtual")
    parallel_state.initialize_model_parallel(
        **{f"{name}_model_parallel_size": size for name, size in sizes.items()},
        virtual_pipeline_model_parallel_size=virtual,
    )
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        **{f"{name}_model_parallel_size": size for name, size in sizes.items()},
        virtual_pipeline_model_parallel_size=virtual,
    )
    buffers = DistributedDataParallelConfig(**wanted.get("buffers", {}))
    spec = get_gpt_layer_local_spec()
    chunks = []
    for part in range(virtual or 1):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part)
        stage = GPTModel(
            config, spec, VOCABULARY, TOKENS, pre_process=first, post_process=last, vp_stage=part if virtual else None
        )
        chunks.append(DistributedDataParallel(config, buffers, stage, disable_bucketing=part > 0))
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=0.0), chunks)
    run = get_forward_backward_func()
    data = [batches() for _ in chunks]
    for _ in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=data if virtual else data[0],
            model=chunks if virtual else chunks[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=TOKENS,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()
        time.sleep(float(os.environ.get("PAUSE", "0")))


if __name__ == "__main__":
    with OnCpu():
        main(sys.argv[1])
