"""What people read of a record, as data: text, HTML and Markdown lay it out, each in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "good", "best", "bad"]
"""How good something is; colour repeats what the words say."""


@dataclass(frozen=True)
class Fact:
    """A label, and what it labels."""

    label: str
    """Empty: it continues the one before."""
    text: str
    key: str = ""
    """What it is about, by which some facts are picked out of several."""
    tone: Tone = ""
