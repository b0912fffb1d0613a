"""Which nodes of a backward run first where backward runs in a thread of its own."""

from __future__ import annotations

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem.simulation.recording.observe.graph_task import NodeClock


def number(clock: NodeClock) -> int:
    """Of a node that is made now."""
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    return clock.read(node)


def test_each_thread_counts_its_own_nodes() -> None:
    clock = NodeClock()
    assert [number(clock) for _ in range(3)] == [0, 1, 2]
    begin = torch_autograd.next_sequence_number()
    made = [(torch.ones(1, requires_grad=True) * 2).grad_fn for _ in range(2)]
    clock.note_backward(begin, torch_autograd.next_sequence_number())
    assert [clock.read(node) for node in made] == [0, 1]
    assert number(clock) == 3
    begin = torch_autograd.next_sequence_number()
    later = (torch.ones(1, requires_grad=True) * 2).grad_fn
    clock.note_backward(begin, torch_autograd.next_sequence_number())
    assert clock.read(later) == 2
    assert number(clock) == 4


def test_leaves_come_before_all() -> None:
    leaf = torch.ones(1, requires_grad=True)
    node = (leaf * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert NodeClock().read(node) == torch_autograd.sequence_number(node) == 2**64 - 1
