"""The regions of a plan described for the user: names, lines, bytes, FLOPs and source edits."""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Set

from fxmem.planning import tuning
from fxmem.planning.regions.candidates import Span
from fxmem.planning.regions.cost_tables import Selection
from fxmem.planning.regions.dynamic_programs import Stretch
from fxmem.records.plan import Edit, Region
from fxmem.records.profile import Profile, SourceLine


def describe_regions(
    selection: Selection, stretches: Iterable[Stretch], spans: dict[tuple[int, int], Span]
) -> tuple[Region, ...]:
    """Describe the regions of a plan. One that frees nothing, or keeps more bytes than it frees, is left out."""
    regions = (_region(selection, stretch, spans) for stretch in stretches)
    return tuple(region for region in regions if region.freed_bytes)


Lines = Mapping[SourceLine, Set[str]]
"""The modules that each line of the source calls."""


def find_lines(profile: Profile) -> Lines:
    """Find the modules that each line calls, in any of their calls."""
    found: dict[SourceLine, set[str]] = {}
    leaves = ((node.source, node.module) for node in profile.nodes if node.op == "call_module")
    for source, module in (*((call.source, call.module) for call in profile.calls), *leaves):
        if source is not None:
            found.setdefault(source, set()).add(module)
    return found


def has_edit(span: Span, lines: Lines) -> bool:
    """Whether an edit of one line checkpoints the span and nothing else, whatever else is checkpointed."""
    if len(span.modules) > 1 or span.source is None:
        return False
    path, _, name = span.modules[0].rpartition(".")
    if _names_one_list(span.source, path, name, lines):
        return _write_loop_edit(span.source, path.rpartition(".")[2], {(): [int(name)]}) is not None
    return _find_alike(span.source, name, lines) == {*span.modules} and write_edit(span.source, name) is not None


def write_edits(regions: tuple[Region, ...], lines: Lines) -> tuple[Region, ...]:
    """The regions of a plan, each with an edit only where the edits of all do what the plan does.

    `for block in self.blocks: x = block(x)` is one line for all blocks; its edit says which of them are checkpointed.
    A line that also calls the items of another list has none, and neither has a line of a block that calls a module
    which the plan leaves alone in another block.
    """
    groups: dict[tuple[SourceLine, str], list[Region]] = {}
    chosen: dict[Edit, set[str]] = {}
    for region in _walk(regions):
        if region.edit is not None:
            chosen.setdefault(region.edit, set()).add(region.modules[0])
        elif region in regions and region.source is not None and len(region.modules) == 1:
            path, _, item = region.modules[0].rpartition(".")
            if _names_one_list(region.source, path, item, lines):
                groups.setdefault((region.source, path), []).append(region)
    edits: dict[Region, Edit | None] = {}
    for (source, path), group in groups.items():
        items: dict[tuple[int, ...], list[int]] = {}
        for region in group:
            items.setdefault(region.keeps, []).append(int(region.modules[0].rpartition(".")[2]))
        edits |= dict.fromkeys(group, _write_loop_edit(source, path.rpartition(".")[2], items))

    def finish(region: Region) -> Region:
        edit = region.edit or edits.get(region)
        if region.edit is not None:
            alike = _find_alike(region.edit.source, region.modules[0].rpartition(".")[2], lines)
            edit = region.edit if alike <= chosen[region.edit] else None
        return region.model_copy(update={"edit": edit, "regions": tuple(map(finish, region.regions))})

    return tuple(map(finish, regions))


def _walk(regions: Iterable[Region]) -> Iterator[Region]:
    for region in regions:
        yield region
        yield from _walk(region.regions)


def _names_one_list(source: SourceLine, path: str, item: str, lines: Lines) -> bool:
    """Whether all that a line calls are items of one list."""
    return bool(path) and item.isdecimal() and {each.rpartition(".")[0] for each in lines.get(source, ())} == {path}


def _find_alike(source: SourceLine, name: str, lines: Lines) -> set[str]:
    """The modules of this name that a line calls."""
    return {each for each in lines.get(source, ()) if each.rpartition(".")[2] == name}


def _write_loop_edit(source: SourceLine, name: str, chosen: Mapping[tuple[int, ...], list[int]]) -> Edit | None:
    """Return the statement with its call of a list's item checkpointed.

    Which items they are, by the products that they keep, is decided where it runs. None where the statement calls other
    variables, or what no name stands for, and where it binds the variable itself.
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
    choice = [f"run_{item.id} = {item.id}"]
    for keeps, numbers in chosen.items():
        items = sorted(numbers)
        options = ", ".join(ast.unparse(keyword) for keyword in _checkpoint_options(keeps))
        which = f"range({len(items)})" if items == list(range(len(items))) else f"({', '.join(map(str, items))})"
        several = f"any({item.id} is self.{name}[i] for i in {which})"
        choice.append(f"if {several if len(items) > 1 else f'{item.id} is self.{name}[{items[0]}]'}:")
        choice.append(f"    run_{item.id} = functools.partial(checkpoint, {item.id}, {options})")
    lines = code.splitlines()
    line = lines[item.lineno - 1].encode()
    lines[item.lineno - 1] = (line[: item.col_offset] + b"run_" + line[item.col_offset :]).decode()
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
