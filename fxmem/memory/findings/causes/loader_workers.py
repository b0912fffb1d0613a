"""The host is full because of the loader: its workers, and the batches that they load ahead."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding
from fxmem.records.profile import Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where a program does not fit its host, and would without workers, or without pinned memory."""
    host = None if profile.step.program is None else profile.step.program.host
    if host is None or host.fits is not False or host.peak_bytes is None or host.limit_bytes is None:
        return
    over, loads = host.peak_bytes - host.limit_bytes, host.workers_bytes + host.batches_bytes
    if over <= loads:
        one = host.worker_adds_bytes
        fewer = f"num_workers={max(host.workers - -(-over // one), 0)}, or a" if one and host.workers else "a"
        yield Finding(
            cause="loader-workers",
            text=f"{host.workers} workers of loaders and the batches that they load ahead are more than the host has",
            place=host.place,
            nbytes=loads,
            of="host",
            change=f"{fewer} smaller prefetch_factor, or a dataset in arrays: a list is copied to each worker",
        )
    elif over <= host.pinned_bytes:
        yield Finding(
            cause="loader-workers",
            text="pinned memory, in powers of two, is more than the host has",
            place=host.place,
            nbytes=host.pinned_bytes,
            of="host",
            change="pin_memory=False, or batches of a size just below a power of two",
        )
