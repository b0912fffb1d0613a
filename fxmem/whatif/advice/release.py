"""Results that the program keeps after their last use, or after every step."""

from __future__ import annotations

import ast
import dataclasses
import linecache
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from fxmem.memory.liveness import find_idle
from fxmem.memory.user_code import find_line
from fxmem.records.parts import Growth
from fxmem.records.profile import Node, Profile, SourceLine
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.whatif.advice.source_edits import let_go
from fxmem.whatif.advice.variant import AnyChange, NotApplicableError
from fxmem.whatif.program_step import ProgramCommand, ProgramStep

_MOST_GROWING: Final = 3
"""Owners that grow whose lines are rewritten."""


def release_changes(analysis: ProfiledStep) -> Iterator[AnyChange[Any, Any]]:
    """Yield a change for each line whose results are alive at the peak without need. Nothing saves them for backward,
    and nothing reads them any more."""
    profile, peak = analysis.profile, analysis.peak
    made_by = (profile.storages[index].node for index in find_idle(profile, peak.tick))
    lines: dict[tuple[str, int] | None, list[Node]] = {}
    sources: dict[tuple[str, int] | None, SourceLine | None] = {}
    for index in dict.fromkeys(each for each in made_by if each is not None):
        source = find_line(profile, index)
        key = None if source is None else (source.file, source.line)
        lines.setdefault(key, []).append(profile.nodes[index])
        sources[key] = source
    for key, nodes in lines.items():
        source = sources[key]
        where, code = ("the function that runs the step", "") if source is None else (source.place, source.code)
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


def growth_changes(step: ProgramStep) -> Iterator[AnyChange[Any, Any]]:
    """Yield a change for each line by which a program keeps more after each step, the most first, and one for all of
    them: two may keep the same."""
    grown = () if step.profile.step.program is None else step.profile.step.program.grown
    lines = [_KeepingLine.find(each) for each in grown if each.kept_at][:_MOST_GROWING]
    for each in [*([lines] if len(lines) > 1 else []), *([line] for line in lines)]:
        owners = " and ".join(line.owner for line in each)
        code = "\n".join(textwrap.dedent(line.text).strip() for line in each)
        note = "at " + " and ".join(line.place for line in each)
        title = f"keep nothing of the card in {owners}"
        yield AnyChange(f"let-go:{owners.replace(' and ', ',')}", title, "none", code, _rewrite(each), note)


class _KeepingLine(NamedTuple):
    """A line by which an owner keeps more."""

    owner: str
    place: str
    text: str
    """As it is to be written; empty where no way is known."""

    @classmethod
    def find(cls, grown: Growth) -> _KeepingLine:
        owner = grown.holder.rpartition(" ")[2].rpartition(".")[2]
        file, _, line = grown.kept_at.rpartition(":")
        return cls(owner, grown.kept_at, let_go(file, int(line), owner))


def _rewrite(lines: Sequence[_KeepingLine]) -> Callable[[Any, Any], Any]:
    def make(way: Any, step: ProgramStep) -> Any:
        if not all(each.text for each in lines):
            raise NotApplicableError("no simple way of writing its line is known: keep numbers, or .detach().cpu()")
        if not isinstance(step.program, ProgramCommand):
            raise NotApplicableError("a function's source stays as it is: try it on a script (fxmem advise --run)")
        sources = dict(way.edits.sources)
        for _, place, text in lines:
            file, _, line = place.rpartition(":")
            path, first = os.path.realpath(file), int(line) - 1
            old = sources.get(path, "".join(linecache.getlines(file))).splitlines(keepends=True)
            old[first : first + text.count("\n")] = text.splitlines(keepends=True)
            sources[path] = "".join(old)
        return way.edit(sources=(*sources.items(),))

    return make


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
