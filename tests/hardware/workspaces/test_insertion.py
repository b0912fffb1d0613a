"""Hidden buffers written into a log by hand."""

from fxmem.hardware.hidden_memory import HeldBuffer, HiddenEvent, HiddenMemory
from fxmem.hardware.workspaces import TimedOp, insert_workspaces
from fxmem.memory import liveness
from fxmem.records.profile import Kind
from tests.profiles import small_profile


def _alloc(name, nbytes):
    return HiddenEvent(action="alloc", name=name, nbytes=nbytes)


def _insert(profile, memory, held):
    """The profile with hidden buffers as storages."""
    ops = [TimedOp(op.node, op.begin, op.end) for op in profile.ops]
    log = insert_workspaces(ops, profile.phases, profile.ticks, memory, held)
    moved = [
        s.model_copy(update={"birth": log.moved[s.birth] if s.birth else 0, "death": log.moved[s.death]})
        for s in profile.storages
    ]
    spans = zip(profile.ops, log.ops, strict=True)
    update = {
        "ticks": log.ticks,
        "ops": tuple(op.model_copy(update={"begin": begin, "end": end}) for op, (begin, end) in spans),
        "storages": (*moved, *log.storages),
        "phases": log.phases,
    }
    return profile.model_copy(update=update)


def test_a_buffer_before_and_a_buffer_after_the_output():
    profile = small_profile()
    index, op = next((i, op) for i, op in enumerate(profile.ops) if op.end - op.begin == 1)
    memory = HiddenMemory(
        events=(
            _alloc("copy", 101),
            HiddenEvent(action="output", name="result"),
            HiddenEvent(action="free", name="copy"),
            _alloc("workspace", 1009),
        )
    )
    after = _insert(profile, {index: memory}, {})
    liveness.check(after)
    copy, workspace = after.storages[len(profile.storages) :]
    assert {copy.kind, workspace.kind} == {Kind.WORKSPACE}
    result = next(s for s in after.storages if s.op == index)
    # copy comes, the result comes, copy goes, the workspace comes, and goes when the op returns
    assert (copy.birth, result.birth, copy.death, workspace.birth, workspace.death) == tuple(
        op.begin + n for n in range(5)
    )
    assert (after.ops[index].begin, after.ops[index].end) == (op.begin, op.begin + 4)
    assert after.ticks == profile.ticks + 4
    before_live, live = liveness.live_bytes(profile), liveness.live_bytes(after)
    assert max(live[op.begin : op.begin + 4]) == before_live[op.begin] + 1009
    assert live[after.ops[index].end] == before_live[op.end - 1] if op.end < profile.ticks else True


def test_everything_else_keeps_its_order_and_its_bytes():
    profile = small_profile()
    memory = {i: HiddenMemory(events=(_alloc("workspace", 11 + i),)) for i in range(len(profile.ops))}
    after = _insert(profile, memory, {"held": HeldBuffer(4099, 0)})
    liveness.check(after)
    visible = after.storages[: len(profile.storages)]
    assert [s.nbytes for s in visible] == [s.nbytes for s in profile.storages]

    def events(storages):
        return [
            (i, e)
            for _, i, e in sorted(
                [(s.birth, i, "born") for i, s in enumerate(storages)]
                + [(s.death, i, "dies") for i, s in enumerate(storages)]
            )
        ]

    assert events(visible) == events(profile.storages)
    held = next(s for s in after.storages if s.name == "held")
    assert (held.birth, held.death) == (0, after.ticks)


def test_what_is_unknown_is_left_out():
    profile = small_profile()
    after = _insert(profile, {0: HiddenMemory(events=(_alloc("who knows", None),))}, {})
    assert after == profile


def test_what_is_held_needs_no_op_that_hides_something():
    profile = small_profile()
    after = _insert(profile, {}, {"held": HeldBuffer(4099, 0)})
    assert (after.storages[-1].name, after.ops, after.ticks) == ("held", profile.ops, profile.ticks)


def test_what_a_cuda_graph_holds_goes_at_its_end():
    profile = small_profile()
    spans = [(op.begin, op.end) for op in profile.ops]
    graphs = (1, 1, 0, 1)  # by op, whether it is in a graph: two graphs
    ops = [TimedOp(op.node, op.begin, op.end, graph) for op, graph in zip(profile.ops, graphs, strict=False)]
    held = {"held": HeldBuffer(4099, 1, 1, needed_by=(1, 3))}
    log = insert_workspaces(ops, (), profile.ticks, {}, held)
    first, second = log.storages
    assert (first.op, second.op, first.nbytes, second.nbytes) == (1, 3, 4099, 4099)
    assert (first.birth, first.death) == (spans[1][1], spans[1][1] + 1)  # the result comes before it
    assert (second.birth, second.death) == (spans[3][1] + 2, spans[3][1] + 3)
    assert log.ticks == profile.ticks + 4


def test_a_result_that_allocates_nothing_moves_nothing():
    profile = small_profile()
    index, op = next((i, op) for i, op in enumerate(profile.ops) if op.end - op.begin == 1)
    result = HiddenEvent(action="output", name="result")
    after = _insert(profile, {index: HiddenMemory(events=(result, result, _alloc("workspace", 7)))}, {})
    workspace = after.storages[len(profile.storages)]
    assert (workspace.birth, workspace.death, after.ops[index].end) == (op.begin + 1, op.begin + 2, op.begin + 2)
