"""Changes to a training step that save memory. Each turns one way of running the step into another.

A change works on a `Variant`, so that several can be made one after the other. Nothing of the user's is touched:
modules are changed on a copy of the tree, tensors on copies on meta.

`code` is what to write. It may use `model`, `x` (the input), `loss_fn` (from the output to the loss), `labels`,
`logits` and `batches`, by the names most programs have for them, and `torch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fxmem.simulation.analysis import Analysis
from fxmem.whatif.advice.activations import activation_changes
from fxmem.whatif.advice.already_done import made_changes
from fxmem.whatif.advice.dtypes import dtype_changes
from fxmem.whatif.advice.frozen_parts import frozen_changes
from fxmem.whatif.advice.inplace_calls import call_changes
from fxmem.whatif.advice.kernels import kernel_changes
from fxmem.whatif.advice.losses import loss_changes
from fxmem.whatif.advice.optimizer import optimizer_changes
from fxmem.whatif.advice.release import release_changes
from fxmem.whatif.advice.variant import Change

_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def find_changes(analysis: Analysis) -> Iterator[Change]:
    """Yield every change that can be tried on this step, worth it or not."""
    training = analysis.profile.step.mode == "train"
    yield from activation_changes(analysis)
    yield from call_changes(analysis)
    yield from dtype_changes(analysis)
    yield from kernel_changes(analysis)
    if training:
        yield from optimizer_changes(analysis)
        yield from frozen_changes(analysis)
        yield from loss_changes(analysis)
    yield from release_changes(analysis)
    yield from made_changes(analysis)
    if analysis.profile.target.device == "cuda":
        yield Change(
            "expandable-segments",
            "allocator that can extend its segments",
            "none",
            "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'",
            lambda variant, _: dataclasses.replace(variant, environ={**variant.environ, **_EXPANDABLE}),
            note="before anything is put on the card; frees what is reserved and not used; the allocated peak stays",
        )
