"""What differs between releases of torch: the tables of `releases.toml`, each with how it was confirmed.

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

import tomllib
from pathlib import Path
from typing import Any, Literal

from fxmem.errors import UsageError
from fxmem.records.parts import Record

Version = tuple[int, int]


class BlockedEngine(Record):
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


class Release(Record):
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


def _read_releases() -> dict[Version, Release]:
    """The tables of `releases.toml`, each of which says what is not as in the one before."""
    tables = tomllib.loads(Path(__file__).with_name("releases.toml").read_text(encoding="utf-8"))
    releases: dict[Version, Release] = {}
    rules: dict[str, Any] = {}
    for name, changes in tables.items():
        rules |= changes
        releases[read_version(name)] = Release(**rules)
    return releases


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


RELEASES = _read_releases()
"""Each release that is known, the oldest first."""
