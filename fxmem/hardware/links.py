"""How fast cards send to each other and the host, and what NCCL takes."""

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
_HOST: Final = {7: 12.2e9, 8: 26.0e9, 9: 55.6e9, 10: 55.6e9, 12: 55.6e9}
"""By major compute capability, bytes a second in one direction between a card and pinned memory of the host, as
measured over 16 lanes of the PCI Express that such cards have. 3.0: CUDA's bandwidthTest in pull request 82 of
mpicbg-scicomp/gearshifft; 4.0: README of NVIDIA/nvbandwidth, a machine of 8 cards; 5.0: NVIDIA's example of the same
tool's host_to_device_memcpy_ce."""
_GRACE: Final = 450e9
"""The same over NVLink-C2C: half of the 900 GB/s of NVIDIA's GH200 data sheet."""
SENT_AHEAD: Final = 2
"""Copies of offloaded results to the host that may be under way before the step waits for the first of them."""
FETCHED_AHEAD: Final = 2
"""Copies back that are begun before they are asked for."""
NCCL_PUBLISHED: Final = "560 MiB with one rank to 900 with eight were published for the first of an H100"


def bytes_per_second(target: Target, group: RankGroup) -> float | None:
    """What a rank sends in a second to its neighbours in a group; None where it is not known."""
    if group.size * group.spread > PER_MACHINE:
        return _NETWORK
    return None if target.capability is None else _NVLINK.get(target.capability)


def host_bytes_per_second(target: Target) -> float | None:
    """What a card sends to pinned memory of the host in a second; None where it is not known.

    It gets as much from there.
    """
    if target.name.startswith("gh200"):
        return _GRACE
    return None if target.capability is None else _HOST.get(target.capability[0])
