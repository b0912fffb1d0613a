"""An engine's room, as text."""

from __future__ import annotations

from fxmem.records.sizes import ServeSize
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.sections import Fact, Section
from fxmem.show.text.tables import render_sections


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
