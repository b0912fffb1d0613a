"""Functions of fxmem that dynamo traces into: they stand in modules of user code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def outside_compiler(ask: Callable[..., bool]) -> Callable[..., bool]:
    """`ask`; False where dynamo traces, as a real run's tensors are answered there.

    A function that dynamo skips would end its graph (`torch.compiler.is_dynamo_compiling`, since 2.1).
    """

    def answer(*args: Any) -> bool:
        return not torch.compiler.is_dynamo_compiling() and ask(*args)

    return answer
