"""How a step ran, as facts: its rank, what the compiler chose, the rounds of its program, its generation."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fxmem.hardware.catalogue import bytes_per_second
from fxmem.hardware.context import format_range
from fxmem.memory.forecast import forecast, is_proved
from fxmem.memory.liveness import live_bytes
from fxmem.records.parts import (
    ANEW,
    EngineUse,
    EvaluationPass,
    GenerationPeak,
    GenerationRun,
    Growth,
    HostUse,
    LongestBatch,
    RankClass,
    RankedStep,
    Schedule,
    TimedChoice,
    find_large,
)
from fxmem.records.profile import (
    FileChange,
    Headed,
    Kind,
    PartOfRound,
    Phase,
    Profile,
    ProgramFiles,
    ProgramRun,
    Round,
    Step,
)
from fxmem.records.units import REAL_VALUES, TimedQuestion, exact_bytes, format_bytes, format_shape, percent, printable
from fxmem.show.sections import Fact, Facts, make_printable

# --- what a run keeps more of after each step, and what it takes of the host, in words --------------------------------


_MOST_GROWING = 3
"""Owners that grow that have a line of their own."""
_WORTH_SAYING = 100
"""What workers may copy is said where it is one part of so many of the peak."""
_MORE_STEPS = 200
"""To run where it is not known whether a growth goes on."""


# --- growth ---------------------------------------------------------------------------------------------------------


def describe_growth(profile: Profile, *, has_run_out: bool = False) -> str:
    """By how much a program grows with each step, and until when; empty where it does not.

    Args:
        profile: of the program.
        has_run_out: whether it has run out of memory.
    """
    program = profile.step.program
    if program is None or not program.growth_bytes:
        return ""
    keeper = f" ({_describe_keeper(program.grown[0])})" if program.grown else ""
    words, ahead = f"grows by {program.growth_bytes:,} bytes a step{keeper}", forecast(profile)
    if has_run_out:
        return f"{words}, out of memory in step {len(program.rounds):,}"
    if not is_proved(program.growth_bytes, program.grown):
        return _describe_unproved(program, program.growth_bytes, keeper)
    if ahead is None:
        return words
    step, alive = ahead.points[-1]
    if ahead.is_full:
        sooner = [each for each in program.schedules if not (each.counter or each.ran) and 0 < (each.every or 0) < step]
        by = f", or sooner in what {sooner[0].place} does every {sooner[0].every:,}" if sooner else ""
        return f"{words}, out of memory at about step {step:,}{by}"
    return f"{words} until step {step:,}, to {format_bytes(alive)}"


def _describe_unproved(program: ProgramRun, growth_bytes: int, keeper: str) -> str:
    """What was seen of a growth of which nobody knows whether it goes on."""
    last = len(program.steps)
    first = max([2, *(each.since for each in program.grown[:1])])
    of = "the mean" if program.grown and program.grown[0].every > 1 else "each"
    seen = f"in {of} of {last - first + 1} steps" if last > first else "in a step"
    words, emptied = f"grew by {growth_bytes:,} bytes {seen}{keeper}", [each.emptied for each in program.grown]
    if emptied and None not in emptied:
        return f"{words}, and has had more: it was emptied in step {emptied[0]:,}"
    more = f"--steps {_MORE_STEPS if last < _MORE_STEPS else 4 * last}"
    return f"{words}; whether it goes on was not seen: {more}"


def growth_facts(step: Step) -> Facts:
    """Who keeps more after each step, the most first, and the sum of the rest."""
    program = step.program
    if program is None:
        return []
    return [
        *_grown_facts(program.grown),
        *_grown_facts(program.grown_anew, of_each=ANEW),
        *_grown_facts(() if program.host is None else program.host.grown, " of host memory"),
    ]


def later_facts(program: ProgramRun) -> Facts:
    """A line for each place that was brought forward, and for each that calls a model or saves and has not run: the
    verdict does not know what it takes."""
    ran = [_describe_taken(each) for each in program.schedules if each.ran]
    left = [_describe_left(each) for each in program.schedules if (each.calls or each.saves) and not each.ran]
    return make_printable([*_list_facts("Later", ran), *_list_facts("Not run", left)])


def _list_facts(label: str, lines: Sequence[str]) -> Facts:
    """A fact for each line, of which the first has the label."""
    return [Fact("" if index else label, line) for index, line in enumerate(lines)]


def _describe_left(of: Schedule) -> str:
    """What did not run, where it is done, and how it is run."""
    if of.every is None:
        where = f"it comes after the steps, at {of.place}; --until end runs it"
    elif of.counter:
        counted = f"{of.every:,} of `{of.counter}`, which does not count steps"
        where = f"{of.place} does it every {counted}; --until end runs it"
    else:
        where = f"{of.place} does it every {of.every:,} steps; --steps {of.every + 2} runs it"
    return f"{of.calls or of.saves} {'calls a model' if of.calls else 'saves'} and did not run: {where}"


def _describe_taken(of: Schedule) -> str:
    """`train.py:88 saves every 500 steps: 71.2 GiB requested`, of what was brought forward."""
    does = " and ".join([*(["calls a model"] if of.calls else []), *(["saves"] if of.saves else [])])
    counted = f"of `{of.counter}`" if of.counter else "steps"
    once = "once" if of.at is None else f"where `{of.counter}` comes to {of.at:,}"
    when = f"every {of.every:,} {counted}" if of.every else once
    most = "" if of.requested_bytes is None else f": {format_bytes(of.requested_bytes)} requested"
    if not does:
        return f"{of.place} changes how it trains {when}; the step after it{most}"
    return f"{of.saves or of.calls} {does} {when}{most}"


def evaluation_facts(program: ProgramRun) -> Facts:
    """A line for each pass that follows the epoch, or loop that trains nothing: its batches, and what each leaves."""
    labels = ["Loop" if each.is_loop else "Evaluation" for each in program.evaluations]
    rows = zip(["", *labels], labels, map(_describe_evaluation, program.evaluations), strict=False)
    return make_printable([Fact("" if label == before else label, line) for before, label, line in rows])


def _describe_evaluation(about: EvaluationPass) -> str:
    """`eval.py:21: 5 of 100 batches ran; 1,024,000 bytes more a batch (eval.py:23 keeps preds), 290 MiB at its end`."""
    words = f"{about.place}: {about.share} ran"
    if not about.growth_bytes:
        return words
    keeper = f" ({_describe_keeper(about.grown[0])})" if about.grown else ""
    ends = [each.until for each in about.grown if each.until is not None]
    until = f" until {about.of} {max(ends):,}" if len(ends) == len(about.grown) > 0 else ""
    words += f"; {about.growth_bytes:,} bytes more a {about.of}{keeper}{until}"
    if about.end_bytes is not None:
        words += f", {format_bytes(about.end_bytes)} at its end"
        cached = about.reserved_bytes is not None and about.reserved_bytes > about.end_bytes
        words += f", {format_bytes(about.reserved_bytes)} reserved" if cached else ""
    elif not about.is_proved and about.is_carried_on:
        words += "; whether it goes on was not seen"
    return f"{words}; --until end runs what is made of them, too" if about.is_carried_on else words


def _grown_facts(grown: Sequence[Growth], of: str = "", of_each: str = "a step") -> Facts:
    found: Facts = []
    large = find_large(grown)[:_MOST_GROWING]
    for each in large:
        often = of_each if each.every == 1 else f"at least every {each.every} steps"
        tensors = "one tensor" if not each.tensors else f"{each.tensors} tensor{'s' * (each.tensors != 1)} {often}"
        largest = f"{format_shape(each.shape)} {each.dtype}" + (f" of {each.made_at}" if each.made_at else "")
        since = "" if each.since == 1 or of_each == ANEW else f", from step {each.since} on"
        until = "" if each.last is None else f", until step {each.last:,}"
        until += " at the latest" if until and each.until is None and not each.is_endless else ""
        much = f"{each.nbytes:,} bytes{of} {of_each}"
        until += "" if each.emptied is None else f", last emptied in step {each.emptied:,}"
        what = f"{much}, {_describe_keeper(each)}: {tensors}, the largest {largest}{since}{until}"
        found.append(Fact("" if found else "Grows", what, "grows"))
    if rest := grown[len(large) :]:
        others = f"{len(rest)} other{'s' * (len(rest) > 1)}"
        found.append(Fact("", f"{sum(each.nbytes for each in rest):,} bytes{of} {of_each} of {others}", "grows"))
    return make_printable(found)


def _describe_keeper(grown: Growth) -> str:
    """Who keeps it, and on which line."""
    return f"{grown.kept_at} keeps {grown.keeper}" if grown.kept_at else f"kept by {grown.keeper}"


# --- the host ---------------------------------------------------------------------------------------------------------


def describe_host(host: HostUse) -> str:
    """The most that a program had of the host's memory, where, and of what; empty where that is not known."""
    if host.peak_bytes is None:
        return ""
    place = printable(f"{host.call} ({host.place})" if host.call and host.place else host.place or host.call)
    limit = "" if host.limit_bytes is None else f" of {format_bytes(host.limit_bytes)}"
    parts = [f"{format_bytes(host.peak_bytes)}{limit}{f' at {place}' if place else ''}"]
    if host.workers:
        size = format_bytes(host.workers_bytes // host.workers)
        each = f": {size}" if host.workers == 1 else f"s: {format_bytes(host.workers_bytes)}, {size} each"
        parts.append(f"{host.workers} worker{each}")
    if host.copied_bytes is None:
        parts.append("what workers copy of their dataset as they read it is not known")
    elif host.copied_bytes * _WORTH_SAYING >= host.peak_bytes:
        most = format_bytes(host.workers_bytes + host.copied_bytes)
        parts.append(f"{'workers: ' if not host.workers else ''}up to {most} when each has read all of its dataset")
    if host.worker_adds_bytes is not None:
        adds = format_bytes(host.worker_adds_bytes)
        parts.append(f"one more adds {adds}, the most that one had and the batches that it loads ahead")
    counted = {"pinned": host.pinned_bytes, "batches in shared memory": host.batches_bytes}
    parts += [f"{name} {format_bytes(nbytes)}" for name, nbytes in counted.items() if nbytes]
    if host.pretended_bytes:
        parts.append(f"{format_bytes(host.pretended_bytes)} of it pretended here")
    return "; ".join(parts)


def describe_host_growth(program: ProgramRun) -> str:
    """By how much what is kept on the host grows with each step, and when the host is full; empty where it does not."""
    host = program.host
    if host is None or not host.growth_bytes:
        return ""
    keeper = f" ({_describe_keeper(host.grown[0])})" if host.grown else ""
    words = f"the host's memory grows by {host.growth_bytes:,} bytes a step{keeper}"
    if host.limit_bytes is None or host.after_bytes is None or host.fits is False:
        return words
    left, ends = max(host.limit_bytes - host.after_bytes, 0), [each.last for each in host.grown]
    full = len(program.steps) + 1 + left // host.growth_bytes
    if not is_proved(host.growth_bytes, host.grown) or not any(each is None or each >= full for each in ends):
        return words
    return f"{words}, out of host memory at about step {full:,}"


def compare_with_host(host: HostUse) -> str:
    """Whether the host is too small, or what it has to hold is not known."""
    if host.peak_bytes is None or host.limit_bytes is None:
        return "what it takes of the host is not known: this system does not say"
    if host.is_open:
        span = f"between {format_bytes(host.peak_bytes)} and at most {format_bytes(host.most_bytes)}"
        return f"not known to fit the host: {span} of {format_bytes(host.limit_bytes)}, as workers copy what they read"
    if not host.fits:
        return f"does NOT fit the host: {describe_host(host)}"
    share = percent(host.peak_bytes, host.limit_bytes)
    so_far = " so far" if host.growth_bytes else ""
    return f"fits the host{so_far}: {format_bytes(host.peak_bytes)} of {format_bytes(host.limit_bytes)}, {share}"


# --- how a step ran, as facts: its rank, what the compiler chose, the rounds of its program, its generation -----------


def run_facts(profile: Profile) -> Facts:
    """How the step ran; nothing for an eager step with a loss on one card."""
    return [*rank_facts(profile), *compile_facts(profile), *program_facts(profile), *_notes(profile)]


def rank_facts(about: Headed) -> Facts:
    """The rank's place, and a line for each group that it communicates in; none for one card alone."""
    ranks = about.step.ranks
    if ranks is None:
        return []
    facts = [Fact("Rank", f"{ranks.rank} of {ranks.world} (simulated; no other process runs)")]
    for each in ranks.classes:
        label = f"Rank {each.first}" if each.size == 1 else f"Ranks {each.first}-{each.last}"
        facts.append(Fact(label, _describe_class(each, ranks)))
    for index, group in enumerate(ranks.groups):
        moved = [each for each in ranks.collectives if each.group == index]
        nbytes = sum(each.moved_bytes for each in moved)
        kinds = ", ".join(f"{each.count} {each.kind}" for each in moved)
        rate = bytes_per_second(about.target, group)
        time = "" if rate is None else f", {1e3 * nbytes / rate:.3g} ms at {rate / 1e9:.0f} GB/s"
        name = "all ranks" if group.name == "all ranks" else printable(f"{group.name} of {group.size}")
        which = "a step" if _shows_step(about) else "within what the table is of,"
        facts.append(Fact("" if index else "Sends", f"{name}: {format_bytes(nbytes)} {which} in {kinds}{time}"))
    if ranks.host_bytes:
        what = f"{format_bytes(ranks.host_bytes)} a rank: parameters, gradients and optimizer state"
        facts.append(Fact("Host", what))
    return facts


def _shows_step(about: Headed) -> bool:
    """Whether the round that the profile is of is a step, and nothing beside it."""
    program = about.step.program
    return program is None or not 0 < program.shown <= len(program.rounds) or program.rounds[program.shown - 1].is_whole


def _describe_class(members: RankClass, ranks: RankedStep) -> str:
    """What the ranks of a class take, and what shows that they are equal."""
    parts = [describe_counts(members)]
    if members.fits is False:
        parts.append("does not fit")
    if members.size > 1:
        spread = f"{members.size} of them, " if members.size <= members.last - members.first else ""
        *most, last = map(str, [members.first, *members.compared])
        parts.append(f"{spread}{', '.join(most)}{' and ' if most else ''}{last} compared")
    mark = _SHOWN if members.first == ranks.rank and len(ranks.classes) > 1 else ""
    return ", ".join(parts) + mark


def compile_facts(about: Headed) -> Facts:
    """What the compiler decides by timing on the card, with the peaks of both answers; none where nothing is."""
    made = about.step.compiled
    if made is None or not made.timed:
        return []
    questions = dict.fromkeys(each.question for each in made.timed)
    what = ", ".join(_describe_timed([each for each in made.timed if each.question == asked]) for asked in questions)
    if made.lowest_peak_bytes is None or made.highest_peak_bytes is None:
        return [Fact("By timing", f"{what}. No other answer was tried")]
    peaks = format_range(made.lowest_peak_bytes, made.highest_peak_bytes)
    return [Fact("By timing", f"{what}. Peak with either answer: {peaks}")]


_TIMED: Final[dict[TimedQuestion, tuple[str, str]]] = {
    "padding": ("whether 1 matrix product is padded", "whether {} matrix products are padded"),
    "kernel": ("what kind of kernel computes 1 operator", "what kind of kernel computes {} operators"),
    "fusion": ("whether 1 pair of kernels is fused", "whether {} pairs of kernels are fused"),
}
"""What the compiler decides by timing: once, and more often."""


def _describe_timed(group: list[TimedChoice]) -> str:
    count = sum(each.count for each in group)
    one, more = _TIMED[group[0].question]
    taken = " and ".join(dict.fromkeys(printable(each.taken) for each in group))
    return f"{one if count == 1 else more.format(count)} ({taken} here)"


def _notes(profile: Profile) -> Facts:
    """What a loss would add to a step without one, and on which values the step hangs."""
    values = [each for each in profile.assumptions if each.text.startswith(REAL_VALUES)]
    return make_printable([Fact("Note", each.text) for each in (*profile.missing_loss, *values)])


def program_facts(profile: Profile) -> Facts:
    """How a recorded program ran: its end, its rounds, what it was told. A generation's tokens. Nothing for others."""
    program = profile.step.program
    if program is None:
        return [] if profile.step.generation is None else _generation_facts(profile.step.generation)
    phases = {phase for each in program.rounds for phase in each.phases}
    facts = [Fact("Run", program.ending + (", without a backward" if phases and Phase.BACKWARD not in phases else ""))]
    if (refused := program.refused) is not None:
        since = "it ran through" if refused.is_outlived else "nothing ran through"
        last = refused.last.removeprefix("It runs out ")
        facts.append(
            Fact("Refused", f"{refused.count:,}, whose errors the program caught; {since} after the last, {last}")
        )
    if program.setup is not None:
        setup = f"{describe_counts(program.setup)}{_SHOWN}" if not program.shown else _describe_round(program.setup, "")
        facts.append(Fact("Set-up", setup))
    groups = equal_rounds(program)
    for each in groups:
        if each.is_shown:  # where its peak falls, `Peak` says
            facts.append(Fact(each.label, describe_counts(each.round) + (_SHOWN if len(groups) > 1 else "")))
        else:
            facts.append(Fact(each.label, ("" if each.are_equal else "at most ") + _describe_round(each.round)))
    facts += [
        *_micro_batch_facts(profile),
        *_part_facts(program),
        *(Fact("Engine", _describe_engine(each)) for each in program.engines),
    ]
    if program.steady is not None:
        grows = f"no: it grows by {program.growth_bytes:,} bytes a step" if program.growth_bytes else ""
        facts.append(Fact("Steady", grows or _STEADY[program.steady]))
        facts += growth_facts(profile.step)
    facts += [*evaluation_facts(program), *later_facts(program), *longest_facts(profile)]
    if program.host is not None and (words := describe_host(program.host)):
        facts.append(Fact("Host", words, "host"))
    if program.files is not None and (program.files.written or program.files.native != "held"):
        facts.append(Fact("Files", _describe_files(program.files)))
    if program.network is not None and (program.network.was_refused or program.network.reach != "none"):
        facts.append(Fact("Network", _REACH[program.network.reach]))
    return make_printable(facts)


def _micro_batch_facts(profile: Profile) -> Facts:
    """What a step of one micro-batch would request, where the one that is shown has several that are alike."""
    backwards = [each for each in profile.phases if each.phase is Phase.BACKWARD and each.last_op > each.first_op]
    ran = [sorted({op.node for op in profile.ops[each.first_op : each.last_op]}) for each in backwards]
    kinds = {tuple(profile.nodes[node].target for node in nodes) for nodes in ran}
    gradients = (each for each in profile.storages if each.kind is Kind.GRADIENT and len(backwards) > 1)
    if len(kinds) > 1 or not any(each.birth < backwards[0].end < backwards[1].begin < each.death for each in gradients):
        return []
    live = live_bytes(profile)
    alone, most = map(format_bytes, (max(*live[: backwards[0].end], *live[backwards[-1].end :]), max(live)))
    return [Fact("Batches", f"{len(backwards)} micro-batches to a step, which requests {most}; one alone, {alone}")]


def _part_facts(program: ProgramRun) -> Facts:
    """The phases of the round that the profile is of, or of the last that has some, each with its own peak."""
    rounds = [(number, each) for number, each in enumerate(program.rounds, 1) if any(_parts_shown(each))]
    found = next((each for each in rounds if each[0] == program.shown), rounds[-1] if rounds else None)
    if found is None:
        return []
    parts = [*_parts_shown(found[1])]
    which = f"step {found[0]}{'' if found[0] == program.shown else ', which the table is not of'}"
    return _list_facts("Phases", [f"of {which}, each with its own peak", *_describe_parts(parts)])


def _parts_shown(of: Round) -> Iterator[PartOfRound]:
    """Those of a round that does more than a plain step, without what `Later` says."""
    yield from (each for each in of.parts if each.phase is not Phase.SAVE)


def _describe_parts(parts: Sequence[PartOfRound]) -> Iterator[str]:
    """A line for each; of the many models that a variable has had one after the other (`net_2`), for the largest."""
    alike: dict[str, list[PartOfRound]] = {}
    for each in parts:
        alike.setdefault(re.sub(r"_\d+$", "", each.title), []).append(each)
    for found in alike.values():
        largest = max(found, key=lambda each: each.requested_bytes)
        shown, of = (found, "") if len(found) <= _MOST_NAMED else ([largest], f", the largest of {len(found)} alike")
        yield from (f"{each.title}{of}: {describe_counts(each)}" for each in shown)


def _describe_engine(use: EngineUse) -> str:
    """What a serving engine takes of the card, and how large its share may be."""
    terms = {"weights": use.weights_bytes, "keys and values": use.kv_bytes, "profile run": use.profile_peak_bytes}
    taken = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items())
    most = "" if use.most_utilization is None else f", {use.most_utilization:.3f} would fit"
    slept = f"put to sleep {use.sleeps} times, at level {use.level}" if use.sleeps else "never asleep"
    return f"{use.name} at {use.place}: {taken}; gpu_memory_utilization {use.utilization}{most}; {slept}"


_MOST_NAMED = 3
"""Files, or phases of models alike, that are named; all others are counted."""


def _describe_files(files: ProgramFiles) -> str:
    """What became of the files that a program wrote."""
    counts = Counter(each.change for each in files.written)
    parts = [f"{counts[change]} {words}" for change, words in _CHANGES.items() if counts[change]]
    end = "dropped" if files.kept_in is None else f"kept in {files.kept_in}"
    names = [each.path for each in files.written[:_MOST_NAMED]] + ["..."] * (len(files.written) > _MOST_NAMED)
    found = f"{', '.join(parts)}, apart from yours and {end}: {', '.join(names)}" if parts else "none written"
    return found + _NATIVE[files.native]


_REACH: Final = {
    "none": "refused to a process or library that looked for it, besides downloads by Python's own libraries of HTTP",
    "udp": "connections are refused, but for downloads by Python's own libraries of HTTP; datagrams are sent",
    "python": "only what Python's own libraries send is held; a child process reaches what it likes",
}
"""What the program's processes reach."""
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
    facts = [Fact("Generation", f"{describe_generation(run)}; {run.recorded_tokens} recorded")]
    facts.append(Fact("Prefill", describe_counts(run.prefill)))
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


def describe_counts(peak: GenerationPeak | RankClass | Round | PartOfRound) -> str:
    """The bytes in each count that is known."""
    counts = {"requested": peak.requested_bytes, "allocated": peak.allocated_bytes, "reserved": peak.reserved_bytes}
    return ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in counts.items() if nbytes is not None)


class EqualRounds(NamedTuple):
    """Rounds of a program that follow each other and are equal, or the highest of several that are not."""

    label: str
    round: Round
    is_shown: bool
    """Whether the profile is of one of them."""
    are_equal: bool = True


def equal_rounds(program: ProgramRun) -> list[EqualRounds]:
    """A program's rounds, equal ones together: the first two, the last two, the profile's, and those between as one."""
    groups = [list(same) for _, same in itertools.groupby(enumerate(program.rounds, 1), key=lambda each: each[1])]
    ends = {0, 1, len(groups) - 2, len(groups) - 1}
    found = []
    for is_alone, spans in itertools.groupby(
        enumerate(groups), key=lambda each: each[0] in ends or any(number == program.shown for number, _ in each[1])
    ):
        several = [group for _, group in spans]
        for span in several if is_alone else [list(itertools.chain.from_iterable(several))]:
            first, last = span[0][0], span[-1][0]
            label = f"Step {first}" if first == last else f"Steps {first}-{last}"
            if not span[0][1].is_whole and first > 1:
                label = "Afterwards"
            rounds = [each for _, each in span]
            are_equal = all(each == rounds[0] for each in rounds)
            found.append(EqualRounds(label, _find_most(rounds), first <= program.shown <= last, are_equal))
    return found


def _find_most(rounds: Sequence[Round]) -> Round:
    """The round that requests most, with the most that any of them allocates and reserves."""
    highest = max(rounds, key=lambda each: each.requested_bytes)
    counts = {name: [getattr(each, name) for each in rounds] for name in ("allocated_bytes", "reserved_bytes")}
    return highest.model_copy(update={name: max(found) for name, found in counts.items() if None not in found})


_SHOWN: Final = "; the table is of this one"
_STEADY = {
    True: "yes: a further step would be as the last",
    False: "no: the last two steps allocate differently; more steps (--steps, --until steady) may be higher",
}


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
    "shape": "a shape that depends on data, at the largest it can be",
    "file": "a file",
    "answered": "an answer",
    "sent": "not sent",
}


# --- the batch that decides and a long run over batches of varied lengths, in words -----------------------------------


_MOST_CHANGES = 4
"""Changes that are listed, of those that save something."""
_NEAR = 1.01
"""By what factor a peak is as good as another."""


def longest_facts(profile: Profile) -> list[Fact]:
    """The batch that decides, with its peak, and what a long run reserves; what changes would save."""
    program = profile.step.program
    longest = None if program is None else program.longest
    if longest is None:
        return []
    facts = [Fact("Longest", describe_longest(longest), "longest")]
    if longest.compared_bytes is not None:
        as_it_is = longest.compared_bytes
        better = [each for each in longest.changes if each.reserved_bytes < as_it_is][:_MOST_CHANGES]
        listed = [f"{each.change} {format_bytes(each.reserved_bytes)}" for each in better]
        over = "" if longest.compared_steps == longest.steps else f" after {longest.compared_steps:,} steps"
        facts.append(
            Fact("Options", f"reserved{over} {format_bytes(as_it_is)}; with {', '.join(listed) or 'no change less'}")
        )
    return facts


def describe_longest(longest: LongestBatch) -> str:
    """`batch 7,412 of 10,000 (train.py:30): 16x2031, peak 38.2 GiB; reserved after 10,000 steps 44.1 GiB`."""
    at = f" ({longest.place})" if longest.place else ""
    if not longest.batches:
        return f"not known: the loader{at} is not read, {longest.stopped}; batches have different lengths"
    of = f" of {longest.epochs} epochs" if longest.epochs > 1 else " read" if longest.stopped else ""
    words = f"batch {longest.number:,} of {longest.batches:,}{of}{at}: {format_shape(longest.shape)}"
    peak = longest.requested_bytes if longest.allocated_bytes is None else longest.allocated_bytes
    words += "" if peak is None else f", peak {format_bytes(peak)}"
    words += f", the most of {longest.ran} that were run" if longest.ran else ""
    if peak and (longest.most_bytes or 0) > _NEAR * peak:
        words += f"; another may need up to {format_bytes(longest.most_bytes or 0)}"
    if longest.epochs > 1:
        words += f"; about 1 batch in {longest.batches + 1:,} to come is longer than all of these"
    if longest.unproved:
        return f"{words}; no peak is known of lengths that were not run: {longest.unproved}"
    if longest.full_at is not None:
        words += f"; out of memory at step {longest.full_at:,}"
    elif longest.reserved_bytes is not None:
        words += f"; reserved after {longest.steps:,} steps {format_bytes(longest.reserved_bytes)}"
    return words + (f"; {longest.stopped}" if longest.stopped else "")
