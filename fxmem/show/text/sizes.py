"""The largest size, fitting cards and meshes, and an engine's room, as text."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxmem.hardware.context import describe_uncounted
from fxmem.records.profile import Step
from fxmem.records.sizes import NEAR_BEST, CardFit, CardFits, MeshFit, MeshFits, ServeSize, SizeCurve, SizePoint
from fxmem.records.units import exact_bytes, format_bytes, format_seconds, percent, printable
from fxmem.show.facts import describe_autocast, describe_generation, describe_inputs, describe_rank
from fxmem.show.sections import Fact
from fxmem.show.text.tables import RULED, facts, item_list, label_content, note, render

_BAR = 24
"""Columns of the longest bar; fewer where the lines are narrower."""
TIGHT = "runs because the allocator gives its cache back when it runs short, which can take time at every step"
"""What `tight` means."""


RUNS_TO_ITS_END = "the first generation of a process runs to its last token, with retries or without"
"""What `fits` means of a generation."""


def curve_table(curve: SizeCurve, *, width: int = 100, color: bool = False) -> str:
    """The curve as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    head = [
        Fact("Model", printable(curve.model)),
        *([Fact("Inputs", printable(describe_inputs(curve.inputs)))] if curve.inputs else []),
        Fact("Step", describe_step(curve.step)),
        Fact("Varies", printable(f"{_label(curve)}: {', '.join(curve.resized)}" if curve.resized else curve.dim)),
        Fact("Memory", _memory(curve)),
    ]
    parts: list[RenderableType] = [
        facts(head),
        facts(_findings(curve)),
        label_content("Curve", _points(curve, width - 12)),
    ]
    if any(_is_tight(point, curve.memory_bytes) for point in curve.points):
        parts.append(facts([Fact("tight", TIGHT)]))
    if curve.step.generation is not None:
        parts.append(facts([Fact("fits", RUNS_TO_ITS_END)]))
    return render(parts, width, color)


def cards_table(fits: CardFits, *, width: int = 100, color: bool = False) -> str:
    """The cards as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    fitting = fits.fitting
    with_plans = f", {sum(card.plan is not None for card in fitting)} of them with checkpoints" if fits.planned else ""
    least = min(fitting, key=lambda card: card.target.memory_bytes or 0, default=None)
    smallest = (
        "" if least is None else f"; the smallest is {least.target.name}, {format_bytes(least.target.memory_bytes)}"
    )
    what = "a step" if fits.step.generation is None else "a generation"
    head = [
        Fact("Model", printable(fits.model)),
        Fact("Inputs", printable(describe_inputs(fits.inputs))),
        Fact("Step", describe_step(fits.step)),
        Fact("Cards", printable(f"{len(fitting)} of {len(fits.cards)} fit{with_plans}{smallest}")),
        Fact(
            "Analysed",
            f"{fits.analyses} times, once for each compute capability: it decides the kernels and their workspaces",
        ),
        *([Fact("Time", f"of {what} by itself, estimated")] if any(card.time for card in fits.cards) else []),
        Fact(
            "Headroom", f"memory less reserved; not counted: {describe_uncounted([card.target for card in fits.cards])}"
        ),
    ]
    table = _ruled_table("Card", "Memory", "Allocated", "Reserved", "Headroom", "Time", "Fits")
    for card in fits.cards:
        verdict = describe_fit(card)
        table.add_row(
            printable(card.target.name),
            format_bytes(card.target.memory_bytes),
            format_bytes(card.requested_bytes if card.allocated_bytes is None else card.allocated_bytes),
            format_bytes(card.reserved_bytes),
            format_bytes(card.headroom_bytes),
            "unknown" if card.time is None else format_seconds(card.time.seconds),
            Text(verdict, style="bold red" if verdict == "no" else "green"),
        )
    parts: list[RenderableType] = [facts(head), table]
    if any(_is_tight_card(card) for card in fits.cards):
        parts.append(facts([Fact("tight", TIGHT)]))
    if any(card.plan is not None for card in fits.cards):
        most = max(card.plan.host_bytes for card in fits.cards if card.plan is not None)
        host = f" Up to {format_bytes(most)} wait in pinned memory of the host." if most else ""
        parts.append(label_content("Plans", _plans(fits)))
        parts.append(note(f"FLOPs: run again, as a share of the forward's. Time: estimated, of the whole step.{host}"))
    return render(parts, width, color)


def meshes_table(fits: MeshFits, *, width: int = 100, color: bool = False) -> str:
    """The meshes as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    fitting = sum(each.fits for each in fits.meshes)
    tried = f"{len(fits.meshes)} whole, {fits.analyses} analyses in all; {fits.ruled_out} more on the way ruled out"
    head = [
        Fact("Model", printable(fits.model)),
        Fact("Inputs", printable(describe_inputs(fits.inputs))),
        Fact("Step", describe_step(fits.step)),
        Fact("Cards", printable(f"{fits.cards} x {fits.target.name}, {format_bytes(fits.memory_bytes)} each")),
        Fact("Batch", f"{fits.batch} to an optimizer step, on all cards"),
        Fact("Meshes", f"{fitting} that fit; {tried}"),
    ]
    parts: list[RenderableType] = [facts(head), _mesh_rows(fits)]
    if any(_is_tight_mesh(each, fits) for each in fits.meshes):
        parts.append(facts([Fact("tight", TIGHT)]))
    parts.append(item_list("Assumed", [(f"{n}.", printable(each.text)) for n, each in enumerate(fits.assumptions, 1)]))
    return render(parts, width, color)


def _mesh_rows(fits: MeshFits) -> Table:
    with_host = any(each.host_bytes for each in fits.meshes)
    host = ["Host"] if with_host else []
    table = _ruled_table("Mesh", "Batches", "Allocated", "Reserved", *host, "Sends", "Links", "Fits")
    for each in fits.meshes:
        verdict = "no" if not each.fits else "tight" if _is_tight_mesh(each, fits) else "yes"
        table.add_row(
            printable(",".join(f"{name}={size}" for name, size in each.mesh.items())),
            f"{each.accumulate} x {each.micro_batch}",
            format_bytes(each.requested_bytes if each.allocated_bytes is None else each.allocated_bytes),
            format_bytes(each.reserved_bytes),
            *([format_bytes(each.host_bytes)] if with_host else []),
            format_bytes(each.moved_bytes),
            "unknown" if each.link_seconds is None else format_seconds(each.link_seconds),
            Text(verdict, style="bold red" if verdict == "no" else "green"),
        )
    return table


def _is_tight_mesh(each: MeshFit, fits: MeshFits) -> bool:
    return each.fits and (each.reserved_bytes or 0) > fits.memory_bytes


def _plans(fits: CardFits) -> Table:
    table = _ruled_table("Card", "Regions", "Applied by", "Allocated", "Headroom", "FLOPs", "Time")
    for card, plan in ((card, card.plan) for card in fits.cards if card.plan is not None):
        table.add_row(
            printable(card.target.name),
            str(sum(1 for _ in plan.all_regions())),
            plan.application.value,
            format_bytes(plan.after.counted_bytes),
            format_bytes(_plan_headroom(card)),
            "unknown" if plan.extra_fraction is None else f"{100 * plan.extra_fraction:+.1f} %",
            f"{100 * (plan.after_seconds / plan.before_seconds - 1):+.1f} %"
            if plan.before_seconds and plan.after_seconds
            else "unknown",
        )
    return table


def serving_table(size: ServeSize, *, width: int = 100, color: bool = False) -> str:
    """The terms and what is left, no line wider than `width` columns (at least 60)."""
    share = f"{100 * size.utilization:g} % of {format_bytes(size.memory_bytes)}"
    head = [
        Fact("Model", printable(size.model)),
        Fact("Engine", printable(f"{size.engine} {size.release}, on one {size.target.name}")),
        Fact("May use", f"{format_bytes(int(size.memory_bytes * size.utilization))}: {share}"),
        Fact("Weights", exact_bytes(size.weights_bytes)),
        Fact(
            "Profile run",
            f"{exact_bytes(size.profile_peak_bytes)} at its peak, in {size.profile_peak_at}: "
            f"{size.max_batched_tokens:,} tokens, then a sample for each of {size.max_seqs:,} sequences",
        ),
        *(
            Fact(
                "Uncounted",
                f"{each.name}: {format_bytes(each.low_bytes)} to {format_bytes(each.high_bytes)} ({each.source})",
            )
            for each in size.uncounted
        ),
    ]
    block = f"{size.block_size} tokens, {format_bytes(size.block_bytes)}"
    shared = f"; {size.groups} groups of layers share the blocks" if size.groups > 1 else ""
    low, high = format_bytes(max(size.kv_low_bytes, 0)), format_bytes(size.kv_high_bytes)
    found = [
        Fact("Left", f"{low} to {high} for keys and values")
        if size.high_blocks
        else Fact("Left", "nothing for keys and values: the engine does not start", tone="bad"),
        Fact("Blocks", f"{size.low_blocks:,} to {size.high_blocks:,} of {block}{shared}"),
        Fact(
            "Tokens",
            f"{size.low_tokens:,} to {size.high_tokens:,}; {format_bytes(size.token_bytes)} each in all layers",
        ),
        *(
            Fact("Sequences", f"{each.low:,.1f} to {each.high:,.1f} of {each.context:,} tokens at once")
            for each in size.sequences
        ),
    ]
    notes = [Fact("Assumed", printable(each.text)) for each in size.assumptions if each.topic == "engine"]
    return render([facts(head), facts(found), facts(notes)], width, color)


def describe_fit(card: CardFit) -> str:
    """Whether the step fits the card, in a word: by itself, with a plan, or `tight`."""
    if card.plan is not None:
        return "plan"
    return "no" if not card.fits else "yes" if card.headroom_bytes >= 0 else "tight"


def describe_step(step: Step) -> str:
    """What the step does, in a few words."""
    if step.generation is not None:
        return printable("; ".join([f"generate: {describe_generation(step.generation)}", *describe_autocast(step)]))
    optimizer = [f"optimizer: {step.optimizer or 'none'}"] if step.mode == "train" else []
    return printable("; ".join([step.mode, *optimizer, *describe_autocast(step), *describe_rank(step)]))


def _memory(curve: SizeCurve) -> str:
    where = printable(curve.target.name)
    owner = f"the budget on {where}" if curve.is_budget else f"all of {where}'s"
    return f"{exact_bytes(curve.memory_bytes)}, {owner}" + (
        f"; not counted: {describe_uncounted([curve.target])}" if curve.target.device == "cuda" else ""
    )


def _label(curve: SizeCurve) -> str:
    """What varies, in a word."""
    return curve.dim if curve.dim in ("batch", "seq", "context") else "size"


def _findings(curve: SizeCurve) -> list[Fact]:
    found: list[Fact] = []
    dim = _label(curve)
    if curve.largest is None:
        found.append(
            Fact("Largest", f"none: {dim} {curve.points[0].size}, the smallest tried, does not fit", tone="bad")
        )
    else:
        found.append(Fact("Largest", f"{dim} {curve.largest}", tone="best"))
    above = curve.next_above
    if above is not None and curve.largest is None:
        found.append(Fact("Why", printable(above.obstacle)))
    elif above is not None:
        found.append(Fact("Next", printable(f"{dim} {above.size} does not fit. {above.obstacle}")))
    elif curve.largest == curve.limit:
        found.append(Fact("Next", f"not tried: {curve.limit} is the limit of the search"))
    if curve.per_sample_bytes is not None and curve.constant_bytes is not None:
        sign, one_more = (
            "-" if curve.constant_bytes < 0 else "+",
            {"batch": "sample", "seq": "position", "context": "token"}.get(curve.dim, "1 of size"),
        )
        near = "" if curve.largest is None else " near the largest"
        line = (
            f"{format_bytes(curve.per_sample_bytes)} per {one_more} {sign} "
            f"{format_bytes(abs(curve.constant_bytes))} constant"
        )
        found.append(
            Fact(
                "Line",
                f"{line}, of {_counted_name(curve)} bytes; off by {format_bytes(curve.line_error_bytes)} at most{near}",
            )
        )
    if curve.best_per_second is not None and curve.enough is not None:
        best = f"at most {_per_second(curve.best_per_second)} per second, estimated"
        enough = f"of the sizes below, {dim} {curve.enough} is the smallest that reaches {100 * NEAR_BEST:.0f} % of it"
        found.append(Fact("Throughput", f"{best}; {enough}"))
    found.append(Fact("Analysed", _proof(curve)))
    found += [Fact("Note", printable(assumption.text)) for assumption in curve.assumptions]
    return found


def _proof(curve: SizeCurve) -> str:
    found = f"{len(curve.points)} sizes"
    if curve.monotone is not None:
        found += (
            "; among these the peak never falls as the size grows"
            if curve.monotone
            else "; among these a larger one has a lower peak than a smaller one"
        )
    above, last = curve.next_above, curve.last_possible
    if above is None or above.allocated_bytes is None or last is None or last <= above.size:
        return found
    return f"{found}. Up to {last} others may fit, by how the allocator's pieces fall"


def _points(curve: SizeCurve, width: int) -> Table:
    on_card = any(point.allocated_bytes is not None for point in curve.points)
    is_timed = curve.best_per_second is not None
    is_counted = any(point.alloc_retries is not None for point in curve.points)
    table = _ruled_table(
        "Size",
        *(["Allocated", "Reserved"] if on_card else ["Requested"]),
        "Share",
        *(["Per second"] if is_timed else []),
        *(["Retries"] if is_counted else []),
        "Fits",
        "",
    )
    top = max([curve.memory_bytes, *(point.counted_bytes or 0 for point in curve.points)])
    bar = max(min(_BAR, width - (54 if on_card else 42) - 11 * is_timed - 8 * is_counted), 8)
    for point in curve.points:
        counted = point.counted_bytes
        sizes = [format_bytes(counted)] + ([format_bytes(point.reserved_bytes)] if on_card else [])
        table.add_row(
            str(point.size),
            *(sizes if counted is not None else ["cannot run", ""][: len(sizes)]),
            "" if counted is None else percent(counted, curve.memory_bytes),
            *(["" if point.per_second is None else _per_second(point.per_second)] if is_timed else []),
            *([_retries(point)] if is_counted else []),
            Text(_verdict(point, curve.memory_bytes), style="green" if point.fits else "red"),
            "" if counted is None else _bar(counted, curve.memory_bytes, top, bar),
        )
    return table


def _bar(nbytes: int, memory: int, top: int, width: int) -> str:
    """A bar with a mark where the memory ends."""
    filled, end = round(nbytes * width / top), round(memory * width / top)
    return f"{'#' * min(filled, end)}{' ' * (end - filled)}|{'#' * (filled - end)}"


def _retries(point: SizePoint) -> str:
    return "" if point.alloc_retries is None or not point.fits else str(point.alloc_retries)


def _per_second(rate: float) -> str:
    """Three digits of it: more are not known."""
    return f"{float(f'{rate:.3g}'):,.10g}"


def _verdict(point: SizePoint, memory: int) -> str:
    return "no" if not point.fits else "tight" if _is_tight(point, memory) else "yes"


def _is_tight(point: SizePoint, memory: int) -> bool:
    return point.fits and (point.reserved_bytes or 0) > memory


def _is_tight_card(card: CardFit) -> bool:
    return (card.fits and card.headroom_bytes < 0) or (card.plan is not None and _plan_headroom(card) < 0)


def _plan_headroom(card: CardFit) -> int:
    if card.plan is None:
        return card.headroom_bytes
    peak = card.plan.after
    return (card.target.memory_bytes or 0) - (
        peak.requested_bytes if peak.reserved_bytes is None else peak.reserved_bytes
    )


def _counted_name(curve: SizeCurve) -> str:
    return "allocated" if any(point.allocated_bytes is not None for point in curve.points) else "requested"


def _ruled_table(*headings: str) -> Table:
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("Card", "Mesh", "Fits", "") else "right", no_wrap=True)
    return table
