"""A model in a file of your own: a function that builds it, and one that makes a batch.

    fxmem analyze examples/own_model.py:build --set width=64 --input examples/own_model.py:make_batch
    fxmem analyze examples/own_model.py:build --input features:256x100 --input weights:256 \\
        --loss examples/own_model.py:loss

Both functions are called under `torch.device("meta")`, so neither allocates anything. `--set` gives `build` its keyword
arguments; what `make_batch` returns is passed to `forward`: a dict by name, a tuple in order. Run as a script, this
file asks the same through Python.
"""

import torch
from torch import nn

import fxmem


class Regressor(nn.Module):
    """A perceptron over 100 features, whose samples may be weighted."""

    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(100, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, features, weights=None):
        x = torch.tanh(self.first(features))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y = self.last(x).squeeze(-1)
        return y if weights is None else y * weights


def build(width=256, depth=4):
    """The model. Whatever arguments this has, `--set` can give."""
    return Regressor(width, depth)


def make_batch():
    """Arguments of `forward`, by name."""
    return {"features": torch.randn(256, 100), "weights": torch.rand(256)}


def loss(predicted):
    """Takes what the model returns, gives the number to differentiate."""
    return predicted.square().mean()


if __name__ == "__main__":
    with torch.device("meta"):
        batch = make_batch()
    for width in (64, 256, 1024):
        analysis = fxmem.analyze(lambda width=width: build(width), batch, loss=loss, target="cpu")
        params = sum(node.params_bytes for node in analysis.profile.nodes)
        print(
            f"width {width:>4}: {params:>12,} bytes of parameters, {analysis.profile.saved_bytes:>10,} saved, peak "
            f"{analysis.peak.requested_bytes:>12,}"
        )
