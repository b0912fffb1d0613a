"""The largest size, fitting cards and meshes, and an engine's room, as text."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.hardware.context import explain_room
from fxmem.records.plan import Plan
from fxmem.records.profile import Kind, Step
from fxmem.records.sizes import (
    NEAR_BEST,
    CardFit,
    CardFits,
    MeshFit,
    MeshFits,
    ServeSize,
    SizeCurve,
    SizePoint,
    Sweep,
    SweepPoint,
)
from fxmem.records.units import exact_bytes, format_bytes, format_seconds, percent, to_words
from fxmem.show.facts import autocast_parts, describe_inputs, rank_parts
from fxmem.show.plan_facts import format_change
from fxmem.show.run_facts import describe_generation
from fxmem.show.sections import Cell, Fact, Section, Table, TableColumn, Tone, join_parts, make_table, numbers
from fxmem.show.text.tables import lay_out_sections, numbered, render, render_sections

ROOM_OF_CARDS = "each card's memory less what a CUDA context takes of it at least; other processes are not counted"
_FITS_NOT = {False: "does not fit", None: "may not fit"}
_BAR = 24
"""Columns of the longest bar; fewer where the lines are narrower."""
_TIGHT = "runs because the allocator gives its cache back when it runs short, which can take time at every step"
_OPEN = "maybe", "sizes depend on data: at the largest that they can be it does not fit"
"""The word where that is not known, and why."""
_RUNS_TO_ITS_END = "the first generation of a process runs to its last token, with retries or without"


def curve_table(curve: SizeCurve, *, width: int = 100, color: bool = False) -> str:
    """The curve as text whose lines are at most `width` columns wide (at least 60)."""
    return render_sections(curve_sections(curve, max(width, 60) - 12), width, color)


def curve_sections(curve: SizeCurve, width: int = 100) -> Iterator[Section]:
    """The largest size, and the peak of each that was analysed; `width` has room for the table."""
    yield Section(facts=_findings(curve))
    yield Section(
        facts=[
            *subject_facts(curve),
            Fact("Varies", f"{_label(curve)}: {', '.join(curve.resized)}" if curve.resized else curve.dim),
            Fact("Room", _describe_room(curve)),
        ]
    )
    points = _points(curve, width)
    yield Section(points, label="Curve")
    yield from explain_verdicts(points)
    if curve.step.generation is not None:
        yield Section(facts=[Fact("fits", _RUNS_TO_ITS_END)])


def subject_facts(about: SizeCurve | CardFits | MeshFits | Sweep) -> list[Fact]:
    """What was analysed."""
    inputs = [Fact("Inputs", describe_inputs(about.inputs), "inputs")] if about.inputs else []
    return [Fact("Model", about.model, "model"), *inputs, Fact("Step", describe_step(about.step), "step")]


def explain_verdicts(table: Table) -> Iterator[Section]:
    """What `tight` and `maybe` mean, where a cell of a table says so."""
    said = {cell.text for row in table.rows for cell in row.cells}
    if facts := [Fact(*each) for each in (("tight", _TIGHT), _OPEN) if each[0] in said]:
        yield Section(facts=facts)


def cards_table(fits: CardFits, *, width: int = 100, color: bool = False) -> str:
    """The cards as text whose lines are at most `width` columns wide (at least 60)."""
    return render_sections(card_sections(fits), width, color)


def card_sections(fits: CardFits) -> Iterator[Section]:
    """Which cards a step fits, by itself and with a plan."""
    fitting, plans = fits.fitting, [(card, card.plan) for card in fits.cards if card.plan is not None]
    with_plans = f", {sum(card.plan is not None for card in fitting)} of them with checkpoints" if fits.planned else ""
    least = min(fitting, key=lambda card: card.target.memory_bytes or 0, default=None)
    smallest = ""
    if least is not None:
        smallest = f"; the smallest is {least.target.name}, {format_bytes(least.target.memory_bytes)}"
    what = "a step" if fits.step.generation is None else "a generation"
    once = f"{fits.analyses} times, once for each compute capability: it decides the kernels and their workspaces"
    again = once if fits.analyses else "not again: a report is held against cards of its own compute capability"
    yield Section(
        facts=[
            *subject_facts(fits),
            Fact("Cards", f"{len(fitting)} of {len(fits.cards)} fit{with_plans}{smallest}"),
            Fact("Analysed", again),
            *([Fact("Time", f"of {what} by itself, estimated")] if any(card.time for card in fits.cards) else []),
            Fact("Room", ROOM_OF_CARDS),
        ]
    )
    figures = numbers("Room", "Allocated", "Reserved", "Headroom", "Time")
    columns = [TableColumn("Card", is_head=True), *figures, TableColumn("Fits")]
    yield Section(make_table("Cards", columns, map(_card_cells, fits.cards)))
    if any(_is_tight_card(card) for card in fits.cards):
        yield Section(facts=[Fact("tight", _TIGHT)])
    if any(describe_fit(card) == _OPEN[0] for card in fits.cards):
        yield Section(facts=[Fact(*_OPEN)])
    if plans:
        most = max(plan.host_bytes for _, plan in plans)
        host = f" Up to {format_bytes(most)} wait in pinned memory of the host." if most else ""
        figures = numbers("Regions", "Applied by", "Allocated", "Headroom", "FLOPs", "Time")
        rows = (_plan_cells(card, plan) for card, plan in plans)
        notes = [f"FLOPs: run again, as a share of the forward's. Time: estimated, of the whole step.{host}"]
        table = make_table("Plans", [TableColumn("Card", is_head=True), *figures], rows)
        yield Section(table, notes=notes, label="Plans")


def _card_cells(card: CardFit) -> Iterator[str | Cell]:
    yield card.target.name
    yield format_bytes(card.room_bytes)
    yield _counted(card)
    yield format_bytes(card.reserved_bytes)
    yield format_bytes(card.headroom_bytes)
    yield "unknown" if card.time is None else format_seconds(card.time.seconds)
    yield _verdict_cell(describe_fit(card))


def _plan_cells(card: CardFit, plan: Plan) -> Iterator[str]:
    yield card.target.name
    yield str(sum(1 for _ in plan.all_regions()))
    yield plan.application.value
    yield format_bytes(plan.after.counted_bytes)
    yield format_bytes(_plan_headroom(card))
    yield "unknown" if plan.extra_fraction is None else f"{100 * plan.extra_fraction:+.1f} %"
    is_timed = plan.before_seconds and plan.after_seconds
    yield format_change(plan.before_seconds or 0.0, plan.after_seconds or 0.0) if is_timed else "unknown"


def _counted(fit: CardFit | MeshFit) -> str:
    return format_bytes(fit.requested_bytes if fit.allocated_bytes is None else fit.allocated_bytes)


def _verdict_cell(verdict: str, no: Tone = "bad") -> Cell:
    return Cell(verdict, tone=no if verdict == "no" else "" if verdict == _OPEN[0] else "good")


def meshes_table(fits: MeshFits, *, width: int = 100, color: bool = False) -> str:
    """The meshes as text whose lines are at most `width` columns wide (at least 60)."""
    fitting = sum(each.fits is True for each in fits.meshes)
    tried = f"{len(fits.meshes)} whole, {fits.analyses} analyses in all; {fits.ruled_out} more on the way ruled out"
    best = fits.best
    which = "no mesh fits" if best is None else f"fits as {_mesh_words(fits, best)}"
    words = {Kind.PARAMETER: "weights", Kind.GRADIENT: "gradients"}
    dtypes = ", ".join(f"{words.get(kind, to_words(kind))} {dtype}" for kind, dtype in fits.dtypes.items())
    answer = [
        Fact("Cards", f"{fits.cards} x {fits.target.name}: {which}", tone="bad" if best is None else "good"),
        *([Fact("Precision", dtypes)] if dtypes else []),
    ]
    head = [
        *subject_facts(fits),
        Fact("Room", f"of each, {explain_room(fits.target) or format_bytes(fits.room_bytes)}"),
        Fact("Batch", f"{fits.batch} to an optimizer step, on all cards"),
        Fact("Meshes", f"{fitting} that fit; {tried}"),
    ]
    rows = _mesh_rows(fits)
    found = lay_out_sections([Section(facts=answer), Section(facts=head), Section(rows), *explain_verdicts(rows)])
    return render([*found, numbered("Assumed", [each.text for each in fits.assumptions])], max(width, 60), color)


def _mesh_rows(fits: MeshFits) -> Table:
    with_host = any(each.host_bytes for each in fits.meshes)
    figures = numbers("Batches", "Allocated", "Reserved", *(["Host"] if with_host else []), "Sends/step", "Links")
    columns = [TableColumn("Mesh", is_head=True), *figures, TableColumn("Fits")]

    def cells(each: MeshFit) -> Iterator[str | Cell]:
        yield _mesh_words(fits, each)
        yield f"{each.accumulate} x {each.micro_batch}"
        yield _counted(each)
        yield format_bytes(each.reserved_bytes)
        if with_host:
            yield format_bytes(each.host_bytes)
        yield format_bytes(each.moved_bytes)
        yield "unknown" if each.link_seconds is None else format_seconds(each.link_seconds)
        yield _verdict_cell(describe_verdict(each, fits.room_bytes))

    return make_table("Meshes", columns, map(cells, fits.meshes))


def _mesh_words(fits: MeshFits, each: MeshFit) -> str:
    return ",".join(f"{name}={size}" for name, size in each.mesh.items()) if fits.cards > 1 else "none"


def describe_verdict(each: MeshFit | SizePoint | SweepPoint, room: int) -> str:
    """Whether a step fits, in a word."""
    if not each.fits:
        return _OPEN[0] if each.fits is None else "no"
    return "tight" if (each.reserved_bytes or 0) > room else "yes"


def serving_table(size: ServeSize, *, width: int = 100, color: bool = False) -> str:
    """The terms and what is left, no line wider than `width` columns (at least 60)."""
    share = f"{100 * size.utilization:g} % of {format_bytes(size.memory_bytes)}"
    batch = f"{size.max_batched_tokens:,} tokens, then a sample for each of {size.max_seqs:,} sequences"
    head = [Fact("Model", size.model), Fact("Engine", f"{size.engine} {size.release}, on one {size.target.name}")]
    terms = [
        Fact("May use", f"{format_bytes(int(size.memory_bytes * size.utilization))}: {share}"),
        Fact("Weights", exact_bytes(size.weights_bytes)),
        Fact("Profile run", f"{exact_bytes(size.profile_peak_bytes)} at its peak, in {size.profile_peak_at}: {batch}"),
    ]
    spans = (
        f"{each.name}: {format_bytes(each.low_bytes)} to {format_bytes(each.high_bytes)} ({each.source})"
        for each in size.uncounted
    )
    terms.append(Fact("Uncounted", "; ".join(spans)))
    block = f"{size.block_size} tokens, {format_bytes(size.block_bytes)}"
    shared = f"; {size.groups} groups of layers share the blocks" if size.groups > 1 else ""
    low, high = format_bytes(max(size.kv_low_bytes, 0)), format_bytes(size.kv_high_bytes)
    left = Fact("Left", f"{low} to {high} for keys and values")
    if not size.high_blocks:
        left = Fact("Left", "nothing for keys and values: the engine does not start", tone="bad")
    tokens = f"{size.low_tokens:,} to {size.high_tokens:,}; {format_bytes(size.token_bytes)} each in all layers"
    found = [
        Fact("Requests", f"{format_whole(each.low, each.high)} of {each.context:,} tokens at once")
        for each in size.sequences
    ]
    found += [
        left,
        Fact("Tokens", tokens),
        Fact("Blocks", f"{size.low_blocks:,} to {size.high_blocks:,} of {block}{shared}"),
    ]
    notes = [Fact("Assumed", each.text) for each in size.assumptions if each.topic in ("model", "engine")]
    return render_sections([Section(facts=each) for each in (head, found, terms, notes)], width, color)


def format_whole(low: float, high: float) -> str:
    """How many whole ones there are between both, `124 to 126`."""
    least, most = int(low), int(high)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def describe_fit(card: CardFit) -> str:
    """Whether the step fits the card, in a word: by itself, with a plan, or `tight`."""
    if card.plan is not None:
        return "plan"
    if not card.fits:
        return _OPEN[0] if card.fits is None else "no"
    return "yes" if card.headroom_bytes >= 0 else "tight"


def describe_step(step: Step, *, with_autocast: bool = True) -> str:
    """What the step does, in a few words; without its autocast where that varies."""
    autocast = autocast_parts(step) if with_autocast else []
    if step.generation is not None:
        return join_parts([("generate", describe_generation(step.generation)), *autocast])
    trained = [("loss", step.loss or "none"), ("optimizer", step.optimizer or "none")] if step.mode == "train" else []
    return join_parts([("", step.mode), *trained, *autocast, *rank_parts(step)])


def _describe_room(curve: SizeCurve) -> str:
    if curve.is_budget:
        on_top = ", all of it the allocator's: a CUDA context comes on top" if curve.target.device == "cuda" else ""
        return f"{exact_bytes(curve.room_bytes)}, the budget on {curve.target.name}{on_top}"
    return f"{curve.target.name}, {explain_room(curve.target) or exact_bytes(curve.room_bytes)}"


def _label(curve: SizeCurve) -> str:
    """What varies, in a word."""
    return curve.dim if curve.dim in ("batch", "seq", "context") else "size"


def _findings(curve: SizeCurve) -> list[Fact]:
    dim, first = _label(curve), curve.points[0]
    found = [Fact("Largest", f"{dim} {curve.largest}", tone="best")]
    if curve.positions is not None and (curve.largest or 0) > curve.positions:
        found = [Fact("Largest", f"{dim} {curve.positions}, the model's positions; memory allows {curve.largest}")]
    if curve.largest is None:
        found = [Fact("Largest", f"none: {dim} {first.size}, the smallest tried, {_FITS_NOT[first.fits]}", tone="bad")]
    above = curve.next_above
    if above is not None and curve.largest is None:
        found.append(Fact("Why", above.obstacle))
    elif above is not None:
        found.append(Fact("Above", f"{dim} {above.size} {_FITS_NOT[above.fits]}. {above.obstacle}"))
    elif curve.largest == curve.limit:
        found.append(Fact("Above", f"not tried: {curve.limit} is the limit of the search"))
    if curve.per_sample_bytes is not None and curve.constant_bytes is not None:
        sign = "-" if curve.constant_bytes < 0 else "+"
        one_more = {"batch": "sample", "seq": "position", "context": "token"}.get(curve.dim, "1 of size")
        near = "" if curve.largest is None else " near the largest"
        constant = format_bytes(abs(curve.constant_bytes))
        line = f"{format_bytes(curve.per_sample_bytes)} per {one_more} {sign} {constant} constant"
        counted = "requested" if all(point.allocated_bytes is None for point in curve.points) else "allocated"
        off = f"off by {format_bytes(curve.line_error_bytes)} at most{near}"
        found.append(Fact("Line", f"{line}, of {counted} bytes; {off}"))
    if curve.best_per_second is not None and curve.enough is not None:
        best = f"at most {per_second(curve.best_per_second)} per second, estimated"
        enough = f"of the sizes below, {dim} {curve.enough} is the smallest that reaches {100 * NEAR_BEST:.0f} % of it"
        found.append(Fact("Throughput", f"{best}; {enough}"))
    found.append(Fact("Analysed", _proof(curve)))
    found += [Fact("Note", assumption.text) for assumption in curve.assumptions]
    return found


def _proof(curve: SizeCurve) -> str:
    found = f"{len(curve.points)} sizes"
    if curve.monotone is not None:
        falls = "a larger one has a lower peak than a smaller one"
        found += f"; among these {'the peak never falls as the size grows' if curve.monotone else falls}"
    above, last = curve.next_above, curve.last_possible
    if above is None or above.allocated_bytes is None or last is None or last <= above.size:
        return found
    return f"{found}. Larger ones up to {last} may fit too, by how the allocator's pieces fall"


def _points(curve: SizeCurve, width: int) -> Table:
    on_card = any(point.allocated_bytes is not None for point in curve.points)
    is_timed = curve.best_per_second is not None
    is_counted = any(point.alloc_retries is not None for point in curve.points)
    columns = [
        *numbers("Size", *(["Allocated", "Reserved"] if on_card else ["Requested"]), "Share"),
        *(numbers("Per second") if is_timed else []),
        *(numbers("Retries") if is_counted else []),
        TableColumn("Fits"),
        TableColumn(is_plotted=True),
    ]
    top = max([curve.room_bytes, *(point.counted_bytes or 0 for point in curve.points)])
    bar = max(min(_BAR, width - (54 if on_card else 42) - 11 * is_timed - 8 * is_counted), 8)

    def cells(point: SizePoint) -> Iterator[str | Cell]:
        counted = point.counted_bytes
        yield str(point.size)
        yield "cannot run" if counted is None else format_bytes(counted)
        if on_card:
            yield "" if counted is None else format_bytes(point.reserved_bytes)
        yield "" if counted is None else percent(counted, curve.room_bytes)
        if is_timed:
            yield "" if point.per_second is None else per_second(point.per_second)
        if is_counted:
            yield "" if point.alloc_retries is None or not point.fits else str(point.alloc_retries)
        yield _verdict_cell(describe_verdict(point, curve.room_bytes), "over")
        yield "" if counted is None else _bar(counted, curve.room_bytes, top, bar)

    return make_table("Sizes that were analysed", columns, map(cells, curve.points))


def _bar(nbytes: int, room: int, top: int, width: int) -> str:
    """A bar with a mark where the room ends."""
    filled, end = round(nbytes * width / top), round(room * width / top)
    return f"{'#' * min(filled, end)}{' ' * (end - filled)}|{'#' * (filled - end)}"


def per_second(rate: float) -> str:
    """Three digits of it: more are not known."""
    return f"{float(f'{rate:.3g}'):,.10g}"


def _is_tight_card(card: CardFit) -> bool:
    return (card.fits and card.headroom_bytes < 0) or (card.plan is not None and _plan_headroom(card) < 0)


def _plan_headroom(card: CardFit) -> int:
    if card.plan is None:
        return card.headroom_bytes
    peak = card.plan.after
    used = peak.requested_bytes if peak.reserved_bytes is None else peak.reserved_bytes
    return card.room_bytes - used
