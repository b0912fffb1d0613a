"""Messages of cards that ran out of memory: read from any text, and explained by their numbers alone."""

from __future__ import annotations

from fxmem.memory.shortage.messages import read_messages as read_messages
