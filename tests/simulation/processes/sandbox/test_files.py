"""What programs write, in every way there is: the user's files stay as they are, and the program reads back its own."""

from __future__ import annotations

import ast
import errno
import functools
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fxmem
from fxmem.__main__ import main
from fxmem.hardware import catalogue
from fxmem.simulation.processes.sandbox import overlay, process
from fxmem.simulation.processes.sandbox.overlay import Layers
from fxmem.simulation.processes.sandbox.written_files import PREFIX, WrittenPlace, list_files
from fxmem.simulation.program import Launch
from fxmem.validation.validate import validate_program
from fxmem.whatif.program_step import ProgramCommand

PROGRAM = Path(__file__).parent / "writes.py"
NATIVE = {
    **dict.fromkeys(("write_database", "write_in_c", "remove_in_c", "rename_in_c", "exchange_in_c", "punch_in_c"), "C"),
    "map_tensor": "C++",
    **dict.fromkeys(("run_cp", "run_rm", "run_shell", "run_git", "run_python"), "a child process"),
    **dict.fromkeys(("run_tee", "run_dd", "run_sed"), "a child process"),
}
"""Ways that no Python of this process goes."""
HAS_VIEW = shutil.which("unshare") is not None and not subprocess.call(["unshare", "-Urm", "true"])
needs_view = pytest.mark.skipif(not HAS_VIEW, reason="this machine gives a process no view of its own")


def way_names() -> list[str]:
    """The names of the program's functions that return whether they worked."""
    functions = [each for each in ast.parse(PROGRAM.read_text()).body if isinstance(each, ast.FunctionDef)]
    return [each.name for each in functions if isinstance(each.returns, ast.Name) and each.returns.id == "bool"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the user's: a file for each way, older than anything that is written now."""
    place = tmp_path / "mine"
    for name in (*way_names(), "old/file", "old/other", "kept/file"):
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"kept" if file.parent.name == "kept" else f"the user's own {name}".encode() * 10)
    for each in [*place.rglob("*"), place]:
        os.utime(each, (1_000_000_000, 1_000_000_000))
    return place


def state(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Bytes, times, rights and inode of each file; names and times of each folder; where each link leads."""
    found: dict[str, tuple[Any, ...]] = {}
    for each in sorted([folder, *folder.rglob("*")]):
        status = each.lstat()
        content: Any = os.readlink(each) if each.is_symlink() else sorted(os.listdir(each)) if each.is_dir() else b""
        if stat.S_ISREG(status.st_mode):
            content = each.read_bytes()
        found[str(each)] = (content, status.st_mtime_ns, status.st_mode, status.st_ino, status.st_nlink)
    return found


class Done(NamedTuple):
    """A command that is over."""

    code: int
    out: str
    err: str

    @property
    def ways(self) -> dict[str, str]:
        """What the program said of each way."""
        found: dict[str, str] = json.loads(re.search(r"^WAYS (.*)$", self.err, re.MULTILINE)[1])  # type: ignore[index]
        return found


Run = Callable[..., Done]


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `fxmem run` in the folder; the program's process is forked from this one."""
    monkeypatch.chdir(folder)

    def call(*words: str) -> Done:
        code = main(["run", "--target", "rtx3080", "--until", "end", *words])
        return Done(code, *capfd.readouterr())

    return call


def refuse(*_: object, **__: object) -> None:
    """What a system says that has no namespaces, or no Landlock."""
    raise OSError(errno.EPERM, "Operation not permitted")


LOCKED_DOWN = """
import errno
import sys

from fxmem.__main__ import main
from fxmem.simulation.processes.sandbox import process
from fxmem.simulation.processes.sandbox import process
from fxmem.simulation.processes.sandbox import overlay


def refuse(*_, **__):
    raise OSError(errno.EPERM, "Operation not permitted")


for name in sys.argv[1].split():
    setattr(process, name, refuse)
sys.exit(main(sys.argv[2:]))
"""


def run_locked_down(folder: Path, refused: str, *words: str) -> Done:
    """Run `fxmem run` where the system refuses something, in a process whose forks run backward."""
    command = [sys.executable, "-c", LOCKED_DOWN, refused, "run", "--target", "rtx3080", "--until", "end", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return Done(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.truth
@needs_view
def test_every_way_is_held_and_read_back(run: Run, folder: Path, tmp_path: Path) -> None:
    before, kept = state(folder), tmp_path / "kept"
    done = run("--keep-files", str(kept), str(PROGRAM), str(folder), "clean")
    assert done.code == 0, done.err
    assert len(done.ways) >= 60
    assert {name: said for name, said in done.ways.items() if said != "ok"} == {}
    assert state(folder) == before
    assert re.search(r"^Files +\d+ written, \d+ changed, \d+ removed, apart from yours and kept in", done.out, re.M)
    assert (kept / "write_at_exit").read_bytes() == b"new"  # after the report was made
    assert (kept / "write_in_c").read_bytes() == b"from C"
    assert (kept / "old/inner/file").read_bytes() == b"again"


@pytest.mark.truth
@needs_view
def test_an_ordinary_users_files_are_held(folder: Path) -> None:
    """In a user namespace, folders cannot be moved, and others' files not be copied up with their owner."""
    if os.getuid() == 0:
        for name, mode in (("open_to_append", 0o666), ("kept/file", 0o666), ("kept", 0o777)):
            os.chown(folder / name, 1234, 1234)
            os.chmod(folder / name, mode)
    before = state(folder)
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-m", "fxmem", "run", "--target", "rtx3080"]
    words = ["--until", "end", str(PROGRAM), str(folder), "clean"]
    ended = subprocess.run([*command, *words], cwd=folder, capture_output=True, text=True, check=False)
    done = Done(ended.returncode, ended.stdout, ended.stderr)
    assert done.code == 0, done.err
    assert {name: said for name, said in done.ways.items() if said != "ok"} == {}
    assert state(folder) == before


BESIDE_OTHERS = """
import os
import tempfile
import threading

from fxmem.simulation.processes.sandbox.overlay import Layers, enter_overlay

layers = Layers()
go_on, is_over = os.pipe(), threading.Event()


def come_and_go():
    while not is_over.is_set():
        for each in [tempfile.mkdtemp(dir=place) for place in ("/var/tmp", tempfile.gettempdir()) for _ in range(20)]:
            os.rmdir(each)


if (pid := os.fork()) == 0:
    os.read(go_on[0], 1)
    enter_overlay(layers.folders)
    print(*(line.split(" ")[4] for line in open("/proc/self/mountinfo")), flush=True)
    os._exit(0)
thread = threading.Thread(target=come_and_go)
thread.start()
os.write(go_on[1], b".")
code = os.waitpid(pid, 0)[1]
is_over.set()
thread.join()
layers.close()
assert code == 0
"""


@needs_view
def test_a_view_is_had_beside_others_whose_folders_come_and_go() -> None:
    """A folder with a mount in it is looked at file by file: of what is in `/var/tmp` nothing may be."""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", BESIDE_OTHERS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not [each for each in ended.stdout.split() if each.startswith("/var/tmp/")]


def test_what_another_process_removes_meanwhile_is_left_out_of_a_view(tmp_path: Path) -> None:
    new_root = tmp_path / "root"
    view = overlay._View(str(new_root), [], (), is_root=False)
    (tmp_path / "old/folder").mkdir(parents=True)
    (tmp_path / "old/file").touch()
    (tmp_path / "old/link").symlink_to("file")
    Path(f"{new_root}{tmp_path}/old").mkdir(parents=True)
    entries = list(os.scandir(tmp_path / "old"))
    for each in entries:
        each.is_symlink()
    shutil.rmtree(tmp_path / "old")
    for each in entries:
        view.add(each)
    assert os.listdir(f"{new_root}{tmp_path}/old") == []


ENDINGS = {
    "exception": (1, "the program's own"),
    "interrupt": (130, "interrupted"),
    "kill": (1, "SIGKILL"),
    "memory": (4, "out of memory"),
}


@pytest.mark.truth
@needs_view
@pytest.mark.parametrize("ending", ENDINGS)
def test_files_are_held_however_the_program_ends(
    run: Run, folder: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, aside, close = state(folder), [], Layers.close
    monkeypatch.setattr(Layers, "close", lambda layers: (aside.extend(layers.folders), close(layers)))
    done = run(str(PROGRAM), str(folder), ending)
    code, said = ENDINGS[ending]
    assert (done.code, said in done.err) == (code, True), done.err
    assert set(done.ways.values()) == {"ok"}
    assert state(folder) == before
    assert aside
    assert not any(map(os.path.exists, aside))


@pytest.mark.truth
def test_redirected_names_of_one_file_lead_to_what_was_written_by_one_of_them(tmp_path: Path) -> None:
    first, second, alone = (tmp_path / name for name in ("first", "second", "alone"))
    first.write_text("one")
    second.hardlink_to(first)
    alone.write_text("one")
    with fxmem.record("h100", steps=1):
        torch.ones(1, device="cuda")
        with first.open("a") as file:
            file.write(" more")
        assert (second.read_text(), alone.read_text()) == ("one more", "one")
        second.write_text("anew")
        assert (first.read_text(), alone.read_text()) == ("anew", "one")
    assert (first.read_text(), second.read_text()) == ("one", "one")


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_without_a_view_python_is_redirected_and_all_else_refused(folder: Path) -> None:
    before = state(folder)
    done = run_locked_down(folder, "enter_overlay", str(PROGRAM), str(folder), "clean")
    assert done.code == 0, done.err
    assert {name for name, said in done.ways.items() if said != "ok"} == set(NATIVE)
    assert state(folder) == before
    assert "a child process writes is refused" in " ".join(done.out.split())


@pytest.mark.truth
def test_without_a_guard_python_is_redirected(folder: Path) -> None:
    """As on macOS: what no Python of this process writes is real, and the report says so."""
    ways = [name for name in way_names() if name not in NATIVE]
    program = folder.parent / "train.py"
    listed = f"WAYS = [globals()[name] for name in {ways}]"
    program.write_text(re.sub(r"^WAYS = .*$", listed, PROGRAM.read_text(), flags=re.M))
    before = state(folder)
    done = run_locked_down(folder, "enter_overlay refuse_writes", str(program), str(folder), "clean")
    assert done.code == 0, done.err
    assert {name: said for name, said in done.ways.items() if said != "ok"} == {}
    assert state(folder) == before
    assert "a child process writes is real" in " ".join(done.out.split())


LINKS = """
import os
from pathlib import Path
import torch

torch.nn.Linear(8, 8).cuda()
Path("theirs").write_text("a" * 5)  # the user's link to the user's file
with open("relative", "a") as file:
    file.write("more")
os.symlink(os.path.abspath("kept"), "folder")
Path("folder/file").write_text("through a folder")
os.symlink("nowhere", "dangling")
Path("dangling").write_text("made")
os.symlink("loop", "loop")
os.remove("relative")
print("LINKS", Path("theirs").read_text(), Path("open_to_append").read_text()[-4:], Path("kept/file").read_text())
print("LINKS", Path("nowhere").read_text(), os.path.exists("loop"), os.path.islink("theirs"), os.listdir("folder"))
"""


@pytest.mark.truth
@pytest.mark.parametrize("refused", ["enter_overlay", "enter_overlay refuse_writes"])
def test_without_a_view_a_link_leads_out_of_nothing(folder: Path, refused: str) -> None:
    (folder / "links.py").write_text(LINKS)
    (folder / "theirs").symlink_to(folder / "open_to_write")
    (folder / "relative").symlink_to("open_to_append")
    before = state(folder)
    done = run_locked_down(folder, refused, "links.py")
    assert done.code == 0, done.err
    assert re.findall("^LINKS (.*)", done.err, re.M) == [
        "aaaaa more through a folder",
        "made False True ['file']",
    ]
    assert state(folder) == before


def test_in_a_live_process_python_is_redirected_and_child_processes_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder.parent / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent / "temporary"))
    before = state(folder)
    with fxmem.record("rtx3080") as recorded:
        model = torch.nn.Linear(8, 8).cuda()
        torch.save(model.state_dict(), "save_card")
        assert torch.load("save_card")["weight"].is_cuda
        with io.FileIO("open_to_write", "w") as raw:
            assert isinstance(raw, io.FileIO)
        with pytest.raises(FileExistsError):
            io.FileIO("open_to_append", "x")
        assert Path("open_to_write").read_bytes() == b""
        os.remove("remove")
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("3")
            file.flush()
            assert subprocess.check_output(["cat", file.name]) == b"3"
        if sys.platform == "linux":
            assert subprocess.run(["rm", "run_rm"], capture_output=True, check=False).returncode == 1
            assert os.system("echo shell > run_shell 2>/dev/null") != 0
            assert os.system("exit 3") >> 8 == 3
            with pytest.raises(FileNotFoundError):
                subprocess.run(["no-such-program"], check=False)
    assert state(folder) == before
    assert recorded.files is not None
    assert {(each.path, each.change) for each in recorded.files.written} == {
        ("open_to_write", "changed"),
        ("remove", "removed"),
        ("save_card", "changed"),
    }
    assert not list((folder.parent / "temporary").iterdir())


TRAINER = """
import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=1, eos_token_id=1)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
settings = dict(save_steps=1, save_total_limit=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
arguments = TrainingArguments("out", per_device_train_batch_size=4, num_train_epochs=1, report_to="none", **settings)
for resume in (False, True):
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
trainer.save_model("final")
print("SAVED", sorted(os.listdir("out")), os.path.getsize("final/model.safetensors") > 1000)
"""


@pytest.mark.truth
def test_a_trainer_saves_rotates_and_resumes(run: Run, folder: Path) -> None:
    (folder / "train.py").write_text(TRAINER)
    before = state(folder)
    done = run("train.py")
    assert done.code == 0, done.err
    assert re.search(r"^SAVED \['checkpoint-\d'.*\] True$", done.err, re.M)
    assert state(folder) == before
    assert "final/model.safetensors" in run("--json", "-", "train.py").out


SLEEPER = """
import subprocess
import time
import torch

torch.nn.Linear(8, 8).cuda()
open("write_at_exit", "w").close()
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("ASLEEP", child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.truth
@needs_view
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=lambda each: each.name)
def test_nothing_is_left_when_fxmem_itself_is_ended(folder: Path, by: signal.Signals) -> None:
    (folder / "sleep.py").write_text(SLEEPER)
    before = state(folder)
    command = [sys.executable, "-m", "fxmem", "run", "--target", "rtx3080", "sleep.py"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as fxmem_:
        assert fxmem_.stderr is not None
        asleep = next(line for line in fxmem_.stderr if line.startswith("ASLEEP"))
        opened = Path(f"/proc/{fxmem_.pid}/fd").iterdir()
        aside = [name for each in opened if PREFIX in (name := os.readlink(each))]
        assert aside
        fxmem_.send_signal(by)
        said = fxmem_.stderr.read()  # until the process that clears up, which has it too, is over
        # What it has printed is read before it sleeps, where the machine has other work.
        at = "" if by == signal.SIGKILL else r"fxmem: terminated; the program was at sleep\.py:(9|10)\n"
        assert re.fullmatch(at, said), said
    assert state(folder) == before
    assert not any(map(os.path.exists, aside))
    deadline = time.monotonic() + 60
    while (child := Path("/proc", asleep.split()[1], "exe")).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not child.exists()


HANDLES = """
import os, signal, time, torch
torch.nn.Linear(8, 8).cuda()
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
there, here = os.pipe()
if (pid := os.fork()) == 0:
    os.write(here, b".")  # a signal before a fork is over is lost
    time.sleep(60)
    os._exit(0)
os.read(there, 1)
os.kill(pid, signal.SIGTERM)
print("CHILD", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.truth
@needs_view
def test_a_program_s_own_handler_is_its_children_s(run: Run, folder: Path) -> None:
    (folder / "handles.py").write_text(HANDLES)
    assert "CHILD 7" in run("handles.py").err


@pytest.mark.truth
@needs_view
def test_a_group_that_is_terminated_says_where_the_program_was(folder: Path) -> None:
    (folder / "wait.py").write_text("import time\nprint('WAITS', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "fxmem", "run", "--target", "rtx3080", "wait.py"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True) as fxmem_:
        assert fxmem_.stderr is not None
        assert any(line == "WAITS\n" for line in fxmem_.stderr)
        time.sleep(0.5)
        os.killpg(fxmem_.pid, signal.SIGTERM)  # as `timeout` does
        assert fxmem_.stderr.read() == "fxmem: terminated; the program was at wait.py:3\n"


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}left" / "upper" / "without rights").mkdir(parents=True)
    (tmp_path / f"{PREFIX}left" / "upper" / "without rights" / "file").touch()
    (tmp_path / f"{PREFIX}left" / "upper" / "without rights").chmod(0)
    made = Layers(())
    assert [str(each) for each in tmp_path.iterdir()] == made.folders
    made.close()
    assert not list(tmp_path.iterdir())


def test_what_another_process_removes_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that start at once, both find what a third has left."""
    left = [tmp_path / f"{PREFIX}{number}" for number in range(2)]
    for folder in left:
        folder.mkdir()

    def remove_others() -> int:  # as soon as this process looks at its first
        for name in os.listdir(tmp_path)[1:]:
            (tmp_path / name).rmdir()
        return tmp_path.stat().st_uid

    monkeypatch.setattr(os, "getuid", remove_others)
    overlay._remove_abandoned(str(tmp_path))
    assert not os.listdir(tmp_path)


@needs_view
def test_what_is_written_is_bounded(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sleep.py").write_text(SLEEPER)
    before = state(folder)
    monkeypatch.setattr(Layers, "are_full", True)
    done = run("sleep.py")
    assert done.code == 3
    assert "has taken half of what was free there. Free some, or" in done.err.splitlines()[-1]
    assert state(folder) == before


FOLDERS = """
import os, shutil, sys, torch
torch.nn.Linear(8, 8).cuda()
shutil.rmtree("old")
os.mkdir("old")
open("old/new", "w").close()
os.rename("kept", "moved")
os.write(int(sys.argv[1]), b"by descriptor")
assert open("open_to_update").read().startswith("by descriptor")
if os.getuid() == 0:
    open("link", "a").write("by one name")
    assert open("linked").read().endswith("by one name")
"""


@pytest.mark.truth
@needs_view
def test_folders_that_are_moved_or_made_anew_are_listed(run: Run, folder: Path) -> None:
    """An overlay has for them no more than a note: what lies in them is told from the folders below it."""
    (folder / "train.py").write_text(FOLDERS)
    os.link(folder / "link", folder / "linked")
    before, given = state(folder), os.open(folder / "open_to_update", os.O_RDWR)
    try:
        done = run("--json", "-", "--keep-files", str(folder.parent / "out"), "train.py", str(given))
        assert done.code == 0, done.err
        assert os.lseek(given, 0, os.SEEK_CUR) == 0
    finally:
        os.close(given)
    assert state(folder) == before
    written = json.loads(done.out)["step"]["program"]["files"]["written"]
    assert [(each["change"], each["path"]) for each in written if each["path"] != "link"] == [
        ("removed", "kept/file"),
        ("new", "moved/file"),
        ("removed", "old/file"),
        ("new", "old/new"),
        ("removed", "old/other"),
        ("changed", "open_to_update"),
    ]
    assert (folder.parent / "out/moved/file").read_bytes() == b"kept"


@pytest.mark.truth
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("view", [pytest.param(True, marks=needs_view), False])
def test_a_log_that_others_write_to_meanwhile_is_nothing_that_the_program_wrote(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, view: bool, writes: bool
) -> None:
    """A shell's `3>>log` is of every process that it starts."""
    wrote = 'os.write(int(sys.argv[1]), b"by the program")' if writes else ""
    (folder / "train.py").write_text(f"import os, sys, torch\ntorch.nn.Linear(8, 8).cuda()\n{wrote}\n")
    if not view:
        monkeypatch.setattr(process, "enter_overlay", refuse)
    part = process.part_descriptors

    def part_and_grow(files: Mapping[int, str], find_place: Callable[[str], str]) -> None:
        others = [os.dup(each) for each, file in files.items() if file.endswith("open_to_append")]
        part(files, find_place)
        for each in others:
            os.write(each, b"by others")

    monkeypatch.setattr(process, "part_descriptors", part_and_grow)
    log = os.open(folder / "open_to_append", os.O_WRONLY | os.O_APPEND)
    try:
        done = run("--json", "-", "train.py", str(log))
    finally:
        os.close(log)
    assert done.code == 0, done.err
    assert (folder / "open_to_append").read_text().endswith("appendby others")
    files = json.loads(done.out)["step"]["program"]["files"]
    assert [each["path"] for each in files["written"]] == ["open_to_append"] * writes


def test_a_copy_that_is_older_than_the_program_is_none_of_what_it_wrote(tmp_path: Path) -> None:
    """A view of an ordinary user's has copies of the files beside what is mounted."""
    original, place = tmp_path / "log", tmp_path / "copy"
    place.write_text("begun")
    original.write_text("begun, and gone on")
    listed = functools.partial(list_files, [WrittenPlace(str(place), str(original))], [str(tmp_path)], ())
    made = place.stat().st_ctime_ns
    assert listed(made + 1) == ()
    assert [each.change for each in listed(made)] == ["changed"]


@pytest.mark.truth
@needs_view
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="one user runs as another")
def test_a_users_folder_below_ones_of_others() -> None:
    """An overlay copies each folder above it up, whose owner a namespace of one user does not have (EOVERFLOW)."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        here, elsewhere = Path(scratch, "a/b/here"), Path(scratch, "c/elsewhere")
        for path in (here, elsewhere):
            path.mkdir(parents=True)
            os.chown(path, 1234, 1234)
        for path in (Path(scratch), *Path(scratch).rglob("*")):
            path.chmod(0o755)
        program = here / "train.py"
        program.write_text(
            "import os, torch\ntorch.nn.Linear(8, 8).cuda()\n"
            f"open('x.txt', 'w').write('1')\nopen('{elsewhere}/x.txt', 'w').write('1')\n"
            f"print('MAY', os.access('{elsewhere.parent}', os.W_OK), os.access('.', os.W_OK))\n"
        )
        user = ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"]
        environ = {**os.environ, "HOME": str(here), "USER": "user", "PYTHONPATH": str(Path(fxmem.__file__).parents[1])}
        command = [*user, sys.executable, "-m", "fxmem", "run", "--target", "rtx3080", "train.py"]
        done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "MAY False True" in done.stderr
        assert "apart from yours and dropped: x.txt" in done.stdout
        assert list(here.iterdir()) == [program]
        assert list(elsewhere.iterdir()) == []
        left = [each for place in ("/var/tmp", "/tmp") for each in Path(place).glob(f"{PREFIX}*")]
        assert [each for each in left if each.lstat().st_uid == 1234] == []


TRAINING = """
import os, sys, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(int(sys.argv[1]), 8).to(device)
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.randn(8, int(sys.argv[1])).to(device)).sum().backward()
    optimizer.step()
    assert len(open("open_to_append").read()) > 99
    open("open_to_append", "a").write("x")
    torch.save(model.state_dict(), "open_to_write")
    os.remove("remove")
    open("remove", "w").close()
"""


@pytest.mark.truth
def test_questions_that_run_a_program_leave_files_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    program = folder.parent / "train.py"
    program.write_text(TRAINING)
    before = state(folder)
    command = ProgramCommand(Launch(str(program), ("{}",)), catalogue.target("rtx3080"), 2)
    for size in (8, 16):
        step = command.at_sizes([size], command.target).run().step.program
        assert step is not None
        assert step.files is not None
        assert [(Path(each.path).name, each.change) for each in step.files.written] == [
            (name, "changed") for name in ("open_to_append", "open_to_write", "remove")
        ]
    assert state(folder) == before
    validate_program([str(program), "8"], steps=2)
    assert state(folder) != before  # the real run's own


@pytest.mark.truth
@pytest.mark.parametrize("view", [pytest.param(True, marks=needs_view)])
def test_where_no_fork_runs_backward_a_new_process_is_started(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, view: bool
) -> None:
    """As after a compiled backward in this process: "Unable to handle autograd's threading"."""
    (folder / "train.py").write_text(TRAINING)
    before, parent = state(folder), os.getpid()
    works = process.may_run_backward
    monkeypatch.setattr(process, "may_run_backward", lambda: os.getppid() != parent and works())
    if not view:
        monkeypatch.setattr(process, "enter_overlay", refuse)
    done = run("--json", "-", "train.py", "8")
    assert done.code == 0, done.err
    files = json.loads(done.out)["step"]["program"]["files"]
    assert [each["path"] for each in files["written"]] == ["open_to_append", "open_to_write", "remove"]
    assert state(folder) == before
    (folder.parent / "kill.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert "SIGKILL" in run(str(folder.parent / "kill.py")).err


@pytest.mark.truth
def test_a_program_that_may_write_does(run: Run, folder: Path) -> None:
    done = run("--write", str(PROGRAM), str(folder), "clean")
    assert done.code == 0, done.err
    assert (folder / "write_in_c").read_bytes() == b"from C"
    assert "Files" not in done.out


@needs_view
def test_open_is_the_builtin_that_it_is(run: Run, folder: Path) -> None:
    """VAR's `train.py` leaves `print` alone where its type is not that of `open`."""
    (folder / "train.py").write_text(
        "import io, torch\n"
        "torch.nn.Linear(8, 8).cuda()\n"
        "assert type(print) is type(open) and open is io.open, type(open)\n"
    )
    assert run("train.py").code == 0


@pytest.mark.truth
@needs_view
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="one user runs as another")
def test_an_ordinary_user_writes_to_what_others_let_him() -> None:
    """A namespace of one user has no number for the others, with which a file would be copied up."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        shared = Path(folder, "shared.txt")
        shared.write_text("theirs")
        for path, user, mode in ((folder, 1234, 0o755), (home, 1234, 0o755), (shared, 4321, 0o666)):
            os.chown(path, user, user)
            os.chmod(path, mode)
        Path(home, "train.py").write_text(
            f"import torch\ntorch.nn.Linear(8, 8).cuda()\nopen({str(shared)!r}, 'a').write(' and mine')\n"
            f"print('READ', open({str(shared)!r}).read())\n"
        )
        user = ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"]
        command = [sys.executable, "-m", "fxmem", "run", "--target", "rtx3080", "--until", "end", "train.py"]
        environ = {**os.environ, "HOME": home, "PYTHONPATH": str(Path(fxmem.__file__).parents[1])}
        ended = subprocess.run([*user, *command], cwd=home, env=environ, capture_output=True, text=True, check=False)
        assert "READ theirs and mine" in ended.stdout + ended.stderr, ended.stderr
        assert shared.read_text() == "theirs"
