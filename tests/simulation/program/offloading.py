"""A small UNet of diffusers that denoises, with its weights kept in a way: `offloading.py WAY`."""

import sys

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers import UNet2DConditionModel
from diffusers.hooks import apply_group_offloading

way = sys.argv[1]
blocks = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
sizes = {"block_out_channels": (64, 128), "cross_attention_dim": 64, "attention_head_dim": 8, "layers_per_block": 1}
unet = UNet2DConditionModel(sample_size=32, down_block_types=blocks[0], up_block_types=blocks[1], **sizes)
unet = unet.half().eval()
if way == "model":
    unet, _ = cpu_offload_with_hook(unet, "cuda")
elif way == "sequential":
    cpu_offload(unet, "cuda", offload_buffers=True)
elif way in ("leaf", "block", "stream"):
    devices = {"onload_device": torch.device("cuda"), "offload_device": torch.device("cpu")}
    groups = {"offload_type": "leaf_level"} if way != "block" else {"offload_type": "block_level"}
    count = {"num_blocks_per_group": 1} if way == "block" else {}
    apply_group_offloading(unet, **devices, **groups, **count, use_stream=way == "stream")
else:
    unet.cuda()
if way == "cast":
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float16)

text = torch.randn(2, 77, 64, dtype=torch.float16).cuda()
x = torch.randn(2, 4, 64, 64, dtype=torch.float16).cuda()
with torch.no_grad():
    for step in range(12):
        time = torch.full((2,), step).cuda()
        x = x - 0.1 * unet(x, time, encoder_hidden_states=text).sample
