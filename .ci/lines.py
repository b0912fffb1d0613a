"""Print how many lines each room of the package has: `make lines`. A change that adds many is worth a second look."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fxmem"


def main() -> None:
    """Print a row for each room, the largest first, then the sum."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        count = len(path.read_text(encoding="utf-8").splitlines())
        files[room] += 1
        lines[room] += count
        longest[room] = max(longest[room], count)
    print(f"{'room':<16}{'files':>6}{'lines':>8}{'longest file':>14}")
    for room, count in lines.most_common():
        print(f"{room:<16}{files[room]:>6}{count:>8,}{longest[room]:>14}")
    print(f"{'fxmem':<16}{files.total():>6}{lines.total():>8,}{max(longest.values()):>14}")


if __name__ == "__main__":
    main()
