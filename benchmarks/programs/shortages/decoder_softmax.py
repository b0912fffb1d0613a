"""A decoder of words with a large vocabulary, 32 sentences."""

import torch
from torch import nn
from torch.nn import functional as F


class Decoder(nn.Module):
    def __init__(self, words, hidden):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, words)

    def forward(self, ids):
        output, _ = self.rnn(self.embedding(ids))
        logits = self.out(output.contiguous().view(-1, output.shape[-1]))
        return F.log_softmax(logits, dim=1).view(*ids.shape, -1)


# 2.77 GiB: 32 sentences of 50 words from 464,700; neither is said.
model = Decoder(464_700, 128).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 464_700, (32, 50), device="cuda")
    optimizer.zero_grad()
    loss = F.nll_loss(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
