"""Token by token with caches of three kinds: transformers' dynamic and static ones, and one by hand."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.programs.card_parts import show

config = LlamaConfig(
    num_hidden_layers=4, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32000,
)  # fmt: skip
model = LlamaForCausalLM(config).cuda().bfloat16().eval()
ids = torch.randint(0, 32000, (4, 128), device="cuda")


show("made")
settings = {"max_new_tokens": 32, "min_new_tokens": 32, "pad_token_id": 0}
model.generate(ids, do_sample=False, **settings)
show("greedy")
model.generate(ids, do_sample=True, top_k=50, top_p=0.9, **settings)
show("sampled")
model.generate(ids, do_sample=False, cache_implementation="static", disable_compile=True, **settings)
show("static")
with torch.no_grad():
    found = model(ids, use_cache=True)
    for _ in range(8):
        found = model(found.logits[:, -1:].argmax(-1), past_key_values=found.past_key_values, use_cache=True)
show("by hand")
del found
show("after it")
