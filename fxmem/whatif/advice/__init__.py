"""Changes to a step, each made on fakes and analysed."""

from fxmem.whatif.advice.ranking import advise

__all__ = ["advise"]
