"""Which attention kernel a card runs for a `scaled_dot_product_attention`, and its tensors.

`attention_backend` is the decision, a pure function of a call and the settings it meets (`calls`, `rules`); `attend`
the call itself, with the kernel so chosen (`kernels`).
"""

from __future__ import annotations

from fxmem.simulation.kernels.attention.backend_rules import attention_backend
from fxmem.simulation.kernels.attention.backends import attend
from fxmem.simulation.kernels.attention.call import (
    DEFAULT_ORDER,
    AttentionCall,
    AttentionSettings,
    BackendChoice,
    Operand,
    order_of_this_process,
    preferred_order,
    read_settings,
)

__all__ = [
    "DEFAULT_ORDER",
    "AttentionCall",
    "AttentionSettings",
    "BackendChoice",
    "Operand",
    "attend",
    "attention_backend",
    "order_of_this_process",
    "preferred_order",
    "read_settings",
]
