"""One step of a model, run once on FakeTensors, becomes a `Profile`.

The program that runs is the plain training step of `fxmem.step`, on a fake copy of the model. Around it stand, each in
its own module: FakeTensors on the target's device, the kernels the target would choose, the autograd engine, the
tracer that writes the graph, and the recorder that logs every allocation and free. What is here ties them together and
turns the log into records.

The steady state. Optimizer state exists before the step: at the optimizer's turn it is stepped once unrecorded and what
it leaves behind counts as there from the start. If anything else outlives the step (a cache the first call fills), the
step is run a second time, with that already there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.fx

from fxmem import __version__, _torch, flops, kernels, liveness, values
from fxmem.backward import Engine
from fxmem.errors import AnalysisError, EnvironmentLacksError, FxmemError
from fxmem.faking import fake_inputs, fake_model
from fxmem.recording import LOSS, OPTIMIZER, Recorder
from fxmem.records import Assumption, InputTensor, Kind, Node, Phase, Profile, Storage, Target, TensorInfo, Unknown
from fxmem.step import Loss, Mode, OptimizerSpec, Precision, default_loss, describe, make_optimizer, run_step
from fxmem.tracing import ProgramTracer, innermost_user_line
from fxmem.workspaces import Collector, ConvSettings, with_workspaces

__all__ = ["Traced", "profile"]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A profile and the graph it was taken from."""

    profile: Profile
    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor | None]
    opaque: tuple[str, ...]
    """What the graph names but cannot hold; empty when a GraphModule of it can run."""


def profile(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mode: Mode,
    loss: Loss | None,
    optimizer: OptimizerSpec,
    precision: Precision | None,
    target: Target,
    name: str,
    progress: Callable[[str], None] = lambda _: None,
) -> Traced:
    """Run one step of `model(*args, **kwargs)` as it would run on `target` and account for every byte.

    Args:
        model: real or on meta; neither it nor its tensors are changed. Run as it is: `train()` or `eval()` is the caller's.
        args, kwargs: tensors real, meta or fake, nested as the model takes them.
        mode: `train` (forward, backward, optimizer) or `infer` (forward under `no_grad`).
        loss: output -> scalar tensor; None takes `output.loss`, else the sum of the floating-point outputs.
        optimizer: see `fxmem.step.make_optimizer`; None leaves the optimizer out.
        precision: autocast dtype, None for none.
        name: what to call the model in the record.
        progress: told in a few words what happens next.

    Raises:
        AnalysisError: the model raised, or asked for a value that only real data has.
        EnvironmentLacksError: this build of torch cannot hold CUDA tensors.
    """
    _require_device(target)
    run = _Run(model, args, kwargs, mode=mode, loss=loss, optimizer=optimizer, precision=precision, target=target)
    progress("running one step on fake tensors")
    with run.environment():
        run.step()
        if run.left_over():
            progress("running it again: the first step left tensors behind")
            run.step()
    progress("accounting")
    return run.result(name)


def _require_device(target: Target) -> None:
    if target.device == "cuda" and not torch.backends.cuda.is_built():
        raise EnvironmentLacksError(
            f"expected a torch built with CUDA to analyse for {target.name}; torch {torch.__version__} is built for the CPU only and cannot hold CUDA gradients, even fake ones. "
            "Install the ordinary wheel (pip install torch; it needs no GPU), or use target='cpu'."
        )


class _Run:
    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mode: Mode,
        loss: Loss | None,
        optimizer: OptimizerSpec,
        precision: Precision | None,
        target: Target,
    ) -> None:
        self.mode, self.loss, self.precision, self.target = mode, loss, precision, target
        self.fakes = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        device = torch.device(self.target.device, 0) if self.target.device == "cuda" else torch.device("cpu")
        self.unknown_flops: dict[str, int] = {}
        self.collector: Collector | None = None
        if target.device == "cuda":
            cudnn = torch.backends.cudnn
            deterministic = torch.are_deterministic_algorithms_enabled()
            settings = ConvSettings(allow_tf32=cudnn.allow_tf32, deterministic=cudnn.deterministic or deterministic, enabled=cudnn.enabled, cudnn_version=cudnn.version() or 0)
            self.collector = Collector(target, torch.__version__, os.environ, settings, deterministic=deterministic)
        self.recorder = Recorder(device, self.fakes, self._count_flops, self._inspect)
        self.model = fake_model(model, self.fakes, device)
        with self.fakes:
            kernels.flatten_rnn_weights(self.model)
        self.args, self.kwargs = fake_inputs((args, kwargs), self.fakes, device)
        self.inputs = _name_inputs(self.model, self.args, self.kwargs)
        self.tracer = ProgramTracer(self.model, self.recorder, replacement=kernels.replacement, on_tensor_method=self._tensor_method)
        self.engine = Engine(self.recorder, around=self.tracer.listening_in_backward)
        self.optimizer_spec = optimizer if mode == "train" else None
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters = dict(self.model.named_parameters())
        self.cycles = 0
        for parameter, tensor in self.parameters.items():
            self.recorder.resident(tensor, Kind.PARAMETER, parameter)
        for buffer, tensor in self.model.named_buffers():
            self.recorder.resident(tensor, Kind.BUFFER, buffer)
        for label, tensor in self.inputs:
            self.recorder.resident(tensor, Kind.INPUT, label)

    # --- running -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Everything the step runs inside; nothing global is left changed."""
        collecting = gc.isenabled()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_rng_unchanged())
                stack.enter_context(kernels.target_kernels(self.target))
                stack.enter_context(values.libraries_ask_for_values())
                stack.enter_context(self.fakes)
                stack.enter_context(self.recorder)
                stack.enter_context(self.engine.routed(self.tracer.call_function))
                stack.enter_context(self.tracer.listening())
                stack.enter_context(_torch.quiet_fake_kernels())
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # the program's own warnings are about a run that is not real
                gc.disable()  # a collection in mid-step would free at a moment no real run can be held to
                yield
        except FxmemError:
            raise
        except Exception as error:
            raise _explain(error, self.model) from error
        finally:
            self.recorder.close()
            if collecting:
                gc.enable()

    def step(self) -> None:
        recorder = self.recorder
        gc.collect()
        recorder.begin()
        if self.collector is not None:
            self.collector.begin()
        self.tracer.again()
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.optimizer_spec, self.model.parameters())
            _choose_form(self.optimizer, foreach=kernels.default_foreach(self.target))
        with recorder.recording():
            run_step(
                self.model,
                self.args,
                self.kwargs,
                loss=self._noted_loss,
                optimizer=self.optimizer,
                precision=self.precision,
                device_type=self.target.device,
                mode=self.mode,
                mark=self._mark,
            )
        recorder.end_phase()
        self._name_gradients()
        for tensor in self.parameters.values():
            tensor.grad = None
        held = len(recorder.alive())
        gc.collect()
        self.cycles = held - len(recorder.alive())

    def _noted_loss(self, out: Any) -> torch.Tensor:
        value = (default_loss if self.loss is None else self.loss)(out)
        if isinstance(value, torch.Tensor):
            self.recorder.rename(value, "", Kind.OUTPUT)
        return value

    def _mark(self, part: Literal["forward", "loss", "backward", "optimizer"]) -> None:
        recorder = self.recorder
        if part == "loss":
            recorder.on_call(LOSS)
        elif part == "backward":
            recorder.end_of_forward()
            recorder.outputs_are(len(self.tracer.nodes) - 1)
            recorder.set_phase(Phase.BACKWARD)
        elif part == "optimizer":
            self._name_gradients()
            recorder.set_phase(Phase.OPTIMIZER)
            recorder.resume_call(OPTIMIZER)
            if self.optimizer is not None and not self.optimizer.state:
                with recorder.setup():
                    self.optimizer.step()
                    self._name_optimizer_state()

    def _name_gradients(self) -> None:
        for label, tensor in [*self.parameters.items(), *self.inputs]:
            if tensor.is_leaf and tensor.grad is not None:
                self.recorder.rename(tensor.grad, f"{label}.grad", Kind.GRADIENT)

    def _name_optimizer_state(self) -> None:
        assert self.optimizer is not None
        names = {id(tensor): parameter for parameter, tensor in self.parameters.items()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.recorder.resident(value, Kind.OPTIMIZER_STATE, f"{names.get(id(parameter), '')}.{key}")

    def left_over(self) -> bool:
        """Whether something the step made is still there."""
        recorder = self.recorder
        return any(recorder.birth[index] > 0 for index in recorder.alive())

    def _tensor_method(self, name: str, tensor: torch.Tensor) -> None:
        (self.engine.note_tensor_hook if name == "register_hook" else self.engine.note_retain_grad)(tensor)

    def _inspect(self, index: int, name: str, args: tuple[Any, ...], result: Any, phase: Phase) -> None:
        if self.collector is not None:
            self.collector.note(index, name, args, result, phase)

    def _count_flops(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
        count = flops.op_flops(func, args, kwargs, result)
        if count is None:
            self.unknown_flops[str(func)] = self.unknown_flops.get(str(func), 0) + 1
        return count

    # --- the record ----------------------------------------------------------------------------------------------------

    def result(self, name: str) -> Traced:
        recorder, tracer = self.recorder, self.tracer
        loss_row, optimizer_row = len(tracer.nodes), len(tracer.nodes) + 1
        rows = {LOSS: loss_row, OPTIMIZER: optimizer_row}
        storages, renumbered = self._storages(rows)
        ops = tuple(op.model_copy(update={"node": rows.get(op.node, op.node)}) if op.node < 0 else op for op in recorder.ops)
        nodes = self._nodes(rows, storages, renumbered)
        bare = Profile.model_construct(
            fxmem_version=__version__,
            torch_version=torch.__version__,
            model=name,
            inputs=tuple(InputTensor(name=label, shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for label, t in self.inputs),
            step=describe(self.mode, self.loss, self.optimizer, self.precision),
            target=self.target,
            ticks=recorder.tick,
            phases=tuple(recorder.phases),
            nodes=nodes,
            ops=ops,
            storages=storages,
            modules={path: type(module).__name__ for path, module in self.model.named_modules()},
            saved_bytes=sum(recorder.nbytes[index] for index in recorder.saved_at_end),
            assumptions=tuple(self._assumptions()),
            unknowns=tuple(self._unknowns()),
        )
        if self.collector is not None:
            bare = with_workspaces(bare, self.collector.settle(), self.collector.held_bytes())
            bare = bare.model_copy(update={"assumptions": (*bare.assumptions, *self.collector.assumptions()), "unknowns": (*bare.unknowns, *self.collector.unknowns())})
        live, scratch, counted = liveness.node_live_bytes(bare), liveness.node_scratch_bytes(bare), _node_flops(bare)
        annotated = tuple(
            node.model_copy(update={"live_bytes": live[i], "scratch_bytes": scratch[i], "forward_flops": counted[i][0], "backward_flops": counted[i][1]})
            for i, node in enumerate(nodes)
        )
        for fx_node, node in zip(tracer.nodes, annotated, strict=False):
            fx_node.meta["fxmem"] = node
        return Traced(bare.model_copy(update={"nodes": annotated}), tracer.graph, dict(tracer.constants), tuple(dict.fromkeys(tracer.opaque)))

    def _storages(self, rows: dict[int, int]) -> tuple[tuple[Storage, ...], dict[int, int]]:
        recorder = self.recorder
        readers = self._readers()
        storages: list[Storage] = []
        renumbered: dict[int, int] = {}
        for index, nbytes in enumerate(recorder.nbytes):
            birth, death = recorder.birth[index], recorder.death[index]
            if death is not None and death <= birth:
                continue
            node = recorder.node_of[index] if birth else readers.get(index)
            renumbered[index] = len(storages)
            storages.append(
                Storage.model_construct(
                    nbytes=nbytes,
                    kind=recorder.kind[index] or (Kind.TEMPORARY if birth else Kind.BUFFER),
                    birth=birth,
                    death=recorder.tick if death is None else death,
                    op=recorder.op_of[index],
                    node=rows.get(node, node) if node is not None else None,
                    name=recorder.name[index],
                    shape=recorder.shape[index],
                    dtype=recorder.dtype[index],
                )
            )
        return tuple(storages), renumbered

    def _readers(self) -> dict[int, int]:
        """The first node to read each parameter and buffer."""
        modules = dict(self.model.named_modules())
        readers: dict[int, int] = {}
        for position, node in enumerate(self.tracer.nodes):
            if node.op == "call_module":
                tensors: list[torch.Tensor] = [*modules[str(node.target)].parameters(), *modules[str(node.target)].buffers()]
                read = [self.recorder.index_of(t) for t in tensors]
            elif node.op in ("get_attr", "placeholder"):
                read = [storage for _, _, storage in self.recorder.results.get(position, ())]
            else:
                continue
            for storage in read:
                if storage is not None and self.recorder.kind[storage] in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT):
                    readers.setdefault(storage, position)
        return readers

    def _nodes(self, rows: dict[int, int], storages: tuple[Storage, ...], renumbered: dict[int, int]) -> tuple[Node, ...]:
        recorder, tracer = self.recorder, self.tracer
        position = {node: i for i, node in enumerate(tracer.nodes)}
        parameters = [0] * (len(tracer.nodes) + 2)
        for storage in storages:
            if storage.kind in (Kind.PARAMETER, Kind.BUFFER) and storage.birth == 0 and storage.node is not None:
                parameters[storage.node] += storage.nbytes
        saved = [0] * (len(tracer.nodes) + 2)
        for index, owner in recorder.saved_at_end.items():
            saved[rows.get(owner, owner)] += recorder.nbytes[index]
        kept = {rows.get(n, n): tuple(renumbered[i] for i in indices if i in renumbered and i in recorder.saved_at_end) for n, indices in recorder.saved_by_node.items()}
        brought: dict[int, int] = {}
        nodes: list[Node] = []
        for i, node in enumerate(tracer.nodes):
            outputs = recorder.results.get(i, []) if node.op != "output" else []
            infos = tuple(TensorInfo.model_construct(shape=shape, dtype=dtype, storage=renumbered.get(s) if s is not None else None) for shape, dtype, s in outputs)
            fresh = {s for _, _, s in outputs if s is not None and recorder.node_of[s] == i and s not in brought and recorder.birth[s] > 0}
            owner = next((brought[s] for _, _, s in outputs if s in brought), None) if not fresh else None
            for _, _, s in outputs:
                if s is not None:
                    brought.setdefault(s, i)
            module, module_type = _module_of(node, self.model)
            nodes.append(
                Node.model_construct(
                    name=node.name,
                    op=node.op,
                    target=_target_name(node.target),
                    module=module,
                    module_type=module_type,
                    source=tracer.sources[i],
                    inputs=tuple(position[n] for n in node.all_input_nodes),
                    outputs=infos,
                    view_of=owner if owner != i else None,
                    params_bytes=parameters[i],
                    output_bytes=sum(recorder.nbytes[s] for s in fresh),
                    saved_bytes=saved[i],
                    saved=kept.get(i, ()),
                )
            )
        output = len(nodes) - 1
        loss, step = rows[LOSS], rows[OPTIMIZER]
        nodes.append(Node(name="loss", op="loss", target="loss", inputs=(output,), params_bytes=parameters[loss], saved_bytes=saved[loss], saved=kept.get(loss, ())))
        nodes.append(Node(name="optimizer", op="optimizer", target=type(self.optimizer).__name__ if self.optimizer is not None else "none", params_bytes=parameters[step]))
        return tuple(nodes)

    def _assumptions(self) -> Iterator[Assumption]:
        recorder = self.recorder
        if self.mode == "train":
            last = "the optimizer steps and gradients are set to None" if self.optimizer is not None else "no optimizer steps here; gradients are set to None by the caller"
            yield Assumption(topic="step", text=f"one step in its steady state: forward, loss, backward, then {last}; output and loss live until the step's function returns")
        else:
            yield Assumption(topic="step", text="one forward under no_grad; the output lives until the step's function returns")
        yield Assumption(topic="residents", text="parameters, buffers and inputs are on the target's device throughout; a prefetched next batch is not counted")
        if self.optimizer is not None:
            yield Assumption(topic="optimizer", text=_describe_optimizer(self.optimizer))
        if recorder.made_up_scalars:
            yield Assumption(topic="optimizer", text="the optimizer reads numbers from tensors; each was taken to be 1, on which no allocation depends")
        if self.cycles > 0:
            yield Assumption(topic="cycles", text=f"{self.cycles} storages were held by reference cycles until the step's end; a real run frees them when Python's garbage collector happens to run")
        if self.target.device == "cuda":
            yield Assumption(topic="context", text="the CUDA context and loaded kernels, which the driver keeps outside the allocator, are not included")
        else:
            yield Assumption(topic="workspace", text="scratch memory inside CPU kernels (oneDNN convolutions above all) is not included")
        unread = sum(recorder.nbytes[i] for i in range(len(recorder.nbytes)) if recorder.kind[i] is Kind.PARAMETER and recorder.birth[i] == 0 and i not in self._readers())
        if unread:
            yield Assumption(topic="unread", text=f"{unread} bytes of parameters are read by no node; they are resident all the same")
        if any("scaled_dot_product" in op.name for op in recorder.ops):
            yield from kernels.assumptions(self.target)


    def _unknowns(self) -> Iterator[Unknown]:
        for op, count in sorted(self.unknown_flops.items()):
            yield Unknown(topic="flops", what=op, count=count)
        layers = sum(op.name == "aten.mkldnn_rnn_layer.default" for op in self.recorder.ops)
        if layers:
            yield Unknown(topic="memory", what="oneDNN's workspace tensor of aten.mkldnn_rnn_layer, whose size only oneDNN knows", count=layers)


def _node_flops(profile: Profile) -> list[tuple[int | None, int | None]]:
    """FLOPs of each node's forward and backward; None as soon as one op has no formula, and for what never ran backward."""
    sums: list[dict[bool, int | None]] = [{} for _ in profile.nodes]
    for op in profile.ops:
        backward = op.phase is Phase.BACKWARD
        counted = sums[op.node].get(backward, 0)
        sums[op.node][backward] = None if counted is None or op.flops is None else counted + op.flops
    return [(row.get(False, 0), row.get(True)) for row in sums]


def _module_of(node: torch.fx.Node, root: torch.nn.Module) -> tuple[str, str]:
    if node.op == "call_module":
        return str(node.target), type(root.get_submodule(str(node.target))).__name__
    stack: dict[str, tuple[str, type]] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", type(root).__name__
    path, cls = next(reversed(stack.values()))
    return path, cls.__name__


def _target_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, _torch.OpOverload):
        return str(target)
    module = getattr(target, "__module__", None) or "torch"
    module = {"_operator": "operator", "builtins": "builtins", "torch._C._nn": "torch.nn.functional"}.get(module, module)
    return f"{module}.{getattr(target, '__qualname__', getattr(target, '__name__', str(target)))}"


def _name_inputs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    code = getattr(type(model).forward, "__code__", None)
    names = [n for n in code.co_varnames[1 : code.co_argcount] if n not in kwargs] if code is not None else []
    named: list[tuple[str, Any]] = [(names[i] if i < len(names) else f"input_{i}", value) for i, value in enumerate(args)]
    found: list[tuple[str, torch.Tensor]] = []
    for label, value in [*named, *kwargs.items()]:
        tensors = [t for t in _torch.tree_leaves(value) if isinstance(t, torch.Tensor)]
        found += [(label if len(tensors) == 1 else f"{label}.{i}", t) for i, t in enumerate(tensors)]
    return found


def _choose_form(optimizer: torch.optim.Optimizer | None, *, foreach: bool) -> None:
    """Settle what torch would settle by looking at the parameters, which it does not do for fake ones (torch/optim/optimizer.py, `_default_to_fused_or_foreach`)."""
    for group in optimizer.param_groups if optimizer is not None else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = foreach


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    form = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "for-loop"
    return f"{type(optimizer).__name__} in its {form} form, its state already there"


@contextlib.contextmanager
def _rng_unchanged() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _explain(error: Exception, model: torch.nn.Module) -> AnalysisError:
    where = innermost_user_line(error)
    at = f" at {where.file}:{where.line} in {where.function}: `{where.code}`" if where is not None else ""
    if isinstance(error, _torch.DATA_DEPENDENT):
        return AnalysisError(
            f"expected a model whose control flow and shapes do not depend on the data; {type(model).__name__} asks for a tensor's value ({error}){at}. "
            "Replace .item(), .tolist(), nonzero or a boolean mask there by something of known shape (torch.where, masked_fill), or analyse the part of the model without it."
        )
    if isinstance(error, _torch.UnsupportedOperatorException):
        return AnalysisError(
            f"expected every operator to have a fake kernel; {error} has none{at}. "
            "Register one: torch.library.register_fake('namespace::op')(function returning empty tensors of the output's shape)."
        )
    text = str(error).strip().splitlines()
    return AnalysisError(f"the model raised {type(error).__name__}: {text[0] if text else ''}{at}")
