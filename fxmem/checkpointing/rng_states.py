"""Save and restore the states of random generators for recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import set_device_states


@dataclass(frozen=True, slots=True)
class Generators:
    """States of the default random generators: the CPU's, and those of the devices that an operator runs on."""

    cpu: torch.Tensor
    device_type: str
    devices: tuple[int, ...]
    states: tuple[torch.Tensor, ...]

    @staticmethod
    def now(tensors: Iterable[torch.Tensor]) -> Generators:
        """As they are, for an operator on these tensors."""
        found = [tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
        kind = found[0].type if found else "cpu"
        return Generators._read(kind, tuple(sorted({device.index or 0 for device in found if device.type == kind})))

    @staticmethod
    def _read(kind: str, devices: tuple[int, ...]) -> Generators:
        states = tuple(torch.get_device_module(kind).get_rng_state(device) for device in devices)
        return Generators(torch.get_rng_state(), kind, devices, states)

    def restore(self) -> None:
        """Have them so again."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=self.device_type)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """As they were, within; afterwards as they are."""
        now = self._read(self.device_type, self.devices)
        self.restore()
        try:
            yield
        finally:
            now.restore()
