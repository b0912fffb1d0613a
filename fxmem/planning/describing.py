"""From stretches of units to the regions of a plan: names, lines, bytes, FLOPs, and the edit that makes the user's code do it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable

from fxmem.plan_records import Edit, Region
from fxmem.planning.geometry import Geometry
from fxmem.planning.searching import Stretch
from fxmem.planning.spans import Span
from fxmem.records import SourceLine

__all__ = ["described", "edit_of"]


def described(geometry: Geometry, stretches: Iterable[Stretch], spans: dict[tuple[int, int], Span]) -> tuple[Region, ...]:
    """The regions of a plan; one that frees nothing is none."""
    regions = (_region(geometry, stretch, spans) for stretch in stretches)
    return tuple(region for region in regions if region.freed_bytes)


def _region(geometry: Geometry, stretch: Stretch, spans: dict[tuple[int, int], Span]) -> Region:
    first, last = geometry.cuts[stretch.first], geometry.cuts[stretch.last]
    profile, span = geometry.profile, spans.get((first, last))
    saved = {storage for node in profile.nodes[first:last] for storage in node.saved}
    own = {index for node in range(first, last) for index in geometry.made_by.get(node, ())}
    stays = {index for index in own if geometry.last_reader.get(index, -1) >= stretch.last}
    freed = sum(profile.storages[index].nbytes for index in (saved & own) - stays)
    source = span.source if span is not None and span.source is not None else profile.nodes[first].source
    return Region(
        first_node=first,
        last_node=last,
        nodes=tuple(node.name for node in profile.nodes[first:last]),
        modules=() if span is None else span.modules,
        source=source,
        freed_bytes=freed,
        extra_flops=geometry.flops(first, last),
        random=geometry.draws(first, last),
        edit=None if span is None or span.source is None or len(span.modules) != 1 else edit_of(span.source, span.modules[0]),
        regions=described(geometry, stretch.inner, spans),
    )


def edit_of(source: SourceLine, module: str) -> Edit | None:
    """The line with the module's call checkpointed; None where it makes no call by the module's own name (a loop over modules, say)."""
    try:
        tree = ast.parse(textwrap.dedent(source.code))
    except SyntaxError:  # the first line of a statement that goes on
        return None
    name = module.rpartition(".")[2]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name]
    if len(found) != 1:
        return None
    call = found[0]
    call.args.insert(0, call.func)
    call.func = ast.Name("checkpoint", ast.Load())
    call.keywords.append(ast.keyword("use_reentrant", ast.Constant(False)))
    return Edit(source=source, after=ast.unparse(tree))
