"""Private names of torch.distributed: one rank of a world that is not there, with why and since when.

The process group is torch's own for tests (`torch.testing._internal.distributed.fake_pg`, since 2.0): collectives
return at once and touch nothing, so that a world of any size is one process.

Checked on torch 2.11.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from fxmem._torch.common import TORCH_VERSION, FakeTensor, nested, no_modes, patch, replace_all, wrap
from fxmem._torch.modules import patch_when_imported


class GroupFacts(NamedTuple):
    """A process group, as a collective was called with it."""

    name: str
    ranks: tuple[int, ...]


def is_initialized() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def begin_fake_group(init_process_group: Callable[..., Any], size: int, rank: int) -> None:
    """Begin a process group of `size` ranks; its collectives answer at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextlib.contextmanager
def group_of_its_own() -> Iterator[None]:
    """End the process group that began inside and did not end; DTensor forgets what it learnt of its meshes.

    `init_process_group` leaves a `sys.excepthook` that writes the rank before each line of a traceback (since 2.1).
    """
    before, excepthook = is_initialized(), sys.excepthook
    try:
        with _groups_answer_at_once():
            yield
    finally:
        sys.excepthook = excepthook
        if is_initialized() and not before:
            dist.destroy_process_group()
        _forget_meshes()


def _groups_answer_at_once() -> AbstractContextManager[None]:
    """Groups are made of the fake backend, whichever is asked for: gloo, beside NCCL, for what is on the host
    (`_new_process_group_helper`, since 1.8)."""
    if not dist.is_available():
        return contextlib.nullcontext()

    def make(
        original: Callable[..., Any],
        size: int,
        rank: int,
        ranks: Any,
        backend: Any,
        store: Any,
        name: Any,
        backend_options: Any = None,
        **settings: Any,
    ) -> Any:
        return original(size, rank, ranks, dist.Backend.FAKE, store, name, **settings)

    owners = dist, dist.distributed_c10d
    waits = replace_all((owner, "monitored_barrier", lambda *_, **__: None) for owner in owners)
    return nested(wrap(dist.distributed_c10d, "_new_process_group_helper", make), waits)


def rank_variables(size: int, rank: int, per_machine: int) -> dict[str, str]:
    """What torchrun tells a process of its place; it finds one card, which is the first."""
    ranks = {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank // per_machine, "ROLE_RANK": rank}
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": min(size, per_machine), "ROLE_WORLD_SIZE": size}
    numbers = {**ranks, **sizes, "GROUP_WORLD_SIZE": -(-size // per_machine), "MASTER_PORT": 29500}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _forget_meshes() -> None:
    """Forget the specs that DTensor keeps by operator, with the meshes in them: a mesh of the next world that looks the
    same has other groups.

    `torch._C._clear_DTensor_sharding_propagator_cache` (since 2.10) is of the calls from C++, `ShardingPropagator`'s
    own are of those from Python.
    """
    if sys.modules.get("torch.distributed.tensor._sharding_prop") is None:
        return
    clear: Any = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)
    clear()
    propagator: Any = sys.modules["torch.distributed.tensor._api"].DTensor._op_dispatcher.sharding_propagator
    redistribution: Any = sys.modules["torch.distributed.tensor._redistribute"]
    caches: tuple[Any, ...] = (
        propagator.propagate_op_sharding,
        getattr(propagator, "_propagate_tensor_meta_cached", None),
        getattr(redistribution, "_gen_transform_infos", None),
    )
    for cached in caches:
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


_BEFORE_VOTES: Final = TORCH_VERSION < (2, 15)

# --- what stands in the way of fakes ----------------------------------------------------------------------------------

_MESH_METHODS: Final = (
    *("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "_create_sub_mesh", "_create_flatten_mesh"),
    *("_create_unflatten_mesh", "_get_all_submeshes", "_init_process_groups", "_compute_coordinate_on_dim"),
    *("from_group", "get_all_groups", "get_local_rank"),
)
"""Methods of DeviceMesh that read the ranks it keeps in a tensor (as of 2.11)."""


def fakes_are_sharded() -> AbstractContextManager[None]:
    """FSDP, DTensor and DeviceMesh work on FakeTensors; nothing is allocated that a real rank would not."""
    from fxmem._torch import fsdp  # imports both generations of it, which takes long

    changes = _layouts_checked_once(), _real_meshes(), _unseen_propagation(), fsdp.fakes_are_sharded()
    return nested(group_of_its_own(), *changes, _stages_ask(), _stages_release(), _sends_keep())


def default_device(device: torch.device) -> AbstractContextManager[None]:
    """The machine's accelerator is this one, for who gives no mesh: `fully_shard(model)` makes one of all ranks on it
    (`torch._C._get_accelerator`, since 2.7), and a machine without a card has the CPU alone."""
    if not hasattr(torch._C, "_get_accelerator"):
        return contextlib.nullcontext()
    return patch(torch._C, "_get_accelerator", lambda _: lambda *_, **__: device)


def _layouts_checked_once() -> AbstractContextManager[None]:
    """Each layout of a mesh is checked once.

    FSDP2 joins two meshes for each parameter, and a mesh lists the ranks of the whole world to see whether its layout
    names one twice (`_MeshLayout.check_non_overlap`, 2.9 to 2.14).
    """
    from torch.distributed._mesh_layout import _MeshLayout

    if not hasattr(_MeshLayout, "check_non_overlap"):
        return contextlib.nullcontext()
    return patch(_MeshLayout, "check_non_overlap", functools.cache)


def _real_meshes() -> AbstractContextManager[None]:
    """A DeviceMesh keeps ranks in a tensor and reads them: its methods run outside of dispatch modes, on the CPU.

    torch itself does so in two places only (`unset_fake_temporarily` in torch/distributed/device_mesh.py).
    `init_device_mesh` makes the tensor of ranks before; it is 0, 1, 2, ...
    """
    from torch.distributed.device_mesh import DeviceMesh

    def run_really(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with no_modes(), torch.device("cpu"):
            ranks = kwargs.get("_rank_map")
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            return function(*args, **kwargs)

    return nested(*(wrap(DeviceMesh, name, run_really) for name in _MESH_METHODS if name in vars(DeviceMesh)))


_RESULTS: Final[dict[Any, Any]] = {}
"""By operator and its tensors' metadata, that of its results, which are the same for every rank."""
_MAX_RESULTS: Final = 4096


def _unseen_propagation() -> AbstractContextManager[None]:
    """DTensor's own runs of operators on fakes of global shape are not observed: no rank allocates these.

    It learns the results' shapes from them, in whatever fake mode is on
    (`ShardingPropagator._propagate_tensor_meta_non_cached`, since 2.7). An optimizer's are of thousands of tensors, the
    same for all ranks of a model: each is run once.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def propagate(original: Callable[..., Any], self: Any, schema: Any) -> Any:
        key = schema.op, _metadata(schema.args_schema), _metadata(schema.kwargs_schema)
        try:
            return _RESULTS[key]
        except (KeyError, TypeError):  # what is no number may have no hash
            with no_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                found = original(self, schema)
        if len(_RESULTS) >= _MAX_RESULTS:
            _RESULTS.clear()
        with contextlib.suppress(TypeError):
            _RESULTS[key] = found
        return found

    return wrap(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)


def _metadata(value: Any) -> Any:
    """Arguments of an operator, each spec as its tensor's shape, stride and dtype.

    Numbers have their types beside them, as 1 and 1.0 are equal.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if isinstance(value, DTensorSpec):
        return value.tensor_meta
    if isinstance(value, dict):
        return tuple((name, _metadata(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_metadata, value))
    return type(value), value


def _stages_ask() -> AbstractContextManager[None]:
    """Stages of a pipeline ask each other for shapes, as over a real group; torch refuses it in a fake one since 2.15.

    `_PipelineSchedule._initialize_pipeline_distributed_state` (2.15) has all ranks vote on whether they ask; here the
    stages of the rank itself decide, as if those of the others were made alike. What they ask comes by object lists,
    before which fxmem's ranks run. Before 2.15 they always asked.
    """
    if not torch.distributed.is_available() or _BEFORE_VOTES:
        return contextlib.nullcontext()
    from torch.distributed.pipelining import schedules

    modes: Any = schedules.InferenceMode  # type: ignore[attr-defined, unused-ignore]

    def initialize(
        original: Any, self: Any, stages: Sequence[Any], has_backward: bool, *args: Any, **kwargs: Any
    ) -> Any:
        made = [each for each in stages if hasattr(each, "_user_meta")]
        asks = any(modes.needs_dynamic(each._user_meta, has_backward) for each in made)
        with patch(modes, "needs_dynamic", lambda _: lambda *_: False):
            result = original(self, stages, has_backward, *args, **kwargs)
        for stage in made if asks else ():
            stage._inference_mode = modes.DYNAMIC
        return result

    return wrap(schedules._PipelineSchedule, "_initialize_pipeline_distributed_state", initialize)


_REAL: Final = torch.Tensor()
"""A tensor of the class that autograd gives outside of fake modes."""


def _stages_release() -> AbstractContextManager[None]:
    """Stages of a pipeline let go of FakeTensors that they have sent.

    They do so of real ones since 2.15: `_PipelineStageBase._output_slot_is_releasable` takes tensors of the class
    `torch.Tensor` alone.
    """
    if not torch.distributed.is_available() or _BEFORE_VOTES:
        return contextlib.nullcontext()
    from torch.distributed.pipelining import stage

    def is_releasable(original: Callable[..., Any], self: Any, output: Any) -> Any:
        return original(self, _REAL if type(output) is FakeTensor else output)

    return wrap(stage._PipelineStageBase, "_output_slot_is_releasable", is_releasable)


class _Sent:
    """The work of a send, which keeps what it sends until it has been waited for."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self._work = work
        self._tensors = tensors

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, and let go of the tensors."""
        self._tensors = None
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _sends_keep() -> AbstractContextManager[None]:
    """What is sent is kept until the send has been waited for. Schedules that interleave stages wait at a step's end.

    NCCL's work does so (`stashed_for_allocator_safety_` of ProcessGroupNCCL.cpp, since 2.8); a fake group's keeps
    nothing.
    """
    if not dist.is_available():
        return contextlib.nullcontext()

    def send(original: Callable[..., Any], group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return _Sent(original(group, tensors, *args, **kwargs), tensors)

    return wrap(dist.ProcessGroup, "send", send)


def observe_sends(
    on_send: Callable[[list[torch.Tensor], int], None], on_receive: Callable[[list[torch.Tensor], int], None]
) -> AbstractContextManager[None]:
    """Call these with the tensors, and with the other rank, where a rank sends to it or has received from it
    (`ProcessGroup.send`, `recv`, in which all ways of `torch.distributed` end; since 1.0)."""
    if not dist.is_available():
        return contextlib.nullcontext()

    def send(original: Callable[..., Any], group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
        work = original(group, tensors, peer, *args, **kwargs)
        on_send(tensors, dist.get_global_rank(group, peer))
        return work

    def receive(original: Callable[..., Any], group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
        work = original(group, tensors, peer, *args, **kwargs)
        on_receive(tensors, dist.get_global_rank(group, peer))
        return work

    return nested(wrap(dist.ProcessGroup, "send", send), wrap(dist.ProcessGroup, "recv", receive))


def observe_resizes(on_resize: Callable[[Any, int, int], None]) -> AbstractContextManager[None]:
    """Call `on_resize(storage, before, after)` before a storage changes its size, which no dispatch mode sees
    (`UntypedStorage.resize_`, public): so FSDP2 frees unsharded parameters and takes them back."""

    def resize(original: Callable[..., Any], storage: Any, nbytes: int) -> Any:
        before = storage.nbytes()
        if before != nbytes:
            on_resize(storage, before, nbytes)
        return original(storage, nbytes)

    return wrap(torch.UntypedStorage, "resize_", resize)


def assign_buckets(parameters: Sequence[torch.Tensor], limits: list[int]) -> list[list[int]]:
    """Which parameters DistributedDataParallel puts into one bucket, by their positions
    (`_compute_bucket_assignment_by_size`, since 1.0)."""
    assign: Any = getattr(dist, "_compute_bucket_assignment_by_size", None)
    if assign is None:
        assign = dist.distributed_c10d._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    with no_modes():
        looks = [torch.empty(tuple(each.shape), dtype=each.dtype, device="meta") for each in parameters]
        found: list[list[int]] = assign(looks, limits)[0] if looks else []
    return found


def builtin_hook(kind: Any) -> Callable[[Any, Any], Any]:
    """A communication hook in Python that does what one of C++ does (`BuiltinCommHookType`, since 1.8)."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    kinds: Any = dist
    compresses = kind == kinds.BuiltinCommHookType.FP16_COMPRESS
    return default_hooks.fp16_compress_hook if compresses else default_hooks.allreduce_hook


_ASYNC: Final = "all_reduce reduce broadcast all_gather all_gather_into_tensor reduce_scatter_tensor all_to_all_single"
"""Functions whose first argument is what they write to."""


def futures_have_results() -> AbstractContextManager[None]:
    """What a collective of the fake group has begun gives its outputs, as NCCL's does: `work.get_future().value()`.

    A `FakeWork` of C++ gives none (`_create_work_from_future`, since 2.0).
    """

    c10d: Any = torch._C._distributed_c10d

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        if type(work).__name__ != "FakeWork":
            return work
        output = inspect.signature(original).bind(*args, **kwargs).args[0]
        future: Any = torch.futures.Future()
        future.set_result(list(output) if isinstance(output, (list, tuple)) else [output])
        return c10d._create_work_from_future(future)

    return nested(*(wrap(owner, name, run) for name in _ASYNC.split() for owner in (dist, dist.distributed_c10d)))


def split_by_buckets(replica: torch.nn.Module) -> AbstractContextManager[None]:
    """Dynamo splits a graph that it compiles inside where a bucket of this module ends.

    `DDPOptimizer` of torch/_dynamo/backends/distributed.py asks for `bucket_bytes_cap` of the module that
    `DistributedDataParallel._active_ddp_module` (since 1.13) names: that of the class which dynamo has imported.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None:
        return contextlib.nullcontext()
    return patch(dynamo.DistributedDataParallel, "_active_ddp_module", lambda _: replica)


_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"


class _Reducer:
    """The reducer in C++ of a `DistributedDataParallel`, and its logger: each method does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def answer_private_names(replica: type) -> type:
    """Give a class what others call of a `DistributedDataParallel` by private names (since 1.9): Lightning asks as it
    ends what was measured, which is nothing; older programs have no other way to `static_graph=True`. Buffers are
    alike on all ranks, `join` waits for no other, and what C++ does in a reducer has no state of its own."""
    kind: Any = replica
    kind.require_forward_param_sync, kind.mixed_precision = True, None
    kind.reducer = kind.logger = _Reducer()
    kind.parameters_to_ignore = property(lambda own: set(getattr(own.module, _IGNORED, ())))
    kind.will_sync_module_buffers = lambda own: own.broadcast_buffers and any(True for _ in own.module.buffers())
    kind.join = lambda *_, **__: contextlib.nullcontext()
    kind._get_ddp_logging_data = lambda _: {}
    kind._sync_buffers = lambda _: None
    kind._set_static_graph = kind.use_static_graph
    return replica


def replace_ddp(replica: type[torch.nn.Module]) -> AbstractContextManager[None]:
    """DistributedDataParallel is another class: where torch offers it, and where it was imported before."""
    parallel: Any = torch.nn.parallel
    known: Any = parallel.DistributedDataParallel

    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is known:
            self.__class__ = replica  # a caller that has the class itself gets the other one, too
            self.__init__(*args, **kwargs)
        else:
            original(self, *args, **kwargs)

    def is_kind(cls: type, kind: type) -> Any:
        return True if cls is known and issubclass(kind, replica) else NotImplemented

    return nested(
        patch(known, "__subclasshook__", lambda _: classmethod(is_kind)),  # of `abc.ABC`, which it is since 1.10
        wrap(known, "__init__", init),
        patch(parallel, "DistributedDataParallel", lambda _: replica),
        patch(parallel.distributed, "DistributedDataParallel", lambda _: replica),
    )


def find_rank(group: Any, rank: int | None, group_rank: int | None) -> int:
    """A rank's number among all; the caller gave that, or its number in the group."""
    if group_rank is None:
        return 0 if rank is None else rank
    found: int = dist.get_global_rank(group or dist.distributed_c10d._get_default_group(), group_rank)
    return found


# --- collectives ------------------------------------------------------------------------------------------------------


def find_group(value: Any) -> GroupFacts | None:
    """The process group that an argument of a collective's operator names; None for what is none.

    Operators of `c10d` take the group itself, as TorchScript boxes it (`ProcessGroup.unbox`, since 2.1), those of
    `_c10d_functional` its name (`_resolve_process_group`, since 2.2).
    """
    group: Any = value if isinstance(value, dist.ProcessGroup) else None
    c10d: Any = dist.distributed_c10d
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        if isinstance(value, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(value)
        elif isinstance(value, str):
            group = c10d._resolve_process_group(value)
    if group is None:
        return None
    described = c10d._world.pg_names.get(group, "")
    description = getattr(group, "group_desc", "") or ""
    name = description.removeprefix("mesh_") if description.startswith("mesh_") else described
    if group is dist.group.WORLD:
        name = "all ranks"
    return GroupFacts(name, tuple(dist.get_process_group_ranks(group)))


def read_operation(value: Any) -> str:
    """How a collective's operator reduces, e.g. "sum": operators of `c10d` take it as TorchScript boxes it
    (its method `op` answers with the number, since 2.1), those of `_c10d_functional` its name."""
    return value if isinstance(value, str) else str(dist.ReduceOp.RedOpType(value.op()).name).lower()


def find_group_of_pair(group: GroupFacts, peer: int) -> GroupFacts:
    """The smallest group that was made with this rank and another, where they send to each other in a larger one.

    Args:
        group: in which they do.
        peer: the other's number in it.
    """
    here, there = dist.get_rank(), group.ranks[peer]
    made: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks  # since 1.8; ranks of a group
    known = [each for each, ranks in made.items() if each is not None and here in ranks and there in ranks]
    smallest = min(known, key=lambda each: len(made[each]), default=None)
    return group if smallest is None or len(made[smallest]) >= len(group.ranks) else find_group(smallest) or group


_HOOKED_SCHEDULES: Final = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules that split a backward by hooks on nodes of C++ (torch/distributed/pipelining/_backward.py, since 2.5)."""


def refuse_schedules(refuse: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call `refuse` with the name of a schedule that is made inside and cannot be followed; of those that are imported
    by now."""

    def refusing(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: refuse(name)

    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    hooked = [(getattr(schedules, name, None), "__init__", refusing(name)) for name in _HOOKED_SCHEDULES]
    return replace_all([each for each in hooked if each[0] is not None])


def saves_of_one_rank() -> AbstractContextManager[None]:
    """Let `torch.distributed.checkpoint` save inside, where it has one rank's plan alone: that all parts of each tensor
    are there, it finds only in all ranks' (`_validate_global_plan`, since 2.0; in 2.15 a list of complaints)."""

    def validate(original: Callable[..., Any], *args: Any) -> Any:
        return True if inspect.signature(original).return_annotation in (bool, "bool") else []

    return patch_when_imported({_PLANNER: lambda module: [wrap(module, "_validate_global_plan", validate)]})


_PLANNER: Final = "torch.distributed.checkpoint.default_planner"
