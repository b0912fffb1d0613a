"""Two steps of a policy that generates, is scored, and learns, beside a reference model."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.programs.card_parts import probabilities, show

config = LlamaConfig(
    num_hidden_layers=4, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32000,
)  # fmt: skip
policy, reference = (LlamaForCausalLM(config).cuda().bfloat16() for _ in range(2))
reference.eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)


show("made")
for step in range(2):
    prompts = torch.randint(0, 32000, (2, 64), device="cuda").repeat_interleave(4, 0)
    policy.eval()
    with torch.no_grad():
        ids = policy.generate(prompts, do_sample=True, max_new_tokens=24, min_new_tokens=24, pad_token_id=0)
    policy.train()
    show(f"{step} rollout")
    with torch.no_grad():
        before, theirs = probabilities(policy, ids), probabilities(reference, ids)
    show(f"{step} log-probabilities")
    rewards = torch.rand(8, device="cuda").view(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    now = probabilities(policy, ids)
    ratio = (now - before).exp()
    divergence = (theirs - now).exp() - (theirs - now) - 1
    loss = -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.04 * divergence)
    loss[:, 63:].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    show(f"{step} update")
