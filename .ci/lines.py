"""Print how much code each room has, and what a change adds: `make lines`. Fails above the wall of pyproject.toml.

A line of code has a token on it; docstrings, comments and blank lines do not count. Tokens are counted as well: joining
two lines saves none. The rooms of `simulation` are listed one by one.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_MAINS = ("origin/main", "main")
_Texts = Iterator[tuple[Path, str]]


def count_code(source: str) -> tuple[int, int]:
    """How many lines of a module are code, and how many tokens are on them."""
    texts = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    documented = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type not in _NO_CODE]
    code = [each for each in tokens if each.start[0] not in documented]
    return len({n for each in code for n in range(each.start[0], each.end[0] + 1)}), len(code)


class Counts:
    """Files, lines, lines of code and tokens, by room."""

    def __init__(self, texts: _Texts) -> None:
        self.files: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.code: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        for path, text in texts:
            parts = path.parts[:-1]
            room = "/".join(parts[: 2 if parts[:1] == ("simulation",) else 1]) or path.name
            code, tokens = count_code(text)
            self.files[room] += 1
            self.lines[room] += len(text.splitlines())
            self.code[room] += code
            self.tokens[room] += tokens


def read_folder(package: Path) -> _Texts:
    """The modules of a package, and their text."""
    for path in package.rglob("*.py"):
        yield path.relative_to(package), path.read_text(encoding="utf-8")


def read_main() -> Counts | None:
    """The package where this branch left main; None where git has no main, or HEAD is it."""
    for name in _MAINS:
        found = subprocess.run(["git", "merge-base", "HEAD", name], cwd=ROOT, capture_output=True, text=True)
        if found.returncode == 0:
            archive = subprocess.run(["git", "archive", found.stdout.strip(), "fxmem"], cwd=ROOT, capture_output=True)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                members = [each for each in files.getmembers() if each.name.endswith(".py")]
                texts = [(Path(each.name).relative_to("fxmem"), files.extractfile(each)) for each in members]
                return Counts((path, file.read().decode()) for path, file in texts if file is not None)
    return None


def main() -> int:
    """Print the table; 1 if there is more code than `--most`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", nargs="?", type=Path, help="another package")
    parser.add_argument("--most", type=int, help="lines of code that fail; `tool.house.most-code-lines` by default")
    settings = parser.parse_args()
    most, before = settings.most, None
    if settings.package is None:
        before = read_main()
        if most is None:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            most = project["tool"]["house"]["most-code-lines"]
    now = Counts(read_folder(settings.package or ROOT / "fxmem"))
    head = f"{'room':<24}{'files':>6}{'lines':>8}{'code':>8}{'tokens':>9}"
    print(head + (f"{'code':>9}{'tokens':>9}  against main" if before else ""))
    rooms = sorted({*now.code, *(before.code if before else ())}, key=lambda room: -now.code[room])
    for room in (*rooms, None):
        files, lines, code, tokens = (
            counted.total() if room is None else counted[room]
            for counted in (now.files, now.lines, now.code, now.tokens)
        )
        row = f"{room or 'fxmem':<24}{files:>6}{lines:>8,}{code:>8,}{tokens:>9,}"
        if before is not None:
            old = [each.total() if room is None else each[room] for each in (before.code, before.tokens)]
            row += "".join(
                f"{new - was:>+9,}" if new != was else " " * 9 for new, was in zip((code, tokens), old, strict=True)
            )
        print(row.rstrip())
    code = now.code.total()
    if most is not None and code > most:
        print(f"expected at most {most:,} lines of code (pyproject.toml, tool.house), got {code:,}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
