"""Everybody else's way of checkpointing a model of `plans.py`; FLOPs counted while a step really runs.

Each contender is a list of `Candidate`s: settings it can be given, and a function that makes the model with them, ready
to train. FLOPs are counted by `fxmem.simulation.recording.flops` (every op) and by torch's own formulas alone
(products, convolutions, attention). Under a dispatch mode, and so under `FlopCounterMode`, a model of torch.compile
runs as if it were not compiled; for it FLOPs are those of the forward and backward graphs that the partitioner makes,
less those of the joint graph they were cut from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from benchmarks.planning.plan_models import Case
from fxmem.simulation.recording.flops import op_flops
from fxmem.simulation.step.step import default_loss

__all__ = ["Candidate", "Counted", "Ready", "candidates", "count"]

BUDGETS = (1.0, 0.7, 0.5, 0.3)
"""What torch.compile is asked to keep of the activations it would save."""
INDUCTOR_BUDGETS = (1.0, 0.5)
"""The same where its kernels are built."""
SAC_SHARES = (0.85, 0.7)
"""Of the bytes beyond parameters that the SAC ILP believes the model's peak to have, what it is asked to stay
within."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """FLOPs of one step, by every formula of fxmem and by torch's alone."""

    forward: int
    forward_products: int
    total: int
    products: int


@dataclasses.dataclass
class Ready:
    """A model that is set up to recompute."""

    model: nn.Module
    graphs: list[tuple[int, int]] | None = None
    """Extra FLOPs of each compiled graph, filled in as it is compiled; None where a run is to be counted."""
    settings: Callable[[], Any] | None = None
    """A context manager to run it in."""
    is_counted: bool = True
    """Whether its FLOPs can be counted: those of fused kernels are not."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One contender at one setting."""

    contender: str
    setting: str
    make: Callable[[], Ready]


def candidates(case: Case) -> Iterator[Candidate]:
    """Every other contender for a model, at every setting it is tried with."""
    with torch.device("meta"):
        model = case.build()
    if case.stages is not None:
        n = len(case.stages(model))
        root = round(math.sqrt(n))
        for segments, note in ((root, ", about the root"), (n, "")):
            setting = f"{segments} segments of {n} stages{note}"
            yield Candidate("checkpoint_sequential", setting, functools.partial(_sequential, case, segments))
    inner: Any = getattr(model, "model", model)
    if hasattr(inner, "set_grad_checkpointing"):
        yield Candidate("timm", "set_grad_checkpointing(True)", functools.partial(_enabled, case, _by_timm))
    if hasattr(inner, "gradient_checkpointing_enable"):
        yield Candidate(
            "transformers", "gradient_checkpointing_enable()", functools.partial(_enabled, case, _by_transformers)
        )
    if case.efficient is not None:
        efficient = case.efficient
        yield Candidate("torchvision", "memory_efficient=True", lambda: Ready(efficient()))
    for budget in BUDGETS:
        yield Candidate(
            "torch.compile", f"activation_memory_budget {budget:g}", functools.partial(_compiled, case, budget)
        )
    for budget in INDUCTOR_BUDGETS:
        yield Candidate(
            "torch.compile, inductor", f"activation_memory_budget {budget:g}", functools.partial(_fused, case, budget)
        )
    for share in SAC_SHARES:
        yield Candidate(
            "SAC ILP",
            f"{share:.0%} of what it believes the activations take",
            functools.partial(_selective, case, share),
        )


# --- counting ---------------------------------------------------------------------------------------------------------


class _Counter(TorchDispatchMode):
    """Adds up the FLOPs of what runs; keeps no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(func, args, kwargs or {}, out)
        return out

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """One call. Raises ValueError where no formula is known: such a step is not to be compared."""
        flops = op_flops(func, args, kwargs, out)
        if flops is None:
            raise ValueError(f"no formula for the FLOPs of {func}")
        self.all += flops
        if func._overloadpacket in flop_registry:
            self.products += flops


def count(model: nn.Module, args: tuple[Any, ...]) -> Counted:
    """FLOPs of one real training step; gradients that are there already would be added to."""
    model.zero_grad(set_to_none=True)
    with _Counter() as counter:
        loss = default_loss(model(*args))
        forward, forward_products = counter.all, counter.products
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return Counted(forward, forward_products, counter.all, counter.products)


def _count_graph(module: fx.GraphModule) -> _Counter:
    counter = _Counter()
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            counter.add(node.target, args, kwargs, node.meta["val"])
    return counter


# --- by hand ----------------------------------------------------------------------------------------------------------


class _Segmented(nn.Module):
    """The stages of a model in checkpointed segments; the last segment is stored, as `checkpoint_sequential` does."""

    def __init__(self, model: nn.Module, stages: list[nn.Module], segments: int) -> None:
        super().__init__()
        self.whole, self.stages, self.segments = model, nn.ModuleList(stages), segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint_sequential(list(self.stages), self.segments, x, use_reentrant=False)
        return result


def _sequential(case: Case, segments: int) -> Ready:
    assert case.stages is not None
    model = case.build()
    return Ready(_Segmented(model, case.stages(model), segments))


def _enabled(case: Case, enable: Callable[[Any], None]) -> Ready:
    model = case.build()
    enable(getattr(model, "model", model))
    return Ready(model)


def _by_timm(model: Any) -> None:
    model.set_grad_checkpointing(True)


def _by_transformers(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


# --- torch.compile ----------------------------------------------------------------------------------------------------


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Training-mode batch norm whose kernel does not read the running statistics: recomputed as it is, it would read
    what the first run has overwritten."""
    if not training:
        return NotImplemented
    out, now, rstd = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    n = x.numel() / x.shape[1]
    spread = (1 / (rstd * rstd) - eps) * (n / (n - 1))
    return out, now, rstd, mean * (1 - momentum) + now * momentum, variance * (1 - momentum) + spread * momentum


def _batch_norm_backward(
    grad: Any, x: Any, weight: Any, mean: Any, variance: Any, now: Any, rstd: Any, training: bool, eps: float, mask: Any
) -> Any:
    if mean is None or not training:
        return NotImplemented
    return torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, now, rstd, training, eps, mask)


_DECOMPOSITIONS = {
    torch.ops.aten._native_batch_norm_legit_functional.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}


def _compiled(case: Case, budget: float) -> Ready:
    """torch.compile's min-cut partitioner, its graphs run op by op with the kernels that everybody else runs.

    Inductor's own decompositions are left out: unfused, each of their small steps would have a buffer of its own, and
    the peak be larger.
    """
    import torch._functorch.config as settings
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    torch._dynamo.reset()
    extra: list[tuple[int, int]] = []

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        once = _count_graph(joint)
        kwargs.setdefault("compiler", "inductor")
        forward, backward = min_cut_rematerialization_partition(joint, *args, **kwargs)
        first, second = _count_graph(forward), _count_graph(backward)
        extra.append((first.all + second.all - once.all, first.products + second.products - once.products))
        return forward, backward

    def as_is(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(boxed: list[Any]) -> Any:
            return fx.Interpreter(graph).boxed_run(boxed)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=as_is, bw_compiler=as_is, partition_fn=partition, decompositions=_DECOMPOSITIONS)
    model: Any = torch.compile(case.build(), backend=backend)
    return Ready(model, extra, lambda: settings.patch(activation_memory_budget=budget))


def _fused(case: Case, budget: float) -> Ready:
    """The step as inductor compiles it for the CPU."""
    import torch._functorch.config as settings

    torch._dynamo.reset()
    model: Any = torch.compile(case.build())
    return Ready(model, settings=lambda: settings.patch(activation_memory_budget=budget), is_counted=False)


# --- the SAC ILP ------------------------------------------------------------------------------------------------------


def _cost(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """The op's result and milliseconds by a roofline (312 TFLOP/s, 2 TB/s); the tool's own, the same formula, demands a
    GPU."""
    kwargs = kwargs or {}
    out = func(*args, **kwargs)
    flops = (
        flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        if func._overloadpacket in flop_registry
        else 0
    )
    moved = sum(
        t.numel() * t.element_size()
        for t in torch.utils._pytree.tree_leaves((args, kwargs, out))
        if isinstance(t, torch.Tensor)
    )
    return out, max(flops / 312e9, moved / 2e9)


@functools.cache
def _module_stats(build: Callable[[], nn.Module], args: Callable[[], tuple[Any, ...]]) -> tuple[Any, Any]:
    """The tool's graph of modules, and its operator statistics."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker, _ModState
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    RuntimeEstimator._roofline_estimate = staticmethod(_cost)
    with torch.device("meta"):  # timm's initialisation reads values, which fakes do not have
        on_meta = build()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model, inputs = on_meta.to_empty(device="cpu"), torch.utils._pytree.tree_map(mode.from_tensor, args())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker, runtimes, estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
        tracker.track_external(model, optimizer, *inputs)
        with tracker:
            for step in range(2):
                default_loss(model(*inputs)).backward()  # type: ignore[no-untyped-call]
                if step:
                    tracker.memory_tracking[model].snapshots.setdefault(_ModState.POST_BW, []).append(
                        tracker.get_tracker_snapshot("current")
                    )
                optimizer.step()
                optimizer.zero_grad()
                if not step:
                    tracker.reset_mod_stats()
        # It asks for these of modules, too, that have no backward, as a rotary embedding has none.
        for stats in tracker.memory_tracking.values():
            for state in (_ModState.PRE_BW, _ModState.PEAK_BW):
                stats.snapshots.setdefault(state, stats.snapshots[_ModState.POST_FW][-1:])
        with runtimes(estimate_mode_type="operator-level-cost-model"):
            default_loss(model(*inputs)).backward()  # type: ignore[no-untyped-call]
        with estimator(estimate_mode_type="operator-level-cost-model"):
            default_loss(model(*inputs))
        for order in (runtimes.mod_fw_pre_order, runtimes.mod_fw_post_order):
            order[:] = dict.fromkeys(
                order
            )  # it expects every module to be called once; a ReLU that is called again adds nothing here
        graph = parse_module_info(aggregate_stats(model, tracker, runtimes, estimator, torch.device("cpu")))
    return graph, estimator.sac_mod_stats


def _selective(case: Case, share: float) -> Ready:
    """The modules and the ops within them that `sac_milp` and `get_optimal_checkpointing_policy_per_module` say."""
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    graph, statistics = _module_stats(case.build, case.args)
    believed, _ = get_peak_memory_runtime_baseline(graph)
    parameters = graph.nodes[0]["param_per_module"]
    decisions, _, peak = sac_milp(graph, memory_budget=(parameters + share * (believed - parameters)) / 2**30)
    if peak < 0:
        raise RuntimeError("its ILP finds no solution")
    model = case.build()
    for name, discarded in decisions.items():
        stats = statistics[name]
        # An op without bytes and time would be no part of its problem, and have no answer.
        stats.runtimes[:] = [max(runtime, 1e-9) for runtime in stats.runtimes]
        # The ops that it insists on keeping may take more than what it has decided to keep; then the least that it can.
        kept = (min(1 - discarded + step / 20, 1.0) for step in range(21))
        saved = next(
            filter(None, (get_optimal_checkpointing_policy_per_module(stats, memory_budget=each) for each in kept)),
            None,
        )
        if saved is None:
            raise RuntimeError("its ILP of a module finds no solution")
        _checkpoint_selectively(model.get_submodule(name.partition(".")[2]), stats.func_names, saved)
    return Ready(model)


def _checkpoint_selectively(module: nn.Module, names: Sequence[str], saved: Sequence[int]) -> None:
    """Checkpoint a module, `names` being the ops it runs on fakes, of which those with a 1 in `saved` are kept.

    On fakes a scalar may be made a tensor first, so names that the real step does not run are passed over.
    """
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    def contexts() -> Any:
        next_at = {False: 0, True: 0}

        def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if func in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            name = func._overloadpacket.__name__
            at = next((at for at in range(next_at[context.is_recompute], len(names)) if names[at] == name), None)
            if at is None:
                raise RuntimeError(f"among its ops of a module {name} is not where the real step runs it")
            next_at[context.is_recompute] = at + 1
            return CheckpointPolicy.MUST_SAVE if saved[at] else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)

    forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )  # type: ignore[method-assign]
