"""Private names of torch's profiler and dispatcher, each with why and since when.

The public profiler gives each operator's net memory but neither the single allocations nor their addresses.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

_PRIVATE: Final[Any] = torch._C._profiler
_ALLOCATION: Final = _PRIVATE._ExtraFields_Allocation
_OPERATOR: Final = _PRIVATE._ExtraFields_TorchOp
_FUNCTION: Final = int(_PRIVATE.RecordScope.FUNCTION)
"""To compare what pybind makes of C++'s enumerations takes several times as long as to compare types and numbers."""


def profiler(**settings: Any) -> profile:
    """A CPU memory profiler that tells `sum` from `sum.dim_IntList` (`_ExperimentalConfig.capture_overload_names`,
    there in 2.11)."""
    config: Any = torch._C._profiler._ExperimentalConfig
    # acc_events: else it warns of cycles.
    return _Profile(
        acc_events=True,
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        experimental_config=config(capture_overload_names=True),
        **settings,
    )


class _Profile(profile):
    """Keeps the log and makes no statistics of it. Those take as long as a small model's step."""

    def stop_trace(self) -> None:
        """As the profiler does (`torch.autograd.profiler.profile.acc_events`, since 2.5)."""
        inner: Any = self.profiler
        inner.acc_events = False
        super().stop_trace()


def event_tree(profiled: profile) -> list[Any]:
    """Operators and allocations, nested by time and thread (`_ProfilerResult.experimental_event_tree`, since 1.13)."""
    results: Any = profiled.profiler
    return list(results.kineto_results.experimental_event_tree())


def is_allocation(entry: Any) -> bool:
    """Whether an entry of the tree is an allocation or a free (`_ExtraFields_Allocation`, since 1.13)."""
    return type(entry.extra_fields) is _ALLOCATION


def thread(entry: Any) -> int:
    """The thread that an entry of the tree was recorded in (`_ProfilerEvent.start_tid`, since 1.13)."""
    return int(entry.start_tid)


def is_function(entry: Any) -> bool:
    """Whether the dispatcher or autograd recorded this entry as a call. It is then no backward node and no user's mark
    (`RecordScope`, since 1.13)."""
    fields = entry.extra_fields
    return type(fields) is _OPERATOR and int(fields.scope) == _FUNCTION


@functools.cache
def is_composite(name: str) -> bool:
    """Whether an operator is taken apart before autograd and dispatch modes see it, e.g. `aten::conv2d`.

    The rule is the dispatcher's own (`OperatorEntry::computeDispatchTableEntryWithDebug`, aten/src/ATen/core/dispatch):
    a CompositeImplicitAutograd kernel serves AutogradCPU where neither it nor CPU has a kernel.
    `torch._C._dispatch_has_kernel_for_dispatch_key` (since 1.8); a name that is no operator counts as composite.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return has(name, "CompositeImplicitAutograd") and not has(name, "CPU") and not has(name, "AutogradCPU")
    except RuntimeError:
        return True


@functools.cache
def has_autocast(name: str) -> bool:
    """Whether autocast on the CPU has a rule for an operator."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
