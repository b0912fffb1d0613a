"""A Llama of 7B, trained from nothing in float32 parameters on one card of 40 GB."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

with torch.device("cuda"):
    # 4096 wide, 32 heads and layers: said. llama2.c ties the embeddings; `multiple_of` makes 11,008 of the width.
    model = LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=11008, tie_word_embeddings=True))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=False)  # of bfloat16
for _ in range(2):
    ids = torch.randint(0, 32000, (1, 256), device="cuda")  # batch and length are not said
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
