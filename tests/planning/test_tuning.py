"""The planners' numbers: all in one place, each with what it rests on."""

from __future__ import annotations

import ast
from pathlib import Path

import fxmem.planning
from fxmem.planning import tuning

FOLDER = Path(fxmem.planning.__file__).parent
TUNING = Path(tuning.__file__)


def constants(path: Path) -> dict[str, tuple[ast.expr, str]]:
    """Upper-case names that a module assigns at its top, each with its value and what stands below it."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = {}
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if is_text else ""  # type: ignore[attr-defined]
            found.update({name: (node.value, text) for name in ast.unparse(target).split(", ") if name.isupper()})
    return found


def test_every_number_says_what_it_rests_on() -> None:
    found = constants(TUNING)
    assert len(found) > 40
    grounds = ("Chosen, not measured", "Measured: ", "Follows from ")
    assert [
        name for name, (_, text) in found.items() if not any(each in " ".join(text.split()) for each in grounds)
    ] == []


def test_no_other_module_of_the_room_has_numbers_of_its_own() -> None:
    # A strategy's module is all of that strategy: one from outside has its numbers with it, too.
    modules = [path for path in FOLDER.rglob("*.py") if path != TUNING and path.parent.name != "strategies"]
    numbers = [
        f"{path.relative_to(FOLDER)}: {name}"
        for path in modules
        for name, (value, _) in constants(path).items()
        if all(
            isinstance(each, ast.Constant | ast.Tuple | ast.BinOp | ast.expr_context | ast.operator)
            for each in ast.walk(value)
        )
        and any(isinstance(each, ast.Constant) and isinstance(each.value, int | float) for each in ast.walk(value))
    ]
    assert numbers == []
