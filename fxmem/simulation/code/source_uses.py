"""What the source of a program does with what it keeps: puts more in, takes away, compares; and whose that is.

A name is another's where the code makes it there itself: the `losses` of another function, `self.losses` of another
class. What is given, imported or taken from elsewhere may be anyone's.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fxmem.simulation.code.source_lines import last_name
from fxmem.simulation.code.source_trees import PUSHING, Inside, enter, find_kept, is_now_and_then, pair_targets, parse

_ADDING: Final = frozenset("add append appendleft extend extendleft insert put put_nowait".split())
"""Methods that make a list longer, whatever is in it already."""
_EMPTYING: Final = frozenset(["cache_clear", "clear"])
_REMOVING: Final = _EMPTYING | frozenset("detach_ discard get_nowait pop popitem popleft remove truncate".split())
_TAKING: Final = frozenset("heapify heappop heappushpop heapreplace".split())
"""Functions that take something out of what they are given first."""
_JOINS: Final = frozenset("append cat chain concat concatenate deque dstack hstack list pad stack tuple vstack".split())
"""Functions whose result has all that they are given."""
_LEAVING: Final = (ast.Break, ast.Continue, ast.Raise, ast.Return)
_LITERALS: Final = (ast.List, ast.ListComp, ast.Dict, ast.DictComp, ast.Set, ast.SetComp, ast.Tuple, ast.Constant)
_MAKERS: Final = frozenset("OrderedDict defaultdict deque dict list set tuple".split())
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_OF_NAMES: Final = frozenset(["derives", "detaches", "rebinds"])
"""What is done to one of the names of something alone."""
_WORD: Final = re.compile(r"\w+")
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
    """"adds", "removes", "rebinds", "measures", "limits", "gives", or "derives" where it becomes what another function
    makes of it, "detaches", "writes" at the place that a key says, "is" what another variable has."""
    scope: str | None = None
    """Whose own the name is there; None: not known."""
    of_class: str | None = None
    """The class whose `self` has it."""
    owner: str = ""
    """`meter` of `meter.values`; empty for a variable."""
    limit: Limit | None = None
    callee: str = ""
    """The function that it is given to, or in which it is another variable's or is written to."""
    argument: int | str = 0
    keys: frozenset[str] = frozenset()
    """The variables that the key is made of; empty where another key may be the same."""


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
    meant = _find_meant(frozenset(names), sources, frozenset(owners))
    return [use.limit for use, is_sure in meant if is_sure and use.limit is not None]


def has_limits(name: str, sources: Sources) -> bool:
    """Whether one of the files bounds anything with such a name."""
    return any(use.limit is not None for uses in sources.uses(name).values() for use in uses)


def is_unbounded(
    names: Collection[Named],
    sources: Sources,
    *,
    is_graph: bool = False,
    counters: Sequence[Collection[tuple[str, str]]] = (),
) -> bool:
    """Whether a program puts more into something, and nothing in its code bounds or empties it.

    A list that is appended to, a sum or a tensor that is made of what it was, a key that counts; and nowhere a
    comparison of its length, or of a counter before something is kept, a method, `del` or a slice that removes, a
    function that makes less of it, a write at a position, by which another may go, or a line that makes it anew now
    and then.

    Args:
        names: what it is called.
        sources: the program's.
        is_graph: whether its graph is meant, which whatever is made of it makes longer.
        counters: of each loop around the steps, the variables that have another value in each pass.
    """
    uses = [use for use, _ in _find_meant(frozenset(names), sources)]
    keys = [{(use.callee, each) for each in use.keys} for use in uses if use.does == "writes"]
    is_counted = bool(counters) and all(not own.isdisjoint(each) for own in keys for each in counters)
    found = {"adds" if use.does == "writes" and is_counted else use.does for use in uses}
    adding = found & ({"adds", "derives"} if is_graph else {"adds"})
    bars = "removes", "rebinds", "measures", "writes", "detaches" if is_graph else "derives"
    return bool(adding) and found.isdisjoint(bars)


@functools.lru_cache(maxsize=4096)  # a program asks the same of each layer's
def _find_meant(
    names: frozenset[Named], sources: Sources, owners: frozenset[str] = frozenset()
) -> list[tuple[Use, bool]]:
    """The places that may mean what has these names, and whether they surely do.

    Functions and classes that are given it have it as their argument. Of what nobody knows whose it is, a file means
    its own where it has something of that name, unless it is one of those where this is made. A variable of another
    file is none of a function here, for nobody imports that; and to rebind one changes nothing of what this one has.
    """
    known, near, found = {*names}, {each.file for each in names}, list[tuple[Use, bool]]()
    aliases = set[Named]()
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
                        if use.does == "is":
                            aliases.add(Named(file, use.callee, str(use.argument)))
                            continue
                        if name not in {each.name for each in aliases} or use.does not in _OF_NAMES:
                            found.append((use, is_its or (is_near and (not use.owner or use.owner in owners))))
                        given.add((use.callee if use.does == "gives" else "", use.argument))
        handed_on = {each for callee, argument in given if callee for each in sources.find_arguments(callee, argument)}
        if handed_on | aliases <= known:
            break
        known |= handed_on | aliases
    return found


class Sources:
    """The code of a program's files. What is asked for a word parses the files that have it, each once.

    Args:
        texts: each file, and what is in it.
    """

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._texts = dict(texts)
        self.uses = functools.cache(self._find_uses)
        """What the files do with what they call so, by file."""
        self.find_arguments = functools.cache(self._find_arguments)
        """What functions of this name call an argument that they are given, if they are the program's."""

    def _find_uses(self, name: str) -> Mapping[str, Sequence[Use]]:
        found = ((file, code.uses.get(name)) for file, code in self._find_code(name))
        return {file: uses for file, uses in found if uses}

    def is_local(self, named: Named) -> bool:
        """Whether something is a variable of a function."""
        return named.scope in find_uses(self._texts.get(named.file, "")).functions

    def _find_arguments(self, callee: str, argument: int | str) -> Collection[Named]:
        found = set[Named]()
        for file, code in self._find_code(callee):
            for arguments, named in code.arguments.get(callee, ()):
                name = argument
                if isinstance(name, int):
                    name = arguments[name] if name < len(arguments) else ""
                found |= {each._replace(file=file) for each in named.get(name, ())}
        return found

    def _find_code(self, word: str) -> Iterator[tuple[str, _Code]]:
        return ((file, find_uses(text)) for file, text in self._texts.items() if word in _find_words(text))


@functools.lru_cache(maxsize=4096)
def _find_words(text: str) -> frozenset[str]:
    """Its words: a big program asks for thousands, each of all files."""
    return frozenset(_WORD.findall(text))


_index: Final = functools.lru_cache(maxsize=4)(Sources)


def read_sources(files: Iterable[str]) -> Sources:
    """The code of these files."""
    return _index(tuple((file, "".join(linecache.getlines(file))) for file in files))


# --- what a file does -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def find_uses(text: str) -> _Code:
    """What a file's code does with what it keeps something in. Its tree is not kept: a program may have hundreds."""
    tree = parse(text)
    flags = _find_flags(tree)
    uses = defaultdict[str, list[Use]](list)
    arguments = defaultdict[str, list[Any]](list)
    functions, idle = set[str](), set[int]()

    def walk(node: ast.AST, scope: _Scope, inside: Inside) -> None:
        idle.update(map(id, _find_idle(node, scope)))
        for use, of in itertools.chain(_find_effects(node), _find_branch_effects(node, flags)):
            if use.does == "measures" and id(of) in idle:
                continue
            name, of_class, owner = last_name(of), _find_class(of, scope), _find_owner(of)
            own = _find_scope(of, scope, of_class)
            if use.does == "makes":  # elsewhere than at first
                is_others = not owner and own is not None and own != scope.name
                empties = "removes" if owner or own is not None else "rebinds"
                use = use._replace(does=empties if is_others or is_now_and_then(name, inside) else "")
            if use.does in ("is", "writes"):
                use = use._replace(callee=scope.name)
            if name and use.does:
                uses[name].append(use._replace(scope=own, of_class=of_class and of_class.name, owner=owner))
        inner, inside = scope, enter(node, inside)
        if isinstance(node, (_Function, ast.ClassDef)):
            inner = _Scope.open(node, scope)
            if isinstance(node, _Function):
                functions.add(inner.name)
                called = scope if inner.name.endswith("__init__") else inner
                callee = called.name.rpartition(".")[2]
                arguments[callee].append(_name_arguments(node, inner, scope))
        for child in ast.iter_child_nodes(node):
            walk(child, inner, inside)

    walk(tree, _Scope.open(tree, None), None)
    return _Code(uses, arguments, functions)


def _find_effects(node: ast.AST) -> Iterator[tuple[Use, ast.AST]]:
    """What a node does by itself, and with what."""
    match node:
        case ast.Call(func=called, args=args, keywords=keywords):
            name, given = last_name(called), list[tuple[int | str, ast.expr]]([*enumerate(args)])
            if isinstance(called, ast.Attribute):
                if name in _ADDING:
                    yield Use("adds"), _set_by_default(called.value)
                if name in _REMOVING or (name == "get" and not args):  # of a queue
                    yield Use("removes"), called.value
                given.append(("self", called.value))  # a method of the program's own
            handed = (each for each in args if isinstance(each, ast.Attribute) and each.attr in _ADDING)
            yield from ((Use("adds"), each.value) for each in handed)  # `out.register_hook(grads.append)`
            if args and name in (*_TAKING, *PUSHING):
                yield Use("adds" if name in PUSHING else "removes"), args[0]
            given += [(each.arg or "", each.value) for each in keywords]
            yield from ((Use("gives", callee=name, argument=which), each) for which, each in given)
        case ast.AugAssign(target=target, op=by):
            yield Use("adds" if isinstance(by, (ast.Add, ast.BitOr)) else "derives"), target
        case ast.Delete(targets=targets):
            yield from ((Use("removes"), each) for each in targets)
        case ast.Return(value=value) if value is not None:
            yield from ((Use("detaches"), each) for each in ast.walk(value) if _is_detached(value, last_name(each)))
        case ast.Assign() | ast.AnnAssign():
            for each, new in pair_targets(node):
                yield from ((use, each) for use in _find_changes(each, new))
                if isinstance(each, ast.Name) and isinstance(new, (ast.Name, ast.Attribute, ast.Subscript)):
                    yield Use("is", argument=each.id), new
        case ast.For(target=target, iter=elements) | ast.comprehension(target=target, iter=elements):
            ways = itertools.product(ast.walk(elements), ast.walk(target))
            yield from ((Use("is", argument=each.id), part) for part, each in ways if isinstance(each, ast.Name))
        case ast.Compare():
            yield from ((Use("measures"), of) for left, _ in _compared(node) if (of := _measured(left)) is not None)


def _find_changes(target: ast.expr, value: ast.expr) -> Iterator[Use]:
    """What it does to a name that it is given a value."""
    name = last_name(target)
    if isinstance(value, (ast.Name, ast.Attribute)) and last_name(value) == name:
        return  # `self.losses = losses`
    if _is_detached(value, name):
        yield Use("detaches")
    places = (each for each in ast.walk(value) if isinstance(each, ast.Subscript) and _reads(each.value, name))
    if any(isinstance(part, ast.Slice) for each in places for part in ast.walk(each.slice)):
        yield Use("removes")
    elif isinstance(target, ast.Subscript) and not _reads(value, name):
        key = target.slice
        end = _measured(key.lower if isinstance(key, ast.Slice) and key.lower is not None else key)
        is_at_end = end is not None and last_name(end) == name  # `seen[len(seen)]`: one more
        parts = [each for each in ast.walk(key) if not isinstance(each, ast.expr_context)]
        parts = parts if all(isinstance(each, _OF_KEYS) for each in parts) else []
        keys = frozenset(each.id for each in parts if isinstance(each, ast.Name))
        yield Use("adds") if is_at_end else Use("writes", keys=keys)
    elif _reads(value, name):
        yield Use(_find_growth(value, name))
    else:
        yield Use("makes")


_OF_KEYS: Final = (ast.Attribute, ast.Constant, ast.FormattedValue, ast.JoinedStr, ast.Name, ast.Tuple)
"""What a key may be made of that differs as soon as one variable in it does."""


def _find_growth(value: ast.AST, name: str) -> str:
    """Whether an expression has all of what a name has and more, or just that, which is nothing, or derives from it."""
    match value:
        case ast.Name() | ast.Attribute() | ast.Subscript() if last_name(value) == name:
            return ""
        case ast.Starred(value=inner):
            return _find_growth(inner, name)
        case ast.Call(func=ast.Attribute(attr="clone" | "contiguous" | "detach", value=inner)):
            return _find_growth(inner, name)
        case ast.IfExp(test=test, body=one, orelse=other) if all(map(_is_of_remainder, _compared(test))):
            parts = [each for each in (one, other) if _reads(each, name)]
            return min((_find_growth(each, name) for each in parts), default="", key=len)
        case ast.BinOp(left=one, op=ast.Add() | ast.BitOr(), right=other):
            parts = [one, other]
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
            pass
        case ast.Call(func=called, args=parts) if last_name(called) in _JOINS or last_name(called)[:1].isupper():
            pass
        case _:
            return "derives"
    return "derives" if "derives" in (_find_growth(each, name) for each in parts if _reads(each, name)) else "adds"


def _reads(node: ast.AST, name: str) -> bool:
    return any(last_name(each) == name for each in ast.walk(node))


def _is_detached(value: ast.expr, name: str) -> bool:
    """Whether an expression detaches what a name has, or each of its elements."""
    parts = [*ast.walk(value)]
    loops = [each.target for each in parts if isinstance(each, ast.comprehension) and _reads(each.iter, name)]
    names = {name, *(last_name(part) for each in loops for part in ast.walk(each))} - {""}
    detached = (each for each in parts if isinstance(each, ast.Attribute) and each.attr in ("detach", "item"))
    return any(_reads(each.value, own) for each in detached for own in names)


def _find_flags(tree: ast.AST) -> frozenset[str]:
    """The names that are given what comes of a comparison of numbers, or are switched on and off."""
    pairs = [pair for node in ast.walk(tree) for pair in pair_targets(node)]
    switched = Counter(last_name(each) for each, value in pairs if getattr(value, "value", None) in (True, False))
    compared = ((each, op) for each, value in pairs for op in getattr(value, "ops", ()))
    orders = {last_name(each) for each, op in compared if isinstance(op, _ORDERS)}
    return frozenset(orders | {name for name, times in switched.items() if times > 1}) - {""}


_ORDERS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _find_branch_effects(node: ast.AST, flags: Collection[str]) -> Iterator[tuple[Use, ast.AST]]:
    """What the conditions of the `if` and the loops of a block bound: what is in their branches, and what follows one
    that leaves."""
    blocks = (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
    for block in (each for each in blocks if isinstance(each, list)):
        for number, each in enumerate(block):
            if isinstance(each, (ast.If, ast.While)):
                kinds = {type(part) for part in ast.walk(each.test)}
                is_left = isinstance(each.body[-1], _LEAVING) and ast.Eq not in kinds  # in one pass alone
                found = _find_bounds(each, [*each.body, *each.orelse, *(block[number + 1 :] * is_left)], flags)
                yield from (one for one in found if one[0].limit is None or not (is_left and ast.And in kinds))


def _find_bounds(
    node: ast.If | ast.While, branches: Sequence[ast.stmt], flags: Collection[str]
) -> Iterator[tuple[Use, ast.AST]]:
    """What the condition of an `if` or a loop bounds, and whether it surely bounds something of its branches."""
    sides, is_flag = [*_compared(node.test)], any(last_name(each) in flags for each in ast.walk(node.test))
    parts = [part for one in branches for part in ast.walk(one)] if sides or is_flag else []
    kept, measured = [of for part in parts for of in find_kept(part)], [each for each, _ in sides if _measured(each)]
    done = [(use.does, last_name(of)) for part in parts * bool(measured) for use, of in _find_effects(part)]
    names = {*map(last_name, kept), *(name for does, name in done if does in ("removes", "makes"))}
    is_fewer = any(isinstance(each, (ast.Lt, ast.LtE)) for each in ast.walk(node.test))
    ends = (ast.Break, ast.Raise) if is_fewer else (ast.Break, ast.Raise, ast.Return)
    is_left = any(isinstance(each, ends) for each in parts)
    for left, right in sides:
        if (of := _measured(left)) is not None and (is_left or last_name(of) in names):
            yield Use("limits", limit=Limit(None, right)), of
        if isinstance(node, ast.If):
            yield from ((Use("limits", limit=Limit(left, right)), each) for each in kept)
    if isinstance(node, ast.If) and (is_flag or not all(map(_is_of_remainder, sides))):
        yield from ((Use("measures"), each) for each in kept)


def _find_idle(node: ast.AST, scope: _Scope) -> Iterator[ast.expr]:
    """What an `if` measures and nothing in it bounds: `if len(replay) < 32: return` where nothing is put into it.

    In it, other variables may be given what known functions make of it, and a function be left that keeps nothing.
    """
    if not isinstance(node, ast.If):
        return
    parts = [part for one in (*node.body, *node.orelse) for part in ast.walk(one)]
    done = [(use.does, of) for part in parts for use, of in _find_effects(part) if use.does not in ("gives", "is")]
    made = {of.id for does, of in done if does == "makes" and isinstance(of, ast.Name)}
    leaving = [each for each in parts if isinstance(each, _LEAVING)]
    is_idle = (
        all(last_name(of) in made for _, of in done)
        and all(isinstance(each, ast.Return) and each.value is None for each in leaving)
        and all(last_name(each.func) in _HARMLESS for each in parts if isinstance(each, ast.Call))
        and not any(isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant) for each in parts)
    )
    measured = (of for left, _ in _compared(node.test) if (of := _measured(left)) is not None) if is_idle else ()
    yield from (each for each in measured if last_name(each) not in made | (scope.kept if leaving else set()))


_HARMLESS: Final = frozenset("cat choice choices enumerate len max mean min print range sample stack sum zip".split())
"""Functions that take nothing away and switch nothing; others may."""


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
    kept: frozenset[str]
    """What it keeps something in."""

    def outwards(self) -> Iterator[_Scope]:
        """It and those around it, the innermost first."""
        yield self
        if self.around is not None:
            yield from self.around.outwards()

    @classmethod
    def open(cls, node: _Function | ast.ClassDef | ast.Module, around: _Scope | None) -> _Scope:
        """The scope of what is in a function, a class or a module."""
        nodes = [*_within(node)]
        outer = {name for each in nodes if isinstance(each, (ast.Global, ast.Nonlocal)) for name in each.names}
        targets = {(name, is_new) for each in nodes for name, is_new in _find_targets(each) if name not in outer}
        own = {name for name, is_new in targets if is_new}
        others = {name for name, is_new in targets if not is_new}
        if isinstance(node, _Function):
            given = node.args
            own |= {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        if isinstance(node, ast.ClassDef):
            own |= {name for each in ast.walk(node) for name, is_own in _find_attributes(each) if is_own}
        name = getattr(node, "name", "<lambda>" if around is not None else "")
        if around is not None and around.name:
            name = f"{around.name}.{name}" if around.is_class else f"{around.name}.<locals>.{name}"
        kept = frozenset(last_name(of) for each in nodes for of in find_kept(each))
        return cls(name, isinstance(node, ast.ClassDef), around, frozenset(own), frozenset(others), kept)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the scopes in it."""
    waiting = [*ast.iter_child_nodes(node)]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, (_Function, ast.ClassDef)):
            yield each
            waiting += ast.iter_child_nodes(each)


def _find_targets(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The variables that a node gives a value, and whether it makes that there."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((each.asname or each.name, False) for each in node.names)
    for each, value in pair_targets(node):
        if isinstance(each, ast.Name) and all(last_name(part) != each.id for part in ast.walk(value)):
            yield each.id, _is_new(value) and not isinstance(node, ast.For)


def _find_attributes(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The attributes of `self` that a node gives a value, and whether nobody else's has it: it is made there, or what
    a function is given."""
    for each, value in pair_targets(node):
        if isinstance(each, ast.Attribute) and last_name(each.value) in ("self", "cls"):
            yield each.attr, _is_new(value) or isinstance(value, ast.Name)


def _is_new(value: ast.expr) -> bool:
    """Whether an expression makes what it is."""
    name = last_name(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, _LITERALS) or name in _MAKERS or name[:1].isupper()


def _find_class(node: ast.AST, scope: _Scope) -> _Scope | None:
    """The class of the `self` that has an attribute; None for others."""
    around = scope.outwards() if _find_owner(node) in ("self", "cls") else ()
    return next((each for each in around if each.is_class), None)


def _find_scope(node: ast.AST, scope: _Scope, of_class: _Scope | None) -> str | None:
    """The function, class or module whose own a name is; None: not known."""
    name = last_name(node)
    if of_class is not None or _find_owner(node):
        return of_class.name if of_class is not None and name in of_class.own else None
    for each in scope.outwards():
        if (each is scope or not each.is_class) and name in (each.own | each.others):
            return None if name in each.others else each.name
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
    for target, value in (pair for each in ast.walk(node) for pair in pair_targets(each) if around.is_class):
        if isinstance(value, ast.Name) and value.id in found and _find_owner(target) == "self":
            found[value.id].append(Named("", around.name, last_name(target)))
    return [each.arg for each in node.args.args][around.is_class :], found
