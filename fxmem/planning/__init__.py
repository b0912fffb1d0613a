"""Where to checkpoint: planners from a profile and a budget to a plan, with no model and no torch.

What a planner says of a plan's peak is an estimate; a promise needs the plan applied and analysed
(`fxmem.whatif.verified_plan`).
"""

from fxmem.planning.certificate import certify
from fxmem.planning.operators.planner import OperatorPlanner
from fxmem.planning.regions.planner import STRATEGIES, Planner, ways_of

__all__ = ["STRATEGIES", "OperatorPlanner", "Planner", "certify", "ways_of"]
