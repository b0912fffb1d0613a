"""A generation from a few of its recorded tokens: the others are made by arithmetic and replayed."""

from __future__ import annotations

from fxmem.memory.generation.decode_steps import (
    PERIOD,
    RECORDED,
    TAIL,
    DecodeSteps,
    Events,
    Extension,
    extend,
    find_steps,
    recorded_events,
    recorded_tokens,
)
from fxmem.memory.generation.joined_steps import JOINT, join_steps
from fxmem.memory.generation.phases import name_phases
from fxmem.memory.generation.token_replay import TokenReplay, replay_tokens, requested_by_token

__all__ = [
    "JOINT",
    "PERIOD",
    "RECORDED",
    "TAIL",
    "DecodeSteps",
    "Events",
    "Extension",
    "TokenReplay",
    "extend",
    "find_steps",
    "join_steps",
    "name_phases",
    "recorded_events",
    "recorded_tokens",
    "replay_tokens",
    "requested_by_token",
]
