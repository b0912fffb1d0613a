"""What the source of a program does with what it keeps: puts more in, takes away, compares; and whose that is.

A name is another's where the code makes it there itself: the `losses` of another function, `self.losses` of another
class. What is given, imported or taken from elsewhere may be anyone's.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fxmem.simulation.code.source_lines import last_name
from fxmem.simulation.code.source_trees import Inside, assigned, enter, find_kept, is_now_and_then, parse

_ADDING: Final = frozenset("append appendleft extend extendleft insert put".split())
"""Methods that make a list longer, whatever is in it already."""
_REMOVING: Final = frozenset("clear detach detach_ discard item pop popitem popleft remove truncate".split())
_LEAVING: Final = (ast.Break, ast.Continue, ast.Raise, ast.Return)
_LITERALS: Final = (ast.List, ast.ListComp, ast.Dict, ast.DictComp, ast.Set, ast.SetComp, ast.Tuple, ast.Constant)
_MAKERS: Final = frozenset("OrderedDict defaultdict deque dict list set tuple".split())
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_PASSES: Final = 3
"""Functions that something is handed on through, from one to the next."""


class Named(NamedTuple):
    """What a function, class or module calls something."""

    file: str
    scope: str
    """As Python names it (`train.<locals>.run`); empty for the module."""
    name: str


class Limit(NamedTuple):
    """A comparison that bounds what something keeps: `len(data) < most`, `if count < most: data.append(x)`."""

    measure: ast.expr | None
    """None: how many elements it has."""
    most: ast.expr


class Use(NamedTuple):
    """What a place in the code does with something that it calls by a name."""

    does: str
    """"adds", "removes", "rebinds", "measures", "limits" or "gives"."""
    scope: str | None = None
    """Whose own the name is there; None: not known."""
    of_class: str | None = None
    """The class whose `self` has it."""
    owner: str = ""
    """`meter` of `meter.values`; empty for a variable."""
    limit: Limit | None = None
    callee: str = ""
    """The function that it is given to."""
    argument: int | str = 0


class _Code(NamedTuple):
    """A file's code."""

    uses: Mapping[str, Sequence[Use]]
    """By the name that something has there."""
    arguments: Mapping[str, Sequence[tuple[Sequence[str], Mapping[str, Collection[Named]]]]]
    """By function, and by class for what makes one: its arguments, and what has each of them (in no file)."""
    functions: Collection[str]
    """Names of its scopes that are functions."""


# --- what bounds something --------------------------------------------------------------------------------------------


def find_limits(names: Collection[Named], owners: Collection[str], sources: Sources) -> list[Limit]:
    """What the files where something is made compare its length or its count with before they keep something in it,
    take something away or leave. A comparison by which they only print bounds nothing.

    Args:
        names: what it is called.
        owners: what the program calls what has it, which tells `meter.values` from `other.values`.
        sources: the program's.
    """
    return [use.limit for use, is_sure in _find_meant(names, sources, owners) if is_sure and use.limit is not None]


def has_limits(name: str, sources: Sources) -> bool:
    """Whether one of the files bounds anything with such a name."""
    return any(use.limit is not None for uses in sources.uses(name).values() for use in uses)


def is_unbounded(names: Collection[Named], sources: Sources) -> bool:
    """Whether a program puts more into something, and nothing in its code bounds or empties it.

    A list that is appended to, a sum or a tensor that is made of what it was; and nowhere a comparison of its length,
    or of a counter before something is kept, a method, `del` or a slice that removes, a write at a position, by which
    another may go, or a line that makes it anew now and then.
    """
    found = {use.does for use, _ in _find_meant(names, sources)}
    return "adds" in found and found.isdisjoint(("removes", "rebinds", "measures"))


def _find_meant(names: Collection[Named], sources: Sources, owners: Collection[str] = ()) -> list[tuple[Use, bool]]:
    """The places that may mean what has these names, and whether they surely do.

    Functions and classes that are given it have it as their argument. Of what nobody knows whose it is, a file means
    its own where it has something of that name, unless it is one of those where this is made. A variable of another
    file is none of a function here, for nobody imports that; and to rebind one changes nothing of what this one has.
    """
    known, near, found = {*names}, {each.file for each in names}, list[tuple[Use, bool]]()
    for _ in range(_PASSES):
        given, found = set[tuple[str, int | str]](), []
        for name in sorted({each.name for each in known}):
            is_local = all(sources.is_local(each) for each in known if each.name == name)
            for file, uses in sources.uses(name).items():
                is_near = file in near
                is_open = is_near or all(each.scope is None for each in uses)
                for use in uses:
                    scopes = (each for each in (use.scope, use.of_class) if each is not None)
                    is_its = any(Named(file, each, name) in known for each in scopes)
                    may_be = is_near or use.owner or not (is_local or use.does == "rebinds")
                    if is_its or (use.scope is None and is_open and may_be):
                        found.append((use, is_its or (is_near and (not use.owner or use.owner in owners))))
                        given.add((use.callee, use.argument))
        handed_on = {each for callee, argument in given if callee for each in sources.find_arguments(callee, argument)}
        if handed_on <= known:
            break
        known |= handed_on
    return found


class Sources:
    """The code of a program's files. What is asked for a word parses the files that have it, each once.

    Args:
        texts: each file, and what is in it.
    """

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._texts = dict(texts)
        self._uses: dict[str, Mapping[str, Sequence[Use]]] = {}
        self._arguments: dict[tuple[str, int | str], Collection[Named]] = {}

    def uses(self, name: str) -> Mapping[str, Sequence[Use]]:
        """What the files do with what they call so, by file."""
        if name not in self._uses:
            found = ((file, code.uses.get(name)) for file, code in self._find_code(name))
            self._uses[name] = {file: uses for file, uses in found if uses}
        return self._uses[name]

    def is_local(self, named: Named) -> bool:
        """Whether something is a variable of a function."""
        return named.scope in find_uses(self._texts.get(named.file, "")).functions

    def find_arguments(self, callee: str, argument: int | str) -> Collection[Named]:
        """What functions of this name call an argument that they are given, if they are the program's."""
        if (callee, argument) not in self._arguments:
            found = set[Named]()
            for file, code in self._find_code(callee):
                for arguments, named in code.arguments.get(callee, ()):
                    name = argument
                    if isinstance(name, int):
                        name = arguments[name] if name < len(arguments) else ""
                    found |= {each._replace(file=file) for each in named.get(name, ())}
            self._arguments[callee, argument] = found
        return self._arguments[callee, argument]

    def _find_code(self, word: str) -> Iterator[tuple[str, _Code]]:
        return ((file, find_uses(text)) for file, text in self._texts.items() if word in text)


_index: Final = functools.lru_cache(maxsize=4)(Sources)


def read_sources(files: Iterable[str]) -> Sources:
    """The code of these files."""
    return _index(tuple((file, "".join(linecache.getlines(file))) for file in files))


# --- what a file does -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def find_uses(text: str) -> _Code:
    """What a file's code does with what it keeps something in. Its tree is not kept: a program may have hundreds."""
    tree = parse(text)
    uses: dict[str, list[Use]] = {}
    arguments: dict[str, list[Any]] = {}
    functions = set[str]()

    def walk(node: ast.AST, scope: _Scope, inside: Inside) -> None:
        for use, of in _find_effects(node):
            name, of_class, owner = last_name(of), _find_class(of, scope), _find_owner(of)
            own = _find_scope(of, scope, of_class)
            if use.does == "makes":  # elsewhere than at first
                is_others = not owner and own is not None and own != scope.name
                empties = "removes" if owner or own is not None else "rebinds"
                use = use._replace(does=empties if is_others or is_now_and_then(name, inside) else "")
            if name and use.does:
                uses.setdefault(name, []).append(
                    use._replace(scope=own, of_class=of_class and of_class.name, owner=owner)
                )
        inner, inside = scope, enter(node, inside)
        if isinstance(node, (_Function, ast.ClassDef)):
            inner = _Scope.open(node, scope)
            if isinstance(node, _Function):
                functions.add(inner.name)
                callee = scope.name.rpartition(".")[2] if inner.name.endswith("__init__") else inner.last_name
                arguments.setdefault(callee, []).append(_name_arguments(node, inner, scope))
        for child in ast.iter_child_nodes(node):
            walk(child, inner, inside)

    walk(tree, _Scope.open(tree, None), None)
    return _Code(uses, arguments, functions)


def _find_effects(node: ast.AST) -> Iterator[tuple[Use, ast.AST]]:
    """What a node does, and with what."""
    match node:
        case ast.Call(func=called, args=args, keywords=keywords):
            if isinstance(called, ast.Attribute) and called.attr in _ADDING:
                yield Use("adds"), _set_by_default(called.value)
            if isinstance(called, ast.Attribute) and called.attr in _REMOVING:
                yield Use("removes"), called.value
            if isinstance(called, ast.Attribute) and last_name(called.value) == "heapq":
                yield from ((Use("removes"), each) for each in args)
            given: list[tuple[int | str, ast.expr]] = [*enumerate(args)]
            given += [(each.arg or "", each.value) for each in keywords]
            yield from ((Use("gives", callee=last_name(called), argument=which), each) for which, each in given)
        case ast.AugAssign(target=target):
            yield Use("adds"), target
        case ast.Delete(targets=targets):
            yield from ((Use("removes"), each) for each in targets)
        case ast.Assign() | ast.AnnAssign():
            yield from ((Use(_find_change(each, value)), each) for each, value in _pair_targets(node))
        case ast.Compare():
            yield from ((Use("measures"), of) for left, _ in _compared(node) if (of := _measured(left)) is not None)
        case ast.If() | ast.While():
            yield from _find_bounds(node)


def _find_change(target: ast.expr, value: ast.expr) -> str:
    """What it does to a name that it is given a value."""
    name = last_name(target)
    if isinstance(value, (ast.Name, ast.Attribute)) and last_name(value) == name:
        return ""  # `self.losses = losses`
    read = [each for each in ast.walk(value) if last_name(each) == name]
    if any(isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Slice) for each in read):
        return "removes"
    if isinstance(target, ast.Subscript) and not read:
        end = _measured(target.slice)
        return "adds" if end is not None and last_name(end) == name else "removes"  # `seen[len(seen)]`: one more
    return "adds" if read else "makes"


def _find_bounds(node: ast.If | ast.While) -> Iterator[tuple[Use, ast.AST]]:
    """What the condition of an `if` or a loop bounds, and whether it surely bounds something of its branches."""
    parts = [part for one in (*node.body, *node.orelse) for part in ast.walk(one)]
    kept, sides = [of for part in parts for of in find_kept(part)], [*_compared(node.test)]
    removed = {last_name(of) for part in parts for use, of in _find_simple(part) if use.does == "removes"}
    names = {*map(last_name, kept), *removed}
    is_left = any(isinstance(each, _LEAVING) for each in parts)
    for left, right in sides:
        if (of := _measured(left)) is not None and (is_left or last_name(of) in names):
            yield Use("limits", limit=Limit(None, right)), of
        if isinstance(node, ast.If):
            yield from ((Use("limits", limit=Limit(left, right)), each) for each in kept)
    if isinstance(node, ast.If) and not all(map(_is_of_remainder, sides)):
        yield from ((Use("measures"), each) for each in kept)


def _find_simple(node: ast.AST) -> Iterator[tuple[Use, ast.AST]]:
    """What a node does by itself."""
    return iter(()) if isinstance(node, (ast.If, ast.While)) else _find_effects(node)


def _compared(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both sides of a comparison of two, each as the first."""
    if isinstance(node, ast.BoolOp):
        for each in node.values:
            yield from _compared(each)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq)):
        yield node.left, node.comparators[0]
        yield node.comparators[0], node.left


def _measured(node: ast.expr) -> ast.expr | None:
    """`self.data` of `len(self.data)`."""
    is_length = isinstance(node, ast.Call) and last_name(node.func) == "len" and len(node.args) == 1
    return node.args[0] if is_length and isinstance(node, ast.Call) else None


def _is_of_remainder(sides: tuple[ast.expr, ast.expr]) -> bool:
    """Whether a comparison is of `step % 10`, which bounds nothing, or of words."""
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in sides) or any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) for each in sides
    )


def _set_by_default(node: ast.expr) -> ast.expr:
    """`seen` of `seen.setdefault(key, [])` as of `seen[key]`."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr="setdefault")):
            return owner
    return node


# --- whose a name is --------------------------------------------------------------------------------------------------


class _Scope(NamedTuple):
    """A function, a class or a module."""

    name: str
    is_class: bool
    around: _Scope | None
    own: frozenset[str]
    """Variables that it makes or is given itself; of a class its attributes."""
    others: frozenset[str]
    """Variables that have what comes from elsewhere."""

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @classmethod
    def open(cls, node: _Function | ast.ClassDef | ast.Module, around: _Scope | None) -> _Scope:
        """The scope of what is in a function, a class or a module."""
        own, others = set[str](), set[str]()
        for each in _within(node):
            if isinstance(each, (ast.Global, ast.Nonlocal)):
                own.difference_update(each.names)
                others.difference_update(each.names)
                continue
            for target, is_new in _find_targets(each):
                (own if is_new else others).add(target)
        if isinstance(node, _Function):
            given = node.args
            own |= {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        if isinstance(node, ast.ClassDef):
            own |= {name for each in ast.walk(node) for name, is_own in _find_attributes(each) if is_own}
        name = getattr(node, "name", "<lambda>" if around is not None else "")
        if around is not None and around.name:
            name = f"{around.name}.{name}" if around.is_class else f"{around.name}.<locals>.{name}"
        return cls(name, isinstance(node, ast.ClassDef), around, frozenset(own), frozenset(others))


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the scopes in it; what a `global` names comes last."""
    waiting, last = [*ast.iter_child_nodes(node)], list[ast.AST]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, (ast.Global, ast.Nonlocal)):
            last.append(each)
        elif not isinstance(each, (_Function, ast.ClassDef)):
            yield each
            waiting += ast.iter_child_nodes(each)
    yield from last


def _find_targets(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The variables that a node gives a value, and whether it makes that there."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((each.asname or each.name, False) for each in node.names)
    for each, value in _pair_targets(node):
        if isinstance(each, ast.Name) and all(last_name(part) != each.id for part in ast.walk(value)):
            yield each.id, _is_new(value) and not isinstance(node, ast.For)


def _find_attributes(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The attributes of `self` that a node gives a value, and whether nobody else's has it: it is made there, or what
    a function is given."""
    for each, value in _pair_targets(node):
        if isinstance(each, ast.Attribute) and last_name(each.value) in ("self", "cls"):
            yield each.attr, _is_new(value) or isinstance(value, ast.Name)


def _pair_targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement gives a value to, each with its value, of `a, b = [], c` as well."""
    targets, value = assigned(node)
    if value is None:
        return
    for each in targets:
        if not isinstance(each, (ast.Tuple, ast.List)):
            yield each, value
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(each.elts):
            yield from zip(each.elts, value.elts, strict=True)
        else:  # of what it is made of nothing is known
            yield from ((one, ast.Name("")) for one in each.elts)


def _is_new(value: ast.expr) -> bool:
    """Whether an expression makes what it is."""
    name = last_name(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, _LITERALS) or name in _MAKERS or name[:1].isupper()


def _find_class(node: ast.AST, scope: _Scope) -> _Scope | None:
    """The class of the `self` that has an attribute; None for others."""
    around: _Scope | None = scope if _find_owner(node) in ("self", "cls") else None
    while around is not None and not around.is_class:
        around = around.around
    return around


def _find_scope(node: ast.AST, scope: _Scope, of_class: _Scope | None) -> str | None:
    """The function, class or module whose own a name is; None: not known."""
    name = last_name(node)
    around: _Scope | None = scope
    if of_class is not None or _find_owner(node):
        return of_class.name if of_class is not None and name in of_class.own else None
    while around is not None:
        if around is scope or not around.is_class:
            if name in around.others:
                return None
            if name in around.own:
                return around.name
        around = around.around
    return None


def _find_owner(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return (last_name(node.value) or "()") if isinstance(node, ast.Attribute) else ""


def _name_arguments(
    node: _Function, scope: _Scope, around: _Scope
) -> tuple[Sequence[str], Mapping[str, Collection[Named]]]:
    """The arguments of a function, and what has each: it, and the attributes of its class that it gives them to."""
    found = {each.arg: [Named("", scope.name, each.arg)] for each in (*node.args.args, *node.args.kwonlyargs)}
    for target, value in (pair for each in ast.walk(node) for pair in _pair_targets(each) if around.is_class):
        if isinstance(value, ast.Name) and value.id in found and _find_owner(target) == "self":
            found[value.id].append(Named("", around.name, last_name(target)))
    return [each.arg for each in node.args.args][around.is_class :], found
