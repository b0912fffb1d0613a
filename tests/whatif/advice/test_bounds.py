"""The most that a change frees, by the record: what is there without all that it alters stays."""

from __future__ import annotations

from fxmem.records.profile import Kind, Phase
from fxmem.simulation.profiled_step import ReallocatedStep
from fxmem.whatif.advice.bounds import Bound, bound_saving
from tests.profiles import Log


def test_no_more_is_freed_than_the_rest_leaves() -> None:
    log = Log()
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
