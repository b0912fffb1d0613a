"""Faster R-CNN of torchvision in its documented training call: what is kept hangs on scores and overlaps."""

import torch
from torchvision.models.detection import fasterrcnn_resnet50_fpn

model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
for _ in range(10):
    images = [torch.rand(3, 480, 640).cuda() for _ in range(2)]
    targets = [
        {"boxes": torch.tensor([[10.0, 10.0, 200.0, 300.0]]).cuda(), "labels": torch.tensor([1]).cuda()} for _ in images
    ]
    loss = sum(model(images, targets).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
