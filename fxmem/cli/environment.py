"""What this environment can do, and how to get what it lacks.

torch is imported by `report` only, and may be missing.
"""

from __future__ import annotations

import contextlib
import platform
import re
import warnings
from importlib import metadata, util
from pathlib import Path

from fxmem import __version__
from fxmem.errors import FxmemError, UsageError, one_line
from fxmem.hardware.catalogue import CATALOGUE, target
from fxmem.hardware.workspaces import ConvSignature, cache_directory, conv_workspaces, fetch_cudnn, find_cudnn
from fxmem.records.units import format_bytes, printable
from fxmem.show.terminal import columns, why_plain
from fxmem.show.text.tables import GAP, fit, fit_left, grid, render

OLDEST_TORCH = (2, 11)
"""As in pyproject.toml; the rules of memory were checked against this release and newer ones."""

_COLLECTIONS = {"torchvision": "torchvision:NAME", "timm": "timm:NAME", "transformers": "hf:ORG/NAME"}
_WIDTH = 80
_LABEL = max(map(len, _COLLECTIONS))
_TEXT = _WIDTH - _LABEL - GAP
_OTHER_CARDS = """\
Any other card: --target FILE.json, a file with what torch reports of it, e.g.
{"name": "mine", "device": "cuda", "memory_bytes": 25250627584,
 "capability": [8, 9]}"""
_SMALL_CONVOLUTION = ConvSignature(
    op="fwd", x=(1, 8, 8, 8), x_stride=(512, 64, 8, 1), w=(8, 8, 1, 1), w_stride=(8, 1, 1, 1), y=(1, 8, 8, 8),
    y_stride=(512, 64, 8, 1),
    padding=(0, 0), stride=(1, 1), dilation=(1, 1), groups=1, dtype="float32",
)  # fmt: skip


def report() -> str:
    """One line of at most 80 columns for each thing an analysis can use: what it is, or how to get it.

    What is installed is looked up, torch is imported, and cuDNN is asked one small question in a child process. Nothing
    raises.
    """
    facts = [
        ("fxmem", __version__),
        ("Python", platform.python_version()),
        ("torch", _describe_torch()),
        ("GPU", _describe_gpu()),
        ("cuDNN", _describe_cudnn()),
        *((package, _describe_collection(package, spec)) for package, spec in _COLLECTIONS.items()),
        ("Drawing", _describe_drawing()),
        ("Cache", _describe_cache()),
        ("Terminal", f"{columns()} columns, colour {'off: ' + why_plain() if why_plain() else 'on'}"),
    ]
    table = grid(_LABEL, _TEXT)
    for label, text in facts:
        table.add_row(label, fit(printable(text), _TEXT))
    return render([table], _WIDTH, color=False)


def fetch(what: str, version: str) -> str:
    """Fetch a library; say where it is.

    Raises:
        UsageError: it is no `cudnn`, or the package index has no such version.
        EnvironmentLacksError: there is nothing to fetch it with, or no place for it.
    """
    if what != "cudnn":
        raise UsageError(f"expected --fetch cudnn VERSION, got {what!r}")
    library = fetch_cudnn(version)
    return f"cuDNN {library.version} is in {Path(library.libraries[-1][0]).parents[3]}"


def catalogue() -> str:
    """The targets known by name, one line each: name, memory in the driver's count, compute capability, full name."""
    table = grid(10, -10, -10, None)
    table.add_row("Target", "Memory", "Capability", "Full name")
    for card in (card.target for card in CATALOGUE.values()):
        memory = "-" if card.memory_bytes is None else format_bytes(card.memory_bytes)
        capability = "-" if card.capability is None else "{}.{}".format(*card.capability)
        table.add_row(card.name, memory, capability, card.full_name)
    return render([table, _OTHER_CARDS], _WIDTH, color=False)


def _describe_torch() -> str:
    if util.find_spec("torch") is None:
        return "missing: pip install torch; without it only reports can be shown"
    try:
        import torch
    except Exception as error:
        return f"cannot be imported: {one_line(error)}"
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < OLDEST_TORCH:
        return f'{torch.__version__} is too old: pip install "torch>={".".join(map(str, OLDEST_TORCH))}"'
    if torch.version.cuda is None:
        return f"{torch.__version__} has no CUDA: only --target cpu, or torch's CUDA wheel"
    return f"{torch.__version__}, built with CUDA {torch.version.cuda}: every target"


def _describe_gpu() -> str:
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
        return f"cannot be asked: {one_line(error)}"
    name = f"{properties.name}, {format_bytes(properties.total_memory)}" + (f", and {others} more" if others else "")
    try:
        return f"{name}: --target {target(properties.name).name}"
    except FxmemError:
        return f"{name}: not in the catalogue, write a target file"


def _describe_cudnn() -> str:
    try:
        library = find_cudnn()
    except LookupError as error:
        return f"{error}; estimating"
    answer = conv_workspaces([_SMALL_CONVOLUTION], target("h100"), library=library)[_SMALL_CONVOLUTION]
    found = library.version or "of unknown version"
    if answer.source == "estimate":
        return f"{found} does not answer; estimating: {answer.note}"
    return f"{found}, asked for convolution workspaces"


def _describe_collection(package: str, spec: str) -> str:
    try:
        return f"{metadata.version(package)}: models {spec}"
    except metadata.PackageNotFoundError:
        return f'missing: pip install "fxmem[zoo]" for models {spec}'


def _describe_drawing() -> str:
    converts = util.find_spec("vl_convert") is not None
    return "SVG, DOT, HTML" + (", PNG, PDF" if converts else '; for PNG and PDF: pip install "fxmem[image]"')


def _describe_cache() -> str:
    directory = cache_directory()
    if directory is None:
        return "off: FXMEM_CACHE_DIR is empty, or there is no home directory"
    try:
        sizes = [path.stat().st_size for path in directory.iterdir() if path.is_file()]
        content = f"{len(sizes)} {'file' if len(sizes) == 1 else 'files'}, {format_bytes(sum(sizes))}"
    except OSError:
        content = "nothing in it yet"
    with contextlib.suppress(ValueError, RuntimeError):  # elsewhere; no home directory
        directory = Path("~") / directory.relative_to(Path.home())
    return f"{fit_left(str(directory), _TEXT - len(f': {content}'))}: {content}"
