"""Torch's process-wide switches for kernels, set during an analysis or a real run.

An analysis reads torch's own flags, so that a program which sets them is predicted as it would run. Other settings than
this process's are set through `apply_settings`: the same flags, restored at the end. There is no second road.

What each moves in memory
- the attention backend: everything, for `math` keeps the matrix of scores and the others do not;
- TF32: which plan cuDNN takes for a float32 convolution, and so its workspace. Matrix products take the same memory
  either way, so `torch.backends.cuda.matmul` is left alone;
- cuDNN's benchmarking: the plan is found by timing, which cannot be predicted;
- determinism: cuDNN's and the attention kernels' choice, further buffers in flash attention's backward, and cuBLAS's
  workspace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxmem.hardware.releases import find_release
from fxmem.hardware.workspaces import (
    ConvSettings,
    CudnnLibrary,
    Signature,
    apply_rule,
    conv_workspaces,
    find_built,
    find_seen,
    list_cudnns,
    read_cudnn_folder,
    version_number,
)
from fxmem.records.profile import Record, Target
from fxmem.records.units import Sdpa

SDPA_BACKENDS: Final[dict[Sdpa, tuple[SDPBackend, ...]]] = {
    "auto": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}
"""By name: the backends that may run."""


class KernelSettings(Record):
    """Which kernels may run. None: as torch's own flag is in this process."""

    sdpa: Sdpa | None = None
    """What `scaled_dot_product_attention` may run: one backend and nothing else, as `torch.nn.attention.sdpa_kernel`
    does, so that a call it cannot run is an error; or `auto`: the first that can, in torch's order."""
    allow_tf32: bool | None = None
    """Whether float32 convolutions and recurrent networks may compute in TF32 (`torch.backends.cudnn.allow_tf32`)."""
    cudnn_benchmark: bool | None = None
    """`torch.backends.cudnn.benchmark`."""
    deterministic: bool | None = None
    """`torch.use_deterministic_algorithms` and `torch.backends.cudnn.deterministic`, both."""
    cudnn: str | None = None
    """Folder of the cuDNN that is asked for convolution workspaces, of another torch or for an older card: one that
    `pip install --target` filled, a `site-packages`, or the library's own. None: the installed one."""


_CUDNN: Final[ContextVar[CudnnLibrary | None]] = ContextVar("_CUDNN", default=None)


@contextlib.contextmanager
def apply_settings(settings: KernelSettings | None) -> Iterator[None]:
    """Torch's flags as `settings` says for the duration, then as they were; None changes nothing. May be nested."""
    given = settings or KernelSettings()
    with contextlib.ExitStack() as stack:
        if given.sdpa is not None:
            stack.enter_context(sdpa_kernel(list(SDPA_BACKENDS[given.sdpa])))
        if given.allow_tf32 is not None:
            stack.enter_context(_tf32(given.allow_tf32))
        if given.cudnn_benchmark is not None:
            stack.enter_context(_flag("benchmark", given.cudnn_benchmark))
        if given.deterministic is not None:
            stack.enter_context(_deterministic(given.deterministic))
        if given.cudnn is not None:
            stack.callback(_CUDNN.reset, _CUDNN.set(read_cudnn_folder(Path(given.cudnn))))
        yield


def asked_cudnns(target: Target) -> tuple[CudnnLibrary, ...]:
    """The cuDNNs that are asked for a target; the plans of the first are counted.

    The one that `KernelSettings.cudnn` names; else, for another release of torch, its own or those nearest to it; for a
    card that the installed one has no kernels for, one that was fetched. Empty for the installed one.
    """
    given = _CUDNN.get()
    if given is not None:
        return (given,)
    return list_cudnns(find_release(target.torch)[0].cudnn, target) if target.torch else find_built(target)


def cudnn_version(target: Target) -> int:
    """The version of the cuDNN on a target, as `torch.backends.cudnn.version()` gives it; 0 for none."""
    if (given := _CUDNN.get()) is not None:
        return given.number
    if target.torch:
        return version_number(find_release(target.torch)[0].cudnn)
    installed: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return installed or 0


def ask_workspaces(signatures: Iterable[Signature], target: Target) -> dict[Signature, int | None]:
    """How much workspace the cuDNN whose plans are counted has for these."""
    library, release = _counted_plans(target)
    answers = conv_workspaces(signatures, target, torch_version=release, library=library)
    sizes = {signature: answer.nbytes for signature, answer in answers.items()}
    seen = find_seen(target, release)
    return sizes if seen is None else apply_rule(sizes, seen.rule)


def ask_smaller(signature: Signature, target: Target) -> tuple[int, ...]:
    """The workspaces of the plans that torch goes on to where there is no room for a convolution's own."""
    library, release = _counted_plans(target)
    answers = conv_workspaces([signature], target, torch_version=release, library=library, smaller=True)
    return answers[signature].smaller_bytes


def convolution_settings(target: Target | None = None) -> ConvSettings:
    """What a convolution looks at on a target, by default with what is installed here, by this process's flags."""
    cudnn: Any = torch.backends.cudnn
    return ConvSettings(
        # `cudnn.allow_tf32` cannot be read once a program has set the precision of one kind of operator (since 2.9).
        allow_tf32=cudnn.conv.fp32_precision == "tf32",
        allow_tf32_in_rnn=cudnn.rnn.fp32_precision == "tf32",
        deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        enabled=cudnn.enabled,
        benchmark=cudnn.benchmark,
        cudnn_version=cudnn_version(target or Target(name="cuda", device="cuda")),
    )


def is_deterministic() -> bool:
    """Whether torch refuses kernels that are not deterministic, rather than to warn of them."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _counted_plans(target: Target) -> tuple[CudnnLibrary | None, str]:
    """The cuDNN whose plans are counted, None for the installed one, and the torch whose avoided engines hold."""
    return next(iter(asked_cudnns(target)), None), target.release(torch.__version__)


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Through the older of torch's two interfaces: it sets what both read. The newer one makes the older raise."""
    cudnn: Any = torch.backends.cudnn
    convolutions, recurrent = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        before = cudnn.allow_tf32
    except RuntimeError:
        before = True  # its default: this program uses the newer interface
    cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = convolutions, recurrent


@contextlib.contextmanager
def _flag(name: str, value: bool) -> Iterator[None]:
    """A flag of `torch.backends.cudnn`."""
    before = getattr(torch.backends.cudnn, name)
    setattr(torch.backends.cudnn, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cudnn, name, before)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        with _flag("deterministic", wanted):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
