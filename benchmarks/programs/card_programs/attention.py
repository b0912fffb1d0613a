"""Attention by every backend, and compiled flexible attention."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def tensors(dtype: torch.dtype, keys: int = 16) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values."""
    make = [(2, 16, 1024, 64), (2, keys, 1024, 64), (2, keys, 1024, 64)]
    return tuple(torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in make)


def show(what: str) -> None:
    """The peaks since the last call."""
    print(what, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()


kinds = {
    "causal": {"is_causal": True},
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "masked": {"attn_mask": torch.zeros(2, 1, 1024, 1024, device="cuda", dtype=torch.bfloat16)},
    "padded": {"attn_mask": torch.ones(2, 1, 1, 1024, device="cuda", dtype=torch.bool)},
}
show("made")
for backend in (
    None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
):  # fmt: skip
    for name, settings in kinds.items():
        for _ in range(2):
            try:
                q, k, v = tensors(torch.bfloat16)
                if backend is None:
                    F.scaled_dot_product_attention(q, k, v, **settings).sum().backward()
                else:
                    with sdpa_kernel(backend):
                        F.scaled_dot_product_attention(q, k, v, **settings).sum().backward()
            except RuntimeError as error:
                print(backend, name, str(error).splitlines()[0])
            q = k = v = None
            show(f"{backend} {name}")
for keys in (16, 4):
    q, k, v = tensors(torch.bfloat16, keys)
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
    show(f"{keys} keys")
    q, k, v = tensors(torch.float32, keys)
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
    show(f"{keys} keys, float32")
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024)
show("block mask")
compiled = torch.compile(flex_attention)
for _ in range(2):
    q, k, v = tensors(torch.bfloat16)
    compiled(q, k, v, block_mask=mask).sum().backward()
    show("flexible")
