"""Let torch answer and choose as on the target card. The program runs on FakeTensors, on a machine without a GPU.

Inside `target_kernels(target)` and on the thread that entered it:

- `scaled_dot_product_attention` runs the kernel the card would (`fxmem.simulation.kernels.attention`), and `nn.LSTM`,
  `nn.GRU` and `nn.RNN` run through cuDNN's operators (`fxmem.simulation.kernels.recurrent`), if their first argument is
  a FakeTensor on CUDA;
- `torch.cuda` speaks of one card, the target: `is_available`, `device_count`, `get_device_capability`, ...; so
  `torch.autocast("cuda")` is on, and libraries take their CUDA code paths. What would reach the driver is answered too
  (`synchronize`, the random-number state, `torch.cuda.device`) or left to raise (streams, events, graphs);
- operators whose FakeTensor kernel is missing or differs from the card's return what the card's does
  (`fxmem.simulation.kernels.fake_kernels`).

With a CPU target nothing changes. In compiled code `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` run their
ordinary code also at inference: the fused "fast path" has no kernel that a compiler could trace.

What needs nothing here, because torch decides it from the fakes alone and so the same with and without a card: batch
normalisation (cuDNN's, or the native one for bfloat16, one- and two-dimensional input, too large batches, or cuDNN off:
`_select_batch_norm_backend` in aten/src/ATen/native/Normalization.cpp; its cuDNN reserve buffer is empty).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem._torch import common as torch_common
from fxmem._torch import kernels as torch_kernels
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.compiler.inlined import outside_compiler
from fxmem._torch.modules import patch_when_imported
from fxmem.errors import NoKernelError, UsageError
from fxmem.hardware import catalogue
from fxmem.records.profile import Assumption, Target
from fxmem.records.units import MATH_ATTENTION
from fxmem.simulation.kernels import package_operators
from fxmem.simulation.kernels.attention.backend_rules import (
    CUDNN,
    DEFAULT_ORDER,
    EFFICIENT,
    FLASH,
    AttentionCall,
    AttentionSettings,
    Operand,
    attention_backend,
    can_run,
    order_of_this_process,
    read_settings,
)
from fxmem.simulation.kernels.attention.backends import attend
from fxmem.simulation.kernels.fake_kernels import FAKE_KERNELS
from fxmem.simulation.kernels.recurrent import run_rnn


class _Active(threading.local):
    """The targets entered on this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Card] = []
        self.refusals: dict[str, None] = {}
        """Why math attention runs, where it does, since the outermost target was entered."""


_active = _Active()


class _Card:
    """A CUDA target, and what `torch.cuda` says of it."""

    def __init__(self, target: Target) -> None:
        if target.capability is None:
            what = f"expected a CUDA target with a compute capability; {target.name!r} has none"
            raise UsageError(f"{what}. Give it one in the target file.")
        self.target = target
        self.capability = target.capability
        self.name = target.full_name or target.name
        self._unset_orders: set[tuple[SDPBackend, ...]] = (
            _active.stack[-1]._unset_orders if _active.stack else _orders_of_this_machine()
        )

    def attention_settings(self) -> AttentionSettings:
        settings = read_settings(self.target, unset=self._unset_orders)
        return dataclasses.replace(settings, on_math=_active.refusals.setdefault)

    @functools.cached_property
    def properties(self) -> SimpleNamespace:
        """Stands for `torch.cuda.get_device_properties()`: its fields that decide how programs run."""
        device = catalogue.device_properties(self.target)
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            total_memory=self.target.memory_bytes,
            multi_processor_count=device.multi_processor_count,
            warp_size=device.warp_size,
            max_threads_per_multi_processor=device.max_threads_per_sm,
            regs_per_multiprocessor=device.max_registers_per_sm,
            shared_memory_per_block=device.max_shared_memory_per_block,
            shared_memory_per_block_optin=device.max_shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=device.max_shared_memory_per_block_optin
            + device.reserved_shared_memory_per_block,
            max_threads_per_block=1024,
            L2_cache_size=device.l2_cache_size,
            is_integrated=False,
            is_multi_gpu_board=False,
            uuid=uuid.UUID(int=0),
            pci_bus_id=0,
            pci_device_id=0,
            pci_domain_id=0,
        )


def _orders_of_this_machine() -> set[tuple[SDPBackend, ...]]:
    """Priority orders a program finds here without having set one: torch's own, and that of the card in this machine
    once it has been asked, which it is not before CUDA is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {DEFAULT_ORDER}
    return {DEFAULT_ORDER, order_of_this_process(torch.cuda.get_device_capability())}


# --- what runs instead ------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` as the innermost target runs it; torch's own for anything but
    FakeTensors on CUDA, and wrappers of them: of a DTensor C++ chooses the kernel by its global shape."""
    is_on_card = query.is_cuda and torch_wrappers.is_fake(query)
    if not _active.stack or not is_on_card or query.is_nested or key.is_nested:
        return torch_kernels.SDPA(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
    return attend(_active.stack[-1].attention_settings(), query, key, value, *args, **kwargs)


def has_fused_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the card runs flash or memory-efficient attention for these, `[batch, heads, length, size]`."""
    q, k, v = map(Operand.describe, (query, key, value))
    call = AttentionCall(q, k, v, None, 0.0, False, False, torch.is_grad_enabled())
    try:
        return attention_backend(call, _active.stack[-1].attention_settings()).backend in (FLASH, EFFICIENT)
    except NoKernelError:
        return False


def _can_use(backend: SDPBackend, params: Any, debug: bool = False) -> bool:
    """`torch.backends.cuda.can_use_*_attention`; of jagged tensors, every sequence is taken for as long as the
    longest."""
    q, k, v = (Operand.describe(torch_wrappers.pad(each)) for each in (params.query, params.key, params.value))
    mask = None if params.attn_mask is None else Operand.describe(params.attn_mask)
    call = AttentionCall(
        q, k, v, mask, params.dropout, params.is_causal, params.enable_gqa, grad_enabled=torch.is_grad_enabled()
    )
    return can_run(backend, call, _active.stack[-1].attention_settings())


def attend_on_card(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same while a compiler traces, whose tensors are no FakeTensors."""
    if not query.is_cuda:
        return torch_kernels.SDPA(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
    return attend(_active.stack[-1].attention_settings(), query, key, value, *args, **kwargs)


def _run_rnn(name: str, *args: Any, **kwargs: Any) -> Any:
    if not _active.stack or not _is_fake_cuda(args[0]):
        return torch_kernels.RNN_FUNCTIONS[name](*args, **kwargs)
    return run_rnn(name, _active.stack[-1].capability, *args, **kwargs)


def _is_fake_cuda(tensor: Any) -> bool:
    return isinstance(tensor, torch_common.FakeTensor) and tensor.is_cuda


_REPLACEMENTS: Final[dict[Any, Callable[..., Any]]] = {
    torch_kernels.SDPA: scaled_dot_product_attention,
    **{builtin: functools.partial(_run_rnn, name) for name, builtin in torch_kernels.RNN_FUNCTIONS.items()},
}


def replacement(function: Any) -> Callable[..., Any] | None:
    """What to run instead of a torch function, with the same arguments; None to run it as it is.

    For an observer of a program's calls (a TorchFunctionMode): inside `target_kernels` they see torch's own function
    objects, and the choice of a kernel is left to them.
    """
    try:
        return _REPLACEMENTS.get(function) if _active.stack else None
    except TypeError:  # not hashable
        return None


def _route(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Stands where programs look `builtin` up: hands it to an observer of calls, else to its replacement."""

    def call(*args: Any, **kwargs: Any) -> Any:
        run = None if torch_kernels.is_watched() else replacement(builtin)
        return (run or builtin)(*args, **kwargs)

    return functools.update_wrapper(call, builtin)


# --- what is compiled for a card --------------------------------------------------------------------------------------


def _refuse_to_build(library: Any) -> Iterator[contextlib.AbstractContextManager[None]]:
    """No compiler of CUDA is started; a library that has another way takes it."""

    def load(original: Callable[..., Any], name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else list(sources)
        if kwargs.get("with_cuda") or any(str(each).endswith((".cu", ".cuh")) for each in files):
            _refuse(name)
        return original(name, sources, *args, **kwargs)

    def load_inline(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cuda_sources") or kwargs.get("with_cuda") or (len(args) > 1 and args[1]):
            _refuse(name)
        return original(name, *args, **kwargs)

    def _refuse(name: str) -> None:
        raise RuntimeError(
            f"expected a program without CUDA kernels of its own; the extension {name!r} is built of some. No compiler "
            "of CUDA runs here, where no card could run them. Let the program take its way without the extension."
        )

    yield torch_common.wrap(library, "load", load, here=True)
    yield torch_common.wrap(library, "load_inline", load_inline, here=True)


# --- what torch.cuda answers ------------------------------------------------------------------------------------------


def _answers(card: _Card) -> dict[str, Callable[..., Any]]:
    """By name in `torch.cuda`."""
    total = card.target.memory_bytes

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or card.capability >= (8, 0)

    def get_rng_state(device: Any = "cuda") -> Tensor:
        with torch_common.no_modes():
            return torch.zeros(16, dtype=torch.uint8)

    nothing = "set_rng_state set_rng_state_all set_device synchronize reset_peak_memory_stats".split()
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: card.name,
        "get_device_properties": lambda device=None: card.properties,
        "is_bf16_supported": is_bf16_supported,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (total, total),
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [get_rng_state()],
        **dict.fromkeys(nothing, lambda *args, **kwargs: None),
    }


_STATE: Final = "_fxmem_generator_state"


def _get_fake_state(get: Callable[[], Tensor]) -> Tensor:
    """A state of the CPU's generator takes memory there: a program that asks for one gets a tensor that is counted, and
    the state on it."""
    state = get()
    with torch_common.pause_observers():
        counted = torch.empty(state.shape, dtype=state.dtype, device="cpu")
    if not isinstance(counted, torch_common.FakeTensor):  # a program's integers are real, and counted all the same
        with torch_common.no_modes():
            return counted.copy_(state)
    setattr(counted, _STATE, state)
    return counted


def _set_fake_state(put: Callable[[Tensor], None], new_state: Tensor) -> None:
    if not isinstance(new_state, torch_common.FakeTensor):
        put(new_state)
    elif hasattr(new_state, _STATE):
        put(getattr(new_state, _STATE))


@contextlib.contextmanager
def target_kernels(target: Target) -> Iterator[None]:
    """Within this context and on this thread, torch chooses kernels as on `target`.

    On the CPU that is its generator's state, which takes memory there, and what libraries compute on the host.

    Nests, the innermost target holding; restores everything on the way out, also on error. Other threads see torch
    unchanged, but two threads must not be inside at overlapping times unless one lies within the other.

    Raises:
        UsageError: a CUDA target without a compute capability.
    """
    if target.device != "cuda":
        with (
            torch_common.wrap(torch, "get_rng_state", _get_fake_state, here=True),
            torch_common.wrap(torch, "set_rng_state", _set_fake_state, here=True),
            patch_when_imported(_HOST_LIBRARIES),
        ):
            yield
        return
    card = _Card(target)
    stand_ins = [
        *((owner, name, _route(builtin)) for owner, name, builtin in torch_kernels.CALL_SITES),
        *(
            (owner, name, answer)
            for name, answer in _answers(card).items()
            for owner in (torch.cuda, torch.cuda.random)  # Trainer saves `torch.cuda.random.get_rng_state()`
            if hasattr(owner, name)
        ),
        *(
            (owner, f"can_use_{name}_attention", functools.partial(_can_use, backend))
            for name, backend in (("flash", FLASH), ("efficient", EFFICIENT), ("cudnn", CUDNN))
            for owner in (torch.backends.cuda, torch_wrappers.ATTENTION)
        ),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),  # a name of its own in torch.amp
        *torch_kernels.DEVICE_TOUCHING,
    ]
    with contextlib.ExitStack() as stack:
        _forget_results_for_others(card)
        for owner, name, stand_in in stand_ins:
            stack.enter_context(torch_common.patch(owner, name, _only_here(stand_in)))
        for owner, name in torch_kernels.CONVOLUTION_CHOICES:
            stack.enter_context(torch_common.wrap(owner, name, functools.partial(_choose_as_half, card), here=True))
        stack.enter_context(torch_common.patch(torch.backends.mha, "get_fastpath_enabled", outside_compiler))
        stack.enter_context(torch_kernels.override_fake_kernels(FAKE_KERNELS))
        stack.enter_context(_forget_library_answers())
        stack.enter_context(patch_when_imported(_LIBRARIES))
        if not _active.stack:
            _active.refusals.clear()
        _active.stack.append(card)
        stack.callback(_active.stack.pop)
        yield


_HOST_LIBRARIES: Final = {
    "bitsandbytes.functional": package_operators.patch_functions,
    "deepspeed.ops.op_builder.builder": package_operators.patch_builders,
    "deepspeed.runtime.pipe.engine": package_operators.patch_pipes,
}
"""By the module, what is patched where a library is imported, on every target."""
_LIBRARIES: Final = {
    **_HOST_LIBRARIES,
    "torch.utils.cpp_extension": _refuse_to_build,
    "xformers._cpp_lib": package_operators.say_built,
    "xformers.ops.fmha.common": package_operators.say_built,
    "xformers.ops.fmha.dispatch": package_operators.dispatch_on_card,
}
"""The same on a card."""

_last: list[bool] = []
"""Whether the last card entered was of capability 8.0 or later; empty before the first."""


def _forget_results_for_others(card: _Card) -> None:
    """FakeTensor remembers results by the call alone, for the whole process; where they depend on the card, they must
    not be another's."""
    takes_bfloat16 = card.capability >= (8, 0)
    if _last != [takes_bfloat16]:
        torch_common.FakeTensorMode.cache_clear()
        _last[:] = [takes_bfloat16]


def _choose_as_half(card: _Card, choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask about a bfloat16 convolution as if it were float16.

    From compute capability 8.0 on cuDNN takes both alike; with no card torch finds no support for bfloat16, and the
    result loses its channels_last strides (`use_cudnn` in aten/src/ATen/native/Convolution.cpp).
    """

    def twin(value: Any) -> Any:
        if not _is_fake_cuda(value) or value.dtype is not torch.bfloat16:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=torch.float16, device=value.device)

    if card.capability < (8, 0):
        return choose(*args, **kwargs)
    return choose(*map(twin, args), **{name: twin(value) for name, value in kwargs.items()})


def _only_here(stand_in: Any) -> Callable[[Any], Any]:
    """For `fxmem._torch.common.patch`: `stand_in` on this thread, the original on all others.

    A property stands in for a property.
    """
    me = threading.get_ident()

    def make(original: Any) -> Any:
        if isinstance(stand_in, property):
            return property(lambda self: (stand_in if threading.get_ident() == me else original).__get__(self))

        def call(*args: Any, **kwargs: Any) -> Any:
            return (stand_in if threading.get_ident() == me else original)(*args, **kwargs)

        return functools.update_wrapper(call, original)

    return make


_ANSWERING: Final = ("is_", "get_device", "_detect_device")
"""How names of functions begin that answer whether, and which, card there is."""


@contextlib.contextmanager
def _forget_library_answers() -> Iterator[None]:
    """Libraries remember what `torch.cuda` answered; they must not carry that over either border."""
    _forget_answers()
    try:
        yield
    finally:
        _forget_answers()


def _forget_answers() -> None:
    modules = map(sys.modules.get, ("transformers.utils.import_utils", "diffusers.utils.torch_utils"))
    found = [each for module in modules if module is not None for each in vars(module).values()]
    found += [
        getattr(each, "__func__", None) for kind in found if isinstance(kind, type) for each in vars(kind).values()
    ]
    for function in found:
        if getattr(function, "__name__", "").startswith(_ANSWERING) and hasattr(function, "cache_clear"):
            function.cache_clear()


# --- the optimizer ----------------------------------------------------------------------------------------------------


def default_foreach(target: Target) -> bool:
    """Whether `torch.optim` picks its foreach form when the program names none: on CUDA, where every parameter is a
    plain CUDA tensor.

    `_default_to_fused_or_foreach` in torch/optim/optimizer.py. It looks at the parameters' type, so under FakeTensors
    the choice has to be made for it. The fused form is never the default.
    """
    return target.device == "cuda"


def assumptions(target: Target) -> Iterator[Assumption]:
    """What the choices here take for granted on `target`."""
    if target.device != "cuda" or target.capability is None:
        return
    settings = _Card(target).attention_settings()
    allowed = [str(backend.name).lower() for backend in settings.order if backend in settings.enabled]
    off = [str(backend.name).lower() for backend in settings.order if backend not in settings.enabled]
    major, minor = target.capability
    release = target.release(torch.__version__)
    where = f"torch {release} with cuDNN {settings.cudnn_version} on compute capability {major}.{minor}"
    what, switched = f"{''.join(allowed) or 'nothing'} and nothing else", ""
    if len(allowed) > 1:
        what = f"the first of {', '.join(allowed)} that can run the call"
        switched = f"; switched off: {', '.join(off)}" if off else ""
    yield Assumption(topic="attention", text=f"scaled_dot_product_attention runs {what}, as in {where}{switched}")
    for why in _active.refusals:
        yield Assumption(topic="attention", text=f"{MATH_ATTENTION}{why.removesuffix('; math runs')}")
