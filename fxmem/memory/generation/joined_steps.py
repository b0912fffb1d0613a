"""A generation whose decode steps change at some token: a recording of the change, joined on to what comes before.

The change is recorded after a longer prompt. Its first steps must be what arithmetic makes of the steps before; from
there on its own operators, nodes and storages follow those of the first recording.
"""

from __future__ import annotations

from dataclasses import replace

from fxmem.errors import AnalysisError
from fxmem.memory.generation.decode_steps import DecodeSteps, Extension, Insertion
from fxmem.records.profile import Node, Op, Profile, Storage

JOINT = 3
"""The step of a recorded change with which it is joined on. It and the one before it must be as the steps before."""


def join_steps(before: Extension, change: DecodeSteps, token: int) -> tuple[DecodeSteps, tuple[Insertion, ...]]:
    """Join a recorded change on to a generation.

    Args:
        before: the generation up to the change.
        change: recorded after a prompt that is longer by `token` tokens.
        token: how many.

    Returns:
        The joined recording, and what is put into it before the change.

    Raises:
        AnalysisError: the two differ where they meet.
    """
    last = before.insertions[-1]
    reached = before.token(last)
    for step in (JOINT - 1, JOINT):
        before.check_step(change, step, token + step - reached)
    steps, model = before.steps, last.model
    if steps.begins[model + 1] - steps.begins[model] != change.begins[JOINT + 1] - change.begins[JOINT]:
        raise AnalysisError("expected a change of the decode steps that begins as they were")
    joined = _Joined(steps, model, change)
    insertions = [*before.insertions[:-1], replace(last, count=token + JOINT - 1 - reached)]
    return joined.steps(), tuple(map(joined.move_insertion, insertions))


class _Joined:
    """Two recordings as one: the first up to the end of a step, the second from its joint on."""

    def __init__(self, first: DecodeSteps, model: int, second: DecodeSteps) -> None:
        self._first, self._second, self._model = first, second, model
        self._cut, self._from = first.begins[model + 1], second.begins[JOINT]
        self._ops, self._from_op = first.first_ops[model + 1], second.first_ops[JOINT]
        self._nodes = first.profile.ops[self._ops].node
        self._from_node = second.profile.ops[self._from_op].node
        kept = [i for i, each in enumerate(first.profile.storages) if each.birth < self._cut]
        self._place = {old: new for new, old in enumerate(kept)}
        born = [i for i, each in enumerate(second.profile.storages) if self._is_born_later(each)]
        self._second_place = {old: len(kept) + new for new, old in enumerate(born)}

    def _is_born_later(self, storage: Storage) -> bool:
        """Whether a storage of the second recording comes after the joint: a library's, if it is used first there."""
        if storage.birth:
            return storage.birth >= self._from
        return storage.op is not None and storage.op >= self._from_op

    @property
    def _ticks(self) -> int:
        return self._second.profile.ticks + self._cut - self._from

    def steps(self) -> DecodeSteps:
        """The joined recording."""
        later, ops = self._cut - self._from, self._ops - self._from_op
        first, second = self._first, self._second
        begins = (*first.begins[: self._model + 1], *(begin + later for begin in second.begins[JOINT:]))
        first_ops = (*first.first_ops[: self._model + 1], *(op + ops for op in second.first_ops[JOINT:]))
        return DecodeSteps(self._profile(), begins, first_ops)

    def move_insertion(self, insertion: Insertion) -> Insertion:
        """An insertion of the first recording, with its storages as the joined one counts them."""
        place = self._place
        return replace(
            insertion,
            slots=tuple(replace(slot, storage=place[slot.storage]) for slot in insertion.slots),
            lagging=frozenset(place[index] for index in insertion.lagging),
            later_growth={},  # what follows was recorded at its own length
        )

    def _profile(self) -> Profile:
        first, second = self._first.profile, self._second.profile
        shift = self._nodes - self._from_node
        calls = [
            each.model_copy(update={"last_node": min(each.last_node, self._nodes - 1)})
            for each in first.calls
            if each.first_node < self._nodes
        ]
        calls += [
            each.model_copy(update={"first_node": each.first_node + shift, "last_node": each.last_node + shift})
            for each in second.calls
            if each.first_node >= self._from_node
        ]
        ops = [each.model_copy(update={"node": min(each.node, self._nodes - 1)}) for each in first.ops[: self._ops]] + [
            self._move_op(each) for each in second.ops[self._from_op :]
        ]
        changes = {
            "ticks": self._ticks,
            "nodes": (
                *(_place_outputs(each, self._place) for each in first.nodes[: self._nodes]),
                *self._later_nodes(),
            ),
            "ops": tuple(ops),
            "storages": (
                *(self._keep_storage(first.storages[i]) for i in self._place),
                *(self._move_storage(second.storages[i]) for i in self._second_place),
            ),
            "calls": tuple(calls),
            "unknowns": tuple(dict.fromkeys((*first.unknowns, *second.unknowns))),
        }
        return first.model_copy(update=changes)

    def _keep_storage(self, storage: Storage) -> Storage:
        """A storage of the first recording. What lives on dies in the step after, or as long before the end as it did.

        Raises:
            AnalysisError: it does neither.
        """
        begins = self._first.begins
        if storage.death < self._cut:
            return storage
        if storage.death >= begins[-1]:
            death = storage.death - self._first.profile.ticks + self._ticks
        elif storage.death < begins[self._model + 2]:
            death = storage.death
        else:
            raise AnalysisError("expected decode steps that free what the step before has left")
        node = None if storage.node is None else min(storage.node, self._nodes - 1)
        free_by = storage.free_by and storage.free_by + death - storage.death
        return storage.model_copy(update={"death": death, "free_by": free_by, "node": node})

    def _move_storage(self, storage: Storage) -> Storage:
        later = self._cut - self._from
        changes = {
            "birth": storage.birth and storage.birth + later,
            "death": storage.death + later,
            "free_by": storage.free_by and storage.free_by + later,
            "op": None if storage.op is None else storage.op - self._from_op + self._ops,
            "node": None if storage.node is None else self._move(storage.node),
        }
        return storage.model_copy(update=changes)

    def _move_op(self, op: Op) -> Op:
        later = self._cut - self._from
        return op.model_copy(update={"node": self._move(op.node), "begin": op.begin + later, "end": op.end + later})

    def _move(self, node: int) -> int:
        """The place of a node of the second recording; one from before the joint counts as its first."""
        return max(node, self._from_node) - self._from_node + self._nodes

    def _later_nodes(self) -> list[Node]:
        start = self._from_node
        return [
            _place_outputs(node, self._second_place).model_copy(
                update={
                    "inputs": tuple(self._move(index) for index in node.inputs if index >= start),
                    "view_of": None if node.view_of is None or node.view_of < start else self._move(node.view_of),
                }
            )
            for node in self._second.profile.nodes[start:]
        ]


def _place_outputs(node: Node, place: dict[int, int]) -> Node:
    """A node whose outputs have the places of their storages in the joined recording."""
    storages = (None if each.storage is None else place.get(each.storage) for each in node.outputs)
    placed = zip(node.outputs, storages, strict=True)
    outputs = tuple(each.model_copy(update={"storage": storage}) for each, storage in placed)
    return node.model_copy(update={"outputs": outputs})
