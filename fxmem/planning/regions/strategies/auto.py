"""The cheapest of the others that keeps the budget."""

from fxmem.planning.regions.strategies import register
from fxmem.records.names import Application

register(
    "auto",
    tries=("flat", "nested"),
    applications=(Application.OPERATORS, Application.MODULES, Application.GRAPH),
    has_curve=True,
)
