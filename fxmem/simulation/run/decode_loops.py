"""`generate`: its first and last tokens run, those between are made by arithmetic.

The loops of transformers ask at the top of each step whether sequences are unfinished: there one step ends. When enough
steps are even (`fxmem.memory.generation.loop_steps`), and what the loop carries from one to the next grows as evenly
(`fxmem.simulation.run.loop_state`), the card's allocator does what further ones do, caches and results become as
long as after them, and the loop goes on from there. It stops before a length at which steps may change: a window that
is full, a least length that is reached, the last tokens. What runs after such a jump is compared with what was made.

Three even steps are enough where one that far ahead is as they say: a fork of this process goes there and runs it.
In the recording of a step (`StepJumps`) they are always enough: what ran after the jump is compared in its profile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import modules as torch_modules
from fxmem.memory.generation import (
    COMPARED,
    LEAST_COMPARED,
    PERIOD,
    EvenSteps,
    Jump,
    LoopEvent,
    LoopStep,
    LoopSteps,
    find_events,
)
from fxmem.simulation.asked import known_values
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.card.card_memory import CardMemory, RepeatedSteps
from fxmem.simulation.code.source_lines import is_own_code, program_place, variables
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.run.loop_state import Advance, LoopState, TensorState, find_advance, set_number

_LOOPS: Final = "transformers.generation.utils"
_LIBRARY: Final = "transformers."
_OWN_TYPES: Final = ("logits_processor", "stopping_criteria")
_CALLS_BACK: Final = frozenset({"PrefixConstrainedLogitsProcessor"})
"""Of the library's own, what calls a function of the user's at each step."""
_SHORTEST: Final = 4
"""Steps that are worth leaving out."""
_KEPT: Final = 2 * PERIOD + 1
"""States that are compared with later ones."""
_LAST: Final = 3
"""Steps before a border that run."""


@dataclasses.dataclass
class Rollout:
    """What was left out of the calls of `generate` at one place."""

    place: str
    """`file:line` of the program."""
    ran: int = 0
    """Steps of the loop that have run."""
    made: int = 0
    """Steps that were made by arithmetic."""
    reason: str = ""
    """Why all run; empty where none has to."""
    hindrance: str = ""
    """Why no step could be left out, although they are even."""
    looks_ahead: bool = True
    """Whether a step far ahead has always been as three said."""
    differs: str = ""
    """Where a step that ran is not as arithmetic had it."""

    def describe(self) -> str:
        """In a sentence, as an assumption; empty where every token has run as a matter of course."""
        where = f"generate at {self.place}"
        if self.reason:
            return f"{where} runs token by token: {self.reason}"
        if not self.made:
            return f"{where} runs token by token: {self.hindrance}" if self.hindrance else ""
        far = f"; {self.differs}" if self.differs else "; those that ran after them are as they say"
        return f"{where}: {self.made:,} of {self.made + self.ran:,} decode steps are made by arithmetic{far}"


@dataclasses.dataclass
class StepJumps:
    """What the recording of a step leaves out, to be made and compared once the step is over."""

    compared: Mapping[int, int]
    """By period, how many decode steps are compared before others are left out."""
    jumps: list[Jump] = dataclasses.field(default_factory=list)
    """Their storages as the log counts them."""


class DecodeLoops:
    """The loops of `generate` of one program, or of the step of one model.

    Args:
        log: of what is allocated.
        trace: of what is allocated and freed.
        maker: makes fake tensors like those that are computed with.
        memory: of a program's card; None for the CPU, where every token runs.
        rolling: what a call of `generate` runs inside.
        fork: forks this process; None in the fork, here whether it ended well. None where nothing is to be forked.
        is_compiled: whether what the program compiles is compiled, which is recorded token by token.
        jumps: has what is left out of a step. None for a program, whose card does at once what is left out.
    """

    def __init__(
        self,
        log: StepLog,
        trace: BlockTrace,
        maker: torch_fakes.Maker,
        *,
        memory: CardMemory | None = None,
        rolling: Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]] = lambda _: (
            contextlib.nullcontext()
        ),
        fork: Callable[[], bool | None] | None = None,
        is_compiled: bool = False,
        jumps: StepJumps | None = None,
    ) -> None:
        self.log, self.memory, self.trace, self.maker = log, memory, trace, maker
        self.fork, self.jumps, self._rolling = fork, jumps, rolling
        self._is_compiled = is_compiled
        self._depth = 0
        self._loop: _Loop | None = None
        self._stack = contextlib.ExitStack()
        self._is_patched = False
        self.rollouts: dict[str, Rollout] = {}
        """By place."""

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Inside, what is patched of the library is taken back in the end."""
        with self._stack:
            self.install()
            yield

    def install(self) -> None:
        """Patch the library, once the program has imported it."""
        mixin = getattr(sys.modules.get(_LOOPS), "GenerationMixin", None)
        if self._is_patched or mixin is None or not hasattr(mixin, "_has_unfinished_sequences"):
            return
        self._is_patched = True
        self._stack.enter_context(torch_common.wrap(mixin, "generate", self._generate))
        self._stack.enter_context(torch_common.wrap(mixin, "_has_unfinished_sequences", self._end_step))

    def _generate(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        is_outer = not self._depth
        self._depth += 1
        try:
            with self._rolling(model) if is_outer else contextlib.nullcontext():
                return original(model, *args, **kwargs)
        finally:
            self._depth -= 1
            if is_outer:
                if self._loop is not None and self._loop.is_ahead:
                    os._exit(1)
                self._loop = None

    def _end_step(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        goes_on = original(model, *args, **kwargs)
        if not goes_on or (self.memory is None and self.jumps is None) or self._depth != 1:
            return goes_on
        frame = sys._getframe(2)  # beyond the wrapper's
        if self._loop is None or self._loop.frame_id != id(frame):
            place = program_place(frame)
            rollout = self.rollouts.setdefault(place, Rollout(place))
            if self.jumps is None:
                rollout.reason = rollout.reason or self._find_obstacle(frame, model)
            self._loop = _Loop(frame, rollout, self)
        self._loop.end_step(frame)
        return goes_on

    def _find_obstacle(self, frame: types.FrameType, model: Any) -> str:
        """What of the user's own sees every token; empty where nothing does."""
        local = variables(frame)
        if self._is_compiled:
            return "what it compiles is compiled"
        streamer = local.get("streamer") or getattr(local.get("stop_check"), "streamer", None)
        if streamer is not None:
            return f"it streams tokens to a {type(streamer).__name__}"
        if frame.f_code.co_name == "_assisted_decoding":
            return "an assistant drafts its tokens"
        for name in _OWN_TYPES:
            for each in local.get(name) or ():
                kind = type(each)
                if not kind.__module__.startswith(_LIBRARY) or kind.__name__ in _CALLS_BACK:
                    return f"a {name.replace('_', ' ').removesuffix('s')} of the program's own, {kind.__name__}"
        for path, module in model.named_modules():
            if any(map(is_own_code, torch_modules.forward_hooks(module))):
                return f"a hook of the program's own, on {path or 'the model'}"
        return ""


class _Loop:
    """One loop, from its first step to its end."""

    def __init__(self, frame: types.FrameType, rollout: Rollout, of: DecodeLoops) -> None:
        self.frame_id = id(frame)
        self.is_ahead = False
        """Whether this process is the fork that looks ahead."""
        self._log, self._memory, self._trace, self._maker = of.log, of.memory, of.trace, of.maker
        self._rollout, self._fork, self._jumps = rollout, of.fork, of.jumps
        self._compared = COMPARED if of.jumps is None else of.jumps.compared
        self._seen_acts = self._seen_resets = 0
        """Of the round's acts, and of the card's statistics, those before this step."""
        self._steps = LoopSteps()
        self._states: dict[int, LoopState] = {}
        """By number, the state after a step that has run."""
        self._number = -1
        """Of the step that ended last."""
        self._made: EvenSteps | None = None
        """How the steps before this one were made, where they were."""
        self._first_op = 0
        self._round = self._log.ops

    def end_step(self, frame: types.FrameType) -> None:
        """A step is over, and another is to begin; perhaps far later ones."""
        if self._rollout.reason:
            return
        events = self._take_events()
        first, self._first_op = self._first_op, len(self._log.ops)
        if self._number < 0 or events is None or self._round is not self._log.ops:
            self._round, self._number = self._log.ops, self._number + 1
            self._steps = LoopSteps()
            return
        self._number += 1
        self._rollout.ran += 1
        ops = self._log.ops[first:]
        flops = None if any(op.flops is None for op in ops) else sum(op.flops or 0 for op in ops)
        moved = sum(op.moved_bytes for op in ops)
        self._compare(self._steps.add(self._number, events, tuple(op.name for op in ops), flops, moved))
        state = self._states[self._number] = LoopState(frame, self._find_place)
        try:
            even = self._steps.find_even(self._compared) or self._look_ahead(state)
            if even is not None:
                self._rollout.hindrance = self._jump(even, state)
        finally:
            state.forget_tensors(self._states.get(self._number - 1))
            for number in [*self._states][:-_KEPT]:
                del self._states[number]

    def _take_events(self) -> list[LoopEvent] | None:
        """What was allocated and freed since the last call; None where something else was done as well."""
        if self._memory is not None:
            self._memory.run_operator()
        new, self._seen_acts = self._trace.since(self._seen_acts)
        before, self._seen_resets = self._seen_resets, 0 if self._memory is None else self._memory.resets
        return find_events(new) if self._seen_resets == before else None

    def _compare(self, step: LoopStep) -> None:
        """Hold a step that has run after a jump against arithmetic."""
        is_said = self._made is None or self._made.predicts(step)
        if self.is_ahead:
            os._exit(0 if is_said else 1)
        if not is_said and not self._rollout.differs:
            self._rollout.differs = f"step {step.number:,} is not as they say: another kernel, or other sizes"
        self._made = None

    def _find_place(self, tensor: torch.Tensor) -> Any:
        index = self._log.find_storage(tensor)
        home = self._steps.homes.get(index)
        return index if home is None else (self._number - home[0], home[1])

    def _look_ahead(self, state: LoopState) -> EvenSteps | None:
        """How further steps are made where three say it, and one that far ahead runs as they say."""
        even = self._steps.find_even(LEAST_COMPARED) if self._rollout.looks_ahead and self._fork is not None else None
        found = "" if even is None else self._plan(even, state)
        if even is None or self._fork is None or isinstance(found, str) or found[1] <= PERIOD:
            return None
        is_said = self._fork()
        if is_said is None:
            self.is_ahead = True
            self._go_on(even, state, found[0], RepeatedSteps(even, found[1], done=found[1]))
            return None
        self._rollout.looks_ahead = is_said
        return even if is_said else None

    def _plan(self, even: EvenSteps, state: LoopState) -> str | tuple[Advance, int]:
        """How the state goes on, and how many periods may be left out; what is in the way, where something is."""
        earlier = [number for number in self._states if (self._number - number) % even.period == 0][-3:]
        if len(earlier) < 3:
            return ""
        advance = find_advance([(number, self._states[number]) for number in earlier], even.period)
        if isinstance(advance, str):
            return advance
        if self._find_unseen(even, state):
            return "something keeps what a step makes"
        room = advance.room(state)
        periods = 0 if room is None else room - -(-_LAST // even.period)
        return "" if periods * even.period < _SHORTEST else (advance, periods)

    def _jump(self, even: EvenSteps, state: LoopState) -> str:
        """Leave out as many steps as may be; what is in the way, where something is."""
        found = self._plan(even, state)
        if isinstance(found, str):
            return found
        steps = RepeatedSteps(even, found[1])
        try:
            if self._memory is None:
                steps.done = even.period * steps.periods
            else:
                self._memory.repeat(steps)
        finally:
            self._go_on(even, state, found[0], steps)
        return ""

    def _find_unseen(self, even: EvenSteps, state: LoopState) -> bool:
        """Whether something is alive that the loop's variables do not lead to, or that stays."""
        seen = {leaf.value.home for leaf in state.leaves.values() if isinstance(leaf.value, TensorState)}
        alive = [home for home in even.homes.values() if even.moves(home) or even.stays(home)]
        return any(even.stays(home) or (self._number - home[0], home[1]) not in seen for home in alive)

    def _go_on(self, even: EvenSteps, state: LoopState, advance: Advance, steps: RepeatedSteps) -> None:
        """Let everything be as after these steps."""
        log, periods = self._log, steps.done // even.period
        sizes = {key: even.growth_of(home) * periods for key, home in even.homes.items() if even.moves(home)}
        if self._jumps is None:
            moved = periods * sum(model.moved_bytes for model in even.models)
            log.note_op(f"{_LIBRARY}decode_steps", log.tick, even.sum_flops(periods), moved)
        else:
            end = len(log.ops)
            first = end - sum(len(model.ops) for model in even.models)
            grown = {key: more for key, more in sizes.items() if isinstance(key, int)}
            self._jumps.jumps.append(Jump(first, end, even.period, periods, grown))
        for path, tensor in state.tensors:
            index = log.find_storage(tensor)
            by, now = advance.tensors.get(path), state.leaves[path].value
            shape = now.shape if by is None else _move_on(now.shape, by.shape, periods)
            more = sizes.pop(index, 0)
            if index is not None and more:
                log.grow(index, log.storages[index].nbytes + more, shape)
            if more or by is not None:
                nbytes = tensor.untyped_storage().nbytes() if index is None else log.storages[index].nbytes
                stride = now.stride if by is None else _move_on(now.stride, by.stride, periods)
                offset = now.offset if by is None else now.offset + periods * by.offset
                self._maker.grow(tensor, nbytes, shape, stride, offset)
            if path in advance.known:
                with torch_common.no_modes(), torch_common.pause_observers():
                    known = advance.known[path](periods)
                known_values.attach(tensor, known)
        for path, number in advance.numbers.items():
            set_number(state.leaves[path], state.leaves[path].value + periods * number)
        self._first_op = len(log.ops)
        self._take_events()
        self._number += steps.done
        self._rollout.made += steps.done
        self._steps.move_on(even, steps.done)
        self._made = even


def _move_on(now: tuple[int, ...], by: tuple[int, ...], periods: int) -> tuple[int, ...]:
    return tuple(each + periods * more for each, more in zip(now, by, strict=True))
