"""What DeepSpeed builds with a compiler where it is first used, its optimizers' kernels; what its stages send.

Kernels are told by what they do with memory, as of DeepSpeed 0.19 (csrc/adam, csrc/lion, csrc/adagrad): `FusedAdam`,
`FusedLion` on the card and `DeepSpeedCPUAdam`, `DeepSpeedCPULion`, `DeepSpeedCPUAdagrad` on the host write to the
tensors that they are given, and allocate nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError
from fxmem.simulation.asked import known_values

_IN_PLACE: Final = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    **{f"cpu_{each}": (f"create_{each}", f"{each}_update", f"destroy_{each}") for each in ("adagrad", "lion")},
    "cpu_adam": ("create_adam", "adam_update", "adam_rollback", "destroy_adam"),
}
"""By the name of an extension, its functions, which return nothing."""
_NVME: Final = ("async_io", "gds", "pin_memory")
"""What offload to NVMe loads; its own way to pin memory first."""


def patch_builders(builder: Any) -> torch_common.Patches:
    """Let extensions be loaded without a compiler (`OpBuilder.load`)."""
    yield torch_common.wrap(builder.OpBuilder, "load", _load, here=True)


def patch_pipes(engine: Any) -> torch_common.Patches:
    """Let a stage know all that it sends of shapes (`PipelineEngine._send_tensor_meta`): of 256 numbers it writes the
    first few, and nobody reads the others, which are taken to be 0."""

    def empty(original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made, torch_common.FakeTensor):
            known_values.fill(made, 0)
        return made

    def send(original: Any, *args: Any, **kwargs: Any) -> Any:
        with torch_common.wrap(engine.torch, "empty", empty):
            return original(*args, **kwargs)

    yield torch_common.wrap(engine.PipelineEngine, "_send_tensor_meta", send, here=True)


def _load(original: Any, extension: Any, *args: Any, **kwargs: Any) -> Any:
    """The functions of an extension.

    Raises:
        AnalysisError: it reads and writes NVMe.
    """
    if extension.name in _NVME:
        raise AnalysisError(
            "expected DeepSpeed's offload to the CPU, got to NVMe, whose reads and writes are not followed; set "
            '"device": "cpu" in offload_optimizer and offload_param'
        )
    names = _IN_PLACE.get(extension.name)
    return original(extension, *args, **kwargs) if names is None else SimpleNamespace(**dict.fromkeys(names, _do))


def _do(*_: Any, **__: Any) -> None:
    """Write to tensors that have no values."""
