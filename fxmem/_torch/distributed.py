"""Private names of torch.distributed: one rank of a world that is not there, with why and since when.

The process group is torch's own for tests (`torch.testing._internal.distributed.fake_pg`, since 2.0): collectives
return at once and touch nothing, so that a world of any size is one process.

Checked on torch 2.11.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from fxmem._torch.common import FakeTensor, no_modes, patch


@dataclasses.dataclass(frozen=True)
class GroupFacts:
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
        yield
    finally:
        sys.excepthook = excepthook
        if is_initialized() and not before:
            dist.destroy_process_group()
        _forget_meshes()


def rank_variables(size: int, rank: int, per_machine: int) -> dict[str, str]:
    """What torchrun tells a process of its place; it finds one card, which is the first."""
    here = str(min(size, per_machine))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(rank // per_machine),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": here,
        "ROLE_WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": str(-(-size // per_machine)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _forget_meshes() -> None:
    """Forget the specs that DTensor keeps by operator, with the meshes in them: a mesh of the next world that looks the
    same has other groups.

    `torch._C._clear_DTensor_sharding_propagator_cache` (since 2.10) is of the calls from C++, `ShardingPropagator`'s
    own are of those from Python.
    """
    propagation = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if propagation is None:
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


_BEFORE_VOTES: Final = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)

# --- what stands in the way of fakes ----------------------------------------------------------------------------------

_MESH_METHODS: Final = (
    *("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "_create_sub_mesh", "_create_flatten_mesh"),
    *("_create_unflatten_mesh", "_get_all_submeshes", "_init_process_groups", "_compute_coordinate_on_dim"),
    *("from_group", "get_all_groups", "get_local_rank"),
)
"""Methods of DeviceMesh that read the ranks it keeps in a tensor (as of 2.11)."""


@contextlib.contextmanager
def fakes_are_sharded() -> Iterator[None]:
    """FSDP, DTensor and DeviceMesh work on FakeTensors; nothing is allocated that a real rank would not."""
    from fxmem._torch import fsdp  # imports both generations of it, which takes long

    with contextlib.ExitStack() as stack:
        stack.enter_context(group_of_its_own())
        stack.enter_context(_layouts_checked_once())
        stack.enter_context(_real_meshes())
        stack.enter_context(_unseen_propagation())
        stack.enter_context(fsdp.fakes_are_sharded())
        stack.enter_context(_stages_ask())
        stack.enter_context(_stages_release())
        yield


def default_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The machine's accelerator is this one, for who gives no mesh: `fully_shard(model)` makes one of all ranks on it
    (`torch._C._get_accelerator`, since 2.7), and a machine without a card has the CPU alone."""
    if not hasattr(torch._C, "_get_accelerator"):
        return contextlib.nullcontext()
    return patch(torch._C, "_get_accelerator", lambda _: lambda *_, **__: device)


def _layouts_checked_once() -> contextlib.AbstractContextManager[None]:
    """Each layout of a mesh is checked once.

    FSDP2 joins two meshes for each parameter, and a mesh lists the ranks of the whole world to see whether its layout
    names one twice (`_MeshLayout.check_non_overlap`, 2.9 to 2.14).
    """
    from torch.distributed._mesh_layout import _MeshLayout

    if not hasattr(_MeshLayout, "check_non_overlap"):
        return contextlib.nullcontext()
    return patch(_MeshLayout, "check_non_overlap", functools.cache)


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """A DeviceMesh keeps ranks in a tensor and reads them: its methods run outside of dispatch modes, on the CPU.

    torch itself does so in two places only (`unset_fake_temporarily` in torch/distributed/device_mesh.py).
    `init_device_mesh` makes the tensor of ranks before; it is 0, 1, 2, ...
    """
    from torch.distributed.device_mesh import DeviceMesh

    def make_real(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with no_modes(), torch.device("cpu"):
                ranks = kwargs.get("_rank_map")
                if isinstance(ranks, FakeTensor):
                    kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
                return function(*args, **kwargs)

        return run

    before = {name: vars(DeviceMesh)[name] for name in _MESH_METHODS if name in vars(DeviceMesh)}
    for name, raw in before.items():
        is_static = isinstance(raw, staticmethod)
        setattr(DeviceMesh, name, staticmethod(make_real(raw.__func__)) if is_static else make_real(raw))
    try:
        yield
    finally:
        for name, raw in before.items():
            setattr(DeviceMesh, name, raw)


_RESULTS: Final[dict[Any, Any]] = {}
"""By operator and its tensors' metadata, that of its results, which are the same for every rank."""
_MAX_RESULTS: Final = 4096


@contextlib.contextmanager
def _unseen_propagation() -> Iterator[None]:
    """DTensor's own runs of operators on fakes of global shape are not observed: no rank allocates these.

    It learns the results' shapes from them, in whatever fake mode is on
    (`ShardingPropagator._propagate_tensor_meta_non_cached`, since 2.7). An optimizer's are of thousands of tensors, the
    same for all ranks of a model: each is run once.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, schema: Any) -> Any:
            with no_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                return original(self, schema)

        def propagate(self: Any, schema: Any) -> Any:
            key = schema.op, _metadata(schema.args_schema), _metadata(schema.kwargs_schema)
            try:
                return _RESULTS[key]
            except (KeyError, TypeError):  # what is no number may have no hash
                found = run(self, schema)
            if len(_RESULTS) >= _MAX_RESULTS:
                _RESULTS.clear()
            with contextlib.suppress(TypeError):
                _RESULTS[key] = found
            return found

        return propagate

    with patch(ShardingPropagator, "_propagate_tensor_meta_non_cached", make):
        yield


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


@contextlib.contextmanager
def _stages_ask() -> Iterator[None]:
    """Stages of a pipeline ask each other for shapes, as over a real group; torch refuses it in a fake one since 2.15.

    `_PipelineSchedule._initialize_pipeline_distributed_state` (2.15) has all ranks vote on whether they ask; here the
    stages of the rank itself decide, as if those of the others were made alike. What they ask comes by object lists,
    before which fxmem's ranks run. Before 2.15 they always asked.
    """
    if not torch.distributed.is_available() or _BEFORE_VOTES:
        yield
        return
    from torch.distributed.pipelining import schedules

    modes: Any = schedules.InferenceMode  # type: ignore[attr-defined, unused-ignore]

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(self: Any, stages: Sequence[Any], has_backward: bool, *args: Any, **kwargs: Any) -> Any:
            made = [each for each in stages if hasattr(each, "_user_meta")]
            asks = any(modes.needs_dynamic(each._user_meta, has_backward) for each in made)
            with patch(modes, "needs_dynamic", lambda _: lambda *_: False):
                result = original(self, stages, has_backward, *args, **kwargs)
            for stage in made if asks else ():
                stage._inference_mode = modes.DYNAMIC
            return result

        return initialize

    with patch(schedules._PipelineSchedule, "_initialize_pipeline_distributed_state", make):
        yield


_REAL: Final = torch.Tensor()
"""A tensor of the class that autograd gives outside of fake modes."""


@contextlib.contextmanager
def _stages_release() -> Iterator[None]:
    """Stages of a pipeline let go of FakeTensors that they have sent.

    They do so of real ones since 2.15: `_PipelineStageBase._output_slot_is_releasable` takes tensors of the class
    `torch.Tensor` alone.
    """
    if not torch.distributed.is_available() or _BEFORE_VOTES:
        yield
        return
    from torch.distributed.pipelining import stage

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, output: original(self, _REAL if type(output) is FakeTensor else output)

    with patch(stage._PipelineStageBase, "_output_slot_is_releasable", make):
        yield


@contextlib.contextmanager
def observe_resizes(on_resize: Callable[[Any, int, int], None]) -> Iterator[None]:
    """Call `on_resize(storage, before, after)` before a storage changes its size, which no dispatch mode sees
    (`UntypedStorage.resize_`, public): so FSDP2 frees unsharded parameters and takes them back."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize(self: Any, nbytes: int) -> Any:
            before = self.nbytes()
            if before != nbytes:
                on_resize(self, before, nbytes)
            return original(self, nbytes)

        return resize

    with patch(torch.UntypedStorage, "resize_", make):
        yield


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


@contextlib.contextmanager
def split_by_buckets(replica: torch.nn.Module) -> Iterator[None]:
    """Dynamo splits a graph that it compiles inside where a bucket of this module ends.

    `DDPOptimizer` of torch/_dynamo/backends/distributed.py asks for `bucket_bytes_cap` of the module that
    `DistributedDataParallel._active_ddp_module` (since 1.13) names: that of the class which dynamo has imported.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None:
        yield
        return
    with patch(dynamo.DistributedDataParallel, "_active_ddp_module", lambda _: replica):
        yield


@contextlib.contextmanager
def replace_ddp(replica: type[torch.nn.Module]) -> Iterator[None]:
    """DistributedDataParallel is another class: where torch offers it, and where it was imported before."""
    parallel: Any = torch.nn.parallel
    known: Any = parallel.DistributedDataParallel

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if type(self) is known:
                self.__class__ = replica  # a caller that has the class itself gets the other one, too
                self.__init__(*args, **kwargs)
            else:
                original(self, *args, **kwargs)

        return init

    with (
        patch(known, "__init__", make),
        patch(parallel, "DistributedDataParallel", lambda _: replica),
        patch(parallel.distributed, "DistributedDataParallel", lambda _: replica),
    ):
        yield


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
    group: Any = None
    c10d: Any = dist.distributed_c10d
    if isinstance(value, torch.ScriptObject):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            group = dist.ProcessGroup.unbox(value)
    elif isinstance(value, str):
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            group = c10d._resolve_process_group(value)
    elif isinstance(value, dist.ProcessGroup):
        group = value
    if group is None:
        return None
    described = c10d._world.pg_names.get(group, "")
    description = getattr(group, "group_desc", "") or ""
    name = description.removeprefix("mesh_") if description.startswith("mesh_") else described
    if group is dist.group.WORLD:
        name = "all ranks"
    return GroupFacts(name, tuple(dist.get_process_group_ranks(group)))


_HOOKED_SCHEDULES: Final = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules that split a backward by hooks on nodes of C++ (torch/distributed/pipelining/_backward.py, since 2.5)."""


@contextlib.contextmanager
def refuse_by_name(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call `refuse` with the name of what begins inside and cannot be followed.

    `context_parallel` splits its buffers by `_context_parallel_buffers` of its own module (since 2.4), whose place
    changed in 2.10; of schedules those that are imported by now are known.
    """
    from torch.distributed.tensor.experimental import context_parallel

    def refusing(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda _: lambda *args, **kwargs: refuse(name)

    written: Any = getattr(context_parallel, "__wrapped__", context_parallel)
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    with contextlib.ExitStack() as stack:
        home = sys.modules[written.__module__]
        if hasattr(home, "_context_parallel_buffers"):
            stack.enter_context(patch(home, "_context_parallel_buffers", refusing("context_parallel")))
        for name in _HOOKED_SCHEDULES if schedules is not None else ():
            if hasattr(schedules, name):
                stack.enter_context(patch(getattr(schedules, name), "__init__", refusing(name)))
        yield
