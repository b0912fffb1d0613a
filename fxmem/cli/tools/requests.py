"""What each tool takes, as records, and the command line that it comes down to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import Field

from fxmem.cli.spec_names import split_reference
from fxmem.errors import UsageError
from fxmem.records.profile import Many, Record
from fxmem.records.units import AnyMode, Precision

_COLLECTIONS: Final = ("torchvision", "timm", "hf")


class AskedStep(Record):
    """What is asked about: a program, or a model with its inputs."""

    program: Many[str] = ()
    """The words after `python`: a script in the server's folder and its arguments, or -m, a module there and its
    arguments."""
    model: str = ""
    """In the place of a program: torchvision:NAME, timm:NAME, hf:CLASS or FILE.py:NAME of a class or a function that
    builds the model."""
    inputs: Many[str] = ()
    """Of a model: 32x3x224x224[:dtype] or name:8x1024:int64 each; empty for what the model's family takes."""
    mode: AnyMode = "train"
    """Of a model: a training step, forward under no_grad, or generate() of transformers."""
    precision: Precision | None = None
    """Of a model's step: the dtype of autocast; null for none."""
    optimizer: str | None = None
    """Of a model's step: a class of torch.optim in small letters; null for adamw."""
    loss: str | None = None
    """Of a model's step: ce, mse, bce, l1 or FILE.py:NAME; null for the model's own."""
    target: str = "h100"
    """The card (rtx4090, a100, ...), cpu, or a size such as 24GB."""
    ranks: int | None = Field(default=None, ge=1)
    """Of a program: how many ranks share the work, of which one runs; null for one process."""


class Predict(AskedStep):
    """How much memory a step takes, where its peak is, whether it fits and whether it grows."""

    budget: str | None = None
    """What the step may take instead of the card's memory, e.g. 8GiB."""
    until_steady: bool = False
    """Of a program: run on until a step allocates no more than the one before, which tells whether it leaks."""


class Advise(AskedStep):
    """What to change, each change tried, with the code to paste."""

    budget: str | None = None
    """What it may take, e.g. 8GiB or 60% of its peak; the cheapest set of changes that keeps it is looked for."""
    quick: bool = False
    """Only changes of one line that often decide, and no checkpoints."""


class MakePlan(AskedStep):
    """Where to put activation checkpoints, applied and analysed again; `answer`, saved, is what `load_plan` reads."""

    budget: str | None = None
    """What the step may take, e.g. 8GiB or 60% of its peak; null for the whole curve."""


class MaxBatch(AskedStep):
    """How large the batch may be; of a program the word {} stands for the number that is searched."""


class ExplainError(AskedStep):
    """Why a card ran out of memory; with a program or a model also what fits."""

    text: str = Field(min_length=1)
    """The error, or a log that contains it."""
    target: str = ""
    """The card that ran out; empty for the one with the memory that the message names."""


class Compare(Record):
    """What grew from one prediction to another."""

    before: str
    """A `report` that predict answered with."""
    after: str
    """Likewise."""


class Tool(NamedTuple):
    """One question."""

    request: type[Record]
    words: Callable[[Any, Path], Iterator[str]]
    """The command line, without where its answer goes; the folder is that of the user's files."""
    leaves_out: tuple[str, ...] = ()
    """Fields of the answer that are lists of every node or operator; the report has them."""

    @property
    def keeps_report(self) -> bool:
        """Whether its answer is a report that `compare` takes."""
        return self.request is Predict


def _predict(asked: Predict, folder: Path) -> Iterator[str]:
    if not asked.program:
        yield "generate" if asked.mode == "generate" else "analyze"
        yield from _model_words(asked, folder)
        return
    yield from ("run", f"--target={asked.target}", "--oom=continue")
    if asked.until_steady:
        yield "--until=steady"
    if asked.ranks is not None:
        yield f"--ranks={asked.ranks}"


def _advise(asked: Advise, folder: Path) -> Iterator[str]:
    yield "advise"
    yield from _model_words(asked, folder)
    yield from ["--quick"] if asked.quick else []
    yield from [f"--budget={asked.budget}"] if asked.budget else []


def _plan(asked: MakePlan, folder: Path) -> Iterator[str]:
    yield "plan"
    yield from _model_words(asked, folder)
    yield from [f"--budget={asked.budget}"] if asked.budget else []


def _max_batch(asked: MaxBatch, folder: Path) -> Iterator[str]:
    yield "max-batch"
    yield from _model_words(asked, folder)


def _explain(asked: ExplainError, folder: Path) -> Iterator[str]:
    yield from ("explain", "-")
    if asked.model or asked.program:
        yield from _model_words(asked, folder)


def _compare(asked: Compare, folder: Path) -> Iterator[str]:
    yield from ("compare", asked.before, asked.after)


TOOLS: Final[Mapping[str, Tool]] = {
    "predict": Tool(Predict, _predict, ("nodes", "ops", "storages", "modules", "calls", "phases", "restored",
                                        "recomputed", "recomputed_ops")),
    "explain": Tool(ExplainError, _explain),
    "advise": Tool(Advise, _advise),
    "plan": Tool(MakePlan, _plan),
    "max_batch": Tool(MaxBatch, _max_batch),
    "compare": Tool(Compare, _compare, ("nodes",)),
}  # fmt: skip
"""Every tool, by its name."""


def program_words(asked: Record, folder: Path) -> list[str]:
    """The words of the program, which end a command line; empty for none.

    Raises:
        UsageError: it lies outside the folder, or a model is given as well.
    """
    words = list(getattr(asked, "program", ()))
    if not words:
        return []
    if getattr(asked, "model", ""):
        raise UsageError("expected a program or a model, got both")
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("expected a module after -m")
        check_module(words[1], folder)
    else:
        check_inside(words[0], folder)
    return words if isinstance(asked, Predict) else ["--run", *words]


def check_inside(name: str, folder: Path) -> None:
    """Raise UsageError for a file of the user's that is not in the folder: nothing else is run."""
    path = (folder / name.replace("\0", "")).resolve()
    if name.startswith("-") or "\0" in name or not path.is_relative_to(folder.resolve()):
        raise UsageError(f"expected a file in {folder}, for which this server was started, got {name!r}")


def check_module(name: str, folder: Path) -> None:
    """The same for a module by its dotted name."""
    path = folder.joinpath(*name.split("."))
    if not all(map(str.isidentifier, name.split("."))) or not (path.with_suffix(".py").is_file() or path.is_dir()):
        raise UsageError(f"expected a module in {folder}, for which this server was started, got {name!r}")
    check_inside(str(path), folder)


def _check_reference(text: str, folder: Path) -> None:
    """Refuse code that a reference names outside the folder."""
    parts = split_reference(text)
    if text.startswith("-"):
        raise UsageError(f"expected no option here, got {text!r}")
    if parts is None or parts[0] in _COLLECTIONS:
        return
    is_file = parts[0].endswith(".py") or "/" in parts[0]
    (check_inside if is_file else check_module)(parts[0], folder)


def _model_words(asked: AskedStep, folder: Path) -> Iterator[str]:
    """The model and its step; of a program, what a verb beside `run` takes."""
    for reference in (asked.model, *asked.inputs, asked.loss or ""):
        _check_reference(reference, folder)
    if asked.optimizer and "." in asked.optimizer.partition(":")[0]:
        _check_reference(asked.optimizer, folder)
    if asked.model:
        yield asked.model
    yield from (f"--input={each}" for each in asked.inputs)
    if asked.mode != "train" and not (isinstance(asked, Predict) and asked.mode == "generate"):
        yield f"--mode={asked.mode}"
    for name in ("precision", "optimizer", "loss", "target", "ranks"):
        value = getattr(asked, name)
        yield from [f"--{name}={value}"] if value not in (None, "") else []
