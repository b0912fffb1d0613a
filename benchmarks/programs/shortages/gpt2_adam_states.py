"""One linear layer to the vocabulary for each head of GPT-2 large's layer, trained with Adam; the model is frozen."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_embd=1280, n_layer=36, n_head=20)).cuda().requires_grad_(False)
lenses = nn.ModuleList(nn.Linear(1280, 50257) for _ in range(20)).cuda()
optimizer = torch.optim.Adam(lenses.parameters())
for _ in range(2):
    ids = torch.randint(0, 50257, (1, 64), device="cuda")  # batch and length are not said
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[9][:, -1]
    logits = torch.stack([lens(hidden) for lens in lenses]).sum(0)
    loss = nn.functional.cross_entropy(logits, ids[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
