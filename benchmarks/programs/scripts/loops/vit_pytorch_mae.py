"""The masked autoencoder of vit-pytorch, as its README trains it, with the pool for which its positions fit."""

import torch
from vit_pytorch import MAE, ViT

encoder = ViT(image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=6, heads=8, mlp_dim=2048, pool="mean")
mae = MAE(encoder=encoder, masking_ratio=0.75, decoder_dim=512, decoder_depth=6).cuda()
optimizer = torch.optim.AdamW(mae.parameters(), lr=3e-4)
for _ in range(10):
    loss = mae(torch.randn(8, 3, 256, 256).cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
