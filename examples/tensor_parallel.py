"""A Llama over cards that are not there: tensor parallel by your own function, by a mesh, and the meshes that fit."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem


def build() -> nn.Module:
    """The model, whole."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=8, use_cache=False))


def parallelize(model: nn.Module) -> None:
    """Split its products over all ranks, as a training script does."""
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))


ids = torch.empty(2, 512, dtype=torch.int64, device="meta")
batch = {"input_ids": ids, "labels": ids}
ways = {
    "one card": {},
    "tp=4, own function": {"ranks": 4, "rank": 0, "parallelize": parallelize, "optimizer": "adamw:forloop"},
    "tp=4": {"rank": 0, "mesh": "tp=4"},
    "fsdp=2,tp=4": {"rank": 0, "mesh": {"fsdp": 2, "tp": 4}, "precision": "bf16"},
}
for name, settings in ways.items():
    peak = fxmem.analyze(build, batch, **settings).peak
    print(f"{name:20} {peak.allocated_bytes:>13,} bytes allocated, {peak.reserved_bytes:>13,} reserved")
