"""ResNet-50 in float16 with a gradient scaler, channels last, then an evaluation of another size."""

import torch
import torchvision

model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    torch.cuda.reset_peak_memory_stats()
    images = torch.randn(64, 3, 224, 224).cuda().contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (64,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
model.eval()
torch.cuda.reset_peak_memory_stats()
with torch.no_grad():
    for _ in range(2):
        model(torch.randn(128, 3, 256, 256, device="cuda")).argmax(-1).sum().item()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
