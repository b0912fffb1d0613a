"""Filling in the templates of pages: everything but our own markup is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fxmem import __version__
from fxmem.memory.liveness import samples
from fxmem.records.profile import Headed, Kind, Phase, Profile, Record, Timeline
from fxmem.records.units import exact_bytes, format_bytes, printable, to_words
from fxmem.show.sections import Section
from fxmem.show.svg import KINDS, LIGHT, css_variables


def fill_template(name: str, **values: Any) -> str:
    """Fill in a template of `fxmem/show/html/templates`."""
    return _environment().get_template(f"{name}.html.jinja").render(**values)


def fill_page(name: str, about: Headed | str, *, script: str = "", **values: Any) -> str:
    """Fill in the template of a whole page. It loads nothing, and runs only the given script.

    Args:
        name: of the template, which extends `page`.
        about: what the page is of; or, where nothing is predicted, what it was read from, as a sentence.
        script: the page's own, as JavaScript.
        values: what the template needs, among them `title`, `heading` and `sections`: their ids and titles.
    """
    return fill_template(
        name,
        style=css_variables() + read_asset("page.css"),
        script=script,
        policy=content_policy(script),
        version=__version__,
        made=f"{_describe_source(about)}; page written by fxmem {__version__}.",
        **values,
    )


def _describe_source(about: Headed | str) -> str:
    if isinstance(about, str):
        return about
    return f"Predicted by fxmem {about.fxmem_version} for torch {about.torch_version}, without running on a card"


def read_asset(name: str) -> str:
    """The text of a file that pages include."""
    return files("fxmem.show.html").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fxmem.show.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    environment.globals.update(zip=zip, kinds=KINDS)
    environment.filters.update(exact_bytes=exact_bytes, format_bytes=format_bytes)
    return environment


def content_policy(script: str) -> str:
    """The policy that forbids any request, and any script but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = f"script-src 'sha256-{digest}'; " if script else ""
    return f"default-src 'none'; {own}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


# --- fragments for notebooks ------------------------------------------------------------------------------------------

Code = tuple[str, str, str]
"""What can be pasted, under a title that opens it, and a note on it."""


def fragment(
    *sections: Section, plot: str = "", codes: Sequence[Code] = (), lists: Sequence[tuple[str, Sequence[str]]] = ()
) -> str:
    """What a notebook shows of a record, in this order, escaped.

    No script and nothing loaded from elsewhere. Text takes the colour of the page around it.

    Args:
        sections: tables and facts.
        plot: SVG, our own.
        codes: what can be pasted.
        lists: sentences, under titles that open them.
    """
    return fill_template("fragment", sections=sections, plot=plot, codes=codes, lists=lists, palette=LIGHT)


def cell_id(record: Record) -> str:
    """A name for elements of this record: other cells of a notebook are in the same document."""
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()[:10]


# --- the page of `fxmem serve`: settings above, the step's page below -------------------------------------------------


def live_html(
    title: str, sliders: Sequence[tuple[str, int]], menus: Sequence[tuple[str, str, Sequence[str]]], budget: str
) -> str:
    """Write the page around the page of a step.

    Args:
        title: what the step is of.
        sliders: names of numbers, and what they begin at.
        menus: names of choices, what they begin at, and what there is to choose.
        budget: what the budget begins at; may be empty.
    """
    script = read_asset("live.js")
    return fill_template(
        "live",
        title=title,
        sliders=[(name, value, max(8 * value, 64)) for name, value in sliders],
        menus=menus,
        budget=budget,
        script=script,
        style=css_variables() + read_asset("page.css"),
        policy=f"{content_policy(script)}; connect-src 'self'; frame-src 'self'",
    )


# --- what joins the parts of a page: ticks and nodes ------------------------------------------------------------------


def link_data(profile: Profile, timeline: Timeline, *, columns: int) -> dict[str, Any]:
    """What the page's script needs, as plain JSON. It has two moments a column, so its size does not grow with the
    step.

    Args:
        profile: what was predicted.
        timeline: its timeline.
        columns: pixels that the plotted timeline is wide.
    """
    taken = samples(timeline.live_bytes, columns)
    # Ops that allocate nothing begin where another does; the one that holds the tick is the one that matters.
    allocating = [index for index, op in enumerate(profile.ops) if op.end > op.begin]
    begins = [profile.ops[index].begin for index in allocating]
    at = [bisect_right(begins, sample.tick) - 1 for sample in taken]
    ops = [None if place < 0 else profile.ops[allocating[place]] for place in at]
    names: dict[str, int] = {}
    peak = timeline.peak.tick
    return {
        "ticks": len(timeline.live_bytes),
        "phases": [[span.phase.value, span.begin, span.end] for span in profile.phases],
        "tick": [sample.tick for sample in taken],
        "begin": [round(sample.begin, 1) for sample in taken],
        "live": [timeline.live_bytes[sample.tick] for sample in taken],
        # In KiB: they are read to three digits.
        "kinds": [
            [to_words(kind), [round(timeline.by_kind[kind][sample.tick] / 1024) for sample in taken]]
            for kind in Kind
            if kind in timeline.by_kind
        ],
        "node": [-1 if op is None else op.node for op in ops],
        "op": [-1 if op is None else names.setdefault(op.name, len(names)) for op in ops],
        "during": [int(op is not None and sample.tick < op.end) for op, sample in zip(ops, taken, strict=True)],
        "names": list(names),
        "start": next((index for index, sample in enumerate(taken) if sample.tick == peak), 0),
        "spans": _spans(profile),
    }


def script_json(value: object) -> str:
    """JSON as it may stand inside `<script>`. It is ASCII without `<`, so nothing in it ends the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _spans(profile: Profile) -> list[list[list[int]]]:
    """For each node, the ticks from its first to its last op. Backward is apart from the rest; ranges are half-open."""
    found: list[dict[bool, list[int]]] = [{} for _ in profile.nodes]
    for op in profile.ops:
        span = found[op.node].setdefault(op.phase is Phase.BACKWARD, [op.begin, op.end])
        span[0], span[1] = min(span[0], op.begin), max(span[1], op.end)
    return [[spans[backward] for backward in (False, True) if backward in spans] for spans in found]
