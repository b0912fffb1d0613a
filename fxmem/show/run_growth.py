"""What a run keeps more of after each step, and what it takes of the host, in words."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.memory.forecast import forecast, is_proved
from fxmem.records.parts import ANEW, ONLY_TORCH, EvaluationPass, Growth, HostUse, find_large
from fxmem.records.profile import Profile, ProgramRun, Step
from fxmem.records.units import format_bytes, format_shape, percent, printable
from fxmem.show.sections import Fact, Facts, make_printable

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
        sooner = [each for each in program.schedules if not each.counter and 0 < (each.every or 0) < step]
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
    """A line for each place that calls a model and has not run: the verdict does not know what it takes."""
    lines = [
        f"{each.calls} calls a model and did not run: "
        + (
            f"it comes after the steps, at {each.place}; --until end runs it"
            if each.every is None
            else f"{each.place} does it every {each.every:,} steps; --steps {each.every + 2} runs it"
            if not each.counter
            else f"{each.place} does it every {each.every:,} of `{each.counter}`, which does not count steps; --until "
            "end runs it"
        )
        for each in program.schedules
        if each.calls
    ]
    return make_printable([Fact("" if index else "Not run", line) for index, line in enumerate(lines)])


def evaluation_facts(program: ProgramRun) -> Facts:
    """A line for each pass that follows the epoch: its batches, and what each of them leaves."""
    lines = [_describe_evaluation(each) for each in program.evaluations]
    return make_printable([Fact("" if index else "Evaluation", line) for index, line in enumerate(lines)])


def _describe_evaluation(about: EvaluationPass) -> str:
    """`eval.py:21: 5 of 100 batches ran; 1,024,000 bytes more a batch (eval.py:23 keeps preds), 290 MiB at its end`."""
    of = "" if about.batches is None else f" of {about.batches:,}"
    words = f"{about.place}: {about.ran:,}{of} batches ran"
    if not about.growth_bytes:
        return words
    keeper = f" ({_describe_keeper(about.grown[0])})" if about.grown else ""
    words += f"; {about.growth_bytes:,} bytes more a batch{keeper}"
    if about.end_bytes is not None:
        words += f", {format_bytes(about.end_bytes)} at its end"
        cached = about.reserved_bytes is not None and about.reserved_bytes > about.end_bytes
        words += f", {format_bytes(about.reserved_bytes)} reserved" if cached else ""
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
    return f"{grown.kept_at} keeps {grown.holder}" if grown.kept_at else f"kept by {grown.holder or ONLY_TORCH}"


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
