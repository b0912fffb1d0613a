"""A step over a grid of settings, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxmem.hardware import catalogue
from fxmem.hardware.context import explain_room
from fxmem.records.sizes import Sweep, SweepPoint
from fxmem.records.units import format_bytes, format_seconds
from fxmem.show.export.markdown_parts import code_span, write_table
from fxmem.show.facts import describe_inputs
from fxmem.show.sections import Cell, Fact, Section, Table, TableColumn, make_table, numbers
from fxmem.show.text.sizes import (
    ROOM_OF_CARDS,
    describe_step,
    describe_verdict,
    explain_verdicts,
    per_second,
    subject_facts,
)
from fxmem.show.text.tables import render_sections

_FITS = "Peak: allocated bytes; a step fits where what the allocator reserves is within the room."
_VARIED = ("length", "precision", "checkpoints", "mesh")


def sweep_table(sweep: Sweep, *, full: bool = False, width: int = 100, color: bool = False) -> str:
    """The answer as text whose lines are at most `width` columns wide (at least 60).

    `full` has a line for each point; else there is one for each case, with the largest batch that fits.
    """
    return render_sections(sweep_sections(sweep, full), width, color)


def sweep_sections(sweep: Sweep, full: bool) -> Iterator[Section]:
    """What fits, point by point or case by case."""
    fitting, whole = sweep.fitting, sum(each.is_analysed for each in sweep.points)
    kept = f", {sweep.kept} points kept" if sweep.kept else ""
    sizes = [name for name in ("batch", "length") if getattr(sweep.grid, name)]
    varies = f"; {' and '.join(sizes)} {'vary' if len(sizes) > 1 else 'varies'}" if sizes else ""
    by_forms = f"; {whole} points themselves, the others by forms of sizes" if whole < len(sweep.points) else ""
    facts = [
        *(replace(each, text=each.text + varies) if each.key == "inputs" else each for each in subject_facts(sweep)),
        Fact("Points", f"{len(fitting)} of {len(sweep.points)} fit"),
        Fact("Analysed", f"{sweep.analyses} steps now{kept}{by_forms}"),
    ]
    if timed := [each for each in fitting if each.item_seconds is not None]:
        best = min(timed, key=lambda each: each.item_seconds or 0.0)
        facts.append(Fact("Fastest", f"{_words(best, sweep)}: {_rate(best)} {sweep.item}s per second, estimated"))
    if priced := [each for each in timed if each.cost is not None]:
        best = min(priced, key=lambda each: (each.cost or 0.0) / (each.items or 1))
        cost = f"{_cost(best)} for a million {sweep.item}s, {_cost_of_steps(best)} for 1,000 steps"
        facts.append(Fact("Cheapest", f"{_words(best, sweep)}: {cost}"))
    if bare := dict.fromkeys(each.card for each in fitting if each.card in sweep.grid.prices and each.cost is None):
        why = "of a program" if sweep.step.program else "there, but on a card of the catalogue"
        facts.append(Fact("Cost", f"not known on {', '.join(bare)}: no time is estimated {why}"))
    cards = {each.card for each in sweep.points}
    if sweep.target.device == "cuda":
        facts.append(Fact("Room", explain_room(sweep.target) if len(cards) == 1 else ROOM_OF_CARDS))
    yield Section(facts=facts)
    table = sweep_rows(sweep, full=full)
    yield Section(table)
    yield from explain_verdicts(table)
    yield Section(facts=[Fact("Note", text) for text in (*sweep.notes, *(each.text for each in sweep.assumptions))])


def markdown(sweep: Sweep, *, full: bool = False) -> str:
    """The table as Markdown, for a README, and what it was predicted by."""
    table = sweep_rows(sweep, full=full)
    numeric = [column.is_number for column in table.columns]
    rows = (
        [cell.text if is_number else code_span(cell.text) for cell, is_number in zip(row.cells, numeric, strict=True)]
        for row in table.rows
    )
    made = make_table(table.label, table.columns, rows)
    is_varied = len({each.precision for each in sweep.points}) > 1
    step = describe_step(sweep.step, with_autocast=not is_varied)
    inputs = describe_inputs(sweep.inputs)
    of = ", ".join([*map(code_span, filter(None, (sweep.model, inputs))), step])
    times = " Times are estimates." if any(each.time is not None for each in sweep.points) else ""
    room = f" {_FITS}" if sweep.target.device == "cuda" else ""
    by = f"by fxmem {sweep.fxmem_version} with torch {sweep.torch_version}"
    return f"{write_table(made)}\n\nPredicted of {of}; {by}.{room}{times}\n"


def sweep_rows(sweep: Sweep, *, full: bool) -> Table:
    """A row for each point, or for each case."""
    shown = sweep.points if full else sweep.largest
    is_timed = any(each.item_seconds is not None for each in sweep.fitting)
    is_priced = any(each.cost is not None for each in sweep.fitting)
    varied = [name for name in _VARIED if len({getattr(each, name) for each in sweep.points}) > 1]
    names, is_card = _asked_names(sweep), sweep.target.device == "cuda"
    is_sized = any(each.batch is not None for each in sweep.points)
    columns = [
        TableColumn("Card", is_head=True),
        *numbers(*(["Room"] if is_card else [])),
        *(TableColumn(name.capitalize()) for name in varied),
        *numbers(*(["Batch"] if is_sized else []), "Peak", *(["Time", "Per second"] if is_timed else [])),
        *(numbers("Cost/million", "1,000 steps") if is_priced else []),
        TableColumn("Fits"),
    ]

    def cells(point: SweepPoint) -> Iterator[str | Cell]:
        yield names.get(point.card, point.card)
        if is_card:
            yield format_bytes(point.room_bytes)
        yield from (_setting(point, name, sweep) for name in varied)
        if is_sized:
            yield str(point.batch)
        yield "cannot run" if point.counted_bytes is None else format_bytes(point.counted_bytes)
        if is_timed:
            yield "unknown" if point.time is None else format_seconds(point.time.seconds)
            yield _rate(point)
        if is_priced:
            yield _cost(point)
            yield _cost_of_steps(point)
        verdict = describe_verdict(point, point.room_bytes)
        yield Cell(verdict, tone="bad" if verdict == "no" else "good")

    title = "Every point" if full else "The largest batch that fits, else the smallest"
    return make_table(title, columns, map(cells, shown))


def _words(point: SweepPoint, sweep: Sweep) -> str:
    """What tells a point from the others."""
    names = [name for name in _VARIED if len({getattr(each, name) for each in sweep.points}) > 1]
    batch = [] if point.batch is None else [f"batch {point.batch}"]
    card = _asked_names(sweep).get(point.card, point.card)
    return ", ".join([card, *batch, *(f"{name} {_setting(point, name, sweep)}" for name in names)])


def _setting(point: SweepPoint, name: str, sweep: Sweep) -> str:
    """A point's value of a setting; without autocast, the dtype that the model has."""
    value = str(getattr(point, name))
    return sweep.dtype if name == "precision" and value == "none" and sweep.dtype else value


def _asked_names(sweep: Sweep) -> dict[str, str]:
    """What the cards were asked for as, by the names that the catalogue has for them."""
    asked = (name for name in sweep.grid.card if not name.lower().endswith(".json"))
    return {catalogue.target(name).name: name for name in asked}


def _rate(point: SweepPoint) -> str:
    return "" if not point.item_seconds else per_second(1 / point.item_seconds)


def _cost_of_steps(point: SweepPoint) -> str:
    return "" if point.cost is None else f"{1e3 * point.cost:.3g}"


def _cost(point: SweepPoint) -> str:
    return "" if point.cost is None or point.items is None else f"{1e6 * point.cost / point.items:.3g}"
