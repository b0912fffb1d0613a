"""Single results of operators, by minimum cuts of the graph of operators.

The cuts are those that torch.compile's partitioner finds, with prices that follow the peak, improved from what `flat`
finds. `fxmem.planning.operators` makes these plans: their unit is a result, not a region.
"""

from fxmem.planning.regions.strategies import register
from fxmem.records.units import Application

register("mincut", applications=(Application.OPERATORS,), has_curve=True)
