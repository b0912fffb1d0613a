"""The cheapest of the others that keeps the budget."""

from fxmem.planning.regions.strategies import register
from fxmem.records.units import Application

register(
    "auto",
    tries=("flat", "nested"),
    # Of one level of regions it has the cheapest by the tables; once applied, another strategy's may cost less.
    weighs=("nested", "chen", "norms", "sqrt"),
    applications=(Application.OPERATORS, Application.MODULES, Application.GRAPH),
    has_curve=True,
)
