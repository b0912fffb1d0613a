"""What programs ask of a `DistributedDataParallel` beside its forward: as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fxmem
from fxmem.simulation.ranks import reducer

ASKED = (
    "device_ids output_device dim broadcast_buffers find_unused_parameters gradient_as_bucket_view static_graph "
    "require_backward_grad_sync device bucket_bytes_cap require_forward_param_sync mixed_precision parameters_to_ignore"
).split()
CALLED = "no_sync join register_comm_hook will_sync_module_buffers _sync_buffers".split()
GIVEN: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True, "broadcast_buffers": False},
    {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 3},
]


@pytest.fixture
def group() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")  # torch 2.15
@pytest.mark.usefixtures("group")
def test_it_has_what_it_was_given_as_torchs_has(given: dict[str, Any]) -> None:
    ours, torchs = (
        kind(torch.nn.Linear(4, 4), **given) for kind in (reducer.DistributedDataParallel, DistributedDataParallel)
    )
    assert {name: getattr(ours, name) for name in ASKED} == {name: getattr(torchs, name) for name in ASKED}
    assert ours.will_sync_module_buffers() == torchs.will_sync_module_buffers()
    assert not [name for name in CALLED for each in (ours, torchs) if not callable(getattr(each, name))]
    for each in (ours, torchs) if not given else ():
        each.reducer.prepare_for_backward([])
        each._set_static_graph()
        assert each.static_graph
        assert isinstance(each._get_ddp_logging_data(), dict)


def test_what_torch_does_not_take_is_refused() -> None:
    with pytest.raises(TypeError, match="bucket_cap"):
        reducer.DistributedDataParallel(torch.nn.Linear(4, 4), bucket_cap=3)


def test_a_program_that_switches_it_off_itself_sends_nothing() -> None:
    """nanoGPT sets the attribute in the place of `no_sync`."""
    with fxmem.record("h100", ranks=4, rank=0) as run:
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256).cuda())
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            for last in (False, True):
                model.require_backward_grad_sync = last
                model(torch.ones(8, 256, device="cuda")).sum().backward()
            optimizer.step()
    ranks = run.profile.step.ranks
    assert ranks is not None
    assert {each.kind: each.count for each in ranks.collectives} == {"all-reduce": 1}


def test_it_is_an_instance_of_the_class_that_was_imported_before() -> None:
    """Lightning compares with the class that it imported, and it may have been before the recording."""
    with fxmem.record("h100", ranks=2):
        torch.distributed.init_process_group("nccl")
        replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
        assert type(replica) is not DistributedDataParallel
        assert isinstance(replica, DistributedDataParallel)
        assert not isinstance(replica.module, DistributedDataParallel)
