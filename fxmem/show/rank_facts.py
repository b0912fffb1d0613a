"""A rank's place, the classes of ranks and what each group sends, in words."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.hardware.links import bytes_per_second
from fxmem.records.parts import Collective, RankClass, RankedStep, RankGroup
from fxmem.records.profile import Headed
from fxmem.records.units import format_bytes, printable
from fxmem.show.facts import Facts, describe_counts
from fxmem.show.sections import Fact


def rank_facts(about: Headed) -> Facts:
    """The rank's place, and a line for each group that it communicates in; none for one card alone."""
    ranks = about.step.ranks
    if ranks is None:
        return []
    facts = [Fact("Rank", f"{ranks.rank} of {ranks.world}, in a world that is not there")]
    for each in ranks.classes:
        facts.append(Fact(_label_class(each), _describe_class(each, ranks)))
    for index, group in enumerate(ranks.groups):
        moved = [each for each in ranks.collectives if each.group == index]
        what = f"{_describe_group(group)}: {_describe_moves(about, group, moved)}"
        facts.append(Fact("" if index else "Sends", what))
    if ranks.host_bytes:
        facts.append(
            Fact("Host", f"{format_bytes(ranks.host_bytes)} a rank: parameters, gradients and optimizer state")
        )
    return facts


def _label_class(ranks: RankClass) -> str:
    return f"Rank {ranks.first}" if ranks.size == 1 else f"Ranks {ranks.first}-{ranks.last}"


def _describe_class(members: RankClass, ranks: RankedStep) -> str:
    """What the ranks of a class take, and what shows that they are equal."""
    parts = [describe_counts(members)]
    if members.fits is False:
        parts.append("does not fit")
    if members.size > 1:
        spread = f"{members.size} of them, " if members.size <= members.last - members.first else ""
        parts.append(f"{spread}{_join([members.first, *members.compared])} compared")
    mark = "; the table is of this one" if members.first == ranks.rank and len(ranks.classes) > 1 else ""
    return ", ".join(parts) + mark


def _join(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _describe_group(group: RankGroup) -> str:
    return "all ranks" if group.name == "all ranks" else printable(f"{group.name} of {group.size}")


def _describe_moves(about: Headed, group: RankGroup, moved: list[Collective]) -> str:
    nbytes = sum(each.moved_bytes for each in moved)
    kinds = ", ".join(f"{each.count} {each.kind}" for each in moved)
    rate = bytes_per_second(about.target, group)
    time = "" if rate is None else f", {1e3 * nbytes / rate:.3g} ms at {rate / 1e9:.0f} GB/s"
    return f"{format_bytes(nbytes)} a step in {kinds}{time}"
