"""The pages of the documentation, and their fenced blocks: read, run, and written anew.

A block with `title="NAME"` is a file, which is written to the page's folder. A block of `python` is run, all of a page
in one namespace; the block of `text` after it is what it prints. In a block of `console`, lines after `$ ` are commands
and the others what they print, where a line `...` leaves lines out. A block of `sh` holds commands whose output is not
shown.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fxmem.__main__ import main
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import serve
from fxmem.hardware.releases import RELEASES

ROOT = Path(__file__).parents[2]
CHANGES = ROOT / "docs" / "changes"
SKILL = ROOT / "skills/fxmem/SKILL.md"
"""A page that lies where the tools of coding agents look."""
PAGES = [ROOT / "README.md", SKILL, *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent != CHANGES)]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOME = "/home/user/training"
"""What stands in a page for the folder that its commands run in; of the same length, so that lines break alike."""
LEFT_OUT = "..."
NEWEST = ".".join(map(str, max(RELEASES)))
"""What `pip install` brings, and all pages but README show."""
PINNED = re.findall(
    r"^PINNED_TORCH := (\d+\.\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
)[0]
"""What `make demo` brings, and README shows."""


def shown_torch(page: Path) -> str:
    """Return the release of torch whose numbers a page shows."""
    return PINNED if page == ROOT / "README.md" else NEWEST


def of_torch(release: str) -> pytest.MarkDecorator:
    """Return the mark of a test of numbers that one release of torch prints."""
    return pytest.mark.skipif(
        not torch.__version__.startswith(f"{release}."),
        reason=f"shows torch {release}: `make sample{' TORCH=latest' if release == NEWEST else ''}`",
    )


@dataclass
class Block:
    """A fenced block: its language, the file it is, its text, and where the text stands in the page."""

    language: str
    title: str | None
    text: str
    span: tuple[int, int]


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(found[1], found[2], found[3], found.span(3)) for found in FENCE.finditer(text)]


def expand(shown: str, printed: str) -> str:
    """Return `printed` with the lines left out that `shown` leaves out, or whole where it does not match."""
    if LEFT_OUT not in shown.splitlines():
        return printed
    lines, result, at = printed.splitlines(), [], 0
    for number, part in enumerate(re.split(rf"^{re.escape(LEFT_OUT)}\n", shown, flags=re.MULTILINE)):
        wanted = part.splitlines()
        if number:
            result.append(LEFT_OUT)
        if not wanted:
            continue
        start = re.match(r"\s*\S*", wanted[0])[0] if number else ""
        begin = next((index for index in range(at, len(lines)) if lines[index].startswith(start)), None)
        if begin is None:
            return printed
        at = begin + len(wanted)
        result += lines[begin:at]
    return "".join(f"{line}\n" for line in result)


@dataclass
class Reader:
    """Follows one page as a user would, in a folder of its own."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    code: int = 0
    """Exit code of the last command."""

    def rewrite(self, page: str) -> str:
        """Return the page with what its blocks print now."""
        parts, at, earlier = [], 0, None
        for block in blocks(page):
            parts.append(page[at : block.span[0]])
            parts.append(self.follow(block, earlier))
            earlier, at = (block if block.language == "python" and not block.title else None), block.span[1]
        return "".join([*parts, page[at:]])

    def follow(self, block: Block, earlier: Block | None) -> str:
        """Do what the block says; return its text with what is printed now."""
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if block.language == "yaml":
                self.follow_workflow(yaml.safe_load(block.text))
        elif block.language == "python":
            self.printed = self.execute(block.text)
        elif block.language == "text":
            assert earlier is not None, f"a block of text that nothing printed:\n{block.text}"
            return expand(block.text, self.printed)
        elif block.language == "console":
            return "".join(self.session(block.text))
        else:
            assert block.language == "sh", f"a block of {block.language}, which no test runs:\n{block.text}"
            for command in block.text.splitlines():
                self.command(command)
                assert self.code == 0, command
        return block.text

    def follow_workflow(self, workflow: Any) -> None:
        """Run what the steps of a GitHub workflow run."""
        steps = (
            workflow if isinstance(workflow, list) else [s for job in workflow["jobs"].values() for s in job["steps"]]
        )
        for step in steps:
            for command in step.get("run", "").splitlines():
                self.command(command)
                assert self.code == 0, command

    def execute(self, code: str) -> str:
        """Run Python in the page's namespace; return what it prints."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "<documentation>", "exec"), self.names)
        return self.plain(out.getvalue())

    def session(self, text: str) -> Iterator[str]:
        """Yield the commands of a block of `console`, each with what it prints now."""
        for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE):
            if part:
                command, _, shown = part.partition("\n")
                yield f"{command}\n{expand(shown, self.command(command.removeprefix('$ ')))}"

    def command(self, line: str) -> str:
        """Run a command line; return what it prints, errors included where it fails."""
        first, *pipes = line.split(" | ")
        words = shlex.split(first, comments=True)
        match words:
            case []:
                return ""
            case ["echo", "$?"]:
                return f"{self.code}\n"
            case ["fxmem", "serve", *arguments]:  # it would go on until Ctrl-C
                Parser().add_arguments(serve.ARGUMENTS).parse_args(arguments)
                self.code, printed = 0, ""
            case ["fxmem", "run", *arguments] if "report.json" in arguments:  # it has what this process has on the host
                printed = self.process([sys.executable, "-m", "fxmem", "run", *arguments], columns="88")
            case ["fxmem", *arguments]:
                printed = self.call(lambda: main(arguments))
            case ["python", script]:
                printed = self.call(lambda: runpy.run_path(script, run_name="__main__") and 0)
            case ["pytest", *arguments]:
                printed = self.process([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments])
            case ["pip", "install", *packages]:
                printed = check_packages(packages)
            case ["source", script]:  # there is an environment already
                assert script == ".venv/bin/activate"
                self.code, printed = 0, ""
            case ["make", target]:
                assert target in targets_of_make(), target
                printed = ""
            case _:
                printed = self.process(["bash", "-c", first])
        if pipes:
            printed = self.process(["bash", "-c", " | ".join(pipes)], printed)
        return self.plain(printed)

    def call(self, function: Any) -> str:
        """Call what a command runs, within this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.code = function() or 0
        progress = re.compile(r"fxmem: .* \.\.\.")
        errors = [line for line in err.getvalue().splitlines() if not progress.fullmatch(line)] if self.code else []
        return out.getvalue() + "".join(f"{line}\n" for line in errors)

    def process(self, words: list[str], text: str | None = None, columns: str = "80") -> str:
        """Run another program; return what it prints."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "COLUMNS": columns}
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, check=False, cwd=self.folder, env=environment
        )
        self.code = done.returncode
        return done.stdout + (done.stderr if done.returncode else "")

    def plain(self, printed: str) -> str:
        """Return the text without blanks at line ends, the folder named as in the pages."""
        lines = printed.replace(str(self.folder), HOME).splitlines()
        return "".join(f"{line.rstrip()}\n" for line in lines)


def targets_of_make(folder: str = "") -> set[str]:
    """Return the targets of the Makefile in a folder of the repository, its root by default."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / folder / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def check_packages(packages: list[str]) -> str:
    """Hold what `pip install` names against the package's extras; nothing is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in packages:
        extra = re.search(r"\[(.+)\]", package)
        if extra:
            assert set(extra[1].split(",")) <= set(project["optional-dependencies"]), package
    return ""
