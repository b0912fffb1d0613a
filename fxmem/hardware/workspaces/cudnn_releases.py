"""cuDNNs of other releases of torch: fetched on demand into a folder of fxmem, and which of them stand for one.

Before 9.8 cuDNN cannot be asked without a driver. Those from 9.8 on stand for it, each asked on its own. Between them
is what these versions differ by: plans move from one to the next, no rule says how, and an older one's may lie outside.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.hardware.workspaces.cudnn_client import (
    OLDEST,
    CudnnLibrary,
    cache_directory,
    find_cudnn,
    is_built_for,
    read_cudnn_folder,
    version_number,
)
from fxmem.records.profile import Target

_FOLDER, _PART = "cudnn", ".part"
_PACKAGE = "nvidia-cudnn-cu12"
"""Every version since 9.0 has a build for CUDA 12, which needs no other CUDA here than what the package brings."""


def fetch_cudnn(version: str) -> CudnnLibrary:
    """Install a cuDNN, e.g. "9.8", in a folder of fxmem, from the package index that pip or uv is set up for.

    It and the libraries it needs take about 2 GB. Nothing else changes. One that is there already is left as it is.

    Raises:
        UsageError: no version from 9.8 on; the index has none of that.
        EnvironmentLacksError: there is neither pip nor uv, or no folder to keep it in.
    """
    if re.fullmatch(r"\d+\.\d+(\.\d+){0,2}", version) is None or _minor(version) < OLDEST:
        raise UsageError(f"expected a version of cuDNN from {'.'.join(map(str, OLDEST))} on, got {version!r}")
    home = _home()
    if home is None:
        raise EnvironmentLacksError("there is no folder to keep it in: FXMEM_CACHE_DIR is empty")
    exact = f"{_PACKAGE}=={version}" + ("" if version.count(".") == 3 else ".*")
    if (found := next((each for each in _fetched() if _matches(each, version)), None)) is not None:
        return found
    folder = home / version
    part = folder.with_name(f"{version}{_PART}")
    shutil.rmtree(part, ignore_errors=True)
    command = [*_installer(), "--only-binary", ":all:", "--target", str(part), exact]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise UsageError(f"the package index did not give {exact}: {last[0].strip()}")
        library = read_cudnn_folder(part)
        if not _matches(library, version):
            raise UsageError(f"expected cuDNN {version} from {exact}, got {library.version}")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return read_cudnn_folder(folder)


def list_cudnns(version: str, target: Target) -> tuple[CudnnLibrary, ...]:
    """The cuDNNs that stand for a version on a card: itself alone where it is at hand, else all, the nearest first.

    At hand are the installed one and those that were fetched. Those that have no kernels for the card are left out
    where another has some. Empty where there is none.
    """
    found = list(_fetched())
    with contextlib.suppress(LookupError):
        found.append(find_cudnn())
    found = [each for each in found if each.version]
    found = [each for each in found if is_built_for(each, target)] or found
    if own := [each for each in found if _minor(each.version) == _minor(version)]:
        return tuple(own[:1])
    wanted = version_number(version)
    by_version = {each.number: each for each in reversed(found)}
    return tuple(by_version[number] for number in sorted(by_version, key=lambda number: (abs(number - wanted), number)))


def find_built(target: Target) -> tuple[CudnnLibrary, ...]:
    """The newest of those fetched that has kernels for a card for which the installed one has none; empty for none."""
    with contextlib.suppress(LookupError):
        if is_built_for(find_cudnn(), target):
            return ()
    built = sorted((each for each in _fetched() if is_built_for(each, target)), key=lambda each: each.number)
    return tuple(built[-1:])


def _fetched() -> list[CudnnLibrary]:
    """Those that were fetched and can still be read."""
    home = _home()
    found = []
    for folder in sorted(home.iterdir()) if home is not None and home.is_dir() else ():
        if folder.suffix == _PART:  # of a fetch that was killed
            continue
        try:
            found.append(read_cudnn_folder(folder))
        except UsageError:
            continue
    return found


def _home() -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / _FOLDER


def _installer() -> list[str]:
    """The command that installs packages, as it is set up here."""
    # Not by `find_spec`: setuptools takes that for pip at work, and leaves distutils to Python from then on.
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("pip")
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise EnvironmentLacksError("fetching cuDNN needs pip or uv: python -m ensurepip")


def _matches(library: CudnnLibrary, version: str) -> bool:
    return f"{library.version}.".startswith(f"{'.'.join(version.split('.')[:3])}.")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
