"""A step's memory as one HTML page: everything in one file, nothing loaded from elsewhere.

It opens from a folder, by mail or from an archive. A policy in its head forbids the browser any request, and any script
but the page's own, so that a model's names, which are untrusted and escaped, could not run even if one slipped through.
Without scripts everything is still there to read; with them the timeline, the graph and the table of nodes point at one
another.
"""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib.resources import files

from fxmem import __version__
from fxmem.memory import facts as findings
from fxmem.memory.allocator import DEFAULT_SETTINGS, Settings, levels_of
from fxmem.records.plan import Plan
from fxmem.records.profile import Profile, Timeline
from fxmem.show import graph as drawing
from fxmem.show.html.links import link_data, script_json
from fxmem.show.html.sections import facts_table, listed, plan_part, summary
from fxmem.show.html.tables import alive_table, node_table, safe
from fxmem.show.palette import css_variables
from fxmem.show.plots import PlottedStep, icicle_svg, timeline_svg
from fxmem.show.plots.axes import step_title

__all__ = ["html"]

_WIDTHS = (("wide", 1150.0), ("narrow", 366.0))
"""Every plot is there twice, and the style shows the one that fits the screen: scaled down, its words could not be
read."""


def html(
    profile: Profile,
    timeline: Timeline,
    *,
    budget_bytes: int | None = None,
    plan: Plan | None = None,
    after: Timeline | None = None,
    after_profile: Profile | None = None,
    graph: bool = True,
    renderer: drawing.Renderer = "auto",
    max_boxes: int = 400,
    settings: Settings = DEFAULT_SETTINGS,
) -> str:
    """The page as an HTML document.

    Args:
        profile: what was predicted. timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's
        byte counts as well. budget_bytes: what the peak has to stay within, drawn into the timeline. None: the plan's,
        if there is a plan with one. plan: a plan for this step, to be shown beside it. after: the timeline of the step
        under a plan. after_profile: the profile `after` is of, for its phases. graph: whether to draw the annotated
        graph. renderer: what finds the places of its boxes; see `fxmem.show.graph.render`, whose errors are raised.
        max_boxes: about how many boxes it may have. settings: of the allocator, whose bytes over the step they lead to.
    """
    budget = budget_bytes if budget_bytes is not None or plan is None else plan.budget_bytes
    svg, boxes = "", tuple[str | None, ...]([None] * len(profile.nodes))
    if graph:
        drawn = drawing.render(
            profile, timeline, drawing.DrawingOptions(renderer=renderer, max_boxes=max_boxes, plan=plan)
        )
        svg, boxes = drawn.svg, drawn.boxes
    plot = partial(
        timeline_svg,
        PlottedStep(profile, timeline, levels_of(profile, timeline, settings)),
        after=after
        if after is None or after_profile is None
        else PlottedStep(after_profile, after, levels_of(after_profile, after, settings)),
        budget_bytes=budget,
        height=280.0 if after is None else 220.0,
        titled=False,
    )
    plots = "".join(
        f'<div class="{size}">{plot(width=width, name=f"timeline-{size}")}</div>' for size, width in _WIDTHS
    )
    modules = "".join(
        f'<div class="{size}">{icicle_svg(profile, timeline, width=width, name=f"modules-{size}", titled=False)}</div>'
        for size, width in _WIDTHS
    )
    sections = [
        ("summary", "Summary", facts_table(findings.header_facts(profile)) + summary(profile, timeline)),
        (
            "timeline",
            "Timeline",
            _PLOT_HELP + f'<figure id="plot" class="plot" aria-label="Moments of the step">{plots}</figure>{_READOUT}',
        ),
        *(
            [
                (
                    "graph",
                    "Graph",
                    (
                        f'<div id="graph-box" class="scroll graph" tabindex="0" role="region" '
                        f'aria-labelledby="graph">{svg}</div>'
                    ),
                )
            ]
            if graph
            else []
        ),
        *([("plan", "Plan", plan_part(timeline, after, plan))] if plan is not None or after is not None else []),
        ("modules", "Memory by module at the peak", f"{_MODULES_HELP}<figure>{modules}</figure>"),
        ("nodes", "Nodes", _search(len(profile.nodes)) + _NODE_BOX + node_table(profile, timeline) + "</div>"),
        ("alive", "Tensors alive at the peak", alive_table(profile, timeline)),
        ("assumed", "Assumptions", listed(findings.assumptions(profile)) if profile.assumptions else "<p>None.</p>"),
        ("unknown", "Unknowns", listed(findings.unknowns(profile)) if profile.unknowns else "<p>None.</p>"),
    ]
    links = "".join(f'<li><a href="#{name}">{safe(title)}</a></li>' for name, title, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{safe(title)}</h2>{content}</section>'
        for name, title, content in sections
    )
    data = script_json(link_data(profile, timeline, columns=_columns(), boxes=boxes))
    script, style = _file("page.js"), _file("page.css")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="fxmem {safe(__version__)}">
<title>{safe(step_title(profile))}</title>
<link rel="icon" href="data:,">
<style>{css_variables()}{style}</style>
</head>
<body>
<a class="skip" href="#summary">Skip to the summary</a>
<header><h1>{safe(profile.model)}: memory of one \
{"training" if profile.step.mode == "train" else "inference"} step</h1></header>
<nav aria-label="Parts of the page"><ul>{links}</ul></nav>
<main>{body}</main>
<footer><p>{_made(profile)}</p></footer>
<script type="application/json" id="fxmem-data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


_PLOT_HELP = (
    '<p class="muted">Move over the plot, or focus it and use the arrow keys (Page Up and Down for larger steps, p '
    "for the peak): "
    "the node that runs is marked in the graph and in the table of nodes, and the other way round.</p>"
)
_READOUT = '<p id="readout" class="readout"></p>'
_MODULES_HELP = (
    '<p class="muted">A cell is as wide as what the module brought of what is alive at the peak. '
    "Choosing one (with the mouse, or with arrow keys and Enter) lists its nodes.</p>"
)
_NODE_BOX = '<div id="rows-box" class="scroll nodes" tabindex="0" role="region" aria-labelledby="nodes">'


def _made(profile: Profile) -> str:
    made = (
        f"Predicted by fxmem {profile.fxmem_version} for torch {profile.torch_version}, without running on a "
        f"card; page written by fxmem {__version__}."
    )
    return safe(f"{made} Bytes are requested bytes unless it says otherwise.")


def _search(count: int) -> str:
    return (
        '<p class="tools" hidden><label>Search <input id="search" type="search" autocomplete="off" '
        'placeholder="name, class, shape or file"></label>'
        f'<span id="search-status" role="status">{count:,} of {count:,} nodes</span></p>'
    )


def _columns() -> int:
    """As many moments as the wide plot has pixels."""
    return int(_WIDTHS[0][1])


def _file(name: str) -> str:
    return files("fxmem.show.html").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """No request to anywhere, and no script but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri "
        f"'none'; form-action 'none'"
    )
