"""Which kernels the card would run where fakes run others."""

from fxmem.simulation.kernels.subclass_ways import is_under_mode

__all__ = ["is_under_mode"]
