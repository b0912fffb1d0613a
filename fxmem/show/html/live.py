"""The page of `fxmem serve`: settings above, the step's page below."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.show.html.page import content_policy, fill_template, read_asset
from fxmem.show.palette import css_variables


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
