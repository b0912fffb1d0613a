"""What differs between releases of torch: one row a release, each with how it was confirmed.

*Run*: torch's own C++ of that wheel ran on a stand-in for a card (`make -C benchmarks releases`), whose runtime and
cuBLAS compute nothing, and the caching allocator's own log was read: products on compute capabilities of 7.5 to 12.0;
ten sequences of 3,000 requests to the allocator, on one stream or four, each under its own settings, which release
after release answers alike (2.12 excepted).
The other calls and the optimizers that were run so are in the `releases` file of `benchmarks/results`. *Wheel*: read in
the texts of the wheel's libraries. The order of attention's backends has its releases beside each rule
(`simulation/kernels/attention/backend_rules.py`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fxmem.errors import UsageError

Version = tuple[int, int]


class BlockedEngine(NamedTuple):
    """An engine of cuDNN that torch does not take."""

    op: Literal["fwd", "dgrad", "wgrad"]
    rank: int
    """Least rank of the tensors."""
    engine: int
    first: int
    """First version of cuDNN, e.g. 90800."""
    end: int | None = None
    """One past the last; None for no end."""
    capability: Version | None = None
    """The compute capability it is avoided on; None for all."""


class Release(NamedTuple):
    """The rules of one release of torch."""

    large_workspaces: frozenset[int]
    """Major compute capabilities on which cuBLAS's workspace has 32 MiB; elsewhere `:4096:2:16:8`."""
    shares_with_lt: bool
    """Whether cuBLASLt uses cuBLAS's workspace, unless `TORCH_CUBLASLT_UNIFIED_WORKSPACE=0`."""
    keeps_workspaces: bool
    """Whether a workspace is kept once allocated; otherwise each product allocates one and frees it, unless
    `TORCH_CUBLAS_WORKSPACE_CACHE=1`."""
    integers_use_cublas: bool
    """Whether `_int_mm` has cuBLAS's workspace."""
    blocked_engines: tuple[BlockedEngine, ...]
    evidence: str
    note: str = ""
    """What the rules leave open in this release; for the report's assumptions."""


_BLOCKED = (BlockedEngine("fwd", 5, 23, 90800, 91500), BlockedEngine("dgrad", 5, 23, 8000))
_BLOCKED_SINCE_14 = (
    *_BLOCKED,
    BlockedEngine("fwd", 0, 5, 92301, 92400, (8, 6)),
    BlockedEngine("fwd", 0, 58, 92300, capability=(12, 0)),
    BlockedEngine("dgrad", 0, 63, 92300, capability=(12, 0)),
    BlockedEngine("wgrad", 0, 63, 92300, capability=(12, 0)),
)
_ERRATA = "engines: `plan_errata_exception` (aten/src/ATen/native/cudnn/Conv_v8.cpp), the list in the wheel"
_SOURCE = "aten/src/ATen/cuda/CublasHandlePool.cpp"

_OLDEST = Release(
    large_workspaces=frozenset({9}),
    shares_with_lt=False,
    keeps_workspaces=True,
    integers_use_cublas=True,
    blocked_engines=_BLOCKED,
    evidence=f"run, 2.11.0+cu130; `parseChosenWorkspaceSize`, `getCUDABlasLtWorkspace` ({_SOURCE}); {_ERRATA}",
)
RELEASES: dict[Version, Release] = {(2, 11): _OLDEST}
"""Each release, as it differs from the one before it."""
RELEASES[2, 12] = RELEASES[2, 11]._replace(
    large_workspaces=frozenset({9, 10, 12}),
    shares_with_lt=True,
    integers_use_cublas=False,
    evidence=f"run, 2.12.1+cu130; pytorch/pytorch#175344, #173002 and #175879 ({_SOURCE}); {_ERRATA}",
    note=(
        "the allocator of torch 2.12 answered 2 of 10 recorded traces with other peaks than the releases before it "
        "and after; why is not known, and it is predicted as they are"
    ),
)
RELEASES[2, 13] = RELEASES[2, 12]._replace(evidence=f"run, 2.13.0+cu130 ({_SOURCE}); {_ERRATA}", note="")
RELEASES[2, 14] = RELEASES[2, 13]._replace(
    large_workspaces=frozenset({9, 10, 11, 12}),
    blocked_engines=_BLOCKED_SINCE_14,
    evidence=f"run, 2.14.1+cu130 ({_SOURCE}); {_ERRATA}, pytorch/pytorch#189207 and #191701",
)
RELEASES[2, 15] = RELEASES[2, 14]._replace(
    keeps_workspaces=False,
    evidence=(
        f"run, 2.15.0+cu132; `getCurrentCUDABlasHandleWithWorkspace`, pytorch/pytorch#194311 ({_SOURCE}); {_ERRATA}"
    ),
)


def find_release(torch_version: str) -> tuple[Release, str]:
    """Return the row of a release and whose it is, e.g. `2.11`.

    A release that is not in the table gets the row of the closest earlier one, else of the earliest.

    Raises:
        UsageError: the version does not begin with two numbers.
    """
    version = _version(torch_version)
    found = max((release for release in RELEASES if release <= version), default=min(RELEASES))
    return RELEASES[found], ".".join(map(str, found))


def release_assumption(torch_version: str) -> str | None:
    """What a report has to say of the release: that the table does not know it, or what its row leaves open."""
    row, release = find_release(torch_version)
    if _version(torch_version) in RELEASES:
        return row.note or None
    return f"torch {torch_version} is not among the releases that were checked; the rules are those of torch {release}"


def _version(torch_version: str) -> Version:
    try:
        major, minor = (int(part) for part in torch_version.split(".")[:2])
    except ValueError:
        raise UsageError(f"expected a torch version such as 2.11.0, got {torch_version!r}") from None
    return major, minor
