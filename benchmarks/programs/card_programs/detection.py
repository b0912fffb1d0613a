"""Faster R-CNN: what it finds decides its shapes."""

import torch
import torchvision

torch.manual_seed(0)
model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
corners = torch.tensor([[20.0, 30.0, 200.0, 220.0], [100.0, 100.0, 400.0, 380.0], [10.0, 10.0, 60.0, 90.0]])
for step in range(3):
    torch.cuda.reset_peak_memory_stats()
    images = [torch.rand(3, 480, 640, device="cuda") for _ in range(2)]
    targets = [{"boxes": corners.cuda(), "labels": torch.tensor([1, 2, 3]).cuda()} for _ in images]
    losses = model(images, targets)
    sum(losses.values()).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
