"""Changes to a step, each made on fakes and analysed."""

from fxmem.whatif.advice.changes import GenerationBench, ModelBench
from fxmem.whatif.advice.programs import ProgramBench
from fxmem.whatif.advice.suggestions import advise, try_changes

__all__ = ["GenerationBench", "ModelBench", "ProgramBench", "advise", "try_changes"]
