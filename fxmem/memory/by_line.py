"""Memory by source line: what each line of a program allocates, leaves behind and keeps for backward.

A node belongs to one line: the innermost of the files shown among the line that made its call and the lines that called
the modules around it. So every byte that the forward allocates is in one row, and the rows sum to the profile's
figures. By default the files shown are the user's own; what a library does inside then counts for the user's line that
called it. Where no line is the user's (a model that lives wholly in a package), all files are shown, each node at the
innermost line.

A *run* of a line is a stretch of consecutive operators that belong to it. It lasts until the next run begins: what
Python frees after a line's last operator goes with that line. What is alive after each run, less what was alive
before it, is what the run kept less what it freed, so these too sum to what the forward leaves. A line that runs many
times has the sums over its runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fxmem.errors import UsageError
from fxmem.memory import liveness
from fxmem.memory.figures import HasProfile, read_profile
from fxmem.records.breakdown import LineReport, LineRow, OtherRow, TensorGroup
from fxmem.records.profile import Node, Phase, Profile, SourceLine, Storage
from fxmem.records.units import group

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]")


def by_line(step: Profile | HasProfile, *, files: Sequence[str] = (), installed: bool = False) -> LineReport:
    """A step's memory by source line.

    Args:
        step: an `Analysis`, a report, or a profile.
        files: show these alone; each is a path's end, as `model.py` or `timm/layers`, without a leading slash.
        installed: show installed packages' files too, each node at its innermost line. Without it they are shown only
            where no node belongs to a file of the user's own.

    Raises:
        UsageError: no node belongs to a file that `files` names.
    """
    profile = read_profile(step)
    chains = _chains(profile)
    places = [_find_innermost(chain, files, installed) for chain in chains]
    if not any(places):
        if files:
            known = sorted({source.file for chain in chains for source in chain})
            raise UsageError(
                f"expected files of the program, got {', '.join(files)}; its lines are in "
                f"{', '.join(known) or 'no file that is known'}"
            )
        places = [_find_innermost(chain, (), True) for chain in chains]
    sums: dict[tuple[str, int] | str, _Sum] = {}
    owners = [
        sums.setdefault(_key(node, place), _Sum(place)) for node, place in zip(profile.nodes, places, strict=True)
    ]
    for node, owner in zip(profile.nodes, owners, strict=True):
        owner.calls += 1
        owner.params_bytes += node.params_bytes
        owner.saved_bytes += node.saved_bytes
    live = liveness.live_bytes(profile)
    _add_forward(profile, owners, live)
    _add_backward(profile, owners, live)
    forward = [span for span in profile.phases if span.phase is Phase.FORWARD]
    resident = _resident(profile)
    lines = [_line(key, each) for key, each in sums.items() if isinstance(key, tuple)]
    shown = tuple(dict.fromkeys(line.file for line in lines))
    lines.sort(key=lambda line: (shown.index(line.file), line.line))
    # Nothing but empty rows: a placeholder whose line is unknown, an optimizer that a step at inference does not
    # have.
    rest = [OtherRow(what=key, **each.figures()) for key, each in sums.items() if isinstance(key, str) and each.counts]
    return LineReport(
        **profile.heading(),
        resident_bytes=sum(storage.nbytes for storage in resident),
        resident=_groups(resident),
        files=shown,
        lines=tuple(lines),
        rest=tuple(rest),
        forward_allocated_bytes=sum(
            s.nbytes for s in profile.storages if s.op is not None and profile.ops[s.op].phase is Phase.FORWARD
        ),
        forward_left_bytes=_count_live(profile, live, forward[-1].end if forward else 0),
        saved_bytes=profile.saved_bytes,
    )


def is_installed(file: str) -> bool:
    """Whether a path is that of an installed package, or of Python's own library."""
    return _INSTALLED.search(file) is not None


# --- whose line -------------------------------------------------------------------------------------------------------


def _chains(profile: Profile) -> list[tuple[SourceLine, ...]]:
    """For each node the lines that led to it, innermost first."""
    around: list[tuple[SourceLine, ...]] = [()] * len(profile.nodes)
    for call in profile.calls:  # in the order they began: an inner one comes after the one around it
        if call.source is not None:
            for index in range(call.first_node, call.last_node):
                around[index] = (call.source, *around[index])
    own = ([each for each in (node.source, node.called_from) if each is not None] for node in profile.nodes)
    return [(*lines, *outer) for lines, outer in zip(own, around, strict=True)]


def _find_innermost(chain: tuple[SourceLine, ...], files: Sequence[str], installed: bool) -> SourceLine | None:
    if files:
        return next((source for source in chain if any(_is_named(source.file, name) for name in files)), None)
    return next((source for source in chain if installed or not is_installed(source.file)), None)


def _is_named(file: str, name: str) -> bool:
    """Whether a path is named: its last parts, or with a folder's name, parts within it."""
    parts, wanted = re.split(r"[/\\]", file), [part for part in re.split(r"[/\\]", name) if part not in ("", ".")]
    starts = range(len(parts) - len(wanted) + 1)
    return bool(wanted) and any(parts[start : start + len(wanted)] == wanted for start in starts)


def _key(node: Node, place: SourceLine | None) -> tuple[str, int] | str:
    if place is not None:
        return place.file, place.line
    return node.op if node.op in ("loss", "optimizer") else "other code"


# --- sums -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Sum:
    """A row while it is being added up, its fields named as those of `LineFigures`."""

    source: SourceLine | None
    calls: int = 0
    params_bytes: int = 0
    saved_bytes: int = 0
    allocated_bytes: int = 0
    before_bytes: int | None = None
    after_bytes: int | None = None
    peak_bytes: int | None = None
    backward_allocated_bytes: int | None = None
    backward_peak_bytes: int | None = None
    came: list[Storage] = field(default_factory=list)
    went: list[Storage] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Whether there is anything in it to show."""
        brings = self.params_bytes, self.saved_bytes, self.allocated_bytes, self.backward_allocated_bytes
        return any(brings) or bool(self.went) or self.before_bytes is not None

    def figures(self) -> dict[str, Any]:
        """As fields of `LineFigures`."""
        moved = {
            "kept_bytes": sum(storage.nbytes for storage in self.came),
            "freed_bytes": sum(storage.nbytes for storage in self.went),
            "came": _groups(self.came),
            "went": _groups(self.went),
        }
        return {**{name: value for name, value in vars(self).items() if name != "source"}, **moved}


def _line(key: tuple[str, int], each: _Sum) -> LineRow:
    assert each.source is not None
    return LineRow(file=key[0], line=key[1], function=each.source.function, code=each.source.code, **each.figures())


def _groups(storages: Iterable[Storage]) -> tuple[TensorGroup, ...]:
    alike = group(((each.shape, each.dtype, each.kind), each.nbytes) for each in storages)
    groups = [
        TensorGroup(count=len(sizes), shape=shape, dtype=dtype, kind=kind, nbytes=sum(sizes))
        for (shape, dtype, kind), sizes in alike.items()
    ]
    return tuple(sorted(groups, key=lambda each: -each.nbytes))


@dataclass(frozen=True)
class _Run:
    """Consecutive operators of one row in one phase, with their ticks `[begin, end)`."""

    owner: _Sum
    begin: int
    end: int


def _runs(profile: Profile, owners: Sequence[_Sum]) -> Iterator[_Run]:
    """Runs that cover every tick of forward and of the optimizer's phase."""
    for span in profile.phases:
        ops = range(span.first_op, span.last_op) if span.phase in (Phase.FORWARD, Phase.OPTIMIZER) else range(0)
        of = [owners[profile.ops[i].node] for i in ops]
        starts = [i for i in range(len(of)) if i == 0 or of[i] is not of[i - 1]]
        begins = [profile.ops[ops[i]].begin if i else span.begin for i in starts]
        for i, (begin, end) in zip(starts, pairwise([*begins, span.end]), strict=True):
            yield _Run(of[i], begin, end)


def _add_forward(profile: Profile, owners: Sequence[_Sum], live: Sequence[int]) -> None:
    """What comes and goes in forward and, for the optimizer's own row, in its phase."""
    run_at: list[_Run | None] = [None] * (profile.ticks + 1)
    for run in _runs(profile, owners):
        run_at[run.begin : run.end] = [run] * (run.end - run.begin)
        owner, before = run.owner, _count_live(profile, live, run.begin)
        owner.before_bytes = before if owner.before_bytes is None else owner.before_bytes
        owner.after_bytes = _count_live(profile, live, run.end)
        owner.peak_bytes = max(owner.peak_bytes or 0, before, max(live[run.begin : run.end], default=0))
    for storage in profile.storages:
        born = run_at[storage.birth] if storage.op is not None else None
        died = run_at[storage.death]
        if born is not None:
            born.owner.allocated_bytes += storage.nbytes
            if died is not born:
                born.owner.came.append(storage)
        if died is not None and died is not born:
            died.owner.went.append(storage)


def _resident(profile: Profile) -> list[Storage]:
    return [storage for storage in profile.storages if storage.birth == 0 and storage.op is None]


def _count_live(profile: Profile, live: Sequence[int], tick: int) -> int:
    """What is alive when a tick comes."""
    return live[tick - 1] if tick else sum(storage.nbytes for storage in _resident(profile))


def _add_backward(profile: Profile, owners: Sequence[_Sum], live: Sequence[int]) -> None:
    for op in profile.ops:
        if op.phase is Phase.BACKWARD:
            owner, alive = owners[op.node], max(live[max(op.begin - 1, 0) : op.end], default=0)
            owner.backward_allocated_bytes = owner.backward_allocated_bytes or 0
            owner.backward_peak_bytes = max(owner.backward_peak_bytes or 0, alive)
    for storage in profile.storages:
        if storage.op is not None and profile.ops[storage.op].phase is Phase.BACKWARD:
            owner = owners[profile.ops[storage.op].node]
            owner.backward_allocated_bytes = (owner.backward_allocated_bytes or 0) + storage.nbytes
