"""What a forked worker copies of Python objects, by arithmetic: heads in blocks of 16 bytes."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fxmem.records.parts import HostUse
from fxmem.show.run_facts import compare_with_host, describe_host
from fxmem.simulation.card.host_ledger import HostLedger
from fxmem.simulation.card.python_objects import count_copied

MIB = 1 << 20
N = 40_000
LIST = 40 + 16
"""The head of a list: its items lie elsewhere, and are not written."""


class Rows(Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows


def words(count: int) -> list[str]:
    return [f"row {each} of the corpus" for each in range(100_000, 100_000 + count)]


VOCABULARY = words(2000)
_draw = random.Random(0)


@pytest.mark.parametrize(
    ("rows", "nbytes"),
    [
        (words(N), N * 80),  # 49 bytes and 24 letters
        ([[each] for each in words(N)], N * (LIST + 8 + 80)),
        ([[_draw.choice(VOCABULARY) for _ in range(5)] for _ in range(N)], N * (LIST + 8) + 2000 * 80),
        ([{"text": each, "length": 7} for each in words(N)], N * (dict.__basicsize__ + 16 + 80)),
        (np.array(words(N), dtype=object), N * 80),
        ({each: (each,) for each in words(N)}, N * (80 + 48)),
        (np.zeros(N), 0),
        (torch.zeros(N), 0),
        (["x" * 10_000] * 5, 4096),  # of what is longer than a page the page of its head
    ],
)
def test_strings_count_whole_and_collections_with_their_heads(rows: Any, nbytes: int) -> None:
    found = count_copied(Rows(rows))
    assert found is not None
    assert abs(found - nbytes) < 0.05 * nbytes + 1024
    assert found == count_copied(Rows(rows))


@pytest.mark.parametrize(("limit", "fits", "said"), [
    (90, False, "does NOT fit the host: 100.0 MiB of 90.0 MiB"),
    (200, None, "not known to fit the host: between 100.0 MiB and at most 1.00 GiB of 200.0 MiB, as workers copy"),
    (1025, True, "fits the host: 100.0 MiB"),
])  # fmt: skip
def test_what_workers_may_copy_bounds_the_host(limit: int, fits: bool | None, said: str) -> None:
    host = HostUse(
        peak_bytes=100 * MIB, process_bytes=20 * MIB, workers=4, workers_bytes=80 * MIB, copied_bytes=924 * MIB,
        limit_bytes=limit * MIB,
    )  # fmt: skip
    assert host.fits is fits
    assert compare_with_host(host).startswith(said)
    assert "4 workers: 80.0 MiB, 20.0 MiB each; up to 0.98 GiB when each has read" in describe_host(host)
    assert "up to" not in describe_host(host.model_copy(update={"copied_bytes": 1000}))
    assert "copy of their dataset as they read it is not known" in describe_host(
        host.model_copy(update={"copied_bytes": None})
    )


def test_forked_workers_count_and_others_bring_their_own() -> None:
    ledger, owner, other = HostLedger(), Rows(0), Rows(0)
    ledger.note_loader(other, DataLoader(Rows(words(N)), num_workers=1, multiprocessing_context="spawn"))
    ledger.note_loader(other, DataLoader(Rows(words(N))))
    assert ledger.copied_bytes == 0
    for _ in range(2):  # an epoch's workers end with its iterator
        ledger.note_loader(owner, DataLoader(Rows(words(N)), num_workers=1, multiprocessing_context="fork"))
        assert N * 80 <= (ledger.copied_bytes or 0) <= N * 80 + 1024
        owner = Rows(0)


def test_sizes_are_those_of_python() -> None:
    assert sys.getsizeof("row 100000 of the corpus") == 73
