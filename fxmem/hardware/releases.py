"""What differs between releases of torch: one row a release, each with how it was confirmed.

*Run*: torch's own C++ of that wheel ran on a stand-in for a card (`make -C benchmarks releases`), whose runtime and
cuBLAS compute nothing, and the caching allocator's own log was read: products on compute capabilities of 7.5 to 12.0;
ten sequences of 3,000 requests to the allocator, on one stream or four, each under its own settings, which release
after release answers alike (2.12 excepted). Of the releases before 2.11, which fxmem does not run on but may predict
for: 115 calls, the optimizers in each form, and one of the ten sequences (the file `older-releases` of
`benchmarks/results`); of 2.6 and 2.10 also which backend takes 600 calls of attention, on five compute capabilities
(compared with the rules, and not kept).
The other calls and the optimizers that were run so are in the `releases` file there. *Wheel*: read in the texts of the
wheel's libraries. The order of attention's backends has its releases beside each rule
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
    keeps_lt_workspaces: bool
    """Whether cuBLASLt's own workspace is kept too, where cuBLAS's is; otherwise each product allocates and frees it.
    """
    integers_use_cublas: bool
    """Whether `_int_mm` has cuBLAS's workspace."""
    norms_sum_by_block: bool
    """Whether layer norm's backward over many short rows sums by blocks of rows."""
    cudnn: str
    """The cuDNN that the wheel on PyPI pins."""
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
    keeps_lt_workspaces=False,
    integers_use_cublas=True,
    norms_sum_by_block=False,
    cudnn="9.1.0",
    blocked_engines=_BLOCKED,
    evidence="run, 2.4.1+cu121; engines: taken to be those of 2.11",
)
RELEASES: dict[Version, Release] = {(2, 4): _OLDEST}
"""Each release, as it differs from the one before it."""
RELEASES[2, 5] = RELEASES[2, 4]._replace(evidence="run, 2.5.1+cu124; engines: taken to be those of 2.11")
RELEASES[2, 6] = RELEASES[2, 5]._replace(evidence="run, 2.6.0+cu124; engines: taken to be those of 2.11")
RELEASES[2, 7] = RELEASES[2, 6]._replace(cudnn="9.5.1", evidence="run, 2.7.1+cu126; engines: taken to be those of 2.11")
RELEASES[2, 8] = RELEASES[2, 7]._replace(
    norms_sum_by_block=True, cudnn="9.10.2", evidence="run, 2.8.0+cu128; engines: taken to be those of 2.11"
)
RELEASES[2, 9] = RELEASES[2, 8]._replace(
    keeps_lt_workspaces=True, evidence="run, 2.9.1+cu128; engines: taken to be those of 2.11"
)
RELEASES[2, 10] = RELEASES[2, 9]._replace(evidence="run, 2.10.0+cu128; engines: taken to be those of 2.11")
RELEASES[2, 11] = RELEASES[2, 10]._replace(
    cudnn="9.19.0",
    evidence=f"run, 2.11.0+cu130; `parseChosenWorkspaceSize`, `getCUDABlasLtWorkspace` ({_SOURCE}); {_ERRATA}",
)
RELEASES[2, 12] = RELEASES[2, 11]._replace(
    large_workspaces=frozenset({9, 10, 12}),
    shares_with_lt=True,
    integers_use_cublas=False,
    cudnn="9.20.0",
    evidence=f"run, 2.12.1+cu130; pytorch/pytorch#175344, #173002 and #175879 ({_SOURCE}); {_ERRATA}",
    note=(
        "the allocator of torch 2.12 answered 2 of 10 recorded traces with other peaks than the releases before it "
        "and after; why is not known, and it is predicted as they are"
    ),
)
RELEASES[2, 13] = RELEASES[2, 12]._replace(evidence=f"run, 2.13.0+cu130 ({_SOURCE}); {_ERRATA}", note="")
RELEASES[2, 14] = RELEASES[2, 13]._replace(
    large_workspaces=frozenset({9, 10, 11, 12}),
    cudnn="9.24.0",
    blocked_engines=_BLOCKED_SINCE_14,
    evidence=f"run, 2.14.1+cu130 ({_SOURCE}); {_ERRATA}, pytorch/pytorch#189207 and #191701",
)
RELEASES[2, 15] = RELEASES[2, 14]._replace(
    keeps_workspaces=False,
    cudnn="9.26.0",
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
    version = read_version(torch_version)
    found = max((release for release in RELEASES if release <= version), default=min(RELEASES))
    return RELEASES[found], ".".join(map(str, found))


def check_release(torch_version: str) -> str:
    """Return the version of a release that may be predicted for, as it was given.

    Raises:
        UsageError: it is no version, or older than every release of the table.
    """
    if read_version(torch_version) < min(RELEASES):
        oldest = ".".join(map(str, min(RELEASES)))
        raise UsageError(
            f"expected a release of torch from {oldest} on, got {torch_version!r}: older ones are not known"
        )
    return torch_version


def release_assumption(torch_version: str) -> str | None:
    """What a report has to say of the release: that the table does not know it, or what its row leaves open."""
    row, release = find_release(torch_version)
    if read_version(torch_version) in RELEASES:
        return row.note or None
    return f"torch {torch_version} is not among the releases that were checked; the rules are those of torch {release}"


def read_version(torch_version: str) -> Version:
    """Return the first two numbers of a version. Raises UsageError where it does not begin with two."""
    try:
        major, minor = (int(part) for part in torch_version.split(".")[:2])
    except ValueError:
        raise UsageError(f"expected a torch version such as 2.11.0, got {torch_version!r}") from None
    return major, minor
