"""How fast cards send to each other, and what NCCL takes beside the allocator."""

from __future__ import annotations

from typing import Final

from fxmem.records.parts import RankGroup
from fxmem.records.profile import Target

PER_MACHINE: Final = 8
"""Cards of one machine."""
_NVLINK: Final = {(7, 0): 150e9, (8, 0): 300e9, (9, 0): 450e9, (10, 0): 900e9}
"""By compute capability, bytes a second in one direction between the cards of a machine: NVIDIA's data sheets of V100,
A100, H100 and B200, in their SXM form."""
_NETWORK: Final = 50e9
"""Between machines: one port of 400 Gbit/s for each card, as in a DGX H100."""
NCCL_PUBLISHED: Final = "560 MiB with one rank to 900 with eight were published for the first of an H100"


def bytes_per_second(target: Target, group: RankGroup) -> float | None:
    """What a rank sends in a second to its neighbours in a group; None where it is not known."""
    if group.size * group.spread > PER_MACHINE:
        return _NETWORK
    return None if target.capability is None else _NVLINK.get(target.capability)
