"""What differs between releases of a serving engine, by tables that are each held to a log of a start.

The tables are those of `fxmem/simulation/engines/releases.toml`.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any, Final, Literal

from fxmem.errors import UsageError, closest
from fxmem.records.parts import Record
from fxmem.records.profile import Target

Version = tuple[int, ...]
_MIB, _GIB = 1 << 20, 1 << 30
_OF_DRIVER: Final = 550
"""MiB that nvidia-smi has and a program does not, of an H100."""
_PREFILL_SIZES: Final = {2048: 42, 4096: 50, 8192: 58, 16384: 74}
"""Graphs of a prefill in parts of so many tokens."""
_LARGE: Final = (160 * _GIB, 70 * _GIB)
"""Cards of at least so much have larger defaults, an A100 aside: vllm's `engine/arg_utils.py`, `get_batch_defaults`."""


class OutsideTorch(Record):
    """What an engine takes beside torch's allocator, in MiB, as its starts logged it."""

    tensor: int
    """Cards that split a layer."""
    low: int
    high: int


class Engine(Record):
    """The rules of one release of an engine."""

    name: str
    release: str
    """The release that is asked for, of which the rules are."""
    sampler: Literal["sort", "triton", "flashinfer", "gumbel", "none"]
    """How the measured run samples: by sorting all logits; by a kernel with a row of them for each multiprocessor; by
    one without; from logits as they are; or nothing is measured, and the share is what keys and values and weights have
    of what is free."""
    merges_layers: bool = True
    """Whether forward is that of merged layers, compiled; else that of a model's own modules."""
    hidden_states: int = 4
    """How many are alive where the most is, in merged layers."""
    copies_logits: bool = False
    """Whether it samples from a copy of the hidden states drawn at random, and from a copy of the logits in single
    precision whatever they are."""
    counts_graphs: bool = False
    """Whether what CUDA graphs take is estimated and taken off before keys and values have their share."""
    utilization: float = 0
    """The share of a card, unless said; 0: as `find_share` has it."""
    max_seqs: tuple[int, int, int]
    """Sequences at a time, unless said: on a card of 160 GiB, of 70, and on another."""
    server_tokens: tuple[int, int, int]
    """Tokens of a forward, unless said: of a server."""
    program_tokens: tuple[int, int, int]
    """The same of the class `LLM` in a program."""
    outside: tuple[OutsideTorch, ...]
    outside_note: str = ""
    """What lies outside of these figures."""
    outside_of_stages: tuple[int, ...] = ()
    """Least and most where a model is split into stages alone; empty where no such start was seen."""
    graphs: tuple[int, ...] = ()
    """Least and most of CUDA graphs, where they are not those of `graphs.py`."""
    cold: int = 0
    """What compiling took of a first start, where that is in what is measured; larger models took more."""
    held_to: tuple[str, ...]
    """Starts in benchmarks/published/serving.json."""

    def find_outside(self, tensor: int, stages: int) -> OutsideTorch:
        """What is taken beside torch's allocator; of more cards than were seen, as of the most."""
        if stages > 1 and tensor == 1 and self.outside_of_stages:
            low, high = self.outside_of_stages
            return OutsideTorch(tensor=1, low=low, high=high)
        return next((each for each in self.outside if each.tensor >= tensor), self.outside[-1])

    def find_share(self, card: Target, tokens: int, sequences: int, cards: int) -> float:
        """The share of a card, unless said: of SGLang what it keeps for activations and graphs is left out
        (sgl-project/sglang, `server_args.py`)."""
        total = (card.memory_bytes or 0) // _MIB + _OF_DRIVER
        kept = 512 + 1.5 * max(tokens, 2048) + 128 * cards + 2 * sequences + 8 * _PREFILL_SIZES.get(tokens, 58)
        return self.utilization or round(1 - max(kept, 10240 if total > 60 << 10 else 0) / total, 3)

    def find_defaults(self, card: Target, *, of_program: bool) -> tuple[int, int]:
        """Tokens of a forward and sequences at a time, unless said."""
        place = sum((card.memory_bytes or 0) < least for least in _LARGE)
        place = 2 if "a100" in f"{card.name} {card.full_name}".lower() else place
        return (self.program_tokens if of_program else self.server_tokens)[place], self.max_seqs[place]


_TABLES: Final = tomllib.loads(Path(__file__).with_name("releases.toml").read_text(encoding="utf-8"))


def read_engines() -> list[Engine]:
    """All releases that are known, the oldest first of each engine."""
    found = []
    for name, tables in _TABLES.items():
        rules: dict[str, Any] = {}
        for release, changes in tables.items():
            rules |= changes
            found.append(Engine(name=name, release=release, **rules))
    return found


def find_engine(spec: str) -> Engine:
    """The rules of `vllm`, the newest that is known, or of `vllm@0.19`.

    Raises:
        UsageError: no such engine, or a release before all that are known.
    """
    name, _, release = spec.partition("@")
    known = [each for each in read_engines() if each.name == name]
    if not known:
        expected = f"expected an engine of {', '.join(_TABLES)}, with a release or not (vllm@0.19)"
        raise UsageError(f"{expected}; got {spec!r}{closest(name, _TABLES)}")
    if not release:
        return known[-1]
    asked = _parse(release)
    if asked is None or asked < (_parse(known[0].release) or ()):
        raise UsageError(f"expected a release of {name} from {known[0].release} on, as in {name}@0.19; got {spec!r}")
    rules = [each for each in known if (_parse(each.release) or ()) <= asked]
    return rules[-1].model_copy(update={"release": release})


def find_installed(name: str) -> str:
    """An engine with the release that is installed here, `vllm@0.19.1`; its name alone where none is."""
    try:
        return f"{name}@{importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return name


def find_newer(engine: Engine) -> str:
    """The release that is installed here, where it is newer than the rules; empty where there is none."""
    _, _, installed = find_installed(engine.name).partition("@")
    return installed if (_parse(installed) or ()) > (_parse(engine.release) or ()) else ""


def _parse(release: str) -> Version | None:
    match = re.match(r"v?(\d+(?:\.\d+)*)", release)
    return None if match is None else tuple(int(part) for part in match[1].split("."))[:2]
