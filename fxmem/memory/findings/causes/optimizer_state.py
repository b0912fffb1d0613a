"""The card is full because of the optimizer: of the state that its first step makes, or of what its step has beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.hardware.context import room_bytes
from fxmem.memory.findings import Finding
from fxmem.records.profile import Kind, Phase, Profile, Timeline

_LESS: Final = "an optimizer of less state (8 bits, Adafactor)"


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where a step does not fit, and would without them."""
    peak, room = timeline.peak, room_bytes(profile.target)
    if peak.fits is not False or room is None or profile.step.mode != "train":
        return
    alive = [profile.storages[index] for index in timeline.alive]
    state = sum(each.nbytes for each in alive if each.kind is Kind.OPTIMIZER_STATE)
    begun = min((span.begin for span in profile.phases if span.phase is Phase.OPTIMIZER), default=profile.ticks)
    made = sum(each.nbytes for each in alive if each.birth >= begun and each.kind is not Kind.OPTIMIZER_STATE)
    if peak.phase is Phase.OPTIMIZER and made:
        if state:
            text = "optimizer.step() has temporaries beside its state, where the card is full"
            yield _describe(text, made, "fused=True, which has none")
        else:
            yield _describe("the first optimizer.step() makes its state, until the card is full", made, _LESS)
    elif state and (peak.reserved_bytes or 0) - state <= room:
        text = "the state that the first optimizer.step() makes is too much from the second step on"
        yield _describe(text, state, _LESS)


def _describe(text: str, nbytes: int, change: str) -> Finding:
    return Finding(cause="optimizer-state", text=text, nbytes=nbytes, change=change)
