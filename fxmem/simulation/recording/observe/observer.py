"""`Observer`: what listens to a program that runs, event by event."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fxmem.records.profile import Phase


class PendingCall(NamedTuple):
    """A call of a module of the program, within no other, that is about to run."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[], Any]
    """Runs it."""
    as_node: Callable[[Callable[[], Any]], Any]
    """Runs what is given in its place, as one node of the graph."""


class Observer:
    """Listens to a program; each event does nothing unless it is overridden.

    Whatever runs a part of the program (the log, the recorder of operators, the tracer, the autograd engine) reports
    to one.
    """

    # --- storages and operators ---------------------------------------------------------------------------------------

    def on_storage(self, index: int, nbytes: int, stream: int) -> None:
        """A storage is about to be allocated under this number; an error that is raised here refuses it."""

    def on_free(self, index: int) -> None:
        """A storage was freed."""

    def on_growth(self, nbytes: int) -> None:
        """A storage has so many bytes more, as steps were left out that would have replaced it."""

    def on_hidden(self, op: int, hidden: Any, phase: Phase) -> None:
        """The kernel of an operator has memory for itself; `hidden` is what the inspection found."""

    def on_launch(self, kernel: str, arguments: tuple[Any, ...]) -> None:
        """The program launches a Triton kernel of its own."""

    # --- calls --------------------------------------------------------------------------------------------------------

    def on_call(self, node: int) -> None:
        """From here until the next `on_call`, everything happens for the node of this index."""

    def on_result(self, node: int, first_op: int, result: Any) -> None:
        """The node with this index returned `result`; it ran the ops from `first_op` on, whatever `on_call` had
        announced."""

    def op_count(self) -> int:
        """How many ops have run."""
        return 0

    def current_call(self) -> int:
        """The node announced last, or the number that stands for none."""
        return -1

    def resume_call(self, node: int) -> None:
        """Go on with what `current_call` returned before an interruption."""

    def observe_recomputation(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a checkpointed region runs again."""
        return contextlib.nullcontext()

    def find_replacement(self, function: Any) -> Callable[..., Any] | None:
        """What to run in the place of a torch function, always the same; None for every other."""
        return None

    def find_name(self, tensor: torch.Tensor) -> str:
        """What a tensor is called that was there before; empty for no name."""
        return ""

    def on_module_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module of the program is about to be called, within no other."""

    def run_module(self, call: PendingCall) -> Any:
        """The result of such a call."""
        return call.run()

    def on_torch_call(self) -> None:
        """The program is about to call a torch function or method."""

    def on_gradient(self) -> None:
        """A call outside every node returned a tensor that a gradient leads to."""

    def on_tensor_method(self, name: str, tensor: torch.Tensor) -> None:
        """The program called `Tensor.register_hook` or `Tensor.retain_grad`."""

    def on_compiled_call(self) -> None:
        """The program calls compiled code."""

    def on_kernel(self, kernel: str, count: int | None, values: Any) -> None:
        """A kernel that is no operator ran: its FLOPs if they are counted, its arguments and results."""

    def on_trace(self) -> None:
        """The program traces a function with make_fx."""

    # --- autograd -----------------------------------------------------------------------------------------------------

    def on_save(self, value: Any, handle: weakref.ref[Any]) -> None:
        """A node that is being made saves `value`: a tensor, or what the program's own pack hook made of it.

        It is freed when `handle` is dead or empty.
        """

    def on_unpack(self, tensor: torch.Tensor) -> None:
        """The program's own unpack hook returned this tensor to the node that runs."""

    def on_backward_node(self, sequence_number: int) -> None:
        """The node with this number is about to run; numbers are those of `_torch.autograd.next_sequence_number` when a
        node is made."""

    def takes_backward(self, roots: Sequence[Any]) -> bool:
        """Whether a backward from these roots is observed; else torch's own engine runs it."""
        return True

    def observe_backward(
        self, roots: Sequence[Any], *, accumulates: bool, is_inner: bool
    ) -> contextlib.AbstractContextManager[None]:
        """A backward runs inside; `accumulates` says whether into `.grad`, `is_inner` whether another one follows that
        differentiates its gradients."""
        return contextlib.nullcontext()

    def observe_backward_function(self) -> contextlib.AbstractContextManager[None]:
        """A function of the program that backward calls runs inside."""
        return contextlib.nullcontext()

    def observe_compiled_backward(self) -> contextlib.AbstractContextManager[None]:
        """The backward of a compiled graph, which calls nothing of the program, runs inside."""
        return contextlib.nullcontext()

    def observe_unpack(self) -> contextlib.AbstractContextManager[None]:
        """An unpack hook of the program runs inside."""
        return contextlib.nullcontext()

    def newest_node_that_ran(self) -> int:
        """The number of autograd's newest node when an operator ran last."""
        return -1
