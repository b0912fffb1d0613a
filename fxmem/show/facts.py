"""What a report has to say, in words and figures, before anything is laid out.

Shared by the text and the HTML report. Strings that come from the user's model are made printable here; escaping them
for a markup language is the layout's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fxmem.hardware.context import explain_room, format_range, room_bytes
from fxmem.hardware.step_time import estimate
from fxmem.memory.budget import Budget
from fxmem.memory.figures import Flops, find_place, find_place_of_peak, sum_figures
from fxmem.memory.forecast import forecast
from fxmem.memory.module_tree import describe
from fxmem.records.profile import Headed, InputTensor, Kind, Node, Peak, Profile, SourceLine, Step, Storage, Timeline
from fxmem.records.units import (
    BUCKET,
    OWN_LOSS,
    PLANS_BY_TIMING,
    exact_bytes,
    format_bytes,
    format_flops,
    format_seconds,
    format_shape,
    percent,
    printable,
    to_words,
)
from fxmem.show.run_facts import compare_with_host, describe_growth, describe_host_growth
from fxmem.show.sections import (
    Cell,
    Fact,
    Facts,
    Part,
    Table,
    TableColumn,
    Tone,
    join_parts,
    make_printable,
    make_table,
    numbers,
)


class KindShare(NamedTuple):
    """What one kind of storage contributes to the peak."""

    kind: Kind
    name: str
    """The kind in words."""
    nbytes: int
    percent: str


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
    def more(self) -> str:
        """What to say after the owner."""
        return f" and {self.others} alike" if self.others else ""


def autocast_parts(step: Step) -> list[Part]:
    """The step's autocast; nothing for a program, which may begin and end it anywhere."""
    is_program = step.program is not None or step.loss == OWN_LOSS
    return [] if is_program else [("autocast", step.precision or "off")]


def rank_parts(step: Step) -> list[Part]:
    """The rank that the step is of; nothing on one card alone."""
    return [] if step.ranks is None else [("", f"rank {step.ranks.rank} of {step.ranks.world}")]


def header_facts(about: Headed) -> Facts:
    """What was analysed and for which machine."""
    step, target = about.step, about.target
    settings: list[Part] = [("", step.mode)]
    if step.mode == "train":
        none = "none" if step.program is None else "none that stepped"
        settings += [("loss", step.loss or "none"), ("optimizer", step.optimizer or none)]
        settings += [("", f"last of {step.accumulate} micro-batches")] if step.accumulate > 1 else []
        settings += [("", "zero_grad before backward")] if step.zero_grad == "before-backward" else []
        settings += [("", "set_to_none=False")] if not step.set_to_none else []
    if step.keep_outputs is not None and step.keep_outputs != (step.mode == "train"):
        settings += [("", "outputs kept" if step.keep_outputs else "outputs not kept")]
    settings += [("", "inference_mode")] if step.inference_mode else []
    settings += [*autocast_parts(step), *rank_parts(step)]
    versions = [("", about.torch_version), ("", f"predicted by fxmem {about.fxmem_version}")]
    card = [target.full_name] if target.full_name.lower() not in ("", target.name.lower()) else []
    card += ["sm_{}{}".format(*target.capability)] if target.capability else []
    card += [format_bytes(target.memory_bytes)] if target.memory_bytes is not None else []
    facts = [
        Fact("Model", about.model, "model"),
        _list_fact("Inputs", [("", describe_inputs([each])) for each in about.inputs] or [("", "none")]),
        _list_fact("Step", settings),
        Fact("Target", f"{target.name} ({', '.join(card)})" if card else target.name),
        _list_fact("Torch", versions),
    ]
    return make_printable(facts)


def _list_fact(label: str, parts: Sequence[Part]) -> Fact:
    return Fact(label, join_parts(parts), label.lower(), parts=parts)


class PeakCount(NamedTuple):
    """The peak as one of the programs sees it that people compare it with."""

    label: str
    nbytes: int | None
    """None: not known."""
    meaning: str
    call: str = ""
    """What measures it."""
    low: int | None = None
    """Where it is a range, its lower end."""


def peak_counts(peak: Peak) -> tuple[PeakCount, ...]:
    """The peak in every count: requested, allocated, reserved, and the process's."""
    process = peak.process_bytes
    low, high = (None, None) if process is None else (process.low, process.high)
    beside = "with the CUDA context" + " and NCCL" * (process is not None and "NCCL" in process.grounds)
    return (
        PeakCount("Requested", peak.requested_bytes, "what the program asks for and holds at once"),
        PeakCount("Allocated", peak.allocated_bytes, "in the allocator's blocks", "torch.cuda.max_memory_allocated"),
        PeakCount("Reserved", peak.reserved_bytes, "held by the allocator", "torch.cuda.max_memory_reserved"),
        PeakCount("Process", high, beside, "nvidia-smi", low),
    )


def peak_facts(profile: Profile, peak: Peak) -> Facts:
    """How high the peak is, in every count that is known, and where it falls."""
    _, *counts, process = peak_counts(peak)
    when = profile.step.describe_phase(peak.phase)
    facts = [Fact("Peak", f"{exact_bytes(peak.requested_bytes)} requested at once, {when}", "peak")]
    for label, nbytes, meaning, call, _ in counts:
        if nbytes is not None:
            facts.append(Fact(label, f"{exact_bytes(nbytes)} {meaning} ({call})", label.lower()))
    if peak.reserved_high_bytes is not None:
        most = exact_bytes(peak.reserved_high_bytes)
        facts.append(Fact("", f"{most} where blocks wait for a stream as long as they can", "reserved most"))
    facts += plans_facts(profile, peak)
    if peak.process_bytes is not None:
        size = format_range(peak.process_bytes.low, peak.process_bytes.high)
        words = f"{size} {process.meaning} ({process.call}), a range: {peak.process_bytes.grounds}"
        facts.append(Fact(process.label, words, "process"))
    if peak.op is None:
        return [*facts, Fact("Where", "before the first operator", "where")]
    op = profile.ops[peak.op]
    node = profile.nodes[op.node]
    during = "during" if op.begin <= peak.tick < op.end else "after"
    facts.append(Fact("Where", f"{describe(node)}, {during} {op.name}", "where"))
    if node.source is not None:
        facts.append(Fact("", describe_source(node.source), "where"))
    return make_printable(facts)


_NEAR = 1.01
"""By what factor reserved bytes are as good as others."""


def plans_facts(profile: Profile, peak: Peak) -> Facts:
    """Between which bytes the peak is as the driver places segments, and with the plans of the cuDNNs that stand for
    the target's; nothing where either is known.

    Where cuDNN finds its plans by timing, how far from the peak others were: dcgan, pytorch-cifar,
    pytorch_resnet_cifar10 and cifar10-airbench (benchmarks/results/card-public-2026-11-28.md).
    """
    if any(each.what.startswith(PLANS_BY_TIMING) for each in profile.unknowns):
        words = (
            "cudnn.benchmark times all plans of a convolution at its first call; their workspaces may lift the peak of "
            "the first step: in four measured programs to 1.0, 1.5, 3 and 12 times the prediction"
        )
        return [Fact("Plans", words, "plans")]
    facts = []
    if peak.smaller_plans:
        kinds = f"{peak.smaller_plans} kind{'s' * (peak.smaller_plans > 1)} of convolution"
        words = f"fits as torch takes plans of cuDNN with a smaller workspace for {kinds}, for want of room"
        facts.append(Fact("Plans", words, "smaller plans"))
    if (upward := peak.upward) is not None and peak.reserved_bytes is not None:
        low, high = sorted((peak.reserved_bytes, upward.reserved_bytes))
        other = "fits" if upward.fits else "runs out of memory"
        out = f"; with each above the one before it {other}" if upward.fits is not peak.fits else ""
        if out or low * _NEAR < high:
            words = f"{format_range(low, high)} reserved, as the driver places them: not seen on this card{out}"
            facts.append(Fact("Segments", words, "segments"))
    if (between := peak.plans_range) is None:
        return facts
    versions = ", ".join(each.cudnn for each in peak.by_cudnn)
    words = f"{format_range(*between)} reserved with the plans of cuDNN {versions}"
    fitting = [each.cudnn for each in peak.by_cudnn if each.fits]
    if peak.fits is not None:
        some = f"fits with {', '.join(fitting)} only" if fitting else "fits with none of them"
        words += f": {'fits with any of them' if len(fitting) == len(peak.by_cudnn) else some}"
    return [*facts, Fact("Plans", words, "plans")]


def loop_facts(profile: Profile) -> Facts:
    """What the output and loss of the step before add to the peak, or would add; nothing where that is nothing."""
    step = profile.step
    if not step.outputs_bytes:
        return []
    adds = "adds" if step.keep_outputs else "would add"
    size = format_bytes(step.outputs_bytes)
    return [Fact("Loop", f"holding output and loss of the step before {adds} {size} to the peak", "loop")]


def total_facts(profile: Profile) -> Facts:
    """Sums over the whole step."""
    model = sum_figures(node for node in profile.nodes if node.op != "optimizer")
    facts, counts = [], flops_sum(model.forward)
    if profile.step.mode != "infer":
        facts.append(Fact("Saved", f"{exact_bytes(profile.saved_bytes)} kept for backward when forward ends", "saved"))
        counts += f" forward, {flops_sum(model.backward)} backward"
        optimizer = (sum_figures([node]).forward for node in profile.nodes if node.op == "optimizer")
        counts += "".join(f", {flops_sum(count)} optimizer" for count in optimizer)
    facts += loop_facts(profile)
    return [*facts, Fact("FLOPs", f"{counts} (1 multiply-add = 2)", "flops"), *_time_facts(profile)]


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
    """What the bytes count, and what of the card they may have."""
    keeps_budget: bool | None = None
    """None without a budget, and where that is not known."""
    is_failed: bool = False
    """Whether the program was ended by an error of its own, or within a step."""
    is_open: bool = False
    """Whether shapes that depend on data decide whether it fits, or keeps a budget."""
    is_host_open: bool = False
    """Whether what workers of loaders may copy decides whether it fits the host."""
    is_growing: bool = False
    """Whether the program takes more with each step."""
    fits_host: bool | None = None
    """Whether the program fits the host; None where no size of it was given, or what it takes is not known."""

    @property
    def exit_code(self) -> int:
        """1: a program's own error, or not known; 4: a card, a budget or a host that is too small; else 0."""
        if not self.is_failed and False in (self.is_fitting, self.keeps_budget, self.fits_host):
            return 4
        return int(self.is_failed or self.is_open or self.is_host_open)


_SLIGHT: Final = 1000
"""What a program keeps more until it ends comes after the verdict, where it is less than such a part of the peak."""


def find_fit(profile: Profile, peak: Peak, budget: Budget | None = None) -> Fit:
    """Compare the step with what a CUDA context leaves of the target's memory, and with a budget if one is given.

    Where the allocator was replayed, its answer; else requested bytes are compared, a lower bound: not fitting is then
    certain, fitting is not.
    """
    program, growth, keeps = profile.step.program, describe_growth(profile, has_run_out=peak.at_least), None
    is_failed = program is not None and (program.failed or program.is_cut)
    is_fitting, verdict = compare_with_target(profile, peak)
    ahead = forecast(profile) if growth else None
    to_come = 0 if ahead is None else ahead.points[-1][1] - ahead.points[0][1]
    is_slight = ahead is not None and not ahead.is_full and to_come * _SLIGHT < peak.counted_bytes
    if budget is not None:
        keeps = budget.keeps(profile, peak) or (None if peak.may_be_within(budget.nbytes) else False)
    if is_fitting is not None:
        unfinished = _describe_unfinished(profile)
        until = (
            " until then" if is_failed else f" so far{unfinished}" if (growth and not is_slight) or unfinished else ""
        )
        until = f"{_describe_refused(profile)}{until}"
        fits = f"but fits the card{until}" if keeps is False else f"fits{until}"
        verdict = f"{fits if is_fitting else f'does NOT fit{_describe_refused(profile)}'}: {verdict}"
    if growth:
        verdict = f"{verdict}; {growth}" if is_slight else f"{growth}; {verdict}"
    if program is not None and is_failed:
        is_fitting, verdict = None, f"not known: the program {program.ending}; {verdict}"
    if budget is not None:
        verdict = f"{_describe_budget(peak, budget, keeps=keeps)}; {verdict}"
    host = None if program is None else program.host
    if program is not None and host is not None and host.limit_bytes is not None:
        of_host = [compare_with_host(host), describe_host_growth(program)]
        of_host = of_host if host.fits is False else of_host[::-1]
        verdict = "; ".join(filter(None, [*of_host, verdict]))
    counted = ""
    if profile.target.memory_bytes is not None and not peak.at_least:
        requested = "requested bytes, without the allocator's rounding and fragmentation"
        room = explain_room(profile.target)
        counted = f"Counted: {requested if peak.fits is None else 'what the allocator reserves'}"
        others = "" if profile.target.in_use_bytes else "; other processes are not counted"
        counted += f"; room: {room}{others}" if room else ""
    return Fit(
        *(is_fitting, printable(verdict), printable(peak.shortage), counted, keeps, is_failed),
        is_open=_is_open(profile, peak) or (budget is not None and keeps is None),
        is_host_open=host is not None and host.is_open,
        is_growing=bool(growth),
        fits_host=None if host is None else host.fits,
    )


def target_facts(about: Headed, peak: Peak) -> Facts:
    """Whether a peak fits the target's memory; nothing where that is not known."""
    is_fitting, verdict = compare_with_target(about, peak)
    if is_fitting is None:
        return []
    words = f"{'fits' if is_fitting else 'does NOT fit'}: {verdict}"
    return [Fact("Memory", printable(words), "memory", "good" if is_fitting else "bad")]


def compare_with_target(profile: Headed, peak: Peak) -> tuple[bool | None, str]:
    """Whether a peak fits what a CUDA context leaves of the target's memory (None: not known), and the bytes of both.

    Where the allocator is not modelled, requested bytes are compared, a lower bound.
    """
    room, name = room_bytes(profile.target), profile.target.name
    if room is None:
        return None, f"not compared, because the memory of target {name} is not known"
    nbytes = peak.requested_bytes if peak.fits is None or peak.reserved_bytes is None else peak.reserved_bytes
    is_fitting = nbytes <= room if peak.fits is None else peak.fits
    nbytes = min(nbytes, room) if is_fitting else nbytes  # cached blocks go back to the driver where it asks for them
    least = "at least " if peak.at_least or (not is_fitting and _describe_unfinished(profile)) else ""
    if peak.least_bytes is not None and not peak.at_least:
        low = f"between {format_bytes(peak.least_bytes)} and "
        is_certain = 100 * (peak.requested_bytes - peak.least_bytes) < peak.requested_bytes
        least = f"{'' if is_fitting else low}at most " if not is_certain or _is_open(profile, peak) else least
    if _is_open(profile, peak):
        words = f"not known: {least}{format_bytes(nbytes)} of {format_bytes(room)} on {name}"
        return None, f"{words}, as shapes depend on data"
    spills = ""
    if profile.target.system and not is_fitting:
        spills = f"; Windows spills {format_bytes(nbytes - room)} into the host's memory: slower, not an error"
    return (
        is_fitting,
        f"{least}{format_bytes(nbytes)} of {format_bytes(room)} on {name}, {percent(nbytes, room)}{spills}",
    )


def _is_open(about: Headed, peak: Peak) -> bool:
    """Whether shapes that depend on data decide whether a step fits: not at their largest, maybe at their smallest."""
    room = room_bytes(about.target)
    is_too_large = peak.requested_bytes > (room or 0) if peak.fits is None else not peak.fits
    return is_too_large and peak.may_be_within(room)


def _describe_unfinished(profile: Headed) -> str:
    """What did not run and may take more: batches of an evaluation that keeps something of each, a call of a model."""
    program = profile.step.program
    if program is None:
        return ""
    passes = [each for each in program.evaluations if each.is_carried_on]
    named = [f"with {each.share} of the {each.title}" for each in passes]
    left = [each for each in program.schedules if not each.ran]
    calls, saves = [each.calls for each in left if each.calls], [each.saves for each in left if each.saves]
    call = "the call of a model" if len(calls) == 1 else "the calls of models"
    named += [f"without {call} at {' and '.join(calls)}"] if calls else []
    named += [f"without saving at {' and '.join(saves)}"] if saves else []
    return f", {' and '.join(named)}" if named else ""


def _describe_refused(profile: Profile) -> str:
    """How many requests the card refused and whose errors the program caught, in words that follow the verdict."""
    found = profile.step.program and profile.step.program.refused
    return f" after {found.count:,} refused request{'s' * (found.count != 1)}" if found else ""


def _describe_budget(peak: Peak, budget: Budget, *, keeps: bool | None) -> str:
    """The budget, and the number that decides: allocated bytes, or reserved ones where their pieces are too small."""
    used, word = peak.counted_bytes, "requested" if peak.allocated_bytes is None else "allocated"
    if not keeps and used <= budget.nbytes and peak.reserved_bytes is not None:
        used, word = peak.reserved_bytes, "reserved"
    verb = "keeps" if keeps else "does NOT keep"
    limit = format_bytes(budget.nbytes)
    if keeps is None:
        least, most = format_bytes(peak.least_bytes), format_bytes(used)
        span = f"between {least} and at most {most} {word}"
        return f"not known to keep the budget of {limit}: {span}, as shapes depend on data"
    return f"{verb} the budget of {limit}: {format_bytes(used)} {word}, {percent(used, budget.nbytes)}"


def fits(profile: Profile, peak: Peak) -> tuple[bool | None, str]:
    """Whether the step fits the target's memory (None where that is not known), and a sentence about it."""
    found = find_fit(profile, peak)
    return found.is_fitting, ". ".join(filter(None, [found.verdict, found.shortage, found.counted]))


def outcome_facts(profile: Profile, peak: Peak) -> Facts:
    """Sums over the whole step, and whether it fits."""
    is_fitting, sentence = fits(profile, peak)
    tone: Tone = "" if is_fitting is None else "good" if is_fitting else "bad"
    return [*total_facts(profile), Fact("Memory", sentence, "memory", tone)]


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
    place = printable(find_place_of_peak(profile, peak))
    if not place:
        return [f"{size} {counted}, {where}", f"{size} {where}"]
    file = place.replace(chr(92), "/").rpartition("/")[2]
    return [*(f"{size} {counted}, {where}, {each}" for each in (place, file)), f"{size} {where}, {file}"]


def split(peak: Peak) -> list[KindShare]:
    """The kinds alive at the peak, largest first."""
    kinds = sorted(peak.by_kind, key=lambda kind: (-peak.by_kind[kind], list(Kind).index(kind)))
    sizes = ((kind, peak.by_kind[kind]) for kind in kinds)
    return [KindShare(kind, to_words(kind), nbytes, percent(nbytes, peak.requested_bytes)) for kind, nbytes in sizes]


def share_table(peak: Peak, *, headings: Sequence[str] = ("", "", "")) -> Table:
    """The kinds of storage alive at the peak, most bytes first."""
    columns = [TableColumn(headings[0], is_head=True), *numbers(*headings[1:])]
    rows = ((Cell(each.name, kind=each.kind), format_bytes(each.nbytes), each.percent) for each in split(peak))
    return make_table("The peak by kind", columns, rows)


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
    return [printable(f"{each.topic}: {each.text}") for each in profile.assumptions]


def unknowns(profile: Profile) -> list[str]:
    """What could not be counted, one phrase each."""
    times = ((each, f" ({each.count} times)" if each.count > 1 else "") for each in profile.unknowns)
    return [printable(f"{each.topic}: {each.what}{often}") for each, often in times]


def flops_sum(flops: Flops) -> str:
    """A sum of FLOPs; `>=` in front if some calls have no formula, `unknown` if nothing else is in it."""
    if flops.unknown_calls and not flops.known:
        return "unknown"
    return (">=" if flops.unknown_calls else "") + format_flops(flops.known)


def _large_tensor(profile: Profile, alike: Sequence[Storage]) -> LargeTensor:
    storage = alike[0]
    node = None if storage.node is None else profile.nodes[storage.node]
    return LargeTensor(
        nbytes=storage.nbytes,
        kind=storage.kind,
        tensor=printable(f"{format_shape(storage.shape)} {storage.dtype}") if storage.dtype else "no tensor",
        owner=printable(storage.name or _describe_owner(storage, node)),
        source=printable(find_place(profile, storage.node)),
        others=len(alike) - 1,
    )


def _describe_owner(storage: Storage, node: Node | None) -> str:
    """The node that made a storage, and what holds it."""
    if node is None:
        return storage.holder or "of no node"
    return describe(node) + (f", held by {storage.holder}" if storage.holder else "")


def describe_source(source: SourceLine) -> str:
    """A line of code with its place."""
    return source.place + (f": {source.code}" if source.code else "")


_OF_TRAINED: Final = (Kind.GRADIENT, Kind.OPTIMIZER_STATE)
"""What a parameter has by its name that is trained; another may want a gradient and never get one."""


def describe_weights(profile: Profile) -> str:
    """The dtypes of the parameters, those of less than a hundredth of them aside, and how much of them is trained.

    Empty where all are float32 and trained."""
    parameters = [each for each in profile.storages if each.kind is Kind.PARAMETER]
    sizes: Counter[str] = Counter()
    for each in parameters:
        sizes[each.dtype] += each.nbytes
    dtypes = [dtype for dtype, nbytes in sizes.most_common() if dtype and 100 * nbytes >= sizes.total()]
    words = [] if dtypes in ([], ["float32"]) else [f"weights: {' and '.join(dtypes)}"]
    is_narrow = dtypes in (["bfloat16"], ["float16"]) and profile.step.mode == "train" and bool(profile.step.optimizer)
    of_trained = [each for each in profile.storages if each.kind in _OF_TRAINED]
    if any(each.name == BUCKET for each in of_trained):  # whose gradients these are is not known
        of_trained = [each for each in of_trained if each.kind is Kind.OPTIMIZER_STATE]
    stepped = {each.name.rpartition(".")[0] for each in of_trained} - {""}
    trained = [each for each in parameters if not each.is_frozen and (each.name in stepped or not stepped)]
    # A scalar of the state is a step count.
    if is_narrow and not any(each.dtype == "float32" and each.nbytes > 4 for each in (*trained, *of_trained)):
        words[0] += ", no float32 copy"
    is_whole = not any(each.name.endswith((", flat", ", shards")) for each in parameters)  # of these it is not known
    if is_whole and profile.step.mode == "train" and 0 < len(trained) < len(parameters):
        adapters = " (LoRA)" if any(".lora_" in each.name for each in trained) else ""
        nbytes, of_all = format_bytes(sum(each.nbytes for each in trained)), format_bytes(sizes.total())
        words += [f"trained: {nbytes} of {of_all}{adapters}"] if nbytes != of_all else []
    return "; ".join(words)


def describe_outputs(nodes: Iterable[Node]) -> str:
    """Shape and dtype of what the last of these that returns a tensor returns; the first, and how many more."""
    tensors = next((node.outputs for node in reversed(list(nodes)) if node.outputs), ())
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{format_shape(tensors[0].shape)} {tensors[0].dtype}{more}" if tensors else ""


def describe_inputs(inputs: Iterable[InputTensor]) -> str:
    """Names, shapes and dtypes of a step's inputs."""
    return "; ".join(f"{each.name} {format_shape(each.shape)} {each.dtype}" for each in inputs)
