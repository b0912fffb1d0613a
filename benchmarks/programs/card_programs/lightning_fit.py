"""Lightning's Trainer in bf16-mixed, two accumulated batches a step, with a validation."""

import tempfile
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Classifier(lightning.LightningModule):
    """A convolutional classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, 2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """The loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Its loss, logged."""
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, *_: object) -> None:
        """Show the peaks."""
        print(
            "batch", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
        )
        torch.cuda.reset_peak_memory_stats()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


data = DataLoader(TensorDataset(torch.randn(192, 3, 64, 64), torch.randint(0, 10, (192,))), batch_size=32)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=2, precision="bf16-mixed", accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="gpu", devices=1,
    )  # fmt: skip
    trainer.fit(Classifier(), data, data)
