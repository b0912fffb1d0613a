"""`fxmem.analyze(compile=...)` and the options of `--compile`, read."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final, get_args

from fxmem._torch.compiler.inductor import known_options
from fxmem.errors import UsageError, closest
from fxmem.records.names import AS_IS, BUDGET_OPTION, CompileMode
from fxmem.records.parts import CompileSettings

_KEYS: Final = ("mode", "dynamic", "options", BUDGET_OPTION)

Compile = bool | str | Mapping[str, Any] | CompileSettings | None
"""`fxmem.analyze(compile=...)`: True or a mode, `as-is`, or the arguments of `torch.compile`."""


def parse_compile(value: Compile) -> CompileSettings | None:
    """Read the argument `compile` of `fxmem.analyze`.

    Raises:
        UsageError: no such mode, argument or option.
    """
    if value is None or value is False:
        return None
    if isinstance(value, CompileSettings):
        return value
    if value is True:
        return CompileSettings()
    if value == AS_IS:
        return CompileSettings(as_is=True)
    given: dict[str, Any] = {"mode": value} if isinstance(value, str) else dict(value)
    wrong = next((key for key in given if key not in _KEYS), None)
    if wrong is not None:
        raise UsageError(f"expected compile with {', '.join(_KEYS)}, got {wrong!r}{closest(str(wrong), _KEYS)}")
    mode: Any = given.get("mode") or "default"
    if mode not in get_args(CompileMode):
        raise UsageError(
            f"expected compile to be a mode of torch.compile ({', '.join(get_args(CompileMode))}) or {AS_IS!r}, "
            f"got {mode!r}{closest(str(mode), get_args(CompileMode))}"
        )
    if given.get("dynamic") not in (None, True, False):
        raise UsageError(f"expected dynamic to be True, False or None, got {given['dynamic']!r}")
    share = given.get(BUDGET_OPTION)
    if share is not None and (not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1):
        raise UsageError(f"expected {BUDGET_OPTION} from 0 (keep least) to 1 (recompute nothing), got {share!r}")
    known = known_options()
    options = {name.replace("-", "_"): each for name, each in (given.get("options") or {}).items()}
    for name in options:
        if name not in known:
            raise UsageError(f"inductor has no option {name!r}{closest(name, sorted(known))}")
    return CompileSettings(mode=mode, dynamic=given.get("dynamic"), options=options, activation_memory_budget=share)


def read_compile(mode: str | None, options: list[str]) -> CompileSettings | None:
    """Read `--compile` and `--compile-option`.

    Raises:
        UsageError: as `parse_compile`; options without `--compile`.
    """
    if mode is None:
        if options:
            raise UsageError("expected --compile with --compile-option")
        return None
    given = parse_compile_options(options)
    if mode == AS_IS:
        if given:
            raise UsageError(f"expected --compile {AS_IS} without --compile-option: the model's author has chosen")
        return parse_compile(AS_IS)
    own = {name: given.pop(name, None) for name in ("dynamic", BUDGET_OPTION)}
    return parse_compile({"mode": mode, **own, "options": given})


def parse_compile_options(texts: list[str]) -> dict[str, Any]:
    """Read `--compile-option KEY=VALUE`: inductor's, `dynamic` of torch.compile, `activation_memory_budget`.

    Raises:
        UsageError: no `=`.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"expected --compile-option as KEY=VALUE, got {text!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found
