"""A VGG-16 with Adam, eight images of 224 by 224."""

import torch
from torch import nn
from torchvision.models import vgg16

model = vgg16().cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    images = torch.randn(8, 3, 224, 224, device="cuda")  # the size is not said
    labels = torch.randint(0, 1000, (8,), device="cuda")
    optimizer.zero_grad()
    output = model(images)
    loss = criterion(output, labels)
    loss.backward()
    optimizer.step()
