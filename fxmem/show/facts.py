"""What a report has to say, in words and figures, before anything is laid out.

Shared by the text and the HTML report. Strings that come from the user's model are made printable here; escaping them
for a markup language is the layout's business.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from fxmem.hardware.context import describe_uncounted, format_range
from fxmem.hardware.step_time import estimate
from fxmem.memory.allocator import DEFAULT_SETTINGS
from fxmem.memory.budget import Budget
from fxmem.memory.figures import Flops, sum_figures
from fxmem.memory.module_tree import describe
from fxmem.records.names import NO_LOSS, OWN_LOSS, TimedQuestion
from fxmem.records.parts import GenerationPeak, GenerationRun, RankClass, TimedChoice
from fxmem.records.profile import (
    FileChange,
    Headed,
    InputTensor,
    Kind,
    Peak,
    Profile,
    ProgramFiles,
    ProgramRun,
    Round,
    Step,
    Storage,
    Timeline,
)
from fxmem.records.units import (
    exact_bytes,
    format_bytes,
    format_flops,
    format_seconds,
    format_shape,
    percent,
    printable,
    to_words,
)
from fxmem.show.sections import Fact

Facts = list[Fact]


@dataclass(frozen=True)
class KindShare:
    """What one kind of storage contributes to the peak."""

    kind: Kind
    nbytes: int
    percent: str

    @property
    def name(self) -> str:
        """The kind in words."""
        return to_words(self.kind)


@dataclass(frozen=True)
class LargeTensor:
    """A storage alive at the peak, and how many more are like it (size, kind, shape, source line)."""

    nbytes: int
    kind: Kind
    tensor: str
    """Shape and dtype."""
    owner: str
    source: str
    """`file:line`, or empty."""
    others: int

    @property
    def kind_name(self) -> str:
        """The kind in words."""
        return to_words(self.kind)

    @property
    def more(self) -> str:
        """What to say after the owner."""
        return f" and {self.others} alike" if self.others else ""


def describe_autocast(step: Step) -> list[str]:
    """The step's autocast in words; nothing for a program, which may begin and end it anywhere."""
    is_program = step.program is not None or step.loss == OWN_LOSS
    return [] if is_program else [f"autocast: {step.precision or 'off'}"]


def describe_rank(step: Step) -> list[str]:
    """The rank that the step is of, in a list of one; none on one card alone."""
    return [] if step.ranks is None else [f"rank {step.ranks.rank} of {step.ranks.world}"]


def header_facts(about: Headed) -> Facts:
    """What was analysed and for which machine."""
    step, target = about.step, about.target
    parts: list[str] = [step.mode]
    if step.mode == "train":
        parts += [f"loss: {step.loss or 'none'}", f"optimizer: {step.optimizer or 'none'}"]
        parts += [f"last of {step.accumulate} micro-batches"] if step.accumulate > 1 else []
        parts += ["zero_grad before backward"] if step.zero_grad == "before-backward" else []
        parts += ["set_to_none=False"] if not step.set_to_none else []
    parts += ["inference_mode"] if step.inference_mode else []
    parts += [*describe_autocast(step), *describe_rank(step)]
    card = [target.full_name] if target.full_name.lower() not in ("", target.name.lower()) else []
    card += ["sm_{}{}".format(*target.capability)] if target.capability else []
    card += [format_bytes(target.memory_bytes)] if target.memory_bytes is not None else []
    return _make_printable(
        [
            Fact("Model", about.model, "model"),
            Fact("Inputs", describe_inputs(about.inputs) or "none", "inputs"),
            Fact("Step", "; ".join(parts), "step"),
            Fact("Target", f"{target.name} ({', '.join(card)})" if card else target.name),
            Fact("Torch", f"{about.torch_version}; predicted by fxmem {about.fxmem_version}"),
        ]
    )


def compile_facts(about: Headed) -> Facts:
    """What the compiler decides by timing on the card, with the peaks of both answers; none where nothing is."""
    made = about.step.compiled
    if made is None or not made.timed:
        return []
    what = ", ".join(_describe_timed(question, group) for question, group in _timed_groups(made.timed))
    if made.lowest_peak_bytes is None or made.highest_peak_bytes is None:
        return [Fact("By timing", f"{what}. No other answer was tried")]
    peaks = format_range(made.lowest_peak_bytes, made.highest_peak_bytes)
    return [Fact("By timing", f"{what}. Peak with either answer: {peaks}")]


def _timed_groups(timed: Iterable[TimedChoice]) -> list[tuple[TimedQuestion, list[TimedChoice]]]:
    groups: dict[TimedQuestion, list[TimedChoice]] = {}
    for each in timed:
        groups.setdefault(each.question, []).append(each)
    return list(groups.items())


_TIMED: Final[dict[TimedQuestion, tuple[str, str]]] = {
    "padding": ("whether 1 matrix product is padded", "whether {} matrix products are padded"),
    "kernel": ("what kind of kernel computes 1 operator", "what kind of kernel computes {} operators"),
    "fusion": ("whether 1 pair of kernels is fused", "whether {} pairs of kernels are fused"),
}
"""What the compiler decides by timing: once, and more often."""


def _describe_timed(question: TimedQuestion, group: list[TimedChoice]) -> str:
    count = sum(each.count for each in group)
    one, more = _TIMED[question]
    taken = " and ".join(dict.fromkeys(printable(each.taken) for each in group))
    return f"{one if count == 1 else more.format(count)} ({taken} here)"


def loss_facts(profile: Profile) -> Facts:
    """What a loss would add to a step without one."""
    notes = [each.text for each in profile.assumptions if each.topic == "loss" and each.text.startswith(NO_LOSS)]
    return _make_printable([Fact("Note", note) for note in notes])


def program_facts(profile: Profile) -> Facts:
    """How a recorded program ran: its end, its rounds, what it was told. A generation's tokens. Nothing for others."""
    program = profile.step.program
    if program is None:
        return [] if profile.step.generation is None else _generation_facts(profile.step.generation)
    facts = [Fact("Run", program.ending)]
    if program.setup is not None:
        facts.append(Fact("Set-up", _describe_round(program.setup, "") + (_SHOWN if program.shown == 0 else "")))
    groups = equal_rounds(program)
    for each in groups:
        mark = _SHOWN if each.is_shown and len(groups) > 1 else ""
        facts.append(Fact(each.label, _describe_round(each.round) + mark))
    if program.steady is not None:
        growth = describe_growth(profile)
        facts.append(Fact("Steady", f"no: it {growth}" if growth else _STEADY[program.steady]))
    if program.files is not None and (program.files.written or program.files.native != "held"):
        facts.append(Fact("Files", _describe_files(program.files)))
    return _make_printable(facts)


_MOST_NAMED = 3
"""Files that are named; all others are counted."""


def _describe_files(files: ProgramFiles) -> str:
    """What became of the files that a program wrote."""
    counts = Counter(each.change for each in files.written)
    parts = [f"{counts[change]} {words}" for change, words in _CHANGES.items() if counts[change]]
    end = "dropped" if files.kept_in is None else f"kept in {files.kept_in}"
    names = [each.path for each in files.written[:_MOST_NAMED]] + ["..."] * (len(files.written) > _MOST_NAMED)
    found = f"{', '.join(parts)}, apart from yours and {end}: {', '.join(names)}" if parts else "none written"
    return found + _NATIVE[files.native]


_NATIVE: Final = {
    "held": "",
    "refused": "; what a library's own code or a child process writes is refused: only Python's own ways are held",
    "real": "; what a library's own code or a child process writes is real: only Python's own ways are held",
}
_CHANGES: Final[dict[FileChange, str]] = {"new": "written", "changed": "changed", "removed": "removed"}
"""By what became of a file, the word for it."""


def describe_generation(run: GenerationRun) -> str:
    """What is generated, and how, in a few words."""
    beams = f", {run.beams} beams" if run.beams > 1 else ""
    return f"{run.new_tokens} new tokens, {run.cache} cache{beams}"


def _generation_facts(run: GenerationRun) -> Facts:
    """What a generation takes in prefill and while decoding, and whether it fits."""
    facts = [
        Fact("Generation", f"{describe_generation(run)}; {run.recorded_tokens} recorded"),
        Fact("Prefill", describe_counts(run.prefill)),
    ]
    if run.decode is not None:
        facts.append(Fact("Decode", f"{describe_counts(run.decode)}; most alive at token {run.decode.token}"))
    if run.growth_bytes is not None:
        facts.append(Fact("Per token", f"the bytes alive grow by {exact_bytes(run.growth_bytes)}"))
    if run.fits is not None:
        last = run.last_token_that_fits
        words = "every token fits" if last is None else f"it runs out at token {last + 1} of {run.new_tokens}"
        back = f"; cached memory goes back to the driver {run.alloc_retries} times" if run.alloc_retries else ""
        facts.append(Fact("Fits", words + back))
    return facts


def describe_counts(peak: GenerationPeak | RankClass | Round) -> str:
    """The bytes in each count that is known."""
    counts = (
        (peak.requested_bytes, "requested"),
        (peak.allocated_bytes, "allocated"),
        (peak.reserved_bytes, "reserved"),
    )
    return ", ".join(f"{format_bytes(nbytes)} {name}" for nbytes, name in counts if nbytes is not None)


class EqualRounds(NamedTuple):
    """Rounds of a program that follow each other and are equal."""

    label: str
    round: Round
    is_shown: bool
    """Whether the profile is of one of them."""


def equal_rounds(program: ProgramRun) -> list[EqualRounds]:
    """A program's rounds, equal ones together: the first two, the last two, and the profile's."""
    groups = [list(same) for _, same in itertools.groupby(enumerate(program.rounds, 1), key=lambda each: each[1])]
    ends = {0, 1, len(groups) - 2, len(groups) - 1}
    found = []
    for index, group in enumerate(groups):
        numbers = [number for number, _ in group]
        if index in ends or program.shown in numbers:
            label = f"Step {numbers[0]}" if len(numbers) == 1 else f"Steps {numbers[0]}-{numbers[-1]}"
            if not group[0][1].is_whole and numbers[0] > 1:
                label = "Afterwards"
            found.append(EqualRounds(label, group[0][1], program.shown in numbers))
    return found


_SHOWN: Final = "; the table is of this one"
_STEADY = {
    True: "yes: the last two steps allocate the same",
    False: "no: the last two steps allocate differently; more steps (--steps, --until steady) may be higher",
}


def describe_growth(profile: Profile) -> str:
    """By how much a program grows with each step, and until when; empty where it does not."""
    program, memory = profile.step.program, profile.target.memory_bytes
    if program is None or not program.growth_bytes:
        return ""
    words, last = f"grows by {program.growth_bytes:,} bytes a step", program.steps[-1]
    if memory is None or last.allocated_bytes is None:
        return words
    left = (memory - last.allocated_bytes) // DEFAULT_SETTINGS.round_size(program.growth_bytes)
    return f"{words}, out of memory at about step {len(program.steps) + left + 1:,}"


def _describe_round(about: Round, phase: str | None = None) -> str:
    where = f"in {about.phase} " if phase is None else phase
    return f"{describe_counts(about)}, {where}{f'at {about.place}' if about.place else ''}".strip().removesuffix(",")


def made_up(profile: Profile) -> list[str]:
    """What a recorded program was told that no card had computed, one sentence each."""
    program = profile.step.program
    found = []
    for each in () if program is None else program.made_up:
        times = f", {each.count} times" if each.count > 1 else ""
        found.append(printable(f"{_MADE_UP[each.kind]}: {each.what}{f' at {each.place}' if each.place else ''}{times}"))
    return found


_MADE_UP = {
    "read": "a number read back",
    "decided": "a decision by a made-up number",
    "shape": "a shape that hangs on data, at its largest",
    "file": "a file",
    "answered": "an answer",
    "sent": "not sent",
}


def peak_facts(profile: Profile, peak: Peak) -> Facts:
    """How high the peak is, in every count that is known, and where it falls."""
    facts = [
        Fact(
            "Peak",
            f"{exact_bytes(peak.requested_bytes)} requested at once, {profile.step.describe_phase(peak.phase)}",
            "peak",
        )
    ]
    for label, nbytes, meaning in (
        ("Allocated", peak.allocated_bytes, "in the allocator's blocks (torch.cuda.max_memory_allocated)"),
        ("Reserved", peak.reserved_bytes, "held by the allocator (torch.cuda.max_memory_reserved)"),
    ):
        if nbytes is not None:
            facts.append(Fact(label, f"{exact_bytes(nbytes)} {meaning}", label.lower()))
    if peak.reserved_high_bytes is not None:
        most = exact_bytes(peak.reserved_high_bytes)
        facts.append(Fact("", f"{most} where blocks wait for a stream as long as they can", "reserved most"))
    if (process := peak.process_bytes) is not None:
        size = format_range(process.low, process.high)
        facts.append(
            Fact("Process", f"{size} with the CUDA context (nvidia-smi), a range: {process.grounds}", "process")
        )
    if peak.op is None:
        return [*facts, Fact("Where", "before the first operator", "where")]
    op = profile.ops[peak.op]
    node = profile.nodes[op.node]
    facts.append(
        Fact("Where", f"{describe(node)}, {'during' if op.begin <= peak.tick < op.end else 'after'} {op.name}", "where")
    )
    if node.source is not None:
        facts.append(Fact("", node.source.place + (f": {node.source.code}" if node.source.code else ""), "where"))
    return _make_printable(facts)


def total_facts(profile: Profile) -> Facts:
    """Sums over the whole step."""
    model = sum_figures(node for node in profile.nodes if node.op != "optimizer")
    if profile.step.mode == "infer":
        return [Fact("FLOPs", f"{flops_sum(model.forward)} (1 multiply-add = 2)", "flops"), *_time_facts(profile)]
    optimizer = [flops_sum(sum_figures([node]).forward) for node in profile.nodes if node.op == "optimizer"]
    counts = [
        f"{flops_sum(model.forward)} forward",
        f"{flops_sum(model.backward)} backward",
        *(f"{count} optimizer" for count in optimizer),
    ]
    return [
        Fact("Saved", f"{exact_bytes(profile.saved_bytes)} kept for backward when forward ends", "saved"),
        Fact("FLOPs", f"{', '.join(counts)} (1 multiply-add = 2)", "flops"),
        *_time_facts(profile),
    ]


def _time_facts(profile: Profile) -> Facts:
    time = estimate(profile)
    if time is None:
        return []
    which = f"; of the last of {profile.step.accumulate} micro-batches" if profile.step.accumulate > 1 else ""
    text = format_seconds(time.seconds, time.low_seconds, time.high_seconds)
    return [Fact("Time", f"{text} on {printable(profile.target.name)}, estimated{which}")]


@dataclass(frozen=True)
class Fit:
    """Whether a step fits its target and keeps a budget, and how that was found."""

    is_fitting: bool | None
    """None where the target's memory is not known, or the program did not get so far."""
    verdict: str
    """In a few words, with the bytes."""
    shortage: str = ""
    """Where it runs out; empty when it fits, or where the allocator is not replayed."""
    counted: str = ""
    """What the bytes count, and what they do not."""
    keeps_budget: bool | None = None
    """None without a budget."""
    is_failed: bool = False
    """Whether an error of its own ended the program."""
    is_growing: bool = False
    """Whether the program takes more with each step."""

    @property
    def exit_code(self) -> int:
        """1: a program's own error; 4: a card or a budget that is too small; else 0."""
        return 1 if self.is_failed else 4 if False in (self.is_fitting, self.keeps_budget) else 0


def find_fit(profile: Profile, peak: Peak, budget: Budget | None = None) -> Fit:
    """Compare the step with the target's memory, and with a budget if one is given.

    Where the allocator was replayed, its answer; else requested bytes are compared, a lower bound: not fitting is then
    certain, fitting is not.
    """
    program, growth, keeps = profile.step.program, describe_growth(profile), None
    is_failed = program is not None and program.failed
    is_fitting, verdict = _compare_with_target(profile, peak)
    if is_fitting is not None:
        until = " until then" if is_failed else " so far" if growth else ""
        verdict = f"{f'fits{until}' if is_fitting else 'does NOT fit'}: {verdict}"
    if growth:
        verdict = f"{growth}; {verdict}"
    if program is not None and is_failed:
        is_fitting, verdict = None, f"not known: the program {program.ending}; {verdict}"
    if budget is not None:
        keeps = budget.keeps(profile, peak)
        verdict = f"{_describe_budget(peak, budget, keeps=keeps)}; {verdict}"
    missing = describe_uncounted([profile.target])
    if peak.fits is None:
        counted = f"requested bytes; not counted: the allocator's rounding and fragmentation, {missing}"
    else:
        counted = f"what the allocator reserves; not counted: {missing}"
    counted = "" if profile.target.memory_bytes is None else f"Counted: {counted}"
    return Fit(is_fitting, printable(verdict), printable(peak.shortage), counted, keeps, is_failed, bool(growth))


def _compare_with_target(profile: Profile, peak: Peak) -> tuple[bool | None, str]:
    memory, name = profile.target.memory_bytes, profile.target.name
    if memory is None:
        return None, f"not compared, because the memory of target {name} is not known"
    nbytes = peak.requested_bytes if peak.fits is None or peak.reserved_bytes is None else peak.reserved_bytes
    is_fitting = nbytes <= memory if peak.fits is None else peak.fits
    nbytes = min(nbytes, memory) if is_fitting else nbytes  # cached blocks go back to the driver where it asks for them
    least = "at least " if peak.at_least else ""
    return is_fitting, f"{least}{format_bytes(nbytes)} of {format_bytes(memory)} on {name}, {percent(nbytes, memory)}"


def _describe_budget(peak: Peak, budget: Budget, *, keeps: bool) -> str:
    """The budget, and the number that decides: allocated bytes, or reserved ones where their pieces are too small."""
    used, word = peak.counted_bytes, "requested" if peak.allocated_bytes is None else "allocated"
    if not keeps and used <= budget.nbytes and peak.reserved_bytes is not None:
        used, word = peak.reserved_bytes, "reserved"
    verb = "keeps" if keeps else "does NOT keep"
    limit = format_bytes(budget.nbytes)
    return f"{verb} the budget of {limit}: {format_bytes(used)} {word}, {percent(used, budget.nbytes)}"


def fits(profile: Profile, peak: Peak) -> tuple[bool | None, str]:
    """Whether the step fits the target's memory (None where that is not known), and a sentence about it."""
    found = find_fit(profile, peak)
    sentences = [found.verdict, *filter(None, [found.shortage, found.counted])]
    return found.is_fitting, ". ".join(sentences)


def describe_peak(profile: Profile, peak: Peak) -> list[str]:
    """How high the peak is and where it falls, in a line: in full, then shorter."""
    nbytes, counted = peak.counted_bytes, "requested" if peak.allocated_bytes is None else "allocated"
    if peak.at_least:  # what it was refused is in the verdict
        nbytes, counted = peak.requested_bytes, "requested until then"
    size = format_bytes(nbytes)
    if peak.op is None:
        return [f"{size} before the first operator"]
    node = profile.nodes[profile.ops[peak.op].node]
    where = printable(f"{profile.step.describe_phase(peak.phase)} at {describe(node)}")
    if node.source is None:
        return [f"{size} {counted}, {where}", f"{size} {where}"]
    place = printable(node.source.place)
    line = f"{size} {where}, {place.replace(chr(92), '/').rpartition('/')[2]}"
    return [f"{size} {counted}, {where}, {place}", line]


def split(peak: Peak) -> list[KindShare]:
    """The kinds alive at the peak, largest first."""
    kinds = sorted(peak.by_kind, key=lambda kind: (-peak.by_kind[kind], list(Kind).index(kind)))
    return [KindShare(kind, peak.by_kind[kind], percent(peak.by_kind[kind], peak.requested_bytes)) for kind in kinds]


def largest_alive(profile: Profile, timeline: Timeline, count: int = 8) -> list[LargeTensor]:
    """The largest storages alive at the peak; those alike are one row."""
    groups: dict[tuple[object, ...], list[Storage]] = {}
    for index in timeline.alive:
        storage = profile.storages[index]
        source = None if storage.node is None else profile.nodes[storage.node].source
        place = None if source is None else (source.file, source.line)
        groups.setdefault((storage.nbytes, storage.kind, storage.shape, storage.dtype, place), []).append(storage)
    return [_large_tensor(profile, alike) for alike in list(groups.values())[:count]]


def assumptions(profile: Profile) -> list[str]:
    """What was taken for granted, one sentence each."""
    return [printable(f"{assumption.topic}: {assumption.text}") for assumption in profile.assumptions]


def unknowns(profile: Profile) -> list[str]:
    """What could not be counted, one phrase each."""
    return [
        printable(f"{unknown.topic}: {unknown.what}" + (f" ({unknown.count} times)" if unknown.count > 1 else ""))
        for unknown in profile.unknowns
    ]


def flops_sum(flops: Flops) -> str:
    """A sum of FLOPs; `>=` in front if some calls have no formula, `unknown` if nothing else is in it."""
    if flops.unknown_calls and not flops.known:
        return "unknown"
    return (">=" if flops.unknown_calls else "") + format_flops(flops.known)


def _large_tensor(profile: Profile, alike: list[Storage]) -> LargeTensor:
    storage = alike[0]
    node = None if storage.node is None else profile.nodes[storage.node]
    return LargeTensor(
        nbytes=storage.nbytes,
        kind=storage.kind,
        tensor=printable(f"{format_shape(storage.shape)} {storage.dtype}") if storage.dtype else "no tensor",
        owner=printable(storage.name or ("of no node" if node is None else describe(node))),
        source="" if node is None or node.source is None else printable(node.source.place),
        others=len(alike) - 1,
    )


def _make_printable(facts: Facts) -> Facts:
    return [replace(fact, text=printable(fact.text)) for fact in facts]


def describe_inputs(inputs: Iterable[InputTensor]) -> str:
    """Names, shapes and dtypes of a step's inputs."""
    return "; ".join(f"{each.name} {format_shape(each.shape)} {each.dtype}" for each in inputs)
