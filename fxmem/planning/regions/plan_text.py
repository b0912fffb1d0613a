"""The regions of a plan described for the user: names, lines, bytes, FLOPs and source edits."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable

from fxmem.planning.regions.candidates import Span
from fxmem.planning.regions.dynamic_programs import Stretch
from fxmem.planning.regions.kept_products import Selection
from fxmem.records.plan import Edit, Region
from fxmem.records.profile import SourceLine


def describe_regions(
    selection: Selection, stretches: Iterable[Stretch], spans: dict[tuple[int, int], Span]
) -> tuple[Region, ...]:
    """Describe the regions of a plan. One that frees nothing, or keeps more bytes than it frees, is left out."""
    regions = (_region(selection, stretch, spans) for stretch in stretches)
    return tuple(region for region in regions if region.freed_bytes)


def _region(selection: Selection, stretch: Stretch, spans: dict[tuple[int, int], Span]) -> Region:
    units = selection.units
    first, last = units.cuts[stretch.first], units.cuts[stretch.last]
    profile, span = units.profile, spans.get((first, last))
    saved = {storage for node in profile.nodes[first:last] for storage in node.saved}
    own = {index for node in range(first, last) for index in units.storages_by_node.get(node, ())}
    stays = {index for index in own if units.last_reader.get(index, -1) >= stretch.last}
    kept = selection.find_kept(first, last, stretch.level)
    keeps = tuple(number for number, _ in kept)
    held = {index for _, product in kept for index in product.storages}
    freed = sum(profile.storages[index].nbytes for index in (saved & own) - stays) - sum(
        profile.storages[index].nbytes for index in held - stays
    )
    whole = units.ops.flops(first, last)
    source = span.source if span is not None and span.source is not None else profile.nodes[first].source
    return Region(
        first_node=first,
        last_node=last,
        nodes=tuple(node.name for node in profile.nodes[first:last]),
        modules=() if span is None else span.modules,
        source=source,
        freed_bytes=max(freed, 0),
        extra_flops=None if whole is None else whole - sum(product.flops for _, product in kept),
        keeps=keeps,
        random=units.draws(first, last),
        edit=None
        if span is None or span.source is None or len(span.modules) != 1
        else write_edit(span.source, span.modules[0], keeps),
        regions=describe_regions(selection, stretch.inner, spans),
    )


def write_edit(source: SourceLine, module: str, keeps: tuple[int, ...] = ()) -> Edit | None:
    """Return the source line with the module's call checkpointed, keeping the results of these products. None where the
    line makes no call by the module's own name (in a loop)."""
    try:
        tree = ast.parse(textwrap.dedent(source.code))
    except SyntaxError:  # the first line of a statement that goes on
        return None
    name = module.rpartition(".")[2]
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]
    if len(found) != 1:
        return None
    call = found[0]
    call.args.insert(0, call.func)
    call.func = ast.Name("checkpoint", ast.Load())
    call.keywords.append(ast.keyword("use_reentrant", ast.Constant(False)))
    if keeps:
        call.keywords.append(
            ast.keyword(
                "context_fn",
                ast.Call(
                    ast.Attribute(ast.Name("fxmem", ast.Load()), "keep", ast.Load()),
                    [ast.Constant(number) for number in keeps],
                    [],
                ),
            )
        )
    return Edit(source=source, after=ast.unparse(tree))
