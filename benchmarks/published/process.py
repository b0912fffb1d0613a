"""Hold what a process takes beside its allocator against published figures, each left out of the table in its turn.

    python -m benchmarks.published.process     (`make process`; seconds, needs no card)

The table is `fxmem/hardware/context_sizes.json`. A message of CUDA out of memory says what its process has in use, and
what of that the allocator has: given the latter, the process is predicted from all other rows. So are processes that
nvidia-smi or the driver saw before they had reserved anything, with and without a process group of a known size; what
NCCL takes is the difference of several of these, so that of a group no row is quite left out. Rows of other states are
no one process on one card, or do not say how many ranks there were. Writes `benchmarks/results/process-DATE.md`; exit
code 1 if the median error is above 2 %, or a range holds less than 95 %.
"""

from __future__ import annotations

import datetime
import re
import statistics
import sys
from typing import NamedTuple
from unittest import mock

from benchmarks import RESULTS
from fxmem.errors import UsageError
from fxmem.hardware import catalogue, context
from fxmem.hardware.context import ContextSize
from fxmem.records.profile import Target
from fxmem.records.units import format_bytes

_MESSAGE = re.compile(r"\(([\d.]+) - ([\d.]+) - ([\d.]+) GiB\)")
_GROUP = re.compile(r"process group of ([0-9]+)")
_GIB = 1 << 30


class Figure(NamedTuple):
    """One published process."""

    row: ContextSize
    kind: str
    reserved: int
    """Bytes of its allocator; 0 before it had any."""
    process: int
    """All that it had in use."""


def read_figures() -> list[Figure]:
    """Those of one process on one card, or of a process group whose size is known."""
    found = []
    for row in context.known_context_sizes():
        message, group = _MESSAGE.search(row.source), _GROUP.fullmatch(row.state)
        if group:
            found.append(Figure(row, "in a process group", 0, row.nbytes))
        elif row.state in ("bare", "working") and message is not None:
            total, *parts = (float(each) for each in message.groups())
            found.append(Figure(row, "ran out of memory", int(sum(parts) * _GIB), int(total * _GIB)))
        elif row.state in ("bare", "working"):
            found.append(Figure(row, f"by the driver, {row.state}", 0, row.nbytes))
    return found


def predict(figure: Figure) -> tuple[int, int] | None:
    """The range for a process, from all other rows; None where there are none."""
    row, group = figure.row, _GROUP.fullmatch(figure.row.state)
    try:
        card = catalogue.target(row.card)
    except UsageError:
        card = Target(name="-", device="cuda", full_name=row.card, capability=row.capability)
    others = tuple(each for each in context.known_context_sizes() if each is not row)
    with mock.patch.object(context, "known_context_sizes", return_value=others):
        found = context.process_range(card.among(int(group[1])) if group else card, figure.reserved)
    return None if found is None else (found.low, found.high)


def main() -> int:
    """Predict all; return the exit code."""
    figures = sorted(read_figures(), key=lambda each: (each.kind, each.row.card))
    errors, of_messages, held, lines = list[float](), list[float](), 0, list[str]()
    for figure in figures:
        if (found := predict(figure)) is None:
            continue
        (low, high), margin = found, figure.row.margin
        error = (low + high) / 2 / figure.process - 1
        is_held = low - margin <= figure.process <= high + margin
        errors.append(abs(error))
        of_messages += [abs(error)] if figure.reserved else []
        held += is_held
        span, off = f"{format_bytes(low)} to {format_bytes(high)}", f"{error:+.2%}"
        cells = (figure.kind, figure.row.card, format_bytes(figure.process), span, off, "yes" if is_held else "no")
        lines.append(f"| {' | '.join(cells)} |")
    median, share = statistics.median(errors), held / len(errors)
    said = (
        f"{len(errors)} figures: the middle is off by {median:.2%} in the median, by "
        f"{statistics.median(of_messages):.2%} for the {len(of_messages)} that ran out of memory; {held} are in the "
        f"range, {share:.0%}."
    )
    print(said)
    text = [
        "# Processes on a card, each predicted without its own row",
        "",
        said,
        "",
        "`make -C benchmarks process`. What the allocator has reserved is given, as the message says it; 0 before a "
        "program has begun.",
        "",
        "| What | Card | Process | Range | Middle | Held |",
        "|---|---|---:|---:|---:|---|",
        *lines,
        "",
    ]
    path = RESULTS / f"process-{datetime.date.today()}.md"
    path.write_text("\n".join(text), encoding="utf-8")
    return int(median > 0.02 or share < 0.95)


if __name__ == "__main__":
    sys.exit(main())
