"""Messages of cards that ran out of memory: read from any text, and explained by their numbers alone."""

from __future__ import annotations

from fxmem.memory.shortage.cause import context_bytes as context_bytes
from fxmem.memory.shortage.cause import find_cause as find_cause
from fxmem.memory.shortage.cause import most_context_bytes as most_context_bytes
from fxmem.memory.shortage.cause import others_bytes as others_bytes
from fxmem.memory.shortage.formats import find_format as find_format
from fxmem.memory.shortage.formats import find_words as find_words
from fxmem.memory.shortage.messages import read_messages as read_messages
