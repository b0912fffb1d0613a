"""DDP has its buckets beside the gradients: each gradient is on the card twice."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, register
from fxmem.records.profile import Kind, Profile, Timeline

_BUCKETS = "gradient_buckets"


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where buckets are there throughout, and the gradients are no views of them."""
    storages = profile.storages
    buckets = [each for each in storages if each.kind is Kind.COMMUNICATION and _BUCKETS in each.title]
    twice = sum(storages[index].nbytes for index in timeline.alive if storages[index].kind is Kind.GRADIENT)
    nbytes = min(sum(each.nbytes for each in buckets), twice)
    if nbytes:
        yield Finding(
            cause="ddp-buckets",
            text=f"DDP keeps {len(buckets)} buckets as large as the gradients, beside them",
            place=next((each.made_at for each in buckets if each.made_at), ""),
            nbytes=nbytes,
            change="DistributedDataParallel(..., gradient_as_bucket_view=True): one of both from the third step on",
        )


register("ddp-buckets", find)
