"""A step's memory as one HTML page: everything in one file, nothing loaded from elsewhere.

It opens from a folder, by mail or from an archive. A policy in its head forbids the browser any request, and any script
but the page's own, so that a model's names, which are untrusted and escaped, could not run even if one slipped through.
Without scripts everything is still there to read; with them the timeline, the graph and the table of nodes point at one
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from fxmem.memory.allocator import DEFAULT_SETTINGS, AllocatorSettings, known_levels
from fxmem.memory.by_layer import Row, module_rows, select_rows, step_rows, total_row
from fxmem.records.advice import Advice
from fxmem.records.plan import Plan
from fxmem.records.profile import Profile, ProgramRun, Timeline
from fxmem.records.units import format_bytes, percent, short_bytes
from fxmem.show import facts
from fxmem.show.graph import OVERVIEW, DrawingOptions, hierarchy_data, render
from fxmem.show.html.changes import best_changes
from fxmem.show.html.page import fill_page, fill_template, link_data, read_asset, script_json
from fxmem.show.html.sections import draw_views, numbers, plan_section, verdict
from fxmem.show.html.tables import alive_table, largest_table, node_table
from fxmem.show.plan_facts import finding_facts
from fxmem.show.plots import PlottedStep, StepAfter, icicle_svg, run_svg, step_after, timeline_svg
from fxmem.show.plots.xy_plot import step_title
from fxmem.show.run_facts import made_up, run_facts
from fxmem.show.svg import LIGHT

# --- a profile as one self-contained HTML fragment for notebooks: the table and the drawing ---------------------------
# No script and nothing loaded from elsewhere. Text takes the colour of the page around it, so that it reads on light
# and on dark; each part of the bar carries its name.


_MOST_ROWS = 1000
"""Rows in the tree at most; beyond, its deepest levels are left out."""
_MOST_NODES = 5000
"""Nodes that a drawing is made of at most: a cell's output has to come at once."""
_MOST_CHARACTERS = 300_000
"""Of a drawing; a notebook keeps every output in its file."""


class TreeRow(NamedTuple):
    """A row of the tree of modules."""

    title: str
    type_name: str
    cells: Sequence[str]
    depth: int = 0
    has_children: bool = False
    closes: int = 0
    """Rows around it that end with it."""


def notebook_html(profile: Profile, timeline: Timeline) -> str:
    """Write the report as an HTML fragment, with the tree of modules to unfold.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
    """
    model, rest = module_rows(profile, timeline), step_rows(profile, timeline)
    whole = timeline.peak.requested_bytes
    found = [*facts.header_facts(profile), *run_facts(profile), *facts.peak_facts(profile, timeline.peak)]
    return fill_template(
        "notebook",
        facts=[*found, *finding_facts(profile, timeline), *facts.outcome_facts(profile, timeline.peak)],
        palette=LIGHT,
        bar=list(_bar(timeline)),
        shares=facts.share_table(timeline.peak),
        rows=list(_tree_rows([*_affordable_rows(model, max(whole // 100, 1)), *rest], whole)),
        total=_tree_row(total_row([model[0], *rest]), whole),
        largest=largest_table(profile, timeline),
        assumptions=[*facts.assumptions(profile), *made_up(profile)],
        unknowns=facts.unknowns(profile),
        graph=_draw_graph(profile, timeline),
    )


def _bar(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Each kind's part of the bar; its place and width are percent of the whole."""
    start = 0.0
    for share in facts.split(timeline.peak):
        width = 100 * share.nbytes / timeline.peak.requested_bytes
        tooltip = f"{share.name}: {format_bytes(share.nbytes)}, {share.percent}"
        spoken = f"{share.name} {share.percent}"
        yield {**share._asdict(), "tooltip": tooltip, "spoken": spoken, "start": start, "width": width}
        start += width


def _affordable_rows(model: Sequence[Row], worth: int) -> list[Row]:
    rows = select_rows(model, depth=None, worth=worth)
    depth = max(row.depth for row in rows)
    while len(rows) > _MOST_ROWS and depth > 1:
        depth -= 1
        rows = select_rows(model, depth=depth, worth=worth)
    return rows


def _tree_rows(rows: Sequence[Row], whole: int) -> Iterator[TreeRow]:
    for row, following in pairwise([*rows, rows[0]]):
        has_children = following.depth > row.depth
        closes = max(row.depth - following.depth, 0)
        yield _tree_row(row, whole)._replace(depth=row.depth, has_children=has_children, closes=closes)


def _tree_row(row: Row, whole: int) -> TreeRow:
    figures = row.figures
    cells = map(short_bytes, (figures.params, figures.output, figures.saved, figures.at_peak))
    return TreeRow(row.title, row.type_name, [*cells, percent(figures.at_peak, whole)])


def _draw_graph(profile: Profile, timeline: Timeline) -> str | None:
    """Draw the annotated graph, where it is small. The built-in layout needs nothing installed and always ends."""
    if len(profile.nodes) > _MOST_NODES:
        return None
    svg = render(profile, timeline, DrawingOptions(standalone=False)).svg
    return svg if len(svg) <= _MOST_CHARACTERS else None


# --- the page of a step -----------------------------------------------------------------------------------------------


_WIDEST = 1150.0
"""Pixels of a plot that is as wide as the page."""
_WIDE = 730.0
"""Pixels of a timeline beside the changes, and moments of the step that the page's script knows."""


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """What a page shows besides the step itself."""

    budget_bytes: int | None = None
    """What the peak has to stay within, drawn into the timeline. None: the plan's, if there is a plan with one."""
    plan: Plan | None = None
    """A plan for this step."""
    after: StepAfter | None = None
    """The step with a plan. None: the plan's, if there is a plan and it was analysed."""
    advice: Advice | None = None
    """What changes to this step are worth."""
    proposal: Plan | None = None
    """Where there is no plan, one that may be made: one of the changes."""
    graph: bool = True
    """Whether to draw the annotated graph."""
    max_boxes: int = OVERVIEW
    """About how many boxes it shows at first."""
    settings: AllocatorSettings = DEFAULT_SETTINGS
    """Of the allocator, whose bytes over the step they lead to."""


def report_html(profile: Profile, timeline: Timeline, options: PageOptions) -> str:
    """Write a step's page.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's byte counts as well.
        options: what else to show.

    Raises:
        FxmemError: the graph could not be drawn; see `fxmem.show.graph.render`.
    """
    plan = options.plan
    drawing = DrawingOptions(max_boxes=options.max_boxes, plan=plan)
    drawn = render(profile, timeline, drawing) if options.graph else None
    shown_plan = plan_section(timeline, options.after, plan)
    program = profile.step.program
    sections = {
        "timeline": "Timeline",
        "changes": "Changes",
        **({"run": "Run"} if program is not None else {}),
        "peak": "Peak",
        **({"graph": "Graph"} if drawn else {}),
        **({"plan": "Plan"} if shown_plan else {}),
        "modules": "Modules at the peak",
        "nodes": "Nodes",
        "alive": "Tensors at the peak",
        "assumed": "Assumptions",
        "unknown": "Unknowns",
    }
    alive, unlisted_bytes = alive_table(profile, timeline)
    peak = timeline.peak
    where = [fact for fact in facts.peak_facts(profile, peak) if fact.key in ("reserved most", "plans", "where")]
    return fill_page(
        "report",
        profile,
        script="".join(map(read_asset, ["graph.js", *(["graph_view.js"] if drawn else []), "page.js"])),
        title=step_title(profile),
        heading=f"{profile.model} on {profile.target.name}" if program is not None else step_title(profile),
        sections=sections,
        header=[*facts.header_facts(profile), *run_facts(profile)],
        numbers=numbers(profile, peak),
        verdict=verdict(profile, peak),
        changes=best_changes(profile, timeline, plan or options.proposal, options.advice),
        facts=[*where, *facts.total_facts(profile)],
        shares=facts.share_table(peak, headings=("Kind", "Bytes", "Share")),
        timelines=draw_views(_timelines(profile, timeline, options), _WIDE),
        run={} if program is None else draw_views(partial(_draw_run, profile, program), _WIDEST),
        graph=drawn.svg if drawn else None,
        plan=shown_plan,
        modules=draw_views(
            lambda size, width: icicle_svg(profile, timeline, width=width, name=f"modules-{size}", titled=False),
            _WIDEST,
        ),
        nodes=node_table(profile, timeline),
        alive=alive,
        unlisted_bytes=unlisted_bytes,
        assumptions=[*facts.assumptions(profile), *made_up(profile)],
        unknowns=facts.unknowns(profile),
        hierarchy=script_json(hierarchy_data(profile, timeline, drawing)) if drawn else "",
        data=script_json(link_data(profile, timeline, columns=round(_WIDE))),
    )


def _draw_run(profile: Profile, program: ProgramRun, size: str, width: float) -> str:
    return run_svg(profile, program, width=width, name=f"run-{size}")


def _timelines(profile: Profile, timeline: Timeline, options: PageOptions) -> Callable[[str, float], str]:
    step = PlottedStep(profile, timeline, known_levels(profile, timeline, options.settings))
    budget, plan = options.budget_bytes, options.plan

    def plot(size: str, width: float) -> str:
        return timeline_svg(
            step,
            after=options.after or step_after(plan),
            budget_bytes=plan.budget_bytes if budget is None and plan is not None else budget,
            width=width,
            height=220.0 if size == "wide" else 130.0,
            name=f"timeline-{size}",
            titled=False,
        )

    return plot
