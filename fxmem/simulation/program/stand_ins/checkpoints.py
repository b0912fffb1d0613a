"""Checkpoints of a program that runs on a pretended card, kept in memory.

What would be written holds no values, and must not lie over a real one. A checkpoint is kept as its file would keep it:
the tensors of the card as sizes, which take no memory there until they are loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation import known_values
from fxmem.simulation.program.border import has_fake_inside, move_to_card
from fxmem.simulation.program.made_up import MadeUpNotes

_MARK = "fxmem kept in memory what a program saved on a pretended card"
"""The key of what stands in an open file in the place of a checkpoint."""


class Checkpoints:
    """What a program saved, by file, instead of the files.

    Args:
        notes: of what is made up.
        device: the target's.
    """

    def __init__(self, notes: MadeUpNotes, device: torch.device) -> None:
        self._notes = notes
        self._device = device
        self._kept: list[_Checkpoint] = []
        self._numbers: dict[str, int] = {}
        """Of what is kept, by file."""

    def patches(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        """The patches of `torch.save`, `torch.load` and, where it is installed, `safetensors.torch`."""
        yield torch_common.patch(torch, "save", self._saving)
        yield torch_common.patch(torch, "load", self._loading)
        try:
            # Now, so that what the program imports from it is patched.
            safetensors = importlib.import_module("safetensors.torch")
        except ImportError:
            return
        for function, make in (
            (safetensors.save_file, self._saving_tensors),
            (safetensors.save_model, self._saving_tensors),
            (safetensors.load_file, self._loading_tensors),
        ):
            for holder, name in _find_holders(function):
                yield torch_common.patch(holder, name, make)

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not has_fake_inside(obj):
                original(obj, f, *args, **kwargs)
            elif isinstance(f, (str, os.PathLike)):
                self._keep(obj, f)
            else:
                self._notes.note("file", "a checkpoint to an open file: kept in memory, only its mark is written")
                original({_MARK: self._add(obj)}, f)

        return save

    def _saving_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            if has_fake_inside(tensors):
                self._keep(tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors, filename)
            else:
                original(tensors, filename, *args, **kwargs)

        return save

    def _keep(self, value: Any, file: Any) -> None:
        self._numbers[os.path.abspath(os.fspath(file))] = self._add(value)
        self._notes.note("file", f"{os.path.basename(os.fspath(file))}: not written, kept in memory")

    def _add(self, value: Any) -> int:
        self._kept.append(_Checkpoint(value))
        return len(self._kept) - 1

    def _loading_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(filename: Any, device: Any = "cpu") -> Any:
            number = self._numbers.get(os.path.abspath(os.fspath(filename)))
            return original(filename, device) if number is None else self._kept[number].load(device, self._device)

        return load

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            number = self._numbers.get(os.path.abspath(os.fspath(f))) if isinstance(f, (str, os.PathLike)) else None
            if number is None:
                with torch_common.no_modes(), torch_common.pause_observers():
                    found = original(f, "cpu", *args, **kwargs)
                if not (isinstance(found, dict) and _MARK in found):
                    on_card = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type
                    return move_to_card(found) if on_card == "cuda" else found
                number = found[_MARK]
            return self._kept[number].load(map_location, self._device)

        return load


@dataclasses.dataclass(frozen=True)
class _KeptTensor:
    """A tensor without values, off the card."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: torch.Tensor | None
    """Where it is known."""
    is_parameter: bool
    requires_grad: bool

    def load(self, map_location: Any, target: torch.device) -> torch.Tensor:
        device = _find_device(self.device, map_location)
        if device.type == target.type:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
            if self.value is not None:
                known_values.give(tensor, self.value)
        else:
            with torch_common.no_modes(), torch_common.pause_observers():
                tensor = torch.zeros(self.shape, dtype=self.dtype) if self.value is None else self.value.clone()
        if self.is_parameter:
            return torch.nn.Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


def _find_device(device: torch.device, map_location: Any) -> torch.device:
    """Where `torch.load` puts a tensor of this device; a function as `map_location` is taken to mean the CPU."""
    if map_location is None:
        return device
    if isinstance(map_location, dict):
        return torch.device(map_location.get(str(device), device))
    return torch.device("cpu" if callable(map_location) else map_location)


class _Checkpoint:
    """A pickled value, with the tensors of the card beside it, each once."""

    def __init__(self, value: Any) -> None:
        self._tensors: list[_KeptTensor] = []
        numbers: dict[int, int] = {}

        def number(part: Any) -> int | None:
            if not isinstance(part, torch_common.FakeTensor):
                return None
            if id(part) not in numbers:
                numbers[id(part)] = len(self._tensors)
                self._tensors.append(_keep_tensor(part))
            return numbers[id(part)]

        stream = io.BytesIO()
        pickler = pickle.Pickler(stream)
        pickler.persistent_id = number  # type: ignore[method-assign]
        pickler.dump(value)
        self._pickled = stream.getvalue()

    def load(self, map_location: Any, target: torch.device) -> Any:
        """The value, its tensors anew where `torch.load` would put them."""
        made: dict[int, torch.Tensor] = {}

        def tensor(number: Any) -> torch.Tensor:
            if number not in made:
                made[number] = self._tensors[number].load(map_location, target)
            return made[number]

        unpickler = pickle.Unpickler(io.BytesIO(self._pickled))
        unpickler.persistent_load = tensor  # type: ignore[method-assign]
        return unpickler.load()


def _keep_tensor(tensor: torch_common.FakeTensor) -> _KeptTensor:
    return _KeptTensor(
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.fake_device,
        value=known_values.find_value(tensor),
        is_parameter=isinstance(tensor, torch.nn.Parameter),
        requires_grad=tensor.requires_grad,
    )


def _find_holders(function: Any) -> list[tuple[Any, str]]:
    """Modules that have a function, and under which names: who has imported it by name keeps it."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]
