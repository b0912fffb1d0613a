"""One rank of a step on many cards: a world that is not there, and what the rank sends into it."""

from fxmem.simulation.ranks.mesh_plan import Mesh, MeshPlan, Offload, check_offload, find_blocks, make_plan, read_mesh

__all__ = ["Mesh", "MeshPlan", "Offload", "check_offload", "find_blocks", "make_plan", "read_mesh"]
