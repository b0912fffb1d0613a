"""A classifier under autocast in bfloat16, which needs no gradient scaler."""

import sys

import torch
from torch import nn

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
torch.manual_seed(3)
model = nn.Sequential(
    nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 100)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(5):
    inputs, labels = torch.randn(256, 256, device=device), torch.randint(0, 100, (256,), device=device)
    with torch.autocast(device_type=device, dtype=torch.bfloat16):
        outputs = model(inputs)
        loss = criterion(outputs, labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, float(loss.detach()))
