"""Which parts a recording is made of: the table of subjects and of what they compile."""

from __future__ import annotations

from fxmem.records.parts import CompileSettings
from fxmem.records.profile import Target
from fxmem.simulation.ranks.mailbox import World
from fxmem.simulation.recording.recording import EagerCode, Recording, Subject


def make_recording(
    target: Target, subject: Subject, world: World | None = None, compile: CompileSettings | None = None
) -> Recording:
    """The recording of a subject.

    Args:
        target: the machine to pretend.
        subject: what is recorded.
        world: whose rank it is; None for one that is alone.
        compile: how what it compiles is compiled; None runs that as the eager code it was made from.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """
    if world is not None:
        target = target.among(world.size)
    return Recording(target, subject, world, _find_compilation(target, subject, compile))


def _find_compilation(target: Target, subject: Subject, settings: CompileSettings | None) -> EagerCode:
    """How a subject is compiled; torch's compiler is imported only where anything is.

    A step of a model on one card is one whole: it is compiled in a run of its own, before it is recorded. Programs and
    ranks compile part by part, where each is first called.
    """
    if settings is None:
        return EagerCode()
    if subject.compiles_whole:
        from fxmem.simulation.recording.compiled.compiled_code import CompiledModel

        return CompiledModel(target, settings)
    from fxmem.simulation.recording.compiled.compiled_parts import CompiledParts

    return CompiledParts(target, settings)
