"""How often plans are the cheapest there are: `python -m benchmarks.planning.optima 0:200` (`make optima`).

Graphs of four or five operators made at random; at every peak that a cheapest plan of one has, and at two hundredths
more, `fxmem.plan` beside exhaustive search (`tests/small_graphs.py`). Written to benchmarks/results/optima-DATE.md.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Iterator, Sequence

import torch

from benchmarks import RESULTS
from tests.small_graphs import Comparison, comparisons

KINDS = (
    ("one level asked for", lambda each: not each.nested),
    ("any depth, one level is as cheap", lambda each: each.nested and not each.needed),
    ("any depth, regions within regions are cheaper, or alone fit", lambda each: each.nested and each.needed),
)
VERDICTS = ("optimal", "dearer", "missed", "exceeded", "cheaper")


def rows(found: Sequence[Comparison]) -> Iterator[str]:
    """Rows of the table."""
    yield (
        "| plans | budget | instances | cheapest | dearer | by, median | none found | over budget | cheaper than "
        "the search's |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for title, chosen in KINDS:
        for spare in (False, True):
            each = [one for one in found if chosen(one) and one.spare == spare]
            counts = [sum(one.verdict == word for one in each) for word in VERDICTS]
            dearer = [
                one.found_flops / one.best_flops - 1
                for one in each
                if one.verdict == "dearer" and one.found_flops and one.best_flops
            ]
            by = f"{statistics.median(dearer):+.0%}" if dearer else ""
            share = f"{counts[0]} ({counts[0] / max(len(each), 1):.0%})"
            cells = [title, "2 % to spare" if spare else "to the byte", len(each), share, counts[1], by, *counts[2:]]
            yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Make the graphs asked for and write the page."""
    parser = argparse.ArgumentParser(description="How often plans are the cheapest there are.")
    parser.add_argument(
        "seeds",
        nargs="?",
        default="0:200",
        metavar="FIRST:LAST",
        help="of the graphs (default 0:200, a quarter of an hour)",
    )
    first, _, last = parser.parse_args().seeds.partition(":")
    found = [each for seed in range(int(first), int(last)) for each in comparisons(seed)]
    page = [
        "# How often plans are the cheapest",
        "",
        (
            f"torch {torch.__version__}; `make optima`; graphs {first} to {int(last) - 1}, of four or five operators. "
            f"Exhaustive search over every set of regions,"
        ),
        (
            "nested to any depth, and, of those that stand alone, every choice of products whose results they keep; "
            "simulated apart from the planners, the"
        ),
        (
            "cheapest applied and analysed. A budget is the peak of such a cheapest plan, to the byte or with 2 % to "
            "spare."
        ),
        "",
        *rows(found),
        "",
    ]
    (RESULTS / f"optima-{datetime.date.today()}.md").write_text("\n".join(page), encoding="utf-8")
    print("\n".join(page))


if __name__ == "__main__":
    main()
