"""A summary to paste into a pull request.

Markdown, as GitHub reads it. Everything that is the model's own stands in a code span or a fenced block, where it
cannot become a link, a mention, a heading or HTML.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.figures import bytes_at_peak
from fxmem.memory.module_tree import describe
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes, format_flops, percent
from fxmem.show import facts as findings
from fxmem.show.export.markdown_parts import code_span, fold_list, write_table
from fxmem.show.plan_facts import finding_facts
from fxmem.show.run_facts import made_up, run_facts
from fxmem.show.sections import Fact, TableColumn, make_table, numbers

_TOP = 15
"""Rows of the table of nodes."""
_FIGURES = ("peak", "allocated", "reserved", "process", "saved", "flops")
"""Keys of facts in which nothing is the model's own."""


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """Peak, split, the nodes that hold most at the peak, assumptions and unknowns."""
    blocks = [
        f"### Predicted memory of {code_span(profile.model)} on {code_span(profile.target.name)}",
        _facts(
            [
                *findings.peak_facts(profile, timeline.peak),
                *findings.outcome_facts(profile, timeline.peak),
                *finding_facts(profile, timeline),
            ]
        ),
        write_table(findings.share_table(timeline.peak, headings=("At the peak", "bytes", "share"))),
        _nodes(profile, timeline),
        _facts([*findings.header_facts(profile), *run_facts(profile)], "Predicted for"),
    ]
    notes = {"assumed": [*findings.assumptions(profile), *made_up(profile)], "unknown": findings.unknowns(profile)}
    blocks += [fold_list(f"{len(items)} {what}", items) for what, items in notes.items() if items]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _facts(facts: Iterable[Fact], heading: str = "Predicted") -> str:
    rows = ((fact.label, fact.text if fact.key in _FIGURES else code_span(fact.text)) for fact in facts)
    return write_table(make_table(heading, [TableColumn(heading), TableColumn()], rows))


def _nodes(profile: Profile, timeline: Timeline) -> str:
    at_peak = bytes_at_peak(profile, timeline)
    whole = timeline.peak.requested_bytes
    largest = sorted((index for index, nbytes in enumerate(at_peak) if nbytes), key=lambda index: -at_peak[index])
    lines = []
    for index in largest[:_TOP]:
        node, nbytes = profile.nodes[index], at_peak[index]
        place = "" if node.source is None else f"{node.source.file.rpartition('/')[2]}:{node.source.line}"
        sizes = [format_bytes(nbytes), percent(nbytes, whole), format_bytes(node.saved_bytes)]
        lines.append([code_span(describe(node)), *sizes, format_flops(node.forward_flops), code_span(place)])
    rest = largest[_TOP:]
    if rest:
        nbytes = sum(at_peak[index] for index in rest)
        lines.append([f"{len(rest)} more", format_bytes(nbytes), percent(nbytes, whole), "", "", ""])
    figures = numbers("at the peak", "share", "saved for backward", "forward FLOPs")
    table = make_table("Nodes", [TableColumn("Node"), *figures, TableColumn("source")], lines)
    return write_table(table) if lines else ""
