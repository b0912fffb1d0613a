"""Print how much code each room of the package has: `make lines`. A change that adds much is worth a second look.

A line of code has a token on it; docstrings, comments and blank lines do not count.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fxmem"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_code(source: str) -> int:
    """How many lines of a module are code."""
    texts = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    documented = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for each in tokens if each.type not in _NO_CODE for n in range(each.start[0], each.end[0] + 1)}
    return len(lines - documented)


def main() -> None:
    """Print a row for each room, the largest first, then the sum; of another package if one is named."""
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    code: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        room, source = path.relative_to(package).parts[0], path.read_text(encoding="utf-8")
        files[room] += 1
        lines[room] += (count := len(source.splitlines()))
        code[room] += count_code(source)
        longest[room] = max(longest[room], count)
    print(f"{'room':<16}{'files':>6}{'lines':>8}{'code':>8}{'longest file':>14}")
    for room, count in code.most_common():
        print(f"{room:<16}{files[room]:>6}{lines[room]:>8,}{count:>8,}{longest[room]:>14}")
    print(f"{'fxmem':<16}{files.total():>6}{lines.total():>8,}{code.total():>8,}{max(longest.values()):>14}")


if __name__ == "__main__":
    main()
