"""Convolutions whose algorithm cuDNN chooses by timing (`torch.backends.cudnn.benchmark`), the first step apart."""

import gc

import torch
import torch.nn.functional as F
from torchvision.models import get_model

from benchmarks.programs.card_parts import show

torch.backends.cudnn.benchmark = True
for name, batch, precision in (
    ("resnet50", 32, torch.float32),
    ("resnet50", 32, torch.bfloat16),
    ("vgg16", 32, torch.float32),
    ("mobilenet_v2", 64, torch.float32),
    ("regnet_y_8gf", 32, torch.float32),
    ("densenet121", 32, torch.float32),
    ("mnasnet1_0", 64, torch.float32),
):
    model = get_model(name, weights=None).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        images, labels = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (batch,), device="cuda")
        with torch.autocast("cuda", precision, enabled=precision is not torch.float32):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"{name} {precision} {step}")
    del model, optimizer, loss, images, labels
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
