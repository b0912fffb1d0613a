"""A program whose batches have different lengths: `varied.py CARD [KIND]`."""

import random
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

KIND = sys.argv[2] if len(sys.argv) > 2 else ""


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, texts: list[torch.Tensor]) -> None:
        self.rest = iter(texts)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.rest


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(500, 64), nn.Tanh()
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 500)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if KIND == "odd":
            x = x + x.new_zeros(2 ** (ids.shape[1] // 16))[:1]
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def make_texts(count: int = 403) -> list[torch.Tensor]:
    drawn = random.Random(3)
    return [torch.arange(drawn.randint(16, 400)) for _ in range(count)]


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


def make_loader() -> "torch.utils.data.DataLoader[torch.Tensor]":
    texts = make_texts()
    shuffle = KIND != "iterable"
    source = texts if shuffle else Stream(texts)
    if KIND == "fixed":
        source = [torch.arange(64)] * 403
    return torch.utils.data.DataLoader(source, batch_size=4, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]


def train_on(net: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    logits = net(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    device = sys.argv[1]
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    accumulate = 2 if KIND == "accumulate" else 1
    for _ in range(3):
        for number, ids in enumerate(make_loader()):
            if accumulate == 1:
                train_on(net, optimizer, ids.to(device))
                continue
            logits = net(ids.to(device))
            nn.functional.cross_entropy(logits.flatten(0, 1), ids.to(device).flatten()).backward()
            if number % accumulate == 1:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
