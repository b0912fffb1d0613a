"""Reading and writing by index or mask, embeddings, sorting and searching.

What CUB takes for itself is known of sorting (`fxmem.hardware.context`); of scans and selections it is some kilobytes,
and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log, log2, prod
from typing import Any

from fxmem.hardware.context import SCAN_BYTES, radix_sort_bytes
from fxmem.hardware.hidden_memory import Events, alloc, free, output
from fxmem.hardware.operators.registry import Call, NamedCall, Operator, count_factors, layouts_among, undetermined
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout, broadcast_shapes, is_tensor, read_layout

_SORT = "CUB's temporary storage"
_SCAN = "CUB's temporary storage of a scan"

# --- FLOPs ------------------------------------------------------------------------------------------------------------


def _index_put_flops(c: NamedCall) -> int:
    """One addition per element written, if it accumulates. `values` may be broadcast to them; with masks its own size
    is all that is known."""
    indices: Sequence[TensorLayout | None] = c.indices
    values: TensorLayout = c.values
    given = layouts_among(indices)
    if not c.accumulate or any(index.dtype in ("bool", "uint8") for index in given):
        return values.numel if c.accumulate else 0
    kept: list[int] = [size for d, size in enumerate(c.self.shape) if d >= len(indices) or indices[d] is None]
    return prod(broadcast_shapes(*(index.shape for index in given))) * prod(kept)


def _bag_flops(c: NamedCall, width: int) -> int:
    """Rows looked up times their width; weighted rows are multiplied too."""
    rows: int = c.indices.numel
    return rows * width * (1 + (c.per_sample_weights is not None))


# --- embeddings -------------------------------------------------------------------------------------------------------


def _embedding_backward_on_card(call: Call) -> Events:
    """`embedding_dense_backward_cuda`, `embedding_backward_cuda_kernel` (Embedding.cu, EmbeddingBackwardKernel.cu).

    Indices are sorted; rows of the same index are summed in parts of 10, in float, before they are scattered. Up to
    3072 indices are scattered directly. `scale_grad_by_freq` is taken to be off.
    """
    grad, indices = call.layouts()[:2]
    count, index_bytes, weight = indices.numel, ITEM_BYTES[indices.dtype], call.made.shape
    if count <= 3072:
        return (output("grad_weight"),)
    segments = min(count, weight[0])
    parts = count // 10 + segments
    return (
        alloc("sorted indices", count * index_bytes),
        alloc("original positions", count * index_bytes),
        alloc("range", count * index_bytes),
        alloc(_SORT, radix_sort_bytes(count, index_bytes, index_bytes)),
        *free(_SORT, "range"),
        output("grad_weight"),
        alloc("segment offsets", count * index_bytes),
        alloc("number of segments", 8),
        alloc("keys of the segments", count * index_bytes),
        alloc("temporary storage of unique_by_key", SCAN_BYTES),
        *free("temporary storage of unique_by_key", "keys of the segments"),
        alloc("parts per segment", segments * index_bytes),
        alloc("offsets of the parts per segment", segments * index_bytes),
        alloc("temporary storage of exclusive_sum", SCAN_BYTES),
        *free("temporary storage of exclusive_sum"),
        alloc("number of parts", 8),
        alloc("part offsets", parts * index_bytes),
        alloc("partial sums", parts * weight[1] * (8 if grad.dtype == "float64" else 4)),
    )


def _embedding_bag_on_cpu(call: Call) -> Events | None:
    """`_embedding_bag_cpu_impl` (EmbeddingBag.cpp): bags are counted in one place more than there are indices, and a
    mean is divided by their sizes, at least 1, in its own dtype."""
    indices, made = read_layout(call.result[1]).numel, read_layout(call.result[0])
    if not indices:
        return None
    bags, mode, counted = made.shape[0], call.argument(4, 0), "counted offsets"
    largest = (alloc("bags that are empty", 8 * bags),) if mode == 2 else ()
    sizes = (8 * bags, 8 * bags, ITEM_BYTES[made.dtype] * bags) if mode == 1 else ()
    return (
        output("bags"),
        *(alloc(counted, 8 * (indices + 1)), alloc("ones", 8 * bags), *free("ones")),
        *(output("bag of each index"), *free(counted)),
        output("sizes of bags"),
        *(*largest, output("largest indices")),
        *(alloc(f"divisor {number}", nbytes) for number, nbytes in enumerate(sizes)),
    )


# --- masks ------------------------------------------------------------------------------------------------------------


def _index(call: Call) -> Events | None:
    """`expandTensors` (IndexingUtils.h): the places that a mask picks are found before they are read."""
    count, rest = divmod(call.made.numel, _slice_numel(call) or 1)
    places = _places_of_masks(call, count) if not rest else ()
    return (*places, output("result")) if places else None


def _index_put(call: Call) -> Events | None:
    """As `_index`, where the values say how many places there are: they are not broadcast. One value for all that a
    mask picks is filled in, without places."""
    count = call.layout(2).numel // (_slice_numel(call) or 1)
    return (_places_of_masks(call, count) or None) if count > 1 else None


def _slice_numel(call: Call) -> int:
    """Elements at one place that the indices pick."""
    shape, at, kept = call.layout().shape, 0, 1
    for index in call.args[1]:
        if index is None:
            kept *= shape[at]
        at += 1 if index is None or not _is_mask(read_layout(index)) else max(1, read_layout(index).rank)
    return kept * prod(shape[at:])


def _places_of_masks(call: Call, count: int) -> Events:
    """Of so many places, all coordinates of each mask in int64. A card's kernel wants a mask that is contiguous."""
    masks = [read_layout(index) for index in call.args[1] if index is not None and _is_mask(read_layout(index))]
    events: Events = ()
    for number, mask in enumerate(masks):
        copy = () if call.platform.card is None else _copy_mask(mask, mask.shape)
        events += *copy, alloc(f"places of mask {number}", 8 * mask.rank * count), *free("contiguous mask")
    return events


def _copy_mask(mask: TensorLayout, shape: Sequence[int]) -> Events:
    """What a card's kernel reads in the place of a mask that is expanded, or otherwise not contiguous."""
    return () if mask.shape == tuple(shape) and mask.is_contiguous() else (alloc("contiguous mask", prod(shape)),)


def _is_mask(index: TensorLayout) -> bool:
    return index.dtype in ("bool", "uint8")


def _nonzero_on_card(call: Call) -> Events | None:
    """`nonzero_out_cuda` (cuda/Nonzero.cu) wants a mask that is contiguous."""
    source = call.layout()
    if source.is_contiguous():
        return None
    return alloc("contiguous mask", source.nbytes), output("places"), *free("contiguous mask")


def _masked_select_on_card(call: Call) -> Events:
    """`masked_select_out_cuda_impl` (cuda/IndexKernel.cpp): both are expanded, and read at the places of the mask."""
    own, mask = call.layout(), call.layout(1)
    shape = broadcast_shapes(own.shape, mask.shape)
    places = alloc("places", 8 * len(shape) * call.made.numel)
    return *_copy_mask(mask, shape), places, *free("contiguous mask"), output("result"), *free("places")


def _masked_scatter_backward_on_card(call: Call) -> Events:
    """`masked_scatter_backward` (TensorAdvancedIndexing.cpp): what the mask picks; the source is taken to have no more
    elements than that."""
    grad, mask = call.layouts()[:2]
    places = alloc("places", 8 * grad.rank * min(call.made.numel, mask.numel))
    return *_copy_mask(mask, grad.shape), places, *free("contiguous mask"), output("result"), *free("places")


def _masked_scatter_on_card(call: Call) -> Events:
    """`masked_scatter__cuda` (cuda/IndexKernel.cpp, IndexKernel.cu): how many the mask picks before each element, in
    int64; mask and source are wanted contiguous."""
    own, mask, source = call.layouts()[:3]
    return (
        output("result"),
        alloc("positions", 8 * own.numel),
        *_copy_mask(mask, own.shape),
        alloc(_SCAN, SCAN_BYTES),
        *free(_SCAN),
        *(() if source.is_contiguous() else (alloc("contiguous source", source.nbytes),)),
    )


# --- writing by index -------------------------------------------------------------------------------------------------


def _index_put_on_card(call: Call) -> Events | None:
    """`index_put_with_sort_kernel` (Indexing.cu), the one that accumulates: what is put at one place is found by
    sorting.

    The indices become one linear index, which is sorted with the positions it came from; values are taken to be dense
    and not to be broadcast. Where other dimensions lie between theirs, the target is copied with theirs first.
    """
    if not (call.platform.deterministic or call.argument(3)):
        return _index_put(call)  # the one that does not accumulate sorts nothing
    count = max(read_layout(index).numel for index in call.args[1] if index is not None)
    nbytes, bits = count * 8, _largest_index(call.layout(0), call.args[1]).bit_length()
    copy = (
        ()
        if _are_adjacent(call.args[1])
        else (alloc("target with the indexed dimensions first", call.layout().nbytes),)
    )
    return (
        output("result"),
        *(_index_put(call) or ()),
        alloc("index within bounds", nbytes),
        alloc("linear index", nbytes),
        *free("index within bounds"),
        *copy,
        alloc("sorted indices", nbytes),
        alloc("original positions", nbytes),
        alloc("range", nbytes),
        alloc(_SORT, radix_sort_bytes(count, 8, 8, bits)),
        *free(_SORT),
    )


def _largest_index(target: TensorLayout, indices: Sequence[Any]) -> int:
    """The largest linear index into the slices that indices pick (`largestIndex`, by which bits are counted)."""
    taken = [number for number, index in enumerate(indices) if index is not None]
    others = [size for number, size in enumerate(target.shape) if number not in taken]
    slice_size = prod(target.shape[taken[-1] + 1 :] if _are_adjacent(indices) else others)
    return (target.numel - 1) // max(1, slice_size)


def _are_adjacent(indices: Sequence[Any]) -> bool:
    taken = [number for number, index in enumerate(indices) if index is not None]
    return taken == list(range(taken[0], taken[-1] + 1))


def _scatter_reduce(call: Call) -> Events | None:
    """`scatter_reduce_two` (TensorAdvancedIndexing.cpp): how many numbers each mean is of, and where it is none."""
    if call.args[4] != "mean":
        return None
    own, source = call.layout(0), call.layout(3)
    return output("result"), alloc("ones", source.nbytes), alloc("counts", own.nbytes), alloc("counts of 0", own.numel)


def _masked_select_on_cpu(call: Call) -> Events:
    """`masked_select_out_impl_cpu` (TensorAdvancedIndexing.cpp): the mask is counted in int64. Several threads share
    the work by sums over it."""
    counted = alloc("mask in int64", 8 * call.layout(1).numel), *free("mask in int64"), output("result")
    return *counted, alloc("temporaries of several threads", None)


# --- sorting and searching --------------------------------------------------------------------------------------------


def _sort_on_card(call: Call) -> Events:
    """`sort_cuda_kernel` (Sort.cpp, Sort.h) and `do_launch_stable_sort_kernel` (SortStable.cu).

    Rows of up to 4096 are sorted in place in the results; the positions come from a range. CUB sorts longer ones, one
    row or very long rows by digits, and keeps values and positions a second time. From 128 rows on all rows have their
    positions, and CUB's own 512 bytes beside them are what published runs left over. Fewer rows are sorted as one, with
    the number of the row beside each position, where what CUB takes is unknown.

    The overload with `stable` has its dimension by keyword, which is not seen here; nearly everybody sorts along the
    last.
    """
    source, dim = call.layout(), call.argument(1)
    length = prod(source.shape[dim if isinstance(dim, int) else -1 :][:1])
    return output("values"), output("indices"), *_sort_scratch(source, length)


def _sort_scratch(source: TensorLayout, length: int) -> Events:
    """Beside the results of `_sort_on_card`, for rows of that length."""
    total, item = source.numel, ITEM_BYTES[source.dtype]
    if length <= 4096:
        return alloc("range", length * 8), *free("range")
    rows = total // length
    if rows == 1 or length >= 1_000_000:
        positions, sort = alloc("positions", length * 8), alloc(_SORT, radix_sort_bytes(length, item, 8))
        return positions, sort, *free(_SORT, "positions")
    if rows < 128:
        named = (alloc(f"rows and positions{state}", total * 8) for state in ("", ", sorted"))
        return *named, alloc(_SORT, None)
    return alloc("positions", total * 8), alloc("CUB's values and positions", total * (8 + item) + 512)


def _sort_on_cpu(call: Call) -> Events | None:
    """`fill_indices` (Sorting.cpp): the positions of one row, which are written to all."""
    source = call.layout()
    dim = next((value for value in call.args[1:] if isinstance(value, int) and not isinstance(value, bool)), -1)
    if source.rank == 0:
        return None
    return output("values"), output("indices"), alloc("range", 8 * source.shape[dim])


def _topk_on_card(call: Call) -> Events:
    """`should_use_multiblock` (TensorTopK.cu): slices shorter than 400 are searched by one block each, in shared
    memory."""
    shape = call.layout().shape
    buffers = (alloc("buffers of several blocks for a slice", None),) if len(shape) < 2 or shape[-1] >= 400 else ()
    return output("values"), output("indices"), *buffers


def _kth_value_on_cpu(call: Call) -> Events:
    """`kthvalue_out_impl_cpu` (Sorting.cpp): values and positions that are partitioned."""
    source = call.layout()
    buffers = alloc("partitioned values", source.nbytes), alloc("partitioned positions", 8 * source.numel)
    return output("values"), output("indices"), *buffers


def _median_on_cpu(call: Call) -> Events | None:
    """`median_impl` (Sorting.cpp): a copy that is partitioned; with a dimension each row has its own, unseen."""
    if is_tensor(call.result):
        return alloc("partitioned values", call.layout().nbytes), output("median")
    return None


def _median_on_card(call: Call) -> Events | None:
    """`median_impl` (cuda/Sorting.cpp): all numbers are sorted with their positions; with a dimension nothing is."""
    if not is_tensor(call.result):
        return None
    source = call.layout()
    values, positions = alloc("sorted values", source.nbytes), alloc("sorted positions", 8 * source.numel)
    return values, positions, *_sort_scratch(source, source.numel), output("median")


def _unique_on_card(call: Call) -> Events:
    """`unique_cuda_template` (cuda/UniqueCub.cu): numbers are sorted; for places and counts with their positions."""
    source = call.layout()
    count, item = source.numel, ITEM_BYTES[source.dtype]
    sorted_values = alloc("sorted values", source.nbytes)
    if not call.argument(2) and not call.argument(3):
        return sorted_values, alloc(_SORT, radix_sort_bytes(count, item)), *free(_SORT)
    positions = alloc("sorted positions", 8 * count), alloc("positions", 8 * count)
    return sorted_values, *positions, alloc(_SORT, radix_sort_bytes(count, item, 8)), *free(_SORT, "positions")


def _permutation_on_card(call: Call) -> Events:
    """`randperm_out_cuda` (cuda/Randperm.cu): random keys are sorted with their places, by so many bits that hardly two
    are equal."""
    count = call.made.numel
    bits = min(64, ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9))))) if count else 0
    item = 8 if bits > 32 else 4
    return (
        output("permutation"),
        alloc("number of the generator", 8),
        *free("number of the generator"),
        alloc("places", 8 * count),
        alloc("keys", item * count),
        alloc("sorted keys", item * count),
        alloc(_SORT, radix_sort_bytes(count, item, 8, bits)),
    )


# --- the rows ---------------------------------------------------------------------------------------------------------

ROWS = {
    "TensorAdvancedIndexing.cpp, cuda/Indexing.cu": {
        "index _unsafe_index": Operator(0, traffic="picks", scratch=_index),
        "gather take": Operator(0, traffic="picks"),
        "index_select": Operator(0, traffic="picks", index_at=2),
        "masked_select": Operator(0, traffic="picks", cpu=_masked_select_on_cpu, cuda=_masked_select_on_card),
        "masked_scatter masked_scatter_": Operator(0, cuda=_masked_scatter_on_card),
        "masked_scatter_backward": Operator(0, cuda=_masked_scatter_backward_on_card, is_opaque=True),
        "nonzero": Operator(0, cuda=_nonzero_on_card),
        "index_fill masked_fill where": Operator(0),
        "index_copy": Operator(0, traffic="puts"),
        "index_put index_put_ _index_put_impl_ _unsafe_index_put": Operator(
            _index_put_flops, traffic="puts", cuda=_index_put_on_card, cpu=_index_put
        ),
        "index_add": Operator(lambda c: c.source.numel * (1 + count_factors(c)), traffic="puts", index_at=2),
        "index_reduce": Operator(scratch=undetermined),
        "scatter": Operator(lambda c: c.index.numel * hasattr(c, "reduce"), traffic="puts"),
        "scatter_add": Operator(lambda c: c.index.numel, traffic="puts"),
        "scatter_reduce": Operator(lambda c: c.index.numel + c.made * (c.reduce == "mean"), scratch=_scatter_reduce),
    },
    "Embedding.cpp, cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu": {
        "embedding": Operator(0, traffic="picks", index_at=1),
        # Gradients that meet in one place are added, each once.
        "embedding_dense_backward": Operator((1, 0), cuda=_embedding_backward_on_card),
        "embedding_renorm": Operator(uncounted="depends on how many rows exceed the norm"),
        "renorm": Operator(scratch=undetermined),
    },
    "EmbeddingBag.cpp": {
        "_embedding_bag": Operator(
            lambda c: _bag_flops(c, c.weight.shape[1]) + c.made * (c.mode == 1), cpu=_embedding_bag_on_cpu
        ),
        "_embedding_bag_backward _embedding_bag_dense_backward": Operator(
            # mode 2: the largest row has all of it
            lambda c: c.read if c.mode == 2 else _bag_flops(c, c.grad.shape[1]) + c.read * (c.mode == 1),
            scratch=undetermined,
        ),
        "_embedding_bag_per_sample_weights_backward": Operator(scratch=undetermined),
    },
    "Sorting.cpp, cuda/Sort.cpp, cuda/SortStable.cu, cuda/TensorTopK.cu": {
        "sort": Operator(0, cuda=_sort_on_card, cpu=_sort_on_cpu),
        "topk": Operator(0, cuda=_topk_on_card),
        "kthvalue": Operator(0, cpu=_kth_value_on_cpu),
        "median nanmedian": Operator(0, cpu=_median_on_cpu, cuda=_median_on_card),
        "argsort mode": Operator(0),
    },
    "Unique.cpp, cuda/Unique.cu, Bucketization.cpp, TensorCompare.cpp": {
        "unique_dim bucketize searchsorted": Operator(0),
        "_unique2": Operator(0, cuda=_unique_on_card),
        "randperm": Operator(0, cuda=_permutation_on_card),
        "_unique isin": Operator(scratch=undetermined),
    },
}
