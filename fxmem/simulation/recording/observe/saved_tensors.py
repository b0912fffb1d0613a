"""The tensors that autograd's nodes save for backward, and when they are freed.

A node's saved tensors are packed under its number and freed when the node has run, unless the graph is retained
(torch/csrc/autograd/saved_variable.h, `SavedVariable::reset_data`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.recording.observe.observer import Observer


class SavedHandle:
    """One saved tensor in the autograd graph; empty once its node has run."""

    __slots__ = ("__weakref__", "hooks", "value")

    def __init__(self, value: Any, hooks: torch_autograd.Hooks) -> None:
        self.value: Any = value
        self.hooks: torch_autograd.Hooks | None = hooks

    def release(self) -> None:
        """Free the tensor, as C++ does when the node has run."""
        self.value = self.hooks = None


class SavedTensors:
    """The saved tensors of one thread's graph.

    Args:
        observer: told what is saved, and what the program's own unpack hooks return.
        program: around these hooks; knows the newest node when an op ran last.
    """

    def __init__(self, observer: Observer, program: Observer) -> None:
        self._observer, self._program = observer, program
        self._saved_by: dict[int, list[weakref.ref[SavedHandle]]] = {}
        self._unpacked: list[list[SavedHandle]] = []
        self._unpacking = 0

    def pack(self, hooks: torch_autograd.Hooks, tensor: torch.Tensor) -> SavedHandle:
        """The handle that autograd keeps for `tensor`, which the newest node saves."""
        # A node takes its number when it is made, just before it saves.
        number = torch_autograd.next_sequence_number() - 1
        if tensor.grad_fn is not None and self._is_output(tensor, number):
            number = torch_autograd.sequence_number(tensor.grad_fn)
            number = _saver_of_output(tensor.grad_fn) if torch_autograd.is_view(tensor) else number
            if hooks.change_nothing:
                # A node's own output: kept as it is, the node would keep itself alive. C++ keeps it without its
                # grad_fn; a hook of the program's gets it as it is (saved_variable.cpp), and may make such a cycle.
                tensor = torch_autograd.share_without_history(tensor)
        handle = SavedHandle(hooks.pack(tensor), hooks)
        reference = weakref.ref(handle)
        self._saved_by.setdefault(number, []).append(reference)
        self._observer.on_save(handle.value, reference)
        return handle

    def _is_output(self, tensor: torch.Tensor, newest: int) -> bool:
        """Whether what is packed is an output that its maker saves itself.

        The maker then is the newest node, or has made newer ones while it ran: those of the tangents in forward mode,
        those of an inner transform of torch.func. The newest has run then, while a node saves its inputs before it
        runs.
        """
        if torch_autograd.sequence_number(tensor.grad_fn) == newest:
            return True
        several = torch_autograd.is_forward_mode() or torch_wrappers.is_transformed(tensor)
        return several and self._program.newest_node_that_ran() == newest

    def unpack(self, handle: SavedHandle) -> Any:
        """The tensor, or what the program's own hook makes of what it saved.

        Raises:
            RuntimeError: as torch does, where the tensor has been freed.
        """
        # What an unpack hook itself unpacks (checkpoint's inputs) is another node's, and that one's to release.
        if self._unpacked and not self._unpacking:
            self._unpacked[-1].append(handle)
        if handle.hooks is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, after its saved tensors have been freed. "
                "Specify retain_graph=True."
            )
        self._unpacking += 1
        try:
            if handle.hooks.change_nothing:
                return handle.value
            with self._program.observe_unpack():
                found = handle.hooks.unpack(handle.value)
            self._observer.on_unpack(found)
            return found
        finally:
            self._unpacking -= 1

    def find_kept(self) -> Iterator[tuple[int, Any]]:
        """What is saved and not freed, with the number of its node; graphs that are no more are forgotten."""
        for number, references in list(self._saved_by.items()):
            handles = [handle for reference in references if (handle := reference()) is not None]
            if not handles:
                del self._saved_by[number]
            yield from ((number, handle.value) for handle in handles)

    def begin_node(self) -> None:
        """From here on, one node of the backward unpacks."""
        self._unpacked.append([])

    def end_node(self) -> list[SavedHandle]:
        """What the node that began last has unpacked."""
        return self._unpacked.pop()

    def release_unpacked(self) -> None:
        """Free what the node that began last has unpacked so far."""
        for handle in self._unpacked[-1] if self._unpacked else ():
            handle.release()

    def release(self, number: int, unpacked: list[SavedHandle]) -> None:
        """Free what the node with this number saved, and what it unpacked."""
        for handle in unpacked:
            handle.release()
        for reference in self._saved_by.pop(number, ()):
            kept = reference()
            if kept is not None:
                kept.release()


def _saver_of_output(maker: Any) -> int:
    """The number under which a node saves its own output, which `maker` made last.

    An in-place op on a view saves after autograd has rebuilt the view's `grad_fn` on top of the op's own node, a
    `CopySlices` (torch/csrc/autograd/variable.cpp, `grad_fn` and `rebase_history`).
    """
    last = number = torch_autograd.sequence_number(maker)
    while type(maker).__name__ != "CopySlices":
        maker, number = maker.next_functions[0][0] if maker.next_functions else None, number - 1
        if maker is None or torch_autograd.sequence_number(maker) != number:
            return last
    return number
