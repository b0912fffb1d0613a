"""Optimal under one level of regions with any borders."""

from fxmem.planning.regions.dynamic_programs import Tables
from fxmem.planning.regions.strategies import register

register("flat", Tables.flat, has_curve=True)
