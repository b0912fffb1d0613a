"""What is different when a program runs again. Its source stays as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from typing import Any, Final, Literal

import torch

from fxmem import checkpointing
from fxmem._torch import common as torch_common
from fxmem.planning import estimate
from fxmem.records.names import Application
from fxmem.records.plan import Region


@dataclasses.dataclass(frozen=True)
class ProgramEdits:
    """Changes to a program's models, its optimizers and what its forward runs under."""

    regions: tuple[Region, ...] = ()
    """Checkpointed, in one of its models; with the paths that the program's profile has."""
    in_place: tuple[str, ...] = ()
    """Activation modules that overwrite their input, by those paths."""
    autocast: bool = False
    """From a model's call in training to the next backward, bfloat16 where the program has no autocast of its own."""
    optimizer_form: Literal["", "fused", "forloop"] = ""
    """Of optimizers for which the program chooses none."""
    releases_gradients: bool = False
    """Whether its optimizers step within backward."""
    sources: tuple[tuple[str, str], ...] = ()
    """By real path, the text that Python reads in the place of a file of the program's."""

    def prepare(self, name: str, module: torch.nn.Module) -> None:
        """Change a model of the program before its first call, as `record` asks for it."""
        if name == estimate.find_root(self.regions):
            checkpointing.apply(module, estimate.strip_root(self.regions), Application.MODULES)
        for path in self.in_place:
            root, _, inner = path.partition(".")
            if root == name:
                vars(module.get_submodule(inner))["inplace"] = True
        if self.autocast:
            module.register_forward_pre_hook(_begin_autocast)

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """What the program runs inside; torch is as before afterwards."""
        before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
        with contextlib.ExitStack() as stack:
            if self.sources:
                stack.enter_context(torch_common.patch(io, "open_code", self._open_code))
                stack.enter_context(torch_common.patch(SourceFileLoader, "get_code", self._get_code))
            if self.optimizer_form or self.releases_gradients:
                stack.enter_context(torch_common.patch(torch.optim.Optimizer, "__init__", self._make_optimizer))
            if self.autocast:
                stack.enter_context(torch_common.patch(torch.autograd, "backward", _after_autocast))
            try:
                yield
            finally:
                for kind, enabled, dtype in before:
                    torch.set_autocast_enabled(kind, enabled)
                    torch.set_autocast_dtype(kind, dtype)

    def _make_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        chosen = {"fused": {"fused": True}, "forloop": {"foreach": False}, "": {}}[self.optimizer_form]

        def init(optimizer: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            is_open = all(defaults.get(form) is None for form in ("foreach", "fused"))
            fits = is_open and chosen.keys() <= defaults.keys()
            original(optimizer, params, {**defaults, **chosen} if fits else defaults)
            if self.releases_gradients:
                checkpointing.release_gradients(optimizer)

        return init

    def _open_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        sources = dict(self.sources)

        def open_code(path: str) -> Any:
            source = sources.get(os.path.realpath(path))
            return original(path) if source is None else io.BytesIO(source.encode())

        return open_code

    def _get_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        sources = dict(self.sources)

        def get_code(loader: SourceFileLoader, name: str) -> Any:
            path = loader.get_filename(name)
            source = sources.get(os.path.realpath(path))
            return original(loader, name) if source is None else compile(source, path, "exec")

        return get_code


AS_IT_IS: Final = ProgramEdits()
"""No edits."""
_KINDS = ("cuda", "cpu")


def _begin_autocast(module: torch.nn.Module, _: Any) -> None:
    device = next((parameter.device.type for parameter in module.parameters()), "")
    if device in _KINDS and module.training and torch.is_grad_enabled() and not torch.is_autocast_enabled(device):
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.set_autocast_enabled(device, True)


def _after_autocast(original: Callable[..., None]) -> Callable[..., None]:
    def backward(*args: Any, **kwargs: Any) -> None:
        for kind in _KINDS:
            torch.set_autocast_enabled(kind, False)
        torch.clear_autocast_cache()
        original(*args, **kwargs)

    return backward
