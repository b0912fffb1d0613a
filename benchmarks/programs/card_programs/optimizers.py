"""The state and the temporaries of optimizers."""

import torch
from torch import nn, optim

from benchmarks.programs.card_parts import Block

kinds = {
    "sgd": lambda p: optim.SGD(p, lr=1e-3),
    "momentum": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p),
    "adam, loop": lambda p: optim.Adam(p, foreach=False),
    "adam, fused": lambda p: optim.Adam(p, fused=True),
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adafactor": lambda p: optim.Adafactor(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "adadelta": lambda p: optim.Adadelta(p),
    "adamax": lambda p: optim.Adamax(p),
    "asgd": lambda p: optim.ASGD(p),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9),
    "rprop": lambda p: optim.Rprop(p),
    "muon": lambda p: optim.Muon([each for each in p if each.ndim == 2]),
}
for name, make in kinds.items():
    torch.cuda.empty_cache()
    model = nn.Sequential(*[Block(1024, 16) for _ in range(4)]).cuda()
    optimizer = make(list(model.parameters()))
    for _ in range(3):
        model(torch.randn(1, 64, 1024, device="cuda")).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        optimizer.zero_grad()
    print(name, torch.cuda.memory_allocated(), *peak)
    del model, optimizer
