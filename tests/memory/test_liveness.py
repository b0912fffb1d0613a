"""Live ranges: a case to check with a pencil, brute force on any profile, and the corners."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from fxmem.errors import UsageError
from fxmem.memory.liveness import (
    alive_storages,
    check,
    live_bytes,
    node_live_bytes,
    node_scratch_bytes,
    peak_in_phase,
    peak_without_scratch_bytes,
    timeline,
)
from fxmem.records.profile import (
    Kind,
    ModuleCall,
    Node,
    Op,
    Phase,
    PhaseBytes,
    PhaseSpan,
    Profile,
    RecomputedRegion,
    Storage,
)
from tests.profiles import deep_profile, make_profile, profiles, small_profile


def storage(nbytes: int, birth: int, death: int, kind: Kind = Kind.TEMPORARY, op: int | None = None) -> Storage:
    return Storage(nbytes=nbytes, kind=kind, birth=birth, death=death, op=op)


def call(node: int, begin: int, end: int, phase: Phase = Phase.FORWARD) -> Op:
    return Op(name="aten.f", node=node, phase=phase, begin=begin, end=end)


def pencil_profile() -> Profile:
    """Two nodes forward and backward. Sizes are prime, so that no two sums are equal by accident.

    tick      0  1  2  3  4  5  6  7  8  9
    2         =  =  =  =  =  =  =  =  =  =   parameter
    3         =  =  =  =  =  =  =  =  =  =   input
    5            =  =  =  =  =  =            saved by a (op 0)
    7               =                        workspace of a (op 0)
    11                    =  =  =  =  =  =   output of b (op 1)
    13                       =  =  =         gradient on its way, made by b backward (op 2)
    17                             =  =  =   gradient of the parameter, made by a backward (op 3)
    """
    return make_profile(
        ticks=10,
        nodes=[Node(name="a", op="call_module", target="a"), Node(name="b", op="call_module", target="b")],
        ops=[call(0, 1, 4), call(1, 4, 5), call(1, 5, 6, Phase.BACKWARD), call(0, 7, 8, Phase.BACKWARD)],
        phases=[
            PhaseSpan(phase=Phase.FORWARD, begin=0, end=5, first_op=0, last_op=2),
            PhaseSpan(phase=Phase.BACKWARD, begin=5, end=10, first_op=2, last_op=4),
        ],
        storages=[
            storage(2, 0, 10, Kind.PARAMETER),
            storage(3, 0, 10, Kind.INPUT),
            storage(5, 1, 7, Kind.SAVED, op=0),
            storage(7, 2, 3, Kind.WORKSPACE, op=0),
            storage(11, 4, 10, Kind.OUTPUT, op=1),
            storage(13, 5, 8, op=2),
            storage(17, 7, 10, Kind.GRADIENT, op=3),
        ],
    )


def test_pencil() -> None:
    result = timeline(pencil_profile())
    #                           0  1   2   3   4   5   6   7   8   9
    assert result.live_bytes == (5, 10, 17, 10, 21, 34, 34, 46, 33, 33)
    assert result.by_kind == {
        Kind.PARAMETER: (2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
        Kind.INPUT: (3, 3, 3, 3, 3, 3, 3, 3, 3, 3),
        Kind.SAVED: (0, 5, 5, 5, 5, 5, 5, 0, 0, 0),
        Kind.WORKSPACE: (0, 0, 7, 0, 0, 0, 0, 0, 0, 0),
        Kind.OUTPUT: (0, 0, 0, 0, 11, 11, 11, 11, 11, 11),
        Kind.TEMPORARY: (0, 0, 0, 0, 0, 13, 13, 13, 0, 0),
        Kind.GRADIENT: (0, 0, 0, 0, 0, 0, 0, 17, 17, 17),
    }
    peak = result.peak
    assert (peak.requested_bytes, peak.tick, peak.op, peak.node, peak.phase) == (46, 7, 3, "a", Phase.BACKWARD)
    assert peak.by_kind == {Kind.PARAMETER: 2, Kind.INPUT: 3, Kind.OUTPUT: 11, Kind.TEMPORARY: 13, Kind.GRADIENT: 17}
    assert (peak.allocated_bytes, peak.reserved_bytes, peak.process_bytes) == (None, None, None)
    assert result.alive == (6, 5, 4, 1, 0)


def test_pencil_nodes() -> None:
    profile = pencil_profile()
    # a: forward ticks 1..3, backward tick 7; b: forward tick 4, backward tick 5. The tick before each counts too.
    assert node_live_bytes(profile) == (PhaseBytes(forward=17, backward=46), PhaseBytes(forward=21, backward=34))
    # Only the workspace lives inside one node: 13 outlives b's backward by reaching a's.
    assert node_scratch_bytes(profile) == (PhaseBytes(forward=7, backward=0), PhaseBytes(forward=0, backward=0))


def test_scratch_may_die_after_its_op_but_not_after_the_next_node_starts() -> None:
    nodes = [Node(name="a", op="call_module", target="a"), Node(name="b", op="call_module", target="b")]
    ops = [call(0, 0, 1), call(0, 1, 2), call(1, 4, 5)]

    def scratch(death: int) -> int:
        return node_scratch_bytes(make_profile(ticks=6, nodes=nodes, ops=ops, storages=[storage(19, 0, death, op=0)]))[
            0
        ].forward

    assert [scratch(death) for death in (1, 2, 3, 4, 5)] == [19, 19, 19, 0, 0]


def test_a_workspace_that_is_kept_counts_where_one_of_an_op_does_not() -> None:
    nodes = [Node(name="a", op="call_module", target="a")]
    kept, of_the_op = storage(19, 0, 3, Kind.WORKSPACE), storage(23, 1, 2, Kind.WORKSPACE, op=0)
    profile = make_profile(ticks=3, nodes=nodes, ops=[call(0, 0, 3)], storages=[kept, of_the_op])
    assert max(live_bytes(profile)) == 19 + 23
    assert peak_without_scratch_bytes(profile) == 19


def test_what_survives_the_step_is_nobodys_scratch() -> None:
    nodes = [Node(name="a", op="call_module", target="a")]
    profile = make_profile(ticks=2, nodes=nodes, ops=[call(0, 0, 2)], storages=[storage(19, 0, 2, op=0)])
    assert node_scratch_bytes(profile) == (PhaseBytes(forward=0, backward=None),)


def test_node_without_ops_and_node_that_allocates_nothing() -> None:
    nodes = [Node(name="x", op="placeholder", target="x"), Node(name="view", op="call_method", target="view")]
    profile = make_profile(ticks=3, nodes=nodes, ops=[call(1, 2, 2)], storages=[storage(23, 0, 3, Kind.INPUT)])
    assert node_live_bytes(profile) == (PhaseBytes(forward=0, backward=None), PhaseBytes(forward=23, backward=None))


def test_optimizer_counts_as_forward() -> None:
    phases = [PhaseSpan(phase=Phase.OPTIMIZER, begin=0, end=2, first_op=0, last_op=1)]
    nodes = [Node(name="optimizer", op="optimizer", target="AdamW")]
    profile = make_profile(
        ticks=2, nodes=nodes, ops=[call(0, 0, 1, Phase.OPTIMIZER)], phases=phases, storages=[storage(29, 0, 1, op=0)]
    )
    assert node_live_bytes(profile) == node_scratch_bytes(profile) == (PhaseBytes(forward=29, backward=None),)


def test_first_of_equal_peaks_and_equal_sizes_in_index_order() -> None:
    profile = make_profile(
        ticks=4, storages=[storage(31, 2, 3), storage(31, 0, 1), storage(0, 0, 4), storage(31, 2, 3)]
    )
    result = timeline(profile)
    assert result.live_bytes == (31, 0, 62, 0)
    assert (result.peak.tick, result.alive) == (2, (0, 3, 2))
    assert timeline(make_profile(ticks=3, storages=[storage(31, 0, 1), storage(31, 2, 3)])).peak.tick == 0


def test_first_of_equal_moments_of_a_phase() -> None:
    phases = [
        PhaseSpan(phase=Phase.FORWARD, begin=0, end=2, first_op=0, last_op=0),
        PhaseSpan(phase=Phase.OPTIMIZER, begin=2, end=6, first_op=0, last_op=0),
    ]
    kept = [storage(97, 0, 1), storage(31, 3, 4), storage(31, 5, 6, Kind.WORKSPACE)]
    peak = peak_in_phase(make_profile(ticks=6, phases=phases, storages=kept), Phase.OPTIMIZER)
    assert peak is not None
    assert (peak.tick, peak.requested_bytes, peak.by_kind) == (3, 31, {Kind.TEMPORARY: 31})
    assert peak_in_phase(make_profile(ticks=6, phases=phases[:1], storages=kept), Phase.OPTIMIZER) is None


@pytest.mark.parametrize(
    ("tick", "op"),
    [(0, None), (1, 0), (2, 0), (3, 0), (4, 2), (5, 2), (6, 3)],
    ids=[
        "before the first",
        "inside",
        "still inside",
        "in the gap",
        "empty op before it",
        "in the next gap",
        "after an empty op",
    ],
)
def test_op_of_the_peak(tick: int, op: int | None) -> None:
    nodes = [Node(name=name, op="call_function", target=name) for name in "abcd"]
    ops = [call(0, 1, 3), call(1, 4, 4), call(2, 4, 5), call(3, 6, 6)]
    peak = timeline(make_profile(ticks=7, nodes=nodes, ops=ops, storages=[storage(37, tick, tick + 1)])).peak
    assert (peak.op, peak.node) == (op, None if op is None else "abcd"[op])


def test_the_peak_is_of_the_first_op_and_not_of_an_empty_one_inside_it() -> None:
    nodes = [Node(name=name, op="call_function", target=name) for name in "ab"]
    profile = make_profile(ticks=4, nodes=nodes, ops=[call(0, 1, 3), call(1, 1, 1)], storages=[storage(37, 2, 3)])
    assert (timeline(profile).peak.op, timeline(profile).peak.node) == (0, "a")


def test_empty_profile() -> None:
    result = timeline(make_profile(ticks=0))
    assert (result.live_bytes, result.by_kind, result.alive) == ((), {}, ())
    assert (result.peak.requested_bytes, result.peak.tick, result.peak.op, result.peak.by_kind) == (0, 0, None, {})
    assert node_live_bytes(make_profile(ticks=0)) == node_scratch_bytes(make_profile(ticks=0)) == ()


@given(profiles())
def test_equals_brute_force(profile: Profile) -> None:
    check(profile)
    result = timeline(profile)
    for tick in range(profile.ticks):
        alive = [i for i, s in enumerate(profile.storages) if s.birth <= tick < s.death]
        assert result.live_bytes[tick] == sum(profile.storages[i].nbytes for i in alive)
        for kind, live in result.by_kind.items():
            assert live[tick] == sum(profile.storages[i].nbytes for i in alive if profile.storages[i].kind is kind)
        assert sorted(alive_storages(profile, tick)) == alive
    peak = result.peak
    assert peak.requested_bytes == max(result.live_bytes, default=0) == sum(peak.by_kind.values())
    assert all(nbytes < peak.requested_bytes for nbytes in result.live_bytes[: peak.tick])
    assert result.alive == alive_storages(profile, peak.tick)
    sizes = [profile.storages[i].nbytes for i in result.alive]
    assert sizes == sorted(sizes, reverse=True)


@given(profiles())
def test_nodes_equal_brute_force(profile: Profile) -> None:
    live = live_bytes(profile)
    expected_live: list[dict[bool, int]] = [{} for _ in profile.nodes]
    expected_scratch: list[dict[bool, int]] = [{} for _ in profile.nodes]
    for index, op in enumerate(profile.ops):
        first = index
        while first and (profile.ops[first - 1].node, profile.ops[first - 1].phase) == (op.node, op.phase):
            first -= 1
        after = next((o for o in profile.ops[index:] if (o.node, o.phase) != (op.node, op.phase)), None)
        end = profile.ticks if after is None else after.begin
        inside = [s for s in profile.storages if s.op is not None and first <= s.op <= index and s.death < end]
        scratch = max((sum(s.nbytes for s in inside if s.birth <= t < s.death) for t in range(end)), default=0)
        running = max((live[t] for t in range(profile.ticks) if op.begin - 1 <= t < op.end), default=0)
        backward = op.phase is Phase.BACKWARD
        expected_live[op.node][backward] = max(running, expected_live[op.node].get(backward, 0))
        expected_scratch[op.node][backward] = max(scratch, expected_scratch[op.node].get(backward, 0))

    def by_phase(expected: list[dict[bool, int]]) -> tuple[PhaseBytes, ...]:
        return tuple(PhaseBytes(forward=e.get(False, 0), backward=e.get(True)) for e in expected)

    assert node_live_bytes(profile) == by_phase(expected_live)
    assert node_scratch_bytes(profile) == by_phase(expected_scratch)


def test_ready_made_profiles_are_consistent() -> None:
    for profile in (small_profile(), deep_profile(3), pencil_profile()):
        check(profile)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"storages": (storage(1, 5, 4),)}, r"storages\[0\] is born at tick 5 and dies at tick 4"),
        ({"storages": (storage(1, 5, 11),)}, r"storages\[0\] dies at tick 11, but there are 10 ticks"),
        ({"storages": (storage(1, 5, 6, op=4),)}, r"storages\[0\]\.op is 4, but there are 4 ops"),
        ({"storages": (Storage(nbytes=1, kind=Kind.INPUT, birth=0, death=1, node=2),)},
         r"storages\[0\]\.node is 2, but there are 2 nodes"),
        ({"nodes": (Node(name="a", op="output", target="a"),)}, r"ops\[1\]\.node is 1, but there are 1 nodes"),
        ({"nodes": (Node(name="a", op="output", target="a", inputs=(7,)),) * 2}, r"nodes\[0\]\.inputs is 7"),
        ({"nodes": (Node(name="a", op="output", target="a", view_of=-1),) * 2}, r"nodes\[0\]\.view_of is -1"),
        ({"nodes": (Node(name="a", op="output", target="a", saved=(9,)),) * 2},
         r"nodes\[0\]\.saved is 9, but there are 7 storages"),
        ({"saved_bytes": 1}, r"saved_bytes is 1, the sum over its nodes is 0"),
        ({"storages": (), "ops": (call(0, 3, 2),)}, r"ops\[0\] begins at tick 3 and ends at tick 2"),
        ({"storages": (), "ops": (call(0, 1, 4), call(1, 3, 5))},
         r"ops\[1\] begins at tick 3, before ops\[0\] has ended at tick 4"),
        ({"storages": (), "ops": (call(0, 1, 11),)}, r"ops\[0\] ends at tick 11"),
        ({"phases": ()}, r"its phases cover 0 of 10 ticks and 0 of 4 ops"),
        ({"phases": (PhaseSpan(phase=Phase.FORWARD, begin=2, end=10, first_op=0, last_op=4),)},
         r"phase forward begins at tick 2 and op 0, expected tick 0"),
        ({"phases": (PhaseSpan(phase=Phase.FORWARD, begin=0, end=10, first_op=0, last_op=4),)},
         r"ops\[2\] is of phase backward, but stands in phase forward"),
        ({"phases": (PhaseSpan(phase=Phase.FORWARD, begin=0, end=4, first_op=0, last_op=2),)},
         r"ops\[1\] covers ticks \[4, 5\), phase forward only \[0, 4\)"),
    ],
)  # fmt: skip
def test_check_names_the_contradiction(change: dict[str, Any], complaint: str) -> None:
    profile = pencil_profile().model_copy(update=change)
    with pytest.raises(UsageError, match=complaint) as raised:
        check(profile)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("what", ["calls", "recomputed"])
def test_a_span_beyond_the_nodes_is_a_contradiction(what: str) -> None:
    span = {"module": "a", "first_node": 0, "last_node": 99} if what == "calls" else {"first_node": 0, "last_node": 99}
    kind = ModuleCall if what == "calls" else RecomputedRegion
    with pytest.raises(UsageError, match=rf"{what}\[0\] covers nodes \[0, 99\)"):
        check(small_profile().model_copy(update={what: (kind(**span),)}))
