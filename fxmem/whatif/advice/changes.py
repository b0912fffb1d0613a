"""Changes to a training step that save memory: each turns one way of running the step into another.

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
from fxmem.whatif.advice.already_done import changes_made_already
from fxmem.whatif.advice.dtypes import dtype_changes
from fxmem.whatif.advice.frozen_parts import freezing_changes
from fxmem.whatif.advice.inplace_calls import call_changes
from fxmem.whatif.advice.kernels import kernel_changes
from fxmem.whatif.advice.losses import cross_entropy_in_chunks, loss_changes
from fxmem.whatif.advice.optimizer import stepping_changes
from fxmem.whatif.advice.release import holding_changes
from fxmem.whatif.advice.variant import Change, NotToBeHadError, Outcome, Variant, outcome

__all__ = ["Change", "NotToBeHadError", "Outcome", "Variant", "changes_for", "cross_entropy_in_chunks", "outcome"]

_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def changes_for(analysis: Analysis) -> Iterator[Change]:
    """Everything that can be tried on this step, whether or not it will be worth it."""
    training = analysis.profile.step.mode == "train"
    yield from activation_changes(analysis)
    yield from call_changes(analysis)
    yield from dtype_changes(analysis)
    yield from kernel_changes(analysis)
    if training:
        yield from stepping_changes(analysis)
        yield from freezing_changes(analysis)
        yield from loss_changes(analysis)
    yield from holding_changes(analysis)
    yield from changes_made_already(analysis)
    if analysis.profile.target.device == "cuda":
        yield Change(
            "expandable-segments",
            "allocator that can extend its segments",
            "none",
            "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'",
            lambda variant, _: dataclasses.replace(variant, environ={**variant.environ, **_EXPANDABLE}),
            note="before anything is put on the card; frees what is reserved and not used; the allocated peak stays",
        )
