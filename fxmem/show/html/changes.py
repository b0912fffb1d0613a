"""What else a page is of: lines, changes between steps, an explained shortage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from fxmem.memory.findings import Finding, find
from fxmem.records.advice import Advice
from fxmem.records.breakdown import LineFigures, LineReport, LineRow, TensorGroup
from fxmem.records.plan import Edit, Plan
from fxmem.records.profile import Profile, Timeline
from fxmem.records.shortage import Explanation, Holder
from fxmem.records.units import format_bytes, format_flops, package_path, percent, short_bytes
from fxmem.show.html.page import fill_page
from fxmem.show.html.sections import draw_views
from fxmem.show.plan_facts import describe_saving, describe_worth
from fxmem.show.plots import history_svg, segments_svg
from fxmem.show.sections import TableColumn, make_table, numbers
from fxmem.show.shortage_facts import UNKNOWN, count_blocks, hold_table, joined_facts, joined_table, snapshot_facts
from fxmem.show.text.by_line import MEANINGS, first_facts, format_group, pick_shown, short_file, source_text, sum_facts

_MOST = 3
_WORTH = 100
"""What saves less than such a part of the peak is left out."""


class Change(NamedTuple):
    """A change to a program, for a reader who may make it."""

    title: str
    worth: str
    code: str
    """What to write; or, where that is no code, what to do."""
    is_code: bool
    rank: tuple[bool, bool, int]
    """Less for what is better."""


def best_changes(profile: Profile, timeline: Timeline, plan: Plan | None, advice: Advice | None) -> list[Change]:
    """At most three: what grows, then what frees most and leaves the results as they are.

    They are those of the advice and of the plan, and what is found in the record.
    """
    found = [_from_finding(each) for each in find(profile, timeline)]
    if advice is not None:
        found += _from_advice(advice)
    if plan is not None and plan.after.requested_bytes < plan.before.requested_bytes:
        found.append(_from_plan(plan))
    return sorted(found, key=lambda each: each.rank)[:_MOST]


def _from_finding(each: Finding) -> Change:
    place = f"{each.place}: " if each.place else ""
    saved = each.nbytes if each.saved_bytes is None else each.saved_bytes
    rank = (each.of not in ("step", "batch", "pass"), False, -saved)
    return Change(place + each.text, describe_worth(each), each.change, False, rank)


def _from_advice(advice: Advice) -> Iterator[Change]:
    whole = advice.before.counted_bytes
    for each in advice.suggestions:
        if each.saved_bytes * _WORTH < whole and each.growth_bytes is None:
            continue
        effect = "the same results" if each.effect == "none" else f"numbers: {each.effect}"
        extra = f", {format_flops(each.extra_flops)} FLOPs more" if (each.extra_flops or 0) > 0 else ""
        worth = f"saves {format_bytes(each.saved_bytes)}, {percent(each.saved_bytes, whole)}{extra}; {effect}"
        rank = (each.growth_bytes is None, each.effect in ("training", "output"), -each.saved_bytes)
        code = "\n".join(_changed_lines(each.patch)) or each.code
        code = "\n".join(filter(None, [code, each.note and f"# {each.note}"]))
        yield Change(each.title, worth, code, True, rank)


def _changed_lines(patch: str) -> Iterator[str]:
    """The lines that a patch changes, each group after its place; the whole is for `git apply`."""
    file, number, is_within = "", 0, False
    for line in patch.splitlines():
        if line.startswith("--- a/"):
            number = 0
        elif line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif line.startswith("@@"):
            number, is_within = int(line.split()[1].partition(",")[0].removeprefix("-")), False
        elif number and line[:1] in ("-", "+"):
            yield from () if is_within else [f"# {file}:{number}"]
            yield line
            number, is_within = number + (line[0] == "-"), True
        else:
            number, is_within = number + bool(number), False


def _from_plan(plan: Plan) -> Change:
    """The plan's edits, where they are all of it and of the user's own lines; else what applies or writes it."""
    found = [region.edit for region in plan.all_regions()]
    edits = dict.fromkeys(each for each in found if each is not None)
    is_own = all(package_path(each.source.file) == each.source.file for each in edits)
    code = "fxmem plan --code analyses it and writes its edits"
    if is_own and None not in found:
        code = "\n".join(line for edit in edits for line in _list_lines(edit))
    elif plan.analysed:
        code = "import fxmem\n# plan.json: what fxmem plan --json wrote, this plan"
        code += '\nmodel = fxmem.checkpoint(model, fxmem.load_plan("plan.json"))'
    freed = plan.before.counted_bytes - plan.after.counted_bytes
    is_code = plan.analysed or (is_own and None not in found)
    return Change(f"checkpoints: {plan.extent}", describe_saving(plan), code, is_code, (True, False, -freed))


def _list_lines(edit: Edit) -> Iterator[str]:
    yield f"- {edit.source.code}  # {edit.source.place}"
    yield from (f"+ {line}" for line in edit.after.splitlines())


# --- memory by source line as one HTML page: the annotated source, without a script -----------------------------------


_MEANINGS = dict(MEANINGS) | {"Most": "most bytes alive during its runs, everything counted"}
_HEADS = [(head, _MEANINGS[head]) for head in "Calls Allocated Kept Freed Saved Most Alive Backward".split()]
_AROUND = 10
"""Lines shown before and after one that has figures."""


class PageLine(NamedTuple):
    """One row of a file's table."""

    code: str
    number: int | None = None
    """None: a gap between lines, or of no line shown."""
    figures: Sequence[tuple[str, str]] = ()
    """What stands under each heading, and the percent of its bar; empty for a line that does nothing."""
    tensors: tuple[int, Sequence[str]] = (0, ())
    """Those that come and go there: how many, and their names."""


def lines_html(report: LineReport) -> str:
    """Write the page of the memory by source line, of `fxmem.memory.by_line.by_line`."""
    mode = "training" if report.step.mode == "train" else "inference"
    title = f"{report.model}: memory by source line of one {mode} step"
    files = [
        (f"file{index}", short_file(file), list(_file_lines(report, file))) for index, file in enumerate(report.files)
    ]
    return fill_page(
        "by_line",
        report,
        title=title,
        heading=title,
        sections={**{anchor: name for anchor, name, _ in files}, "rest": "Of no line shown"},
        header=[*first_facts(report), *sum_facts(report)],
        meanings="; ".join(f"{heading}: {meaning}" for heading, meaning in MEANINGS),
        resident=_list_tensors(report.resident, ()),
        heads=_HEADS,
        files=files,
        rest=[PageLine(row.what, None, _figures(row, 0), _list_tensors(row.came, row.went)) for row in report.rest],
    )


def _file_lines(report: LineReport, file: str) -> Iterator[PageLine]:
    lines: Mapping[int, LineRow] = {line.line: line for line in report.lines if line.file == file}
    source = source_text(report, file)
    most = max((line.kept_bytes for line in lines.values()), default=0)
    last = 0
    for number in pick_shown(lines, source, _AROUND):
        if number > last + 1:
            yield PageLine("")
        last, line, code = number, lines.get(number), source[number].expandtabs()
        if line is None:
            yield PageLine(code, number)
        else:
            yield PageLine(code, number, _figures(line, most), _list_tensors(line.came, line.went))


def _figures(row: LineFigures, most: int) -> list[tuple[str, str]]:
    """What stands under each heading. Kept bytes have a bar, relative to the most of any line."""
    names = ("allocated", "kept", "freed", "saved", "peak", "after", "backward_allocated")
    sizes = {name: getattr(row, f"{name}_bytes") for name in names}
    bars = {"kept": f"{100 * row.kept_bytes / most:.1f}" if most else ""}
    cells = [("" if size is None else short_bytes(size), bars.get(name, "")) for name, size in sizes.items()]
    return [(str(row.calls), ""), *cells]


def _list_tensors(came: Sequence[TensorGroup], went: Sequence[TensorGroup]) -> tuple[int, Sequence[str]]:
    names = [f"{sign} {format_group(group)}" for sign, groups in (("+", came), ("-", went)) for group in groups]
    return sum(group.count for group in (*came, *went)), names


# --- a memory snapshot as one HTML page, without a script -------------------------------------------------------------


def snapshot_html(explanation: Explanation) -> str:
    """Write the page of a snapshot, and of its program under prediction where there is one."""
    report, source, about = explanation.snapshot, PurePath(explanation.source).name, explanation.reproduction
    assert report is not None
    title = f"Memory of a card: {source}"
    heads = [
        TableColumn("Blocks in segments that are mostly unused, by line", is_head=True),
        *numbers("Blocks", "Bytes", "Unused around them"),
    ]
    rows = (
        [each.place or UNKNOWN, f"{each.count:,}", format_bytes(each.nbytes), format_bytes(each.free_bytes)]
        for each in report.in_the_way
    )
    alive = "Alive at the peak" if report.events else "Alive"
    sections = {
        "summary": "Summary",
        "history": "Bytes over the history" if report.events else "",
        "lines": f"{alive}, by line",
        "joined": "" if about is None else "Beside the prediction",
        "stacks": f"{alive}, by stack",
        "segments": "Segments at the end",
    }
    return fill_page(
        "explanation",
        f"Read from {source}",
        title=title,
        heading=title,
        sections={name: heading for name, heading in sections.items() if heading},
        facts=snapshot_facts(report),
        history=draw_views(lambda size, width: history_svg(report, width=width, name=f"history-{size}")),
        lines=hold_table(report, report.lines),
        joined=None if about is None else (joined_facts(about), joined_table(about.lines)),
        stacks=[(_describe(each), each.frames or (UNKNOWN,)) for each in report.stacks],
        segments=draw_views(lambda size, width: segments_svg(report, width=width, name=f"segments-{size}")),
        in_the_way=make_table("In the way", heads, rows) if report.in_the_way else None,
    )


def _describe(holder: Holder) -> str:
    return f"{format_bytes(holder.nbytes)} in {count_blocks(holder.count)}: {holder.place or UNKNOWN}"
