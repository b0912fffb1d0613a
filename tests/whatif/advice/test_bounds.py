"""The most that a change frees, by the record: what is there without all that it alters stays."""

from __future__ import annotations

from fxmem.records.profile import Kind, Phase
from fxmem.simulation.code.profiled_step import ReallocatedStep
from fxmem.whatif.advice.variant import Bound, bound_saving
from tests.profiles import CPU, TINY_CARD, Log


def test_no_more_is_freed_than_the_rest_leaves() -> None:
    log = Log(target=CPU)
    node = log.node("net")
    log.resident(11, Kind.PARAMETER)
    with log.phase(Phase.FORWARD), log.op("aten.relu.default", node, Phase.FORWARD):
        saved = log.allocate(7, Kind.SAVED)
    with log.phase(Phase.BACKWARD):
        with log.op("aten.mm.default", node, Phase.BACKWARD):
            gradient = log.allocate(3, Kind.GRADIENT)
        log.free(saved)
    with log.phase(Phase.OPTIMIZER):
        with log.op("aten.add.default", node, Phase.OPTIMIZER):
            temporary = log.allocate(41, Kind.TEMPORARY)
        log.free(temporary, gradient)
    step = ReallocatedStep(log.profile(), {})
    assert step.peak.counted_bytes == 11 + 3 + 41
    assert bound_saving(step, {}, {saved}) == Bound(0, 0)
    assert bound_saving(step, {}, of=Phase.OPTIMIZER) == Bound(55 - (11 + 7 + 3), 0)
    assert bound_saving(step, {}, {gradient}, of=Phase.OPTIMIZER) == Bound(55 - (11 + 7), 0)


def test_what_a_card_reserves_is_replayed_without_them() -> None:
    log, mib = Log(target=TINY_CARD), 1 << 20
    node = log.node("net")
    log.resident(16 * mib, Kind.PARAMETER)
    with log.phase(Phase.FORWARD), log.op("aten.relu.default", node, Phase.FORWARD):
        saved = log.allocate(32 * mib, Kind.SAVED)
        log.free(saved)
    step = ReallocatedStep(log.profile(), {})
    assert (step.peak.counted_bytes, step.peak.reserved_bytes) == (48 * mib, 48 * mib)
    assert bound_saving(step, {}, {saved}) == Bound(32 * mib, 32 * mib)
    assert bound_saving(step, {}) == Bound(0, 0)
