"""Where a program's own code calls what is found: its models, and the lines that a node stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxmem.records.profile import ModuleCall, Node, Profile, SourceLine
from fxmem.records.units import package_path


def find_outermost(profile: Profile) -> Iterator[ModuleCall]:
    """Calls of modules within no other, those of a single layer among them."""
    leaves = (
        ModuleCall(
            module=node.target, first_node=index, last_node=index + 1, source=node.source,
            leads_to_gradients=node.leads_to_gradients, lacks_backward=node.lacks_backward,
        )
        for index, node in enumerate(profile.nodes)
        if node.op == "call_module"
    )  # fmt: skip
    end = 0
    for call in sorted((*profile.calls, *leaves), key=lambda each: (each.first_node, -each.last_node)):
        if call.first_node >= end:
            yield call
            end = call.last_node


def name_call(node: Node) -> str:
    """`matmul` of a call of `torch.matmul`, of a tensor's method, or of `@`; of a layer, what kind it is: `dropout`."""
    name = node.module_type.lower() if node.op == "call_module" else node.target.rpartition(".")[2]
    return name.strip("_")


def leads(profile: Profile, index: int) -> bool:
    """Whether a backward goes on through what a node returns: none does through a detached tensor. What a checkpoint is
    around may have run without gradients."""
    within = (each.first_node <= index < each.last_node for each in profile.recomputed)
    return profile.nodes[index].leads_to_gradients or any(within)


def find_place(profile: Profile, node: int | None) -> str:
    """`file:line` of the user's own code that a node runs for, as `find_line`. Empty where none is known."""
    line = None if node is None else find_line(profile, node)
    return "" if line is None else line.place


def find_line(profile: Profile, node: int) -> SourceLine | None:
    """The line of the user's own code that a node runs for: its own line, or that which leads to it where its own is an
    installed package's; that one where no line is the user's. None where none is known."""
    of = profile.nodes[node]
    return choose_line(node, (of.source, of.called_from), profile.calls)


def choose_line(node: int, own: Iterable[SourceLine | None], calls: Iterable[ModuleCall]) -> SourceLine | None:
    """`find_line` of a node with its own line and that which leads to it, among these calls."""
    around = [call for call in calls if call.first_node <= node < call.last_node]
    around.sort(key=lambda each: each.last_node - each.first_node)
    lines = [line for line in (*own, *(each.source for each in around)) if line is not None]
    return next((each for each in lines if _is_own(each)), lines[0] if lines else None)


def _is_own(line: SourceLine) -> bool:
    return package_path(line.file) == line.file
