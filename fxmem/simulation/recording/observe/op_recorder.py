"""`OpRecorder`: runs every op of a program on FakeTensors, and notes it with what it allocates.

It is a `TorchDispatchMode` above the fake one. Each ATen call returns fake tensors, whose storages stand for the memory
that a real run would allocate; they are noted in a `StepLog`.

Not seen: what a kernel allocates and frees inside one call.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import AnalysisError
from fxmem.records.profile import Phase
from fxmem.simulation.asked import known_values, legal_values
from fxmem.simulation.asked.routing import has_rule
from fxmem.simulation.asked.values import Values, picks_by_mask
from fxmem.simulation.code.source_lines import variables
from fxmem.simulation.kernels import sparse as _sparse  # noqa: F401 - registers its kernels
from fxmem.simulation.kernels.fake_kernels import ALLOCATED, EVERYWHERE, INDICES, NO_VIEW, ONE_DTYPE, check_arguments
from fxmem.simulation.kernels.inner_ops import Kernel, find_kernel
from fxmem.simulation.kernels.package_operators import FUSED
from fxmem.simulation.kernels.subclass_ways import adds_in_place
from fxmem.simulation.recording.observe.autograd_engine import NODE_CALL
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.recording.observe.observer import Observer
from fxmem.simulation.recording.observe.op_cache import FreshOutput, OpCache, OpFacts, OpReplay, describe_mismatch
from fxmem.simulation.recording.observe.plain_formulas import IN_PLACE

_SILENT_NAMES = frozenset({"aten.detach.default", "aten.is_same_size.default", "aten._local_scalar_dense.default"})
_SUM, _SUM_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_SILENT_NAMESPACES = frozenset({"prim", "profiler"})


class OpTraits:
    """What an operator is, whatever it is called with: one lookup for each call, since `OpOverload.__hash__` is slow.

    Args:
        func: the operator.
    """

    def __init__(self, func: Any) -> None:
        self.func = func
        self.name = name = str(func)
        self.is_composite = torch_common.is_composite(func)
        self.everywhere = EVERYWHERE.get(func)
        self.allocated = ALLOCATED.get(func)
        self.in_place: Any = IN_PLACE.get(func)
        self.kernel = find_kernel(func)
        self.is_sum = func is _SUM
        self.checks_arguments = func in ONE_DTYPE or func in INDICES
        self.unless = None if torch_fakes.sees_no_values(func) else known_values.VALUE
        """The attribute of tensors with which a call is not like one without; None where there is none."""
        self.may_grow = name in ("aten.resize_.default", "aten.resize_as_.default") or torch_common.has_out(func)
        """Whether a storage that is too small becomes a larger one."""
        self.says_what_it_makes = func in legal_values.SAYS
        self.routes = has_rule(name)
        """Whether it may send tokens to experts, or count them."""
        self.is_silent = (
            name in _SILENT_NAMES
            or name.startswith("aten.sym_")
            or name.partition(".")[0] in _SILENT_NAMESPACES
            or bool(getattr(func, "is_view", False))
        )
        """Whether a call that allocates nothing need not be noted: it computes nothing either."""
        self.is_in_place_foreach = name.startswith("aten._foreach_") and name.split(".")[1].endswith("_")
        """Whether it writes to lists of tensors, returns nothing and allocates nothing: then fake tensors need not run
        it.

        FakeTensorMode hashes every tensor of every list first, which was a seventh of a ResNet-50 step. Scalars are
        left to it: step counters have values.
        """


Run = Callable[[Any, Any, tuple[Any, ...], dict[str, Any], types.FrameType], Any]
"""Runs an operator: what it is, the types it is called for, its arguments, and the frame that calls it."""


Route = Callable[..., Any]
"""Decides how an operator runs, before the recorder does: called with the recorder and its own `Run`, then as that."""


class OpRecorder(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    """Runs the ops of one program.

    Args:
        log: receives every op and every storage.
        fakes: the mode the program runs in.
        inspect: `(op, name, args, kwargs, result) -> OpFacts`; called once for calls that look the same.
        observer: told of each op that has hidden memory.
        cache: of calls in this mode.
        values: answers where an op needs values.
        route: of what is recorded, which sees each op first; None where all of it runs on fakes.
    """

    is_of_program = False
    supports_higher_order_operators = True

    def __init__(
        self,
        log: StepLog,
        fakes: torch_common.FakeTensorMode,
        inspect: Callable[[Any, str, tuple[Any, ...], dict[str, Any], Any], OpFacts],
        observer: Observer,
        cache: OpCache,
        values: Values,
        route: Route | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._fakes = fakes
        self._inspect = inspect
        self._observer = observer
        self._cache = cache
        self._values = values
        self._find_traits = functools.cache(OpTraits)
        self.newest_node = -1
        """Number of the newest node of autograd when an op ran last."""
        self.runs_compiled_as_eager = False
        """Whether the program has called something compiled, which runs as eager code."""
        self._run_op: Run = self._record
        if route is not None:
            self._run_op = functools.partial(route, self, self._record)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch_common.HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs or {})
        return self._run_op(func, types, args, kwargs or {}, sys._getframe(1))

    def _record(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: types.FrameType
    ) -> Any:
        """Run an operator of the program on fakes, and note it."""
        if func is torch_fakes.DEVICE_OF:
            return args[0].fake_device
        for kind in types:
            if kind is not torch_common.FakeTensor and torch_wrappers.runs_own_way(kind):
                return NotImplemented  # a wrapper takes itself apart; what it then calls comes here
        if func is torch_fakes.NUMBER_OF and (number := torch_fakes.constant_number(args[0])) is not None:
            return number
        op = self._find_traits(func)
        if op.is_composite and (op.everywhere is None or args[0].is_cuda):
            with self:  # under inference_mode, and from within wrappers, the dispatcher does not take it apart
                return torch_common.decompose(func, *args, **kwargs)
        if op.kernel is not None:
            made = self._run_inner(op.kernel, func, args, kwargs)
            if made is not NotImplemented:
                return made
        if op.in_place is not None and caller.f_code is NODE_CALL:
            op = self._choose_form(op, args[0], variables(caller)["node"])
        elif op.is_sum and adds_in_place():
            op = self._find_traits(_SUM_IN_PLACE)
        self.newest_node = torch_autograd.next_sequence_number() - 1
        begin = self._log.tick
        result, replay = self._run_or_replay(op, args, kwargs)
        if op.says_what_it_makes:
            legal_values.note(func, args, kwargs, result, fills=self._values.takes_all_distinct)
        if op.routes:
            self._values.routing.note(op.name.rpartition(".")[0], args, result)
        if not self._log.setting_up:
            self._note_op(op, args, kwargs, result, replay, begin)
        return result

    def _run_higher_order(
        self, func: torch_common.HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run what takes operators as arguments as those that it calls, or as the kernel that is made of it."""
        fused = FUSED.get(str(func)) if self.runs_compiled_as_eager else None
        with self:
            if fused is None:
                return torch_common.run_higher_order(func, args, kwargs)
            result = fused(*args, **kwargs)
        self._observer.on_kernel(f"{func} (fused)", None, (args, kwargs, result))
        return result

    def _run_inner(self, kernel: Kernel, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator as those that its kernel calls."""

        def answer(func: Any, args: tuple[Any, ...]) -> Any:
            return self._values.answer(func, args, {}, self._fakes)

        with self:
            return kernel(answer, func, *args, **kwargs)

    def _choose_form(self, op: OpTraits, target: torch.Tensor, node: Any) -> OpTraits:
        """The op as an autograd node runs it on plain tensors, maybe in place."""
        in_place, nodes, never = op.in_place
        name = type(node).__name__
        own = name in nodes and not torch.is_grad_enabled() and self._log.is_of_backward_node(target)
        if own and self._log.find_maker(target) == "aten.neg.default":
            return op  # `-x * gradient`, of `binary_cross_entropy_with_logits_target_backward`
        return self._find_traits(in_place) if own or not (nodes or name in never) else op

    def _run_or_replay(
        self, op: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, OpReplay | None]:
        """The result of a call, with its storages noted; equal calls are replayed from here on."""
        self._cache.follow_flags()
        self._log.bounds.begin_operator(args, kwargs)
        fresh = op.is_in_place_foreach or op.may_grow or picks_by_mask(op.func, args)
        call = None if fresh else self._cache.call(op.func, args, kwargs, op.unless)
        replay = None if call is None else call.replay
        follows = call is not None and op.unless is None
        if call is None or replay is None or self._cache.compares:
            result = self._run(op, args, kwargs, follows=not follows)
            if self._values.has_bounded:
                self._log.bounds.note(result)
                self._values.has_bounded = False
            if op.may_grow:
                for tensor in torch_common.iterate_tensors((args[:1], kwargs)):
                    self._log.note_growth(tensor)
            self._log.note_tensors(result if op.allocated is None else [result[i] for i in op.allocated])
            if call is not None:
                replay = self._cache.learn(call, op.func, args, kwargs, result)
        else:
            result = self._cache.make(replay, call.tensors)
            self._note_outputs(op, result, replay)
        self._log.bounds.is_making = False
        if follows and call is not None and call.knows:
            known_values.follow(op.func, args, kwargs, result)
        return result, replay

    def _note_op(
        self,
        op: OpTraits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        replay: OpReplay | None,
        begin: int,
    ) -> None:
        """Note an op that began at this tick, unless it does nothing at all."""
        if op.is_silent and self._log.tick == begin:
            return
        facts = None if replay is None else replay.facts
        if facts is None:
            facts = self._inspect(op.func, op.name, args, kwargs, result)
            if replay is not None:
                replay.facts = facts
        elif self._cache.compares and facts != self._inspect(op.func, op.name, args, kwargs, result):
            raise AnalysisError(describe_mismatch(op.func))
        index = self._log.note_op(
            op.name, begin, facts.flops, facts.moved_bytes, (args, kwargs), host_bytes=facts.host_bytes
        )
        if facts.hidden is not None:
            hidden = facts.hidden.after_resizing(self._log.tick - begin) if op.may_grow else facts.hidden
            self._observer.on_hidden(index, hidden, self._log.phase)

    def _run(self, op: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any], *, follows: bool) -> Any:
        """Run a call on fakes.

        Args:
            op, args, kwargs: what it is.
            follows: whether values are followed: of a call that may be replayed they are later.
        """
        func, values = op.func, self._values
        if (made := values.run_instead(func, args, kwargs)) is not NotImplemented:
            return made
        number = self._cache.number(func, args)
        if number is not None:
            return number
        if values.reads is not None and self._log.phase is not Phase.OPTIMIZER:
            values.reads.give(func, args)
        if op.checks_arguments:
            check_arguments(func, args)
        everywhere = op.everywhere
        if everywhere is not None and (made := everywhere(self._fakes, func, *args, **kwargs)) is not NotImplemented:
            return made
        try:
            needs_no_run = op.is_in_place_foreach and all(tensor.dim() for tensor in args[0])
            result = None if needs_no_run else func(*args, **kwargs)
            if follows:
                known_values.follow(func, args, kwargs, result)
        except (*torch_common.DATA_DEPENDENT, torch_common.UnsupportedOperatorException):
            result = values.answer(func, args, kwargs, self._fakes)
            if result is NotImplemented:
                raise
        except ValueError as error:
            if func is not torch.ops.aten.view.default:
                raise
            raise RuntimeError(NO_VIEW) from error  # what programs catch, to reshape then
        return result

    def _note_outputs(self, op: OpTraits, result: Any, replay: OpReplay) -> None:
        """Note the storages of tensors whose metadata are known, as `StepLog.note_tensors` does."""
        results = (result,) if replay.container is None else result
        for position in op.allocated or range(len(results)):
            tensor, output = results[position], replay.outputs[position]
            if type(output) is FreshOutput:
                if output.nbytes and output.device.type == self._log.device_type:
                    self._log.enter(tensor.untyped_storage(), output.nbytes, output.shape, output.dtype)
            elif isinstance(tensor, torch.Tensor):
                self._log.note_storage(tensor)
