"""Changes to a step, each made on fakes and analysed."""

from fxmem.whatif.advice.suggestions import advise, make_bench, try_changes

__all__ = ["advise", "make_bench", "try_changes"]
