"""Changes written into a program's own lines, and the patch of them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fxmem
from fxmem.__main__ import main
from fxmem.records.advice import Advice
from fxmem.whatif.advice import statements
from fxmem.whatif.advice.statements import Edits
from fxmem.whatif.source_edits import SourceEdit, apply_edits, write_patch

SCRIPT = '''"""Trains."""
from __future__ import annotations
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU6(),
    nn.Linear(8, 8))
optimizer = torch.optim.AdamW(
    net.parameters(),
    lr=0.1,
)
for step in range(3):
    x = torch.ones(4, 8)
    out = net(x)
    wide = out.exp()

    loss = wide.sum()
    loss.backward()
    optimizer.step()
    if step:
        print(wide.shape)
    else:
        continue
def report(total):
    note = total + 1
    text = f"{note}"
    return text

for step in range(3):
    logits = net(x)
    logits = logits.float()
    loss = loss_of(logits)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True, inputs=[])
    loss.backward(one, retain_graph=True)
for step in range(3):
    total = total + 1
    print(total)
def act(x, y):
    x = x.mul_(x.sigmoid()) if y else x * torch.sigmoid(x)
    x = y * torch.sigmoid(x)
    x = 0.5 * x * (1 + torch.erf(x / 1.4142))
    z = x * torch.sigmoid(1.702 * x)
    z = x * torch.sigmoid(torch.relu(x))
    z = -x * torch.sigmoid(x)
    z = 1.5 * x * (1 + torch.erf(x / 1.4142))
    z = x * torch.sigmoid(x) * torch.relu(x)
    return 0.5 * x * (1 + torch.erf(x / 3))
'''


SILU, GELU = "torch.nn.functional.silu(x)", "torch.nn.functional.gelu(x)"


def drop(file: str, number: int) -> Edits:
    return [*statements.drop_argument(file, "backward", "retain_graph=True")][number][1]


RESULTS: dict[str, tuple[Callable[[str], Edits], str]] = {
    "an argument of a call of several lines": (
        lambda file: statements.add_argument([file], ["AdamW"], "fused=True", ["foreach"]),
        "     net.parameters(),|     lr=0.1,|-)|+fused=True)",
    ),
    "an argument of each call": (
        lambda file: statements.add_argument([file], ["ReLU", "ReLU6"], "inplace=True"),
        "-net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU6(),|"
        "+net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.ReLU6(inplace=True),",
    ),
    "lines after what is made": (
        lambda file: statements.add_after([file], ["AdamW"], "release({})"),
        " )|+release(optimizer)| for step in range(3):",
    ),
    "a variable after the imports": (
        lambda file: statements.set_variable(file, "NAME", "value"),
        ' from torch import nn|+import os|+|+os.environ["NAME"] = "value"',
    ),
    "lines within a context": (
        lambda file: statements.run_within(file, 14, 17, "half()"),
        "-    out = net(x)|-    wide = out.exp()|+    with half():|+        out = net(x)|+        wide = out.exp()| |"
        "-    loss = wide.sum()|+        loss = wide.sum()",
    ),
    "a name that nothing reads any more": (
        lambda file: statements.delete_name(file, 14, "out"),
        "     wide = out.exp()|+    del out| |     loss = wide.sum()",
    ),
    "a name that a later branch reads": (
        lambda file: statements.delete_name(file, 15, "wide"),
        "+    del wide| def report(total):",
    ),
    "a return within a context": (
        lambda file: statements.run_within(file, 27, 27, "half()"),
        "-    return text|+    with half():|+        return text",
    ),
    "a name that is bound twice": (
        lambda file: statements.delete_name(file, 31, "logits"),
        "     loss = loss_of(logits)|+    del logits|     loss.backward(retain_graph=True)",
    ),
    "a value without a graph": (
        lambda file: statements.detach(file, 25),
        "-    note = total + 1|+    note = (total + 1).detach()",
    ),
    "a result without a graph": (lambda file: statements.detach(file, 27), "+    return text.detach()"),
    "another value of an argument": (
        lambda file: statements.set_argument(file, 10, "AdamW", "lr=1"),
        "-    lr=0.1,|+    lr=1,",
    ),
    "an argument of a line's call": (
        lambda file: statements.set_argument(file, 14, "net", "y=1"),
        "-    out = net(x)|+    out = net(x, y=1)",
    ),
    "without an argument that is alone": (
        lambda file: drop(file, 0),
        "-    loss.backward(retain_graph=True)|+    loss.backward()",
    ),
    "without the first argument": (
        lambda file: drop(file, 1),
        "-    loss.backward(retain_graph=True, inputs=[])|+    loss.backward(inputs=[])",
    ),
    "without the last argument": (
        lambda file: drop(file, 2),
        "-    loss.backward(one, retain_graph=True)|+    loss.backward(one)",
    ),
    "a name of a function": (
        lambda file: statements.delete_name(file, 25, "note"),
        '     text = f"{note}"|+    del note|     return text',
    ),
    "an import": (
        lambda file: statements.add_import(file, "import functools"),
        " from torch import nn|+import functools",
    ),
    "an activation in one call": (
        lambda file: statements.call_activation(file, 40, SILU),
        "+    x = torch.nn.functional.silu(x) if y else x * torch.sigmoid(x)",
    ),
    "an activation with a constant": (
        lambda file: statements.call_activation(file, 42, GELU),
        "+    x = torch.nn.functional.gelu(x)",
    ),
    "an activation beside another call": (
        lambda file: statements.call_activation(file, 47, SILU),
        "+    z = torch.nn.functional.silu(x) * torch.relu(x)",
    ),
    "another statement": (
        lambda file: statements.replace_statement(
            file, 8, "optimizer = torch.optim.AdamW(\n    net.parameters(),\n    lr=0.1,\n)", "optimizer = make(net)"
        ),
        "-optimizer = torch.optim.AdamW(|-    net.parameters(),|-    lr=0.1,|-)|+optimizer = make(net)",
    ),
}  # fmt: skip
NOT_WRITTEN: dict[str, Callable[[str], Edits]] = {
    "an argument beside another": lambda file: statements.add_argument([file], ["AdamW"], "fused=True", ["lr"]),
    "an argument that is there": lambda file: statements.add_argument([file], ["AdamW"], "lr=2"),
    "after what two calls make": lambda file: statements.add_after([file], ["Linear"], "use({})"),
    "after what nothing makes": lambda file: statements.add_after([file], ["SGD"], "use({})"),
    "a name that is returned": lambda file: statements.delete_name(file, 26, "text"),
    "a name that no line binds": lambda file: statements.delete_name(file, 18, "loss"),
    "within a context, beyond a block": lambda file: statements.run_within(file, 14, 27, "half()"),
    "an argument of no call there": lambda file: statements.set_argument(file, 15, "net", "y=1"),
    "without a graph, what is no value": lambda file: statements.detach(file, 20),
    "a name that a round before may have bound": lambda file: statements.delete_name(file, 37, "total"),
    "an import that is there": lambda file: statements.add_import(file, "import torch"),
    "another statement than that": lambda file: statements.replace_statement(file, 8, "x = 1", "x = 2"),
    "an activation of another variable": lambda file: statements.call_activation(file, 41, SILU),
    "an activation with another constant": lambda file: statements.call_activation(file, 48, GELU),
    "an activation with a constant in its place": lambda file: statements.call_activation(file, 43, SILU),
    "an activation of another call": lambda file: statements.call_activation(file, 44, SILU),
    "an activation of less": lambda file: statements.call_activation(file, 45, SILU),
    "an activation three times as large": lambda file: statements.call_activation(file, 46, GELU),
    "a line that is not there": lambda file: statements.delete_name(file, 99, "out"),
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def apply_patch(folder: Path, patch: str) -> None:
    """Apply a patch as a user does; the folder is in no repository."""
    (folder / "fix.diff").write_bytes(patch.encode())
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", "fix.diff"], cwd=folder, check=True, env=environment)


@pytest.mark.parametrize("what", RESULTS)
def test_a_change_is_written_as_a_patch(script: Path, what: str) -> None:
    edit, expected = RESULTS[what]
    edits = edit(str(script))
    patch = write_patch(edits, str(script.parent))
    assert patch.startswith("--- a/train.py\n+++ b/train.py\n@@ ")
    assert expected.replace("|", "\n") in patch
    apply_patch(script.parent, patch)
    (text,) = apply_edits(edits).values()
    assert script.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_what_is_not_known_is_not_written(script: Path, what: str) -> None:
    assert NOT_WRITTEN[what](str(script)) == ()


@pytest.mark.parametrize(
    "raw", [b"x = 1\r\ny = 2\r\n", b"\xef\xbb\xbfx = 1\ny = 2", b"x = 1\x0c\ny = 'a\xe2\x80\xa8b'\n", b"y = 2"]
)
def test_a_patch_fits_every_file(tmp_path: Path, raw: bytes) -> None:
    """Other ends of lines, a mark at the begin, no end of the last line, what ends lines elsewhere."""
    path = tmp_path / "some.py"
    path.write_bytes(raw)
    last = raw.count(b"\n") + (not raw.endswith(b"\n"))
    edits = [SourceEdit(str(path), last, 0, 1, "z"), SourceEdit(str(path), 1, 0, 0, "w = 0\n")]
    apply_patch(tmp_path, write_patch(edits, str(tmp_path)))
    ending = b"\r\n" if b"\r" in raw else b"\n"
    mark = raw[: 3 * raw.startswith(b"\xef")]
    assert path.read_bytes() == mark + b"w = 0" + ending + raw[len(mark) :].replace(b"y =", b"z =")


def test_edits_of_one_place_do_not_go_together(script: Path) -> None:
    path = str(script)
    one, other = SourceEdit(path, 3, 0, 6, "from"), SourceEdit(path, 3, 3, 8, "x")
    with pytest.raises(ValueError, match="line 3"):
        apply_edits([one, other])
    assert apply_edits([one, one])[path] == SCRIPT.replace("import torch\n", "from torch\n", 1)


def test_what_lies_elsewhere_or_has_changed_has_no_patch(script: Path) -> None:
    edits = statements.add_import(str(script), "import functools")
    with pytest.raises(ValueError, match="not below"):
        write_patch(edits, str(script.parent / "inner"))
    shutil.copy(script, script.with_suffix(".old"))
    script.write_text(SCRIPT.replace("8", "9"), encoding="utf-8")
    with pytest.raises(ValueError, match="as it was"):
        write_patch(edits, str(script.parent))


PROGRAM = """
import torch
from torch import nn
from model import Net

net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
seen, total = [], 0.0
for step in range(6):
    x = torch.randn(1 << 14, 256, device="cuda")
    out = net(x)
    wide = out.exp()
    loss = wide.sum()
    seen.append(out)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = total + loss.detach()
"""
MODEL = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
"""


@pytest.mark.truth
def test_a_program_runs_with_its_patch_as_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def advise(*words: str) -> str:
        command = ["advise", "--target", "rtx3060", "--no-plans", "--steps", "5", *words, "--run", "train.py"]
        assert main(command) == 0
        return capsys.readouterr().out

    out = advise("--patch", "fix.diff")
    words = " ".join(out.split())
    said = words.partition("1 file, +1 -1 lines: the peak is ")[2].partition(" with it")[0]
    patch = Path("fix.diff").read_text(encoding="utf-8")
    assert [each for each in patch.splitlines() if each.startswith("+")][1:] == [
        "+    seen.append(out.detach().cpu())",
    ]  # not autocast, which rounds; nor what lowers the peak by less than a hundredth
    assert "grows by 0 bytes a step; backward runs the same operators" in words
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == PROGRAM
    subprocess.run(["git", "apply", "fix.diff"], check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": "/tmp"})
    assert main(["run", "--target", "rtx3060", "--steps", "5", "train.py"]) == 0
    assert f"Peak        {said} allocated" in capsys.readouterr().out
    short = advise("--patch", "short.diff", "--budget", "230MiB")
    assert "numbers: rounding" in " ".join(short.split())
    patch = Path("short.diff").read_text(encoding="utf-8")
    within = patch.partition("+    with torch.autocast")[2].splitlines()
    assert [each[1:].strip() for each in within if each.startswith("+        ")] == [
        "out = net(x)",
        "wide = out.exp()",
        "loss = wide.sum()",
        "seen.append(out.detach().cpu())",
    ]  # neither backward nor what follows it
    assert "backward runs other operators: gradients differ by rounding" in " ".join(short.split())


ACTIVATION = """
import math
import torch
from torch import nn

class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), NewGELU(), nn.Linear(256, 64)) for _ in range(3)])
net = net.to(device := "cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    loss = net(torch.randn(4096, 64, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    total = sum(each.grad.double().abs().sum() for each in net.parameters())
    optimizer.zero_grad()
print(float(loss), float(total))
"""


@pytest.mark.truth
def test_an_activation_that_is_written_out_is_mended_by_a_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(ACTIVATION, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run() -> list[float]:
        done = subprocess.run([sys.executable, "train.py"], check=True, capture_output=True, text=True)
        return [float(each) for each in done.stdout.split()]

    assert main(["advise", "--target", "rtx3060", "--no-plans", "--patch", "fix.diff", "--run", "train.py"]) == 0
    assert "one call for the activation at train.py:8" in " ".join(capsys.readouterr().out.split())
    before = run()
    apply_patch(tmp_path, Path("fix.diff").read_text(encoding="utf-8"))
    assert '+        return torch.nn.functional.gelu(x, approximate="tanh")' in Path("fix.diff").read_text("utf-8")
    assert run() == pytest.approx(before, rel=1e-4)


BLOCKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(3):
    net(torch.randn(1 << 16, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.truth
def test_a_plan_is_a_patch_where_the_step_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(BLOCKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = ["advise", "--target", "rtx3060", "--patch", "fix.diff", "--json", "advice.json", "--run", "train.py"]
    assert main(command) == 0
    advice = Advice.model_validate_json(Path("advice.json").read_text(encoding="utf-8"))
    plan, patched = advice.suggestions[0], advice.patched
    assert (plan.key, patched is None) == ("checkpoint", False)
    assert patched is not None
    assert (patched.key, patched.same_backward) == ("checkpoint", True)
    assert patched.peak.counted_bytes == plan.peak.counted_bytes  # what was planned on modules is what the lines do
    assert "beside what it recomputes" in " ".join(capsys.readouterr().out.split())
    written = next(line for line in plan.code.splitlines() if line.startswith("# fxmem plan "))
    assert written.startswith("# fxmem plan --target rtx3060 --budget 0.")
    assert main(shlex.split(written.removeprefix("# fxmem "))) == 0  # carried out as it is printed
    made = fxmem.load_plan("plan.json")
    assert made.after.counted_bytes < 1.0001 * plan.peak.counted_bytes
    assert (made.extra_flops or 0) <= (plan.extra_flops or 0)
    apply_patch(tmp_path, patched.patch)
    assert "+from torch.utils.checkpoint import checkpoint\n+import functools\n" in patched.patch
    assert main(["run", "--target", "rtx3060", "train.py"]) == 0


def test_a_patch_is_of_a_program_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["advise", "--patch", str(tmp_path / "fix.diff"), "torchvision:resnet18"]) == 2
    assert "expected --patch with a program (--run train.py)" in capsys.readouterr().err
    (tmp_path / "train.py").write_text("import torch\n")
    command = ["advise", "--patch", str(tmp_path / "train.py"), "--run", str(tmp_path / "train.py")]
    assert main(command) == 2
    assert ".diff or .patch" in capsys.readouterr().err


CASTS = {
    "net = Net().cuda().eval()\nnet(x)": "net = Net().to(dtype).cuda().eval()\nnet(x)",
    'net = Net()\nnet.to("cuda")\ny = net(x)': 'net = Net()\nnet.to(dtype).to("cuda")\ny = net(x)',
    "net = make()\nnet(x)": "net = make()\nnet.to(dtype)\nnet(x)",
    "self.net = make(1)\nself.net(x)": "self.net = make(1)\nself.net.to(dtype)\nself.net(x)",
    # Not known: made elsewhere, made or moved twice, moved to a dtype; another is called.
    "net(x)": "",
    "net = Net()\nnet = Net()\nnet(x)": "",
    'net = Net().cuda()\nnet.to("cuda:1")\nnet(x)': "",
    'net = Net().to("cuda", torch.float16)\nnet(x)': "",
    "net = Net().cuda()\nother(x)": "",
}


@pytest.mark.parametrize("source", CASTS)
def test_a_model_is_cast_before_it_goes_to_the_card(tmp_path: Path, source: str) -> None:
    file = tmp_path / "sample.py"
    file.write_text(source + "\n")
    edits = statements.cast_called(str(file), len(source.splitlines()), "dtype")
    assert "".join(apply_edits(edits).values()).rstrip("\n") == CASTS[source]
