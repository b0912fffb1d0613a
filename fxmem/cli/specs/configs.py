"""Arguments of a factory that are objects: a configuration class and its fields, written as settings.

    config.n_layer=12            a field of the object that the argument `config` takes
    config=GPTConfig(n_layer=12) the object itself; its class is one that the factory's module knows

The class is the argument's annotation or default; without either, the one class in the factory's module that looks like
a configuration. Dataclasses, pydantic models, attrs classes and any other class whose constructor names its fields are
built by their constructor; a class with annotated fields alone is made and its fields are set. Nothing is evaluated but
literals.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import nn

from fxmem.errors import UsageError, closest, one_line

_LOOKS_LIKE_ONE: Final = re.compile(r"\w*(config|configuration|cfg|args|arguments|hparams|params|options)", re.I)
_PLAIN: Final = (int, float, bool, str, bytes, list, tuple, set, complex, type(None))


def read_arguments(
    factory: Callable[..., Any], spec: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keyword arguments that settings make, objects built of their fields; and notes on them.

    Raises:
        UsageError: a class or a field that does not exist, or a field that is missing.
    """
    arguments: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for key, value in settings.items():
        head, _, rest = key.partition(".")
        if rest:
            fields.setdefault(head, {})[rest] = value
        else:
            arguments[key] = _read_call(factory, value)
    for head, given in fields.items():
        if head in arguments:
            arguments[head] = _set_fields(arguments[head], given, f"{spec} {head}")
            continue
        kind, known = config_class(factory, head), _parameters(factory)
        if kind is None and known and head not in known:
            arguments[head] = given  # refused by its name
        elif kind is None:
            arguments[head] = types.SimpleNamespace(**_nested(given))
            notes.append(f"{head} is an object with the fields {', '.join(given)} and no others")
        else:
            arguments[head] = build(kind, given, f"--set {head}")
    return arguments, tuple(notes)


def config_class(factory: Callable[..., Any], name: str) -> Any:
    """The class of the object that an argument takes; None if it is not known."""
    parameter = _parameters(factory).get(name)
    if parameter is None:
        return None
    default = parameter.default
    if default is not parameter.empty and default is not None and not isinstance(default, _PLAIN):
        return default if isinstance(default, type) else type(default)
    annotated = _annotation(factory, name)
    if annotated is not None:
        return annotated if _is_buildable(annotated) else None
    return _likely_class(factory, name)


def setting_line(factory: Callable[..., Any], name: str) -> str:
    """The line to type for an argument that is missing."""
    kind = config_class(factory, name)
    if kind is None or kind is dict:
        return f"--set {name}=VALUE"
    fields = list_fields(kind)
    if not fields:
        return f"--set '{name}={kind.__name__}()'"
    needed = [field for field, (_, is_needed) in fields.items() if is_needed]
    if needed:
        values = " ".join(f"--set {name}.{field}=VALUE" for field in needed)
        return f"{values} (fields of {kind.__name__}: {', '.join(fields)})"
    first, (default, _) = next(iter(fields.items()))
    shown = f"{name}.{first}={default!r}" if isinstance(default, int | float | bool) else f"{name}.{first}=VALUE"
    return f"--set '{name}={kind.__name__}()' or --set {shown} (fields: {', '.join(fields)})"


def field_hint(factory: Callable[..., Any], key: str) -> str:
    """What to type for a field that was given as if it were an argument; empty if it is none."""
    for name in _parameters(factory):
        kind = config_class(factory, name)
        if kind is not None and kind is not dict and key in list_fields(kind):
            return f"{key!r} is a field of {name}, a {kind.__name__}; say --set {name}.{key}=VALUE"
    return ""


def list_fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The names that a class's constructor takes, or that it annotates: each with its default, and whether it has none.

    A default that only a factory makes is None here.
    """
    found: dict[str, tuple[Any, bool]] = {}
    for name, parameter in _parameters(kind).items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            is_needed = parameter.default is parameter.empty
            found[name] = (None if is_needed else parameter.default, is_needed)
    annotated = (name for each in reversed(kind.__mro__) for name in vars(each).get("__annotations__", {}))
    return found or {name: (getattr(kind, name, None), False) for name in annotated}


def build(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    """An object of a class from its fields; those of an object in it are dotted.

    Raises:
        UsageError: no such field, one that is missing, or one that the class refuses.
    """
    nested = _nested(given)
    if kind is dict:
        return nested
    known = list_fields(kind)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in _parameters(kind).values())
    for name in nested:
        if name not in known and not takes_any:
            raise unknown_setting_error(f"{where} ({kind.__name__})", name, list(known))
    missing = [name for name, (_, is_needed) in known.items() if is_needed and name not in nested]
    if missing:
        needed = " ".join(f"{where}.{name}=VALUE" for name in missing)
        raise UsageError(f"{kind.__name__} needs {', '.join(missing)}; say {needed}")
    arguments = {}
    for name, value in nested.items():
        inner = _annotation(kind, name)
        builds = isinstance(value, dict) and _is_dotted(given, name) and inner is not None and _is_buildable(inner)
        arguments[name] = build(inner, value, f"{where}.{name}") if builds else value
    by_constructor = takes_any or bool(set(_parameters(kind)) & set(known))
    try:
        return kind(**arguments) if by_constructor or not arguments else _set_fields(kind(), arguments, where)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{kind.__name__} takes no such fields: {one_line(error)}") from error


def unknown_setting_error(spec: str, key: str, known: Sequence[str]) -> UsageError:
    """The error of a setting that a model does not have."""
    return UsageError(f"{spec} has no setting {key!r}{closest(key, known)}; it has {', '.join(known) or 'none'}")


def _read_call(factory: Callable[..., Any], value: Any) -> Any:
    """The object that `Class(field=1)` means, of a class that the factory's module knows; else the value itself."""
    if not isinstance(value, str) or not value.endswith(")"):
        return value
    with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        tree = ast.parse(value, mode="eval").body
        if isinstance(tree, ast.Call):
            return _build_call(factory, tree, value)
    return value


def _build_call(factory: Callable[..., Any], call: ast.Call, text: str) -> Any:
    found: Any = _scope(factory)
    path = ast.unparse(call.func)
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    if not isinstance(found, type):
        near = closest(path, [name for name, each in _scope(factory).items() if isinstance(each, type)])
        raise UsageError(f"expected a class that the model's module knows, got {path!r} in {text!r}{near}")

    def value(node: ast.expr) -> Any:
        return _build_call(factory, node, text) if isinstance(node, ast.Call) else ast.literal_eval(node)

    try:
        positional = [value(node) for node in call.args]
        keyword = {node.arg: value(node.value) for node in call.keywords if node.arg is not None}
    except ValueError as error:
        raise UsageError(f"expected numbers, strings and the like in {text!r}: nothing is evaluated") from error
    names = list(list_fields(found))
    return build(found, {**dict(zip(names, positional, strict=False)), **keyword}, f"--set {path}")


def _set_fields(made: Any, given: Mapping[str, Any], where: str) -> Any:
    """Set attributes that an object has already."""
    for name, value in given.items():
        head, _, rest = name.partition(".")
        if not hasattr(made, head):
            raise unknown_setting_error(where, head, [each for each in dir(made) if not each.startswith("_")])
        if rest:
            _set_fields(getattr(made, head), {rest: value}, f"{where}.{head}")
        else:
            try:
                setattr(made, head, value)
            except Exception as error:
                raise UsageError(f"{where}.{head} cannot be set: {one_line(error)}") from error
    return made


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        head, _, rest = name.partition(".")
        if not rest:
            made[head] = value
        elif isinstance(made.setdefault(head, {}), dict):
            made[head][rest] = value
    return {name: _nested(value) if _is_dotted(given, name) else value for name, value in made.items()}


def _is_dotted(given: Mapping[str, Any], name: str) -> bool:
    return any(each.startswith(f"{name}.") for each in given)


def signature(function: Any) -> inspect.Signature | None:
    """The signature of a function; None where it does not say."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def required_parameters(function: Any) -> list[str]:
    """Parameters without a default."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = (each for each in _parameters(function).values() if each.default is each.empty)
    return [each.name for each in needed if each.kind not in several]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    found = signature(function)
    return {} if found is None else found.parameters


def _scope(factory: Any) -> dict[str, Any]:
    """The names that a factory's module knows."""
    return vars(sys.modules.get(getattr(factory, "__module__", ""), types.ModuleType("none")))


def _annotation(factory: Any, name: str) -> Any:
    """The class that an argument is annotated with, without `None`; None if there is none."""
    written = _parameters(factory).get(name)
    hint: Any = written.annotation if written is not None else None
    if isinstance(hint, str) or written is None:
        holders = (factory, vars(factory).get("__init__")) if isinstance(factory, type) else (factory,)
        for holder in filter(None, holders):
            with contextlib.suppress(Exception):  # a name that exists for a type checker only
                hint = typing.get_type_hints(holder).get(name, hint)
    if isinstance(hint, str):
        hint = _scope(factory).get(hint.removesuffix(" | None").strip("\"'"))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((each for each in typing.get_args(hint) if each is not type(None)), None)
    hint = typing.get_origin(hint) or hint
    return hint if isinstance(hint, type) and hint is not inspect.Parameter.empty else None


def _is_buildable(kind: type) -> bool:
    """Whether an object of the class can be built of fields: a dict, or a class of the user's own."""
    return kind is dict or (not issubclass(kind, (*_PLAIN, nn.Module)) and kind.__module__ not in ("builtins", "torch"))


def _likely_class(factory: Callable[..., Any], argument: str) -> Any:
    """The one class in the factory's module that looks like an argument's configuration."""
    if not _LOOKS_LIKE_ONE.fullmatch(argument):
        return None
    found = {
        name: each
        for name, each in _scope(factory).items()
        if isinstance(each, type) and _LOOKS_LIKE_ONE.fullmatch(name) and not issubclass(each, nn.Module)
    }
    named = getattr(factory, "__name__", "").lower()
    of_its_name = [each for name, each in found.items() if named and name.lower().startswith(named)]
    own = [each for each in found.values() if each.__module__ == getattr(factory, "__module__", None)]
    for candidates in (of_its_name, own, list(found.values())):
        if len(candidates) == 1:
            return candidates[0]
    return None
