"""What a card's cuDNN answers, from what it answers without a driver.

With no driver cuDNN ranks the same plans in the same order as on the card, with two differences. It leaves out the
engines that ask other libraries or the device: cuBLASLt's for 1 x 1 convolutions, Winograd's by way of cuBLAS and the
Fourier transforms; and the kernels of Hopper that share work among clusters of blocks plan for 18 multiprocessors,
which their workspace follows. Seen on an H100 (132 multiprocessors) with cuDNN 9.19: of 2,552 convolutions of models,
each asked with and without the driver (`benchmarks/results/gpu/h100-plans-cudnn9.19.0.json.gz`), what is answered
without it is off by a KiB or more for 1,228, by 49.6 GiB in all; with these rules for 280, by 2.3 GiB.

The rules hold for compute capability 9.0 alone, because no other card has been asked. That another takes such engines
too is known from what a loop reserves. Trainings of MnasNet and MobileNetV2 on an RTX 3060 (cuDNN 9.1; published by the
paper xMem) hold 4 bytes for each image, channel and filter of the last 1 x 1 convolution, 320 to 1280 channels, beside
what is named without a driver: with 200 to 323 images, and not with 377 to 764, where that would be more than 512 MiB.
An RTX 4060 does not. And V100s (`benchmarks/published/segmentation.toml`, cuDNN 7.6 where it is named) compute the
gradient of large 3 x 3 filters in float32 by Winograd's transform, as an H100 does without TF32: with 936 MiB for the
last one of a PSPNet. Which others they take is not known: `GUESSES` are what there may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import Final, NamedTuple, TypeAlias

from fxmem.hardware.hidden_memory import ConvSignature, RnnSignature, Signature
from fxmem.hardware.releases import find_release
from fxmem.records.profile import Target

ASKED = (9, 0)
"""The compute capability whose card has been asked."""

HOW = "where an H100 was seen to take another plan than cuDNN names without a driver, its workspace is counted"
"""For the report."""

_TILE_SIZE, _WORKSPACE, _CLUSTER_M, _CLUSTER_N = 2, 25, 27, 28
"""`cudnnBackendKnobType_t`."""
_TILES = {0: (128, 128), 1: (128, 64), 3: (256, 128), 4: (256, 64), 5: (64, 64), 7: (64, 128), 9: (64, 256)}
"""Rows and columns of the product that one block computes, by the value of the knob."""
_WITHOUT_DRIVER = 18
"""Multiprocessors that cuDNN plans for where no driver says how many there are."""
_LEAST_SUMMED = 224
"""Seven steps of 32. Fitted: of 455 convolutions whose plan splits tiles 335 are right, 317 without it; 208 does as
well. The gradient of the second convolution of examples/mnist on an H200, which had no part in it, is right but for 72
bytes."""
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 14, 8: 15, 14: 7, 16: 7}
"""Clusters of so many blocks that run at once on an H100 with 132 multiprocessors. The split of an H100 into groups of
multiprocessors differs from one to the next, so another one may run one or two more or less."""


def correct_workspace(signature: ConvSignature, nbytes: int, knobs: Mapping[int, int]) -> int:
    """Return the workspace of the card's plan, in bytes.

    Args:
        nbytes: the workspace answered without a driver. knobs: the choices of that plan, by
            `cudnnBackendKnobType_t`.
    """
    outside = _workspace_of_outside_engine(signature)
    if outside is not None:
        return outside
    tile, cluster = _TILES.get(knobs.get(_TILE_SIZE, -1)), (knobs.get(_CLUSTER_M, 0), knobs.get(_CLUSTER_N, 0))
    clusters = _CLUSTERS.get(prod(cluster))
    if tile is None or clusters is None or knobs.get(_WORKSPACE) != 0 or signature.groups != 1:
        return nbytes
    planned = _bytes_of_split_tiles(signature, tile, cluster, _WITHOUT_DRIVER // prod(cluster))
    return max(nbytes - planned, 0) + _bytes_of_split_tiles(signature, tile, cluster, clusters)


def _bytes_of_split_tiles(
    signature: ConvSignature, tile: tuple[int, int], cluster: tuple[int, int], at_once: int
) -> int:
    """Partial sums, in float32, of tiles that several clusters compute together: those of the last round, each of which
    sums up `_LEAST_SUMMED` products or more."""
    batch, channels = signature.x[:2]
    filters, window = signature.w[0], prod(signature.w[2:])
    rows, columns, summed = {
        "fwd": (batch * prod(signature.y[2:]), filters, channels * window),
        "dgrad": (batch * prod(signature.x[2:]), channels, filters * window),
        "wgrad": (filters, channels * window, batch * prod(signature.y[2:])),
    }[signature.op]
    groups = ceil(ceil(rows / tile[0]) / cluster[0]) * ceil(ceil(columns / tile[1]) / cluster[1])
    last = groups % at_once if at_once else 0
    parts = min(at_once // last, summed // _LEAST_SUMMED) if last else 1
    return last * parts * prod(cluster) * prod(tile) * 4 if parts > 1 else 0


def _workspace_of_outside_engine(signature: ConvSignature) -> int | None:
    """The workspace where an engine that is left out without a driver ranks first; None where none does."""
    if len(signature.x) != 4 or signature.dtype == "float64":
        return None
    if signature.groups != 1:
        return _bytes_for_depthwise(signature)
    if {*signature.stride, *signature.dilation} != {1}:
        return None
    tensor_cores = signature.dtype != "float32" or signature.allow_tf32
    if set(signature.w[2:]) == {1} and not any(signature.padding):
        return _bytes_for_cublas_lt(signature) if tensor_cores else None
    return _bytes_in_float32(signature) if set(signature.w[2:]) == {3} and not tensor_cores else None


_CUBLAS_LT_UP_TO = {
    ("fwd", "float32"): (100_000, 1_100_000),
    ("fwd", "half"): (0, 1_100_000),
    ("dgrad", "float32"): (230_000, 600_000),
    ("dgrad", "half"): (140_000, 600_000),
    ("wgrad", "float32"): (230_000, 400_000),
    ("wgrad", "half"): (60_000, 180_000),
}
"""Channels times filters up to which cuBLASLt's engine ranks first for a contiguous 1 x 1 convolution, where the
positions of an image are no multiple of four and where they are. Fitted: right in 921 of 996."""


def _bytes_for_cublas_lt(signature: ConvSignature) -> int | None:
    """A 1 x 1 convolution as a product; backward to the filter one product an image, summed after.

    What cuBLASLt takes besides is a few hundred bytes, and not counted.
    """
    (batch, channels, *image), filters = signature.x, signature.w[0]
    if signature.x_stride[1] == 1:
        return None if signature.op == "wgrad" else 0
    kind = "float32" if signature.dtype == "float32" else "half"
    odd, even = _CUBLAS_LT_UP_TO[signature.op, kind]
    small = channels * filters <= (odd if prod(image) % 4 else even)
    if signature.op != "wgrad":
        return 0 if small else None
    # The products an image are few bytes beside what is read.
    few = kind == "float32" and not prod(image) % 4 and channels * filters <= 1.5 * (channels + filters) * prod(image)
    return batch * channels * filters * 4 if (small or few) and min(channels, filters) > 16 else None


_FOURIER_FROM = {16: 262_144, 32: 16_384, 64: 65_536}
"""Channels times filters from which the forward is by Fourier transforms of this size, if the image nearly fills it."""


def _bytes_in_float32(signature: ConvSignature) -> int | None:
    """A 3 x 3 convolution without TF32: by Fourier transforms, backward to the filter by Winograd's transform."""
    (batch, channels, *image), filters = signature.x, signature.w[0]
    if channels < 16:
        return None
    copies = 0
    if signature.x_stride[1] == 1:
        copies = 4 * (prod(signature.x) + prod(signature.y) + (0 if signature.op == "wgrad" else prod(signature.w)))
    side = max(image) + 2
    if signature.op == "wgrad":
        tiles = prod(ceil(size / 4) for size in image)  # 4 x 4 results of 6 x 6 transformed numbers
        return copies + 36 * 4 * (batch * tiles * (channels + filters) + channels * filters)
    if signature.op == "dgrad":
        if side < 30:
            return None
        # In tiles of 32 x 32, two at a time.
        return copies + _spectrum(32) * (channels * filters + min(2, ceil(side / 32)) * batch * (channels + filters))
    size = 1 << (side - 1).bit_length()
    if size not in _FOURIER_FROM or channels * filters < _FOURIER_FROM[size] or side < 7 / 8 * size:
        return None
    return copies + 2 * _spectrum(size) * channels * (filters + batch) + 4 * prod(signature.w)


def _largest_for_cublas_lt(signature: ConvSignature) -> int | None:
    """A 1 x 1 convolution as a product wherever its partial sums are no more than a card was seen to hold for them."""
    (batch, channels, *_), filters = signature.x, signature.w[0]
    is_product = signature.op == "wgrad" and signature.groups == 1 and {*signature.w[2:], *signature.stride} == {1}
    if not is_product or any(signature.padding) or signature.x_stride[1] == 1 or signature.dtype == "float64":
        return None
    nbytes = batch * channels * filters * 4
    return nbytes if nbytes <= _MOST_PARTIAL_SUMS else None


def _spectrum(size: int) -> int:
    """Bytes of the transform of a square of real numbers: half of it, complex."""
    return 8 * size * (size // 2 + 1)


def _bytes_for_depthwise(signature: ConvSignature) -> int | None:
    """Backward to the filter of a channels-last depthwise convolution in half precision: 256 partial sums."""
    half = signature.dtype in ("float16", "bfloat16")
    if signature.op != "wgrad" or signature.w[1] != 1 or not half or signature.x_stride[1] != 1:
        return None
    return 256 * 4 * 32 * ceil(signature.w[0] / 32) * prod(signature.w[2:])


def _seen_on_rtx_3060(signature: ConvSignature) -> int | None:
    """A 1 x 1 convolution as large as those whose partial sums were held there, or larger."""
    is_like_them = signature.dtype == "float32" and signature.allow_tf32
    return _largest_for_cublas_lt(signature) if is_like_them and signature.x[1] * signature.w[0] >= _LARGE else None


def _seen_on_v100(signature: ConvSignature) -> int | None:
    """A large 3 x 3 convolution backward to the filter, as an H100 computes it without TF32."""
    is_gradient = signature.op == "wgrad" and signature.dtype == "float32" and signature.groups == 1
    is_window = set(signature.w[2:]) == {3} and {*signature.stride, *signature.dilation} == {1}
    if not is_gradient or not is_window or len(signature.x) != 4:
        return None
    is_large = signature.x[1] * signature.w[0] >= _TRANSFORMED and prod(signature.x[2:]) >= _POSITIONS
    return _bytes_in_float32(signature) if is_large else None


_TRANSFORMED, _POSITIONS = 1024 * 128, 64 * 64
"""Channels times filters, and positions of an image, of the smallest that were seen; 128 times 64 channels of 128 x 128
and 1024 times 1024 of 4 x 4 were not (U-Nets)."""


_MOST_PARTIAL_SUMS = 512 << 20
"""Of one layer 505 MiB were held, and 589 MiB were not (see the top of this file)."""
_LARGE = 320 * 1280
"""Channels times filters of that layer."""

Rule: TypeAlias = Callable[[ConvSignature], int | None]
"""The workspace of a convolution in bytes; None for what is named without a driver."""


class CardRule(NamedTuple):
    """What a card was seen to take otherwise."""

    rule: Rule
    how: str
    """For the report."""


_SEEN: Final[Mapping[tuple[str, tuple[int, int]], CardRule]] = {
    ("9.1", (8, 6)): CardRule(
        _seen_on_rtx_3060,
        "where an RTX 3060 was seen to hold partial sums for a 1 x 1 convolution's gradient, these are its workspace",
    ),
    ("", (7, 0)): CardRule(
        _seen_on_v100,
        "gradients of large 3 x 3 filters in float32 are by Winograd's transform, as V100s were seen to compute them",
    ),
}
"""By the cuDNN that cannot be asked, empty for any, and compute capability."""

GUESSES: Final[Mapping[str, Rule]] = {
    "the engines of an H100": _workspace_of_outside_engine,
    "cuBLASLt's for all 1 x 1": _largest_for_cublas_lt,
    "no workspaces": lambda _: 0,
}
"""What a cuDNN may take on a card that has not been asked, in words for a report: "with ..."."""


def find_seen(target: Target, torch_version: str) -> CardRule | None:
    """What is known of the cuDNN of a release on a card, beside what is named without a driver; None for nothing."""
    own, capability = find_release(torch_version)[0].cudnn, target.capability or (0, 0)
    return _SEEN.get((".".join(own.split(".")[:2]), capability)) or _SEEN.get(("", capability))


def apply_rule(sizes: Mapping[Signature, int | None], rule: Rule) -> dict[Signature, int | None]:
    """The same workspaces, as a rule has them where it has any."""
    changed = {each: None if isinstance(each, RnnSignature) else rule(each) for each in sizes}
    return {each: nbytes if changed[each] is None else changed[each] for each, nbytes in sizes.items()}
