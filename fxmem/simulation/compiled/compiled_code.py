"""`CompiledCode`: what all code has that is compiled for a target, as a whole or part by part."""

from __future__ import annotations

from typing import Any

from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.records.parts import CompileRecord, CompileSettings
from fxmem.records.profile import Target
from fxmem.simulation.compiled.compiler import Compiler
from fxmem.simulation.recording import EagerCode


class CompiledCode(EagerCode):
    """What becomes of compiled code where it is compiled.

    Args:
        target: the machine to pretend.
        settings: of the compiler.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """

    compiles = True

    def __init__(self, target: Target, settings: CompileSettings) -> None:
        self._compiler = Compiler(target, settings)

    def describe(self) -> CompileRecord:
        """What came of it so far."""
        return self._compiler.describe()

    @property
    def _options(self) -> dict[str, Any]:
        """What inductor is given for all that it compiles."""
        settings = self._compiler.settings
        return {**torch_inductor.mode_options(settings.mode), **settings.options}
