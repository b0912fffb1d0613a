"""What people give, read as they mean it: batches, optimizers, losses, and code that moves itself to a card."""

from fxmem.simulation.step.given.adapters import add_lora, quantize_weights
from fxmem.simulation.step.given.batches import Batch, is_loader, read_batch
from fxmem.simulation.step.given.packed_weights import PackedWeights, pack_stage, pack_weights
from fxmem.simulation.step.given.prepared_step import ignore_moves, read_loss, understand, view_source

__all__ = [
    "Batch",
    "PackedWeights",
    "add_lora",
    "ignore_moves",
    "is_loader",
    "pack_stage",
    "pack_weights",
    "quantize_weights",
    "read_batch",
    "read_loss",
    "understand",
    "view_source",
]
