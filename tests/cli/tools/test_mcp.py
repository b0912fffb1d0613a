"""The tools for a coding agent: a client of the same package asks, over stdin and stdout."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fxmem
from fxmem.cli.tools.requests import TOOLS, ExplainError, MaxBatch, Predict, program_words
from fxmem.cli.verbs import mcp as verb
from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.memory.shortage import read_messages
from fxmem.records import schemas
from fxmem.records.profile import Phase, ProgramRun, Round
from fxmem.records.shortage import Explanation
from tests.profiles import small_profile
from tests.verbs import called, report_of

TRAIN = """
import sys
import torch
from torch import nn

batch, kept = int(sys.argv[1]), []
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    loss = model(torch.randn(batch, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    LINE
open("trained.txt", "w").write("done")
"""
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.52 GiB "
    "of which 1.50 GiB is free. Including non-PyTorch memory, this process has 22.00 GiB memory in use. Of the "
    "allocated memory 21.00 GiB is allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "project"
    found.mkdir()
    (found / "train.py").write_text(TRAIN.replace("LINE", "losses = loss.item()"))
    (found / "leak.py").write_text(TRAIN.replace("LINE", "kept.append(loss)"))
    block = "nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))"
    (found / "deep.py").write_text(
        TRAIN.replace(block, f"nn.Sequential(*({block} for _ in range(4)))").replace("LINE", "")
    )
    (found / "model.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    blocks = ([nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)] for _ in range(6))\n"
        "    return nn.Sequential(*(nn.Sequential(*each) for each in blocks))\n"
    )
    (tmp_path / "outside.py").write_text("raise SystemExit('ran')\n")
    return found


# --- what needs no server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOOLS)
def test_arguments_have_a_schema_with_words_for_each_field(name: str) -> None:
    schema = schemas.describe(TOOLS[name].request)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["description"]
    assert all(each["description"] for each in schema["properties"].values())


@pytest.mark.parametrize(
    "words",
    [
        ("../outside.py",),
        ("/etc/passwd",),
        ("-c", "print(1)"),
        ("-m", "os"),
        ("-m", "..outside"),
        ("-m",),
        ("link.py",),
        ("train.py\0", "1"),
    ],
)
def test_nothing_outside_the_folder_is_run(words: tuple[str, ...], folder: Path) -> None:
    (folder / "link.py").symlink_to(folder.parent / "outside.py")
    with pytest.raises(UsageError, match=r"expected a (file|module)"):
        program_words(Predict(program=words), folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "../outside.py:build"},
        {"model": "os:system"},
        {"model": "--json=train.py"},
        {"model": "model.py:build", "inputs": ("os:getcwd",)},
        {"model": "model.py:build", "loss": "../outside.py:loss"},
        {"model": "model.py:build", "optimizer": "../outside.py:make"},
    ],
)
def test_no_reference_leads_out_of_the_folder(fields: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UsageError, match=r"expected (a file|a module|no option)"):
        list(TOOLS["advise"].words(TOOLS["advise"].request(**fields), folder))


def test_words_of_the_users_are_no_options(folder: Path) -> None:
    asked = ExplainError(text="x", program=("train.py", "--json", "train.py"), target="--json=train.py")
    words = [*TOOLS["explain"].words(asked, folder), *program_words(asked, folder)]
    assert words == ["explain", "-", "--target=--json=train.py", "--run", "train.py", "--json", "train.py"]


def test_the_largest_batch_of_a_program_is_asked_by_its_words(folder: Path) -> None:
    asked = MaxBatch(program=("train.py", "{}"), target="rtx3080")
    words = [*TOOLS["max_batch"].words(asked, folder), *program_words(asked, folder)]
    assert words == ["max-batch", "--target=rtx3080", "--run", "train.py", "{}"]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacksError, match=r"pip install 'fxmem\[mcp\]'"):
        called(verb)


# --- over stdin and stdout --------------------------------------------------------------------------------------------


class Agent:
    """A client that reads JSON alone."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.progress: list[str] = []

    async def ask(self, tool: str, **arguments: Any) -> dict[str, Any]:
        async def note(number: float, total: float | None, message: str | None) -> None:
            self.progress.append(message or "")

        result = await self._client.call_tool(tool, arguments, progress_callback=note)
        found: dict[str, Any] = json.loads(result.content[0].text)
        assert found == result.structured_content
        assert result.is_error is ("answer" not in found)
        return found


class Told:
    """What the server asks of a session: nothing comes of progress."""

    async def report_progress(self, *_: Any) -> None: ...


def answer(folder: Path, kept: Path, tool: str, report: str, shown: str = "", **arguments: Any) -> dict[str, Any]:
    """What the server makes of a command that answers with this report and text."""
    anyio = pytest.importorskip("anyio")
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    from types import SimpleNamespace

    from fxmem.cli.tools.server import ToolServer

    class Server(ToolServer):
        async def _run(self, words: Any, text: str, progress: Any) -> tuple[int, str, str]:
            (kept / Path(words[words.index("--json") + 1]).name).write_text(report)
            return 0, "", shown

    kept.mkdir(exist_ok=True)
    params = SimpleNamespace(name=tool, arguments=arguments)
    told = anyio.run(Server(folder, kept)._call, SimpleNamespace(session=Told()), params)
    found: dict[str, Any] = told.structured_content
    return found


def test_the_meaning_is_the_verdicts_and_the_budget_counts(folder: Path, tmp_path: Path) -> None:
    profile = small_profile()
    report = report_of(profile, fits=True, room_bytes=1 << 30, reserved_bytes=1 << 29)
    asked: dict[str, Any] = {"program": ["train.py", "1"], "target": "rtx3080"}
    told = answer(folder, tmp_path / "k", "predict", report.model_dump_json(), **asked)
    assert (told["exit_code"], told["meaning"].partition(":")[0]) == (0, "fits")
    told = answer(folder, tmp_path / "k", "predict", report.model_dump_json(), **asked, budget="1KiB")
    assert (told["exit_code"], told["meaning"].partition(":")[0]) == (4, "does NOT keep the budget of 1.00 KiB")
    step = Round(requested_bytes=9, allocated_bytes=512, phase=Phase.FORWARD, operators=1)
    run = ProgramRun(ending="stopped after step 3", rounds=(step,), shown=1, growth_bytes=7)
    grows = report.model_copy(update={"step": report.step.model_copy(update={"program": run})})
    told = answer(folder, tmp_path / "k", "predict", grows.model_dump_json(), **asked, budget="1GiB")
    assert re.match(
        "keeps the budget of 1.00 GiB.*; grew by 7 bytes in a step; whether it goes on was not seen", told["meaning"]
    )
    assert "expected a budget in bytes" in answer(folder, tmp_path / "k", "predict", "", **asked, budget="60%")["said"]
    assert "NUL" in answer(folder, tmp_path / "k", "predict", "", program=["train.py", "a\0"])["said"]


def test_an_explained_message_is_answered_with_its_cause(folder: Path, tmp_path: Path) -> None:
    explained = Explanation(source="-", shortages=read_messages(LOG))
    told = answer(folder, tmp_path / "k", "explain", explained.model_dump_json(), text=LOG)
    assert re.match("Cause: the program is too large for the card: .*. To do: a smaller batch", told["meaning"])
    compared = answer(folder, tmp_path / "k", "max_batch", "{}", model="torchvision:resnet18")
    assert compared["meaning"] == "done"


def test_the_answer_is_short_and_its_file_whole(folder: Path, tmp_path: Path) -> None:
    report = json.dumps({"nodes": [1] * 9, "modules": [{"path": "a", "calls": [1] * 12}] * 7, "restored": []})
    shown = "Change  +2 MiB\nMost  layer1\n\nNode  Before\n"
    (tmp_path / "k").mkdir()
    for name in ("report-1", "report-2"):
        (tmp_path / "k" / f"{name}.json").write_text("{}")
    told = answer(folder, tmp_path / "k", "compare", report, shown, before="report-1", after="report-2")
    assert told["summary"] == "Change  +2 MiB\nMost  layer1"
    assert told["answer"] == {"modules": [{"path": "a", "calls": [1] * 5}] * 5, "restored": []}
    assert told["left_out"] == {"nodes": 9, "modules": 2, "modules.calls": 35}
    assert json.loads(Path(told["file"]).read_text()) == json.loads(report)
    told = answer(folder, tmp_path / "k", "plan", "{}", "Model  a\nTarget  b\n\nPeak  7\n\nNode  c", model="hf:A")
    assert told["summary"] == "Model  a\nTarget  b\nPeak  7"


@pytest.mark.parametrize(
    ("tool", "fields", "words"),
    [
        (
            "predict",
            {"model": "hf:A", "batch": 4, "settings": ["n=2"], "lora": "r=8"},
            "--batch=4 --set=n=2 --lora=r=8",
        ),
        ("predict", {"model": "hf:A", "mode": "generate", "budget": "1GiB"}, ""),
        ("sweep", {"model": "hf:A", "over": ["batch=1..4", "card=t4"]}, "--over=batch=1..4 --over=card=t4"),
        ("shard", {"model": "hf:A", "cards": "8xh100"}, "--cards=8xh100"),
        (
            "kv_cache",
            {"model": "hf:A", "engine": "vllm@0.19", "mesh": "tp=2", "utilization": 0.9, "context": "4096"},
            "--engine=vllm@0.19 --mesh=tp=2 --utilization=0.9 --context=4096",
        ),
        ("cards", {"model": "hf:A", "compile": "default", "mesh": "fsdp=8"}, "--compile=default --mesh=fsdp=8"),
    ],
)
def test_each_argument_is_the_option_of_its_name(tool: str, fields: dict[str, Any], words: str, folder: Path) -> None:
    asked = TOOLS[tool].request(**fields)
    verb = "generate" if "mode" in fields else tool.replace("_", "-").replace("predict", "analyze")
    assert [*TOOLS[tool].words(asked, folder)] == [verb, "hf:A", *words.split()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("expected --input 8x64, or --batch-size 8", "expected inputs 8x64, or --batch-size 8"),
        ("--until=steady, --set n=2 or --budget", "until_steady=steady, settings n=2 or budget"),
        ("`fxmem advise --budget 8GiB`; or --budget 8GiB", "`fxmem advise --budget 8GiB`; or budget 8GiB"),
        ("add --run train.py; train.py takes --budget_s", "add program train.py; train.py takes --budget_s"),
    ],
)
def test_options_are_said_by_the_names_of_arguments(text: str, said: str) -> None:
    assert TOOLS["predict"].say(text) == said


def test_what_does_not_apply_to_a_program_is_not_dropped(folder: Path) -> None:
    asked = Predict(program=("train.py",), optimizer="sgd")
    assert "--optimizer=sgd" in TOOLS["predict"].words(asked, folder)  # which `run` refuses by its name


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Agent]:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    paths = os.pathsep.join([str(Path(fxmem.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    server = StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "fxmem", "mcp", str(folder)], env={**os.environ, "PYTHONPATH": paths}
    )
    async with Client(stdio_client(server)) as client:
        assert [each.name for each in (await client.list_tools()).tools] == list(TOOLS)
        yield Agent(client)


def state(folder: Path) -> dict[str, str]:
    """Every file of a folder, and what is in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.truth
def test_an_agent_does_ten_tasks(folder: Path) -> None:
    anyio = pytest.importorskip("anyio")
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    before = state(folder)

    async def work() -> None:
        async with connected(folder) as agent:
            # 1: does it fit, and by how much?
            small = await agent.ask("predict", program=["train.py", "64"], target="rtx3080")
            assert (small["exit_code"], small["answer"]["peak"]["fits"]) == (0, True)
            assert small["meaning"].startswith("fits: ")
            # 2: a batch that is too large is refused with where it runs out
            large = await agent.ask("predict", program=["train.py", "400000"], target="rtx3080")
            assert (large["exit_code"], large["answer"]["peak"]["fits"]) == (4, False)
            assert "train.py:10" in large["answer"]["peak"]["shortage"]
            # 3: what grew between the two
            grown = await agent.ask("compare", before=small["answer"]["report"], after=large["answer"]["report"])
            change = grown["answer"]["requested_bytes"]
            assert change["after"] > change["before"] == small["answer"]["peak"]["requested_bytes"]
            # 4: what to change
            advice = await agent.ask("advise", program=["train.py", "64"], target="rtx3080", quick=True)
            assert advice["answer"]["suggestions"][0]["code"]
            # 5: a leak, with the line that keeps it
            leak = await agent.ask("predict", program=["leak.py", "64"], target="rtx3080", until_steady=True)
            program = leak["answer"]["step"]["program"]
            assert program["growth_bytes"] > 0
            assert "grows by 4 bytes a step" in leak["meaning"]
            assert "until step 1,000" in leak["meaning"]  # the program's own
            assert any("leak.py" in each["kept_at"] for each in program["grown"])
            # 6: mended as it says, it grows no more
            (folder / "leak.py").write_text(
                (folder / "leak.py").read_text().replace("append(loss)", "append(loss.item())")
            )
            mended = await agent.ask("predict", program=["leak.py", "64"], target="rtx3080", until_steady=True)
            assert mended["answer"]["step"]["program"]["growth_bytes"] == 0
            # 7: checkpoints within a budget; put into the script, they free what was promised
            plan = await agent.ask("plan", program=["deep.py", "20000"], target="rtx3080", budget="75%")
            answer = plan["answer"]
            assert answer["after"]["allocated_bytes"] <= answer["budget_bytes"] < answer["before"]["allocated_bytes"]
            (folder / "plan.json").write_bytes(Path(plan["file"]).read_bytes())
            planned = "import fxmem\nmodel = fxmem.checkpoint(model, fxmem.load_plan('plan.json'))\noptimizer ="
            (folder / "planned.py").write_text((folder / "deep.py").read_text().replace("optimizer =", planned, 1))
            kept = await agent.ask("predict", program=["planned.py", "20000"], target="rtx3080")
            assert kept["answer"]["peak"]["allocated_bytes"] == answer["after"]["allocated_bytes"]
            asked = {"model": "model.py:build", "inputs": ["4096x256"], "target": "rtx3080"}
            # 8: a budget that nothing keeps is answered with the least
            least = await agent.ask("plan", **asked, budget="1MiB")
            assert least["exit_code"] == 4
            assert "no plan takes less than" in least["said"]
            # 9: an error from a log
            why = await agent.ask("explain", text=f"step 12\n{LOG}\n")
            assert why["answer"]["shortages"][0]["requested_bytes"] == 2 << 30
            # 10: wrong questions are answered with what would be right
            assert "closest: train.py" in (await agent.ask("predict", program=["tran.py"]))["said"]
            assert "rtx3080" in (await agent.ask("predict", program=["train.py", "1"], target="rtx308"))["said"]
            assert "for which this server" in (await agent.ask("predict", program=["../outside.py"]))["said"]
            said = (await agent.ask("predict", bugdet="3GiB"))["said"]
            assert said.startswith("predict has no argument 'bugdet'; closest: budget; it takes program, model, inputs")
            assert "schema of predict; batch: Input" in (await agent.ask("predict", batch="many"))["said"]
            said = (await agent.ask("predict", model="model.py:build", target="rtx3080"))["said"]
            assert "--input" not in said
            assert "inputs" in said
            assert agent.progress

    anyio.run(work)
    after = state(folder)
    changed = {Path(key).name for key, value in after.items() if before.get(key) != value}
    assert changed == {"leak.py", "plan.json", "planned.py"}  # by the agent itself
    assert before.keys() <= after.keys()


@pytest.mark.truth
def test_a_call_that_is_cancelled_ends_its_program(folder: Path) -> None:
    anyio = pytest.importorskip("anyio")
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    (folder / "slow.py").write_text("import pathlib, time\nprint('begun', flush=True)\ntime.sleep(3600)\n")

    async def work() -> None:
        async with connected(folder) as agent:
            with anyio.move_on_after(6):
                await agent.ask("predict", program=["slow.py"])
            until = time.monotonic() + 20
            while is_running("slow.py") and time.monotonic() < until:
                await anyio.sleep(0.2)
            assert not is_running("slow.py")
            assert (await agent.ask("predict", program=["train.py", "8"]))["exit_code"] == 0

    anyio.run(work)


def is_running(name: str) -> bool:
    """Whether a process of ours has this word on its command line (proc(5))."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in path.read_bytes().split(b"\0"):
                return True
    return False
