"""Scores of a conditional random field: one matrix of tags for each character, with far too many tags."""

import torch

# 2053.83 GiB; neither length nor number of tags is said: 93 characters with 77,000 tags have 2,054 GiB.
ins_num, tag_size = 93, 76_998
transitions = torch.zeros(tag_size, 1, device="cuda").expand(tag_size, tag_size)
feats = torch.zeros(ins_num, 1, tag_size, device="cuda").expand(ins_num, tag_size, tag_size)
scores = feats + transitions.view(1, tag_size, tag_size).expand(ins_num, tag_size, tag_size)
