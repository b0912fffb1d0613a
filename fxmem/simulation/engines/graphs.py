"""What an engine's CUDA graphs take: those of all batches that it captures.

With FlashAttention 3, what a captured decode step keeps of its partial sums is 32 rows of a token's heads in single
precision for each token of the largest batch: 33 starts logged 0 to 10 MiB more for the first of them. The rest is a
straight line through 16 starts of vLLM 0.19 on H100 with 51 sizes each (benchmarks/published/serving.json): what the
driver keeps of a graph, by layers, and what the products of the largest batch are. Of all 21 starts of dense models it
is off by 4 % in the mean and 12 % at most, of layers in 8 bits; of experts there are too few starts.
"""

from __future__ import annotations

from typing import Final

from fxmem.simulation.engines.layers import LayerSizes

_MIB: Final = 1 << 20
_LARGEST: Final = 512
"""Tokens of the largest batch that is captured."""
_PARTS: Final = 32
"""Into how many parts FlashAttention 3 splits keys at most."""
_BASE, _OF_LAYER, _OF_PRODUCTS = 124 * _MIB, 15_612_000, 1.706
_USUAL: Final = 51
"""Sizes of the starts."""
SPREAD: Final = 0.12
"""The line's largest error, rounded up."""


def graph_bytes(
    sizes: LayerSizes, *, layers: int, heads_bytes: int, tensor: int, max_seqs: int, splits_keys: bool
) -> int | None:
    """What graphs of all sizes take; None where too little was seen.

    Args:
        sizes: of the layers.
        layers: that the card has.
        heads_bytes: of the queries of a token, in single precision, that the card has.
        tensor: cards that split each layer.
        max_seqs: sequences at a time, by which the sizes go.
        splits_keys: whether attention is FlashAttention 3.
    """
    if sizes.chosen:
        return None
    largest = min(2 * max_seqs, _LARGEST)
    count = sum(size <= largest for size in (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST + 1, 16)))
    products = _LARGEST * (sizes.up + sizes.down) // tensor * sizes.dtype.itemsize
    partial = _PARTS * largest * heads_bytes if splits_keys else 0
    return partial + int((_BASE + _OF_LAYER * layers) * count / _USUAL + _OF_PRODUCTS * products * largest / _LARGEST)
