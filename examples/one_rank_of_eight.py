"""FSDP2 over eight cards that are not there: what each of them takes, with no GPU and no network.

`parallelize` is the function of a training script. `fxmem analyze MODEL --ranks 8 --parallelize file.py:parallelize`
does the same from the command line.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxmem


def build() -> nn.Module:
    """The model, whole."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def parallelize(model: nn.Module) -> None:
    """Shard it over all ranks."""
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)


batch = torch.empty(4, 512, 1024)
for ranks in (1, 8, 64):
    peak = fxmem.analyze(build, batch, target="rtx4090", ranks=ranks, parallelize=parallelize).peak
    kinds = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in peak.by_kind.items())
    print(f"{ranks} ranks: {peak.allocated_bytes:,} bytes allocated, {peak.reserved_bytes:,} reserved: {kinds}")
print(fxmem.analyze(build, batch, target="rtx4090", ranks=8, rank=3, parallelize=parallelize).table(depth=1))
