"""One iteration of reinforcement learning: a policy generates, is scored beside a reference, and learns.

Each phase has its own peak. Of 200 new tokens about twenty run; the others are made by arithmetic.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem

SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def score(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token."""
    logits = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return logits.gather(2, ids[:, 1:, None])[..., 0]


with fxmem.record("rtx4090", steps=1) as run:
    config = LlamaConfig(**SIZES, vocab_size=8000)
    policy, reference = (LlamaForCausalLM(config).cuda() for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    while True:
        prompts = torch.randint(3, 8000, (8, 32)).cuda()
        ids = policy.generate(prompts, do_sample=True, max_new_tokens=200, pad_token_id=0)
        with torch.no_grad():
            before, theirs = score(policy, ids), score(reference, ids)
        now = score(policy, ids)
        loss = -((now - before).exp() - 0.04 * ((theirs - now).exp() - (theirs - now) - 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

for part in run.rounds[0].parts:
    print(f"{part.title:<42} {part.allocated_bytes:>13,} bytes allocated at most")
print(next(each.text for each in run.profile.assumptions if each.text.startswith("generate at")))
