"""Memory by source line as one HTML page: the annotated source, nothing loaded from elsewhere and no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files

from fxmem import __version__
from fxmem.memory import facts as findings
from fxmem.records.lines import LineFigures, LineReport, LineRow, TensorGroup
from fxmem.records.units import exact_bytes, short_bytes
from fxmem.show.html.sections import facts_table
from fxmem.show.html.tables import safe
from fxmem.show.palette import css_variables
from fxmem.show.text.by_line import MEANINGS, format_group, near, short_file, source_text

__all__ = ["html"]

_HEADS = (
    ("Calls", "nodes of the graph: a line in a loop has one for each call and turn"),
    ("Allocated", "all that the line allocates in forward, its runs added up"),
    ("Kept", "of that, what is alive when the run is over"),
    ("Freed", "what was there before a run and is gone after it"),
    ("Saved", "what it is the first to keep for backward"),
    ("Most", "most bytes alive during its runs, everything counted"),
    ("Alive", "everything alive when its last run is over"),
    ("Backward", "what is allocated while its gradients are computed"),
)
_AROUND = 10
"""Lines shown before and after one that has figures."""
_STYLE = """
.source td.code { font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; \
white-space: pre; padding-left: 1.4rem; }
.source td.code details { font: 12px/1.4 system-ui, sans-serif; white-space: normal; color: var(--muted); }
.source td.code summary { cursor: pointer; }
.source td.code ul { margin: .1rem 0 .3rem; padding-left: 1.2rem; }
.source td { border-bottom: 0; padding-top: 0; padding-bottom: 0; }
.source tr.hot td { border-top: 1px solid var(--border); }
.source td.bar { background: linear-gradient(to left, \
color-mix(in srgb, var(--accent) 30%, transparent) var(--share), transparent var(--share)); }
.source tfoot td, .source tfoot th { border-top: 2px solid var(--border); font-weight: 600; }
"""


def html(report: LineReport) -> str:
    """The page as an HTML document; `report` is `fxmem.memory.by_line.by_line`'s. Everything that comes from the model
    is escaped."""
    title = (
        f"{report.model}: memory by source line of one "
        f"{'training' if report.step.mode == 'train' else 'inference'} step"
    )
    header = [
        *findings.header_facts(report),
        ("Before", f"{exact_bytes(report.resident_bytes)} alive before the step"),
        ("Forward", f"{exact_bytes(report.forward_allocated_bytes)} allocated"),
        ("After it", f"{exact_bytes(report.forward_left_bytes)} alive"),
        *([("Saved", f"{exact_bytes(report.saved_bytes)} kept for backward")] if report.step.mode == "train" else []),
    ]
    names = [(f"file{index}", short_file(file), file) for index, file in enumerate(report.files)]
    before = _tensors(report.resident, (), "alive before the step")
    links = "".join(f'<li><a href="#{anchor}">{safe(name)}</a></li>' for anchor, name, _ in names)
    sections = "".join(
        (
            f'<section aria-labelledby="{anchor}"><h2 '
            f'id="{anchor}">{safe(name)}</h2>{_file(report, file, anchor)}</section>'
        )
        for anchor, name, file in names
    )
    style = files("fxmem.show.html").joinpath("page.css").read_text(encoding="utf-8")
    made = (
        f"Predicted by fxmem {report.fxmem_version} for torch {report.torch_version}, without running on a card; "
        f"page written by fxmem {__version__}."
    )
    meanings = "; ".join(f"{heading}: {meaning}" for heading, meaning in MEANINGS)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{safe(title)}</title>
<link rel="icon" href="data:,">
<style>{css_variables()}{style}{_STYLE}</style>
</head>
<body>
<header><h1>{safe(title)}</h1></header>
<nav aria-label="Files"><ul>{links}<li><a href="#rest">Of no line shown</a></li></ul></nav>
<main><section aria-label="The step">{facts_table(header)}<p class="muted">{safe(meanings)}.</p>{before}</section>
{sections}
<section aria-labelledby="rest"><h2 id="rest">Of no line shown</h2>{_rest(report)}</section></main>
<footer><p>{safe(made)} Bytes are requested bytes.</p></footer>
</body>
</html>
"""


def _file(report: LineReport, file: str, anchor: str) -> str:
    lines = {line.line: line for line in report.lines if line.file == file}
    source = source_text(report, file)
    most = max((line.kept_bytes for line in lines.values()), default=0)
    rows = "".join(_rows(lines, source, anchor, most))
    return _table(f"Lines of {short_file(file)}", _head("Line", "Code"), rows)


def _table(label: str, head: str, rows: str) -> str:
    return (
        f'<div class="scroll nodes"><table class="data source" '
        f'aria-label="{safe(label)}">{head}<tbody>{rows}</tbody></table></div>'
    )


def _head(first: str, second: str) -> str:
    heads = "".join(f'<th scope="col" class="r" title="{safe(meaning)}">{heading}</th>' for heading, meaning in _HEADS)
    return f'<thead><tr><th scope="col" class="r">{first}</th>{heads}<th scope="col">{second}</th></tr></thead>'


def _rows(lines: Mapping[int, LineRow], source: Mapping[int, str], anchor: str, most: int) -> Iterator[str]:
    last = 0
    for number in near(lines, source, _AROUND):
        if number > last + 1:
            yield f'<tr><td class="r muted">...</td><td colspan="{len(_HEADS) + 1}"></td></tr>'
        last, line, code = number, lines.get(number), safe(source[number].expandtabs())
        place = f'<td class="r muted" id="{anchor}-{number}">{number}</td>'
        if line is None:
            yield f'<tr>{place}{"<td></td>" * len(_HEADS)}<td class="code muted">{code}</td></tr>'
        else:
            yield (
                f'<tr class="hot">{place}{_figures(line, most)}<td '
                f'class="code">{code}{_tensors(line.came, line.went, "tensors")}</td></tr>'
            )


def _figures(row: LineFigures, most: int) -> str:
    share = (
        f'<td class="r bar" style="--share:{100 * row.kept_bytes / most:.1f}%">{short_bytes(row.kept_bytes)}</td>'
        if most
        else _cell(row.kept_bytes)
    )
    cells = [
        _cell(row.allocated_bytes),
        share,
        *map(_cell, (row.freed_bytes, row.saved_bytes, row.peak_bytes, row.after_bytes, row.backward_allocated_bytes)),
    ]
    return f'<td class="r">{row.calls}</td>{"".join(cells)}'


def _cell(nbytes: int | None) -> str:
    return f'<td class="r">{"" if nbytes is None else short_bytes(nbytes)}</td>'


def _tensors(came: tuple[TensorGroup, ...], went: tuple[TensorGroup, ...], what: str) -> str:
    listed = [f"{sign} {format_group(group)}" for sign, groups in (("+", came), ("-", went)) for group in groups]
    if not listed:
        return ""
    count = sum(group.count for group in (*came, *went))
    return (
        f"<details><summary>{count:,} "
        f"{what}</summary><ul>{''.join(f'<li>{safe(each)}</li>' for each in listed)}</ul></details>"
    )


def _rest(report: LineReport) -> str:
    rows = "".join(
        (
            f'<tr class="hot"><td></td>{_figures(each, 0)}<td '
            f'class="code">{safe(each.what)}{_tensors(each.came, each.went, "tensors")}</td></tr>'
        )
        for each in report.rest
    )
    return _table("What belongs to no line shown", _head("", "What"), rows)
