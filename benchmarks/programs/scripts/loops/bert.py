"""The command `bert` that BERT-pytorch installs."""

from bert_pytorch.__main__ import train

train()
