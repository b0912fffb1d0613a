"""Applies a plan to a model: its regions are recomputed in backward instead of kept.

Three ways (`plan_records.Application`). MODULES: the module that is a region, or the `nn.Sequential` whose children are
one, becomes an instance of a same-named subclass of its class whose `forward` runs the original one under
`torch.utils.checkpoint`. GRAPH: the same is done to the model itself, and its `forward` runs the program that
`torch.fx` traced, cut into one function per region. OPERATORS: the same is done to the model itself, and its own
`forward` runs under a tape of the operators it comes down to, from which single results are recomputed; nothing of the
program runs twice (`fxmem.checkpointing.tape`).

In any way the model stays the very object it was: its class, modules, parameters, `state_dict` keys and hooks are the
user's, and `uncheckpoint` gives the class back. Regions are recomputed only while the model trains with
gradients on; in `eval()` or under `no_grad` the user's own `forward` runs.

Outputs, gradients, buffers and random states are those of the unplanned step, bit for bit, on deterministic kernels.
Regions of the first two ways run a second time, and with them the hooks of modules inside them. What must not be run
twice is refused when a region is first run: see `audit`.
"""

from fxmem._torch.autograd import release_gradients
from fxmem.checkpointing.apply import apply, checkpoint, uncheckpoint
from fxmem.checkpointing.fx_trace import graph_names
from fxmem.checkpointing.recompute import keep
from fxmem.checkpointing.tape.recorder import record_survey

__all__ = ["apply", "checkpoint", "graph_names", "keep", "record_survey", "release_gradients", "uncheckpoint"]
