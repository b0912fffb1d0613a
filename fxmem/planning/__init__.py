"""Where to checkpoint: planners from a profile and a budget to a plan, with no model and no torch.

What a planner says of a plan's peak is an estimate; a promise needs the plan applied and analysed (`fxmem.promising`).
"""

from fxmem.planning.certifying import certify
from fxmem.planning.planner import STRATEGIES, Planner

__all__ = ["STRATEGIES", "Planner", "certify"]
