"""When the results of a forward are used for the last time, and the step in which they are freed then."""

from __future__ import annotations

from fxmem.memory.user_code import find_place
from fxmem.records.profile import Kind, Phase, Profile, Storage


def find_idle(profile: Profile, *ticks: int) -> dict[int, int]:
    """Results of a forward that are alive at one of these ticks and that nothing needs any more then: by storage, the
    largest of each tick first, the tick at which the last call that reads it has run."""
    ends, storages = _last_use(profile), profile.storages
    found: dict[int, int] = {}
    for tick in ticks:
        idle = [each for each in ends if ends[each] < tick and storages[each].birth <= tick < storages[each].death]
        found.update((each, ends[each]) for each in sorted(idle, key=lambda each: -storages[each].nbytes))
    return found


def _last_use(profile: Profile) -> dict[int, int]:
    """For each storage made in forward that nothing keeps for backward or reads after it: the tick at which the last
    call that reads it has run."""
    ends: dict[int, int] = {}
    for op in profile.ops:
        if op.phase is Phase.FORWARD:
            ends[op.node] = max(op.end, ends.get(op.node, 0))
    saved = {storage for node in profile.nodes for storage in node.saved}
    # What one step's line makes may be read in the next step, as by a metric after the optimizer.
    read = {each.made_at for each in profile.storages if each.is_read and each.made_at}
    made = {
        index: ends[storage.node]
        for index, storage in enumerate(profile.storages)
        if storage.kind in (Kind.TEMPORARY, Kind.OUTPUT) and index not in saved and storage.op is not None
        if not storage.is_read and not (read and find_place(profile, storage.node) in read)
        if profile.ops[storage.op].phase is Phase.FORWARD
        and storage.node is not None
        and profile.nodes[storage.node].op not in ("loss", "optimizer")
    }
    for index, node in enumerate(profile.nodes):
        for source in node.inputs:
            for output in profile.nodes[source].outputs:
                if output.storage in made:
                    made[output.storage] = max(made[output.storage], ends.get(index, 0))
    return made


def free_after_last_use(profile: Profile, names: frozenset[str]) -> Profile:
    """The profile with these nodes' results freed after their last use."""
    if not names:
        return profile
    ends = _last_use(profile)

    def free_early(index: int, storage: Storage) -> Storage:
        node = storage.node
        if index not in ends or node is None or profile.nodes[node].name not in names:
            return storage
        return storage.model_copy(update={"death": min(storage.death, max(ends[index], storage.birth + 1))})

    return profile.model_copy(
        update={"storages": tuple(free_early(index, storage) for index, storage in enumerate(profile.storages))}
    )
