"""A verdict as its maker gives it to others: figures, versions and settings, and nothing else.

What a field takes is all that it may hold: a number, a switch, a name that torch, a card or a public collection of
models has. So no code, path, file's name, host or user is in such a file, and nobody can write one in that holds more.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fxmem.records.parts import Many, Record
from fxmem.records.profile import Phase
from fxmem.records.units import CompileMode, Mode, Precision, Sdpa, Values, ZeroGrad
from fxmem.records.validation import VALIDATION_SCHEMA_VERSION, ComparedQuantity, Machine, Quantity


def _text(pattern: str) -> object:
    return Field(pattern=f"^({pattern})$", max_length=100)


System = Literal["Linux", "Darwin", "Windows"]
"""The kind of operating system; others are not named."""
_Setting = Annotated[str, _text(r"[a-z_][a-z0-9_.]*=(-?\d+(\.\d+)?|[Tt]rue|[Ff]alse|None)")]
_Version = Annotated[str, _text(r"\d[\w.]*(\+(cu\d+|cpu|rocm[\d.]+|git[0-9a-f]+))?")]


class SharedMachine(Machine):
    """Where it was measured, in words that are nobody's own."""

    name: Annotated[str, _text(r"[A-Za-z0-9][\w .()-]*")] = "card"
    """The card, or for the CPU its architecture and instruction set."""
    torch_version: _Version | None = None
    cuda_version: _Version | None = None
    cudnn_version: _Version | None = None
    driver_version: _Version | None = None
    allocator_settings: Annotated[str, _text(r"([a-z0-9_]+:(True|False|[\d.]+|\[[\d:,>]*\]),?)*")] = ""
    """Numbers and switches alone."""


class SharedSettings(Record):
    """Options of `fxmem validate` as they were given; None, empty or False is not given."""

    mode: Mode | None = None
    precision: Precision | None = None
    weights: Precision | None = None
    optimizer: Annotated[str, _text(r"[A-Za-z][\w-]*(:[\w.=,-]+)?")] | None = None
    """One of torch or of a public library. A name of the user's own has a dot before its colon."""
    loss: Annotated[str, _text("[a-z][a-z0-9_]*")] | None = None
    zero_grad: ZeroGrad | None = None
    set_to_none: bool | None = None
    keep_outputs: bool | None = None
    values: Values | None = None
    inference_mode: bool = False
    quantize: Literal["int8", "int4", "nf4", "fp8"] | None = None
    lora: Annotated[str, _text(r"r=\d+(,alpha=\d+)?")] | None = None
    channels_last: bool = False
    sdpa: Sdpa | None = None
    allow_tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    compile: CompileMode | Literal["as-is"] | None = None
    compile_option: Many[_Setting] = ()
    settings: Many[_Setting] = ()
    """`--set`: fields of a public model's configuration that are numbers or switches."""
    steps: int | None = None
    """Of a program."""


class SharedVerdict(Record):
    """Predicted and measured bytes of a step, or of each step of a program, and what decides them."""

    schema_version: str = VALIDATION_SCHEMA_VERSION
    fxmem_version: _Version
    subject: Literal["model", "program"]
    model: Annotated[str, _text(r"(torchvision|timm|hf):[\w.-]+(/[\w.-]+)?")] | None = None
    """A model that everybody has; None for one of the user's own, and for a program."""
    library_version: _Version | None = None
    """Of torchvision, timm or transformers."""
    inputs: Many[Annotated[str, _text(r"([A-Za-z_][\w.]*:)?(scalar|\d{1,12}(x\d{1,12})*):[a-z][a-z0-9_]*")]] = ()
    """Tensors in the form of `--input`; of a model that is not public, without their names."""
    settings: SharedSettings
    left_out: Many[Annotated[str, _text("[A-Za-z_-]+")]] = ()
    """Options that were given, and fields that are known, whose values are not here: the step cannot be predicted
    anew."""
    system: System | None = None
    machine: SharedMachine
    from_snapshot: bool = False
    """Whether the measurement is a snapshot of the card, which may be of any age."""
    peak_phase: Phase | None = None
    """Phase of the measured peak; None of a program."""
    comparisons: Annotated[Many[Many[ComparedQuantity]], Field(min_length=1)]
    """Predicted beside measured bytes, by steps: one of a model."""
    judged: Quantity
    tolerance: float = Field(ge=0)
    within_tolerance: bool
