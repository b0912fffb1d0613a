"""Where to checkpoint: planners from a profile and a budget to a plan, with no model and no torch.

What a planner says of a plan's peak is an estimate; a promise needs the plan applied and analysed (`fxmem.promising`).
"""

from fxmem.planning.certifying import certify
from fxmem.planning.operating import OperatorPlanner
from fxmem.planning.planner import STRATEGIES, Planner, ways_of

__all__ = ["STRATEGIES", "OperatorPlanner", "Planner", "certify", "ways_of"]
