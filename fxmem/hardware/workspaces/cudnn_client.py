"""The workspaces of a model's convolutions and recurrent layers: from the cache, else from cuDNN in a child process,
else estimated.

cuDNN itself decides how much workspace a convolution takes, and since 9.8 it can be asked without a GPU. The library
that answers is the one installed beside torch here, or one in a folder of the user's; the prediction holds for a
machine with the same version. What it answers depends on the version and on the compute capability, so both name the
cache file. Where a card is known to answer otherwise than cuDNN without a driver, the card is believed (`driverless`).
A card that it is not built for has its answers for the oldest that it is built for, as an estimate.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, Literal

from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.hidden_memory import RnnSignature, Signature
from fxmem.hardware.releases import find_release
from fxmem.hardware.tensor_layouts import ITEM_BYTES, dense_strides
from fxmem.hardware.workspaces import driverless
from fxmem.records.files import read_kept, write_kept
from fxmem.records.profile import Bytes, Record, Target

# --- cuDNNs of other releases of torch: fetched on demand into a folder of fxmem, and which of them stand for one -----
# Before 9.8 cuDNN cannot be asked without a driver. Those from 9.8 on stand for it, each asked on its own. Between them
# is what these versions differ by: plans move from one to the next, no rule says how, and an older one's may lie
# outside.


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


# --- cuDNN's answers on disk, so that a second analysis starts no child process ---------------------------------------
# One JSON file per library version, device and settings; inside, `ConvSignature.key` to the bytes of the plan and of
# those that torch goes on to (`null` where cuDNN has no plan). A file is replaced atomically, so a reader never sees
# half of one, and writers that race lose at worst each other's new entries, which are then asked again. Whatever
# cannot be read, or was changed, counts as empty; whatever cannot be written is not kept: the cache never makes an
# analysis fail.


_FORMAT = 5
"""One more where `driverless` changes: answers are kept as it corrects them."""
_MAX_ENTRIES = 10_000
"""Per file, the newest kept: about 2 MB."""
_MAX_FILES = 32
_PREFIX = "cudnn-"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where answers are kept: `$FXMEM_CACHE_DIR`, else `$XDG_CACHE_HOME/fxmem`, else `~/.cache/fxmem`.

    None, and nothing is kept, when `FXMEM_CACHE_DIR` is set to nothing or there is no home directory to begin at.
    """
    environ = os.environ if environ is None else environ
    try:
        if "FXMEM_CACHE_DIR" in environ:
            return Path(environ["FXMEM_CACHE_DIR"]).expanduser() if environ["FXMEM_CACHE_DIR"] else None
        if environ.get("XDG_CACHE_HOME"):
            return Path(environ["XDG_CACHE_HOME"]) / "fxmem"
        return Path.home() / ".cache" / "fxmem"
    except RuntimeError:
        return None


def load(directory: Path | None, name: str) -> dict[str, Sequence[int] | None]:
    """The entries of one file; empty when there is none that can be read."""
    if directory is None:
        return {}
    try:
        entries: dict[str, Sequence[int] | None] = json.loads(read_kept(_path(directory, name)))
    except (OSError, ValueError):
        return {}
    return entries


def store(directory: Path | None, name: str, entries: Mapping[str, Sequence[int] | None]) -> None:
    """Add entries to a file, dropping the oldest beyond the bound."""
    if directory is None or not entries:
        return
    merged = {**load(directory, name), **entries}
    with contextlib.suppress(OSError, UsageError):
        directory.mkdir(parents=True, exist_ok=True)
        write_kept(_path(directory, name), json.dumps(dict(list(merged.items())[-_MAX_ENTRIES:])))
        files = [path for path in directory.iterdir() if path.name.startswith(_PREFIX) and path.suffix == ".json"]
        for path in sorted(files, key=lambda path: path.lstat().st_mtime, reverse=True)[_MAX_FILES:]:
            path.unlink(missing_ok=True)


def _path(directory: Path, name: str) -> Path:
    return directory / f"{_PREFIX}{_FORMAT}-{name}.json"


# --- the workspaces of a model's convolutions and recurrent layers ----------------------------------------------------


OLDEST = (9, 8)
"""First cuDNN that accepts the properties of an absent device."""
_CUDA_MAJORS = (13, 12)
_LIBRARY = "libcudnn.so.9"
_TIMEOUT_S = 300.0
"""Long: the child loads cuDNN, on a machine that may do much else."""
ASKING: set[int] = set()
"""The processes that ask cuDNN now: ours, and none of the program that is looked at."""
_NEWEST_CAPABILITY = (12, 1)
_TURING = (7, 5)
_LAST_FOR_OLD_CARDS = (9, 10)
"""Last release whose build for CUDA 12 has kernels for cards before Turing, by the kernels in `libcudnn_ops`: 9.10.2
carries sm_50, 60, 61, 70, 80 and newer, 9.19 sm_75 and newer. Releases in between are taken to have none. cuDNN does
not refuse other cards, it answers wrongly."""


class CudnnLibrary(Record):
    """A cuDNN that could be asked."""

    version: str
    """`9.19.0`; empty when the file's name does not say."""
    cuda_major: int | None
    """CUDA release it was built for; None when unknown."""
    libraries: tuple[tuple[str, bool], ...]
    """What to load in order, and whether it is indispensable."""

    @property
    def number(self) -> int:
        """The version as `torch.backends.cudnn.version()` gives it; that of torch 2.11's where it is not known."""
        return version_number(self.version or "9.19.0")


def version_number(version: str) -> int:
    """Return a version such as `9.19.0` as `torch.backends.cudnn.version()` gives it."""
    major, minor, patch = (int(part) for part in version.split("."))
    return 10000 * major + 100 * minor + patch


class Workspace(Record):
    """How much workspace one convolution or recurrent layer takes, and how that is known."""

    nbytes: Bytes | None
    """None where cuDNN has no plan for the convolution, and where nothing is known of a recurrent layer."""
    smaller_bytes: tuple[Bytes, ...] = ()
    """Of the plans that torch goes on to where there is no room for that one, each smaller than all before it. Empty
    where they were not asked for."""
    source: str
    """`cudnn 9.19.0` (asked now, or before) or `estimate`."""
    note: str = ""
    """Why it is an estimate, or why there is no figure."""


def conv_workspaces(
    signatures: Iterable[Signature],
    target: Target,
    *,
    torch_version: str = "2.11",
    smaller: bool = False,
    heuristic: Literal["instant", "b"] | None = None,
    library: CudnnLibrary | None = None,
    timeout: float = _TIMEOUT_S,
    child: Sequence[str] | None = None,
) -> dict[Signature, Workspace]:
    """The workspace of each convolution or recurrent layer, in bytes requested of the allocator.

    All are asked in one go.

    Args:
        signatures: which of them; repeats cost nothing.
        target: a CUDA target of the catalogue, or one like it.
        torch_version: whose list of avoided engines holds.
        smaller: whether the plans that follow are asked for too, which takes two to three times as long.
        heuristic: torch's choice of heuristic mode; by default what `TORCH_CUDNN_USE_HEURISTIC_MODE_B` says.
        library: which cuDNN answers; by default the installed one (`find_cudnn`).
        timeout: seconds for all of them; what is not answered by then is estimated.
        child: the command that answers; by default this module's. For tests.

    Returns:
        One answer for each distinct signature. Nothing raises for want of cuDNN: the answer is then an estimate that
        says why.

    Raises:
        UsageError: the target is no GPU.
    """
    wanted = list(dict.fromkeys(signatures))
    if target.capability is None:
        raise UsageError(f"expected a CUDA target for a cuDNN workspace, got {target.name!r}")
    if not wanted:
        return {}
    try:
        library = library or find_cudnn()
        asked_about, note = _answered_capability(target, library)
    except (LookupError, UsageError) as reason:
        return {signature: estimate(signature, target, str(reason)) for signature in wanted}
    device = {**device_properties(target).as_dict(), "deviceVer": 100 * asked_about[0] + 10 * asked_about[1]}
    heuristic = heuristic or ("b" if os.environ.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1" else "instant")
    directory = cache_directory() if library.version else None
    limits = {key: value for key, value in device.items() if key != "deviceName"}
    settings = json.dumps([limits, heuristic, find_release(torch_version)[1], library.cuda_major], sort_keys=True)
    digest = sha256(settings.encode()).hexdigest()[:16]
    name = f"{library.version}-sm{asked_about[0]}{asked_about[1]}-{digest}{'-smaller' if smaller else ''}"
    cached = load(directory, name)
    source = f"cudnn {library.version}"
    known = ((each, cached[each.key]) for each in wanted if each.key in cached)
    answers = {signature: _workspace(sizes, source) for signature, sizes in known}
    requests = {
        each: _request(each, _blocked_engines(each, torch_version, library.number, target.capability))
        for each in wanted
        if each not in answers
    }
    header = {"libraries": library.libraries, "device": device, "heuristic": heuristic, "smaller": smaller}
    asked, error = _ask(requests, header, timeout, child or (sys.executable, "-m", "fxmem.hardware.cudnn_worker"))
    found = {key: None if each.nbytes is None else (each.nbytes, *each.smaller_bytes) for key, each in asked.items()}
    store(directory, name, {signature.key: sizes for signature, sizes in found.items()})
    answers |= asked
    if note:
        answers = {s: each.model_copy(update={"source": "estimate", "note": note}) for s, each in answers.items()}
    estimated = {s: estimate(s, target, error or "") for s in wanted if s not in answers}
    return {signature: (answers | estimated)[signature] for signature in wanted}


def find_cudnn(environ: Mapping[str, str] | None = None) -> CudnnLibrary:
    """The cuDNN torch would load: the one of the `nvidia-cudnn-cu*` wheel, else one on the library path.

    Raises:
        LookupError: there is none, or it is older than 9.8.
    """
    environ = os.environ if environ is None else environ
    for major in _CUDA_MAJORS:
        try:
            wheel = metadata.distribution(f"nvidia-cudnn-cu{major}")
        except metadata.PackageNotFoundError:
            continue
        root = Path(str(wheel.locate_file("nvidia")))
        if (root / "cudnn" / "lib" / _LIBRARY).exists():
            return _library_of_wheel(root / "cudnn" / "lib", root, wheel.version, major)
    folders = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    machine = os.uname().machine if hasattr(os, "uname") else ""
    known = ("/usr/local/cuda/lib64", f"/usr/lib/{machine}-linux-gnu", "/usr/lib64")
    folders += [Path(sys.prefix) / "lib", *map(Path, known)]
    for folder in folders:
        if (folder / _LIBRARY).exists():
            return _library(folder, _version_of_file(folder), None, folders)
    raise LookupError("cuDNN is not installed (package nvidia-cudnn-cu13)")


def read_cudnn_folder(folder: Path) -> CudnnLibrary:
    """The cuDNN in a folder: where `pip install --target` put its wheel, a `site-packages`, or the library's own.

    Raises:
        UsageError: there is none, or it is older than 9.8.
    """
    within = ("lib", "cudnn/lib", "nvidia/cudnn/lib", "lib/python*/site-packages/nvidia/cudnn/lib")
    places = (folder.resolve(), *(lib.resolve() for each in within for lib in folder.glob(each)))
    lib = next((place for place in places if (place / _LIBRARY).exists()), None)
    if lib is None:
        raise UsageError(
            f"expected {_LIBRARY} in {folder}: pip install --target {folder} nvidia-cudnn-cu12==9.10.2.21 puts it "
            "there, with the libraries that it needs"
        )
    root = lib.parent.parent
    wheel = next(root.parent.glob("nvidia_cudnn_cu*-*.dist-info"), None)
    try:
        if wheel is None:
            return _library(lib, _version_of_file(lib), None, [lib])
        name, version = wheel.name.removesuffix(".dist-info").split("-")
        return _library_of_wheel(lib, root, version, int(name.removeprefix("nvidia_cudnn_cu")))
    except LookupError as error:
        raise UsageError(str(error)) from None


def _version_of_file(folder: Path) -> str:
    """The version in the name of a library's file; empty where it does not say."""
    version = (folder / _LIBRARY).resolve().name.removeprefix("libcudnn.so.")
    return version if version.count(".") == 2 else ""


def estimate(signature: Signature, target: Target, reason: str) -> Workspace:
    """Estimate a convolution's workspace where no cuDNN can be asked. A recurrent layer's stays unknown.

    Seen on cuDNN 9.19, in 144 convolutions for each of five cards from sm_75 to sm_100: with tensor cores, most
    contiguous (NCHW) ones are computed on copies of their three tensors in the other layout, within 10 %, and the rest
    take almost nothing; most channels-last ones take almost nothing, except in float32 on sm_80 and sm_89, where half
    of them take as much as one or two of their tensors. Without tensor cores it is next to nothing. A single figure can
    be far off.
    """
    if isinstance(signature, RnnSignature):
        return Workspace(nbytes=None, source="estimate", note=reason)
    capability = target.capability or (0, 0)
    tensor_cores = {
        "float16": capability >= (7, 0),
        "bfloat16": capability >= (8, 0),
        "float32": signature.allow_tf32 and capability >= (8, 0),
    }
    contiguous = signature.x_stride == dense_strides(signature.x)
    copied = tensor_cores.get(signature.dtype, False) and contiguous
    elements = sum(prod(shape) for shape in (signature.x, signature.w, signature.y))
    return Workspace(nbytes=elements * ITEM_BYTES[signature.dtype] if copied else 0, source="estimate", note=reason)


def _ask(
    requests: Mapping[Signature, dict[str, Any]], header: Mapping[str, Any], timeout: float, command: Sequence[str]
) -> tuple[dict[Signature, Workspace], str | None]:
    """Answers, and why there are fewer than requests. A child that dies over one signature is started again behind
    it."""
    answers: dict[Signature, Workspace] = {}
    error: str | None = None
    left = list(requests)
    major, minor = driverless.ASKED
    is_asked = header["device"]["deviceVer"] == 100 * major + 10 * minor
    while left:
        lines, ending = _run(command, [header, *(requests[signature] for signature in left)], timeout)
        if not lines or "cudnn" not in lines[0]:
            return answers, str(lines[0].get("error")) if lines else ending
        version: int = lines[0]["cudnn"]
        source = f"cudnn {version // 10000}.{version // 100 % 100}.{version % 100}"
        for signature, line in zip(left, lines[1:], strict=False):
            nbytes: int | None = line["workspace"]
            if nbytes is not None and is_asked and not isinstance(signature, RnnSignature):
                nbytes = driverless.correct_workspace(signature, nbytes, dict(line["knobs"]))
            sizes = None if nbytes is None else [nbytes, *(each for each in line.get("smaller", ()) if each < nbytes)]
            answers[signature] = _workspace(sizes, source, line["error"] or "")
        if len(lines) > len(left):
            break
        error = ending
        if ending.startswith("no answer"):
            break
        left = left[len(lines) :]
    return answers, error


def _workspace(sizes: Sequence[int] | None, source: str, note: str = "cuDNN has no plan for it") -> Workspace:
    """An answer, of a plan's bytes and those of the ones that follow it."""
    first, *smaller = sizes or (None,)
    return Workspace(nbytes=first, smaller_bytes=tuple(smaller), source=source, note="" if sizes else note)


def _run(command: Sequence[str], requests: Sequence[object], timeout: float) -> tuple[list[dict[str, Any]], str]:
    """The lines a child answered, and how it ended."""
    # The child must find this very package, however it was imported, and nothing of the working directory.
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
        )
    except OSError as error:
        return [], f"the process that asks cuDNN did not start: {error}"
    text = "".join(json.dumps(request) + "\n" for request in requests)
    ASKING.add(process.pid)
    try:
        answered, complaint = process.communicate(text, timeout=timeout)
        ending = f"the process that asks cuDNN ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        answered, complaint = process.communicate()
        ending = f"no answer from cuDNN within {timeout:g} s"
    finally:
        ASKING.discard(process.pid)
    last = complaint.strip().splitlines()[-1:] if complaint else []
    return list(_parse(answered)), ": ".join((ending, *last))


def _parse(text: str) -> Iterable[dict[str, Any]]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            # Cut off where the child died.
            return


def _request(signature: Signature, blocked: tuple[int, ...]) -> dict[str, Any]:
    if isinstance(signature, RnnSignature):
        return signature.model_dump()
    fields = ("op", "padding", "stride", "dilation", "dtype", "allow_tf32", "deterministic")
    tensors = {side: [getattr(signature, side), getattr(signature, f"{side}_stride")] for side in "xwy"}
    return {**{field: getattr(signature, field) for field in fields}, **tensors, "blocked_engines": blocked}


def _blocked_engines(
    signature: Signature, torch_version: str, version: int, capability: tuple[int, int]
) -> tuple[int, ...]:
    """torch's built-in errata."""
    if isinstance(signature, RnnSignature):
        return ()
    row, _ = find_release(torch_version)
    return tuple(
        rule.engine
        for rule in row.blocked_engines
        if rule.op == signature.op
        and len(signature.x) >= rule.rank
        and rule.first <= version
        and (rule.end is None or version < rule.end)
        and rule.capability in (None, capability)
    )


def is_built_for(library: CudnnLibrary, target: Target) -> bool:
    """Whether a build has kernels for a card."""
    old = library.cuda_major == 12 and _parts(library) <= _LAST_FOR_OLD_CARDS
    capability = target.capability or (0, 0)
    return capability <= _NEWEST_CAPABILITY and (old or capability >= _TURING)


def _parts(library: CudnnLibrary) -> tuple[int, ...]:
    return tuple(int(part) for part in (library.version or "9.19").split(".")[:2])


def _answered_capability(target: Target, library: CudnnLibrary) -> tuple[tuple[int, int], str]:
    """The compute capability that cuDNN is asked about; why it is not the target's, if so.

    Raises:
        UsageError: the card is newer than the build.
    """
    capability = target.capability or (0, 0)
    not_built = f"cuDNN {library.version} is not built for compute capability {capability[0]}.{capability[1]}"
    if capability > _NEWEST_CAPABILITY:
        raise UsageError(not_built)
    if is_built_for(library, target):
        return capability, ""
    return _TURING, (
        f"{not_built}; counted is what it names for 7.5. cuDNN 9.10 is the last for this card, which "
        "fxmem doctor --fetch cudnn 9.10 brings"
    )


def _library(folder: Path, version: str, cuda_major: int | None, folders: Sequence[Path]) -> CudnnLibrary:
    if version and tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise LookupError(f"cuDNN {version} is installed; it can be asked from 9.8 on")
    majors = (cuda_major,) if cuda_major else _CUDA_MAJORS
    # Without cuBLASLt cuDNN aborts; without nvrtc it searches the disk for it at every plan, and answers the same.
    needed = [
        (_first(folders, [f"libcublasLt.so.{major}" for major in majors]), True),
        (_first(folders, [f"libnvrtc.so.{major}" for major in majors]), False),
    ]
    return CudnnLibrary(version=version, cuda_major=cuda_major, libraries=(*needed, (str(folder / _LIBRARY), True)))


def _first(folders: Sequence[Path], names: Sequence[str]) -> str:
    """Path of the first name that one of the folders has. Otherwise the first name, which the loader then looks for."""
    return next((str(folder / name) for folder in folders for name in names if (folder / name).exists()), names[0])


def _library_of_wheel(folder: Path, root: Path, version: str, cuda_major: int) -> CudnnLibrary:
    folders = [root / name / "lib" for name in (f"cu{cuda_major}", "cublas", "cuda_nvrtc")]
    return _library(folder, ".".join(version.split(".")[:3]), cuda_major, folders)
