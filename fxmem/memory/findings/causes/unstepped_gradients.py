"""Gradients that nothing reads: only a part of what the step differentiates was given to the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, register
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where gradients of the step are read, and those of other parameters that it uses are not: by no
    optimizer, no copy, no norm over all."""
    program = profile.step.program
    if program is None or profile.step.ranks is not None or len(program.optimizers) != 1:
        return
    gradients = {index: each for index, each in enumerate(profile.storages) if each.kind is Kind.GRADIENT}
    read = {each.name for each in gradients.values() if each.is_read}
    used = {f"{each.name}.grad" for each in profile.storages if each.kind is Kind.PARAMETER and each.node is not None}
    unread = [index for index, each in gradients.items() if each.name in used - read]
    if unread and read:
        alive = set(timeline.alive)
        yield Finding(
            cause="unstepped-gradients",
            text=f"{len(unread)} parameters get gradients that nothing reads, no optimizer either, "
            f"{gradients[unread[0]].name.removesuffix('.grad')} among them",
            nbytes=sum(gradients[index].nbytes for index in unread if index in alive),
            change="requires_grad_(False) of what does not train, before its first forward",
            saved_bytes=save_bytes(profile, dict.fromkeys(unread, 0)),
        )


register("unstepped-gradients", find)
