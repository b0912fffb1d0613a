"""`CompiledParts`: what a program or a rank compiles is compiled for the target where it is first called.

Nothing is observed while the compiler is at work: on the card it allocates nothing. What it made runs in the place of
the code it was made from, and every operator and launch is observed. FSDP2 gathers and reduces in hooks around a
block's graph, so that inductor sees plain tensors.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, get_args

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem._torch.compiler.inductor import known_options
from fxmem.errors import UsageError, closest
from fxmem.records.parts import CompileRecord, CompileSettings
from fxmem.records.profile import Phase, Target
from fxmem.records.units import AS_IS, BUDGET_OPTION, CompileMode, TimedQuestion
from fxmem.simulation.ranks import find_blocks
from fxmem.simulation.recording.compiled.compiled_code import CompiledCode, differentiate_joint_graphs
from fxmem.simulation.recording.compiled.tracer import KernelTracer
from fxmem.simulation.recording.observe.fx_tracer import Listener, ProgramTracer
from fxmem.simulation.recording.observe.node_ledger import NodeLedger


class CompiledParts(CompiledCode):
    """Compiled code is called beside eager code."""

    kernels: PartKernels

    def __init__(self, target: Target, settings: CompileSettings) -> None:
        super().__init__(target, settings)
        self._around_call = contextlib.ExitStack()
        """What a call of compiled code is inside; left where the call ends."""

    # --- the parts of the recording -----------------------------------------------------------------------------------

    def follows(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator of the target runs while compiled code does."""
        return self.kernels.runs_compiled and self.recording.subject.is_targets(func, types, args, kwargs)

    def make_tracer(self, root: torch.nn.Module) -> Any:
        """The subject's tracer; a launch has no like in the run before, which compiled."""
        return self.recording.subject.make_tracer(root, writes_anew=True)

    def attach(self) -> None:
        """Follow the launches among the nodes of the tracer."""
        recording = self.recording
        self.kernels = PartKernels(recording.tracer, recording.subject.find_class, recording.nodes)

    def restart(self) -> None:
        """Follow launches in the new graph."""
        self.kernels.restart()

    def prepare(self, model: torch.nn.Module) -> None:
        """Compile what its author has compiled, or else the repeated blocks; of a model without any, the whole."""
        settings = self._settings
        parts = {path: (chosen or {}, chosen is None) for path, chosen in settings.parts.items()}
        if not settings.as_is:
            names = {module: path for path, module in model.named_modules()}
            parts = {names[block]: (self._options, True) for block in find_blocks(model) or [model]}
        backends: dict[str, Callable[..., Any]] = {}  # of one, dynamo compiles blocks that are alike once
        for path, (chosen, in_place) in parts.items():
            backend = backends.setdefault(repr(chosen), functools.partial(self.compile, options=chosen))
            torch_dynamo.compile_part(model.get_submodule(path), backend, in_place=in_place, dynamic=settings.dynamic)

    # --- while the program runs ---------------------------------------------------------------------------------------

    def environment(self) -> contextlib.AbstractContextManager[None]:
        """What dynamo is to trace into is looked up here, before any is replaced."""
        functional: Any = torch.nn.functional
        plain = ((torch.nn.Module, "__call__"), (torch.overrides, "has_torch_function"), (functional, "linear"))
        self._plain = [(owner, name, getattr(owner, name)) for owner, name in plain]
        self._plain.append((functional, "scaled_dot_product_attention", torch_inductor.SDPA))
        return super().environment()

    def observe(self) -> contextlib.AbstractContextManager[None]:
        """What the program does is observed inside."""
        return self.recording.observe_code(self._observe_compiled())

    @contextlib.contextmanager
    def _observe_compiled(self) -> Iterator[None]:
        engine = self.recording.engine
        with (
            self.surroundings(self._make_buffer),
            torch_inductor.without_graph_task(engine.release_unpacked, lambda: engine.keeps_graph),
            torch_inductor.no_device_guard() if self._on_card else contextlib.nullcontext(),
            torch_dynamo.observe_compiled_calls(self._enter_call, self._leave_call, self._compile, self._unpatched),
            self._around_call,
        ):
            yield

    def _enter_call(self) -> None:
        self.recording.on_compiled_call()
        stack = self._around_call
        stack.enter_context(torch_common.without_function_modes(Listener))
        stack.enter_context(self._unpatched())
        stack.enter_context(torch_common.wrap(torch.Tensor, "register_hook", self._register_hook))
        self._set_inside(True)

    def _leave_call(self) -> None:
        self._set_inside(False)
        self._around_call.close()

    def _set_inside(self, inside: bool) -> None:
        self.kernels.is_inside = self.recording.nodes.saves_by_launch = inside
        self.kernels.first_op = None

    def _register_hook(self, original: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        """`Tensor.register_hook` where no listener is: a module compiled in place runs its own hooks, such as FSDP2's,
        inside the call."""
        handle = original(tensor, hook)
        self.recording.on_tensor_method("register_hook", tensor)
        return handle

    @contextlib.contextmanager
    def _unpatched(self) -> Iterator[None]:
        """What dynamo traces into is torch's own."""
        with contextlib.ExitStack() as stack:
            for owner, name, plain in self._plain:
                stack.enter_context(torch_common.replace(owner, name, plain))
            yield

    @contextlib.contextmanager
    def _compile(self) -> Iterator[None]:
        """Dynamo traces, and nothing follows what it calls."""
        observed = torch_common.keep_modes()
        with (
            torch_common.replace(self, "is_compiling", True),
            torch_common.no_modes(),
            self.recording.fakes,
            differentiate_joint_graphs(),
            self.answers(),
            torch_dynamo.observe_optimizer_state(observed),
        ):
            yield
            self.note_numbers()  # here, where nothing observes how they are found

    def _make_buffer(self, size: Any, stride: Any, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A buffer of compiled code; on the host, whose kernels do not run either, with zeros."""
        with self.recording.subject.make_buffers():
            made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return made if isinstance(made, torch_common.FakeTensor) else made.zero_()

    def call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        """Run an `autograd.Function.apply`: of compiled code, which is one, or of the program."""
        calls = self.kernels if self.kernels.is_inside else self.recording.tracer
        return calls.call_function(cls, args, apply)

    def observe_backward(self) -> contextlib.AbstractContextManager[None]:
        """No listener follows what the backward of a compiled graph calls."""
        return torch_common.without_function_modes(Listener)


class PartKernels(KernelTracer):
    """Writes launches among the nodes of a program.

    Args:
        around: the tracer of what is not compiled.
        find_class: the class of the module with a path; None for none.
        nodes: the program's ledger.
    """

    def __init__(
        self, around: ProgramTracer, find_class: Callable[[str], type[torch.nn.Module] | None], nodes: NodeLedger
    ) -> None:
        self._around = around
        super().__init__(torch.nn.Module(), nodes)
        self._find_class = find_class

    def restart(self) -> None:
        """Begin another graph, which the tracer around has begun."""
        super().restart()
        writer = self._around.writer
        self.graph, self.nodes, self.sources = writer.graph, writer.nodes, writer.sources
        writer.find_maker = self._find_launch

    @property
    def runs_compiled(self) -> bool:
        """Whether compiled code runs, or a backward, which may be its own."""
        return self.is_inside or self._log.phase is Phase.BACKWARD

    def _writes_nodes(self) -> bool:
        return self.is_inside and self._around.writes and self._log.phase in (Phase.FORWARD, Phase.EVALUATION)

    @property
    def _path(self) -> str:
        return self._around.path

    def _known_module(self, path: str) -> str:
        return super()._known_module(".".join(part for part in (self._path, path) if part))

    def _find_launch(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        storage = self._log.note_storage(tensor)
        return None if storage is None else self._maker.get(storage)

    def _find_maker(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        return self._around.writer.find_node(tensor) or self._find_launch(tensor)


# --- `fxmem.analyze(compile=...)` and the options of `--compile`, read ------------------------------------------------


_KEYS: Final = ("mode", "dynamic", "options", BUDGET_OPTION)

Compile = bool | str | Mapping[str, Any] | CompileSettings | None
"""`fxmem.analyze(compile=...)`: True or a mode, `as-is`, or the arguments of `torch.compile`."""


def parse_compile(value: Compile) -> CompileSettings | None:
    """Read the argument `compile` of `fxmem.analyze`.

    Raises:
        UsageError: no such mode, argument or option.
    """
    if value is None or value is False:
        return None
    if isinstance(value, CompileSettings):
        return value
    if value is True:
        return CompileSettings()
    if value == AS_IS:
        return CompileSettings(as_is=True)
    given: dict[str, Any] = {"mode": value} if isinstance(value, str) else dict(value)
    wrong = next((key for key in given if key not in _KEYS), None)
    if wrong is not None:
        raise UsageError(f"expected compile with {', '.join(_KEYS)}, got {wrong!r}{closest(str(wrong), _KEYS)}")
    mode: Any = given.get("mode") or "default"
    if mode not in get_args(CompileMode):
        raise UsageError(
            f"expected compile to be a mode of torch.compile ({', '.join(get_args(CompileMode))}) or {AS_IS!r}, "
            f"got {mode!r}{closest(str(mode), get_args(CompileMode))}"
        )
    if given.get("dynamic") not in (None, True, False):
        raise UsageError(f"expected dynamic to be True, False or None, got {given['dynamic']!r}")
    share = given.get(BUDGET_OPTION)
    if share is not None and (not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1):
        raise UsageError(f"expected {BUDGET_OPTION} from 0 (keep least) to 1 (recompute nothing), got {share!r}")
    known = known_options()
    options = {name.replace("-", "_"): each for name, each in (given.get("options") or {}).items()}
    for name in options:
        if name not in known:
            raise UsageError(f"inductor has no option {name!r}{closest(name, sorted(known))}")
    return CompileSettings(mode=mode, dynamic=given.get("dynamic"), options=options, activation_memory_budget=share)


def read_compile(mode: str | None, options: list[str]) -> CompileSettings | None:
    """Read `--compile` and `--compile-option`.

    Raises:
        UsageError: as `parse_compile`; options without `--compile`.
    """
    if mode is None:
        if options:
            raise UsageError("expected --compile with --compile-option")
        return None
    given = parse_compile_options(options)
    if mode == AS_IS:
        if given:
            raise UsageError(f"expected --compile {AS_IS} without --compile-option: the model's author has chosen")
        return parse_compile(AS_IS)
    own = {name: given.pop(name, None) for name in ("dynamic", BUDGET_OPTION)}
    return parse_compile({"mode": mode, **own, "options": given})


def parse_compile_options(texts: list[str]) -> dict[str, Any]:
    """Read `--compile-option KEY=VALUE`: inductor's, `dynamic` of torch.compile, `activation_memory_budget`.

    Raises:
        UsageError: no `=`.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"expected --compile-option as KEY=VALUE, got {text!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


# --- `answer_all_ways`: a compiled step with other answers to what inductor decides by timing on the card -------------
# All decisions of one question are answered alike; on the card, each is made by itself. So the peaks are those of the
# ends, and that a mixture lies between them is taken for granted.


Answers = dict[TimedQuestion, str]
"""By question, the answer; the first of each where it is not there."""


class Answered(NamedTuple):
    """A step that was compiled with some answers."""

    made: CompileRecord | None
    peak_bytes: int


def answer_all_ways(first: Answered, recompile: Callable[[Answers], Answered | None]) -> list[int]:
    """The peaks of a step with the first answers, and with each other one.

    Each other answer is taken alone; then those together that raise the peak, and those that lower it.

    A question that only another answer brings up is answered all ways with that one: whether to fuse, of templates.

    Args:
        first: the step with the first answers.
        recompile: analyses the step with these; None where that was not possible.
    """
    tried: list[tuple[Answers, int]] = []
    pending: list[tuple[Answers, CompileRecord | None]] = [({}, first.made)]
    asked: set[TimedQuestion] = set()
    while pending:
        answers, made = pending.pop(0)
        found: dict[TimedQuestion, dict[str, None]] = {}
        for each in () if made is None else made.timed:
            if each.question not in asked:
                found.setdefault(each.question, {}).update(dict.fromkeys(each.others))
        asked.update(found)
        for question, others in found.items():
            for other in others:
                chosen: Answers = {**answers, question: other}
                again = recompile(chosen)
                if again is not None:
                    tried.append((chosen, again.peak_bytes))
                    pending.append((chosen, again.made))
    for together in _combine(tried, first.peak_bytes):
        again = recompile(together)
        if again is not None:
            tried.append((together, again.peak_bytes))
    return [first.peak_bytes, *(peak for _, peak in tried)]


def _combine(tried: list[tuple[Answers, int]], first: int) -> list[Answers]:
    """The answers that raise the peak, together, and those that lower it; only of several questions."""
    made = []
    for sign in (1, -1):
        best: dict[TimedQuestion, tuple[int, Answers]] = {}
        for answers, peak in tried:
            question, gain = next(iter(answers)), sign * (peak - first)
            if gain > best.get(question, (0, {}))[0]:
                best[question] = (gain, answers)
        if len(best) > 1:
            made.append({question: answer for _, answers in best.values() for question, answer in answers.items()})
    return made
