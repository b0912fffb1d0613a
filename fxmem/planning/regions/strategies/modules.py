"""Regions that are modules, or consecutive children of an `nn.Sequential`."""

from fxmem.planning.regions.dynamic_programs import Tables
from fxmem.planning.regions.strategies import register
from fxmem.records.units import Application

register("modules", Tables.flat, tries=("modules", "nested"), applications=(Application.MODULES,), has_curve=True)
