"""Advice as text: a ranked table, then each change's code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxmem.records.advice import Advice, Suggestion
from fxmem.records.units import exact_bytes, format_bytes, percent, printable
from fxmem.show.facts import header_facts
from fxmem.show.sections import Fact
from fxmem.show.text.tables import RULED, facts, fit, grid, label_content, note, render

_EFFECTS = {"none": "none", "rounding": "rounding", "output": "output", "training": "training"}


def table(advice: Advice, *, width: int = 100, color: bool = False) -> str:
    """The advice as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    return render(list(_parts(advice, width)), width, color)


def _parts(advice: Advice, width: int) -> Iterator[RenderableType]:
    peak = advice.before
    rows = [Fact("Peak", f"{exact_bytes(peak.counted_bytes)} in {peak.phase.value}")]
    if advice.budget_bytes is not None:
        over = peak.counted_bytes - advice.budget_bytes
        verdict = f"{format_bytes(over)} too much" if over > 0 else "kept as it is"
        rows.append(Fact("Budget", f"{exact_bytes(advice.budget_bytes)}: {verdict}"))
    yield facts([*header_facts(advice), *rows])
    yield _ranking(advice, width) if advice.suggestions else note("Nothing that was tried frees memory.")
    judged = "training = another optimisation" if advice.step.generation is None else "output = other tokens"
    yield note(f"Numbers: none = the same results; rounding = another precision; {judged}.")
    if advice.together is not None:
        yield label_content("Together", _combination(advice, advice.together))
    elif advice.budget_bytes is not None and peak.counted_bytes > advice.budget_bytes:
        missing = "no set of these changes keeps the budget; try a smaller batch (fxmem max-batch)"
        yield facts([Fact("Together", missing, tone="bad")])
    if advice.suggestions:
        yield label_content("Code", _code(advice))
    if advice.refused:
        refused = grid(24, None)
        for each in advice.refused:
            refused.add_row(Text(fit(each.key, 24)), Text(printable(each.reason)))
        yield label_content("Not here", refused)


def _ranking(advice: Advice, width: int) -> Table:
    before, reserved = advice.before.counted_bytes, advice.before.reserved_bytes
    ranked = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    wide, wider = width >= 72, reserved is not None and width >= 90
    optional = [("of", 7)] * wide + [("Reserved", 9)] * wider
    columns = [("Peak", 9), ("Saves", 9), *optional, ("FLOPs", 8), ("Numbers", 8)]
    room = width - sum(size + 2 for _, size in columns) - 1
    ranked.add_column("Change", width=room, overflow="fold")
    for heading, size in columns:
        ranked.add_column(heading, width=size, justify="left" if heading == "Numbers" else "right", no_wrap=True)
    for number, each in enumerate(advice.suggestions, 1):
        cells = [format_bytes(each.peak.counted_bytes), format_bytes(each.saved_bytes)]
        cells += [percent(each.saved_bytes, before)] * wide + [format_bytes(each.peak.reserved_bytes)] * wider
        cells += [format_extra(advice, each), _EFFECTS[each.effect]]
        name = textwrap.fill(
            f"{number}. {printable(each.title)}", room, subsequent_indent="   ", break_on_hyphens=False
        )
        ranked.add_row(Text(name), *map(Text, cells))
    return ranked


def format_extra(advice: Advice, each: Suggestion) -> str:
    """FLOPs beyond the unchanged step's, as a share of them."""
    if each.extra_flops is None or not advice.before_flops:
        return "unknown"
    share = 100 * each.extra_flops / advice.before_flops
    return "same" if abs(share) < 0.05 else f"{share:+.1f} %"


def _combination(advice: Advice, each: Suggestion) -> RenderableType:
    used = each.peak.counted_bytes
    spare = format_bytes((advice.budget_bytes or 0) - used)
    return Text(
        (
            f"{printable(each.title)}\n{exact_bytes(used)}, {spare} to spare; "
            f"FLOPs {format_extra(advice, each)}; numbers: {each.effect}"
        ),
        style="green",
    )


def _code(advice: Advice) -> RenderableType:
    listed = grid(-3, None)
    for number, each in enumerate(advice.suggestions, 1):
        listed.add_row(
            Text(f"{number}."),
            Text("\n".join(map(printable, each.code.splitlines()))).append(
                f"\n{printable(each.note)}" if each.note else "", style="dim"
            ),
        )
    return listed
