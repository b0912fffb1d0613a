"""Files, data loaders and processes of a program that runs on a pretended card.

Checkpoints are kept in memory: what would be written holds no values, and must not lie over a real one. All else that a
program does on the host is real.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing
import torch.nn.parallel
import torch.utils.data

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.simulation.program.border import Border
from fxmem.simulation.program.made_up import MadeUpNotes


class Checkpoints:
    """What a program saved, by file, instead of the files."""

    def __init__(self, notes: MadeUpNotes) -> None:
        self._notes = notes
        self._saved: dict[str, Any] = {}

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
            if not _has_fake(obj):
                original(obj, f, *args, **kwargs)
            elif isinstance(f, (str, os.PathLike)):
                self._keep(obj, f)
            else:
                self._notes.note("file", "a checkpoint to an open file: not written")

        return save

    def _saving_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            if _has_fake(tensors):
                self._keep(tensors, filename)
            else:
                original(tensors, filename, *args, **kwargs)

        return save

    def _loading_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(filename: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._saved.get(os.path.abspath(os.fspath(filename)))
            return original(filename, *args, **kwargs) if found is None else found

        return load

    def _keep(self, value: Any, file: Any) -> None:
        self._saved[os.path.abspath(os.fspath(file))] = value
        self._notes.note("file", f"{os.path.basename(os.fspath(file))}: not written, kept in memory")

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            file = os.path.abspath(os.fspath(f)) if isinstance(f, (str, os.PathLike)) else ""
            if file in self._saved:
                return self._saved[file]
            with torch_common.no_modes(), torch_common.pause_observers():
                found = original(f, "cpu", *args, **kwargs)
            on_card = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "cuda"
            return _to_card(found) if on_card else found

        return load


def loader_patches(border: Border, *, on_card: bool) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Data loaders work on the host. Where the host is the target, their batches enter as its inputs."""
    yield torch_programs.loaders_at_home(workers=on_card)
    if on_card:
        return

    def quiet(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            border.loading += 1
            try:
                with torch_common.no_modes(), torch_common.pause_observers():
                    return original(self, *args, **kwargs)
            finally:
                border.loading -= 1

        return run

    def handing_out(original: Callable[..., Any]) -> Callable[..., Any]:
        def next_batch(self: Any) -> Any:
            batch = quiet(original)(self)
            return torch_common.tree_map_only(torch.Tensor, _entering, batch)

        return next_batch

    yield torch_common.patch(torch_programs.LOADER_ITERATOR, "__init__", quiet)
    yield torch_common.patch(torch_programs.LOADER_ITERATOR, "__next__", handing_out)


def _entering(tensor: torch.Tensor) -> torch.Tensor:
    """A batch's tensor on the target: integers keep their values."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def process_patches(notes: MadeUpNotes) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """One process on one card: the first rank, alone in its group."""

    def spawning(original: Callable[..., Any]) -> Callable[..., Any]:
        def spawn(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
            notes.note("answered", f"torch.multiprocessing.spawn of {nprocs}: the first runs here, alone")
            fn(0, *args)

        return spawn

    def forwarding(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            return self.module(*_to_card(inputs), **_to_card(kwargs))

        return forward

    yield torch_common.patch(torch.multiprocessing, "spawn", spawning)
    yield torch_common.patch(torch.nn.DataParallel, "forward", forwarding)
    if torch.distributed.is_available():
        yield from _distributed(notes)


def _distributed(notes: MadeUpNotes) -> Iterator[contextlib.AbstractContextManager[Any]]:
    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            notes.note("answered", "init_process_group: a group of one that answers at once")
            torch_programs.begin_fake_group(original)

        return init_process_group

    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        yield torch_common.patch(owner, "init_process_group", beginning)

    class Replica(_Replica):
        """`DistributedDataParallel` in a group of one."""

        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, *args, **kwargs)
            notes.note("answered", "DistributedDataParallel: one card, its gradient buckets counted, no communication")

    for holder in (torch.nn.parallel, torch.nn.parallel.distributed):
        yield torch_common.patch(holder, "DistributedDataParallel", lambda _: Replica)


_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


class _Replica(torch.nn.Module):
    """A model with the gradient buckets that torch's reducer keeps beside its gradients.

    Parameters go into buckets in reverse order, the first of 1 MiB and the others of 25 MiB, or of `bucket_cap_mb`
    (`_DEFAULT_FIRST_BUCKET_BYTES`, `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp);
    with `gradient_as_bucket_view` the gradients are their views, and there are none beside.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *_: Any,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        **__: Any,
    ) -> None:
        super().__init__()
        self.module = module
        limit = _BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20))
        self._buckets = [] if gradient_as_bucket_view else list(_buckets(module, limit))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """There is nothing to send."""
        yield


def _buckets(module: torch.nn.Module, limit: int) -> Iterator[torch.Tensor]:
    count, cap = 0, min(_FIRST_BUCKET, limit)
    last: torch.Tensor | None = None
    for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
        if last is not None and last.dtype is not parameter.dtype:
            yield torch.empty(count, dtype=last.dtype, device=last.device)
            count = 0
        last = parameter
        count += parameter.numel()
        if count * parameter.element_size() >= cap:
            yield torch.empty(count, dtype=parameter.dtype, device=parameter.device)
            count, cap = 0, limit
    if count and last is not None:
        yield torch.empty(count, dtype=last.dtype, device=last.device)


def _to_card(value: Any) -> Any:
    return torch_common.tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), value)


def _has_fake(value: Any) -> bool:
    """Whether there is a fake in nested values, the tensors of modules among them included."""
    modules = [each for each in torch_common.tree_iter(value) if isinstance(each, torch.nn.Module)]
    kept = (tensors for module in modules for tensors in (module.parameters(), module.buffers()))
    tensors = itertools.chain(torch_common.iterate_tensors(value), *kept)
    return any(isinstance(each, torch_common.FakeTensor) for each in tensors)


def _find_holders(function: Any) -> list[tuple[Any, str]]:
    """Modules that have a function, and under which names: who has imported it by name keeps it."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]
