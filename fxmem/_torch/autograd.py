"""Private names of torch's autograd: its graph's nodes, what they save, who runs them, each with why and since when.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.autograd
import torch.autograd.forward_ad
from torch.optim import Optimizer

from fxmem._torch.common import DispatchMode, nested, no_modes, patch, wrap
from fxmem.errors import UsageError

# --- the graph --------------------------------------------------------------------------------------------------------


def next_sequence_number() -> int:
    """Number the next autograd node made on this thread will get (`torch._C._autograd._get_sequence_nr`, since 2.1)."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Any) -> int:
    """Order in which a node was made; `AccumulateGrad` has 2**64 - 1 (`Node._sequence_nr`, since 1.8)."""
    return int(node._sequence_nr())


def input_metadata(node: Any) -> list[Any]:
    """Shape, dtype and device of each gradient a node takes (`Node._input_metadata`, since 2.1)."""
    return list(node._input_metadata)


def apply_function(node: Any, received: list[Any], *, keeps: bool) -> Any:
    """Call the backward of a Function; with `keeps`, `received` is whole afterwards.

    One with `boxed_grads_call`, such as torch.compile's, takes a list and lets go of gradients as it reads them
    (`BackwardCFunction.apply_boxed`, `_forward_cls`; since 2.15).
    """
    if getattr(getattr(node, "_forward_cls", None), "boxed_grads_call", False):
        return node.apply_boxed(list(received) if keeps else received)
    return node.apply(*received)


def edge_device(edge: torch.autograd.graph.GradientEdge) -> torch.device:
    """The device of the gradient that arrives there."""
    device: torch.device = input_metadata(edge.node)[edge.output_nr].device
    return device


def accepted_dtype(node: Any, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of a gradient that a node takes: a leaf's own `grad_dtype` (since 2.10), and None for any.

    FSDP2 sets it between forward and backward (as of 2.15), which `_input_metadata` does not show.
    """
    return getattr(node.variable, "grad_dtype", dtype) if is_accumulate_grad(node) else dtype


def saved_value(node: Any, name: str) -> Any:
    """What a node in C++ has saved under this name of derivatives.yaml (`Node._saved_self` and its like, since 1.9)."""
    return getattr(node, f"_saved_{name}")


def is_accumulate_grad(node: Any) -> bool:
    """Whether a node is the sink that writes a leaf's `.grad`."""
    return type(node).__name__ == "AccumulateGrad"


def output_number(tensor: torch.Tensor) -> int:
    """Which output of its `grad_fn` a tensor is (`Tensor.output_nr`, since 0.4)."""
    return int(tensor.output_nr)


def _count_held_once(holder: list[Any], index: int) -> int:
    tensor = holder[index]
    return sys.getrefcount(tensor)


_HELD_ONCE = _count_held_once([object()], 0)
"""What `_count_held_once` answers for an object that only the list holds; differs between Python versions."""


def is_sole_owner(holder: list[Any], index: int, *, storage: bool) -> bool:
    """Whether that tensor has no owner but `holder[index]`: the C++ engine asks before it reuses a gradient.

    With `storage`, no other tensor may share its storage either. Source: `can_accumulate_inplace` in
    torch/csrc/autograd/input_buffer.cpp and `AccumulateGrad::accumulateGrad` in
    torch/csrc/autograd/functions/accumulate_grad.h. `Tensor._use_count` (since 2.4) counts C++ owners, all of Python
    being one; `_storage_Use_Count` (since 2.1) counts one for the tensor and one for the storage's Python object.
    """
    if _count_held_once(holder, index) > _HELD_ONCE or holder[index]._use_count() > 1:
        return False
    return not storage or torch._C._storage_Use_Count(holder[index].untyped_storage()._cdata) <= 2


def gradient_edge(tensor: Any) -> torch.autograd.graph.GradientEdge:
    """Where the gradient of a tensor arrives in autograd's graph; what is an edge already, itself.

    `torch.autograd.graph.get_gradient_edge` finds the sink of a leaf by a view of it. A leaf that a transform of
    torch.func wraps is unwrapped on the way there, and nothing below requires a gradient. So those keys are left out
    (`torch._C._ExcludeDispatchKeyGuard`, since 1.11; c10/core/DispatchKey.h), and no kernel runs.
    """
    if isinstance(tensor, torch.autograd.graph.GradientEdge):
        return tensor
    if tensor.grad_fn is not None or not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return torch.autograd.graph.get_gradient_edge(tensor)
    keys, key = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchGradWrapper), torch._C.DispatchKey
    keys = keys.add(key.FuncTorchDynamicLayerFrontMode).add(key.FuncTorchDynamicLayerBackMode)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return torch.autograd.graph.GradientEdge(_sink(tensor), 0)


def _sink(leaf: torch.Tensor) -> Any:
    """The `AccumulateGrad` of a leaf, for which no kernel runs."""
    with no_modes(), torch.enable_grad(), _NoKernel():  # type: ignore[no-untyped-call]
        return torch.ops.aten.neg.default(leaf).grad_fn.next_functions[0][0]


def _original(saved: Any) -> Any:
    """The leaf itself that a Function has saved, with what the program keeps in its attributes.

    Hooks of saved tensors have C++ make another tensor of it, which leads to the same `AccumulateGrad`
    (torch/csrc/autograd/saved_variable.cpp, `SavedVariable::unpack`); without any it is the leaf.
    """
    if not isinstance(saved, torch.Tensor) or saved.grad_fn is not None or not saved.requires_grad:
        return saved
    return saved if torch._C._functorch.is_functorch_wrapped_tensor(saved) else _sink(saved).variable


class _NoKernel(DispatchMode):  # type: ignore[no-untyped-call]
    """Answers `_sink`'s operator with an empty tensor; what a new `AccumulateGrad` asks for, its device, goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.neg.default:
            return func(*args, **(kwargs or {}))
        with torch._C._DisableTorchDispatch():
            return torch.empty(0)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another (`Tensor._is_view`, since 1.0)."""
    return bool(tensor._is_view())


is_zero: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_zerotensor")
"""Whether a tensor is zeros without memory, the derivative of what is constant (`Tensor._is_zerotensor`, since
1.11)."""

version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor's storage was written to (`Tensor._version`, since 0.4); the tape of an OPERATORS plan asks for
each tensor of each op."""


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    """The live table of `register_hook`, None before its first call (`Tensor._backward_hooks`, since 0.1)."""
    return tensor._backward_hooks


def accumulation_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Those of `register_post_accumulate_grad_hook`, in order (`Tensor._post_accumulate_grad_hooks`, since 2.1)."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def is_forward_mode() -> bool:
    """Whether tangents are computed along with values (`torch.autograd.forward_ad._current_level`, since 1.8)."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def share_without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage without its history, made unseen by observers of calls
    (`torch._C.DisableTorchFunction`, since 1.11).

    What `torch.func.grad` wraps is wrapped once more: to detach it would drop tangents that it has inside
    (`torch._C._functorch.is_gradtrackingtensor`, since 2.0).
    """
    with torch._C.DisableTorchFunction():
        return tensor.data if torch._C._functorch.is_gradtrackingtensor(tensor) else tensor.detach()


def run_for_gradients(nodes: Iterable[Any], run: Callable[[], None], *, create_graph: bool) -> None:
    """Call `run()`; the nodes it calls compute the gradients that go to `nodes` and no other, without any all of them.

    A node in C++ asks the graph task of its thread which of its outputs are wanted (`task_should_compute_output` in
    torch/csrc/autograd/function.h). The task here is one of the C++ engine: a backward of a leaf of its own, whose hook
    is `run`, with `nodes` as further inputs (`GraphTask::init_to_execute` in engine.cpp; `GradientEdge` since 2.1).
    """
    error: list[BaseException] = []

    def hook(gradient: torch.Tensor) -> None:
        try:
            run()
        except BaseException as raised:  # C++ would carry it on without its traceback
            error.append(raised)

    with no_modes(), torch._C.DisableTorchFunction():
        leaf, one = torch.zeros((), requires_grad=True, device="cpu"), torch.ones((), device="cpu")
        leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in nodes]
    engine: Any = torch._C._ImperativeEngine()
    engine.run_backward((leaf,), (one,), False, create_graph, (leaf, *edges) if edges else (), True, not edges)
    if error:
        raise error[0]


# --- saved tensors ----------------------------------------------------------------------------------------------------


def _same(value: Any) -> Any:
    return value


class Hooks:
    """A pair of saved-tensor hooks. Kept by the handles that may still unpack, and by the context that pushed it."""

    __slots__ = ("__weakref__", "change_nothing", "pack", "unpack")

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack = pack
        self.unpack = unpack
        self.change_nothing = pack is unpack is _same


NO_HOOKS = Hooks(_same, _same)
"""The pair that changes nothing."""


def observe_saved_tensors(
    pack: Callable[[Hooks, Any], Any], unpack: Callable[[Any], Any]
) -> AbstractContextManager[None]:
    """Route every tensor autograd saves on this thread through `pack(hooks, tensor) -> handle` and `unpack(handle)`.

    `hooks` are those the program itself has pushed (`save_on_cpu`, checkpointing), or a pair that changes nothing. C++
    frees them when a node has run; the handle is therefore the only one of ours to keep them.
    `torch.autograd.graph.saved_tensors_hooks` pushes and pops through `torch._C._autograd` (since 1.10). `torch.func`
    transforms refuse hooks (`disable_saved_tensors_hooks`, since 1.13), because a hook may do anything to a tensor that
    belongs to a transform; the pair that changes nothing does not, and stays.
    """
    pushed: list[Hooks | None] = []

    def push_recorded(push: Callable[[Any, Any], None], own_pack: Any, own_unpack: Any) -> None:
        hooks = Hooks(own_pack, own_unpack)
        pushed.append(hooks)
        weak = weakref.ref(hooks)

        def pack_current(tensor: Any) -> Any:
            current = weak()
            assert current is not None
            return pack(current, tensor)

        push(pack_current, unpack)

    def pop_recorded(pop: Callable[[], None]) -> None:
        pop()
        pushed.pop()

    def disable_outer(disable: Callable[[str], Any], message: str) -> Any:
        return disable(message) if len(pushed) > 1 else contextlib.nullcontext()

    return nested(
        wrap(torch.autograd.graph, "disable_saved_tensors_hooks", disable_outer, here=True),
        wrap(torch._C._autograd, "_push_saved_tensors_default_hooks", push_recorded, here=True),
        wrap(torch._C._autograd, "_pop_saved_tensors_default_hooks", pop_recorded, here=True),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    )


# --- entry points routed elsewhere ------------------------------------------------------------------------------------


def route_engine(
    run_backward: Callable[..., tuple[Any, ...]],
    task_id: Callable[[], int],
    node: Callable[[], Any],
    will_execute: Callable[[Any], bool | None],
    queue_callback: Callable[[Callable[[], None]], bool],
    takes: Callable[[Any], bool] = lambda roots: True,
) -> AbstractContextManager[None]:
    """Send every backward on this thread to another engine, if it takes the roots.

    `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` end in
    `Variable._execution_engine.run_backward(roots, grads, retain_graph, create_graph, inputs, allow_unreachable,
    accumulate_grad)` (since 0.4), which pipelines call themselves for roots whose data they have freed.
    `torch._C._current_graph_task_id` is how `torch.utils.checkpoint` tells one backward from the next (since 1.11), and
    `torch._C._current_autograd_node` how an unpack hook asks which node it unpacks for (since 2.1);
    `torch._C._will_engine_execute_node(node)` is how `register_multi_grad_hook` learns how many gradients
    will come (since 2.0); `queue_callback(f) -> bool` takes what a hook wants run at the end, or answers False when no
    walk of ours is under way.
    """
    me = threading.get_ident()

    def current_task(original: Callable[[], int]) -> int:
        mine = task_id()
        return mine if mine >= 0 else original()

    def current_node(original: Callable[[], Any]) -> Any:
        mine = node()
        return original() if mine is None else mine

    def executes(original: Callable[[Any], bool], asked: Any) -> bool:
        mine = will_execute(asked)
        return original(asked) if mine is None else mine

    class Engine:
        """Stands in for the C++ engine object; what is not here is the original's."""

        def __init__(self, original: Any) -> None:
            self._original = original

        def __getattr__(self, name: str) -> Any:
            return getattr(self._original, name)

        def queue_callback(self, callback: Callable[[], None]) -> None:
            if threading.get_ident() != me or not queue_callback(callback):
                self._original.queue_callback(callback)

        def run_backward(
            self, tensors: Any, grad_tensors: Any, keep_graph: bool, create_graph: bool, *rest: Any, **settings: Any
        ) -> Any:
            run = run_backward if threading.get_ident() == me and takes(tensors) else self._original.run_backward
            return run(tensors, grad_tensors, keep_graph, create_graph, *rest, **settings)

    return nested(
        wrap(torch._C, "_current_graph_task_id", current_task, here=True),
        wrap(torch._C, "_current_autograd_node", current_node, here=True),
        wrap(torch._C, "_will_engine_execute_node", executes, here=True),
        patch(torch.autograd.Variable, "_execution_engine", Engine),
    )


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that runs is over (`Variable._execution_engine.queue_callback`, since 0.4)."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def is_inner_backward(*, create_graph: bool) -> bool:
    """Whether another backward follows one whose gradients have a graph, as those of torch.func always have: within
    its outermost transform for gradients none does (`torch._C._functorch.get_interpreter_stack`, since 2.0)."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return create_graph and sum(each.key() == torch._C._functorch.TransformType.Grad for each in stack) != 1


def observe_backwards(
    around: Callable[[], AbstractContextManager[None]], after_gradients: Callable[[], None]
) -> AbstractContextManager[None]:
    """Run every backward that accumulates gradients inside `around()`, on torch's own engine, and call
    `after_gradients()` after one that returns them and is no inner one."""

    def run(
        original: Callable[..., Any],
        outputs: Any,
        given: Any,
        retain: bool,
        create_graph: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        accumulates = kwargs.get("accumulate_grad", True)
        with around() if accumulates else contextlib.nullcontext():
            found = original(outputs, given, retain, create_graph, *args, **kwargs)
        if not accumulates and not is_inner_backward(create_graph=create_graph):
            after_gradients()
        return found

    return wrap(torch.autograd, "_engine_run_backward", run)


def observe_function_calls(
    call: Callable[[type, tuple[Any, ...], Callable[..., Any]], Any],
    no_materialize: Callable[[Any], None],
) -> AbstractContextManager[None]:
    """Show every `autograd.Function.apply` on this thread to `call(cls, args, original)`.

    Up to torch 2.14 `Function.apply` ends in `_SingleLevelFunction.apply`, looked up anew on each call, so that
    functions bound as `f = F.apply` at import time are seen too (since 2.0). From 2.15 it is the C method itself: what
    was bound before goes past us, and is seen as the torch calls its forward makes. Hooks put on a Function's node are
    told to `node_hook(node, "register_hook" | "register_prehook", hook)`, for they live in C++ and only the engine runs
    them; `no_materialize(ctx)` says that a Function takes undefined gradients as None.
    """
    me = threading.get_ident()
    function = torch.autograd.Function
    applied: Any = (
        torch.autograd.function._SingleLevelFunction
        if isinstance(vars(function).get("apply"), classmethod)
        else function
    )

    def apply(original: Any) -> Any:
        del original  # bound to this class, but each call needs its own

        def apply_routed(cls: Any, *args: Any) -> Any:
            c_apply = super(applied, cls).apply
            return call(cls, args, c_apply) if threading.get_ident() == me else c_apply(*args)

        return classmethod(apply_routed)

    def set_materialize(original: Any, ctx: Any, value: bool) -> None:
        if not value:
            no_materialize(ctx)
        original(ctx, value)

    return nested(
        patch(applied, "apply", apply),
        patch(
            torch.autograd.function.BackwardCFunction,
            "saved_tensors",
            lambda read: property(lambda self: tuple(map(_original, read.__get__(self)))),
        ),
        wrap(torch.autograd.function.FunctionCtx, "set_materialize_grads", set_materialize, here=True),
    )


class _Found(Exception):
    """A node's table of hooks."""


_PROBE: Final = object()
"""In the place of a hook, asks for the table that it would go into."""


def observe_node_hooks(note: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `note()` before a hook is put on a node of autograd's graph; inside, `node_hooks` finds those of a node.

    The nodes keep them in C++, those of an `autograd.Function` as all others, `AccumulateGrad` among them. Each comes
    there by `_HookMixin._register_hook(table, hook)` (torch/csrc/autograd/python_cpp_function.cpp,
    `registerFunctionHook`; since 0.4).
    """

    def register(original: Callable[..., Any], table: dict[int, Any] | None, hook: Any) -> Any:
        if hook is _PROBE:
            raise _Found(table)
        note()
        return original(table, hook)

    return wrap(torch.autograd.function._HookMixin, "_register_hook", register, here=True)


_OF_TRACING: Final = "torch._functorch._aot_autograd.logging_utils"
"""Puts hooks on the nodes of a graph that is compiled, which write down of what line each node is (since 2.0)."""


def node_hooks(node: Any, kind: str) -> list[Callable[..., Any]]:
    """The hooks of the program that a node's method `kind`, "register_hook" or "register_prehook", has been given, in
    order."""
    try:
        getattr(node, kind)(_PROBE)
    except _Found as found:
        return [each for each in (found.args[0] or {}).values() if getattr(each, "__module__", "") != _OF_TRACING]
    raise AssertionError(f"{type(node).__name__}.{kind} did not reach _register_hook")


# --- an optimizer that steps within backward: each gradient is applied and freed as soon as it is accumulated ---------
# The private names of torch used here: `Optimizer._optimizer_step_pre_hooks` and what `Optimizer.profile_hook_step`
# wraps (since 2.0), `Tensor._make_wrapper_subclass` (since 1.10).


_NOT_WHOLE = (
    "expected nobody to read gradients after backward, but this optimizer has applied and freed each within it "
    "(fxmem.release_gradients); clipping by global norm, GradScaler and accumulation need all of them at once: call "
    "remove() on what release_gradients returned"
)


def release_gradients(optimizer: Optimizer) -> GradientRelease:
    """Make an optimizer step within backward, and free each gradient at once.

    Parameters are stepped one at a time. The loop stays as it is: `optimizer.step()` finds nothing left to do, and is
    where a step ends. Parameters after the step are those of the ordinary loop, bit for bit, in each form of the
    optimizer (for-loop, foreach, fused): all of torch's but LBFGS update each parameter by itself. The `state_dict`s,
    `param_groups` and learning rate schedulers are as before. Parameters added or unfrozen later are stepped as usual.

    What needs all gradients at once is refused: clipping by global norm, `GradScaler` and accumulation raise a
    UsageError where they read the first gradient.

    Returns:
        A handle, whose `remove()` undoes it between two steps.

    Raises:
        UsageError: the optimizer steps within backward already, has nothing to train or needs a closure. In backward:
            it keeps numbers for several parameters together.
    """
    return GradientRelease(optimizer)


class GradientRelease:
    """The optimizer steps within backward until `remove()`."""

    def __init__(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if steps_in_backward(optimizer):
            raise UsageError(f"expected an ordinary optimizer; this {name} steps within backward already")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(f"optimizer {name} calls the model again from inside step(), which backward cannot")
        self._optimizer = optimizer
        self._hooks: list[Any] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    step = functools.partial(self._step, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(step))
        if not self._hooks:
            raise UsageError(f"expected a parameter that requires a gradient in this {name}, found none")
        self._hooks.append(optimizer.register_step_pre_hook(self._end_step))

    def remove(self) -> None:
        """Make it an ordinary optimizer again."""
        self._end_step()
        for hook in self._hooks:
            hook.remove()

    def _step(self, index: int, parameter: torch.Tensor) -> None:
        """Step one parameter, with the settings and the state that the optimizer has now."""
        group = self._optimizer.param_groups[index]
        alone = {**group, "params": [parameter]}
        _step_group(self._optimizer, alone)
        changed = [key for key in group if key != "params" and alone[key] is not group[key]]
        if changed:
            raise UsageError(
                f"optimizer {type(self._optimizer).__name__} cannot step within backward, one parameter at a time: its "
                f"step changes {changed[0]!r} of all parameters together"
            )
        parameter.grad = _Released(parameter.shape, parameter.dtype, parameter.device)

    def _end_step(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter.grad, _Released):
                    parameter.grad = None


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Whether the optimizer's gradients are released."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {})  # a wrapper may leave out `Optimizer.__init__`
    return any(isinstance(getattr(hook, "__self__", None), GradientRelease) for hook in hooks.values())


def _step_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Step one group with the optimizer's state; not what is to run once a step: hooks, a scheduler's count."""
    alone: Optimizer = object.__new__(type(optimizer))
    vars(alone).update(vars(optimizer), param_groups=[group])
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(alone)


class _Released(torch.Tensor):
    """Stands in `.grad` for a gradient that has been applied and freed. It has no memory; what reads it is refused."""

    @staticmethod
    def __new__(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> _Released:
        made: _Released = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise UsageError(_NOT_WHOLE)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, torch.device]]:
        return [], (self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[torch.dtype, torch.device], size: Sequence[int], stride: Any
    ) -> _Released:
        return _Released(size, *context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<gradient of {tuple(self.shape)}, applied and freed>"
