"""`Generation`: what a generation takes, on the card that it was recorded for or on another like it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fxmem.errors import UsageError
from fxmem.hardware.context import give_room, process_range, room_bytes
from fxmem.memory import allocator, liveness
from fxmem.memory.budget import MemoryFit
from fxmem.memory.generation import Events, TokenReplay, replay_tokens, requested_by_token
from fxmem.records.parts import GenerationPeak, GenerationRun, TokenBytes
from fxmem.records.profile import Profile, StepTime, Target, Timeline
from fxmem.records.units import Mode
from fxmem.simulation.step.request import AnalysedModel, StepRequest


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRequest(StepRequest):
    """The call `model.generate(*args, **kwargs)`, with every setting but the model.

    Raises:
        UsageError: a setting that cannot be understood.
    """

    mode: Mode = "infer"
    new_tokens: int = 512
    """How many each sequence gets."""
    cache: str = "dynamic"
    """What keys and values are kept in, a name of `CACHES`."""
    beams: int = 1
    """Of beam search; 1 for none."""
    sample: bool = False
    """Whether tokens are sampled rather than the likeliest taken."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `generate`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_tokens < 1 or self.beams < 1:
            raise UsageError(f"expected at least 1 new token and 1 beam, got {self.new_tokens} and {self.beams}")


class Generation(AnalysedModel[GenerationRequest]):
    """The memory of a generation, and its reasons.

    Where it is long, the tokens between the first and the last are left out of its profile.
    """

    def __init__(
        self,
        profile: Profile,
        tokens: TokenAccount,
        *,
        is_whole: bool,
        model: nn.Module,
        request: GenerationRequest,
        repeat: Callable[[nn.Module, GenerationRequest], Generation],
    ) -> None:
        super().__init__(tokens.fill(profile), model, request, repeat)
        self._tokens, self._is_whole = tokens, is_whole

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Bytes alive at every moment of the profile; allocated and reserved bytes are those of the whole generation,
        the first of its process."""
        timeline = liveness.timeline(self.profile)
        return timeline.model_copy(update={"peak": timeline.peak.model_copy(update=self._tokens.of_peak)})

    @property
    def run(self) -> GenerationRun:
        """What it takes, token by token."""
        run = self.profile.step.generation
        assert run is not None
        return run

    def estimate_time(self, card: Target | None = None, *, taped: bool = False) -> StepTime | None:
        """As of any step; None where tokens are left out of the profile."""
        return super().estimate_time(card, taped=taped) if self._is_whole else None

    def move(self, card: Target, environ: Mapping[str, str] | None = None) -> Generation:
        """The same generation on another card of its compute capability, or with another allocator.

        Args:
            card: where it runs.
            environ: contains the allocator's settings; None: as they are here.
        """
        return Generation(
            self.profile,
            self._tokens.move(card, environ),
            is_whole=self._is_whole,
            model=self.model,
            request=self.request,
            repeat=self.repeat,
        )

    def replay(self, environ: Mapping[str, str], profile: Profile | None = None) -> Generation:
        """The same generation with other settings of the allocator; the profile is its own."""
        return self.move(self.profile.target, environ)

    def within(self, room: int, card: Target | None = None) -> MemoryFit:
        """Whether it runs to its last token where the allocator has so many bytes."""
        if self.peak.reserved_bytes is None:
            return super().within(room, card)
        moved = self.move(give_room(card or self.profile.target, room))
        return MemoryFit(moved.peak, moved.run.alloc_retries)


class TokenAccount:
    """The bytes of every token of a generation, and what the allocator makes of them.

    Args:
        recorded: the generation as it was recorded, with the card that it runs on.
        events: its storages, or those of a longer one.
        environ: contains the allocator's settings; None: this process's environment.
    """

    def __init__(self, recorded: Profile, events: Events, environ: Mapping[str, str] | None = None) -> None:
        self.recorded, self.events = recorded, events
        self._environ = os.environ if environ is None else environ
        self._settings = allocator.read_settings(self._environ)
        self._unlimited: dict[allocator.AllocatorSettings, TokenReplay] = {}

    def move(self, card: Target, environ: Mapping[str, str] | None) -> TokenAccount:
        """The same on another card; what a card without limits gives is replayed once."""
        settings = self._environ if environ is None else environ
        moved = TokenAccount(self.recorded.model_copy(update={"target": card}), self.events, settings)
        moved._unlimited = self._unlimited
        return moved

    def fill(self, profile: Profile) -> Profile:
        """The profile of the generation with these bytes, on this card."""
        run = profile.step.generation
        assert run is not None
        step = profile.step.model_copy(update={"generation": run.model_copy(update=self.of_run)})
        return profile.model_copy(update={"step": step, "target": self.recorded.target})

    @functools.cached_property
    def of_run(self) -> dict[str, Any]:
        """Fields of `GenerationRun`."""
        tokens = self._tokens
        found: dict[str, Any] = {
            "tokens": tokens,
            "prefill": _peak(tokens[:1]),
            "decode": _peak(tokens[1:]) if tokens[1:] else None,
        }
        bounded = self._bounded
        if bounded is None:
            return found
        return {
            **found,
            "fits": self.of_peak["fits"],
            "last_token_that_fits": None if bounded.is_whole else len(bounded.tokens),
            "alloc_retries": bounded.alloc_retries,
        }

    @functools.cached_property
    def of_peak(self) -> dict[str, Any]:
        """Fields of `Peak` that the allocator decides; none where no allocator is modelled."""
        bounded, target = self._bounded, self.recorded.target
        if bounded is None:
            return {}
        reserved = _most_reserved(self._tokens)
        room = room_bytes(target)
        run_out = f"It runs out at token {len(bounded.tokens) + 1} of {len(self.events.begins)}"
        return {
            "allocated_bytes": max((each.allocated_bytes or 0 for each in self._tokens), default=0),
            "reserved_bytes": reserved,
            "process_bytes": process_range(target, reserved),
            "room_bytes": room,
            "fits": None if room is None else bounded.is_whole,
            "shortage": "" if bounded.is_whole else run_out,
        }

    @functools.cached_property
    def _tokens(self) -> tuple[TokenBytes, ...]:
        bounded = self._bounded
        if bounded is None:
            requested = requested_by_token(self.events)
            return tuple(TokenBytes(token=i + 1, requested_bytes=n) for i, n in enumerate(requested))
        return (bounded if bounded.is_whole else self._unbounded).tokens

    @property
    def _unbounded(self) -> TokenReplay:
        """The replay on a card without limits."""
        if self._settings not in self._unlimited:
            self._unlimited[self._settings] = replay_tokens(self.recorded, self.events, self._settings)
        return self._unlimited[self._settings]

    @functools.cached_property
    def _bounded(self) -> TokenReplay | None:
        """The replay in the card's room; None where no allocator is modelled."""
        room = room_bytes(self.recorded.target)
        if self.recorded.target.device != "cuda":
            return None
        if room is None or _most_reserved(self._unbounded.tokens) <= room:
            return self._unbounded
        return replay_tokens(self.recorded, self.events, self._settings, room)


def _most_reserved(tokens: Sequence[TokenBytes]) -> int:
    return max((each.reserved_bytes or 0 for each in tokens), default=0)


def _peak(tokens: Sequence[TokenBytes]) -> GenerationPeak:
    """The largest of each, and the token of the most bytes alive."""

    def most(name: str) -> int | None:
        return max((n for each in tokens if (n := getattr(each, name)) is not None), default=None)

    top = max(tokens, key=lambda each: each.requested_bytes)
    return GenerationPeak(
        requested_bytes=top.requested_bytes,
        allocated_bytes=most("allocated_bytes"),
        reserved_bytes=most("reserved_bytes"),
        token=top.token,
    )
