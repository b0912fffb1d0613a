"""Settings that every test shares, made before anything imports torch."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # several workers run side by side; one thread each leaves no core fought over
# Each process that compiles for the CPU would build programs to learn whether vectors work that the CPU says it has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on the network
os.environ["FXMEM_NO_CACHE"] = "1"  # nor on a result that an earlier one has kept

# The same examples on every run, and none judged by the clock.
settings.register_profile("fxmem", derandomize=True, deadline=None, database=None)
settings.load_profile("fxmem")
