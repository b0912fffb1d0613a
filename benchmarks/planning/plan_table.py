"""The rows of `plans.py`: what was measured, what others have published, who wins at the same peak, and the report for
people. Needs no torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = [
    "CARD",
    "MEASURED",
    "OURS",
    "PUBLISHED",
    "Published",
    "Row",
    "answer_to",
    "challenged",
    "markdown",
    "verdict",
]

OURS = "fxmem"
CARD = "v100"
"""What published figures are predicted and times estimated for; of the years of the papers."""
MEASURED = ("peak_bytes", "extra_flops", "extra_products", "slowdown", "estimated_slowdown")
"""Of a row, what is the same for all that come to the same plan."""
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender at one setting on one model, measured."""

    model: str
    contender: str
    """`none` for the step without checkpoints, whose `extra_*` are the FLOPs of its forward."""
    setting: str
    peak_bytes: int | None = None
    extra_flops: int | None = None
    extra_products: int | None = None
    """Of products, convolutions and attention alone, by torch's formulas."""
    slowdown: float | None = None
    """CPU time of a step over that of one without checkpoints."""
    estimated_slowdown: float | None = None
    """The same by fxmem's estimate for `CARD`; of our plans only."""
    budget_bytes: int | None = None
    """What fxmem was asked for."""
    promised_bytes: int | None = None
    """The peak that fxmem's analysis of the planned step says."""
    plan: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from all others."""
        return self.model, self.contender, self.setting

    @property
    def cost(self) -> float | None:
        """By what settings of one contender are compared: FLOPs, or time where they are not counted."""
        return self.slowdown if self.extra_flops is None else self.extra_flops


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure that others have published; not measured here."""

    model: str
    batch: int
    share: float
    """Of the memory without checkpoints; 0 where it is a range."""
    overhead: str
    source: str
    spec: str = ""
    """What fxmem analyses beside it; empty for a family of models."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the model, where they are not its own."""

    @property
    def key(self) -> str:
        """The model, its batch and what is left."""
        return f"{self.model}, {self.batch}, {self.share:.1%}"


MONET: Final[dict[str, tuple[int, float, tuple[tuple[float, float], ...]]]] = {
    "resnet50": (184, 15.06, ((10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.00, 9.31), (4.99, 11.95))),
    "googlenet": (320, 14.93, ((9.98, 7.13), (8.99, 7.87), (8.01, 8.44), (7.02, 9.71), (6.01, 12.14), (4.99, 15.77))),
    "mobilenet_v2": (272, 14.46, ((10.02, 2.4), (9.01, 3.1), (8.02, 4.77), (7.01, 5.53), (6.01, 7.55), (5.01, 8.72))),
    "vgg16": (176, 14.12, ((9.71, -5.3), (8.66, -4.64), (7.88, -2.18), (6.82, 1.99), (5.90, 5.44), (5.51, 9.11))),
}
"""By model: batch, GB without, and GB with and per cent of time more, of the README of utsaslab/MONeT (7962043). Its
plans take other kernels, too, so that some are quicker than none. U-Net is left out: the size of its images is not
told."""


def _by_monet() -> Iterator[Published]:
    for model, (batch, whole, points) in MONET.items():
        settings = (("aux_logits", False),) if model == "googlenet" else ()
        for left, longer in points:
            source = f"Shah et al. (MONeT), ICLR 2021: {whole:.2f} to {left:.2f} GB, other operators too"
            yield Published(
                model, batch, left / whole, f"{longer:+.1f} % time", source, f"torchvision:{model}", settings
            )


PUBLISHED = (
    Published(
        "ResNet-50", 64, 1973 / 5323, "+31 % time", "Feng & Huang, CVPR 2021: 5323 to 1973 MB", "torchvision:resnet50"
    ),
    Published(
        "ResNet-152", 16, 526 / 2767, "+37 % time", "Feng & Huang, CVPR 2021: 2767 to 526 MB", "torchvision:resnet152"
    ),
    *_by_monet(),
    Published("1,000-layer ResNet", 0, 7 / 48, "+30 % time", "Chen et al. 2016, arXiv:1604.06174: 48 to 7 GB"),
    Published(
        "several networks",
        0,
        0.0,
        "+10 to 20 % time",
        "Zhao et al. (Rockmate), ICML 2023: 2 to 5 times less activation memory",
    ),
    Published("several networks", 0, 0.0, "+10 to 15 % time", "HiRemate, ICML 2025: 50 to 70 % less"),
)


# --- judging ----------------------------------------------------------------------------------------------------------


def challenged(rows: Iterable[Row], unplanned: int) -> list[Row]:
    """Of each contender, the settings that free something and that none of its others beats in both; the largest peak
    first."""
    found = []
    families: dict[str, list[Row]] = {}
    for row in rows:
        if row.peak_bytes is not None and row.cost is not None and row.peak_bytes < unplanned:
            families.setdefault(row.contender, []).append(row)
    for family in families.values():
        least: float | None = None
        for row in sorted(family, key=lambda row: (row.peak_bytes, row.cost)):
            if least is None or (row.cost or 0) < least:
                found.append(row)
                least = row.cost
    return sorted(found, key=lambda row: -(row.peak_bytes or 0))


def answer_to(rival: Row) -> str:
    """The setting of ours that answers a rival's."""
    return f"within the peak of {rival.contender}, {rival.setting}"


def _more(ours: int, theirs: int) -> bool:
    """Whether ours is more by over a thousandth. Less counts as the same: a checkpointed region keeps a copy of the
    CPU's random state, 5,056 bytes."""
    return (ours - theirs) * 1000 > max(theirs, 0)


def verdict(rival: Row, ours: Row | None) -> str:
    """What comes of holding ours, asked for the rival's peak, against the rival."""
    if ours is None:
        return ""
    if ours.failed:
        return "LOST: out of our reach"
    if rival.extra_flops is None and rival.slowdown and ours.slowdown:
        return "LOST: quicker than ours" if rival.slowdown < ours.slowdown else "won"
    (peak, extra), (our_peak, our_extra) = _measured(rival), _measured(ours)
    if _more(our_peak, peak):
        return f"LOST: our peak is {our_peak / peak - 1:.1%} more"
    if _more(our_extra, extra):
        return "LOST: ours computes more"
    return "won" if our_extra < extra or _more(peak, our_peak) else "same"


def _measured(row: Row) -> tuple[int, int]:
    if row.peak_bytes is None or row.extra_flops is None:
        raise ValueError(f"{row.key} has neither failed nor been measured")
    return row.peak_bytes, row.extra_flops


def _duels(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    answers = {(row.model, row.setting): row for row in rows if row.contender == OURS}
    pairs = ((row, answers.get((row.model, answer_to(row)))) for row in rows if row.contender not in (OURS, "none"))
    return [(rival, ours) for rival, ours in pairs if ours is not None]


# --- the report -------------------------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Any]) -> str:
    """The report for people."""
    rows = [Row(**row) for row in found["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    names = list(dict.fromkeys(row.model for row in rows))
    missing = [name for name in found["cases"] if name not in names]
    lines = [
        f"# Checkpoint plans, {found['date']}",
        "",
        f"`make plans`; {versions}, Python {found['python']}, {found['machine']}. Training steps without an "
        f"optimizer, run for real on the CPU; inputs small "
        "enough for that. Peak: bytes alive by the profiler's memory events, parameters and gradients included, the "
        "scratch of convolution and "
        "attention kernels set aside, as a share of the step's without checkpoints. Extra: FLOPs run again over the "
        "forward's, counted in a "
        "separate run with fxmem's formulas (every op); in brackets products, convolutions and attention alone, by "
        "torch's. A peak or a cost "
        "within a thousandth counts as the same. Time: CPU time of a step over that of one without checkpoints, on one "
        "thread of a machine that does other things, too, the least of four taken in turns; it decides nothing here. "
        f"Estimated: the same by fxmem's estimate for {CARD} at these small inputs, where Python's part weighs more.",
        "",
        "Each contender has several settings; those that no other of its settings beats in both are answered: fxmem "
        "is asked for a plan within that "
        "measured peak. `torch.compile`: the min-cut partitioner of AOTAutograd; its graphs run op by op with "
        "everybody's kernels, no fusion; its budget "
        "bounds what is saved, not the peak. `torch.compile, inductor`: the compiled step itself, fused; its "
        "FLOPs are not counted, its time decides. SAC ILP: `torch.distributed._tools.sac_ilp`. sqrt(N) and the greedy "
        "search: fxmem's own, over cuts anywhere.",
        "",
        *_standing(rows, names),
        "",
        *([found["note"], ""] if "note" in found else []),
        *([f"Not run yet: {', '.join(found['cases'][name] for name in missing)}.", ""] if missing else []),
    ]
    for name in names:
        lines += [f"## {found['cases'][name]}", "", *_table([row for row in rows if row.model == name]), ""]
    return "\n".join([*lines, *_published(found.get("published", {}))])


def _standing(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    duels = [(rival, ours, verdict(rival, ours)) for rival, ours in _duels(rows)]
    lost = [duel for duel in duels if duel[2].startswith("LOST")]
    if not rows:
        return ["Published figures alone."]
    lines = [f"**Of {len(duels)} comparisons at the same peak, over {len(names)} models, fxmem loses {len(lost)}.**"]
    if duels:
        lines += [
            "",
            "| contender | comparisons | fxmem cheaper | same | fxmem loses | time over ours | quicker than ours |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for contender in dict.fromkeys(rival.contender for rival, _, _ in duels):
            said = [word for rival, _, word in duels if rival.contender == contender]
            counts = [
                len(said),
                said.count("won"),
                said.count("same"),
                len(said) - said.count("won") - said.count("same"),
            ]
            ratios = [
                rival.slowdown / ours.slowdown
                for rival, ours, _ in duels
                if rival.contender == contender and rival.slowdown and ours.slowdown
            ]
            times = (
                [f"{statistics.median(ratios):.2f}", str(sum(ratio < 1 for ratio in ratios))] if ratios else ["", ""]
            )
            lines.append(f"| {' | '.join([contender, *map(str, counts), *times])} |")
    if lost:
        lines += [
            "",
            "Where it loses:",
            "",
            "| model | to | peak, MiB | its extra | ours | |",
            "|---|---|---:|---:|---:|---|",
        ]
        forward = {row.model: row.extra_flops for row in rows if row.contender == "none"}
        for rival, ours, said_of_it in lost:
            cells = [rival.model, f"{rival.contender}, {rival.setting}", f"{(rival.peak_bytes or 0) / MIB:,.1f}"]
            cells += [_share(each.extra_flops, forward[rival.model]) for each in (rival, ours)]
            lines.append(f"| {' | '.join([*cells, said_of_it])} |")
    return lines


def _share(part: int | None, whole: int | None) -> str:
    return "" if part is None or not whole else f"{part / whole:+.2%}"


def _over(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.1%}"


def _table(rows: Sequence[Row]) -> list[str]:
    none = next(row for row in rows if row.contender == "none")
    whole, forward, products = none.peak_bytes, none.extra_flops, none.extra_products
    answers = {rival.key: ours for rival, ours in _duels(rows)}

    def cells(row: Row) -> list[str]:
        if row.failed:
            return ["out of reach" if row.failed.startswith("ExceededError") else "cannot be done", "", ""]
        return [
            f"{(row.peak_bytes or 0) / (whole or 1):.1%}",
            ""
            if row.extra_flops is None
            else f"{_share(row.extra_flops, forward)} ({_share(row.extra_products, products)})",
            _over(row.slowdown),
        ]

    lines = [
        f"Without checkpoints {(whole or 0) / MIB:,.1f} MiB; the forward is {(forward or 0) / 1e9:,.2f} GFLOP.",
        "",
    ]
    lines += [
        "| contender | setting | peak | extra | time | ours: peak | extra | time | estimated | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    rivals = [row for row in rows if row.contender not in ("none", OURS)]
    for row in rivals:
        if not row.failed:
            answer = answers.get(row.key)
            beside = [""] * 4 if answer is None else [*cells(answer), _over(answer.estimated_slowdown)]
            lines.append(f"| {' | '.join([row.contender, row.setting, *cells(row), *beside, verdict(row, answer)])} |")
    if failed := [row for row in rivals if row.failed]:
        lines += [
            "",
            "No result: " + "; ".join(f"{row.contender}, {row.setting} ({row.failed})" for row in failed) + ".",
        ]
    own = [row for row in rows if row.contender == OURS and not row.setting.startswith("within")]
    if own:
        lines += [
            "",
            "| fxmem, asked for | promised | peak | extra | time | estimated | plan |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        for row in own:
            promised = "" if row.promised_bytes is None else f"{row.promised_bytes / (whole or 1):.1%}"
            why = "" if row.failed.startswith("ExceededError") else row.failed
            more = [promised, *cells(row), _over(row.estimated_slowdown), row.plan or why]
            lines.append(f"| {' | '.join([row.setting, *more])} |")
    return lines


def _published(ours: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Published figures",
        "",
        "As published, on other machines and with other things counted; **not measured here**. Beside them, "
        "**predicted**: the cheapest plan of fxmem that "
        "keeps the same share of its own unplanned peak, at that batch and 224 pixels: an analysis for "
        f"{CARD}, without an optimizer; extra FLOPs of the forward, and the estimated time of the step.",
        "",
        "| model | batch | memory left | overhead | source | fxmem: memory left | extra FLOPs | step time |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in PUBLISHED:
        answer = ours.get(row.key, {})
        if answer.get("failed"):
            beside = ["out of reach", "", ""]
        else:
            longer = answer.get("time_fraction")
            beside = (
                [
                    f"{answer['peak_bytes'] / answer['unplanned_bytes']:.1%}",
                    f"{answer['extra_fraction']:+.1%}",
                    "" if longer is None else f"{longer:+.1%}",
                ]
                if answer
                else ["", "", ""]
            )
        cells = [
            row.model,
            str(row.batch or ""),
            f"{row.share:.1%}" if row.share else "",
            row.overhead,
            row.source,
            *beside,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
