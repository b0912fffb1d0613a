"""Regions within regions; selective are those that stand alone."""

from fxmem.planning.regions.dynamic_programs import Tables
from fxmem.planning.regions.strategies import register

register("nested", Tables.nested, has_curve=True, nests=True)
