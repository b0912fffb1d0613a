"""Memory by source line: sums that must hold for any profile, a pencil's figures, and a real CPU run, line by line."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from torch import nn
from torch.profiler import record_function

import fxmem
from fxmem._torch import kernels as torch_kernels
from fxmem.cli.verbs import show as verb
from fxmem.errors import UsageError
from fxmem.memory.by_line import by_line, is_installed
from fxmem.memory.report_reader import load_report
from fxmem.records.breakdown import LineReport, TensorGroup
from fxmem.records.profile import Kind, ModuleCall, Node, Phase, Profile, SourceLine
from fxmem.show.html import lines_html
from fxmem.show.text import by_line as line_reporting
from fxmem.validation.measure_cpu import without_garbage
from tests.profiles import Log, profiles, small_profile
from tests.show.text.test_report import Balanced, hostile
from tests.verbs import called, saved

MIB = 1 << 20
LINE = "/home/user/project/model.py"


# --- sums -------------------------------------------------------------------------------------------------------------


def check_sums(profile: Profile, report: LineReport) -> None:
    """Lines and rest make up the forward."""
    rows = [*report.lines, *(row for row in report.rest if row.what != "optimizer")]
    assert sum(row.allocated_bytes for row in rows) == report.forward_allocated_bytes
    assert report.resident_bytes + sum(row.kept_bytes - row.freed_bytes for row in rows) == report.forward_left_bytes
    assert sum(row.saved_bytes for row in rows) == report.saved_bytes == profile.saved_bytes
    for row in (*report.lines, *report.rest):
        assert sum(group.nbytes for group in row.came) == row.kept_bytes <= row.allocated_bytes
        assert sum(group.nbytes for group in row.went) == row.freed_bytes
    allocated = sum(s.nbytes for s in profile.storages if s.op is not None and profile.ops[s.op].phase is Phase.FORWARD)
    backward = sum(s.nbytes for s in profile.storages if s.op is not None and profile.ops[s.op].phase is Phase.BACKWARD)
    assert report.forward_allocated_bytes == allocated
    assert sum(row.backward_allocated_bytes or 0 for row in (*report.lines, *report.rest)) == backward


@given(profiles())
def test_lines_and_rest_sum_to_the_profile(profile: Profile) -> None:
    assume(
        any(op.phase is Phase.FORWARD for op in profile.ops)
    )  # else there is no line that what goes in forward could go with
    # As in a profile that was made: operators bring what is born in the step, and the optimizer's are no line's.
    storages = tuple(s if s.op is not None else s.model_copy(update={"birth": 0}) for s in profile.storages)
    nodes = [
        node.model_copy(update={"source": SourceLine(file="a.py", line=index // 2) if index else None})
        for index, node in enumerate(profile.nodes)
    ]
    ops = tuple(op.model_copy(update={"node": len(nodes)}) if op.phase is Phase.OPTIMIZER else op for op in profile.ops)
    nodes.append(Node(name="optimizer", op="optimizer", target="SGD"))
    profile = profile.model_copy(update={"storages": storages, "nodes": tuple(nodes), "ops": ops})
    check_sums(profile, by_line(profile))


def test_a_small_step_by_pencil() -> None:
    report = by_line(small_profile())
    check_sums(small_profile(), report)
    (conv, act, add), (loss, optimizer) = report.lines, report.rest
    assert [(line.line, line.code) for line in report.lines] == [
        (17, "x = self.conv(x)"),
        (18, "x = self.act(x)"),
        (31, "return self.head(x + y)"),
    ]
    # Before the step: a weight of 2 MiB, its state of 4, an input of 32.
    assert report.resident_bytes == 38 * MIB
    assert [group.kind for group in report.resident] == [Kind.INPUT, Kind.OPTIMIZER_STATE, Kind.PARAMETER]
    # The convolution brings 32 MiB and a workspace of 48 that goes again.
    assert (conv.allocated_bytes, conv.kept_bytes, conv.freed_bytes, conv.saved_bytes, conv.params_bytes) == (
        80 * MIB,
        32 * MIB,
        0,
        32 * MIB,
        2 * MIB,
    )
    assert (conv.before_bytes, conv.after_bytes, conv.peak_bytes) == (38 * MIB, 70 * MIB, 118 * MIB)
    assert conv.came == (
        TensorGroup(count=1, shape=(8, 16, 64, 64), dtype="float32", kind=Kind.SAVED, nbytes=32 * MIB),
    )
    assert (act.before_bytes, act.after_bytes, add.after_bytes, loss.after_bytes) == (
        70 * MIB,
        102 * MIB,
        134 * MIB,
        134 * MIB + 4,
    )
    # Its backward: the weight's gradient, 2 MiB, and a workspace of 64. 134 MiB were alive, and two gradients of 32
    # less two activations.
    assert (conv.backward_allocated_bytes, act.backward_allocated_bytes, add.backward_allocated_bytes) == (
        66 * MIB,
        32 * MIB,
        None,
    )
    assert conv.backward_peak_bytes == 200 * MIB + 4
    assert (loss.what, optimizer.what, optimizer.allocated_bytes, optimizer.freed_bytes) == (
        "loss",
        "optimizer",
        2 * MIB,
        2 * MIB,
    )


def looped(file: str) -> Profile:
    """Two lines that take turns, three times: each brings 10 bytes, and the second lets the first's go."""
    log = Log()
    with log.phase(Phase.FORWARD):
        for turn in range(3):
            for line in (4, 5):
                node = log.node(
                    f"n{turn}{line}",
                    op="call_function",
                    source=SourceLine(file=file, line=line, function="forward", code=f"line {line}"),
                )
                with log.op("aten.mul.Tensor", node, Phase.FORWARD):
                    brought = log.allocate(10, Kind.TEMPORARY, shape=(10,), dtype="int8")
                if line == 4:
                    first = brought
            log.free(first)
    return log.profile()


def test_a_line_that_runs_often_has_the_sums_of_its_runs() -> None:
    profile = looped(LINE)
    report = by_line(profile)
    check_sums(profile, report)
    first, second = report.lines
    assert (first.calls, first.allocated_bytes, first.kept_bytes, first.freed_bytes) == (3, 30, 30, 0)
    assert (second.calls, second.allocated_bytes, second.kept_bytes, second.freed_bytes) == (3, 30, 30, 30)
    assert (first.before_bytes, first.after_bytes, second.before_bytes, second.after_bytes) == (0, 30, 10, 30)
    assert [(group.count, group.nbytes) for group in second.went] == [(3, 30)]


# --- whose line -------------------------------------------------------------------------------------------------------

LIBRARY = "/opt/env/lib/python3.11/site-packages/timm/models/vit.py"


def called_from_own(inner: str = LIBRARY) -> Profile:
    """A library's line, called by a module that line 7 of the user's called."""
    call = ModuleCall(
        module="vit",
        first_node=0,
        last_node=6,
        source=SourceLine(file=LINE, line=7, function="forward", code="x = self.vit(x)"),
    )
    nodes = [node.model_copy(update={"module": "vit"}) for node in looped(inner).nodes]
    return looped(inner).model_copy(update={"nodes": tuple(nodes), "calls": (call,)})


def test_what_a_library_does_counts_for_the_users_line_that_called_it() -> None:
    report = by_line(called_from_own())
    check_sums(called_from_own(), report)
    (line,) = report.lines
    assert (line.file, line.line, line.calls, line.allocated_bytes, line.kept_bytes) == (LINE, 7, 6, 60, 30)


def test_files_can_be_chosen() -> None:
    profile = called_from_own()
    assert by_line(profile, installed=True).files == (LIBRARY,)
    assert [line.line for line in by_line(profile, files=["timm/models/vit.py"]).lines] == [4, 5]
    assert [line.line for line in by_line(profile, files=["./timm/"]).lines] == [4, 5]
    assert by_line(profile, files=["project/model.py"]).files == (LINE,)
    with pytest.raises(
        UsageError, match=r"expected files of the program, got it.py; its lines are in /home/user/project/model.py, "
    ):
        by_line(profile, files=["it.py"])  # no path's last part, though the end of one


def test_a_model_of_a_package_shows_that_package() -> None:
    assert by_line(looped(LIBRARY)).files == (LIBRARY,)


def test_what_no_line_did_is_other_code() -> None:
    profile = called_from_own().model_copy(update={"calls": ()})
    first = profile.nodes[0].model_copy(update={"source": SourceLine(file=LINE, line=1, code="a")})
    report = by_line(profile.model_copy(update={"nodes": (first, *profile.nodes[1:])}))
    assert [(line.line, line.calls) for line in report.lines] == [(1, 1)]
    assert [(row.what, row.calls, row.allocated_bytes) for row in report.rest] == [("other code", 5, 50)]


@pytest.mark.parametrize(
    ("file", "installed"),
    [(LIBRARY, True), (r"C:\env\Lib\site-packages\timm\x.py", True), ("/usr/lib/python3/dist-packages/a.py", True),
     ("/usr/lib/python3.12/enum.py", True), (LINE, False), ("<eval_with_key>.0", False),
     ("/home/user/site-packages.py", False)],
)  # fmt: skip
def test_installed_files_are_known_by_their_path(file: str, installed: bool) -> None:
    assert is_installed(file) is installed


# --- a real run -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(x)
        y = self.up(y)
        y = torch.nn.functional.gelu(y)
        y = self.down(y)
        return x + y


class Net(nn.Module):
    """Embeddings, attention in plain matrix products, blocks in a loop, a head: no convolution."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(2)))
        self.more = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 50)

    def forward(self, ids):
        x = self.embed(ids)
        scores = x @ x.transpose(1, 2)
        weights = torch.softmax(scores, -1)
        mixed = weights @ x
        x = x + mixed
        x = self.blocks(x)
        for block in self.more:
            x = block(x)
        x = x.sum(1)
        return self.head(x)


MARK = "line of the test: "


class _Marker:
    """Marks in the profiler's log, while this file's `forward`s run, which line begins or goes on."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            if frame.f_code.co_filename != __file__ or frame.f_code.co_name != "forward":
                return None
            self.lines.append(0)
        elif event == "line":
            self.lines[-1] = frame.f_lineno
            self._mark()
        elif event == "return":
            self.lines.pop()
            self._mark()  # the caller's line goes on
        return self

    def _mark(self) -> None:
        if self.lines:
            with record_function(f"{MARK}{self.lines[-1]}"):
                pass


def measured(model: nn.Module, ids: torch.Tensor) -> list[tuple[int, int]]:
    """Line and signed bytes of every block that comes or goes in a real forward, in order of time."""
    before = sys.gettrace()
    with without_garbage(), torch_kernels.profiler() as profiled:
        sys.settrace(_Marker())
        try:
            out = model(ids)
        finally:
            sys.settrace(before)
        with record_function(f"{MARK}0"):  # the end: what follows is no longer the forward
            pass
    del out
    found: list[tuple[int, int | str]] = []
    pending = list(torch_kernels.event_tree(profiled))
    while pending:
        entry = pending.pop()
        if torch_kernels.is_allocation(entry):
            found.append((entry.start_time_ns, entry.extra_fields.alloc_size))
        elif entry.name.startswith(MARK):
            found.append((entry.start_time_ns, entry.name.removeprefix(MARK)))
        pending += entry.children
    line, events = 0, []
    for _, what in sorted(found, key=lambda timed: timed[0]):
        if isinstance(what, str):
            line = int(what)
        elif line:
            events.append((line, what))
    return events


@pytest.mark.truth
@pytest.mark.skipif(
    sys.gettrace() is not None,
    reason="the lines are followed by sys.settrace, which a debugger or a coverage tool holds",
)
def test_lines_of_a_real_run() -> None:
    """Every line's allocations, and what is alive before its first and after its last, to the byte."""
    ids = torch.zeros(4, 16, dtype=torch.int64)
    model = Net()
    report = by_line(fxmem.analyze(model, ids, target="cpu", optimizer=None, keep_outputs=False))
    model(ids)  # what a first run sets up is not a step's
    events = measured(model, ids)

    allocated: dict[int, int] = defaultdict(int)
    before, after = {}, {}
    live, last = 0, 0
    for line, nbytes in events:
        if nbytes > 0:
            allocated[line] += nbytes
            if line != last:
                after[last] = live  # Python lets go of a line's tensors before the next allocates
                before.setdefault(line, live)
                last = line
        live += nbytes
    after[last] = live
    assert report.files == (__file__,)
    assert {line.line: line.allocated_bytes for line in report.lines if line.allocated_bytes} == allocated
    ours = {line.line: line for line in report.lines if line.allocated_bytes}
    resident = report.resident_bytes
    assert {
        number: line.before_bytes - resident for number, line in ours.items() if line.before_bytes is not None
    } == before
    assert {number: line.after_bytes - resident for number, line in ours.items() if line.after_bytes is not None} == {
        n: b for n, b in after.items() if n
    }
    # The loop's line holds three blocks' calls, none of its own: those stand at the block's lines, five times each.
    assert {line.calls for line in report.lines if line.function == "forward" and "self.up" in line.code} == {5}


def test_lines_of_a_checkpointed_model() -> None:
    """What backward runs again counts as backward, and the sums hold."""

    class Checkpointed(Net):
        def forward(self, ids):
            x = self.embed(ids)
            for block in self.more:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    ids = torch.zeros(4, 16, dtype=torch.int64)
    analysis = fxmem.analyze(Checkpointed(), ids, target="cpu")
    report = by_line(analysis)
    check_sums(analysis.profile, report)
    (up,) = (line for line in report.lines if "self.up" in line.code)
    result = math.prod((4, 16, 128)) * 4
    assert (up.calls, up.allocated_bytes, up.saved_bytes) == (3, 3 * result, 0)
    assert up.backward_allocated_bytes is not None
    assert up.backward_allocated_bytes > 3 * result


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file in which lines 4 and 5 are those of `looped`."""
    path = tmp_path / "own.py"
    path.write_text(
        "def forward(x):\n    # before\n    for turn in range(3):\n        line 4\n        line 5\n    return x\n"
        + "\n" * 20
        + "last = 1\n"
    )
    return path


def test_annotated_source(own: Path) -> None:
    text = line_reporting.table(by_line(looped(str(own))), width=100)
    assert re.search(
        r"^    2 +# before\n    3 +for turn in range\(3\):\n    4 +30 B +30 B +0 +30 B +line 4\n", text, re.MULTILINE
    )
    assert re.search(
        r"line 5\n      \+ 3 x \(10,\) int8 30 B temporary\n      - 3 x \(10,\) int8 30 B temporary\n    6 +return x\n",
        text,
    )
    assert "last = 1" not in text
    assert re.search(r"60 B +60 B +0 +sum of these lines", text)


def test_source_that_has_changed_is_not_shown(own: Path) -> None:
    report = by_line(looped(str(own)))
    own.write_text(own.read_text().replace("line 5", "another"))
    assert line_reporting.source_text(report, str(own)) == {4: "line 4", 5: "line 5"}
    text = line_reporting.table(report)
    assert "another" not in text
    assert "line 5" in text


@pytest.mark.parametrize("name", ["notes.txt", "missing.py", "nul\0.py"])
def test_a_report_makes_nobody_read_other_files(tmp_path: Path, name: str) -> None:
    if name.endswith(".txt"):
        (tmp_path / name).write_text("a\nb\nc\nline 4\nline 5\nsecret\n")
    report = by_line(looped(str(tmp_path / name)))
    assert "secret" not in line_reporting.table(report) + lines_html(report)


@pytest.mark.parametrize("width", [60, 80, 100, 130, 200])
def test_lines_are_no_wider_than_asked(width: int) -> None:
    report = by_line(small_profile())
    assert max(map(len, line_reporting.table(report, width=width).splitlines())) <= width
    assert ("Calls" in line_reporting.table(report, width=width)) is (width >= 130)
    assert "\x1b[" not in line_reporting.table(report, width=width)
    assert "\x1b[" in line_reporting.table(report, width=width, color=True)


def test_tensors_are_listed_as_asked() -> None:
    report = by_line(small_profile())
    assert "+ 1 x (8, 16, 64, 64) float32 32.0 MiB saved" in line_reporting.table(report)
    assert "1 x" not in line_reporting.table(report, tensors=0)
    assert "+ 2 of other shapes 6.00 MiB" in line_reporting.table(report, tensors=1)
    workspace = TensorGroup(count=2, shape=(), dtype="", kind=Kind.WORKSPACE, nbytes=MIB)
    assert line_reporting.format_group(workspace) == "2 x workspace 1.00 MiB"


def test_inference_says_nothing_of_backward() -> None:
    step = small_profile().step.model_copy(update={"mode": "infer"})
    text = line_reporting.table(by_line(small_profile().model_copy(update={"step": step})), width=80)
    assert "kept for backward\n" not in text


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\x1b[31mred\x07", "</style><img src=x onerror=alert(1)>"]
)
def test_names_are_text(text: str) -> None:
    report = by_line(hostile(text))
    parsed = Balanced.check(re.sub(r"<!DOCTYPE html>|<(?:meta|link)[^>]*>", "", lines_html(report)))
    assert not parsed.tags & {"script", "img"}
    assert not {name for name in parsed.attributes if name.startswith("on") or name == "src"}
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", line_reporting.table(report))


def test_the_page_is_one_file(own: Path) -> None:
    page = lines_html(by_line(looped(str(own))))
    assert not re.search(r"https?:|url\(|@import|<script", page)
    assert "default-src 'none'" in page
    parsed = Balanced.check(re.sub(r"<!DOCTYPE html>|<(?:meta|link)[^>]*>", "", page))
    assert "for turn in range(3):" in parsed.text
    assert "3 x (10,) int8 30 B temporary" in parsed.text


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A report in a file."""
    return saved(tmp_path / "report.json", small_profile())


def test_the_verb_reads_a_report(path: str, tmp_path: Path) -> None:
    code, text = called(verb, path, "--by", "line", "--width", "80", "--html", str(tmp_path / "lines.html"))
    assert code == 0
    assert text == line_reporting.table(by_line(load_report(Path(path))), width=80)
    assert (tmp_path / "lines.html").read_text() == lines_html(by_line(load_report(Path(path))))
    assert LineReport.model_validate_json(called(verb, path, "--by", "line", "--json", "-")[1]) == by_line(
        load_report(Path(path))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--all", "--file", "model.py"], "--all or --file, not both"),
        (["--tensors", "-1"], "--tensors of at least 0, got -1"),
        (["--html", "lines.txt"], "--html to name a file that ends in .html"),
        (["--file", "other.py"], "expected files of the program, got other.py"),
    ],
)
def test_what_the_verb_refuses(path: str, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        called(verb, path, "--by", "line", *arguments)
