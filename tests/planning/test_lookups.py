"""What planners look up in a profile."""

from __future__ import annotations

from fxmem.planning.lookups import results_by_op
from fxmem.records.profile import Kind, Node, Op, Phase, Storage
from tests.profiles import make_profile


def test_a_workspace_is_no_result_of_its_op() -> None:
    """An op that ran again would make its results anew; nothing keeps what its kernel had for itself."""
    kinds = (Kind.WORKSPACE, Kind.SAVED, Kind.WORKSPACE, Kind.TEMPORARY)
    profile = make_profile(
        ticks=5,
        nodes=[Node(name="a", op="call_function", target="a")],
        ops=[Op(name="aten.f", node=0, phase=Phase.FORWARD, begin=0, end=5)],
        storages=[
            Storage(nbytes=7, kind=Kind.PARAMETER, birth=0, death=5),
            *(Storage(nbytes=11 + at, kind=kind, birth=at, death=5, op=0) for at, kind in enumerate(kinds)),
        ],
    )
    assert results_by_op(profile) == {0: [2, 4]}
