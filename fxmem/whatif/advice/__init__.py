"""Changes to a step, each made on fakes and analysed."""

from fxmem.whatif.advice.suggestions import advise

__all__ = ["advise"]
