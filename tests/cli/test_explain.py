"""`fxmem explain`: texts, snapshots and programs, and the page of a snapshot."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.records.units import format_bytes
from tests.memory.test_snapshots import event, frame, segment
from tests.show.test_html import Page

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of {total} "
    "GiB of which 100.75 MiB is free. Including non-PyTorch memory, this process has 5.70 GiB memory in use. Of the "
    "allocated memory 5.10 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated."
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/data/train.py", line 9, in <module>\n'
PROGRAM = """\
import torch
from torch import nn

model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    x = torch.randn(7 << 15, 512, device="cuda")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "oom.txt").write_text(TRACEBACK + MESSAGE.format(total="5.81"), encoding="utf-8")
    return tmp_path


def write_snapshot(path: Path, name: str = "/data/train.py") -> None:
    trace = [{**event("alloc", at * 1000, 1000), "frames": [frame(3, name)]} for at in range(1, 20)]
    held = segment(1000, 40_000, *[(1000, "active_allocated", 1)] * 19, (21_000, "inactive", 0))
    path.write_bytes(pickle.dumps({"segments": [held], "device_traces": [trace]}))


def test_a_message_is_explained_in_text_json_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "oom.txt", "--json", "out.json", "--markdown", "out.md"]) == 0
    said = capsys.readouterr().out
    assert "Cause       the program is too large for the card: 5.10 GiB are allocated" in said
    assert "Refused     512.0 MiB at /data/train.py:9 on GPU 0" in said
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert found["shortages"][0]["cause"] == "size"
    assert found["shortages"][0]["requested_bytes"] == 512 << 20
    assert "| Refused | `512.0 MiB at /data/train.py:9 on GPU 0` |" in Path("out.md").read_text(encoding="utf-8")
    assert main(["explain", "oom.txt", "--markdown", "-"]) == 0
    assert capsys.readouterr().out == Path("out.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "which is empty"),
        (b"\n \n", "which is empty"),
        (b"step 1: loss 3.2\n", "in which no memory runs out"),
        (b"\x80\x04N.", "holds no snapshot: segments is missing"),
        (b"\x80\x04cposix\nsystem\n.", "holds more than plain data"),
    ],
)
def test_what_is_neither_is_refused_in_one_line(
    content: bytes | None, why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / "bad").write_bytes(content)
    assert main(["explain", "bad"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fxmem: expected ")
    assert said.count("\n") == 1
    assert why in said


@pytest.mark.parametrize("given", [("logs",), ("logs/rank0.log", "logs/deep/1/stderr.log", "logs/other.txt")])
def test_several_logs_are_one_jobs(given: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "logs/deep/1").mkdir(parents=True)
    for name in ("rank0.log", "deep/1/stderr.log"):
        (folder / "logs" / name).write_text(TRACEBACK + MESSAGE.format(total="5.81"), encoding="utf-8")
    (folder / "logs/other.txt").write_text("\n")
    with (folder / "logs/model.bin").open("wb") as checkpoint:
        checkpoint.truncate(1 << 30)  # longer than what is read of a text
    assert main(["explain", *given, "--json", "out.json"]) == 0
    assert "Messages    2 of 2 ranks, all for the same cause" in capsys.readouterr().out
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))["shortages"]
    assert sorted((each["rank"], each["place"]) for each in found) == [(0, "/data/train.py:9"), (1, "/data/train.py:9")]
    write_snapshot(folder / "a.pickle")
    assert main(["explain", *given, "a.pickle"]) == 2
    said = capsys.readouterr().err
    assert "several files are the texts of one job" in said
    assert said.count("\n") == 1


def test_a_log_in_utf_16_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As PowerShell redirects."""
    (folder / "log").write_bytes((TRACEBACK + MESSAGE.format(total="5.81")).encode("utf-16"))
    assert main(["explain", "log"]) == 0
    assert "Refused     512.0 MiB at /data/train.py:9" in capsys.readouterr().out


def test_an_escape_in_a_log_is_spelled_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "log").write_text(
        'Traceback (most recent call last):\n  File "a\x1b[31m.py", line 9, in f\n' + MESSAGE.format(total="5.81")
    )
    assert main(["explain", "log"]) == 0
    assert "a\\x1b[31m.py:9" in capsys.readouterr().out


def test_a_snapshot_is_explained_and_has_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_snapshot(folder / "a.pickle", "/data/<script>alert(1)</script>.py")
    assert main(["explain", "a.pickle"]) == 0
    assert "Peak        18.6 KiB (19,000 bytes) requested at once" in capsys.readouterr().out
    assert main(["report", "a.pickle", "-o", "a.html", "--quiet"]) == 0
    page = Page(Path("a.html").read_text(encoding="utf-8"))
    assert page.of("script") == []
    assert len(page.ids) == len(set(page.ids))
    assert any("/data/<script>alert(1)</script>.py:3" in each for each in page.said["td"])
    assert page.said["h2"][0] == "Summary"
    assert main(["report", "a.pickle", "-o", "a.html", "--budget", "60%"]) == 2
    assert "got a memory snapshot" in capsys.readouterr().err


@pytest.mark.truth
def test_a_program_is_reproduced_and_a_change_that_fits_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(PROGRAM)
    words = ["explain", "oom.txt", "--quick", "--quiet", "--json", "out.json", "--target", "6GB", "--run", "train.py"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))["reproduction"]
    assert (found["fits"], found["same_line"], found["place"]) == (False, True, "train.py:9")
    outside = 5.81 * 2**30 - 100.75 * 2**20 - 5.1 * 2**30 - 120 * 2**20
    assert found["room_bytes"] == pytest.approx(5.81 * 2**30 - outside, abs=4)
    assert "Predicted runs out at train.py:9, the line of the message" in said
    assert "fxmem explain" not in said  # it was given
    assert main(["explain", "oom.txt"]) == 0
    assert "fxmem explain FILE --run train.py" in " ".join(capsys.readouterr().out.split())
    together = found["advice"]["together"]
    assert together["peak"]["allocated_bytes"] <= found["room_bytes"]
    assert f"Fits with {together['title']}" in said
    assert sum(each["nbytes"] for each in found["holders"]) == found["advice"]["before"]["requested_bytes"]


@pytest.mark.parametrize(
    ("total", "why"),
    [
        ("23.52", "23.5 GiB: rtx3090, rtx4090, a5000 have that"),
        ("1.23", "1.23 GiB, which no card of the catalogue has"),
    ],
)
def test_a_card_that_the_message_does_not_tell_is_asked_for(
    total: str, why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "oom.txt").write_text(MESSAGE.format(total=total))
    assert main(["explain", "oom.txt", "--run", "train.py"]) == 2
    assert why in capsys.readouterr().err


LEAN = """\
import torch
from torch import nn

model = nn.Linear(512, 512).cuda()
kept = []
for _ in range(4):
    x = torch.randn(4096, 512, device="cuda")
    model(x).square().mean().backward()
    model.zero_grad()
"""


@pytest.mark.truth
def test_a_snapshot_is_held_beside_its_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = ["--target", "rtx4090", "--quiet"]
    (folder / "train.py").write_text(LEAN.replace("    model.zero_grad()", "    model.zero_grad()\n    kept.append(x)"))
    assert main(["run", *card, "--json", "run.json", "train.py"]) == 0
    assert main(["export", "run.json", "--to", "memory-viz", "-o", "step.pickle", "--quiet"]) == 0
    capsys.readouterr()
    (folder / "train.py").write_text(LEAN.replace("4096, 512", "2048, 512"))
    words = ["explain", "step.pickle", "--quick", "--json", "out.json", "--html", "out.html", *card]
    assert main([*words, "--run", "train.py"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    lines = {each["place"]: each for each in json.loads(Path("out.json").read_text())["reproduction"]["lines"]}
    product, rest = lines["train.py:8"], lines[""]
    assert product["measured_bytes"] - product["predicted_bytes"] >= 2048 * 512 * 4 * 2  # half of two results
    assert rest["measured_bytes"] - rest["predicted_bytes"] >= 3 * 4096 * 512 * 4  # what is kept
    sizes = map(format_bytes, (product["measured_bytes"], product["predicted_bytes"]))
    assert f"train.py:8 {' '.join(sizes)} -" in said
    assert "Only here no line" in said
    page = Page(Path("out.html").read_text(encoding="utf-8"))
    assert "Beside the prediction" in page.said["h2"]
    assert any("train.py:8" in each for each in page.said["td"])
    assert main(["explain", "oom.txt", "--html", "out.html"]) == 2
    assert "expected --html with a memory snapshot, got a text, 'oom.txt'" in capsys.readouterr().err
