"""Checkpoints of a program that runs on a pretended card.

What is on the card has no values. A checkpoint of it is a file as torch would write it, of the same length and with
zeros that take no room on the disk, so that the program can measure, copy, rename and list it. At the end of what it
pickles stands what `torch.load` gives back meanwhile: the tensors of the card as sizes, which take no memory until they
are loaded, and all else as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import pickle
import secrets
import zipfile
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import modules as torch_modules
from fxmem.simulation.asked import known_values
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.card.device_border import Border, has_fake_inside
from fxmem.simulation.card.host_ledger import HostLedger, make_zeros
from fxmem.simulation.code.source_lines import find_holders
from fxmem.simulation.processes.sandbox.isolation import Isolation

_TOKEN: Final = secrets.token_bytes(16)
"""Ends what is ours in a file: a pickle that this process, or one that it was forked from, has written itself."""
_SIZE: Final = 8
"""Bytes of the length that stands before it."""
_NAMES: Final = (
    "bool=BOOL uint8=U8 int8=I8 float8_e5m2=F8_E5M2 float8_e4m3fn=F8_E4M3 int16=I16 uint16=U16 float16=F16 "
    "bfloat16=BF16 int32=I32 uint32=U32 float32=F32 complex64=C64 float64=F64 int64=I64 uint64=U64"
)
"""Names of dtypes, torch's own and those in the format of safetensors, which has the last of these first in a file
(`Dtype` in safetensors/src/tensor.rs)."""
_SAFETENSORS: Final = {getattr(torch, dtype): name for dtype, name in (each.split("=") for each in _NAMES.split())}
_SAVERS: Final = {
    "accelerate.accelerator": "Accelerator.save_model Accelerator.save_state",
    "deepspeed.runtime.engine": "DeepSpeedEngine.save_16bit_model DeepSpeedEngine.save_checkpoint",
    "lightning.pytorch.trainer.trainer": "Trainer.save_checkpoint",
    "pytorch_lightning.trainer.trainer": "Trainer.save_checkpoint",
    "torch.distributed.checkpoint": "async_save save",
    "transformers.trainer": "Trainer._save_checkpoint Trainer.save_model",
}
"""By module, what else saves: it makes on the card what it saves."""


class Checkpoints:
    """What saves and loads a program's checkpoints.

    Args:
        border: whose log has what is loaded.
        notes: of what is made up.
        device: the target's.
        isolation: where files lie.
        saving: around what saves.
    """

    def __init__(
        self,
        border: Border,
        notes: MadeUpNotes,
        device: torch.device,
        isolation: Isolation,
        saving: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._saving = saving
        self._border = border
        self._notes = notes
        self._device = device
        self._isolation = isolation

    def patches(self) -> torch_common.Patches:
        """The patches of `torch.save`, `torch.load` and, where it is installed, `safetensors.torch`."""
        yield torch_fakes.fakes_have_addresses()
        yield torch_common.wrap(torch, "save", self._save)
        savers = {each: functools.partial(self._patch, names=names) for each, names in _SAVERS.items()}
        yield torch_modules.patch_when_imported(savers)
        yield torch_common.wrap(torch, "load", self._load)
        try:
            # Now, so that what the program imports from it is patched.
            safetensors = importlib.import_module("safetensors.torch")
        except ImportError:
            return
        ways: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys((safetensors.save_file, safetensors.save_model), self._save_tensors),
            safetensors.save: _serialize,
        }
        if self._isolation.redirect is not None:
            ways |= dict.fromkeys((safetensors.load_file, safetensors.safe_open), self._load_file)
        for holder, name, function in find_holders(ways):
            yield torch_common.wrap(holder, name, ways[function])

    def _patch(self, module: Any, names: str) -> torch_common.Patches:
        for name in names.split():
            owner, _, function = name.rpartition(".")
            holder = getattr(module, owner, None) if owner else module
            if hasattr(holder, function):
                yield torch_common.wrap(holder, function, self._run_saver)

    def _run_saver(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._saving():
            return original(*args, **kwargs)

    # --- torch.save ---------------------------------------------------------------------------------------------------

    def _save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        is_path = isinstance(f, (str, os.PathLike))
        file = self._isolation.place_to_write(f) if is_path else f
        if not has_fake_inside(obj):
            original(obj, file, *args, **kwargs)
            return
        self._note(f, is_path)
        # A storage at a time is on the host on its way to the file (torch/serialization.py; so it was on an H200).
        self._border.host.pass_through(max(_card_bytes(obj), default=0))
        known = _dump(obj, original)
        settings = {"pickle_module": _pickle_module(known + len(known).to_bytes(_SIZE, "big") + _TOKEN)}
        with (
            self._saving(),
            torch_common.no_modes(),
            torch_common.pause_observers(),
            torch.serialization.skip_data(materialize_fake_tensors=True),
        ):
            original(obj, file, **settings)

    def _load(self, original: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        file = self._isolation.place_to_read(f) if isinstance(f, (str, os.PathLike)) else f
        if (known := _find_known(file)) is not None:
            return _restore(known, original, map_location, self._device, self._border.host)
        on_card = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "cuda"
        if on_card and isinstance(file, (str, os.PathLike)) and zipfile.is_zipfile(file):
            # As on a card, where each storage goes there as soon as it is read, the host has no copy of all of them.
            kwargs.setdefault("mmap", True)
        with torch_common.no_modes(), torch_common.pause_observers():
            found = original(file, "cpu", *args, **kwargs)
            if self._device.type == "cpu" and not self._border.loading:
                self._border.log.note_loaded(found)
        if not on_card:
            return found
        host = [each.untyped_storage().nbytes() for each in torch_common.iterate_tensors(found)]
        self._border.host.pass_through(max(host, default=0))
        return _move_storages(found)

    def _note(self, file: Any, is_path: bool) -> None:
        name = os.path.basename(os.fspath(file)) if is_path else "a checkpoint to an open file"
        self._notes.note("file", f"{name}: of the right length, without values")

    # --- safetensors --------------------------------------------------------------------------------------------------

    def _save_tensors(
        self, original: Callable[..., Any], tensors: Any, filename: Any, metadata: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if not has_fake_inside(tensors):
            original(tensors, self._isolation.place_to_write(filename), metadata, *args, **kwargs)
            return
        self._note(filename, True)
        self._border.host.pass_through(sum(_card_bytes(tensors)))
        named = _once(tensors.state_dict()) if isinstance(tensors, torch.nn.Module) else tensors
        with self._saving(), open(filename, "wb") as file:
            write_safetensors(named, metadata, file)

    def _load_file(self, original: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self._isolation.place_to_read(filename), *args, **kwargs)


def _card_bytes(value: Any) -> list[int]:
    """Of each storage on the card in nested values, its bytes."""
    tensors = list(torch_common.iterate_tensors(value.state_dict() if isinstance(value, torch.nn.Module) else value))
    found = {torch_common.storage_key(each): each.untyped_storage().nbytes() for each in tensors if each.is_cuda}
    return list(found.values())


def _serialize(original: Callable[..., Any], tensors: Any, metadata: Any = None) -> Any:
    """`safetensors.torch.save`."""
    if not has_fake_inside(tensors):
        return original(tensors, metadata)
    file = io.BytesIO()
    write_safetensors(tensors, metadata, file)
    return file.getvalue()


def _once(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under its first name, as `safetensors.torch.save_model` has it."""
    found: dict[tuple[int, int], str] = {}
    for name, tensor in tensors.items():
        found.setdefault((torch_common.storage_key(tensor), int(tensor.storage_offset())), name)
    return {name: tensors[name] for name in found.values()}


def write_safetensors(tensors: Mapping[str, torch.Tensor], metadata: Any, file: Any) -> None:
    """Write the format of safetensors (its README, "Format"), with zeros where no value is known."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-list(_SAFETENSORS).index(item[1].dtype), item[0])):
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = file.write(len(text).to_bytes(8, "little") + text)
    with torch_common.no_modes(), torch_common.pause_observers():
        for name, tensor in tensors.items():
            value = known_values.find_value(tensor) if isinstance(tensor, torch_common.FakeTensor) else tensor
            if value is not None and not value.is_meta:
                file.seek(begin + header[name]["data_offsets"][0])
                file.write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if file.seek(0, io.SEEK_END) < begin + at:
        file.seek(begin + at - 1)
        file.write(b"\0")  # what is in memory has no holes: `truncate` would not lengthen it


# --- what is saved ----------------------------------------------------------------------------------------------------


def _pickle_module(end: bytes) -> Any:
    """The module `pickle`, whose pickler writes some bytes behind its pickle, which no unpickler reads."""

    class Pickler(pickle.Pickler):
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(file, *args, **kwargs)
            self._file = file

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            self._file.write(end)

    return SimpleNamespace(**{**vars(pickle), "Pickler": Pickler})


def _find_known(file: Any) -> bytes | None:
    """What is ours in a file; None where nothing is, or where it cannot be looked at."""
    try:
        with contextlib.ExitStack() as stack:
            if hasattr(file, "tell"):
                stack.callback(file.seek, file.tell())
            archive = stack.enter_context(zipfile.ZipFile(file))
            text = archive.read(next(each for each in archive.namelist() if each.endswith("/data.pkl")))
    except (OSError, ValueError, StopIteration, AttributeError, zipfile.BadZipFile, NotImplementedError):
        return None
    if not text.endswith(_TOKEN):
        return None
    end = len(text) - len(_TOKEN) - _SIZE
    return text[end - int.from_bytes(text[end : end + _SIZE], "big") : end]


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
                like = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
                tensor = make_zeros(like) if self.value is None else self.value.clone()
        return _as_was(tensor, self.is_parameter, self.requires_grad)


def _as_was(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _move_storages(value: Any) -> Any:
    """Nested values on the card, where each storage of a file comes once and whole: tied weights lie in one, and of a
    view all was saved that it is a view of (torch/serialization.py, `load_tensor`)."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda or tensor.layout is not torch.strided:
            return tensor if tensor.is_cuda else tensor.to("cuda")
        storage, key = tensor.untyped_storage(), torch_common.storage_key(tensor)
        is_whole = tensor.nbytes == storage.nbytes() and tensor.is_contiguous()
        if key not in moved:
            with torch_common.no_modes():
                whole = tensor if is_whole else torch.empty(0, dtype=tensor.dtype).set_(storage)
            moved[key] = whole.to("cuda")
            if is_whole:
                return moved[key]
        return moved[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return torch_common.tree_map_only(torch.Tensor, move, value)


def _find_device(device: torch.device, map_location: Any) -> torch.device:
    """Where `torch.load` puts a tensor of this device; a function as `map_location` is taken to mean the CPU."""
    if map_location is None:
        return device
    if isinstance(map_location, dict):
        return torch.device(map_location.get(str(device), device))
    return torch.device("cpu" if callable(map_location) else map_location)


def _move(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """A tensor of the host that was saved beside such without values, where `torch.load` puts it."""
    device = _find_device(tensor.device, map_location)
    if device == tensor.device:
        return tensor
    return _as_was(tensor.detach().to(device), isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)


def _dump(value: Any, save: Callable[..., Any]) -> bytes:
    """A pickled value, with its tensors beside it, each once, by torch's own `save`."""
    tensors: list[_KeptTensor | torch.Tensor] = []
    numbers: dict[int, int] = {}

    def number(part: Any) -> int | None:
        if not isinstance(part, torch.Tensor):
            return None
        if id(part) not in numbers:
            numbers[id(part)] = len(tensors)
            tensors.append(_keep_tensor(part) if isinstance(part, torch_common.FakeTensor) else part)
        return numbers[id(part)]

    pickled, saved = io.BytesIO(), io.BytesIO()
    pickler = pickle.Pickler(pickled)
    pickler.persistent_id = number  # type: ignore[method-assign]
    pickler.dump(value)
    with torch_common.no_modes(), torch_common.pause_observers():
        save((pickled.getvalue(), tensors), saved)
    return saved.getvalue()


def _restore(text: bytes, load: Callable[..., Any], map_location: Any, target: torch.device, host: HostLedger) -> Any:
    """What `_dump` was given, by torch's own `load`; its tensors anew where that would put them."""
    with torch_common.no_modes(), torch_common.pause_observers():
        pickled, tensors = load(io.BytesIO(text), "cpu", weights_only=False)
    made: dict[int, torch.Tensor] = {}

    def tensor(number: Any) -> torch.Tensor:
        if number not in made:
            kept = tensors[number]
            is_kept = isinstance(kept, _KeptTensor)
            made[number] = kept.load(map_location, target) if is_kept else _move(kept, map_location)
            if is_kept and kept.value is None:
                host.note_zeros(made[number])
        return made[number]

    unpickler = pickle.Unpickler(io.BytesIO(pickled))
    unpickler.persistent_load = tensor  # type: ignore[method-assign]
    return unpickler.load()


def reduce_tensor(tensor: torch_common.FakeTensor, protocol: Any = None) -> tuple[Any, ...]:
    """`Tensor.__reduce_ex__`, by which `pickle` writes a tensor and makes it anew."""
    kept = _keep_tensor(tensor)
    return kept.load, (None, kept.device)


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
