"""Liger's Triton kernels in a small Llama: norms, rotation, SwiGLU, and the head fused with its loss."""

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.programs.card_parts import show

apply_liger_kernel_to_llama()
config = LlamaConfig(
    num_hidden_layers=4, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=128256,
)  # fmt: skip
model = LlamaForCausalLM(config).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
show("made")
for step in range(3):
    ids = torch.randint(0, 128256, (4, 1024), device="cuda")
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(f"{step}")
