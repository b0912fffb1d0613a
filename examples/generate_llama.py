"""What a generation takes with a cache that grows, or that is set up once, and what a serving engine has left."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem

sizes = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=4000)
ids = torch.empty(8, 256, dtype=torch.int64, device="meta")
prompt = {"input_ids": ids, "attention_mask": ids}
for cache in ("dynamic", "static"):
    run = fxmem.generate(lambda: LlamaForCausalLM(config), prompt, 128, cache=cache).run
    print(f"{cache:8} prefill {run.prefill.allocated_bytes:>12,}  decode {run.decode.allocated_bytes:>12,} bytes")

with torch.device("meta"):
    served = LlamaForCausalLM(config).bfloat16()
size = fxmem.kv_cache(served, target="t4", max_seqs=64, max_batched_tokens=2048)
print(f"vLLM on a T4 has {size.kv_low_bytes:,} to {size.kv_high_bytes:,} bytes for keys and values")
