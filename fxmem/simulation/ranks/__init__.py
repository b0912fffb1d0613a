"""One rank of a step on many cards: a world that is not there, and what the rank sends into it."""

from fxmem.simulation.ranks.mesh import Mesh, Offload, check_offload, read_mesh
from fxmem.simulation.ranks.mesh_plan import MeshPlan, find_blocks, make_plan

__all__ = ["Mesh", "MeshPlan", "Offload", "check_offload", "find_blocks", "make_plan", "read_mesh"]
