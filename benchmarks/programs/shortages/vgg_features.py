"""Features of a VGG-16; `volatile=True` has no effect any more, so that gradients are recorded."""

import torch
from torchvision.models import vgg16_bn

model = vgg16_bn().cuda().eval()
for _ in range(2):
    # 3.06 GiB are 256 images after the first convolution.
    input_var = torch.randn(256, 3, 224, 224, device="cuda")
    aux = model(input_var).data.cpu().numpy()
