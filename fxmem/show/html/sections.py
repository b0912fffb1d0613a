"""The parts of a page that are words and figures: the summary, a plan, what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxmem.memory import facts as findings
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Kind, Peak, Profile, Timeline
from fxmem.records.units import exact_bytes, format_bytes, format_flops, percent, to_words
from fxmem.show.html.tables import place, safe, swatch
from fxmem.show.plots.plan_curve import CurveDot, curve_svg

__all__ = ["facts_table", "listed", "plan_part", "summary"]


def summary(profile: Profile, timeline: Timeline) -> str:
    """The four numbers, the card, and where the peak is."""
    peak = timeline.peak
    fitting, sentence = findings.fits(profile, peak)
    answer, mark, counted = sentence.partition(" Counted: ")
    verdict = {True: " yes", False: " no", None: ""}[fitting]
    facts = [fact for fact in findings.peak_facts(profile, peak) if fact[0] in ("Where", "")]
    return (
        f'<dl class="numbers">{"".join(_numbers(profile, peak))}</dl>'
        f'<p><strong class="verdict{verdict}">{safe(answer[:1].upper() + answer[1:])}</strong>'
        f"{safe(mark + counted)}.</p>{_meter(profile, peak, fitting)}"
        f"{facts_table([*facts, *findings.total_facts(profile)])}"
        f"<h3>What the peak is made of</h3>{_split(peak)}"
    )


def _numbers(profile: Profile, peak: Peak) -> Iterator[str]:
    on_cpu = profile.target.device == "cpu"
    absent = "only a card has an allocator of this kind" if on_cpu else "not modelled"
    process = (
        "what the process holds beside the step is not predicted"
        if on_cpu
        else "reserved and the CUDA context, whose size is not predicted"
    )
    for label, nbytes, meaning, call, missing in (
        ("Requested", peak.requested_bytes, "what the program asks for and holds at once", "", ""),
        ("Allocated", peak.allocated_bytes, "in the allocator's blocks", "torch.cuda.max_memory_allocated", absent),
        ("Reserved", peak.reserved_bytes, "held by the allocator", "torch.cuda.max_memory_reserved", absent),
        ("Process", peak.process_bytes, "with the CUDA context", "nvidia-smi", process),
    ):
        figure = "unknown" if nbytes is None else format_bytes(nbytes)
        exact = "" if nbytes is None else f"<dd>{nbytes:,} bytes</dd>"
        code = "" if nbytes is None or not call else f"<code>{call}</code>"
        yield (
            f'<div><dt>{label}</dt><dd class="big">{figure}</dd>{exact}<dd '
            f'class="muted">{safe(missing if nbytes is None else meaning)}{code}</dd></div>'
        )


def _meter(profile: Profile, peak: Peak, fitting: bool | None) -> str:
    """How much of the card is taken; the sentence above says the same."""
    memory = profile.target.memory_bytes
    taken = peak.reserved_bytes or peak.requested_bytes
    if not memory:
        return ""
    classes = "meter no" if fitting is False else "meter"
    return (
        f'<div class="{classes}" aria-hidden="true"><span '
        f'style="width:{min(100 * taken / memory, 100):.2f}%"></span></div>'
    )


def _split(peak: Peak) -> str:
    rows = "".join(
        (
            f'<tr><th scope="row">{swatch(share.kind)}{safe(share.name)}</th>{_figure(share.nbytes)}<td '
            f'class="r">{safe(share.percent)}</td></tr>'
        )
        for share in findings.split(peak)
    )
    head = (
        '<thead><tr><th scope="col">Kind</th><th scope="col" class="r">Bytes</th><th scope="col" '
        'class="r">Share</th></tr></thead>'
    )
    return f'<div class="scroll" style="max-width:32rem"><table class="data">{head}<tbody>{rows}</tbody></table></div>'


def facts_table(facts: Iterable[tuple[str, str]]) -> str:
    """Labels and what they label."""
    rows = "".join(f'<tr><th scope="row">{safe(label)}</th><td>{safe(text)}</td></tr>' for label, text in facts)
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def listed(texts: Iterable[str]) -> str:
    """An ordered list of sentences."""
    return f"<ol>{''.join(f'<li>{safe(text)}</li>' for text in texts)}</ol>"


# --- a plan -----------------------------------------------------------------------------------------------------------


def plan_part(timeline: Timeline, after: Timeline | None, plan: Plan | None) -> str:
    """Before and after, what is checkpointed, and the other plans there were."""
    now = plan.after if plan is not None else after.peak if after is not None else None
    parts = [] if now is None else [_before_after(timeline.peak, now)]
    if plan is not None:
        parts += [facts_table(_plan_facts(plan)), _regions(plan), _curve(plan)]
    return "".join(parts)


def _before_after(before: Peak, after: Peak) -> str:
    lines = [
        ("Requested", before.requested_bytes, after.requested_bytes),
        ("Allocated", before.allocated_bytes, after.allocated_bytes),
        ("Reserved", before.reserved_bytes, after.reserved_bytes),
        *(
            (to_words(kind), before.by_kind.get(kind, 0), after.by_kind.get(kind, 0))
            for kind in Kind
            if kind in {*before.by_kind, *after.by_kind}
        ),
    ]
    rows = "".join(
        (
            f'<tr><th scope="row">{safe(name)}</th>{_figure(old)}{_figure(new)}<td '
            f'class="r">{safe(_change(old, new))}</td></tr>'
        )
        for name, old, new in lines
    )
    heads = "".join(f'<th scope="col" class="r">{word}</th>' for word in ("Before", "After", "Change"))
    return (
        '<div class="scroll" style="max-width:44rem" tabindex="0" role="region" aria-labelledby="plan">'
        '<table class="data" aria-label="The peak before and after the plan">'
        f'<thead><tr><th scope="col">At the peak</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _figure(nbytes: int | None) -> str:
    return f'<td class="r">{format_bytes(nbytes)}</td>'


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return ""
    sign = "-" if new < old else "+" if new > old else ""
    share = f" ({sign}{percent(abs(new - old), old)})" if old and new != old else ""
    return f"{sign}{format_bytes(abs(new - old))}{share}"


def _plan_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    regions = list(plan.all_regions())
    asked = "" if plan.strategy == plan.chosen else f" (asked for: {plan.strategy})"
    where = {"modules": "modules", "graph": "the graph", "operators": "single operators"}[plan.application]
    yield "Strategy", f"{plan.chosen}{asked}, carried out on {where}"
    yield "Budget", "none" if plan.budget_bytes is None else exact_bytes(plan.budget_bytes)
    results = sum(len(region.remakes) for region in regions)
    done = (
        f"{results} results made again, in {len(regions)} parts of the model"
        if results
        else f"{len(regions)} checkpointed"
    )
    yield "Regions", done if regions else "none: the step stays as it is"
    fraction = plan.extra_fraction
    share = "" if fraction is None else f", {100 * fraction:.1f} % of the forward's"
    yield "Run again", f"{format_flops(plan.extra_flops)} FLOPs{share}"
    yield "After", "analysed with the plan applied" if plan.analysed else "the planner's estimate, not an analysis"


def _regions(plan: Plan) -> str:
    remade = any(region.remakes for region in plan.regions)
    selective = remade or any(region.keeps for region in plan.regions)
    rows = "".join(
        f'<tr><th scope="row">{safe(region.title)}</th><td '
        f'class="r">{region.last_node - region.first_node:,}</td>{_figure(region.freed_bytes)}'
        f'<td class="r">{format_flops(region.extra_flops)}</td>{_keeps(region) if selective else ""}<td '
        f'class="s">{safe(place(region.source))}</td></tr>'
        for region in plan.all_regions()
    )
    if not rows:
        return ""
    right = ' class="r"'
    words = [
        ("Region", ""),
        ("Nodes", right),
        ("Frees", right),
        ("FLOPs again", right),
        *([("Results made again" if remade else "Keeps results", right)] if selective else []),
        ("Source", ""),
    ]
    heads = "".join(f'<th scope="col"{kind}>{word}</th>' for word, kind in words)
    table = (
        f'<table class="data" aria-label="Checkpointed '
        f'regions"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )
    return (
        f'<h3 id="regions">Checkpointed regions</h3><div class="scroll nodes" tabindex="0" role="region" '
        f'aria-labelledby="regions">{table}</div>'
    )


def _keeps(region: Region) -> str:
    return f'<td class="r">{len(region.remakes or region.keeps) or ""}</td>'


def _curve(plan: Plan) -> str:
    if not plan.curve:
        return ""

    def extra(flops: int | None) -> float | None:
        return None if flops is None or not plan.forward_flops else flops / plan.forward_flops

    dots = [CurveDot(0.0, plan.before.counted_bytes, "no plan", chosen=not plan.regions)]
    for point in plan.curve:
        if not point.regions:
            continue
        count = sum(1 for _ in point.regions)
        label = f"{point.strategy}, {count} region{'s' if count != 1 else ''}"
        dots.append(
            CurveDot(extra(point.extra_flops), point.peak.counted_bytes, label, chosen=point.regions == plan.regions)
        )
    measure = "requested bytes" if plan.before.allocated_bytes is None else "allocated bytes"
    views = "".join(
        (
            f'<div class="{size}">'
            f"""{
                curve_svg(
                    dots, budget_bytes=plan.budget_bytes, measure=measure, width=width, name=f"fxmem-curve-{size}"
                )
            }</div>"""
        )
        for size, width in (("wide", 1100.0), ("narrow", 366.0))
    )
    return f"<h3>Other plans</h3><figure>{views}</figure>"
