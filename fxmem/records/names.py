"""The names that users type and records carry. Standard library only: `fxmem --help` imports this."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

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
ENGINES: Final = ("vllm",)
"""Serving engines whose arithmetic is known."""
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
