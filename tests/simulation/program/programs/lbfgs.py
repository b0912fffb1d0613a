"""A fit by LBFGS, whose step runs forward and backward in a closure, in the shape of time_sequence_prediction."""

import sys

import torch
from torch import nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

    def forward(self, x, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(x.size(0), 51, dtype=x.dtype, device=x.device) for _ in range(4))
        for step in x.split(1, dim=1):
            h_t, c_t = self.lstm1(step, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs.append(output)
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
data = torch.sin(torch.arange(9, dtype=torch.float64) / 5 + torch.rand(128, 1, dtype=torch.float64) * 6)
source, target = data[3:, :-1].to(device), data[3:, 1:].to(device)
test_source, test_target = data[:3, :-1].to(device), data[:3, 1:].to(device)
model = Sequence().double().to(device)
criterion = nn.MSELoss()
optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=4, history_size=5)
for _ in range(5):

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(source), target)
        print("loss:", loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        predicted = model(test_source, future=4)
        loss = criterion(predicted[:, :-4], test_target)
        print("test loss:", loss.item())
        y = predicted.detach().cpu().numpy()
