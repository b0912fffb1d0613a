"""Private names of dynamo: what it has compiled, and what it keeps of that.

Checked on torch 2.11.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from fxmem._torch.common import nested, no_modes, patch, replace_all, restored, set_environment, storage_key, wrap
from fxmem._torch.compiler import inlined
from fxmem._torch.kernels import SDPA


@contextlib.contextmanager
def fresh_dynamo(note_break: Callable[[str], None]) -> Iterator[None]:
    """Dynamo forgets what it compiles here, and nothing that it had compiled before.

    It does not look into fxmem's own frames, which run between those of the program (`trace_rules.SKIP_DIRS`, since
    2.1), but for `inlined` (`trace_rules.get_legacy_mod_inlinelist`, since 2.1). `init_process_group` has it forget the
    rules of torch's functions (`get_torch_obj_rule_map`, since 2.2), of which several are one stand-in by then.
    """
    import torch._dynamo
    from torch._dynamo import trace_rules, utils

    def inline(original: Callable[[], set[str]]) -> Callable[[], set[str]]:
        return functools.cache(lambda: original() | {inlined.__file__})  # `init_process_group` clears it

    try:
        with restored(trace_rules.SKIP_DIRS, utils.counters):
            for name in ("fxmem.simulation", "fxmem._torch", "fxmem.memory", "fxmem.hardware", "fxmem.records"):
                trace_rules.add(name)
            utils.counters.clear()
            rules = trace_rules.get_torch_obj_rule_map()
            keep = patch(trace_rules, "get_torch_obj_rule_map", lambda _: functools.cache(lambda: rules))
            with patch(trace_rules, "get_legacy_mod_inlinelist", inline), keep, _own_compiled_code():
                yield
            for reason, count in utils.counters["graph_break"].items():
                for _ in range(count):
                    note_break(reason.split("\n")[0])
    finally:
        trace_rules._recompile_re()
        torch._C._autograd._saved_tensors_hooks_set_tracing(False)


@contextlib.contextmanager
def _own_compiled_code() -> Iterator[None]:
    """What dynamo compiles inside is dropped; `torch._dynamo.reset` would drop the user's code with it.

    `convert_frame.input_codes` and `output_codes` (since 2.1) have the code that dynamo has looked at and has made;
    `_debug_get_cache_entry_list` (since 2.0) the compiled forms of one, of which `ExtraState.invalidate` (since 2.6)
    makes one never match. It still counts against `config.recompile_limit` (since 2.6); so a code with many such is
    forgotten as a whole, and the user's next call compiles it anew. `pgo._CODE_STATE` (since 2.6) are the sizes seen,
    which decide what becomes dynamic; `eval_frame.cached_backends` (since 2.1) and
    `TensorifyState.force_specializations` (since 2.7) are kept by dynamo, too.
    """
    from torch._dynamo import config, convert_frame, eval_frame, pgo
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.symbolic_convert import TensorifyState

    trackers = (convert_frame.input_codes, convert_frame.output_codes)
    listed = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    known = {id(code): (code, {id(entry.code) for entry in listed(code)}) for code in _codes(trackers)}
    room = config.recompile_limit
    there = max((len(entries) for _, entries in known.values()), default=0)
    forced = set(TensorifyState.force_specializations)
    kept = [each for tracker in trackers for each in (tracker.seen, tracker.seen_ids)]
    with restored(*kept, eval_frame.cached_backends):
        try:
            with (
                patch(pgo, "_CODE_STATE", lambda _: None),
                patch(pgo, "_INIT_CODE_STATE", lambda _: None),
                config.patch(recompile_limit=room + there),
            ):
                yield
        finally:
            for code in _codes(trackers):
                if id(code) not in known or len(listed(code)) > room // 2:
                    torch._C._dynamo.eval_frame.reset_code(code)
                    continue
                for entry in listed(code):
                    if id(entry.code) not in known[id(code)][1] and entry.guard_manager.extra_state is not None:
                        dropped = DeletedGuardManagerWrapper("compiled by fxmem, over tensors without data")
                        entry.guard_manager.extra_state.invalidate(entry, dropped)
            TensorifyState.force_specializations.intersection_update(forced)


def _codes(trackers: Iterable[Any]) -> list[types.CodeType]:
    return [code for tracker in trackers for reference in tracker.seen if (code := reference()) is not None]


def pause_tracing() -> Callable[[], None]:
    """Let dynamo look at no frame of this thread; the function returned ends that
    (`torch._C._dynamo.eval_frame.set_eval_frame`, since 2.0)."""
    set_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame
    resume: Callable[[], None] = functools.partial(set_frame, set_frame(None))
    return resume


def compiled_parts(model: torch.nn.Module) -> dict[str, dict[str, Any] | None]:
    """Inductor's options by path of each module that is compiled; None for one compiled in place.

    Paths are those without wrappers.

    `OptimizedModule.dynamo_ctx` (since 2.0) leads to the backend, `Module._compiled_call_impl` (since 2.2) to nothing.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    found: dict[str, dict[str, Any] | None] = {}
    for path, module in model.named_modules():
        plain = ".".join(part for part in path.split(".") if part != "_orig_mod")
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            backend = module.dynamo_ctx.callback
            while hasattr(backend, "_torchdynamo_orig_backend"):
                backend = backend._torchdynamo_orig_backend
            found[plain] = dict(getattr(backend, "config", {}))
        elif getattr(module, "_compiled_call_impl", None) is not None:
            found.setdefault(plain, None)
    return found


def compile_part(
    module: torch.nn.Module, backend: Callable[..., Any], *, in_place: bool, dynamic: bool | None = None
) -> None:
    """Compile a module as its author has: by `module.compile()`, or as the wrapper that `torch.compile` returns.

    The wrapper also compiles modules that are torch's own (`torch._dynamo.external_utils.wrap_inline`, since 2.1). Its
    place in the tree of modules would change all paths below, so the module calls what the wrapper would.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.external_utils import wrap_inline

    if in_place or not trace_rules.check(module.forward):
        module.compile(backend=backend, dynamic=dynamic)
        return

    module._compiled_call_impl = torch.compile(wrap_inline(module._call_impl), backend=backend)


def load_compiler() -> None:
    """Import dynamo and inductor while torch is as it is: they bind its functions.

    So do the tables that dynamo makes once, by the identity of functions: `trace_rules.get_torch_obj_rule_map` (since
    2.2), `TorchInGraphFunctionVariable._get_handlers` (since 2.3) and `populate_builtin_to_tensor_fn_map` (since 2.6),
    which asks tensors for their values. To import inductor sets `TORCHINDUCTOR_CACHE_DIR` and makes that folder.
    """
    with (
        warnings.catch_warnings(action="ignore"),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        set_environment({"TORCHINDUCTOR_CACHE_DIR": folder}),
        torch.device("cpu"),
    ):
        from torch._dynamo import trace_rules
        from torch._dynamo.variables import builtin
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
        from torch._inductor import compile_fx  # noqa: F401

        trace_rules.get_torch_obj_rule_map()
        TorchInGraphFunctionVariable._get_handlers()
        if hasattr(builtin, "populate_builtin_to_tensor_fn_map"):
            builtin.populate_builtin_to_tensor_fn_map()


def observe_compiled_calls(
    enter: Callable[[], None],
    leave: Callable[[], None],
    compiling: Callable[[], AbstractContextManager[Any]] | None,
    plain: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[None]:
    """On this thread, `enter()` before what `torch.compile` returned runs, `leave()` after it, outermost calls alone.

    Whatever dynamo compiles there, it compiles inside `compiling()`, each backward with its forward; where that is
    None, as always. A compiled module binds `Module.__call__` inside `plain()` (`OptimizedModule._initialize`, since
    2.1).

    What `torch.compile` returns calls `eval_frame._callback_from_stance` when it begins and `_maybe_set_eval_frame`
    then and when it is over (since 2.6), in one frame. Dynamo calls `convert_frame.CatchErrorsWrapper` (since 2.2) for
    each frame that has to be compiled; it traces without modes, but not what is in a DistributedDataParallel, where
    views of fakes would be those of the mode. `force_non_lazy_backward_lowering` of torch._functorch.config is there
    since 2.9.
    """
    from torch._dynamo import convert_frame, eval_frame, utils
    from torch._functorch import config

    calls: list[tuple[types.FrameType, list[Any]]] = []
    """The calls under way, innermost last, each with what it has set since it began."""

    def choose_stance(original: Callable[[Any], Any], callback: Any) -> Any:
        frame, chosen = sys._getframe(2), original(callback)
        if chosen not in (None, False) and frame.f_code.co_name == _CALL:
            if not calls:
                enter()
            calls.append((frame, []))
        return chosen

    def set_frame(original: Callable[[Any], Any], callback: Any) -> Any:
        if calls and sys._getframe(2) is calls[-1][0]:
            calls[-1][1].append(callback)
            if len(calls[-1][1]) > 1:
                calls.pop()
                if not calls:
                    leave()
        return original(callback)

    def run_node(original: Callable[..., Any], tracer: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Dynamo asks an attention for its shape alone (`utils.run_node`, since 2.0). Without a card torch has the way
        for all, which the program may have switched off; the target chooses when the graph is compiled. A DTensor that
        is shared out over a ring has no way for all: a copy of the query has the shape."""
        query = args[0][0] if node.target is SDPA and args[0] else None
        if query is not None and type(query).__name__ == "DTensor":
            return query.clone()
        if node.target is not SDPA or torch.backends.cuda.math_sdp_enabled():  # type: ignore[no-untyped-call]
            return original(tracer, node, *args, **kwargs)
        torch.backends.cuda.enable_math_sdp(True)
        try:
            return original(tracer, node, *args, **kwargs)
        finally:
            torch.backends.cuda.enable_math_sdp(False)

    def inside(
        owner: Any, name: str, around: Callable[[], AbstractContextManager[Any]]
    ) -> AbstractContextManager[None]:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with around():
                return original(*args, **kwargs)

        return wrap(owner, name, run, here=True)

    changes = [
        wrap(eval_frame, "_callback_from_stance", choose_stance, here=True),
        wrap(eval_frame, "_maybe_set_eval_frame", set_frame, here=True),
        inside(eval_frame.OptimizedModule, "_initialize", plain),
        wrap(utils, "run_node", run_node, here=True),
    ]
    if compiling is not None:
        # The last is entered first.
        changes += [inside(convert_frame.CatchErrorsWrapper, "__call__", each) for each in (no_modes, compiling)]
        changes.append(config.patch(force_non_lazy_backward_lowering=True))
    return nested(*changes)


def observe_optimizer_state(observed: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """An optimizer whose compiled step dynamo traces makes its state inside `observed()`: on the card it does so then.

    `OptimizerVariable.call_method` (since 2.1) runs `Optimizer._init_group` for real.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable

    def run_observed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with observed():
            return plain(*args, **kwargs)

    def call_method(original: Callable[..., Any], self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_state = name == "_init_group" and hasattr(self.value, name)
        with wrap(self.value, name, run_observed) if is_state else contextlib.nullcontext():
            return original(self, tx, name, args, kwargs)

    return wrap(OptimizerVariable, "call_method", call_method)


class TracedNumbers:
    """Numbers on the host that stay alive with the graphs that dynamo has traced.

    A Python float that may vary (`dynamic=True`) is a tensor of 8 bytes (`VariableBuilder.wrap_symfloat`, since 2.5),
    which a `GraphArg` keeps (`example_strong_ref`, since 2.2). The result of a traced operator (`example_value` of its
    node, since 2.1) leads to autograd, which saves the number that is multiplied by. Guards about symbolic sizes and
    floats name nodes of the graph and so keep all of it; without such guards it is freed.
    """

    def __init__(self) -> None:
        self._owners: list[weakref.ref[Any]] = []

    def note(self, graph: torch.fx.GraphModule) -> None:
        """Look at a graph that dynamo hands to its backend."""
        values = (node.meta.get("example_value") for node in graph.graph.nodes)
        traced = (each for each in values if isinstance(each, torch.Tensor) and each.grad_fn is not None)
        self._owners += [weakref.ref(each) for each in traced]

    def observe(self) -> AbstractContextManager[None]:
        """Look at what dynamo makes of floats inside."""
        from torch._dynamo.variables.builder import GraphArg

        def note_made(original: Callable[[Any], None], arg: Any) -> None:
            original(arg)
            if getattr(arg, "example_strong_ref", None) is not None:
                self._owners.append(weakref.ref(arg))

        return wrap(GraphArg, "__post_init__", note_made)

    def alive(self, *, collects: bool) -> list[torch.Tensor]:
        """Those that are alive, each once; with `collects`, once garbage is collected."""
        if collects and self._owners:
            gc.collect()
        owners = [owner for reference in self._owners if (owner := reference()) is not None]
        numbers = [number for owner in owners for number in _find_numbers(owner)]
        return list({storage_key(number): number for number in numbers}.values())


def _find_numbers(owner: Any) -> list[torch.Tensor]:
    """What a `GraphArg`, or the node of autograd that made a traced result, keeps."""
    if not isinstance(owner, torch.Tensor):
        return [owner.example_strong_ref]
    saved = (getattr(owner.grad_fn, name) for name in dir(owner.grad_fn) if name.startswith("_saved_"))
    return [each for each in saved if type(each) is torch.Tensor]  # what dynamo traces is fake, within DTensors, too


_CALL: Final = "compile_wrapper"
"""The function that `torch.compile` returns (`_TorchDynamoContext.__call__` of torch/_dynamo/eval_frame.py)."""


# --- private names of inductor: graphs that it records as CUDA graphs -------------------------------------------------
# Checked on torch 2.11 and 2.15.


Model = Callable[[list[Any]], Any]
"""What inductor wrote, called with a list of arguments that it empties."""


def route_cuda_graphs(
    capture: Callable[[Model, frozenset[int], frozenset[int]], Model], note_skip: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Let `capture(model, static, written)` stand for what records a CUDA graph.

    Of its arguments, the `static` ones keep their place, and the graph writes into the `written` ones.

    Inductor itself says which graphs are recorded, and `note_skip(why)` is called for one that is not.

    `torch._inductor.compile_fx.cudagraphify` (since 2.0); `log_cudagraph_skip_and_bump_counter` of
    torch/_inductor/cudagraph_utils.py (since 2.4), which compile_fx.py and output_code.py have imported.
    """
    from torch._inductor import compile_fx, output_code

    def cudagraphify(
        model: Model, static_input_idxs: Sequence[int] = (), *, mutated_input_idxs: Sequence[int] = (), **_: Any
    ) -> Model:
        return capture(model, frozenset(static_input_idxs), frozenset(mutated_input_idxs))

    def log_skip(message: str) -> None:
        note_skip(message.split("\n")[0])

    logs = [(owner, "log_cudagraph_skip_and_bump_counter", log_skip) for owner in (compile_fx, output_code)]
    return nested(patch(compile_fx, "cudagraphify", lambda _: cudagraphify), replace_all(logs))


def copy_inputs(inputs: list[Any], moving: Sequence[int]) -> None:
    """Put copies in the place of arguments, as a recording does.

    `CUDAGraphNode._allocate_and_copy_recording_inputs` of torch/_inductor/cudagraph_trees.py (since 2.1): all copies
    are allocated, then filled, then the arguments are let go. `static_input` of torch/_inductor/compile_fx.py (since
    2.0), `get_expanded_dims` and `index_expanded_dims` of torch/_inductor/output_code.py (since 2.6).
    """
    from torch._inductor import compile_fx, output_code

    copies = [compile_fx.static_input(inputs[index]) for index in moving]
    filled, read = [], []
    for copy, index in zip(copies, moving, strict=True):
        dims = output_code.get_expanded_dims(inputs[index])
        filled.append(output_code.index_expanded_dims(copy, dims))
        read.append(output_code.index_expanded_dims(inputs[index], dims))
        inputs[index] = copy
    if filled:
        torch._foreach_copy_(filled, read)
