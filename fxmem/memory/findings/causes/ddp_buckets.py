"""DDP has its buckets beside the gradients, so that each is on the card twice; or has buckets for what gets none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxmem.memory.findings import Finding, is_cut_short
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Phase, Profile, Timeline

_BUCKETS = "gradient_buckets"


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where buckets are there throughout, and the gradients are no views of them; and one for each frozen
    model, to whose buckets no gradient comes."""
    storages = profile.storages
    idle = defaultdict[str, list[int]](list)
    buckets, parameters = [], [each for each in storages if each.kind is Kind.PARAMETER]
    for index, each in enumerate(storages):
        owner, of, _ = each.title.rpartition(f".{_BUCKETS}")
        if of and each.kind is Kind.COMMUNICATION:
            buckets.append(each)
        elif of and {one.is_frozen for one in parameters if one.name.startswith(f"{owner}.")} == {True}:
            idle[owner].append(index)
    twice = sum(storages[index].nbytes for index in timeline.alive if storages[index].kind is Kind.GRADIENT)
    nbytes = min(sum(each.nbytes for each in buckets), twice)
    if nbytes:
        yield Finding(
            cause="ddp-buckets",
            text=f"DDP keeps {len(buckets)} bucket{'s' * (len(buckets) != 1)} as large as the gradients, beside them",
            place=next((each.made_at for each in buckets if each.made_at), ""),
            nbytes=nbytes,
            # `zero_grad` of improved-diffusion detaches gradients in place, which torch refuses of views.
            change="DistributedDataParallel(..., gradient_as_bucket_view=True): one of both from the third step on, "
            "where nothing calls grad.detach_()",
        )
    if is_cut_short(profile, timeline) or all(op.phase is not Phase.BACKWARD for op in profile.ops):
        return
    for owner, indices in idle.items():
        yield Finding(
            cause="ddp-buckets",
            text=f"DDP keeps buckets for the gradients of {owner}, which is frozen",
            place=next((storages[index].made_at for index in indices if storages[index].made_at), ""),
            nbytes=sum(storages[index].nbytes for index in indices if index in timeline.alive),
            change=f"no DistributedDataParallel around {owner}, whose gradients alone it sends",
            saved_bytes=save_bytes(profile, dict.fromkeys(indices, 0)),
        )
