"""What fits, as text and as Markdown: one table of points, with the columns that say something."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from fxmem.hardware import catalogue
from fxmem.hardware.context import explain_room
from fxmem.records.fits import NEAR_BEST, NONE, Fits, Point, ServeSize
from fxmem.records.plan import Plan
from fxmem.records.profile import Kind, Step
from fxmem.records.units import exact_bytes, format_bytes, format_seconds, percent, to_words
from fxmem.show.export.markdown_parts import code_span, write_table
from fxmem.show.facts import autocast_parts, describe_inputs, rank_parts
from fxmem.show.plan_facts import format_change
from fxmem.show.run_facts import describe_generation
from fxmem.show.sections import Cell, Fact, Section, Table, TableColumn, join_parts, make_table, numbers
from fxmem.show.text.tables import render_sections

_ROOM_OF_CARDS: Final = "each card's memory less what a CUDA context takes of it at least"
_FITS_NOT: Final = {False: "does not fit", None: "may not fit"}
_BAR: Final = 24
"""Columns of the longest bar; fewer where the lines are narrower."""
_TIGHT: Final = (
    "tight", "runs because the allocator gives its cache back when it runs short, which can take time at every step"
)  # fmt: skip
_OPEN: Final = "maybe", "sizes depend on data: at the largest that they can be it does not fit"
"""The word where that is not known, and why."""
_RUNS_TO_ITS_END: Final = "the first generation of a process runs to its last token, with retries or without"
_FITS: Final = "Peak: allocated bytes; a step fits where what the allocator reserves is within the room."
_VARIED: Final = ("length", "precision", "checkpoints", "mesh")
_STATE: Final = {Kind.PARAMETER: "weights", Kind.GRADIENT: "gradients"}
_TITLES: Final = {"largest": "Sizes that were analysed", "cards": "Cards", "meshes": "Meshes", "grid": "Points"}
_ITEMS: Final = {"batch": "sample", "seq": "position", "context": "token"}


def fits_table(fits: Fits, *, full: bool = False, width: int = 100, color: bool = False) -> str:
    """The answer as text whose lines are at most `width` columns wide (at least 60).

    `full` has a line for each point of a grid; else there is one for each case, with the largest batch that fits.
    """
    return render_sections(fits_sections(fits, full=full, width=max(width, 60) - 12), width, color)


def fits_sections(fits: Fits, *, full: bool = False, width: int = 100) -> Iterator[Section]:
    """The answer, what it is of, and the points; `width` has room for the table."""
    question = fits.space.question
    answer = {"largest": _answer_size, "cards": _answer_cards, "meshes": _answer_meshes, "grid": _answer_grid}[question]
    yield Section(facts=[*answer(fits)])
    yield Section(facts=[*_subject(fits)])
    table = points_table(fits, full=full, width=width)
    yield Section(table, label="Curve" if question == "largest" else "")
    said = {cell.text for row in table.rows for cell in row.cells}
    planned = [(each, each.plan) for each in fits.points if each.plan is not None]
    said |= {_TIGHT[0] for each, plan in planned if _plan_headroom(each, plan) < 0}
    words = [each for each in (_TIGHT, _OPEN) if each[0] in said]
    if fits.step.generation is not None and question == "largest":
        words.append(("fits", _RUNS_TO_ITS_END))
    yield Section(facts=[Fact(*each) for each in words])
    if planned:
        yield _list_plans(planned)
    yield Section(facts=[Fact("Note", text) for text in (*fits.notes, *(each.text for each in fits.assumptions))])


# --- facts ------------------------------------------------------------------------------------------------------------


def _subject(fits: Fits) -> Iterator[Fact]:
    space = fits.space
    yield Fact("Model", fits.model, "model")
    if fits.inputs:
        sizes = [name for name in ("batch", "length") if getattr(space, name)]
        varies = f"; {' and '.join(sizes)} {'vary' if len(sizes) > 1 else 'varies'}" if sizes else ""
        yield Fact("Inputs", describe_inputs(fits.inputs) + varies, "inputs")
    yield Fact("Step", describe_step(fits.step), "step")
    if space.question == "largest":
        varies = f"{_label(fits)}: {', '.join(space.resized)}" if space.resized else space.dim
        yield Fact("Varies", " and ".join(filter(None, (varies, space.other))))
    if space.samples is not None:
        yield Fact("Batch", f"{space.samples} to an optimizer step, on all cards")
    yield Fact("Room", _describe_room(fits))


def _describe_room(fits: Fits) -> str:
    if len(fits.cards) != 1:
        others = [card.in_use_bytes for card in fits.cards if card.in_use_bytes]
        less = f", and {format_bytes(others[0])} of other programs" if others else "; other processes are not counted"
        return _ROOM_OF_CARDS + less
    (card,), room = fits.cards, exact_bytes(fits.points[0].room_bytes)
    if fits.space.is_budget:
        on_top = ", all of it the allocator's: a CUDA context comes on top" if card.device == "cuda" else ""
        return f"{room}, the budget on {card.name}{on_top}"
    return f"{card.name}, {explain_room(card) or room}"


def _label(fits: Fits) -> str:
    return fits.space.dim if fits.space.dim in _ITEMS else "size"


def _answer_border(fits: Fits) -> Iterator[Fact]:
    """The sizes that fit, where two vary, one line for each second one."""
    names, first = [_name_size(each) for each in (fits.space.dim, fits.space.other)], fits.points[0]
    for best, above in fits.border:
        found = f"{names[0]} {best.size} with {names[1]} {best.length}"
        next_one = "" if above is None else f"; {above.size} with {above.length} {_FITS_NOT[above.fits]}"
        yield Fact("Largest", found + next_one, tone="best")
    if not fits.border:
        yield Fact("Largest", f"none: not even {names[0]} {first.size} with {names[1]} {first.length}", tone="bad")
        yield Fact("Why", first.obstacle)
    yield Fact("Analysed", f"{len(fits.points)} pairs of sizes")


def _name_size(argument: str) -> str:
    """What a size of a program is called: by its place, `{height}`."""
    found = re.search(r"\{(\w+)", argument)
    return found[1] if found else "size"


def _answer_size(fits: Fits) -> Iterator[Fact]:
    if fits.space.other:
        yield from _answer_border(fits)
        return
    dim, largest, above, first = _label(fits), fits.largest, fits.next_above, fits.points[0]
    if largest is None:
        yield Fact("Largest", f"none: {dim} {first.size}, the smallest tried, {_FITS_NOT[first.fits]}", tone="bad")
    elif fits.positions is not None and largest > fits.positions:
        yield Fact("Largest", f"{dim} {fits.positions}, the model's positions; memory allows {largest}")
    else:
        yield Fact("Largest", f"{dim} {largest}", tone="best")
    if above is not None and largest is None:
        yield Fact("Why", above.obstacle)
    elif above is not None:
        yield Fact("Above", f"{dim} {above.size} {_FITS_NOT[above.fits]}. {above.obstacle}")
    elif largest == fits.space.limit:
        yield Fact("Above", f"not tried: {largest} is the limit of the search")
    if fits.per_sample_bytes is not None and fits.constant_bytes is not None:
        sign, near = "-" if fits.constant_bytes < 0 else "+", "" if largest is None else " near the largest"
        one_more, constant = _ITEMS.get(fits.space.dim, "1 of size"), format_bytes(abs(fits.constant_bytes))
        line = f"{format_bytes(fits.per_sample_bytes)} per {one_more} {sign} {constant} constant"
        off = f"off by {format_bytes(fits.line_error_bytes)} at most{near}"
        yield Fact("Line", f"{line}, of {'allocated' if _is_on_card(fits) else 'requested'} bytes; {off}")
    if fits.best_per_second is not None and fits.enough is not None:
        enough = f"of the sizes below, {dim} {fits.enough} is the smallest that reaches {100 * NEAR_BEST:.0f} % of it"
        yield Fact("Throughput", f"at most {_per_second(fits.best_per_second)} per second, estimated; {enough}")
    found, last = f"{len(fits.points)} sizes", fits.last_possible
    if fits.monotone is not None:
        falls = "a larger one has a lower peak than a smaller one"
        found += f"; among these {'the peak never falls as the size grows' if fits.monotone else falls}"
    if above is not None and above.allocated_bytes is not None and last is not None and last > (above.size or 0):
        found += f". Larger ones up to {last} may fit too, by how the allocator's pieces fall"
    yield Fact("Analysed", found)


def _answer_cards(fits: Fits) -> Iterator[Fact]:
    fitting = {each.card for each in fits.fitting}
    planned = sum(each.plan is not None for each in fits.points)
    with_plans = f", {planned} of them with checkpoints" if fits.space.planned else ""
    least = next((card for card in fits.cards if card.name in fitting), None)  # the smallest memory is first
    smallest = "" if least is None else f"; the smallest is {least.name}, {format_bytes(least.memory_bytes)}"
    yield Fact("Cards", f"{len(fitting)} of {len(fits.points)} fit{with_plans}{smallest}")
    once = f"{fits.analyses} times, once for each compute capability: it decides the kernels and their workspaces"
    not_again = "not again: a report is held against cards of its own compute capability"
    yield Fact("Analysed", once if fits.analyses else not_again)
    if any(each.time for each in fits.points):
        yield Fact("Time", f"of a {'step' if fits.step.generation is None else 'generation'} by itself, estimated")


def _answer_meshes(fits: Fits) -> Iterator[Fact]:
    fitting = fits.fitting
    which = f"fits as {fitting[0].mesh}" if fitting else "no mesh fits"
    yield Fact("Cards", f"{fits.space.ranks} x {fits.target.name}: {which}", tone="good" if fitting else "bad")
    if fits.dtypes:
        dtypes = (f"{_STATE.get(kind, to_words(kind))} {dtype}" for kind, dtype in fits.dtypes.items())
        yield Fact("Precision", ", ".join(dtypes))
    tried = f"{len(fits.points)} whole, {fits.analyses} analyses in all; {fits.ruled_out} more on the way ruled out"
    yield Fact("Meshes", f"{len(fitting)} that fit; {tried}")


def _answer_grid(fits: Fits) -> Iterator[Fact]:
    fitting, whole = fits.fitting, sum(each.is_analysed for each in fits.points)
    yield Fact("Points", f"{len(fitting)} of {len(fits.points)} fit")
    kept = f" now, {fits.kept} points kept" if fits.kept else ""
    by_forms = f"; {whole} points themselves, the others by forms of sizes" if whole < len(fits.points) else ""
    yield Fact("Analysed", f"{fits.analyses} steps{kept}{by_forms}")
    if timed := [each for each in fitting if each.item_seconds is not None]:
        best = min(timed, key=lambda each: each.item_seconds or 0.0)
        rate = _per_second(best.per_second)
        yield Fact("Fastest", f"{_describe_point(best, fits)}: {rate} {fits.item}s per second, estimated")
    if priced := [each for each in timed if each.cost is not None]:
        best = min(priced, key=lambda each: (each.cost or 0.0) / (each.items or 1))
        cost = f"{_cost(best)} for a million {fits.item}s, {_cost_of_steps(best)} for 1,000 steps"
        yield Fact("Cheapest", f"{_describe_point(best, fits)}: {cost}")
    if bare := dict.fromkeys(each.card for each in fitting if each.card in fits.space.prices and each.cost is None):
        why = "of a program" if fits.step.program else "there, but on a card of the catalogue"
        yield Fact("Cost", f"not known on {', '.join(bare)}: no time is estimated {why}")


def describe_step(step: Step, *, with_autocast: bool = True) -> str:
    """What the step does, in a few words; without its autocast where that varies."""
    autocast = autocast_parts(step) if with_autocast else []
    if step.generation is not None:
        return join_parts([("generate", describe_generation(step.generation)), *autocast])
    trained = [("loss", step.loss or "none"), ("optimizer", step.optimizer or "none")] if step.mode == "train" else []
    return join_parts([("", step.mode), *trained, *autocast, *rank_parts(step)])


# --- tables -----------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    heading: str
    write: Callable[[Point], str]
    is_shown: bool = True
    is_number: bool = True


def points_table(fits: Fits, *, full: bool = False, width: int = 100) -> Table:
    """A row for each point; of a grid for each case unless it is to be `full`."""
    question = fits.space.question
    is_grid, is_curve, of_cards, of_meshes = (question == each for each in ("grid", "largest", "cards", "meshes"))
    on_card, is_timed = _is_on_card(fits), any(each.item_seconds is not None for each in fits.fitting)
    has_room, is_priced = of_cards or fits.target.device == "cuda", any(each.cost is not None for each in fits.fitting)
    names, varied = _asked_names(fits), _list_varied(fits)
    columns = [
        _Column("Card", lambda each: names.get(each.card, each.card), is_grid or of_cards, is_number=False),
        _Column("Room", lambda each: format_bytes(each.room_bytes), has_room and (is_grid or of_cards)),
        *(
            _Column(
                (_name_size(fits.space.other) if fits.space.other else name).capitalize(),
                partial(_setting, fits, name),
                is_number=False,
            )
            for name in (["mesh"] if of_meshes else varied)
        ),
        _Column("Batches", lambda each: f"{each.accumulate} x {each.size}", of_meshes),
        _Column(
            _name_size(fits.space.dim).capitalize() if is_curve else "Batch",
            lambda each: str(each.size),
            not of_meshes and any(each.size is not None for each in fits.points),
        ),
        _Column(
            "Peak" if is_grid else "Allocated" if on_card else "Requested",
            lambda each: "cannot run" if each.counted_bytes is None else format_bytes(each.counted_bytes),
        ),
        _Column("Reserved", _ran(lambda each: format_bytes(each.reserved_bytes)), on_card and not is_grid),
        _Column("Share", _ran(lambda each: percent(each.counted_bytes or 0, each.room_bytes)), is_curve),
        _Column("Headroom", _ran(lambda each: format_bytes(each.headroom_bytes)), of_cards),
        _Column("Host", lambda each: format_bytes(each.host_bytes), any(each.host_bytes for each in fits.points)),
        _Column("Sends/step", lambda each: format_bytes(each.moved_bytes), of_meshes),
        _Column("Links", lambda each: _seconds(each.link_seconds), of_meshes),
        _Column(
            "Time", lambda each: _seconds(each.time.seconds if each.time else None), of_cards or (is_grid and is_timed)
        ),
        _Column("Per second", lambda each: _per_second(each.per_second), (is_grid or is_curve) and is_timed),
        _Column(
            "Retries",
            lambda each: str(each.alloc_retries) if each.fits else "",
            is_curve and any(each.alloc_retries is not None for each in fits.points),
        ),
        _Column("Cost/million", _cost, is_priced),
        _Column("1,000 steps", _cost_of_steps, is_priced),
    ]
    shown = [each for each in columns if each.is_shown]
    heads = [TableColumn(each.heading, is_number=each.is_number, is_head=not each.is_number and not at)
             for at, each in enumerate(shown)]  # fmt: skip
    ran = [each.counted_bytes or 0 for each in fits.points]
    top = max([*ran, *(each.room_bytes for each in fits.points)], default=1)
    bar = max(min(_BAR, width - 10 - 11 * len(shown)), 8)

    def cells(point: Point) -> Iterator[str | Cell]:
        yield from (each.write(point) for each in shown)
        verdict = describe_verdict(point)
        yield Cell(verdict, tone="bad" if verdict == "no" else "" if verdict == _OPEN[0] else "good")
        if is_curve:
            yield "" if point.counted_bytes is None else _bar(point.counted_bytes, point.room_bytes, top, bar)

    title = _TITLES[question] if full or not is_grid else "The largest batch that fits, else the smallest"
    plotted = [TableColumn(is_plotted=True)] if is_curve else []
    points = fits.by_case if is_grid and not full else fits.points
    return make_table(title, [*heads, TableColumn("Fits"), *plotted], map(cells, points))


def describe_verdict(point: Point) -> str:
    """Whether a step fits, in a word: by itself, with a plan, or `tight`."""
    if point.plan is not None:
        return "plan"
    if not point.fits:
        return _OPEN[0] if point.fits is None else "no"
    return "yes" if point.headroom_bytes >= 0 else "tight"


def markdown(fits: Fits, *, full: bool = False) -> str:
    """The table as Markdown, for a README, and what it was predicted by."""
    table = points_table(fits, full=full)
    numeric = [column.is_number for column in table.columns]
    rows = (
        [cell.text if is_number else code_span(cell.text) for cell, is_number in zip(row.cells, numeric, strict=True)]
        for row in table.rows
    )
    step = describe_step(fits.step, with_autocast="precision" not in _list_varied(fits))
    of = ", ".join([*map(code_span, filter(None, (fits.model, describe_inputs(fits.inputs)))), step])
    times = " Times are estimates." if any(each.time is not None for each in fits.points) else ""
    room = f" {_FITS}" if fits.target.device == "cuda" else ""
    by = f"by fxmem {fits.fxmem_version} with torch {fits.torch_version}"
    return f"{write_table(make_table(table.label, table.columns, rows))}\n\nPredicted of {of}; {by}.{room}{times}\n"


def _list_plans(planned: list[tuple[Point, Plan]]) -> Section:
    most = max(plan.host_bytes for _, plan in planned)
    host = f" Up to {format_bytes(most)} wait in pinned memory of the host." if most else ""

    def cells(point: Point, plan: Plan) -> Iterator[str]:
        yield point.card
        yield str(sum(1 for _ in plan.all_regions()))
        yield plan.application.value
        yield format_bytes(plan.after.counted_bytes)
        yield format_bytes(_plan_headroom(point, plan))
        yield "unknown" if plan.extra_fraction is None else f"{100 * plan.extra_fraction:+.1f} %"
        is_timed = plan.before_seconds and plan.after_seconds
        yield format_change(plan.before_seconds or 0.0, plan.after_seconds or 0.0) if is_timed else "unknown"

    figures = numbers("Regions", "Applied by", "Allocated", "Headroom", "FLOPs", "Time")
    table = make_table("Plans", [TableColumn("Card", is_head=True), *figures], (cells(*each) for each in planned))
    notes = [f"FLOPs: run again, as a share of the forward's. Time: estimated, of the whole step.{host}"]
    return Section(table, notes=notes, label="Plans")


def _plan_headroom(point: Point, plan: Plan) -> int:
    peak = plan.after
    return point.room_bytes - (peak.requested_bytes if peak.reserved_bytes is None else peak.reserved_bytes)


# --- parts ------------------------------------------------------------------------------------------------------------


def _is_on_card(fits: Fits) -> bool:
    return any(each.allocated_bytes is not None for each in fits.points)


def _list_varied(fits: Fits) -> list[str]:
    return [name for name in _VARIED if len({getattr(each, name) for each in fits.points}) > 1]


def _describe_point(point: Point, fits: Fits) -> str:
    """What tells a point from the others."""
    size = [] if point.size is None else [f"batch {point.size}"]
    card = _asked_names(fits).get(point.card, point.card)
    return ", ".join([card, *size, *(f"{name} {_setting(fits, name, point)}" for name in _list_varied(fits))])


def _setting(fits: Fits, name: str, point: Point) -> str:
    """A point's value of a setting; without autocast, the dtype that the model has."""
    value = str(getattr(point, name))
    return fits.dtypes.get(Kind.PARAMETER, value) if (name, value) == ("precision", NONE) else value


def _asked_names(fits: Fits) -> dict[str, str]:
    """What the cards were asked for as, by the names that the catalogue has for them."""
    asked = (name for name in fits.space.card if not name.lower().endswith(".json"))
    return {catalogue.target(name).name: name for name in asked}


def _ran(write: Callable[[Point], str]) -> Callable[[Point], str]:
    return lambda point: "" if point.counted_bytes is None else write(point)


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_seconds(seconds)


def _per_second(rate: float | None) -> str:
    """Three digits of it: more are not known."""
    return "" if not rate else f"{float(f'{rate:.3g}'):,.10g}"


def _cost_of_steps(point: Point) -> str:
    return "" if point.cost is None else f"{1e3 * point.cost:.3g}"


def _cost(point: Point) -> str:
    return "" if point.cost is None or point.items is None else f"{1e6 * point.cost / point.items:.3g}"


def _bar(nbytes: int, room: int, top: int, width: int) -> str:
    """A bar with a mark where the room ends."""
    filled, end = round(nbytes * width / top), round(room * width / top)
    return f"{'#' * min(filled, end)}{' ' * (end - filled)}|{'#' * (filled - end)}"


# --- an engine's room, as text ----------------------------------------------------------------------------------------


def serving_table(size: ServeSize, *, width: int = 100, color: bool = False) -> str:
    """The terms and what is left, no line wider than `width` columns (at least 60)."""
    share = f"{100 * size.utilization:g} % of {format_bytes(size.memory_bytes)}"
    batch = f"{size.max_batched_tokens:,} tokens, then a sample for each of {size.max_seqs:,} sequences"
    cards = size.tensor_parallel * size.pipeline_parallel
    on = f"one {size.target.name}" if cards == 1 else f"{cards} {size.target.name}: {_describe_mesh(size)}"
    head = [Fact("Model", size.model), Fact("Engine", f"{size.engine} {size.release}, on {on}")]
    terms = [
        Fact("May use", f"{format_bytes(int(size.memory_bytes * size.utilization))}: {share}"),
        Fact("Weights", exact_bytes(size.weights_bytes)),
    ]
    if size.profile_peak_bytes:
        peak = f"{exact_bytes(size.profile_peak_bytes)} at its peak, in {size.profile_peak_at}"
        terms.append(Fact("Profile run", f"{peak}: {batch}"))
    spans = (f"{each.name}: {_span(each.low_bytes, each.high_bytes)} ({each.source})" for each in size.uncounted)
    terms.append(Fact("Uncounted", "; ".join(spans)))
    if not size.counts_graphs and size.graphs_high_bytes != 0:
        known = size.graphs_low_bytes is not None and size.graphs_high_bytes is not None
        taken = _span(size.graphs_low_bytes or 0, size.graphs_high_bytes or 0) if known else "not known"
        terms.append(Fact("Beside", f"CUDA graphs, once keys and values have their room: {taken}"))
    block = f"{size.block_size} tokens, {format_bytes(size.block_bytes)}"
    shared = f"; {size.groups} groups of layers share the blocks" if size.groups > 1 else ""
    left = Fact("Left", f"{_span(max(size.kv_low_bytes, 0), size.kv_high_bytes)} for keys and values")
    if not size.high_blocks:
        left = Fact("Left", "nothing for keys and values: the engine does not start", tone="bad")
    width_of_token = f"{format_bytes(size.token_bytes)} each in all layers"
    tokens = f"{size.low_tokens:,} to {size.high_tokens:,}; {width_of_token}{'' if cards == 1 else ' of a card'}"
    found = [
        Fact("Requests", f"{format_whole(each.low, each.high)} of {each.context:,} tokens at once")
        for each in size.sequences
    ]
    found += [
        left,
        Fact("Tokens", tokens),
        Fact("Blocks", f"{size.low_blocks:,} to {size.high_blocks:,} of {block}{shared}"),
        *(
            Fact(
                "More with" if place == 0 else "", f"{each.option}: {each.low_tokens:,} to {each.high_tokens:,} tokens"
            )
            for place, each in enumerate(size.changes)
        ),
    ]
    notes = [Fact("Assumed", each.text) for each in size.assumptions if each.topic in ("model", "engine")]
    return render_sections([Section(facts=each) for each in (head, found, terms, notes)], width, color)


def _describe_mesh(size: ServeSize) -> str:
    """How the cards share the model; what is said is of the fullest."""
    parts = [f"tp {size.tensor_parallel}"] if size.tensor_parallel > 1 else []
    parts += [f"pp {size.pipeline_parallel}"] if size.pipeline_parallel > 1 else []
    return f"{', '.join(parts)}; of the card with the least room"


def _span(low: int, high: int) -> str:
    """Two sizes, or one where both read the same."""
    least, most = format_bytes(low), format_bytes(high)
    return least if least == most else f"{least} to {most}"


def format_whole(low: float, high: float) -> str:
    """How many whole ones there are between both, `124 to 126`."""
    least, most = int(low), int(high)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
