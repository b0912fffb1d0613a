"""The server: it lists the tools, and runs one command at a time for those that are called."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.streams.text import TextReceiveStream
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent
from mcp.types import Tool as ListedTool
from pydantic import ValidationError

from fxmem import __version__
from fxmem.cli.tools.requests import TOOLS, Compare, ExplainError, Predict, program_words
from fxmem.errors import UsageError, closest
from fxmem.memory.budget import parse_bytes
from fxmem.memory.report_reader import load_report
from fxmem.records import schemas
from fxmem.records.shortage import Explanation
from fxmem.show.facts import find_fit
from fxmem.show.text.explanation import summarize

_PATIENCE_S: Final = 10.0
"""Seconds that a command has to end in when it is cancelled."""
_MOST: Final = 5
"""Entries of a list that an answer shows."""
_MEANINGS: Final = {
    0: "done",
    1: "the program raised, does what no run without data can follow, or the answer is not known",
    2: "an argument is not understood",
    3: "something is not installed",
    4: "it does not fit, or no answer keeps the budget",
}
_INSTRUCTIONS: Final = (
    "Predicts the GPU memory of PyTorch programs and models without a GPU. Ask predict before a job is started; where "
    "it does not fit, advise, plan or max_batch; of an out-of-memory error, explain. Scripts run as they are on "
    "tensors without data; the user's files stay as they are, and nothing is sent. Numbers are bytes. What `unknowns` "
    "and `assumptions` say, the number does not know. `summary` is the answer in words; `left_out` counts what the "
    "lists of `answer` have beyond it, and `file` has all."
)


class ToolServer:
    """Answers calls for one folder.

    Args:
        folder: in which the user's scripts are.
        kept: where reports go.
    """

    def __init__(self, folder: Path, kept: Path) -> None:
        self._folder, self._kept = folder, kept
        self._count = 0
        self._turn = anyio.Lock()

    def build(self) -> Server[Any]:
        """The server of the `mcp` package."""
        return Server(
            "fxmem", version=__version__, instructions=_INSTRUCTIONS, on_list_tools=self._list, on_call_tool=self._call
        )

    async def _list(self, context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                ListedTool(
                    name=name,
                    description=(each.request.__doc__ or "").partition("\n")[0],
                    input_schema=schemas.describe(each.request),
                )
                for name, each in TOOLS.items()
            ]
        )

    async def _call(self, context: Any, params: Any) -> CallToolResult:
        try:
            async with self._turn:
                return await self._answer(params.name, params.arguments or {}, context.session.report_progress)
        except UsageError as error:
            return _refusal(2, str(error))

    async def _answer(
        self, name: str, arguments: dict[str, Any], progress: Callable[..., Awaitable[None]]
    ) -> CallToolResult:
        tool = TOOLS.get(name)
        if tool is None:
            raise UsageError(f"expected one of the tools {', '.join(TOOLS)}, got {name!r}")
        try:
            asked = tool.request.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                names = tool.request.model_fields
                near = closest(where, names)
                raise UsageError(f"{name} has no argument {where!r}{near}; it takes {', '.join(names)}") from None
            raise UsageError(f"expected arguments as in the schema of {name}; {where}: {first['msg']}") from None
        if isinstance(asked, Compare):
            asked = Compare(before=self._find(asked.before), after=self._find(asked.after))
        program = program_words(asked, self._folder)
        self._count += 1
        answer = self._kept / f"report-{self._count}.json"
        words = [*tool.words(asked, self._folder), "--json", str(answer), *program]
        if any("\0" in word for word in words):
            raise UsageError("expected words without a NUL character, which no command line can have")
        text = asked.text if isinstance(asked, ExplainError) else ""
        budget = parse_bytes(asked.budget) if isinstance(asked, Predict) and asked.budget else None
        code, said, shown = await self._run(words, text, progress)
        said, shown = tool.say(said), tool.say(shown)
        if not answer.exists():
            return _refusal(code, said)
        found = json.loads(answer.read_text(encoding="utf-8"))
        meaning = _MEANINGS.get(code, "")
        said = said if code else ""  # else it is where the work was
        if isinstance(asked, Predict):
            report = load_report(answer)
            fit = find_fit(report, report.peak, budget)
            meaning, code = tool.say(fit.verdict), fit.exit_code
        elif isinstance(asked, ExplainError):
            meaning = tool.say(summarize(Explanation.model_validate(found)))
        left_out = {key: len(found.pop(key)) for key in tool.leaves_out if found.get(key)}
        result = _shorten(found, "", left_out) | ({"report": answer.stem} if isinstance(asked, Predict) else {})
        head, *rest = shown.strip().split("\n\n")
        summary = "\n".join([head, *(rest[:1] if head.startswith("Model") else ())])  # what it is of comes first
        told = {"exit_code": code, "meaning": meaning, "summary": summary, "said": said}
        return _result(told | {"answer": result, "left_out": left_out, "file": str(answer)})

    def _find(self, name: str) -> str:
        """The file of an earlier report."""
        known = sorted(path.stem for path in self._kept.glob("report-*.json"))
        if name not in known:
            raise UsageError(f"expected a report of predict ({', '.join(known) or 'none yet'}), got {name!r}")
        return str(self._kept / f"{name}.json")

    async def _run(
        self, words: Sequence[str], text: str, progress: Callable[..., Awaitable[None]]
    ) -> tuple[int, str, str]:
        """Run a command of fxmem, which ends with the call; its exit code, the last line that it said, and its text."""
        command = [sys.executable, "-P", "-m", "fxmem", *words]
        shown = self._kept / "shown.txt"
        with shown.open("wb") as stdout:
            process = await anyio.open_process(
                command, cwd=self._folder, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE
            )
        assert process.stdin is not None
        assert process.stderr is not None
        said, count = "", 0
        try:
            with contextlib.suppress(anyio.BrokenResourceError):
                await process.stdin.send(text.encode())
            await process.stdin.aclose()
            rest = ""
            async for chunk in TextReceiveStream(process.stderr, errors="replace"):
                *lines, rest = (rest + chunk).split("\n")
                for line in lines:
                    if line.startswith("fxmem: ") and not line.startswith("fxmem: wrote "):
                        said, count = line.removeprefix("fxmem: "), count + 1
                        await progress(count, None, said)
            return await process.wait(), said, shown.read_text(encoding="utf-8", errors="replace")
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)


async def _end(process: Any) -> None:
    """End a command that is still there; it ends what it has started."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(_PATIENCE_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


def _shorten(value: Any, path: str, left_out: dict[str, int]) -> Any:
    """A value without what its lists have beyond their first entries, which `left_out` counts by path."""
    if isinstance(value, dict):
        return {key: _shorten(each, f"{path}.{key}".lstrip("."), left_out) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > _MOST:
        left_out[path] = left_out.get(path, 0) + len(value) - _MOST
    return [_shorten(each, path, left_out) for each in value[:_MOST]]


def _result(content: dict[str, Any], *, is_error: bool = False) -> CallToolResult:
    text = TextContent(type="text", text=json.dumps(content))
    return CallToolResult(content=[text], structured_content=content, is_error=is_error)


def _refusal(code: int, said: str) -> CallToolResult:
    return _result({"exit_code": code, "meaning": _MEANINGS.get(code, ""), "said": said}, is_error=True)


def serve(folder: Path) -> None:
    """Answer on stdin and stdout until the client leaves."""
    with tempfile.TemporaryDirectory(prefix="fxmem-mcp-") as kept:
        anyio.run(partial(_serve, ToolServer(folder, Path(kept)).build()))


async def _serve(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
