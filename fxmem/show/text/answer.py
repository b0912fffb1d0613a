"""A profile's answer in three lines, then its largest modules: what `fxmem analyze` prints first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from fxmem.hardware.context import explain_room, format_range
from fxmem.records.names import AS_IS, COMPILED_AS_EAGER
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes, printable
from fxmem.show import facts as findings
from fxmem.show.facts import Fit, find_fit, sends_by_nccl
from fxmem.show.finding_facts import finding_facts
from fxmem.show.run_facts import longest_facts, made_up, run_facts
from fxmem.show.sections import Fact, Facts
from fxmem.show.text.report import module_tree, table
from fxmem.show.text.tables import GAP, LABEL, add_facts, facts, label_content, render

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
    below = [*([facts(ran)] if ran else []), modules, facts(_ending(profile))]
    return answer + "\n" + render(below, width, color)


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
        if sends_by_nccl(profile):
            words = [f"{each} + NCCL" for each in words]
        memory.append(_pick_fitting(words, room - memory.cell_len), "default not bold")
    where = _pick_fitting(findings.describe_peak(profile, peak), room)
    loop = findings.loop_facts(profile) if profile.step.outputs_bytes * _WORTH_SAYING >= peak.requested_bytes else ()
    below = [
        Fact("Peak", where),
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
    about = [of["inputs"] if profile.inputs else "", weights, of["step"]]
    return [
        *([Fact("Room", room)] if room else []),
        Fact("Settings", "; ".join(filter(None, about))),
        Fact("More", more),
    ]
