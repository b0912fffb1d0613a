"""Long rollouts within a step of a policy, then ragged prompts, a static cache, beams, and scores that are kept."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.programs.card_parts import probabilities, show

config = Qwen2Config(
    num_hidden_layers=6, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32000,
)  # fmt: skip
policy, reference = (Qwen2ForCausalLM(config).cuda().bfloat16() for _ in range(2))
reference.eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)


show("made")
for step in range(2):
    prompts = torch.randint(3, 32000, (8, 50)).cuda().repeat_interleave(4, 0)
    policy.eval()
    with torch.no_grad():
        ids = policy.generate(prompts, do_sample=True, max_new_tokens=300, min_new_tokens=300, pad_token_id=0)
    policy.train()
    show(f"{step} rollout")
    with torch.no_grad():
        before, theirs = probabilities(policy, ids), probabilities(reference, ids)
    show(f"{step} log-probabilities")
    now = probabilities(policy, ids)
    loss = -((now - before).exp() - 0.04 * ((theirs - now).exp() - (theirs - now) - 1))
    loss[:, 49:].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    show(f"{step} update")
policy.eval()
mask = torch.ones(32, 50, dtype=torch.long)
mask[:4, :7] = 0
ragged = {"input_ids": prompts, "attention_mask": mask.cuda()}
settings = {"max_new_tokens": 150, "min_new_tokens": 150, "pad_token_id": 0}
policy.generate(**ragged, do_sample=True, **settings)
show("ragged")
policy.generate(prompts, do_sample=False, cache_implementation="static", disable_compile=True, **settings)
show("static")
policy.generate(prompts[:8], num_beams=3, do_sample=False, **settings)
show("beams")
found = policy.generate(
    prompts, do_sample=True, return_dict_in_generate=True, output_scores=True, max_new_tokens=60, min_new_tokens=60,
    pad_token_id=0,
)  # fmt: skip
show("scores kept")
del found
show("after it")
