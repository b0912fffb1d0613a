"""Least times of a step on a card: what its arithmetic and its memory traffic take at the card's peak rates.

The roofline of Williams, Waterman and Patterson ("Roofline: an insightful visual performance model for multicore
architectures", CACM 2009): a node takes the longer of its FLOPs at the peak rate and its bytes at the memory's
bandwidth; nodes run one after another. What launches, synchronisation and imperfect kernels cost is left out, so that a
time by itself is a lower bound, and the ratio of two of them the useful figure.
"""

from __future__ import annotations

from collections import defaultdict
from types import MappingProxyType
from typing import Final

from fxmem.records.profile import Phase, Profile, Record

__all__ = ["RATES", "Rates", "step_seconds"]

_Run = tuple[int, Phase, int | None]
"""A node, a phase, and an op of it that takes a time of its own."""


class Rates(Record):
    """Peak rates of a card, as its vendor publishes them: dense, without sparsity."""

    fp32: float
    """FLOP/s of float32 on the CUDA cores; what matrix products take by default
    (`torch.backends.cuda.matmul.allow_tf32` is off)."""
    tf32: float
    """FLOP/s of float32 convolutions, which cuDNN runs on tensor cores by default where there are any of that kind."""
    half: float
    """FLOP/s of float16 and, where there are any, bfloat16 products with float32 accumulation."""
    bandwidth: float
    """Bytes/s of the memory."""


def _rates(fp32: float, tf32: float, half: float, bandwidth: float) -> Rates:
    return Rates(fp32=fp32 * 1e12, tf32=tf32 * 1e12, half=half * 1e12, bandwidth=bandwidth * 1e9)


RATES: Final = MappingProxyType(
    {
        "t4": _rates(8.1, 8.1, 65.0, 320.0),  # NVIDIA T4 datasheet
        "v100": _rates(15.7, 15.7, 125.0, 900.0),  # NVIDIA V100 datasheet, SXM2
        "v100-32gb": _rates(15.7, 15.7, 125.0, 900.0),  # NVIDIA V100 datasheet, SXM2: 16 or 32 GB, otherwise equal
        "rtx3080": _rates(29.8, 29.8, 59.5, 760.0),  # NVIDIA Ampere GA102 whitepaper, table 2 (the 10 GB card)
        "rtx3090": _rates(35.6, 35.6, 71.0, 936.0),  # NVIDIA Ampere GA102 whitepaper, table 2
        "rtx4080": _rates(48.7, 48.7, 97.5, 716.8),  # NVIDIA Ada whitepaper, table of the RTX 4080 (16 GB)
        "rtx4090": _rates(82.6, 82.6, 165.2, 1008.0),  # NVIDIA Ada whitepaper
        "rtx5090": _rates(104.8, 104.8, 209.5, 1792.0),  # NVIDIA RTX Blackwell whitepaper
        "a10": _rates(31.2, 62.5, 125.0, 600.0),  # NVIDIA A10 datasheet
        "a10g": _rates(31.5, 35.0, 70.0, 600.0),  # NVIDIA A10G datasheet as Amazon EC2 hands it out (G5 instances)
        "a100": _rates(19.5, 156.0, 312.0, 1555.0),  # NVIDIA A100 datasheet, 40 GB
        "a100-80gb": _rates(19.5, 156.0, 312.0, 2039.0),  # NVIDIA A100 datasheet, SXM
        "a6000": _rates(38.7, 77.4, 154.8, 768.0),  # NVIDIA RTX A6000 datasheet; Ampere GA102 whitepaper, appendix A
        "l4": _rates(30.3, 60.0, 121.0, 300.0),  # NVIDIA L4 datasheet
        "l40s": _rates(91.6, 183.0, 362.0, 864.0),  # NVIDIA L40S datasheet
        "h100": _rates(67.0, 494.0, 989.0, 3350.0),  # NVIDIA H100 datasheet, SXM
        "h100-pcie": _rates(51.0, 378.0, 756.0, 2000.0),  # NVIDIA H100 datasheet, PCIe
        "h100-nvl": _rates(60.0, 417.5, 835.5, 3900.0),  # NVIDIA H100 datasheet, NVL
        "h200": _rates(67.0, 494.0, 989.0, 4800.0),  # NVIDIA H200 datasheet, SXM
        "b200": _rates(80.0, 1100.0, 2250.0, 8000.0),  # NVIDIA Blackwell architecture technical brief, HGX B200
        "gh200": _rates(67.0, 494.0, 989.0, 4000.0),  # NVIDIA GH200 datasheet, HBM3
    }
)
"""By name in the catalogue; a card that is not here has no estimate."""


def step_seconds(profile: Profile) -> float | None:
    """The least time of the step on its target; None where the card's rates are not known.

    A node's bytes are what it reads (its inputs' storages and parameters forward, what it saved or is made again for it
    and its parameters backward) and the storages it makes; the optimizer reads and writes parameters, gradients and its
    state once. An op that makes something again takes a time of its own.
    """
    rates = RATES.get(profile.target.name)
    if rates is None:
        return None
    again = {each.op: each.read_bytes for each in profile.recomputed_ops}
    flops: dict[_Run, float] = defaultdict(float)
    moved: dict[_Run, float] = defaultdict(float)
    for index, op in enumerate(profile.ops):
        run = (op.node, op.phase, index if index in again else None)
        flops[run] += (op.flops or 0) / _rate(rates, op.name, _dtype(profile, op.node))
        moved[run] += again.get(index, 0)
    for storage in profile.storages:
        if storage.op is not None:
            op = profile.ops[storage.op]
            moved[op.node, op.phase, storage.op if storage.op in again else None] += storage.nbytes
    for restored in profile.restored:
        moved[restored.node, Phase.BACKWARD, None] += profile.storages[restored.storage].nbytes
    for index, node in enumerate(profile.nodes):
        read = {
            output.storage
            for source in node.inputs
            for output in profile.nodes[source].outputs
            if output.storage is not None
        }
        moved[index, Phase.FORWARD, None] += sum(profile.storages[each].nbytes for each in read) + node.params_bytes
        moved[index, Phase.BACKWARD, None] += (
            sum(profile.storages[each].nbytes for each in node.saved) + node.params_bytes
        )
    # `flops` in order, on which the last digit of a sum depends.
    return sum(max(arithmetic, moved[run] / rates.bandwidth) for run, arithmetic in flops.items())


def _dtype(profile: Profile, node: int) -> str:
    outputs = profile.nodes[node].outputs
    return outputs[0].dtype if outputs else "float32"


def _rate(rates: Rates, op: str, dtype: str) -> float:
    if dtype in ("float16", "bfloat16"):
        return rates.half
    return rates.tf32 if "convolution" in op else rates.fp32
