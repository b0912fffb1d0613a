"""The ways of plain tensors in functions whose C++ goes another one for subclasses.

FakeTensors are of a subclass. `max_pool1d` (aten/src/ATen/native/MaxPooling.cpp) has a kernel of its own on the CPU;
`istft` (SpectralOps.cpp) asks whether its windows leave a gap; `linear` (Linear.cpp) adds the bias to its product in
place, where one kernel does not do both; `ctc_loss` (LossCTC.cpp) reads lengths that are known.
`nn.Parameter` (torch/nn/parameter.py) makes a view of a tensor of a subclass, which `detach_` would refuse.
`nn.MultiheadAttention` and layers of encoders have kernels of their own for inference, which they leave where calls of
functions are observed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import kernels as torch_kernels
from fxmem._torch.modules import patch_when_imported
from fxmem.errors import AnalysisError
from fxmem.simulation.asked import known_values
from fxmem.simulation.kernels.card_emulation import has_fused_attention
from fxmem.simulation.kernels.fake_kernels import answer_checks
from fxmem.simulation.kernels.inner_ops import IN_PYTHON
from fxmem.simulation.kernels.packages import PACKAGES, Kernel, Package

_aten = torch.ops.aten
_OTHERWISE: Final[Callable[..., Any]] = F.max_pool1d
_CTC_LOSS: Final[Callable[..., Tensor]] = F.ctc_loss
_LINEAR: Final[Callable[..., Tensor]] = F.linear


def _max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    wants_gradient = input.requires_grad and torch.is_grad_enabled()
    is_on_cpu = type(input) is torch_common.FakeTensor and input.device.type == "cpu"
    if return_indices or wants_gradient or not is_on_cpu:
        return _OTHERWISE(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    sizes = ([each] if isinstance(each, int) else [*(each or ())] for each in (kernel_size, stride, padding, dilation))
    with torch_kernels.below_autograd():
        return _aten.max_pool1d.default(input, *sizes, ceil_mode)


def _istft(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with answer_checks(False):
        return function(*args, **kwargs)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`ctc_loss.Tensor` (LossCTC.cpp) reads lengths into lists, unless cuDNN takes the call or a tensor is of a
    subclass. To the mean the lists come back as a tensor beside the losses."""
    lengths = [input_lengths, target_lengths]
    rest = blank, reduction, zero_infinity
    if not isinstance(log_probs, torch_common.FakeTensor) or not all(isinstance(each, Tensor) for each in lengths):
        return _CTC_LOSS(log_probs, targets, *lengths, *rest)
    known = [known_values.find_value(each) for each in lengths]
    if any(each is None for each in known):
        return _CTC_LOSS(log_probs, targets, *(each.to(log_probs.device) for each in lengths), *rest)
    with torch_common.no_modes():
        numbers = [each.tolist() for each in known if each is not None]
    losses = _CTC_LOSS(log_probs, targets, *numbers, blank, "none", zero_infinity)
    if reduction == "mean":
        return (losses / torch.tensor(numbers[1], dtype=losses.dtype, device=losses.device).clamp_min(1)).mean()
    return losses.sum() if reduction == "sum" else losses


def _detach_parameter(tensor: Tensor) -> Tensor:
    """`Tensor.detach_`, which of a leaf means that it needs no gradient any more."""
    if type(tensor) is torch_common.FakeTensor and tensor.is_leaf and isinstance(tensor, nn.Parameter):
        return tensor.requires_grad_(False)
    return torch.Tensor.detach_(tensor)


_linear_runs: Final[list[bool | None]] = [None]
"""Of each call of `linear` that runs, whether it does under a mode; None where it adds no plain tensors."""


def adds_in_place() -> bool:
    """Whether `linear` runs as without a dispatch mode: its sum of product and bias is in place.

    Under a mode it is not: `isTensorSubclassLike` (TensorSubclassLikeUtils.h) is true of any tensor then.
    """
    return _linear_runs[-1] is False


def is_under_mode() -> bool:
    """Whether `linear` runs under a dispatch mode. Without one it would add its bias in place."""
    return _linear_runs[-1] is True


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`."""
    is_plain = type(bias) is torch_common.FakeTensor and not torch_autograd.is_forward_mode()
    _linear_runs.append(torch_common.has_program_mode() if is_plain else None)
    try:
        return _LINEAR(input, weight, bias)
    finally:
        _linear_runs.pop()


def _native_attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    """`native_multi_head_attention_cpu` (transformers/attention.cpp) and `native_multi_head_attention_cuda`
    (transformers/cuda/attention.cu) for one tensor as query, key and value. A card with a fused kernel runs that.

    The events of both on an H200: `program/multihead_attention` of benchmarks/programs/card_runs.py.
    """
    del key, value
    weight, bias, out_weight, out_bias, *options = rest
    mask, need_weights, average = (*options, *(None, True, True)[len(options) :])[:3]
    batch, length, _ = query.shape
    if query.is_cuda and mask is None and not need_weights and width // heads % 8 == 0:
        whole = query.view(batch, length, heads, -1).transpose(1, 2)
        if has_fused_attention(whole, whole, whole):
            packed = linear(query, weight, bias).chunk(3, -1)
            q, k, v = (each.view(batch, length, heads, -1).transpose(1, 2) for each in packed)
            del packed
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
            return linear(mixed, out_weight, out_bias), None
    projected = torch.matmul(query, weight.t())
    parts = projected.new_empty((3, batch, heads, length, width // heads))
    del projected
    q, k, v = parts.flatten(1, 2).unbind()
    score = torch.bmm(q, k.transpose(1, 2))
    if mask is None:
        _aten._softmax.out(score, -1, False, out=score)
    else:
        mask = mask.to(torch.bool).contiguous()
        score = _aten._softmax.default(score, -1, False)
        del mask
    torch.bmm(score, v, out=q)
    weights = score.view(batch, heads, length, length) if need_weights else None
    del score
    mixed = q.view(batch, heads, length, -1).transpose(1, 2).contiguous().view(batch * length, width)
    out = F.linear(mixed, out_weight, out_bias).view(batch, length, width)
    del mixed
    if weights is not None and average:
        weights = weights.sum(1).div_(heads)
    return out, weights


def _encoder_layer(source: Tensor, width: int, heads: int, *rest: Any) -> Tensor:
    """`transformer_encoder_layer_forward` (transformers/transformer.cpp)."""
    projections, (use_gelu, norm_first, eps), norms = rest[:4], rest[4:7], (rest[7:9], rest[9:11])
    up, up_bias, down, down_bias, mask, _ = (*rest[11:], None, None)[:6]

    def norm(x: Tensor, number: int) -> Tensor:
        scale, shift = norms[number]
        return F.layer_norm(x, (width,), scale, shift, eps)

    x = norm(source, 0) if norm_first else source
    x = _native_attention(x, x, x, width, heads, *projections, mask, False)[0]
    x.add_(source)
    x = x if norm_first else norm(x, 0)
    before = x
    x = norm(x, 1) if norm_first else x
    inner = torch_kernels.ACTIVATED_PRODUCT(up_bias, x.flatten(0, 1), up.t(), use_gelu=use_gelu)
    x = torch.addmm(down_bias, inner, down.t()).view(source.shape)
    del inner
    x.add_(before)
    return x if norm_first else norm(x, 1)


def takes_own_kernels(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Make `has_torch_function` false for fakes. These modules then take their own kernels."""
    code = nn.MultiheadAttention.forward.__code__, nn.TransformerEncoderLayer.forward.__code__

    def has_torch_function(tensors: Any) -> bool:
        if sys._getframe(1).f_code in code and all(type(each) is torch_common.FakeTensor for each in tensors):
            return False
        return original(tensors)

    return has_torch_function


_REPLACEMENTS: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys((torch.max_pool1d, F.max_pool1d), _max_pool1d),
    _LINEAR: linear,
    _CTC_LOSS: _ctc_loss,
    torch.Tensor.detach_: _detach_parameter,
    torch_kernels.ATTENTION: _native_attention,
    torch_kernels.ENCODER_LAYER: _encoder_layer,
    **{each: functools.partial(_istft, each) for each in (torch.istft, torch.Tensor.istft, torch_kernels.ISTFT)},
}


def replacement(function: Any) -> Callable[..., Any] | None:
    """What to run instead of a torch function; None to run it as it is."""
    try:
        return _REPLACEMENTS.get(function)
    except TypeError:  # not hashable
        return None


# --- modules made of rows, in the place of other packages' extension modules ------------------------------------------
# The rows are in `fxmem.simulation.kernels.packages`.


Note = Callable[[str, int | None, Any], None]
"""Is told of each call of a kernel: its name, its FLOPs if they are counted, its arguments and results."""


class StandInModules:
    """The stand-ins of one program. Use `installed()` around it.

    Args:
        note: of calls.
    """

    _running: ClassVar[StandInModules | None] = None
    """Those of the program that runs: what has imported a kernel may outlive the program that it did so in."""

    def __init__(self, note: Note) -> None:
        self.timed: set[str] = set()
        """Triton's kernels of which the program asks for the fastest configuration."""
        self._note = note
        self.own: list[Package] = []
        """Packages whose rows are this program's own."""
        self._packages: dict[str, Package] = {}
        self._used: dict[str, tuple[Package, set[str]]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, extension modules that there are rows for are made of them, if the Python around them is there.

        A real one would take no tensors without data. What was imported of such a package inside is forgotten at the
        end, so that it is imported with its own extension then.
        """
        packages = self._packages = {each.module: each for each in (*map(PACKAGES.get, PACKAGES), *self.own)}
        imported = set(sys.modules)
        patches = {name: patch for each in packages.values() for name, patch in each.patches.items()}
        environ = {name: value for each in packages.values() for name, value in each.environ.items()}
        finder = _Finder(packages, self._make)
        sys.meta_path.insert(0, finder)
        try:
            with (
                torch_common.set_environment(environ),
                torch_common.restored(IN_PYTHON),
                torch_common.replace(StandInModules, "_running", self),
                patch_when_imported(patches),
            ):
                IN_PYTHON.update(each.operators for each in packages.values())
                yield
        finally:
            sys.meta_path.remove(finder)
            used = [package for package, _ in self._used.values()]
            names = {name for each in used for name in (each.module, "" if each.patches_all else each.python)}
            tops = {name.partition(".")[0] for name in names}
            for name in set(sys.modules) - imported:
                if name.partition(".")[0] in tops:
                    del sys.modules[name]

    def assumptions(self) -> Iterator[str]:
        """Which kernels were taken as which release has them."""
        for package, names in self._used.values():
            if names:
                yield (
                    f"kernels of {package.module} allocate as in {package.release}"
                    f"{_other_release(package)}: {', '.join(sorted(names))}"
                )
        if self.timed:
            timed = ", ".join(sorted(self.timed))
            yield f"a card times which configuration is the fastest; the first is taken of Triton's {timed}"

    def _make(self, module: types.ModuleType) -> None:
        package = _find(self._packages, module.__name__)
        assert package is not None
        self._used.setdefault(package.module, (package, set()))
        vars(module).update(package.values)
        for name, kernel in package.kernels.items():
            setattr(module, name, _make_call(package, name, kernel))

        def unknown(name: str) -> Any:
            # Of a package without Python of its own, libraries look for such kernels, and do without them.
            if name.startswith("__" if package.python else "_"):
                raise AttributeError(name)
            return type(name, (), {"__new__": functools.partial(_refuse, package, name)})

        vars(module)["__getattr__"] = unknown

    def _call(self, package: Package, name: str, kernel: Kernel, args: Any, kwargs: Any) -> Any:
        self._used.setdefault(package.module, (package, set()))[1].add(name)
        flops = None if kernel.flops is None else kernel.flops(*args, **kwargs)
        result = kernel.run(*args, **kwargs)
        if not kernel.is_composed:
            self._note(f"{package.module}.{name}", flops, (args, kwargs, result))
        return result


def _make_call(package: Package, name: str, kernel: Kernel) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        running = StandInModules._running
        if running is None:
            raise RuntimeError(
                f"{package.module}.{name} stands for a kernel while fxmem records a program, which is over. Import "
                f"{package.python or package.module} in another process"
            )
        return running._call(package, name, kernel, args, kwargs)

    return functools.update_wrapper(call, kernel.run, assigned=("__doc__",))


def _find(packages: Mapping[str, Package], module: str) -> Package | None:
    """The package of a module, or of the one that it lies in, where that has no Python of its own."""
    top = packages.get(module.partition(".")[0])
    return packages.get(module) or (None if top is None or top.python or "._" in module else top)


def _refuse(package: Package, name: str, *_: Any, **__: Any) -> Any:
    """Raise an AnalysisError: the program calls a kernel that there is no row for."""
    raise AnalysisError(
        f"expected kernels that fxmem has rows for; {package.module}.{name} has none as of {package.release}. Let the "
        f"program take another way, or add a row (an entry point of the group fxmem.packages, docs/extend.md)"
    )


def _other_release(package: Package) -> str:
    name, _, release = package.release.rpartition(" ")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version(package.python or package.module)
        if installed.partition("+")[0].partition(".post")[0] != release:
            return f" ({name} {installed} is installed)"
    return ""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of packages, if the Python around them is installed."""

    def __init__(self, packages: dict[str, Package], make: Callable[[types.ModuleType], None]) -> None:
        self._packages = packages
        self._make = make

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        package = _find(self._packages, fullname)
        if package is None or (package.python and importlib.util.find_spec(package.python) is None):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=not package.python)

    def exec_module(self, module: types.ModuleType) -> None:
        """As `importlib.abc.Loader.exec_module`."""
        self._make(module)
