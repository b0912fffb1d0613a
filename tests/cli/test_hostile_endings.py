"""Commands that are interrupted, told to end or out of disk: what was there stays whole, nothing else is left, and one
line says why."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fxmem
from fxmem.__main__ import main
from fxmem.errors import UsageError
from fxmem.records import files
from fxmem.records.files import write_bytes, write_text
from tests.memory.test_report_reader import small_report

SLOW = """
import pathlib, time, torch

class Slow(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        pathlib.Path("started").touch()
        for _ in range(6000):  # a signal that comes just before a sleep begins does not wake it
            time.sleep(0.1)
"""

SLOW_TO_WRITE = """
import os, pathlib, sys, time
import fxmem.__main__

def replace(*paths):
    pathlib.Path("started").touch()
    for _ in range(6000):  # as above
        time.sleep(0.1)

os.replace = replace
sys.exit(fxmem.__main__.main())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    (tmp_path / "slow_to_write.py").write_text(SLOW_TO_WRITE, encoding="utf-8")
    (tmp_path / "good.json").write_text(small_report().model_dump_json(), encoding="utf-8")
    for name in ("out.json", "out.svg", "out.html"):
        (tmp_path / name).write_text("here before", encoding="utf-8")
    return tmp_path


def ended(folder: Path, how: signal.Signals, *words: str) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a command that gets a signal once it has made the file `started`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(fxmem.__file__).parent.parent),
        "FXMEM_CACHE_DIR": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while process.poll() is None and not (folder / "started").exists():
                time.sleep(0.02)
            process.send_signal(how)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, out, err


COMMANDS = {
    "while the model runs": (
        "-m fxmem analyze slow.py:Slow --input 2x3 --target cpu --quiet --json out.json --svg out.svg"
    ),
    "while a file is written": "slow_to_write.py graph good.json -o out.svg",
    "while a page is written": "slow_to_write.py report good.json -o out.html",
    "while a report is written": "slow_to_write.py show good.json --json out.json",
}


@pytest.mark.truth
@pytest.mark.skipif(os.name != "posix", reason="needs the signals of a Unix")
@pytest.mark.parametrize(("how", "words"), [(signal.SIGINT, b"interrupted"), (signal.SIGTERM, b"terminated")])
@pytest.mark.parametrize("when", COMMANDS)
def test_a_command_that_is_ended_leaves_what_was_there(
    folder: Path, when: str, how: signal.Signals, words: bytes
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert ended(folder, how, *COMMANDS[when].split()) == (128 + how, b"", b"fxmem: %s\n" % words)
    (folder / "started").unlink()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_handler_of_somebody_elses_stays() -> None:
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert main(["show", "good.json"]) == 0
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert main(["show", "good.json"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


# --- no room ----------------------------------------------------------------------------------------------------------

WRITERS = {
    "show": "show good.json --json out.json",
    "graph": "graph good.json -o out.svg",
    "graph --by time": "graph good.json --by time -o out.svg",
    "report": "report good.json -o out.html",
    "show --by line": "show good.json --by line --html out.html",
    "show --by layer": "show good.json --by layer --json out.json",
    "compare": "compare good.json good.json --json out.json",
    "export": "export good.json --to csv -o out.json",
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_full_disk_leaves_what_was_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, writer: str, where: str
) -> None:
    class Full:
        def __init__(self, path: Any, mode: str) -> None:
            self.file = open(path, mode)  # noqa: SIM115

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *raised: Any) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def replace(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "write":
        monkeypatch.setattr(files, "open", Full, raising=False)
    else:
        monkeypatch.setattr(os, "replace", replace)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(WRITERS[writer].split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"fxmem: expected a file that can be written, got 'out\.\w+': No space left on device\n", err)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# --- no memory --------------------------------------------------------------------------------------------------------

SHORTAGES = [
    MemoryError(),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.parametrize("around", [None, ImportError("see the manual"), UsageError("expected torchvision")])
def test_a_machine_without_memory_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shortage: Exception, around: Exception | None
) -> None:
    def fail(*arguments: Any) -> None:
        if around is None:
            raise shortage
        raise around from shortage

    monkeypatch.setattr("fxmem.memory.report_reader.load_report", fail)
    assert main(["show", "good.json"]) == 3
    err = capsys.readouterr().err
    assert re.fullmatch(r"fxmem: expected more memory than this process may take.*, got [^\n]*\n", err)
    assert type(shortage).__name__ in err


def test_a_file_s_name_is_no_shortage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "std::bad_alloc"]) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space that holds")
@pytest.mark.parametrize("limit", [300_000_000, 1_500_000_000])
def test_a_limit_of_memory_is_named(limit: int) -> None:
    import resource

    done = subprocess.run(
        [sys.executable, "-m", "fxmem", "analyze", "torch.nn:Identity", "--input", "2x3", "--target", "cpu"],
        env={**os.environ, "PYTHONPATH": str(Path(fxmem.__file__).parent.parent), "FXMEM_CACHE_DIR": ""},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3)
    if done.returncode == 3:
        assert "RLIMIT_AS (ulimit -v) is " in done.stderr.splitlines()[-1]


# --- what is read -----------------------------------------------------------------------------------------------------

OTHER_INPUTS = {
    "a plan": "report good.json --plan in.json -o out.html",
    "a report under a plan": "graph good.json --by time --after in.json -o out.svg",
    "a second report": "compare good.json in.json --markdown out.json",
    "a target": "analyze slow.py:Slow --target in.json --json out.json",
    "a snapshot": "validate slow.py:Slow --target h100 --snapshot in.json --json out.json",
    "a configuration": "analyze hf:in.json --json out.json",
    "a batch": "analyze slow.py:Slow --input x:in.json:make --svg out.svg",
    "a setting": "analyze slow.py:Slow --set file=in.json --json out.json",
    "a program": "run --json out.json in.json",
    "a program's argument": "run --json out.json slow.py in.json",
    "another output": "show good.json --json in.json --svg out.svg",
}
LINKS: dict[str, Callable[[str, str], object]] = {"a link": os.symlink, "a hard link": os.link}


@pytest.mark.skipif(os.name != "posix", reason="needs links as a Unix has them")
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("command", [*WRITERS.values(), *OTHER_INPUTS.values()])
def test_what_is_read_is_never_overwritten(
    capsys: pytest.CaptureFixture[str], folder: Path, command: str, link: str
) -> None:
    (name,) = (word for word in command.split() if word.startswith("out."))
    read = "in.json" if "in.json" in command else "good.json"
    shutil.copy("good.json", "in.json")
    os.unlink(name)
    LINKS[link](read, name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"fxmem: expected --\w+ to name a file that no other argument names, got '\w+\.\w+'\n", err)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("output", ["good.json", "./good.json", "../{}/good.json", "{}"])
def test_a_report_is_not_overwritten_by_what_is_made_of_it(
    capsys: pytest.CaptureFixture[str], folder: Path, output: str
) -> None:
    before = (folder / "good.json").read_bytes()
    name = output.format(folder / "good.json" if output == "{}" else folder.name)
    assert main(["export", "good.json", "--to", "csv", "-o", name]) == 2
    assert "that no other argument names" in capsys.readouterr().err
    assert (folder / "good.json").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_report_on_stdin_is_not_overwritten(folder: Path) -> None:
    command = f"'{sys.executable}' -m fxmem show - --json good.json < good.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(fxmem.__file__).parent.parent)}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"that no other argument names" in done.stderr


def test_json_replaces_json_alone(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """In `fxmem run --json train.py other.py` the program is meant, not the report."""
    Path("train.py").write_text("import torch\n", encoding="utf-8")
    assert main(["show", "good.json", "--json", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "fxmem: expected --json to name a new file, or one of JSON, got 'train.py', which is something else\n"
    )
    assert Path("train.py").read_text(encoding="utf-8") == "import torch\n"
    for _ in range(2):
        assert main(["show", "good.json", "--json", "again", "--quiet"]) == 0


# --- what is written --------------------------------------------------------------------------------------------------


def test_what_is_written_is_whole_readable_by_others_and_alone(folder: Path) -> None:
    write_bytes(folder / "new", b"one")
    write_text(folder / "new", "zwei \ud800")
    assert (folder / "new").read_bytes() == b"zwei \\ud800"
    mask = os.umask(0)
    os.umask(mask)
    assert (folder / "new").stat().st_mode & 0o777 == 0o666 & ~mask or os.name != "posix"
    assert not [name for name in os.listdir() if name.startswith(".")]


@pytest.mark.skipif(os.name != "posix", reason="needs links as a Unix has them")
def test_a_link_stays_a_link(folder: Path) -> None:
    (folder / "link").symlink_to("out.json")
    write_text(folder / "link", "new")
    assert (folder / "link").is_symlink()
    assert (folder / "out.json").read_text() == "new"


@pytest.mark.parametrize("name", ["nowhere/file", "a\0b", "n" * 300])
def test_where_nothing_can_be_written(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="expected a file that can be written"):
        write_text(folder / name, "x")
    assert not [name for name in os.listdir() if name.startswith(".")]


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_whoever_reads_the_first_line_may_leave(folder: Path) -> None:
    command = f"'{sys.executable}' -m fxmem show good.json | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(Path(fxmem.__file__).parent.parent)}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count(b"\n")) == (0, b"", 1)


@pytest.mark.parametrize("daemon", [True, False])
def test_a_process_ends_with_its_handlers_run_and_its_threads_waited_for(daemon: bool) -> None:
    program = (
        "import atexit, threading, time; from fxmem.__main__ import run_process; atexit.register(print, 'handled'); "
        f"rest = lambda: (time.sleep(600) if {daemon} else threading.main_thread().join(5), print('waited')); "
        f"threading.Thread(target=rest, daemon={daemon}).start(); run_process()"
    )
    ended = subprocess.run([sys.executable, "-c", program, "show", "none"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("fxmem: ")
    assert ended.stdout.split() == (["handled"] if daemon else ["waited", "handled"])
