"""What a model's error means for its analysis, in one line: what was expected, what came, on which line of the user's
code, and what to do."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Mapping
from typing import Any, Final

import torch

import fxmem
from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError, EnvironmentLacksError, FxmemError, one_line
from fxmem.records.units import format_shape
from fxmem.simulation.code.source_lines import describe_place, walk_error
from fxmem.simulation.kernels.packages import WITHOUT_ROWS, find_install

_NO_FAKE_KERNEL: Final = (
    re.compile(r"no fake impl registered for <CustomOpDef\((\w+::\w+)\)>"),
    re.compile(r"(\w+::\w+): attempted to run this operator with Meta tensors"),
    re.compile(r"Could not run '(\w+::\w+)(?:\.\w+)?' with arguments from the 'Meta' backend"),
)
_HIGHER_ORDER: Final = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
_DEVICES: Final = ("two different devices", "on the same device")
_DRIVER: Final = re.compile(
    r"Found no NVIDIA driver|CUDA driver version is insufficient|libcuda\.so|No CUDA GPUs are available"
    r"|0 active drivers"
)
_ADVICE: Final = {
    "does not require grad and does not have a grad_fn": (
        "; a loss has no graph within torch.no_grad(), of frozen tensors alone, or within checkpoint(..., "
        "use_reentrant=True) of arguments that need no gradient (use_reentrant=False gives it one)"
    ),
    r"(?i)couldn't (connect to '?http|reach)|Cannot reach http|traffic has been disabled|(Name|servname)\b.* not known|"
    r"name resolution|Failed to resolve": (
        "; no weights are needed: make the model from a configuration, AutoModel.from_config(BertConfig()), or fill "
        "the cache where there is a network; fxmem analyze hf:ORG/NAME needs none for the hub's models that it knows"
    ),
    f"{_DRIVER.pattern}|Cannot access data pointer|data is not allocated yet": (
        "; it comes of the pretended card, which has no driver, and no memory behind its tensors: what calls CUDA "
        "by itself, past torch, cannot run here"
    ),
}
"""By what an error says, how it comes about and what to do, in words that follow it."""
_HIGHER_ORDER_ADVICE: Final = {
    "cond": "Call the branch that is to be analysed",
    "while_loop": "Write the loop in Python, with the number of rounds to be analysed",
}


def describe_end(error: BaseException) -> str:
    """What ended a program of the user's own, in one line."""
    higher = _HIGHER_ORDER.search(str(error))
    if higher is not None:
        return (
            f"{type(error).__name__}: torch's {higher[1]} is compiled or chosen at run time; where the program "
            "compiles what calls it, --compile as-is follows it"
        )
    asks = "; input() reads the answer from stdin: echo ANSWER | fxmem run" if isinstance(error, EOFError) else ""
    return one_line(error) + asks + _of_missing_kernels(error) + _of_text(str(error))


def _of_missing_kernels(error: BaseException) -> str:
    """How to install a package whose kernels fxmem knows, or what to do without, in words that follow the error; empty
    where it is none."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if missing in WITHOUT_ROWS:
        return f"; its kernels are not known to fxmem, installed or not: {WITHOUT_ROWS[missing]}"
    command = find_install(str(error)) if isinstance(error, ImportError) else ""
    return command and f"; its kernels are known, and its Python is enough: {command}"


def _of_text(text: str) -> str:
    """How an error comes about, of the card that is not there or otherwise, in words that follow it; empty where that
    is not known."""
    operator = next((match[1] for pattern in _NO_FAKE_KERNEL if (match := pattern.search(text))), None)
    if operator is not None and not operator.startswith("aten::"):
        return (
            f"; it comes of the pretended card, on which {operator} needs a fake kernel: "
            f"@torch.library.register_fake({operator!r}) beside its definition says what it returns"
        )
    return next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, text)), "")


def explain_error(error: Exception, model: torch.nn.Module) -> AnalysisError:
    """The error to raise in place of `error`, which running `model` on FakeTensors raised."""
    at, name = describe_place(error), type(model).__name__
    text = " ".join((str(error).strip().splitlines() or [""])[0].split())
    for explain in (_of_values, _of_operators, _of_devices):
        found = explain(error, text, at, name)
        if found is not None:
            return AnalysisError(found)
    if isinstance(error, RecursionError):
        return AnalysisError(
            f"expected modules nested less deeply than Python's recursion limit; {name} goes past it{at}. Raise "
            f"sys.setrecursionlimit, or call its parts in a loop."
        )
    return AnalysisError(f"the model raised {type(error).__name__}: {text}{at}{_of_batch(error, text)}")


_UNPACKED: Final = re.compile(r"values to unpack \(expected (\d+)")


def _of_batch(error: Exception, text: str) -> str:
    """How many inputs make the batch that a Lightning module's step unpacks; empty where that is not what failed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = _UNPACKED.search(text)
    if found is None or not frames or frames[-1].f_code.co_name not in ("training_step", "validation_step"):
        return ""
    batch = next((value for name, value in frames[-1].f_locals.items() if name != "self"), None)
    given = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    shapes = ["x".join(map(str, each.shape)) for each in given if isinstance(each, torch.Tensor)][: int(found[1])]
    words = [*shapes, *["SHAPE:DTYPE"] * (int(found[1]) - len(shapes))]
    each = " ".join(f"--input {word}" for word in words)
    return f"; its batch has {found[1]} items, each of them an input of its own: {each}"


def _of_values(error: Exception, text: str, at: str, model: str) -> str | None:
    expected = "expected a model whose control flow and shapes do not depend on the data"
    if "_pack_padded_sequence" in text or "_pad_packed_sequence" in text:
        return (
            f"{expected}; {model} packs sequences by their lengths{at}. Give the recurrent layer the padded batch "
            f"instead: an upper bound, reached where no sequence is shorter."
        )
    # Raised below a call into torch's code for these tensors.
    files = (frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__))
    if any("/torch/nested/" in file for file in files):
        instead = "a padded batch, or with one dense tensor of as many rows in all"
        return f"{expected}; {model} uses a nested tensor, whose lengths are data{at}. Analyse it with {instead}."
    if isinstance(error, torch_common.DATA_DEPENDENT) or ".numpy() is not supported for tensor subclasses" in text:
        asked = text.removesuffix(" is not supported for tensor subclasses.")
        return (
            f"{expected}; {model} asks for a tensor's value ({asked}){at}. Replace .item(), .tolist(), .numpy(), "
            f"nonzero or a boolean mask there by something of known shape (torch.where, masked_fill), let a real run "
            f"on the CPU decide (values='real', --values real), or analyse the part of the model without it."
        )
    return None


def _of_operators(error: Exception, text: str, at: str, model: str) -> str | None:
    operator = "::".join(text.split(".")[:2]) if isinstance(error, torch_common.UnsupportedOperatorException) else None
    for pattern in _NO_FAKE_KERNEL:
        operator = operator or (match[1] if (match := pattern.search(text)) else None)
    if operator is not None and operator.startswith("aten::"):
        advice = "Use dense, unquantised tensors there, or leave that part out"
        return f"expected operators that can run without data; {operator} cannot on tensors of this kind{at}. {advice}."
    if operator is not None:
        return (
            f"expected every operator to have a fake kernel, which says what it returns; {operator} has none{at}. "
            f"Register one beside its definition: @torch.library.register_fake({operator!r}) over a function of the "
            f"same arguments that returns torch.empty(...) of the result's shape, dtype and device."
        )
    higher = _HIGHER_ORDER.search(text)
    if higher is not None:
        advice = _HIGHER_ORDER_ADVICE.get(higher[1], "Call the function it is given instead")
        return (
            f"expected operators that run one after the other; {model} calls torch's {higher[1]}, which is "
            f"compiled or chosen at run time{at}. {advice}."
        )
    return None


def _of_devices(error: Exception, text: str, at: str, model: str) -> str | None:
    if any(words in text for words in _DEVICES):
        mixed = " with ".join(dict.fromkeys(re.findall(r"\b(?:cuda(?::\d+)?|cpu|meta)\b", text))) or "devices"
        return (
            f"expected every tensor on the target's device, where parameters, buffers and inputs are; {model} mixes "
            f"{mixed}{at}. Make the tensor there with device=x.device, or register it as a buffer; on a real card the "
            f"step fails the same way."
        )
    if _DRIVER.search(text):
        return (
            f"expected a model that leaves the CUDA driver to torch; {model} calls it, and none is here "
            f"({type(error).__name__}){at}. Take driver calls other than streams and events out of the model that is "
            f"analysed, or analyse for target='cpu'."
        )
    return None


_DIMENSIONS: Final = re.compile(
    r"(?i:expected \dD.*got \dD)|(?i:expected \d, got \d\))|mat1 and mat2 shapes cannot be multiplied"
    r"|shape '.*' is invalid for input of size|Dimension out of range"
)


_TOO_FEW: Final = re.compile(
    r"(?!.*; its batch has ).*((tuple index|Dimension) out of range|too many indices|not enough values)"
)
"""Of a shape that has fewer dimensions than forward reads."""
_CHANNELS: Final = re.compile(r"expected input\[.*\] to have (\d+) channels, but got")
_MISSING: Final = re.compile(r"(\w+)\.forward\(\) missing \d+ required positional arguments?: (.*)")


def suggest_input(text: str, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> str:
    """What to write in the place of inputs that made the model raise; else empty."""
    tensors = [("", each) for each in torch_common.iterate_tensors(args)]
    tensors += [(f"{name}:", each) for name, each in kwargs.items() if isinstance(each, torch.Tensor)]
    if (found := _MISSING.search(text)) and found[1] == type(model).__name__:
        given = [f"{name}{format_shape(each.shape)}{_spell_dtype(each)}" for name, each in tensors]
        lacks = [f"{name}:SHAPE[:DTYPE]" for name in re.findall(r"'(\w+)'", found[2])]
        return f"each is an input of its own: {' '.join(f'--input {word}' for word in (*given, *lacks))}"
    channels = _CHANNELS.search(text)
    for name, tensor in tensors:
        first, *size = shape = tuple(tensor.shape) or (0,)
        is_image = tensor.is_floating_point() and len(size) == 2 and first in (1, 3, 4) and min(size) >= 8
        is_too_short = tensor is tensors[0][1] and not size and _TOO_FEW.match(text)
        if is_too_short or (is_image and _DIMENSIONS.search(text)):
            return f"is the batch missing? --input {name}1x{format_shape(shape)}{_spell_dtype(tensor)}"
        if tensor.is_floating_point() and "embedding expected indices" in text:
            return f"are these token ids? --input {name}{format_shape(shape)}:int64"
        if tensor.dtype is torch.uint8 and "type" in text:  # each operator has words of its own for it
            return f"are the bytes of images made floats first? --input {name}{format_shape(shape)}"
        if channels is not None and len(shape) == 4 and shape[-1] == int(channels[1]):
            turned = format_shape((first, size[2], size[0], size[1]))
            return f"are the channels last? --input {name}{turned}{_spell_dtype(tensor)}"
    return ""


def _spell_dtype(tensor: torch.Tensor) -> str:
    """The dtype as it follows a shape; empty for float32."""
    return "" if tensor.dtype is torch.float32 else f":{tensor.dtype}".replace("torch.", "")


# --- what other code of the user's raised ----------------------------------------------------------------------------

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        *(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(torch.__file__),
        os.path.dirname(fxmem.__file__),
    }
)


def user_code_error(error: BaseException, what: str) -> FxmemError:
    """The error to raise when `what` raised `error`: its text and the innermost line that is no library's.

    An `EnvironmentLacksError` if a package is missing (transformers says so by an `ImportError` that names no module),
    else an `AnalysisError`.
    """
    line = _line_outside_libraries(error)
    at = f" at {line[0]}:{line[1]}" if line else ""
    if isinstance(error, ModuleNotFoundError) or (isinstance(error, ImportError) and error.name is None):
        return EnvironmentLacksError(f"{what} needs something that is not installed{at}: {one_line(error)}")
    if isinstance(error, SystemExit):
        return AnalysisError(f"{what} called sys.exit{at}; keep what a script runs under `if __name__ == '__main__':`")
    return AnalysisError(f"{what} raised{at}: {one_line(error)}{_of_text(str(error))}")


def _line_outside_libraries(error: BaseException) -> tuple[str, int] | None:
    """Where the innermost line lies that is neither a library's nor fxmem's own."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno
    found = None
    for frame, line in walk_error(error):
        name = frame.f_code.co_filename
        if not name.startswith("<") and not os.path.realpath(name).startswith(_LIBRARIES):
            found = name, line
    return found
