"""Which ops of a step allocate memory unseen, and how much.

A collector is given every op as it runs (`find_hidden`), asks the operator's row, and keeps the memory that it hides
(`note_seen`). On a card `resolve` asks cuDNN about all convolutions at once. Held for good, and so there before the
step: cuBLAS's workspaces, one per thread that multiplies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.context import cublas_workspaces
from fxmem.hardware.hidden_memory import HeldBuffer, HiddenMemory, RnnSignature, output
from fxmem.hardware.operators import Call, ConvSettings, Platform, find_operator, short_name
from fxmem.hardware.operators.attention import CUDNN_ATTENTION_VERSION
from fxmem.hardware.operators.convolution import ConvolutionMemory
from fxmem.hardware.operators.products import uses_cublas, uses_cublaslt
from fxmem.hardware.releases import find_release
from fxmem.hardware.tensor_layouts import is_tensor, read_layout
from fxmem.hardware.workspaces.cudnn_client import OLDEST, CudnnLibrary, conv_workspaces, version_number
from fxmem.hardware.workspaces.driverless import ASKED, GUESSES, HOW, apply_rule, find_seen
from fxmem.records.profile import Assumption, Phase, Target, Unknown
from fxmem.records.units import GRAPH_POOL, PLANS_BY_TIMING

_MOST_RESERVED = 1.5
"""Where a card has less than so many times what a step's tensors and one workspace take, it may be short of memory for
workspaces. Of xMem's 106 trainings of convolutional networks the allocator reserves 1.4 times that at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What one call hides."""

    name: str
    multiplies: bool
    """Whether it needs cuBLAS's workspace."""
    multiplies_lt: bool
    """Whether it needs cuBLASLt's."""
    memory: HiddenMemory | None
    call: tuple[str, Sequence[Any], Any] | None = None
    """Operator, arguments and result that its row was asked by, tensors as layouts; None for no row."""
    resizes: int = 0
    """In how many ticks the results of an `out=` call are resized."""

    def after_resizing(self, ticks: int) -> Seen:
        """The same of an `out=` call, whose results are resized, in so many ticks, before its kernel allocates."""
        if self.memory is None:
            return dataclasses.replace(self, resizes=ticks)
        events = *(output("result"),) * ticks, *(each for each in self.memory.events if each.action != "output")
        return dataclasses.replace(self, memory=HiddenMemory(events=events), resizes=ticks)


class SeenOp(NamedTuple):
    """A call that hides something, and where it ran."""

    seen: Seen
    phase: Phase
    stream: int


class CpuCollector:
    """Collects over one step on the CPU, whose libraries hold nothing."""

    def __init__(self, platform: Platform | None = None) -> None:
        self._platform = platform or Platform()
        self._known: dict[Any, Seen | None] = {}
        self.seen: dict[int, SeenOp] = {}
        """By op index, all that was seen."""
        self.begin()

    def follow(self, settings: ConvSettings, *, deterministic: bool) -> None:
        """Nothing on the CPU looks at the flags of torch that a program may set."""

    def begin(self) -> None:
        """Forget everything; a new step begins."""
        self._memory: dict[int, tuple[str, HiddenMemory]] = {}
        self.seen = {}

    def note(self, index: int, name: str, args: Sequence[Any], result: Any, phase: Phase) -> None:
        """Op `index` of the step was this call; tensors may be anything with shape, stride and dtype."""
        seen = self.find_hidden(name, args, result)
        if seen is not None:
            self.note_seen(index, seen, phase)

    def find_hidden(self, name: str, args: Sequence[Any], result: Any) -> Seen | None:
        """What a call hides, which its op, layouts and numbers tell; None where calls of the op never do."""
        row = find_operator(name)
        if row is None or not row.may_hide(self._platform):
            return None
        key = name, *map(_freeze, (*args, result))
        if key not in self._known:
            memory = row.memory(Call(short_name(name), args, result, self._platform))
            call = name, _lay_out(args), _lay_out(result)
            self._known[key] = dataclasses.replace(self._find_libraries(name, args, memory), call=call)
        return self._known[key]

    def _find_libraries(self, name: str, args: Sequence[Any], memory: HiddenMemory | None) -> Seen:
        return Seen(name, multiplies=False, multiplies_lt=False, memory=memory)

    def note_seen(self, index: int, seen: Seen, phase: Phase, stream: int = 0) -> None:
        """Op `index` of the step was a call that hides this; it ran on this stream."""
        self.seen[index] = SeenOp(seen, phase, stream)
        if seen.memory is not None:
            self._memory[index] = seen.name, seen.memory

    def resolve(self, tensor_bytes: int = 0) -> dict[int, HiddenMemory]:
        """By op index, what it hides; `tensor_bytes` are the most that the step's tensors take at once."""
        return {index: memory for index, (_, memory) in self._memory.items()}

    def asked_cudnns(self) -> tuple[str, ...]:
        """The versions of the cuDNNs that were asked, where one does not have all answers."""
        return ()

    def find_held(self) -> dict[str, HeldBuffer]:
        """Workspaces that the first step leaves there for good, by name."""
        return {}

    def assumptions(self) -> Iterator[Assumption]:
        """Where the numbers came from."""
        yield from ()

    def unknowns(self) -> Iterator[Unknown]:
        """Buffers whose size is not known."""
        hidden = self._memory.values()
        counts = Counter(f"{buffer} of {name}" for name, memory in hidden for buffer in memory.unknown_buffers)
        for what, count in sorted(counts.items()):
            yield Unknown(topic="memory", what=what, count=count)


class Collector(CpuCollector):
    """Collects over one step on a CUDA target.

    Args:
        target: a CUDA target.
        torch_version: whose tables to use.
        environ: environment of the run that is predicted.
        settings: what convolutions look at.
        deterministic: `torch.use_deterministic_algorithms`, and not only as a warning. Torch then refuses matrix
            products unless `CUBLAS_WORKSPACE_CONFIG` is one of two values; where it is neither, the first of them is
            taken.
        cudnns: which cuDNNs answer, of which the plans of the first are counted; none for the installed one.
    """

    def __init__(
        self,
        target: Target,
        torch_version: str,
        environ: Mapping[str, str],
        settings: ConvSettings,
        *,
        deterministic: bool = False,
        cudnns: Sequence[CudnnLibrary] = (),
    ) -> None:
        self._target = target
        self._torch_version = torch_version
        self._given_environ = environ
        self._cudnns = cudnns
        self._kept: dict[str, HeldBuffer] = {}
        """What the steps before have left there."""
        super().__init__()
        self.follow(settings, deterministic=deterministic)
        self._guesses = GUESSES if self._stands_for_another and target.capability != ASKED else {}
        self._seen = find_seen(target, torch_version)

    def follow(self, settings: ConvSettings, *, deterministic: bool) -> None:
        """Let operators from here on look at these flags."""
        self._settings = settings
        given = self._given_environ
        self._lacks_config = deterministic and given.get("CUBLAS_WORKSPACE_CONFIG") not in _DETERMINISTIC_CUBLAS
        taken = {"CUBLAS_WORKSPACE_CONFIG": _DETERMINISTIC_CUBLAS[0]}
        self._environ = {**given, **taken} if self._lacks_config else given
        self._cublas = cublas_workspaces(self._target, self._torch_version, self._environ)
        self._platform = Platform(
            self._target, self._torch_version, self._environ, settings, deterministic, self._cublas
        )
        self._known = {}

    def begin(self) -> None:
        """Forget everything but what is held; a new step begins."""
        if self.seen:
            self._kept = {name: each._replace(op=None) for name, each in self.find_held().items() if not each.needed_by}
        super().begin()
        self._multiplying: dict[tuple[int, bool], list[int]] = {}
        """By stream, and by thread, whether it is autograd's: the ops that multiplied."""
        self._multiplying_lt: dict[tuple[int, bool], list[int]] = {}
        self._notes: Counter[str] = Counter()
        self._rnn_sources: set[str] = set()
        self._is_seen = False
        self._first_dropout: tuple[int, int] | None = None
        """The first recurrent layer with dropout, and its stream."""

    def _find_libraries(self, name: str, args: Sequence[Any], memory: HiddenMemory | None) -> Seen:
        multiplies = uses_cublas(name, self._torch_version)
        lt = multiplies and uses_cublaslt(name, args, self._environ)
        multiplies |= isinstance(memory, ConvolutionMemory) and memory.backend.startswith("Slow")
        return Seen(name, multiplies, lt, memory)

    def note_seen(self, index: int, seen: Seen, phase: Phase, stream: int = 0) -> None:
        """Op `index` of the step was a call that hides this; it ran on this stream."""
        super().note_seen(index, seen, phase, stream)
        handle = stream, phase is Phase.BACKWARD and stream != GRAPH_POOL
        if seen.multiplies:
            self._multiplying.setdefault(handle, []).append(index)
        if seen.multiplies_lt:
            self._multiplying_lt.setdefault(handle, []).append(index)
        signatures = () if seen.memory is None or self._first_dropout is not None else seen.memory.signatures
        if any(isinstance(each, RnnSignature) and each.dropout > 0 for each in signatures):
            self._first_dropout = index, stream

    def resolve(self, tensor_bytes: int = 0) -> dict[int, HiddenMemory]:
        """By op index, what it hides, cuDNN's workspaces filled in. `tensor_bytes` are the most that the step's tensors
        take at once: where memory may be short beside them, the plans that follow are asked for too."""
        signatures = [s for _, memory in self._memory.values() for s in memory.signatures]
        ask = functools.partial(conv_workspaces, signatures, self._target, torch_version=self._torch_version)
        library, *stand_ins = self._cudnns or (None,)
        answers, others = ask(library=library), [ask(library=each) for each in stand_ins]
        largest = max((each.nbytes or 0 for each in answers.values()), default=0)
        is_tight = largest and _MOST_RESERVED * (tensor_bytes + largest) > (self._target.memory_bytes or math.inf)
        follow = ask(library=library, smaller=True) if is_tight else {}
        smaller = {signature: answer.smaller_bytes for signature, answer in follow.items()}
        sizes, *other_sizes = (
            {signature: answer.nbytes for signature, answer in each.items()} for each in (answers, *others)
        )
        other_sizes += [apply_rule(sizes, rule) for rule in self._guesses.values()]
        if self._seen is not None:
            named, sizes = sizes, apply_rule(sizes, self._seen.rule)
            self._is_seen = named != sizes
        for signature, answer in answers.items():
            if isinstance(signature, RnnSignature):
                self._rnn_sources |= {answer.source} if answer.nbytes else set()
                continue
            estimated = answer.source == "estimate"
            self._notes[f"estimate: {answer.note}" if answer.note and estimated else answer.source] += 1
        settled = {
            index: (name, memory.fill_workspaces(sizes, other_sizes, smaller))
            for index, (name, memory) in self._memory.items()
        }
        self._memory = settled
        return {index: memory for index, (_, memory) in settled.items()}

    def asked_cudnns(self) -> tuple[str, ...]:
        """The versions of the cuDNNs that stand for the target's, in the order of `HiddenEvent.other_bytes`; the plans
        of the first are counted. What it may take instead follows. Empty where one has all answers."""
        names = [each.version for each in self._cudnns]
        names += [f"{names[0]} with {guess}" for guess in self._guesses]
        return tuple(names) if self._notes and len(names) > 1 else ()

    def find_held(self) -> dict[str, HeldBuffer]:
        """Workspaces that the first step leaves there for good, by name, and what those before it left."""
        sizes, found = self._cublas, self._kept | self._random_states()
        if not sizes.is_kept:
            return found
        cublas = "cuBLAS workspace", sizes.handle_bytes, self._multiplying
        lt = "cuBLASLt workspace", sizes.lt_bytes if sizes.keeps_lt else 0, self._multiplying_lt
        for what, nbytes, handles in (cublas, lt):
            for (stream, thread), ops in sorted(handles.items()) if nbytes else ():
                needed_by = tuple(ops) if stream == GRAPH_POOL else ()
                name = f"{what}, {_handle_name(stream, is_autograd=thread)}"
                found[name] = HeldBuffer(nbytes, ops[0], stream, needed_by)
        return found

    def _random_states(self) -> dict[str, HeldBuffer]:
        """What cuDNN's dropout in recurrent layers draws by, once for a process: 24 bytes for each thread that the
        multiprocessors hold (`cudnnDropoutGetStatesSize` of cuDNN 9.19; 6,488,064 bytes on an H200)."""
        if self._first_dropout is None:
            return {}
        properties = device_properties(self._target)
        nbytes = 24 * properties.multi_processor_count * properties.max_threads_per_sm
        index, stream = self._first_dropout
        return {"random states of cuDNN's dropout": HeldBuffer(nbytes, index, stream)}

    def assumptions(self) -> Iterator[Assumption]:
        """Where the numbers came from."""
        yield from (Assumption(topic="workspace", text=text) for text in self._grounds())

    def _grounds(self) -> Iterator[str]:
        tf32 = f"TF32 {'allowed' if self._settings.allow_tf32 else 'not allowed'} for float32"
        switches = f"{tf32}, deterministic plans only" if self._settings.deterministic else tf32
        for library in sorted(note for note in self._notes if note.startswith("cudnn")):
            plan = f"of the plan torch {self._torch_version} takes without benchmarking, {switches}"
            named = f"convolution workspaces are those {library.replace('cudnn', 'cuDNN').strip()} itself names for"
            yield f"{named} {self._target.name}, {plan}"
            if self._target.capability == ASKED:
                yield HOW
        if self._seen is not None and self._is_seen:
            yield self._seen.how
        for note, count in self._notes.items():
            if note.startswith("estimate"):
                why = note.removeprefix("estimate").lstrip(": ") or "no reason given"
                yield f"{count} convolution workspaces are estimated ({why})"
        for library in sorted(self._rnn_sources):
            yield f"workspaces of recurrent layers are what {library.replace('cudnn', 'cuDNN')} answers with no driver"
        if any("cudnn_attention" in name for name, _ in self._memory.values()):
            yield f"workspaces of cuDNN's attention are those of cuDNN {CUDNN_ATTENTION_VERSION}"
        if self._multiplying:
            held = self._cublas
            yield (
                f"cuBLAS holds a workspace per thread that multiplies, of the size torch {held.torch_version} gives it"
                if held.is_kept
                else f"each product allocates cuBLAS's workspace and frees it, as torch {held.torch_version} does"
            )
            yield from held.notes
            if self._lacks_config:
                yield (
                    "torch refuses matrix products with deterministic algorithms unless CUBLAS_WORKSPACE_CONFIG is "
                    ":4096:8 or :16:8; it is neither here, and :4096:8 is taken"
                )

    @property
    def _stands_for_another(self) -> bool:
        """Whether the first cuDNN is not the target's own."""
        own = self._settings.cudnn_version // 100
        return bool(self._target.torch) and any(each.number // 100 != own for each in self._cudnns[:1])

    def _unknown_plans(self, convolutions: int) -> Iterator[Unknown]:
        """What is not known where other cuDNNs stand for the target's."""
        if not self._stands_for_another:
            return
        own, asked = find_release(self._torch_version)[0].cudnn, [each.version for each in self._cudnns]
        least = ".".join(map(str, OLDEST))
        is_late = version_number(own) >= version_number(f"{least}.0")
        nearest = ".".join(own.split(".")[:2]) if is_late else least
        why = "is not at hand" if is_late else f"is older than {least}, the first that can be asked without a driver"
        counted = f"counted are those of {asked[0]}"
        if names := self.asked_cudnns():
            counted += f"{', the nearest' if len(asked) > 1 else ''}, and the range is that of {_join(names)}"
        if not asked[0].startswith(f"{nearest}."):
            counted += f"; fxmem doctor --fetch cudnn {nearest} brings {'it' if is_late else 'a nearer one'}"
        what = f"which plans cuDNN {own} of torch {self._torch_version} takes for convolutions: it {why}; {counted}"
        yield Unknown(topic="memory", what=what, count=convolutions)

    def unknowns(self) -> Iterator[Unknown]:
        """Buffers whose size is not known."""
        convolutions = self._notes.total()
        if convolutions and not self._settings.benchmark:
            yield from self._unknown_plans(convolutions)
        if self._settings.benchmark and convolutions:
            what = (
                f"{PLANS_BY_TIMING}; counted are those of the choice without it. The first step tries every algorithm, "
                "with the largest workspace that there is room for: its peak may be far higher, but does not run out "
                "of memory by that"
            )
            yield Unknown(topic="memory", what=what, count=convolutions)
        yield from super().unknowns()


_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")
"""`cublas_deterministic_configs` in aten/src/ATen/Context.h."""


def _freeze(value: Any) -> Any:
    """A hashable stand-in for an argument: a tensor's layout, a list as a tuple."""
    if is_tensor(value):
        layout = read_layout(value)
        return layout.shape, layout.stride, layout.dtype
    return tuple(_freeze(v) for v in value) if isinstance(value, list | tuple) else value


def _lay_out(value: Any) -> Any:
    """An argument, its tensors as layouts."""
    if is_tensor(value):
        return read_layout(value)
    if isinstance(value, list | tuple):
        return [_lay_out(each) for each in value] if isinstance(value, list) else tuple(map(_lay_out, value))
    return value


def _join(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _handle_name(stream: int, *, is_autograd: bool) -> str:
    """Whose workspace it is."""
    if stream == GRAPH_POOL:
        return "CUDA graphs"
    return f"{'autograd' if is_autograd else 'forward'} thread{f', stream {stream}' if stream else ''}"
