"""Results of earlier commands, kept on disk: read where nothing that they depend on has changed.

A result is found by the options that decide it, the versions of Python and of every installed package, fxmem's own
files, the environment, and the folder. With it stand the files that were read while it was made (the user's modules,
configurations, data), each with a hash of its content, and the folders that they lie in, each with the names of its
Python files. Any doubt is a miss: a result that cannot be read or was changed, that is a link or no file, a file that
was written, a connection that was opened. Whatever cannot be written is not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fxmem import __version__
from fxmem.cli.options import ANALYSIS, GENERATION
from fxmem.cli.output import named_files
from fxmem.cli.progress import Progress, say
from fxmem.cli.step import analyze_generation, analyze_model, is_report
from fxmem.errors import UsageError
from fxmem.records.files import read_kept, write_kept

if TYPE_CHECKING:
    from fxmem.records.profile import Record, Report, Timeline
    from fxmem.simulation.analysis import Analysis
    from fxmem.simulation.generation import AnyAnalysis

_Kept = TypeVar("_Kept", bound="Record")

_ANALYSIS = tuple(each.dest for each in ANALYSIS if each.dest not in ("quiet", "cache", "download"))
_FORMAT = 2
"""One more where the entry's layout or what it depends on changes."""
_MAX_BYTES = 256 << 20
"""Of all entries together; the oldest go first."""
_PREFIX = "result-"
_VOLATILE = ("_", "SHLVL", "OLDPWD", "COLUMNS", "LINES", "NO_COLOR", "PYTEST_CURRENT_TEST")
"""Environment variables that decide nothing but how text is shown."""


def keep(
    options: argparse.Namespace, what: type[_Kept], make: Callable[[], _Kept], further: Iterable[str] = ()
) -> _Kept:
    """Read the result that was kept for these options, or make it and keep it.

    Args:
        options: the command's.
        what: the record that the result is.
        make: makes it.
        further: names of options that decide the result, beside those of an analysis.
    """
    folder = cache_folder()
    if (
        folder is None
        or not options.cache
        or options.values == "real"
        or options.cudnn
        or "FXMEM_NO_CACHE" in os.environ
    ):
        return make()
    given = {name: getattr(options, name) for name in (*_ANALYSIS, *further)}
    if options.mode == "generate":
        given |= {each.dest: getattr(options, each.dest) for each in GENERATION}
    path = folder / f"{_PREFIX}{_name(given, what)}.json"
    with contextlib.suppress(OSError, ValueError):
        if (found := _read(path, what)) is not None:
            if not options.quiet:
                say(f"nothing has changed since this {what.__name__.lower()} was made; --no-cache makes it anew")
            return found
    with _Reads(given) as reads:
        result = make()
    with contextlib.suppress(OSError, ValueError, UsageError):
        if not reads.doubts:
            _write(path, result, reads)
    return result


def kept_report(options: argparse.Namespace) -> tuple[Report, Timeline]:
    """Analyse the step that the options describe, or read its report where it was kept."""
    from fxmem.memory import report_reader

    def make() -> Analysis:
        with Progress(options.quiet) as progress:
            return analyze_model(options, progress)

    report, _ = _keep_analysis(options, make)
    return report, report_reader.timeline(report)


def kept_analysis(options: argparse.Namespace, progress: Progress) -> Analysis:
    """Analyse the step of the options, or begin from its report where one is kept."""
    report, made = _keep_analysis(options, lambda: analyze_model(options, progress))
    return analyze_model(options, progress, report) if made is None else made


def kept_step(options: argparse.Namespace, progress: Progress) -> AnyAnalysis:
    """`kept_analysis`; a generation where the options say so, which is not kept."""
    return analyze_generation(options, progress) if options.mode == "generate" else kept_analysis(options, progress)


def _keep_analysis(options: argparse.Namespace, analyse: Callable[[], Analysis]) -> tuple[Report, Analysis | None]:
    """The report of the analysis, and the analysis where it was made now."""
    from fxmem.records.profile import Report

    made: list[Analysis] = []

    def make() -> Report:
        made.append(analyse())
        return made[0].report()

    report = keep(options, Report, make)
    return report, made[0] if made else None


def load_or_analyze(options: argparse.Namespace) -> tuple[Report, Timeline]:
    """Load the report that `options.model` names, from a file or stdin, or analyse the model."""
    if is_report(options.model):
        from fxmem.memory import report_reader

        report = report_reader.load_report(Path(options.model))
        return report, report_reader.timeline(report)
    return kept_report(options)


def cache_folder() -> Path | None:
    """Where results are kept: a folder beside cuDNN's answers; None where nothing is."""
    from fxmem.hardware.workspaces import cache_directory

    found = cache_directory()
    return None if found is None else found / "results"


def entries(folder: Path) -> list[Path]:
    """The files of kept results, the one used last first; links and pipes in their place among them."""
    try:
        found = [path for path in folder.iterdir() if path.name.startswith(_PREFIX)]
        return sorted(
            (path for path in found if not stat.S_ISDIR(path.lstat().st_mode)),
            key=lambda path: path.lstat().st_mtime,
            reverse=True,
        )
    except OSError:
        return []


# --- what a result depends on -----------------------------------------------------------------------------------------


def _name(given: Mapping[str, Any], what: type[Record]) -> str:
    """A hash of all that is known before the work."""
    environment = {name: value for name, value in os.environ.items() if name not in _VOLATILE}
    about = [_FORMAT, __version__, what.__name__, sys.version, os.getcwd(), sys.path, os.cpu_count(), environment]
    text = json.dumps([about, dict(given), _packages(), _own_files()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _packages() -> list[str]:
    """The name and version of every installed package, as their metadata's folders have them."""
    found = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found += [name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info", ".pth"))]
    return sorted(found)


@functools.cache
def _own_files() -> list[tuple[str, int, int]]:
    """fxmem's files, as an installation from a clone may change without its version."""
    root = Path(__file__).parents[1]
    files = [path for path in root.rglob("*") if path.suffix in (".py", ".json")]
    return sorted((str(path), (status := path.lstat()).st_mtime_ns, status.st_size) for path in files)


class _Reads:
    """A context that notes which files are read, and what makes a result doubtful."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.files = named_files(given)
        self.doubts: list[str] = []
        self._written: set[str] = set()

    def __enter__(self) -> _Reads:
        _install_hook()
        _watching.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _watching.remove(self)
        self.doubts += [name for name in self._written if not _is_scratch(name)]
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        self.files |= {file for file in files if isinstance(file, str) and os.path.isabs(file)}  # imported before, too
        for around in _watching[-1:]:  # a plan depends on all that its analysis does
            around.files |= self.files
            around.doubts += self.doubts

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an event of `sys.audit`."""
        if event == "socket.connect":
            self.doubts.append("a connection")
        elif isinstance(arguments[0], (str, bytes)):
            name, mode, flags = arguments
            is_written = bool(flags & (os.O_WRONLY | os.O_RDWR)) or bool(mode and set(str(mode)) & set("wax+"))
            (self._written if is_written else self.files).add(os.path.abspath(os.fsdecode(name)))

    def hashes(self) -> dict[str, str]:
        """The content of each file that is the user's, and the names in its folder."""
        sources = {_source(name) for name in self.files}
        sources = {name for name in sources if not _is_installed(name) and not _is_scratch(name)}
        return {name: _hash(name) for name in sorted(sources | {os.path.dirname(name) for name in sources})}


_watching: list[_Reads] = []


@functools.cache
def _install_hook() -> None:
    """Watch what is opened; a hook cannot be taken away again, so there is one, which mostly does nothing."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _watching and event in ("open", "socket.connect"):
            _watching[-1].note(event, arguments)

    sys.addaudithook(hook)


def _source(name: str) -> str:
    """The source of a compiled module, which lies beside the folder `__pycache__`."""
    folder, file = os.path.split(name)
    if not file.endswith(".pyc") or os.path.basename(folder) != "__pycache__":
        return name
    return os.path.join(os.path.dirname(folder), file.partition(".")[0] + ".py")


def _is_installed(name: str) -> bool:
    """Whether the file is of Python, a package or fxmem, or the system's own. Their versions stand for these."""
    roots = (sys.prefix, sys.base_prefix, sys.exec_prefix, *_roots(), "/proc", "/sys", "/dev")
    return any(name.startswith(root.rstrip(os.sep) + os.sep) for root in roots)


@functools.cache
def _roots() -> tuple[str, ...]:
    import sysconfig

    paths = sysconfig.get_paths()
    return (*(paths[each] for each in ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))


def _is_scratch(name: str) -> bool:
    """Whether the file is of no account: kept by us, a compiled module's, a device, or temporary and gone."""
    folder = cache_folder()
    ours = folder is not None and (name + os.sep).startswith(str(folder.parent.absolute()) + os.sep)
    gone = name.startswith(tempfile.gettempdir() + os.sep) and not os.path.exists(name)
    return ours or gone or "__pycache__" in name or name.startswith("/dev/")


def _hash(name: str) -> str:
    """The hash of a file's content, or of a folder's names; a word for what is neither."""
    if os.path.isdir(name):
        return hashlib.sha256(
            "\0".join(sorted(each for each in os.listdir(name) if each.endswith(".py"))).encode()
        ).hexdigest()
    if not os.path.isfile(name):
        return "none"
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- files ------------------------------------------------------------------------------------------------------------


def _read(path: Path, what: type[_Kept]) -> _Kept | None:
    """The result in a file, if all that it depends on is as it was."""
    depends, _, result = read_kept(path).partition("\n")
    if any(_hash(name) != value for name, value in json.loads(depends).items()):
        return None
    found = what.model_validate_json(result)
    with contextlib.suppress(OSError):
        os.utime(path)
    return found


def _write(path: Path, result: Record, reads: _Reads) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_kept(path, json.dumps(reads.hashes()) + "\n" + result.model_dump_json() + "\n")
    total = 0
    for each in entries(path.parent):
        total += each.lstat().st_size
        if total > _MAX_BYTES:
            each.unlink(missing_ok=True)
