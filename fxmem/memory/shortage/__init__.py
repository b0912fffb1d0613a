"""Messages of cards that ran out of memory: read from any text, and explained by their numbers alone."""

from __future__ import annotations

from fxmem.memory.shortage.messages import context_bytes as context_bytes
from fxmem.memory.shortage.messages import find_cause as find_cause
from fxmem.memory.shortage.messages import find_format as find_format
from fxmem.memory.shortage.messages import find_words as find_words
from fxmem.memory.shortage.messages import most_context_bytes as most_context_bytes
from fxmem.memory.shortage.messages import others_bytes as others_bytes
from fxmem.memory.shortage.messages import read_messages as read_messages
