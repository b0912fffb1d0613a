"""Quantities and untrusted names, written for people."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from typing import Final, Literal, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is no less."""
    return -(-number // multiple) * multiple


def sum_known(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is unknown."""
    found = list(numbers)
    return None if None in found else sum(each or 0 for each in found)


def group(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """By key, its values in order."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def format_bytes(n: int | None) -> str:
    """Bytes in the unit in which they stay below 1000, at most nine characters: `768 B`, `9.77 MiB`, `97.7 GiB`.

    None is `unknown`.
    """
    if n is None:
        return "unknown"
    if abs(n) < 1024:
        return f"{n} B"
    value, unit = _scale(n, 1024, ("KiB", "MiB", "GiB", "TiB"))
    return f"{value:.{2 if abs(value) < 9.995 else 1}f} {unit}"


def short_bytes(n: int) -> str:
    """As `format_bytes`, for a table full of it: no bytes are `0`."""
    return format_bytes(n) if n else "0"


def format_flops(n: int | None) -> str:
    """Floating-point operations in powers of 1000: `512`, `1.2 K`, `3.0 G`. One multiply-add is 2. None is
    `unknown`."""
    if n is None:
        return "unknown"
    if abs(n) < 1000:
        return str(n)
    value, unit = _scale(n, 1000, ("K", "M", "G", "T", "P", "E"))
    return f"{value:.1f} {unit}"


def exact_bytes(n: int) -> str:
    """The rounded figure and the exact one: `9.77 MiB (10,240,000 bytes)`."""
    return f"{format_bytes(n)} ({n:,} bytes)"


def percent(part: int, whole: int) -> str:
    """A share with one decimal; what would round to zero or to all but is not is `<0.1 %` or `>100.0 %`."""
    share = 100 * part / whole if whole else 0.0
    if 100 < share < 100.05:
        return ">100.0 %"
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def format_seconds(middle: float, *interval: float) -> str:
    """A time, and the interval that it lies in: `41.2 ms (35.1 to 48)`."""
    factor, unit = next((each for each in ((1.0, "s"), (1e3, "ms")) if middle * each[0] >= 1), (1e6, "us"))
    shown, *ends = (f"{float(f'{seconds * factor:.3g}'):g}" for seconds in (middle, *interval))
    return f"{shown} {unit}" + (f" ({' to '.join(ends)})" if ends else "")


def format_shape(shape: Sequence[int]) -> str:
    """`32x3x224x224`, the form the command line reads; `scalar` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def to_words(name: str) -> str:
    """A name of a kind or a figure as words: `optimizer_state` is `optimizer state`."""
    return name.replace("_", " ")


def package_path(file: str) -> str:
    """The path of an installed package's file from the package on; any other path as it is."""
    return re.split(r"(?:site|dist)-packages[/\\]", file)[-1]


def printable(text: str) -> str:
    """The text with every control character spelled out as in a Python literal. A terminal shows it instead of obeying
    it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def spreadsheet_text(text: str) -> str:
    """Printable text that no spreadsheet runs as a formula: an apostrophe stands in front of one.

    As OWASP advises (https://owasp.org/www-community/attacks/CSV_Injection); some spreadsheets also read the full-width
    signs.
    """
    shown = printable(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _scale(n: int, base: int, units: Sequence[str]) -> tuple[float, str]:
    value = float(n)
    for unit in units:
        value /= base
        # One decimal of 999.95 is 1000.0, a character too many.
        if abs(value) < 999.95:
            return value, unit
    return value, units[-1]


# --- the names that users type and records carry ----------------------------------------------------------------------
# Standard library only: `fxmem --help` imports this.


Mode = Literal["train", "infer"]
"""What a step is: a training step, or forward under no_grad."""
AnyMode = Literal["train", "infer", "generate"]
"""The same, or a generation token by token."""
Precision = Literal["bf16", "fp16"]
"""What autocast computes in, or what the weights are cast to."""
PRECISIONS: Final[dict[str, Precision | None]] = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed", "fp16-mixed"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "32", "32-true", "no"), None),
}
"""What people call a precision, `torch.` left out; None is none."""
OWN_LOSS: Final = "the program's own"
"""What a recorded program's step has for its loss."""
NO_LOSS: Final = "no loss was given"
"""Begins the assumption of a step that sums its output."""
LOSSES: Final = {
    "ce": "cross_entropy",
    "mse": "mse_loss",
    "bce": "binary_cross_entropy_with_logits",
    "l1": "l1_loss",
    **{name: name for name in ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss")},
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
}
"""Losses by name, with the function of `torch.nn.functional` that each is."""
OPTIMIZER_PRESETS: Final = ("sgd-momentum",)
"""Names of optimizers that are no classes of `torch.optim`."""
OPTIMIZER_LIBRARIES: Final = ("torchao", "bitsandbytes", "bnb")
"""Other libraries whose optimizers have a name: `torchao:AdamW8bit`."""
Values = Literal["bound", "real"]
"""What decides where a model asks for values: the largest shapes there can be, or a real run on the CPU."""
ZeroGrad = Literal["after-step", "before-backward"]
"""When gradients are set to None or to zero."""
CACHES: Final = ("dynamic", "static", "sliding", "offloaded", "quantized")
"""What a generation keeps keys and values in, by transformers' names."""
ENGINES: Final = ("vllm", "sglang")
"""Serving engines whose arithmetic is known."""
KV_DTYPES: Final = ("auto", "fp8")
"""What an engine keeps keys and values in: as the weights, or in a byte each."""
QUANTIZE: Final = ("int8", "int4", "nf4", "fp8")
"""What weights are quantised to."""
Sdpa = Literal["auto", "cudnn", "flash", "efficient", "math"]
"""The attention backend that may run, or `auto`: the first that can."""
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""A mode of `torch.compile`."""
AS_IS: Final = "as-is"
"""In the place of a mode: what the model's author has compiled, as it was compiled."""
TimedQuestion = Literal["padding", "kernel", "fusion"]
"""What the compiler decides on a card by timing: whether a product is padded, which kernel computes an operator,
whether two kernels become one."""
GRAPH_POOL: Final = 1 << 20
"""In the place of a stream: the private memory pool of CUDA graphs, whose blocks nothing else is handed."""
ENGINE_POOL: Final = GRAPH_POOL + 2
"""The same, of a serving engine's weights; the pool of its keys and values follows."""
GRAPH_INPUT: Final = "copy of a CUDA graph's input"
"""The name of such a copy, which the graph's recording makes, and its run before that does not."""
BUCKET: Final = "bucket of gradients"
"""The name of a storage in which the gradients of several parameters lie."""
BUDGET_OPTION: Final = "activation_memory_budget"
"""The setting of `torch._functorch.config` by which a compiled step keeps less for backward."""
MeasuredDevice = Literal["cpu", "cuda"]
"""Where a step is run to be measured."""
Heat = Literal["saved", "output", "params", "flops", "live", "scratch"]
"""The quantity that colours the boxes of a drawing."""

MATH_ATTENTION: Final = "unfused attention runs where no other kernel takes the call: "
"""What an assumption of topic "attention" begins with that says why the others do not."""

OF_GRAPH: Final = "graph of "
OF_FRAMES: Final = "frames of "
"""What the holder of a storage begins with where a tensor's graph keeps it, or the functions that an exception has run
through."""

MAX_OPERATORS: Final = 200_000
"""Operators of one round after which a recorded program is ended, unless the user gives another number."""
STEPS: Final = 3
"""Optimizer steps of a program that are run, unless the user gives another number."""
GROWING: Final = 16
"""The same at most, while more is kept after each."""
STEADY: Final = 100
"""The same, of a program that is run until it is steady."""


class Application(StrEnum):
    """How a plan is carried out on a model."""

    MODULES = "modules"
    """Chosen modules checkpoint their own forward; the model stays the user's."""
    GRAPH = "graph"
    """The model is rewritten from `torch.fx.symbolic_trace`'s graph; regions may begin and end anywhere."""
    OPERATORS = "operators"
    """The model runs as it is, once; results of single operators are freed, and recomputed when backward asks for
    them."""


COMPILED_AS_EAGER: Final = "torch.compile'd code is analysed as the eager code it was made from"
"""What an assumption of topic "model" begins with where a compiler was left out."""
PLANS_BY_TIMING: Final = "workspaces of the convolutions that torch.backends.cudnn.benchmark chooses by timing"
"""What an unknown of topic "memory" begins with where cuDNN tries every plan in the first step."""
REAL_VALUES: Final = "what depends on data is decided by one real run on the CPU"
"""What an assumption of topic "values" begins with where a real run decided."""
