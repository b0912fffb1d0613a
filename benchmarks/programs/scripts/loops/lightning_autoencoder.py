"""Lightning's Trainer on the autoencoder of its README."""

import lightning
import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(lightning.LightningModule):
    """Pictures of 28 x 28 by three numbers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 28 * 28))

    def training_step(self, batch, batch_idx):
        """The loss of a batch."""
        (x,) = batch
        x = x.view(x.size(0), -1)
        loss = functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    max_epochs=2, accelerator="gpu", devices=1, precision="16-mixed", logger=False, gradient_clip_val=1.0
)
trainer.fit(AutoEncoder(), DataLoader(TensorDataset(torch.rand(512, 1, 28, 28)), batch_size=64))
