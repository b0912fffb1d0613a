"""Parameters on the card that no operation of the step reads, of a model that runs otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxmem.memory.findings import Finding, is_cut_short
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each model with such parameters; ranks, whose shards are gathered before they are read, have none.

    A gradient or an optimizer's state says that another step reads them, and what follows the loop may do so.
    """
    program = profile.step.program
    calls_later = program is not None and any(each.calls and not each.ran for each in program.schedules)
    if profile.step.ranks is not None or is_cut_short(profile, timeline) or calls_later:
        return
    used = {each.name for each in profile.storages if each.kind in (Kind.GRADIENT, Kind.OPTIMIZER_STATE)}
    used = {each.rpartition(".")[0] for each in used}
    unread, running = defaultdict[str, list[int]](list), set[str]()
    for index, each in enumerate(profile.storages):
        if each.kind is Kind.PARAMETER and each.birth == 0:
            root = each.name.partition(".")[0] if profile.step.program else ""
            if each.node is None and each.name not in used:
                unread[root].append(index)
            elif each.node is not None:
                running.add(root)
    for root in running & unread.keys():
        largest = max(unread[root], key=lambda index: profile.storages[index].nbytes)
        more = len(unread[root]) - 1
        yield Finding(
            cause="unused-parameters",
            text=f"{profile.storages[largest].name}{f' and {more} more' if more else ''} is on the card, and no "
            "operation of the step reads it",
            nbytes=sum(profile.storages[index].nbytes for index in unread[root]),
            change="del of what is not used, or leave it on the host",
            saved_bytes=save_bytes(profile, dict.fromkeys(unread[root], 0)),
        )
