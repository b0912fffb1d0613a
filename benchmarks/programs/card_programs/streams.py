"""Batches copied on a stream of their own, recorded there and used here."""

import torch

from benchmarks.programs.card_parts import Decoder

model = Decoder(layers=3).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side = torch.cuda.Stream()


def fetch() -> torch.Tensor:
    """The next batch, on its way."""
    with torch.cuda.stream(side):
        return torch.randn(4, 1024, 768).pin_memory().to("cuda", non_blocking=True)


following = fetch()
for step in range(4):
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.current_stream().wait_stream(side)
    batch = following
    batch.record_stream(torch.cuda.current_stream())
    following = fetch()
    out = batch
    for block in model.blocks:
        out = block(out)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del out, batch
    torch.cuda.synchronize()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
