"""A small convolutional classifier with a scheduler and a test pass, in the shape of pytorch/examples' mnist."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Made-up pictures, each normalized when it is loaded."""

    def __init__(self, count: int) -> None:
        self.pictures = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8)
        self.labels = torch.arange(count) % 10

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        picture = self.pictures[index].float().div_(255).sub_(0.1307).div_(0.3081)
        return picture.unsqueeze(0), int(self.labels[index])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def train(model, device, loader, optimizer) -> None:
    model.train()
    for index, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if index % 2 == 0:
            print(f"loss: {loss.item():.6f}")


def test(model, device, loader) -> None:
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            predicted = output.argmax(dim=1, keepdim=True)
            correct += predicted.eq(target.view_as(predicted)).sum().item()
    print(f"average loss: {loss / len(loader.dataset):.4f}, accuracy: {correct}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.manual_seed(1)
    training, testing = DataLoader(Digits(64), batch_size=32, shuffle=True), DataLoader(Digits(32), batch_size=32)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        train(model, device, training, optimizer)
        test(model, device, testing)
        scheduler.step()
