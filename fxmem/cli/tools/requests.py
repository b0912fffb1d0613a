"""What each tool takes, as records, and the command line that it comes down to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

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
    batch: int | None = None
    """Of a model without `inputs`: its batch. Of a program whose batch is searched: the one that is tried first."""
    settings: Many[str] = ()
    """Of a model: KEY=VALUE each, an argument of its factory or a field of its hf: configuration."""
    mode: AnyMode = "train"
    """Of a model: a training step, forward under no_grad, or generate() of transformers."""
    precision: Precision | None = None
    """Of a model's step: the dtype of autocast; null for none."""
    optimizer: str | None = None
    """Of a model's step: a class of torch.optim in small letters; null for adamw."""
    loss: str | None = None
    """Of a model's step: ce, mse, bce, l1 or FILE.py:NAME; null for the model's own."""
    freeze: Many[str] = ()
    """Of a model: modules or patterns of parameters' names that are not trained."""
    lora: str | None = None
    """Of a model: adapters that are trained alone, e.g. r=8."""
    compile: str | None = None
    """A mode of torch.compile, e.g. default; null for eager code."""
    mesh: str | None = None
    """Of a model: how ranks share it, e.g. fsdp=8."""
    ranks: int | None = Field(default=None, ge=1)
    """Of a program: how many ranks share the work, of which one runs; null for one process."""


class AimedStep(AskedStep):
    """The same, for a card."""

    target: str = ""
    """The card (rtx4090, a100, ...), cpu, or a size such as 24GB; empty for the project's default, else h100."""


class Predict(AimedStep):
    """How much memory a step takes, where its peak is, whether it fits and whether it grows."""

    budget: str | None = None
    """What the step may take instead of the card's memory, e.g. 8GiB."""
    until_steady: bool = False
    """Of a program: run on until a step allocates no more than the one before, which tells whether it leaks."""


class Advise(AimedStep):
    """What to change, each change tried, with the code to paste."""

    budget: str | None = None
    """What it may take, e.g. 8GiB or 60% of its peak; the cheapest set of changes that keeps it is looked for."""
    quick: bool = False
    """Only changes of one line that often decide, and no checkpoints."""


class MakePlan(AimedStep):
    """Where to put activation checkpoints, applied and analysed again; `load_plan` reads the answer's `file`."""

    budget: str | None = None
    """What the step may take, e.g. 8GiB or 60% of its peak; null for the whole curve."""


class MaxBatch(AimedStep):
    """How large the batch may be; of a program the word {} stands for the number that is searched."""


class Cards(AskedStep):
    """Which cards of the catalogue the step fits."""

    only: str | None = None
    """These cards alone, e.g. rtx4090,l40s."""


class Sweep(AimedStep):
    """Which of a grid of batches, lengths, precisions, checkpoints, meshes and cards fit, and at what cost."""

    over: Many[str] = Field(min_length=1)
    """Values of each setting, e.g. batch=1..64, precision=none,bf16 or card=l4,a100."""
    price: Many[str] = ()
    """Of an hour of a card, e.g. h100=2.99."""


class KVCache(Record):
    """How many tokens fit the KV cache of a serving engine (vLLM, SGLang)."""

    model: str
    """hf:ORG/NAME or hf:CLASS."""
    target: str = ""
    """The card."""
    engine: str = ""
    """vllm, sglang, or a release of it, e.g. vllm@0.19."""
    mesh: str = ""
    """How cards share the model, e.g. tp=4 or tp=4,pp=2."""
    utilization: float | None = None
    """The share of the card that the engine may use, e.g. 0.9."""
    max_seqs: int | None = None
    """Sequences at a time."""
    quantize: str = ""
    """fp8: linear layers quantised as they are loaded."""
    kv_dtype: str = ""
    """fp8: keys and values of one byte."""
    context: str | None = None
    """Lengths of sequences of which to say how many fit, e.g. 4096,32768."""


class Shard(Record):
    """How many cards a model's training step needs, and in which mesh."""

    model: str
    """As for predict."""
    inputs: Many[str] = ()
    """As for predict."""
    cards: str = "h100"
    """The card for the fewest that it fits, or how many of it, e.g. 8xh100."""
    batch: int | None = None
    """Of an optimizer step on all cards."""
    seq: int | None = None
    """Length of the sequences."""


class ExplainError(AimedStep):
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
    verb: tuple[str, ...]
    """The words that a command line begins with."""
    leaves_out: tuple[str, ...] = ()
    """Fields of the answer that are lists of every node or operator; its file has them."""

    def say(self, text: str) -> str:
        """What a command said with the names of this tool's arguments for its options, but for commands to type."""
        fields = {each: _OPTIONS.get(each, f"--{each}").partition("=")[0] for each in self.request.model_fields}
        names = {option: field for field, option in fields.items()} | {"--run": "program"}
        commands_or_options = r"fxmem [a-z]+(?:-[a-z]+)* [^`\n;,]*|--[a-z]+(?:-[a-z]+)*\b"
        return re.sub(commands_or_options, lambda found: names.get(found[0], found[0]), text)

    def words(self, asked: Record, folder: Path) -> Iterator[str]:
        """The command line, without where its answer goes; the folder is that of the user's files.

        Raises:
            UsageError: a reference leads out of the folder.
        """
        named = {name: value for name, value in asked if value != type(asked).model_fields[name].default}
        for name in ("model", "loss", "inputs"):
            for reference in [named[name]] if isinstance(named.get(name), str) else named.get(name, ()):
                _check_reference(reference, folder)
        if "." in named.get("optimizer", "").partition(":")[0]:
            _check_reference(named["optimizer"], folder)
        if isinstance(asked, Predict):
            named.pop("budget", None)  # the report is held against it
            generates = named.get("mode") == "generate" and named.pop("mode")
            yield from ("run", "--oom=continue") if asked.program else ("generate",) if generates else self.verb
        else:
            yield from self.verb
        yield from (named[each] for each in ("model", "before", "after") if each in named)
        for name, value in named.items():
            option = _OPTIONS.get(name, f"--{name}")
            if isinstance(value, bool):
                yield option
            elif option:
                yield from (f"{option}={each}" for each in (value if isinstance(value, tuple) else [value]))


_OPTIONS: Final = {
    **dict.fromkeys(("program", "model", "text", "before", "after"), ""),
    "inputs": "--input",
    "settings": "--set",
    "until_steady": "--until=steady",
}
"""What a field is called on the command line, where that is not its own name; empty for no option."""


TOOLS: Final[Mapping[str, Tool]] = {
    "predict": Tool(Predict, ("analyze",), ("nodes", "ops", "storages", "modules", "calls", "phases", "restored",
                                            "recomputed", "recomputed_ops")),
    "explain": Tool(ExplainError, ("explain", "-")),
    "advise": Tool(Advise, ("advise",)),
    "plan": Tool(MakePlan, ("plan",)),
    "max_batch": Tool(MaxBatch, ("max-batch",)),
    "cards": Tool(Cards, ("cards",)),
    "sweep": Tool(Sweep, ("sweep",)),
    "kv_cache": Tool(KVCache, ("kv-cache",)),
    "shard": Tool(Shard, ("shard",)),
    "compare": Tool(Compare, ("compare",), ("nodes",)),
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
