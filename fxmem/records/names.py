"""The names that users type and records carry. Standard library only: `fxmem --help` imports this."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

Mode = Literal["train", "infer"]
"""What a step is: a training step, or forward under no_grad."""
Precision = Literal["bf16", "fp16"]
"""What autocast computes in, or what the weights are cast to."""
Sdpa = Literal["auto", "cudnn", "flash", "efficient", "math"]
"""The attention backend that may run, or `auto`: the first that can."""
MeasuredDevice = Literal["cpu", "cuda"]
"""Where a step is run to be measured."""
Heat = Literal["saved", "output", "params", "flops", "live", "scratch"]
"""The quantity that colours the boxes of a drawing."""
Renderer = Literal["auto", "dot", "wasi", "pygraphviz", "plain"]
"""What lays out a drawing, or `auto`: the first that is installed."""

Strategy = Literal["auto", "mincut", "flat", "nested", "modules", "sqrt", "chen", "norms"]
"""How regions are chosen.

`auto`: the cheapest of the others that keeps the budget. `mincut`: single results of operators, by minimum cuts of the
graph of operators (as torch.compile's partitioner finds them) with prices that follow the peak, improved from what
`flat` finds. `flat`: optimal under one level of regions with any borders. `nested`: regions within regions; selective
are those that stand alone. `modules`: regions that are modules, or consecutive children of an `nn.Sequential`. `sqrt`:
about sqrt(N) regions of equal length, and `chen`: regions of about equal saved bytes, the best of a search (both Chen
et al. 2016, arXiv:1604.06174). `norms`: each batch, group or instance norm with what lies between it and the next
convolution, so that only the norm's input is kept, and no convolution runs twice (memory-efficient DenseNet, Pleiss et
al. 2017, arXiv:1707.06990; of in-place activated batch norm, Rota Bulo et al. 2018, arXiv:1712.02616, it is the form
that recomputes rather than inverts).
"""
ONE_PLAN: Final[tuple[Strategy, ...]] = ("sqrt", "chen", "norms")
"""Strategies with one plan, whatever the budget: they have no curve."""
EFFORT: Final = 4.0
"""Deterministic work of the search for a certificate, unless the user gives another."""


class Application(StrEnum):
    """How a plan is carried out on a model."""

    MODULES = "modules"
    """Chosen modules checkpoint their own forward; the model stays the user's."""
    GRAPH = "graph"
    """The model is rewritten from `torch.fx.symbolic_trace`'s graph; regions may begin and end anywhere."""
    OPERATORS = "operators"
    """The model runs as it is, once; results of single operators are freed, and recomputed when backward asks for
    them."""
