"""A profile's answer in three lines, then its largest modules: what `fxmem analyze` prints first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxmem.hardware.context import explain_room, format_range
from fxmem.memory.budget import Budget
from fxmem.memory.figures import alive_by_node
from fxmem.memory.module_tree import describe
from fxmem.records.fits import PeakBaseline
from fxmem.records.profile import Kind, Node, Profile, Timeline
from fxmem.records.units import AS_IS, COMPILED_AS_EAGER, exact_bytes, format_bytes, percent, printable, to_words
from fxmem.show import facts as findings
from fxmem.show.facts import Fit, describe_inputs, find_fit
from fxmem.show.plan_facts import finding_facts
from fxmem.show.run_facts import longest_facts, made_up, run_facts
from fxmem.show.sections import Fact, Facts
from fxmem.show.text.report import module_tree, table
from fxmem.show.text.tables import GAP, LABEL, add_facts, facts, grid, item_list, label_content, render

DEPTH = 2
"""Levels of modules that are shown at first."""
_WORTH_SAYING = 100
"""What the step before adds to the peak is said at first where it is this share of it, one in so many."""


def overview(
    profile: Profile,
    timeline: Timeline,
    fit: Fit | None = None,
    *,
    following: str = "",
    full: bool = False,
    width: int = 100,
    depth: int | None = None,
    color: bool = False,
) -> str:
    """The answer, then the largest modules; with `full` the whole table.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
        fit: the verdict, where it is of a budget as well.
        following: a command that answers the next question, if there is one.
        full: add everything that `fxmem.show.text.table` shows.
        width: columns of the terminal, at least 60.
        depth: levels of modules below the model to show (`DEPTH`; with `full` all).
        color: whether to write ANSI colours.
    """
    width = max(width, 60)
    fit = fit or find_fit(profile, timeline.peak)
    answer = render([_answer(profile, timeline, fit, following, width)], width, color)
    if full:
        return answer + "\n" + table(profile, timeline, width=width, depth=depth, color=color)
    ran = [each for each in run_facts(profile) if each.key != "longest"]  # said at first
    levels = DEPTH if depth is None else depth
    # The table alone: what its columns mean is said with everything else.
    modules = next(module_tree(profile, timeline, width, levels, small_rows=depth is not None))
    return answer + "\n" + render([*([facts(ran)] if ran else []), modules, facts(_ending(profile))], width, color)


def _answer(profile: Profile, timeline: Timeline, fit: Fit, following: str, width: int) -> RenderableType:
    peak, room = timeline.peak, width - LABEL - GAP
    style = "bold red" if fit.exit_code else "bold green" if fit.is_fitting and not fit.is_growing else ""
    memory = Text(fit.verdict, style)
    if fit.is_fitting is False and fit.shortage:
        memory.append(f". {fit.shortage}", "default not bold")
    elif (process := peak.process_bytes) is not None:
        what = " reserved" if peak.fits and peak.reserved_bytes is not None else ""  # which bytes the verdict is of
        most = f"; nvidia-smi: {format_bytes(process.high)}"
        words = [f"{what}; {format_range(process.low, process.high)} in nvidia-smi", what + most, most]
        memory.append(_pick_fitting(words, room - memory.cell_len), "default not bold")
    loop = findings.loop_facts(profile) if profile.step.outputs_bytes * _WORTH_SAYING >= peak.requested_bytes else ()
    below = [
        Fact("Peak", _pick_fitting(findings.describe_peak(profile, peak), room)),
        *_open_facts(profile, fit),
        *findings.plans_facts(profile, peak),
        *longest_facts(profile)[:1],
        *loop,
        *_eager_facts(profile),
        *finding_facts(profile, timeline),
        *([Fact("Next", printable(following))] if following else []),
    ]
    return add_facts(label_content("Memory", memory), below)


def _open_facts(profile: Profile, fit: Fit) -> Facts:
    """What tells whether a step fits, where shapes that depend on data decide it."""
    if not fit.is_open:
        return []
    if profile.step.program is None:
        return [Fact("To know", "--values real takes such shapes from a real run of forward on the CPU")]
    places = [each.place for each in profile.step.program.made_up if each.kind == "shape" and each.place]
    where = f"{places[0]}{f' and {len(places) - 1} more lines' if len(places) > 1 else ''}" if places else "FILE:LINE"
    return [Fact("To know", printable(f"--value FILE:LINE=mask.pt gives the values that decide at {where}"))]


def _eager_facts(profile: Profile) -> Facts:
    """That a compiler was left out, which moves the peak by much."""
    if not any(each.text.startswith(COMPILED_AS_EAGER) for each in profile.assumptions):
        return []
    option = "--compile" if profile.step.program is None else f"--compile {AS_IS}"
    return [Fact("Compiler", f"left out (the program's, or a library's): {option} analyses what is compiled")]


def _pick_fitting(words: Sequence[str], room: int) -> str:
    """The first that fits in a line, else the last."""
    return next((each for each in words if cell_len(each) <= room), words[-1])


def _ending(profile: Profile) -> Facts:
    """What of the card a step may have, what the numbers are of, and what was left out."""
    of = {fact.key: fact.text for fact in findings.header_facts(profile)}
    more = "--full: each count of the peak, its split, the largest tensors"
    found = {"made-up value": made_up(profile), "assumption": profile.assumptions, "unknown": profile.unknowns}
    for word, each in found.items():
        more += f", {len(each)} {word}{'s' * (len(each) != 1)}" if each else ""
    room, weights = explain_room(profile.target), findings.describe_weights(profile)
    return [
        *([Fact("Room", room)] if room else []),
        Fact("Settings", "; ".join(filter(None, [of["inputs"] if profile.inputs else "", weights, of["step"]]))),
        Fact("More", more),
    ]


# --- how a step's peak exceeds a budget or has grown, as a failed test's text -----------------------------------------


_LINES_SHOWN = 3
_GROWN_SHOWN = 5
_WIDTH = 1000
"""Test runners show lines as they are; a line of code is not to be broken."""


def describe_excess(profile: Profile, timeline: Timeline, budget: Budget) -> str:
    """How a step exceeds its budget, and which lines of code allocate most."""
    peak, limit = timeline.peak, budget.nbytes
    used, measure = peak.counted_bytes, _measure(peak.allocated_bytes)
    if used > limit:
        over = format_bytes(used - limit)
        first = f"the peak is {exact_bytes(used)} {measure}, {over} above the budget of {exact_bytes(limit)}"
    else:
        within = f"the peak of {exact_bytes(used)} {measure} is within the budget of {exact_bytes(limit)}"
        first = f"{within}, but in a loop the allocator runs out of it"
    where = f"in {peak.phase}{f', while {peak.node} runs' if peak.node else ''}"
    kinds = sorted(peak.by_kind.items(), key=lambda pair: -pair[1])
    found = [
        Fact("Peak", printable(f"{where}; {profile.model}, {profile.step.mode}, {profile.target.name}")),
        Fact("Kinds", ", ".join(f"{to_words(kind)} {format_bytes(nbytes)}" for kind, nbytes in kinds)),
    ]
    return _render(Text(first), facts(found), item_list("Lines", list(_largest_lines(profile, timeline))))


def describe_growth(
    before: PeakBaseline, now: PeakBaseline, allowed_bytes: int, nodes: Sequence[Node], running: str
) -> str:
    """How a peak has grown beyond what is allowed, and what grew.

    Args:
        nodes: those of the step as it is now.
        running: the node that runs at the peak now; empty for none.
    """
    was, grown, measure = before.counted_bytes, now.counted_bytes - before.counted_bytes, _measure(now.allocated_bytes)
    limit = f"{format_bytes(allowed_bytes)} is allowed" if allowed_bytes else "no growth is allowed"
    known = {node.name: node for node in nodes}
    while_running = f", while {printable(running)} runs" if running else ""
    found = [
        Fact("Was", f"{exact_bytes(was)} {measure}, in {before.phase}"),
        Fact("Is", f"{exact_bytes(now.counted_bytes)} {measure}, in {now.phase}{while_running}"),
    ]
    for what, old, new in _settings(before, now):
        found += [Fact("", printable(f"the {what} is not the same: was {old}, is {new}"))] if old != new else []
    by_node = [(_node_words(known[name]), before.by_node.get(name, 0), size) for name, size in now.by_node.items()]
    return _render(
        Text(f"the peak grew by {format_bytes(grown)} ({percent(grown, was)}); {limit}"),
        facts(found),
        *_growth_table("Kinds", [(to_words(k), before.by_kind.get(k, 0), now.by_kind.get(k, 0)) for k in Kind]),
        *_growth_table("Nodes", by_node),
    )


def _render(*parts: RenderableType) -> str:
    return render(parts, _WIDTH, color=False).rstrip("\n")


def _growth_table(label: str, rows: list[tuple[str, int, int]]) -> Iterator[Table]:
    """The rows that grew, in requested bytes at the peak, largest growth first."""
    grown = sorted((row for row in rows if row[2] > row[1]), key=lambda row: row[1] - row[2])
    if not grown:
        return
    table = grid(-10, -9, None, None, None)
    for what, old, new in grown[:_GROWN_SHOWN]:
        table.add_row(f"+{format_bytes(new - old)}", format_bytes(old), "->", format_bytes(new), Text(printable(what)))
    yield label_content(label, table)
    if len(grown) > _GROWN_SHOWN:
        yield facts([Fact("", f"and {len(grown) - _GROWN_SHOWN} more grew")])


def _largest_lines(profile: Profile, timeline: Timeline) -> Iterator[tuple[str, str]]:
    """The lines of code whose nodes keep most at the peak, the largest first; nodes of one line count together."""
    nodes: defaultdict[tuple[str, int] | str, dict[int, int]] = defaultdict(dict)
    for index, nbytes in alive_by_node(profile, timeline).items():
        node = profile.nodes[index]
        nodes[(node.source.file, node.source.line) if node.source is not None else node.name][index] = nbytes
    for sizes in sorted(nodes.values(), key=lambda sizes: -sum(sizes.values()))[:_LINES_SHOWN]:
        nbytes, first = sum(sizes.values()), max(sizes, key=lambda index: sizes[index])
        share = percent(nbytes, timeline.peak.requested_bytes)
        yield format_bytes(nbytes), printable(f"({share}) {_node_words(profile.nodes[first], len(sizes) - 1)}")


def _settings(before: PeakBaseline, now: PeakBaseline) -> list[tuple[str, str, str]]:
    """What a comparison presumes to be the same, in words."""
    return [
        ("input", describe_inputs(before.inputs), describe_inputs(now.inputs)),
        ("step", str(before.step), str(now.step)),
        ("target", before.target, now.target),
        ("torch version", before.torch_version, now.torch_version),
        ("fxmem version", before.fxmem_version, now.fxmem_version),
    ]


def _node_words(node: Node, others: int = 0) -> str:
    """The node, its class, its line of code, and how many more that line has."""
    details = [node.module_type] if node.op == "call_module" and node.module_type else []
    if node.source is not None:
        code = f": {node.source.code}" if node.source.code else ""
        details.append(f"{node.source.file}:{node.source.line}{code}")
    known = f" ({', '.join(details)})" if details else ""
    return f"{describe(node)}{f' and {others} more' if others else ''}{known}"


def _measure(allocated_bytes: int | None) -> str:
    return "requested" if allocated_bytes is None else "allocated"
