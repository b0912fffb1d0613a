"""Like DETR's engine: a model that returns a dictionary, and results that are lists of dictionaries, by image:
`detr_like.py TRAIN_IMAGES IMAGES`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


class Detr(nn.Module):
    """A small encoder over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 16, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 1)
        self.classes, self.boxes = nn.Linear(64, 92), nn.Linear(64, 4)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.encoder(self.patches(images).flatten(2).transpose(1, 2))
        return {"logits": self.classes(hidden), "boxes": self.boxes(hidden).sigmoid(), "features": hidden}


def collate(batch: list[tuple[torch.Tensor, dict[str, Any]]]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Images in one tensor, targets in a list."""
    images, targets = zip(*batch, strict=True)
    return torch.stack(images), list(targets)


def make_loader(count: int) -> Any:
    """Images of 224 pixels with what is known of each."""
    data: Any = [(torch.zeros(3, 224, 224), {"image_id": index}) for index in range(count)]
    return DataLoader(data, batch_size=8, collate_fn=collate)


def post_process(outputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Scores, labels and boxes of each image."""
    scores, labels = outputs["logits"].softmax(-1)[..., :-1].max(-1)
    rows = zip(scores, labels, outputs["boxes"], strict=True)
    return [{"scores": score, "labels": label, "boxes": boxes} for score, label, boxes in rows]


net = Detr().cuda()
optimizer = torch.optim.AdamW(net.parameters())
train, valid = (make_loader(int(count)) for count in sys.argv[1:])
for images, _ in train:
    found = net(images.cuda())
    (found["logits"].sum() + found["boxes"].sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
net.eval()
results, kept = {}, []
with torch.no_grad():
    for images, targets in valid:
        found = net(images.cuda())
        results.update({each["image_id"]: one for each, one in zip(targets, post_process(found), strict=True)})
        kept.append({"features": found["features"]})
    features = torch.cat([each["features"] for each in kept])
    print(len(results), (features - features.mean(0)).std().item())
    print(torch.stack([each["boxes"] for each in results.values()]).cpu().shape)
