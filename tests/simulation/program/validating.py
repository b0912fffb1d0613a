"""A Lightning program that validates after an epoch of ten batches: `validating.py EPOCHS_BETWEEN`."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Keeps what it predicts while it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2000))
        self.preds: list[torch.Tensor] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.preds.append(self.net(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.preds.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_loader(samples: int, batch: int) -> Any:
    """A loader of rows of 64 numbers."""
    return DataLoader(TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,))), batch_size=batch)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
trainer = lightning.Trainer(
    max_epochs=2,
    check_val_every_n_epoch=int(sys.argv[1]),
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), make_loader(320, 32), make_loader(128 * 16, 128))
