"""Results that the program keeps after their last use."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fxmem.records.profile import Node, Profile
from fxmem.simulation.profiled_step import ProfiledStep
from fxmem.whatif.advice.uses import find_idle
from fxmem.whatif.advice.variant import AnyChange


def release_changes(analysis: ProfiledStep) -> Iterator[AnyChange[Any, Any]]:
    """Yield a change for each line whose results are alive at the peak without need. Nothing saves them for backward,
    and nothing reads them any more."""
    profile, peak = analysis.profile, analysis.peak
    idle = find_idle(profile, peak.tick)
    lines: dict[tuple[str, int] | None, list[Node]] = {}
    for index in idle:
        node = profile.nodes[index]
        lines.setdefault((node.source.file, node.source.line) if node.source else None, []).append(node)
    for nodes in lines.values():
        where = nodes[0].source.place if nodes[0].source else "the function that runs the step"
        code = nodes[0].source.code if nodes[0].source else ""
        names = frozenset(node.name for node in nodes)
        holder = _find_holder(profile, nodes)
        yield AnyChange(
            f"release:{nodes[0].name}",
            f"free what {where} made after its last use",
            "none",
            _write_del(holder) if holder else write_release(code),
            _release(names),
            note=f"held by {holder or 'a local name or by the output'} until the {profile.phases[-1].phase.value} ends",
        )


def _find_holder(profile: Profile, nodes: Iterable[Node]) -> str:
    """What a program calls the results of these nodes, where it keeps them to the end of the step; empty for none."""
    made = (output.storage for node in nodes for output in node.outputs)
    return next((held for each in made if each is not None and (held := profile.storages[each].holder)), "")


def _write_del(holder: str) -> str:
    """The code that frees what a program calls so: the whole of a result, an attribute of a longer-lived object."""
    return f"del {holder.partition('[')[0]}  # after its last use"


def write_release(code: str) -> str:
    """Return the code that frees the result of that line of code."""
    try:
        statement = ast.parse(code).body[0] if code else None
    except SyntaxError:  # a line of several
        statement = None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if isinstance(target, ast.Name):
        return f"del {target.id}  # after its last use"
    return "# keep no name for it, and return without it"


def _release(names: frozenset[str]) -> Callable[[Any, Any], Any]:
    return lambda variant, _: dataclasses.replace(variant, released=variant.released | names)
