"""Gradients of parameters that the optimizer does not have: only a part of the model was given to it."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, register
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the one optimizer has state of some parameters, and none of others that have a gradient.

    Optimizers without state say nothing of what they step.
    """
    program = profile.step.program
    if program is None or profile.step.ranks is not None or len(program.optimizers) != 1:
        return
    parameters = {each.name for each in profile.storages if each.kind is Kind.PARAMETER and each.name}
    states = {each.name.rpartition(".")[0] for each in profile.storages if each.kind is Kind.OPTIMIZER_STATE}
    if not states or not states <= parameters:
        return  # what it steps may be copies of the model's parameters, and have copies of their gradients
    alive = set(timeline.alive)
    unstepped = [
        index
        for index, each in enumerate(profile.storages)
        if each.kind is Kind.GRADIENT
        and each.name.removesuffix(".grad") in parameters - states
        and each.death >= profile.ticks
    ]
    if unstepped:
        first = profile.storages[unstepped[0]].name.removesuffix(".grad")
        yield Finding(
            cause="unstepped-gradients",
            text=f"{len(unstepped)} parameters get gradients and the optimizer does not have them, {first} among them",
            nbytes=sum(profile.storages[index].nbytes for index in unstepped if index in alive),
            change="requires_grad_(False) of what does not train, before its first forward",
            saved_bytes=save_bytes(profile, dict.fromkeys(unstepped, 0)),
        )


register("unstepped-gradients", find)
