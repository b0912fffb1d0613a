"""What a generation takes, token by token."""

from __future__ import annotations

from fxmem.records.parts.base import Bytes, Count, Many, Record


class GenerationPeak(Record):
    """The most bytes of a part of a generation."""

    requested_bytes: Bytes
    allocated_bytes: Bytes | None = None
    """None: no allocator is modelled for this target."""
    reserved_bytes: Bytes | None = None
    token: Count
    """The new token, from 1, while which was computed most was alive."""


class TokenBytes(Record):
    """The most bytes while a token was computed."""

    token: Count
    """From 1: the first comes of the prefill."""
    requested_bytes: Bytes
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None


class GenerationRun(Record):
    """A generation: one forward over the prompt, then one for each further token."""

    new_tokens: Count
    recorded_tokens: Count
    """Tokens whose forward was recorded. All others are made by arithmetic."""
    cache: str
    """What keys and values are kept in."""
    beams: Count = 1
    prefill: GenerationPeak
    decode: GenerationPeak | None = None
    """None with a single token."""
    growth_bytes: Bytes | None = None
    """By what the bytes alive grow from token to token. None: not the same for each."""
    tokens: Many[TokenBytes]
    """Of every token, on a card that is large enough."""
    fits: bool | None = None
    """Whether a first generation of a process runs in the target's room (`Peak.room_bytes`). None: not known."""
    last_token_that_fits: Count | None = None
    """None where all do; 0 where the prompt does not."""
    alloc_retries: Count | None = None
    """How often cached segments went back to the driver for a request to succeed, within that room."""
