"""Filling in the templates of pages: everything but our own markup is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fxmem import __version__
from fxmem.records.profile import Headed, Record
from fxmem.records.units import exact_bytes, format_bytes, printable
from fxmem.show.palette import KINDS, LIGHT, css_variables
from fxmem.show.sections import Section


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
