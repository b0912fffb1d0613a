"""What the change of a finding is worth, tried on the record: the same step, with storages that live otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxmem.memory import liveness
from fxmem.records.profile import Profile


def save_bytes(profile: Profile, ends: Mapping[int, int], *, later: Iterable[int] = (), begin: int = 0) -> int:
    """How much lower the peak of requested bytes is where some storages end earlier, and others begin later.

    Args:
        profile: the step.
        ends: by index of a storage, the tick at which it is no longer needed; one of its birth or before: it is never
            there.
        later: indices of storages that are there only from the tick `begin` on.
        begin: that tick.
    """
    storages = [*profile.storages]
    for index, end in ends.items():
        each = storages[index]
        storages[index] = each.model_copy(update={"death": max(min(each.death, end), each.birth)})
    for index in later:
        storages[index] = storages[index].model_copy(update={"birth": max(storages[index].birth, begin)})
    changed = profile.model_copy(update={"storages": tuple(storages)})
    return max(liveness.live_bytes(profile), default=0) - max(liveness.live_bytes(changed), default=0)
