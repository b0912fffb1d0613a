"""What the names on a command line may be, known without torch: a misspelt one is refused at once.

A name is refused here only if the installed library's own files do not have it; whatever else is wrong with it is found
when it is looked up for real.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from fxmem.errors import UsageError, closest, unknown_optimizer
from fxmem.records.units import LOSSES, OPTIMIZER_LIBRARIES, OPTIMIZER_PRESETS
from fxmem.simulation.stand_ins import hub_models, hub_pipelines

SPEC_FORMS: Final = (
    "torchvision:NAME, timm:NAME, hf:ORG/NAME, hf:CLASS, hf:path/to/config.json, pkg.mod:factory or file.py:factory"
)
"""The forms of a model spec, for messages and help."""

_REFERENCE = re.compile(r"(?P<where>.+):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_REGISTERED = re.compile(r"""@register_model(?:\((?:name=["'](\w+)["'])?\))?\n(?:(?!def ).*\n)*?def (\w+)""")
"""A builder of torchvision or timm, under another name than its own or not."""
_MODEL_CLASSES = re.compile(r"^class ((?!_)\w*(?:Model|For[A-Z]\w*))\(", re.MULTILINE)
_OPTIMIZERS = re.compile(r"^from torch\.optim\S* import (\w+) as", re.MULTILINE)
_WHERE: Final = {"torchvision": "**/*.py", "timm": "*.py", "transformers": "*/modeling_*.py"}
"""Files in the folder `models` of a collection that have the names of its models."""


# --- forms ------------------------------------------------------------------------------------------------------------


def split_reference(text: str) -> tuple[str, str] | None:
    """The module or file of a reference, and the name in it; None for what has another form."""
    match = _REFERENCE.fullmatch(text)
    if match is None or not (is_path(match["where"]) or all(map(str.isidentifier, match["where"].split(".")))):
        return None
    return match["where"], match["name"]


def is_reference(text: str) -> bool:
    """Whether `text` has the form `pkg.mod:name` or `path/to/file.py:name`."""
    return split_reference(text) is not None


def is_file_reference(text: str) -> bool:
    """Whether `text` has the form `path/to/file.py:name`."""
    parts = split_reference(text)
    return parts is not None and is_path(parts[0])


def is_path(where: str) -> bool:
    """Whether the first part of a reference is a file's path."""
    return where.endswith(".py") or "/" in where or os.sep in where


def names_optimizer_factory(text: str) -> bool:
    """Whether an optimizer is the user's own: `adamw:fused` has the form of a reference, too."""
    return is_file_reference(text) or (is_reference(text) and "." in text.partition(":")[0])


# --- names ------------------------------------------------------------------------------------------------------------


def check_names(options: argparse.Namespace) -> None:
    """Refuse a misspelt model, file, loss or optimizer before torch is imported.

    Raises:
        UsageError: with the nearest names that there are.
    """
    if getattr(options, "download", False):
        collection, _, name = options.model.partition(":")
        if collection != "hf" or not hub_models.is_name(name):
            raise UsageError(f"expected --download with hf:ORG/NAME, got {options.model!r}")
        hub_models.download(name)
    check_model(options.model)
    loss, optimizer = getattr(options, "loss", None), getattr(options, "optimizer", "none").lower()
    if loss is not None and not is_reference(loss) and loss.lower() not in LOSSES:
        raise UsageError(f"expected --loss as pkg.mod:name or file.py:name, got {loss!r}; or as ce, mse, bce or l1")
    for own in (loss, getattr(options, "optimizer", None), getattr(options, "parallelize", None)):
        _check_file(own or "")
    name = optimizer.partition(":")[0]
    if not (names_optimizer_factory(optimizer) or name in ("none", *OPTIMIZER_PRESETS, *OPTIMIZER_LIBRARIES)):
        texts = _texts("torch", "optim/__init__.py")
        known = [each.lower() for text in texts for each in _OPTIMIZERS.findall(text)]
        if known and name not in known:
            raise unknown_optimizer(name, [*known, *OPTIMIZER_PRESETS])


def check_model(spec: str) -> None:
    """Refuse the spec of a model that there is not.

    Raises:
        UsageError: a name that its collection does not have, a file that is not there, another form than `SPEC_FORMS`.
    """
    collection, colon, name = spec.partition(":")
    if colon and collection in ("torchvision", "timm"):
        known = _list_registered(collection)
        name = name.partition(".")[0] if collection == "timm" else name
        if known and name.isidentifier() and name not in known and not _is_mentioned(collection, name):
            raise model_error(collection, name, known)
    elif colon and collection == "hf":
        _check_hub_name(name)
    elif is_reference(spec):
        _check_file(spec)
    else:
        raise form_error(spec)


def _check_hub_name(name: str) -> None:
    """Refuse what is neither a path, a class of transformers nor a known model."""
    if not hub_models.is_name(name) or os.path.isfile(os.path.join(name, "config.json")) or name.startswith("Auto"):
        return  # said when it is read
    if hub_models.find(name) is not None:
        return
    if not name.isidentifier():
        raise hub_models.name_error(name)
    if _files("transformers") and not _is_mentioned("transformers", name):
        classes = [each for text in _texts("transformers") for each in _MODEL_CLASSES.findall(text)]
        raise model_error("transformers", name, [*classes, *hub_models.list_names()])


def list_models() -> list[str]:
    """The specs of the models of torchvision, timm and the hub that are at hand."""
    libraries = [(each, sorted(_list_registered(each))) for each in ("torchvision", "timm")]
    libraries += [("hf", hub_models.list_names()), ("diffusers", hub_pipelines.list_names())]
    return [f"{library}:{name}" for library, names in libraries for name in names]


def model_error(collection: str, name: str, names: Iterable[str]) -> UsageError:
    """No such model in a collection."""
    where = {"torchvision": "torchvision.models.", "timm": "timm."}.get(collection)
    if where is None:
        near = closest(name, names, otherwise="; expected one like LlamaForCausalLM")
        return UsageError(f"transformers has no model class {name!r}{near}")
    near = closest(name, names, otherwise=f"; see {where}list_models()")
    return UsageError(f"{collection} has no model {name!r}{near}")


def form_error(spec: str) -> UsageError:
    """No form of a model spec."""
    return UsageError(f"expected a model as {SPEC_FORMS}; got {spec!r}{_suggest_spec(spec)}")


def file_error(where: str) -> UsageError:
    """No such file."""
    folder = Path(where).parent
    try:
        beside = [str(folder / each.name) for each in folder.glob("*.py")]
    except (OSError, ValueError):  # no folder; a null character
        beside = []
    return UsageError(f"no file {where}{closest(where, beside)}")


def _suggest_spec(name: str) -> str:
    if re.fullmatch(r"\w+Model|\w+For\w+", name):
        return f"; did you mean hf:{name}?"
    if name.endswith(".py"):
        return f"; name the function or class in it that makes the model: {name}:NAME; as a script: fxmem run {name}"
    if not re.fullmatch(r"[\w.]+", name):
        return ""
    known = {spec: spec.partition(":")[2] for spec in list_models()}
    bare = name.partition(".")[0]
    exact = next((spec for spec, model in known.items() if model == bare), None)
    if exact is not None:
        return f"; did you mean {exact.partition(':')[0]}:{name}?"
    near = difflib.get_close_matches(bare.lower(), known.values(), n=1, cutoff=0.75)
    return f"; did you mean {next(spec for spec, model in known.items() if model == near[0])}?" if near else ""


def _check_file(reference: str) -> None:
    parts = split_reference(reference)
    if parts is None or not is_path(parts[0]):
        return
    try:
        is_there = Path(parts[0]).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # said when it is opened
        return
    if not is_there:
        raise file_error(parts[0])


# --- the libraries' files --------------------------------------------------------------------------------------------


def _files(library: str, where: str = "") -> list[Path]:
    """The files that name a collection's models, or those elsewhere in it; none where it is not installed."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        return []
    folder = Path(found.origin).parent
    return sorted(folder.glob(where) if where else (folder / "models").glob(_WHERE[library]))


def _texts(library: str, where: str = "") -> Iterator[str]:
    for path in _files(library, where):
        yield path.read_text(encoding="utf-8", errors="replace")


def _list_registered(library: str) -> set[str]:
    return {named or own for text in _texts(library) for named, own in _REGISTERED.findall(text)}


def _is_mentioned(library: str, name: str) -> bool:
    """Whether a collection's files have the name: a class, or a name of older releases, which stands in quotes."""
    word = re.compile(rf"(?:^class |[\"']){re.escape(name)}\b", re.MULTILINE)
    everywhere = itertools.chain(_texts(library), _texts(library, "**/*.py"))
    return any(name in text and word.search(text) for text in everywhere)
