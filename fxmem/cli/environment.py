"""What this environment can do, and how to get what it lacks. torch is imported by `report` only, and may be
missing."""

from __future__ import annotations

import platform
import re
import warnings
from importlib import metadata, util
from pathlib import Path

from fxmem import __version__
from fxmem.errors import FxmemError
from fxmem.hardware.catalogue import CATALOGUE, target
from fxmem.hardware.workspaces import ConvSignature, conv_workspaces, find_cudnn
from fxmem.hardware.workspaces.cudnn_cache import cache_directory
from fxmem.records.units import format_bytes, printable
from fxmem.show import graph
from fxmem.show.terminal import columns, why_plain

__all__ = ["OLDEST_TORCH", "catalogue", "report"]

OLDEST_TORCH = (2, 11)
"""As in pyproject.toml; the rules of memory were checked against this release and newer ones."""

_WIDTH = 80
_LABEL = 14
_COLLECTIONS = {"torchvision": "torchvision:NAME", "timm": "timm:NAME", "transformers": "hf:CLASS"}
_OTHER_CARDS = (
    "Any other card: --target FILE.json, a file with what torch reports of it, e.g.",
    '{"name": "mine", "device": "cuda", "memory_bytes": 25250627584,',
    ' "capability": [8, 9]}',
)
_SMALL_CONVOLUTION = ConvSignature(
    op="fwd", x=(1, 8, 8, 8), x_stride=(512, 64, 8, 1), w=(8, 8, 1, 1), w_stride=(8, 1, 1, 1), y=(1, 8, 8, 8),
    y_stride=(512, 64, 8, 1),
    padding=(0, 0), stride=(1, 1), dilation=(1, 1), groups=1, dtype="float32",
)  # fmt: skip


def report() -> str:
    """One line for each thing an analysis can use, at most 80 columns wide: what it is, or what is missing and how to
    get it.

    What is installed is looked up, torch is imported, and cuDNN is asked one small question in a child process. Nothing
    raises.
    """
    facts = [
        ("fxmem", __version__),
        ("Python", platform.python_version()),
        ("torch", _torch()),
        ("GPU", _gpu()),
        ("cuDNN", _cudnn()),
        *((package, _collection(package, spec)) for package, spec in _COLLECTIONS.items()),
        ("Drawing", _drawing()),
        ("Cache", _cache()),
        ("Terminal", f"{columns()} columns, colour {'off: ' + why_plain() if why_plain() else 'on'}"),
    ]
    return "\n".join(_fit(f"{label:<{_LABEL}}{printable(text)}") for label, text in facts)


def catalogue() -> str:
    """The targets known by name, one line each: name, memory in the driver's count, compute capability, full name."""
    rows = [("Target", "Memory", "Capability", "Full name")]
    for card in (card.target for card in CATALOGUE.values()):
        memory = "-" if card.memory_bytes is None else format_bytes(card.memory_bytes)
        capability = "-" if card.capability is None else "{}.{}".format(*card.capability)
        rows.append((card.name, memory, capability, card.full_name))
    lines = [f"{name:<11}{memory:>10}{capability:>12}  {full_name}" for name, memory, capability, full_name in rows]
    return "\n".join([*lines, "", *_OTHER_CARDS])


def _torch() -> str:
    if util.find_spec("torch") is None:
        return "missing: pip install torch; without it only reports can be shown"
    try:
        import torch
    except Exception as error:
        return f"cannot be imported: {_one_line(error)}"
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < OLDEST_TORCH:
        return f'{torch.__version__} is too old: pip install "torch>={".".join(map(str, OLDEST_TORCH))}"'
    if torch.version.cuda is None:
        return f"{torch.__version__} has no CUDA: only --target cpu, or pip install torch"
    return f"{torch.__version__}, built with CUDA {torch.version.cuda}: every target"


def _gpu() -> str:
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a driver it cannot use; then there is no GPU for us
            if not torch.cuda.is_available():
                return "none found; no prediction needs one"
            properties = torch.cuda.get_device_properties(0)
            others = torch.cuda.device_count() - 1
    except ImportError:
        return "not known without torch"
    except Exception as error:
        return f"cannot be asked: {_one_line(error)}"
    name = f"{properties.name}, {format_bytes(properties.total_memory)}" + (f", and {others} more" if others else "")
    try:
        return f"{name}: --target {target(properties.name).name}"
    except FxmemError:
        return f"{name}: not in the catalogue, write a target file"


def _cudnn() -> str:
    try:
        library = find_cudnn()
    except LookupError as error:
        return f"{error}; estimating"
    answer = conv_workspaces([_SMALL_CONVOLUTION], target("h100"), library=library)[_SMALL_CONVOLUTION]
    found = library.version or "of unknown version"
    silent = answer.source == "estimate"
    return (
        f"{found} does not answer; estimating: {answer.note}"
        if silent
        else f"{found}, asked for convolution workspaces"
    )


def _collection(package: str, spec: str) -> str:
    try:
        return f"{metadata.version(package)}: models {spec}"
    except metadata.PackageNotFoundError:
        return f'missing: pip install "fxmem[zoo]" for models {spec}'


def _drawing() -> str:
    engines = graph.engines()
    missing = [engine.how for engine in engines if not engine.available]
    return ", ".join(engine.name for engine in engines if engine.available) + (
        f"; {len(missing)} more could be" if missing else ""
    )


def _cache() -> str:
    directory = cache_directory()
    if directory is None:
        return "off: FXMEM_CACHE_DIR is empty, or there is no home directory"
    try:
        sizes = [path.stat().st_size for path in directory.iterdir() if path.is_file()]
        held = f"{len(sizes)} {'file' if len(sizes) == 1 else 'files'}, {format_bytes(sum(sizes))}"
    except OSError:
        held = "nothing in it yet"
    room = _WIDTH - _LABEL - len(f": {held}")
    place = _with_tilde(directory)
    return f"{place if len(place) <= room else '..' + place[2 - room :]}: {held}"


def _with_tilde(path: Path) -> str:
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _fit(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 2].rstrip() + ".."
