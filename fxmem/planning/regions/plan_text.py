"""The regions of a plan described for the user: names, lines, bytes, FLOPs and source edits."""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Iterable, Iterator

from fxmem.planning import tuning
from fxmem.planning.regions.candidates import Span
from fxmem.planning.regions.dynamic_programs import Stretch
from fxmem.planning.regions.kept_products import Selection
from fxmem.records.plan import Edit, Region
from fxmem.records.profile import ModuleCall, SourceLine


def describe_regions(
    selection: Selection, stretches: Iterable[Stretch], spans: dict[tuple[int, int], Span]
) -> tuple[Region, ...]:
    """Describe the regions of a plan. One that frees nothing, or keeps more bytes than it frees, is left out."""
    regions = (_region(selection, stretch, spans) for stretch in stretches)
    return tuple(region for region in regions if region.freed_bytes)


def write_loop_edits(regions: tuple[Region, ...], calls: Iterable[ModuleCall]) -> tuple[Region, ...]:
    """Give regions that a loop over a list calls the edit of its one call.

    `for block in self.blocks: x = block(x)` is one line for all blocks; its edit says which of them are checkpointed.
    A line that also calls the items of another list has none.

    Args:
        regions: of one plan.
        calls: of the profile, by which the lists that a line calls the items of are known.
    """
    lists: dict[SourceLine, set[str]] = {}
    for call in calls:
        if call.source is not None:
            lists.setdefault(call.source, set()).add(call.module.rpartition(".")[0])
    groups: dict[tuple[SourceLine, str], list[tuple[int, Region]]] = {}
    for region in regions:
        path, _, item = region.modules[0].rpartition(".") if len(region.modules) == 1 else ("", "", "")
        if region.edit is None and region.source is not None and path and item.isdecimal():
            groups.setdefault((region.source, path), []).append((int(item), region))
    edits: dict[Region, Edit | None] = {}
    for (source, path), group in groups.items():
        keeps = {region.keeps for _, region in group}
        if lists.get(source) == {path} and len(keeps) == 1:
            items = sorted(item for item, _ in group)
            edits |= dict.fromkeys(
                (region for _, region in group), _write_loop_edit(source, path.rpartition(".")[2], items, keeps.pop())
            )
    return tuple(region.model_copy(update={"edit": edits.get(region, region.edit)}) for region in regions)


def _write_loop_edit(source: SourceLine, name: str, items: list[int], keeps: tuple[int, ...]) -> Edit | None:
    """Return the statement with its call of a list's item checkpointed.

    Which items they are is decided where it runs. None where the statement calls other variables, or what no name
    stands for, and where it binds the variable itself.
    """
    statement = _read_statement(source)
    if statement is None:
        return None
    code, tree = statement
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names = [each for each in called if isinstance(each, ast.Name)]
    others = [each for each in called if not isinstance(each, (ast.Name, ast.Attribute))]
    if others or len(names) != 1 or names[0].id in bound:
        return None
    item = names[0]
    options = ", ".join(ast.unparse(keyword) for keyword in _checkpoint_options(keeps))
    which = f"range({len(items)})" if items == list(range(len(items))) else f"({', '.join(map(str, items))})"
    several = f"any({item.id} is self.{name}[i] for i in {which})"
    condition = several if len(items) > 1 else f"{item.id} is self.{name}[{items[0]}]"
    lines = code.splitlines()
    line = lines[item.lineno - 1].encode()
    lines[item.lineno - 1] = (line[: item.col_offset] + b"run_" + line[item.col_offset :]).decode()
    call = f"functools.partial(checkpoint, {item.id}, {options})"
    choice = [f"run_{item.id} = {item.id}", f"if {condition}:", f"    run_{item.id} = {call}"]
    return Edit(source=source.model_copy(update={"code": code}), after="\n".join([*choice, *lines]))


def _region(selection: Selection, stretch: Stretch, spans: dict[tuple[int, int], Span]) -> Region:
    key = stretch, bool(spans)  # which are all of the profile's, or none
    if key not in selection.described:
        selection.described[key] = _describe_region(selection, stretch, spans)
    return selection.described[key]


def _describe_region(selection: Selection, stretch: Stretch, spans: dict[tuple[int, int], Span]) -> Region:
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
    source, edit = profile.nodes[first].source, None
    if span is not None and span.source is not None:
        source = span.source
        if len(span.modules) == 1:
            edit = write_edit(source, span.modules[0], keeps)
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
        edit=edit,
        regions=describe_regions(selection, stretch.inner, spans),
    )


def write_edit(source: SourceLine, module: str, keeps: tuple[int, ...] = ()) -> Edit | None:
    """Return the source line with the module's call checkpointed, keeping the results of these products. None where the
    line makes no call by the module's own name (in a loop)."""
    statement = _read_statement(source)
    if statement is None:
        return None
    code, tree = statement
    name = module.rpartition(".")[2]
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == name]
    if len(found) != 1:
        return None
    call = found[0]
    call.args.insert(0, call.func)
    call.func = ast.Name("checkpoint", ast.Load())
    call.keywords += _checkpoint_options(keeps)
    return Edit(source=source.model_copy(update={"code": code}), after=ast.unparse(tree))


def _read_statement(source: SourceLine) -> tuple[str, ast.Module] | None:
    """The statement that begins at a line; None where that is not a statement."""
    lines = [source.code, *linecache.getlines(source.file)[source.line : source.line + tuning.STATEMENT_LINES]]
    for count in range(1, len(lines) + 1):
        code = textwrap.dedent("\n".join([source.code, textwrap.dedent("".join(lines[1:count]))])).rstrip()
        try:
            return code, ast.parse(code)
        except SyntaxError:  # the first lines of a statement that goes on
            continue
    return None


def _checkpoint_options(keeps: tuple[int, ...]) -> Iterator[ast.keyword]:
    yield ast.keyword("use_reentrant", ast.Constant(False))
    if keeps:
        keep = ast.Attribute(ast.Name("fxmem", ast.Load()), "keep", ast.Load())
        yield ast.keyword("context_fn", ast.Call(keep, [ast.Constant(number) for number in keeps], []))
