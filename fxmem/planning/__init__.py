"""Planners of activation checkpoints: a profile and a budget in, a plan out, without torch.

`register` adds a strategy of your own: a function from the tables and a budget to the stretches to checkpoint.

What a planner says of a plan's peak is an estimate; a promise needs the plan applied and analysed
(`fxmem.whatif.verified_plan`).
"""

from fxmem.planning.operators.choices import OperatorCall, OperatorValue, StretchPath
from fxmem.planning.operators.offload_planner import OffloadPlanner
from fxmem.planning.operators.offloads import HostLink
from fxmem.planning.operators.planner import OperatorPlanner
from fxmem.planning.plan_finder import PlanFinder
from fxmem.planning.regions.cost_tables import CostTables
from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.planning.regions.planner import Planner
from fxmem.planning.regions.strategies import STRATEGIES, allowed_applications, register

__all__ = [
    "STRATEGIES",
    "CostTables",
    "HostLink",
    "OffloadPlanner",
    "OperatorCall",
    "OperatorPlanner",
    "OperatorValue",
    "PlanFinder",
    "Planner",
    "Stretch",
    "StretchPath",
    "Tables",
    "allowed_applications",
    "register",
]
