"""A trainer class with a scheduler, evaluation, history and checkpoints, in the shape of the libraries' trainers."""

import dataclasses
import os
import sys
import tempfile

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


@dataclasses.dataclass
class Config:
    device: str = "cpu"
    batch: int = 16
    accumulate: int = 2
    clip: float = 1.0
    steps: int = 6
    save_every: int = 1


class Copying(Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int):
        tokens = (torch.arange(33) * (index + 3)) % 97
        return {"inputs": tokens[:-1], "labels": tokens[1:]}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 97)

    def forward(self, inputs, labels=None):
        logits = self.head(self.encoder(self.embed(inputs)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Trainer:
    def __init__(self, model: nn.Module, config: Config, folder: str) -> None:
        self.model, self.config, self.folder = model.to(config.device), config, folder
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 4))
        self.history, self.best = [], float("inf")

    def move(self, batch):
        return {name: value.to(self.config.device) for name, value in batch.items()}

    def train(self, training, testing) -> None:
        step, running = 0, torch.tensor(0.0, device=self.config.device)
        while step < self.config.steps:
            for index, batch in enumerate(training):
                self.model.train()
                loss = self.model(**self.move(batch))["loss"] / self.config.accumulate
                loss.backward()
                running += loss.detach()
                if (index + 1) % self.config.accumulate:
                    continue
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                step += 1
                self.history.append({"loss": running.item(), "lr": self.scheduler.get_last_lr()[0]})
                running -= running
                if step % self.config.save_every == 0:
                    self.evaluate(testing)
                    self.save(step)
                if step >= self.config.steps:
                    break

    @torch.no_grad()
    def evaluate(self, testing) -> None:
        self.model.eval()
        losses, predictions = [], []
        for index, batch in enumerate(testing):
            out = self.model(**self.move(batch))
            losses.append(out["loss"].item())
            predictions.append(out["logits"].argmax(-1))
            if index == 2:
                break
        self.best = min(self.best, sum(losses) / len(losses))
        print(len(self.history), self.best, torch.cat(predictions).shape)

    def save(self, step: int) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        torch.save(state, os.path.join(self.folder, "last.pt"))


if __name__ == "__main__":
    torch.manual_seed(5)
    config = Config(*sys.argv[1:])
    loader = DataLoader(Copying(), batch_size=config.batch, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(Tagger(), config, folder).train(loader, DataLoader(Copying(), batch_size=32))
