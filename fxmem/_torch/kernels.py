"""Private names of torch that choose the target's kernels, with why and since which version.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.nn.modules.rnn
import torch.overrides
from torch._subclasses import fake_impls, fake_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._device import DeviceContext

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch.common import add, nested, wrap

# The context `with torch.device(...)` and `torch.set_default_device` put on the function-mode stack (since 2.0).


SDPA: Final[Callable[..., Any]] = torch._C._nn.scaled_dot_product_attention
"""The builtin behind `torch.nn.functional.scaled_dot_product_attention` (since 2.0); the same object."""

RNN_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(torch._C._VariableFunctions, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
"""The builtins behind `nn.LSTM`, `nn.GRU` and `nn.RNN` (since 1.0)."""

ATTENTION: Final[Callable[..., Any]] = torch._native_multi_head_attention
"""What `nn.MultiheadAttention` runs at inference (since 1.12)."""

ENCODER_LAYER: Final[Callable[..., Any]] = torch._transformer_encoder_layer_fwd
"""What `nn.TransformerEncoderLayer` runs at inference (since 1.12)."""

ACTIVATED_PRODUCT: Final[Callable[..., Any]] = torch.ops.aten._addmm_activation.default
"""A product with its activation, within that kernel (since 1.12)."""

ISTFT: Final[Callable[..., Any]] = torch._C._VariableFunctions.istft
"""The builtin behind `torch.istft` (since 1.5)."""

CALL_SITES: Final[tuple[tuple[Any, str, Callable[..., Any]], ...]] = (
    (torch.nn.functional, "scaled_dot_product_attention", SDPA),
    # `torch._VF` is the module-like object through which nn.modules.rnn calls them (since 1.0).
    *((torch._VF, name, function) for name, function in RNN_FUNCTIONS.items()),
    *((torch, name, function) for name, function in RNN_FUNCTIONS.items()),
)
"""(owner, attribute, builtin): where programs and torch's own modules look these builtins up at the time of the call.

`torch._C._nn` and `torch._C._VariableFunctions` are not among them: there C++ looks up what it hands to function modes.
"""


_MOVES: Final = frozenset({torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout})
_dispatch: Final[Callable[..., Any]] = fake_tensor.FakeTensorMode.dispatch


def _dispatch_taken_apart(
    self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if func in _MOVES:
        with self:
            return torch_common.decompose(func, *args, **(kwargs or {}))
    return _dispatch(self, func, types, args, kwargs)


DEVICE_TOUCHING: Final[tuple[tuple[Any, str, Any], ...]] = (
    # FakeTensor allocates one real byte on the device as soon as `torch.cuda.is_available()` (since 2.0).
    (fake_tensor, "init_gpu_context", lambda *_: None),
    # What FakeTensorMode does about devices that are not there: nothing is moved to them, and the CUDA device guard is
    # a no-op (since 2.1).
    (fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda _: True)),
    # It does not know them as moves where they come whole, as within a custom operator's kernel (`dispatch`, since
    # 1.13).
    (fake_tensor.FakeTensorMode, "dispatch", _dispatch_taken_apart),
    # `with torch.cuda.device(...)` and `device_of` (public) end in these two (since 1.13).
    (torch.cuda, "_exchange_device", lambda device: 0),
    (torch.cuda, "_maybe_exchange_device", lambda device: 0),
)
"""(owner, attribute, stand-in): private names that reach for the driver once a CUDA device is said to be there."""


def is_watched() -> bool:
    """Whether a TorchFunctionMode that looks at calls is active: any but torch's own `DeviceContext`.

    `torch.overrides._get_current_function_mode_stack` (since 2.0) lists them, outermost first.
    """
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def sdpa_order() -> tuple[int, ...]:
    """The process's priority order of attention backends, as numbers of `SDPBackend`
    (`torch._C._get_sdp_priority_order`, since 2.6)."""
    return tuple(torch._C._get_sdp_priority_order())


def sdpa_flags() -> tuple[Any, ...]:
    """Which backends of attention the process allows, and in what order (`torch._C._get_flash_sdp_enabled` and its kind
    since 2.0, of cuDNN since 2.5)."""
    core = torch._C
    allowed = core._get_flash_sdp_enabled(), core._get_mem_efficient_sdp_enabled(), core._get_math_sdp_enabled()
    return *allowed, core._get_cudnn_sdp_enabled(), *sdpa_order()


def kernel_flags() -> tuple[Any, ...]:
    """What `torch.backends.cudnn` and `torch.use_deterministic_algorithms` set, by which kernels are chosen.

    Read past their properties, since it is asked before each operator, in less than a microsecond
    (`torch._C._get_cudnn_enabled` and its kind since 1.0, `_get_fp32_precision_getter` since 2.9).
    """
    core = torch._C
    return (
        *(core._get_cudnn_enabled(), core._get_cudnn_benchmark(), core._get_cudnn_deterministic()),
        *(core._get_deterministic_algorithms(), core._get_deterministic_algorithms_warn_only()),
        *(core._get_fp32_precision_getter("cuda", "conv"), core._get_fp32_precision_getter("cuda", "rnn")),
    )


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Run what an autocast wrapper calls: no op inside is cast again (`torch._C._DisableAutocast`, since 1.13)."""
    return torch._C._DisableAutocast()


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Hand ops to dispatch modes as they are, before autograd takes composite ones apart
    (`torch._C._AutoDispatchBelowAutograd`, since 1.10)."""
    return torch._C._AutoDispatchBelowAutograd()


def rnn_weights(module: torch.nn.Module) -> list[torch.Tensor] | None:
    """The weights of an `nn.RNNBase` in the order cuDNN takes them (`_flat_weights`, since 1.4); None for other modules
    and half-built ones.

    The module remembers which objects they were (`_flat_weight_refs`, since 2.0) and would flatten them anew in forward
    if they had changed; so it is given what they are now.
    """
    if not isinstance(module, torch.nn.RNNBase):
        return None
    found = [getattr(module, name, None) for name in module._flat_weights_names]
    weights = [each for each in found if isinstance(each, torch.nn.Parameter)]
    if len(weights) != len(found):
        return None
    module._flat_weights = [*weights]
    module._flat_weight_refs = [weakref.ref(weight) for weight in weights]
    return [*weights]


@contextlib.contextmanager
def override_fake_kernels(implementations: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """For the duration, let `implementations[op](mode, op, *args, **kwargs)` say what an op on FakeTensors returns.

    `fake_impls.op_implementations_dict` (since 2.3) is what FakeTensorMode looks at before meta kernels; results
    it has cached for these ops are forgotten on both sides (`FakeTensorMode.cache`, since 2.2).
    """
    table = fake_impls.op_implementations_dict
    before = {op: table[op] for op in implementations if op in table}
    _forget(implementations)
    table.update(implementations)
    try:
        yield
    finally:
        for op in implementations:
            table.pop(op, None)
        table.update(before)
        _forget(implementations)


def _forget(ops: dict[Any, Callable[..., Any]]) -> None:
    torch_fakes.forget(ops)
    cache = fake_tensor.FakeTensorMode.cache
    for key in [key for key in cache if key.key[0] in ops]:
        del cache[key]


@contextlib.contextmanager
def views_of_zeros() -> Iterator[None]:
    """Views of a fake zero without memory are fakes, too.

    Three views have a kernel for zeros (`ZeroTensor` in native_functions.yaml) that makes a plain tensor; without it
    they go where all others go. `torch.library._scoped_library` since 2.2, its `allow_override` as of 2.11.
    """
    scope, quiet = torch.library._scoped_library("aten", "IMPL", "ZeroTensor"), warnings.catch_warnings(action="ignore")
    with scope as library, quiet:  # it warns of each kernel that is replaced
        for name in ("view", "as_strided", "_reshape_alias"):
            library.impl(name, torch.library.fallthrough_kernel, "ZeroTensor", allow_override=True)
        yield


CONVOLUTION_CHOICES: Final = ((torch._C, "_select_conv_backend"), (torch._C, "_conv_determine_backend_memory_format"))
"""How the fake convolution learns which library would run and in which layout (torch/_subclasses/fake_impls.py, `conv`,
since 1.13)."""


# --- names of Triton that launch a kernel, each with why and since when -----------------------------------------------
# Triton comes with torch's CUDA wheel; nothing here imports it.
#
# A kernel launched from Python (`kernel[grid](...)`) writes to tensors it is given. It allocates nothing that torch's
# allocator knows of, so for memory it need not run; without a GPU it could not.


def observe_launches(
    on_launch: Callable[[str, tuple[Any, ...]], None], on_choice: Callable[[str], None]
) -> AbstractContextManager[None]:
    """On this thread, kernels are not launched; `on_launch(name, arguments)` is called in their place.

    A program may ask which configuration of a kernel is the fastest, which is timed when it is launched: it gets the
    first, after `on_choice(name)`.

    `JITFunction.run` and `Autotuner.run` (since 2.0), which runs the former to time it, `Autotuner.best_config`, which
    that sets. Where Triton has not been imported there are no kernels yet.
    """

    def run(original: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        on_launch(_name(kernel), (*args, *kwargs.values()))

    def find(kernel: Any, name: str) -> Any:
        if name != "best_config":
            raise AttributeError(name)
        on_choice(_name(kernel))
        return kernel.configs[0]

    classes = ("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")
    owners = [getattr(sys.modules.get(where), name, None) for where, name in classes]
    launches = [wrap(owner, "run", run, here=True) for owner in owners if owner is not None]
    return nested(*launches, *(add(owner, "__getattr__", find) for owner in owners[1:] if owner is not None))


def _name(kernel: Any) -> str:
    function = getattr(kernel, "base_fn", None) or getattr(kernel, "fn", kernel)
    return str(getattr(function, "__name__", "kernel"))


# --- private names of torch's profiler and dispatcher, each with why and since when -----------------------------------
# The public profiler gives each operator's net memory but neither the single allocations nor their addresses.


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
