"""A recogniser of sequences of several lengths: packed for its LSTM, aligned by a CTC loss."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH, FRAMES, LABELS = 8, 40, 6
encoder = nn.LSTM(24, 32, 2, batch_first=True, bidirectional=True)
head = nn.Linear(64, 20)
optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()])
for step in range(4):
    torch.manual_seed(step)  # the same lengths, whatever numbers the parameters took
    frames = torch.randint(2 * LABELS + 1, FRAMES + 1, (BATCH,))
    labels = torch.randint(2, LABELS + 1, (BATCH,))
    targets = torch.randint(1, 20, (BATCH, LABELS))
    packed = pack_padded_sequence(torch.randn(BATCH, FRAMES, 24), frames, batch_first=True, enforce_sorted=False)
    padded, lengths = pad_packed_sequence(encoder(packed)[0], batch_first=True)
    log_probs = head(padded).log_softmax(-1).transpose(0, 1)
    nn.functional.ctc_loss(log_probs, targets, lengths, labels, zero_infinity=True).backward()
    optimizer.step()
    optimizer.zero_grad()
