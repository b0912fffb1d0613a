"""Packed sequences through LSTM and GRU, a CTC loss, sparse gradients, jagged tensors."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def show(what: str) -> None:
    """The peaks since the last call."""
    print(what, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()


lengths = torch.tensor([97, 80, 64, 33, 12])
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    layer = kind(256, 512, 2, bidirectional=True, dropout=0.1, batch_first=True).cuda()
    for _ in range(2):
        x = torch.randn(5, 97, 256, device="cuda", requires_grad=True)
        packed, _ = layer(pack_padded_sequence(x, lengths, batch_first=True))
        pad_packed_sequence(packed, batch_first=True)[0].sum().backward()
        layer.zero_grad()
        show(kind.__name__)
    del layer, x, packed
for length in (50, 300):
    logits = torch.randn(length, 16, 100, device="cuda", requires_grad=True)
    targets = torch.randint(1, 100, (16, 25), device="cuda")
    for where in ("cpu", "cuda"):
        sizes = torch.full((16,), length, device=where), torch.full((16,), 25, device=where)
        F.ctc_loss(logits.log_softmax(-1), targets, *sizes).backward()
        show(f"ctc {where}")
table = nn.Embedding(100_000, 64, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(table.parameters())
for _ in range(3):
    table(torch.randint(0, 100_000, (4096,), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    show("sparse")
bag = nn.EmbeddingBag(100_000, 64, mode="sum").cuda()
for _ in range(2):
    bag(torch.randint(0, 100_000, (4096,), device="cuda"), torch.arange(0, 4096, 8, device="cuda")).sum().backward()
    bag.zero_grad()
    show("bag")
linear = nn.Linear(256, 256).cuda()
for _ in range(2):
    parts = [torch.randn(int(length), 256, device="cuda") for length in lengths]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    F.gelu(linear(jagged)).values().square().mean().backward()
    linear.zero_grad()
    show("jagged")
