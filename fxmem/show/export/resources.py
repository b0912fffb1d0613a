"""What a job has to ask its scheduler for, by the need that was predicted.

Sizes on both sides differ: a scheduler knows a card by the memory it is sold with, of which a driver keeps some. So the
memory that is asked for is larger than that of each card of the catalogue which has too little. Where this would leave
out the very card that the step was analysed on, and fits, that card is named instead.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

from fxmem.errors import AnalysisError, ExceededError
from fxmem.hardware.catalogue import CATALOGUE, Card
from fxmem.hardware.context import HOST_BYTES
from fxmem.records.profile import Node, Profile, SourceLine, Storage, Timeline
from fxmem.records.units import format_shape, to_words
from fxmem.show.facts import find_fit

_MIB, _GIB = 1 << 20, 1 << 30
_CARDS_OF_A_NODE = 8
"""Cards that a node has at most."""


class Resources(NamedTuple):
    """What a job needs of each of its nodes."""

    verdict: str
    """Whether it fits, in words, without a line break."""
    nodes: int
    cards: int
    """0 for a step on the CPU."""
    card: Card | None
    """The one to name; None where any of so much memory will do."""
    least_mib: int
    """MiB of a card: each that is sold with more will do."""
    host_gib: int | None
    """GiB of the host's memory; None where nothing was measured."""

    @property
    def card_gb(self) -> int:
        """`least_mib` as schedulers count: the next size in GiB, which they write as GB."""
        return self.least_mib // 1024 + 1

    def comments(self) -> list[str]:
        """What a reader of the request has to know of it, as lines of a comment."""
        lines = [f"# fxmem: {self.verdict}"]
        if self.nodes > 1:
            lines.append(f"# {self.nodes} nodes of {self.cards} cards each")
        if self.host_gib is None:
            lines.append("# the host's memory is not known: fxmem run measures it, of a script")
        return lines


def find_resources(profile: Profile, timeline: Timeline) -> Resources:
    """What the step has to ask for.

    Raises:
        ExceededError: it does not fit the card, or the host, that it was analysed for.
        AnalysisError: the program did not get to the end, so that its need is not known.
    """
    fit, step, target = find_fit(profile, timeline.peak), profile.step, profile.target
    if fit.is_failed:
        raise AnalysisError(f"expected a step that is known to its end, to ask a scheduler for a card; {fit.verdict}")
    if fit.exit_code:
        raise ExceededError(f"{fit.verdict}; fxmem cards says which cards have room, fxmem advise what to change")
    world = 1 if step.ranks is None else step.ranks.world
    nodes = math.ceil(world / _CARDS_OF_A_NODE)
    on_card = target.device == "cuda"
    cards = math.ceil(world / nodes)
    peak = timeline.peak
    need = peak.process_bytes.high if peak.process_bytes else peak.reserved_bytes or peak.requested_bytes
    if target.memory_bytes is not None:
        need = min(need, target.memory_bytes)  # where the context is small, it fits the target
    # A card which has as much or more has room.
    small = [each.sold_gb for each in CATALOGUE.values() if (each.target.memory_bytes or math.inf) < need]
    least_mib = max(math.ceil(need / _MIB), 1024 * max(small, default=0))
    own = CATALOGUE.get(target.name)
    host = None if step.program is None or step.program.host is None else step.program.host.most_bytes
    if host is not None:
        host = cards * (host + (HOST_BYTES if on_card else 0))
    return Resources(
        verdict=fit.verdict,
        nodes=nodes,
        cards=cards if on_card else 0,
        card=own if own is not None and own.sold_gb * 1024 <= least_mib else None,
        least_mib=least_mib,
        host_gib=None if host is None else math.ceil(host / _GIB),
    )


class Share(NamedTuple):
    """What a process takes of its card, for schedulers that give a part of one, in MiB."""

    steps_mib: int
    """In its steps."""
    most_mib: int
    """In all that is known of it."""
    most: str
    """What takes that: "the steps", "evaluation", "the longest batch"."""


def find_shares(profile: Profile, timeline: Timeline) -> tuple[Resources, Share | None]:
    """What the step has to ask for, and its part of a card, a CUDA context included; None on the CPU.

    Raises:
        The errors of `find_resources`.
    """
    asked, peak, program = find_resources(profile, timeline), timeline.peak, profile.step.program
    if not asked.cards:
        return asked, None
    steps = peak.reserved_bytes or peak.requested_bytes
    process = steps if peak.process_bytes is None else peak.process_bytes.high
    known = {"the steps": steps}
    if program is not None:
        passes = (each.reserved_bytes or each.end_bytes or each.requested_bytes for each in program.evaluations)
        known["evaluation"] = max(passes, default=0)
        known["the longest batch"] = 0 if program.longest is None else program.longest.reserved_bytes or 0
    most = max(known, key=lambda each: known[each])
    steps_mib, most_mib = (math.ceil((each + process - steps) / _MIB) for each in (steps, known[most]))
    return asked, Share(steps_mib, most_mib, most)


# --- where a node stands among the modules, and other words that several formats share --------------------------------


def enclosing_modules(node: Node) -> tuple[str, ...]:
    """Paths of the modules around a node, outermost first, the model itself left out; a called module is not around its
    own call."""
    path = node.module.rpartition(".")[0] if node.op == "call_module" else node.module
    return tuple(accumulate(path.split("."), "{}.{}".format)) if path else ()


def module_label(profile: Profile, path: str) -> str:
    """Last segment of a module's path and its class: `layer1 (Sequential)`."""
    name = path.rpartition(".")[2]
    class_name = profile.modules.get(path, "")
    return f"{name} ({class_name})" if class_name else name


def storage_label(storage: Storage) -> str:
    """A storage in a few words: `gradient conv1.weight 64x3x7x7 float32`."""
    tensor = (format_shape(storage.shape), storage.dtype) if storage.dtype else ()
    return " ".join(part for part in (to_words(storage.kind), storage.title, *tensor) if part)


def site(source: SourceLine | None) -> str:
    """`file:line`, or nothing."""
    return "" if source is None else f"{source.file}:{source.line}"


def title(profile: Profile) -> str:
    """What was predicted, by what: the words that tell a prediction from a measurement."""
    step = "training step" if profile.step.mode == "train" else "inference"
    return f"PREDICTED {step} of {profile.model} for {profile.target.name}, by fxmem {profile.fxmem_version}"
