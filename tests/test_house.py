"""What holds for the repository as a whole: who imports whom, what is declared and pinned, what must stand nowhere."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import fxmem
from fxmem.cli.verbs import VERBS
from fxmem.records.registry import EXPORTERS, PACKAGES, STRATEGIES, VIEWS
from tests.conftest import LONGEST

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = sorted((ROOT / "fxmem").rglob("*.py"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python afresh in the repository's root."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def imported_by(statement: str, beyond: str = "pass") -> set[str]:
    """Dotted names of what `statement` imports in a fresh process, and `beyond` has not."""
    done = python(
        "-c",
        f"import json, sys; {beyond}; before = set(sys.modules); {statement}; "
        "print(json.dumps(sorted(set(sys.modules) - before)))",
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def packages_of(modules: set[str]) -> set[str]:
    """Top-level packages outside the standard library."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, parsed once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


# --- imports ------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_else() -> None:
    assert packages_of(imported_by("import fxmem")) == {"fxmem"}


def test_importing_the_analysis_imports_nothing_that_only_shows_or_compiles() -> None:
    modules = imported_by("import fxmem.simulation.step.analysis", beyond="import torch")
    assert {"fxmem", "pydantic"} <= packages_of(modules)
    assert packages_of(modules).isdisjoint(
        {"rich", "triton", "networkx", "graphviz", "sympy", "scipy", "torchvision", "timm", "transformers"}
    )
    assert "torch._dynamo" not in modules


def test_importing_the_records_reads_no_source() -> None:
    """pydantic's `use_attribute_docstrings` would: it took longer than everything else in `fxmem.records.profile`."""
    done = python("-c", "import linecache, fxmem.memory.report_reader, fxmem.memory.allocator; print(*linecache.cache)")
    assert done.stdout == "\n", done.stderr


def test_help_imports_neither_torch_nor_pydantic() -> None:
    commands = [["--help"], *([verb, "--help"] for verb in VERBS)]
    code = (
        f"import sys; from fxmem.__main__ import main; print([main(command) for command in {commands!r}]); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = python("-c", code)
    assert done.stdout.count("usage: fxmem") == len(commands)
    assert done.stdout.endswith(f"{[0] * len(commands)}\n")
    assert {"torch", "pydantic", "rich", "numpy"}.isdisjoint(done.stderr.split())


def contract(kind: str, key: str, value: str) -> dict[str, list[str]]:
    """The one import contract of `kind` whose list `key` holds `value`."""
    (found,) = (
        entry
        for entry in PYPROJECT["tool"]["importlinter"]["contracts"]
        if entry["type"] == kind and value in entry[key]
    )
    return found


def test_all_that_lies_below_torch_on_the_road_is_held_to_run_without_it() -> None:
    layers = contract("layers", "containers", "fxmem")["layers"]
    below = {name for layer in layers[layers.index("_torch") + 1 :] for name in layer.split(" | ")} - {"errors"}
    assert {f"fxmem.{name}" for name in below} == set(
        contract("forbidden", "forbidden_modules", "torch")["source_modules"]
    )


def test_what_works_on_records_runs_without_torch() -> None:
    torch_free = contract("forbidden", "forbidden_modules", "torch")
    rooms = [(ROOT / name.replace(".", "/")) for name in torch_free["source_modules"]]
    modules = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for room in rooms
        for path in room.rglob("*.py")
    ]
    imported = packages_of(imported_by(f"import {', '.join(modules)}"))
    assert "pydantic" in imported
    assert imported.isdisjoint(torch_free["forbidden_modules"])


@pytest.mark.parametrize("name", fxmem.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(fxmem)
    assert getattr(fxmem, name) is not None


def test_a_type_checker_sees_the_public_names() -> None:
    tree = tree_of(ROOT / "fxmem" / "__init__.py")
    (seen,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [(alias, node.module) for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    # `import analyze as analyze`: without the second name a strict checker takes it for the package's own business.
    assert {alias.asname: module for alias, module in imports if alias.asname == alias.name} == fxmem._HOMES


def test_any_other_name_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'fxmem' has no attribute 'analyse'"):
        _ = fxmem.analyse


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, whatever `from` hands out included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain that starts at a name; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    start = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{start}.{node.attr}" if start and isinstance(node, ast.Attribute) else ""


def private_torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every private name of torch. An operator (`torch.ops.aten._softmax`) is none: its name is
    its own affair."""
    chains = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    starts = {id(node.value) for node in chains}
    attributes = ((node.lineno, dotted(node)) for node in chains if id(node) not in starts)
    for line, name in (*imported_modules(tree), *attributes):
        if name.startswith("torch.") and not name.startswith("torch.ops.") and re.search(r"\._(?!_)", name):
            yield line, name


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch._C", ["torch._C"]),
        ("from torch import _C", ["torch._C"]),
        ("from torch._subclasses import FakeTensorMode", ["torch._subclasses.FakeTensorMode"]),
        ("from torch.utils._pytree import tree_map as walk", ["torch.utils._pytree.tree_map"]),
        ("torch.fx._symbolic_trace", ["torch.fx._symbolic_trace"]),
        ("import torch.nn; torch.__version__; torch.ops.aten._softmax.default; x._base", []),
    ],
)
def test_private_torch_names_are_recognised(code: str, names: list[str]) -> None:
    assert [name for _, name in private_torch_names(ast.parse(code))] == names


def test_private_torch_names_live_in_the_files_named_for_them() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        if "_torch" not in path.parts
        for line, name in private_torch_names(tree_of(path))
    ]
    assert not found, "a private name belongs in fxmem/_torch/, with why and since when:\n" + "\n".join(found)


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every private attribute of something else than `self` and `cls` that the file does not itself
    give to its objects."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    given = {node.attr for node in own if isinstance(node.ctx, ast.Store)} | {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    asked = (
        (node.lineno, argument.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("getattr", "setattr", "hasattr", "patch")
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )
    for line, name in (*((node.lineno, node.attr) for node in attributes if node not in own), *asked):
        if re.match(r"_(?!_)", name) and name not in given:
            yield line, name


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("module._buffers", ["_buffers"]),
        ("tensor.untyped_storage()._cdata", ["_cdata"]),
        ("getattr(function, '_opname', '')", ["_opname"]),
        ("self._buffers; cls._made; module.buffers; module.__dict__; getattr(module, name)", []),
        ("self._code = 1; other._code", []),
    ],
)
def test_private_attributes_are_recognised(code: str, names: list[str]) -> None:
    assert [name for _, name in private_attributes(ast.parse(code))] == names


def test_private_attributes_of_torch_s_objects_live_there_too() -> None:
    weight = torch.zeros(1, requires_grad=True)
    traced = torch.fx.symbolic_trace(torch.nn.Identity())
    objects = (
        weight,
        weight.untyped_storage(),
        (2 * weight).grad_fn,
        torch.ops.aten.add.Tensor,
        torch.optim.SGD([weight]),
        traced,
        traced.graph,
    )
    torchs = {name for each in objects for name in dir(each)}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        if "_torch" not in path.parts
        for line, name in private_attributes(tree_of(path))
        if name in torchs
    ]
    assert not found, "a private name belongs in fxmem/_torch/, with why and since when:\n" + "\n".join(found)


# --- the rooms ----------------------------------------------------------------------------------------------------

ROOMS = sorted(path.name for path in (ROOT / "fxmem").iterdir() if (path / "__init__.py").exists())
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
"""Dotted name of every module of the package to its file."""
OPEN_PACKAGES = {
    "fxmem._torch.compiler": "private names by the module of torch they are of, as in the rest of the room",
    "fxmem.show.text": "one table for each kind of record: whoever has the record names its module",
    "fxmem.simulation.recording.observe": "what watches a run, which checkpoints and changes need as well",
}
"""Packages inside a room whose modules other rooms may name, and why; every other re-exports what others need."""


def repeated(names: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that are given in several places, with the places."""
    places: dict[str, list[str]] = {}
    for name, place in names:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


@cache
def internal_imports() -> list[tuple[str, str, str, str]]:
    """Importer, where (module and line), imported module and name of all that the package imports from itself.

    The name is empty for a module. A name that a package re-exports is a name, though a module of it be called so.
    """
    trees = {module: tree_of(path) for module, path in MODULES.items()}
    exported = {
        f"{module}.{alias.asname or alias.name}"
        for module, path in MODULES.items()
        if path.name == "__init__.py"
        for node in trees[module].body
        if isinstance(node, ast.ImportFrom) and node.module != module
        for alias in node.names
    }
    found = []
    for importer, tree in trees.items():
        for line, name in imported_modules(tree):
            if name in MODULES.keys() - exported:
                found.append((importer, f"{importer}:{line}", name, ""))
            elif name.startswith("fxmem."):
                found.append((importer, f"{importer}:{line}", *name.rpartition(".")[::2]))
    return found


def imports_from_outside() -> Iterator[tuple[str, str]]:
    """Where, and module, of all that a room imports from another one."""
    for importer, where, module, _ in internal_imports():
        if room_of(module) not in ("", room_of(importer)):
            yield where, module


def room_of(module: str) -> str:
    """`memory` of `fxmem.memory.allocator.peak`; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def test_few_things_lie_at_the_top() -> None:
    found = sorted(path.name for path in (ROOT / "fxmem").iterdir() if path.name != "__pycache__")
    assert len(found) <= 16, found


def test_the_contract_has_ten_rows_and_every_room_stands_in_one() -> None:
    layers = contract("layers", "containers", "fxmem")["layers"]
    rows = [row.split(" | ") for row in layers]
    assert len(rows) == 10
    assert sorted(room for row in rows for room in row) == sorted([*ROOMS, "errors"])


def test_the_tests_that_are_begun_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_a_folder_with_modules_is_a_package() -> None:
    assert {path.parent for path in SOURCES} == {path.parent for path in SOURCES if path.name == "__init__.py"}


def test_from_outside_a_room_only_its_own_modules_are_named() -> None:
    found = {
        f"{where}: {module}"
        for where, module in imports_from_outside()
        if module.count(".") > (3 if room_of(module) == "simulation" else 2)  # which has rooms of its own
        and module.rpartition(".")[0] not in OPEN_PACKAGES
    }
    assert not found, "name `room` or `room.module`; what others need of `room.package` it re-exports:\n" + "\n".join(
        sorted(found)
    )


def test_an_open_package_is_one_that_others_need() -> None:
    assert OPEN_PACKAGES.keys() <= {module.rpartition(".")[0] for _, module in imports_from_outside()}


def test_no_private_name_is_imported_by_another_file() -> None:
    assert [f"{where}: {name}" for _, where, _, name in internal_imports() if re.match(r"_(?!_)", name)] == []


def test_what_benchmarks_examples_and_tests_import_is_there() -> None:
    """An import within a function fails only when that is called, which may be after hours of measuring."""
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for folder in (".ci", "benchmarks", "docs", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and re.match(r"fxmem(\.|$)", node.module or "")
        for alias in node.names
        if not hasattr(importlib.import_module(str(node.module)), alias.name)
        and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert missing == []


def test_no_two_public_classes_have_one_name() -> None:
    classes = (
        (node.name, module)
        for module, path in MODULES.items()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert repeated(classes) == {}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


@cache
def words() -> dict[str, set[str]]:
    """By dotted name of a module, or name of a class, the names in its code."""
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        tree = tree_of(path)
        for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
            fields = (getattr(node, field, None) for node in ast.walk(scope) for field in ("id", "attr", "name", "arg"))
            found.setdefault(getattr(scope, "name", module), set()).update(filter(None, fields))
        found.setdefault(module.rpartition(".")[0], set()).add(module.rpartition(".")[2])
    return found


def is_stale(name: str, module: str) -> bool:
    """Whether a dotted name in a docstring begins with something of the package, and leads nowhere."""
    parts = name.split(".")
    if parts[0] in words()[module] and parts[0] not in words():
        return False  # a variable, or another package
    for count in range(len(parts) - 1, 0, -1):
        start = ".".join(parts[:count])
        if homes := [each for each in words() if each == start or each.endswith(f".{start}")]:
            return not any(parts[count] in words()[each] for each in homes)
    return False


ENTRY_POINTS = {registry.group for registry in (EXPORTERS, PACKAGES, STRATEGIES, VIEWS)}


def test_what_a_docstring_names_is_there() -> None:
    assert is_stale("fxmem.memory.nothing", "fxmem.memory.budget")
    assert is_stale("Budget.nothing", "fxmem.memory.budget")
    assert not is_stale("Budget.keeps", "fxmem.memory.budget")
    found = []
    for module, path in MODULES.items():
        if not module.startswith("fxmem._torch"):  # where names are torch's own
            for line, text in docstrings(tree_of(path)):
                names = re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`", text)
                paths = re.findall(r"\b(?:fxmem|tests|docs|benchmarks|examples)/[\w./-]+\.\w+", text)
                stale = [name for name in names if not name.endswith(".py") and is_stale(name, module)]
                stale += [name for name in paths if not (ROOT / name).exists()]
                stale = [name for name in stale if name not in ENTRY_POINTS]
                found += [f"{path.relative_to(ROOT)}:{line}: {name}" for name in stale]
    assert not found, "named in a docstring, but not there:\n" + "\n".join(found)


PROCESS_STATE = {
    "fxmem/_torch/distributed.py: _RESULTS": "a cache of what operators on a mesh return, the same for every run",
    "fxmem/_torch/fakes.py: _shared_tables": "a cache of fake kernels' results, the oldest first to go",
    "fxmem/hardware/operators/registry.py: OPERATORS": "the rows of operators, filled when the package is imported",
    "fxmem/hardware/operators/registry.py: _BY_PREFIX": "the rows of whole groups of operators, filled likewise",
    "fxmem/memory/allocator/peak.py: _known": "what loops were replayed to; each goes with its profile",
    "fxmem/memory/findings/__init__.py: _known": "what was found in timelines; each goes with its timeline",
    "fxmem/records/pause_gc.py: _rest": "who is within `pause_gc`; the last to leave turns the collector on again",
    "fxmem/simulation/kernels/kernel_settings.py: _CUDNN": "cuDNN's version in this context, reset where it was set",
    "fxmem/simulation/kernels/card_emulation.py: _active": "the cards entered on this thread; each leaves when it ends",
    "fxmem/simulation/kernels/card_emulation.py: _last": "the last card's generation: another makes torch forget",
    "fxmem/simulation/kernels/inner_ops.py: COMPOSITES": "operators that run as others, filled when they are imported",
    "fxmem/simulation/kernels/fake_kernels.py: EVERYWHERE": "kernels for every device, filled when it is imported",
    "fxmem/simulation/kernels/fake_kernels.py: FAKE_KERNELS": "kernels for cards, filled when it is imported",
    "fxmem/simulation/kernels/fake_kernels.py: _passing": "what checks of data answer; restored where it was changed",
    "fxmem/simulation/kernels/subclass_ways.py: _linear_runs": "the calls of `linear` that run, till each ends",
    "fxmem/simulation/asked/known_values.py: _factory_calls": "a cache of which calls make known values",
    "fxmem/simulation/code/source_lines.py: _libraries": "libraries' modules; another of the name takes one's place",
    "fxmem/simulation/processes/fork.py: _turn": "which thread analyses; released when it is done",
    "fxmem/simulation/program/recorded_program.py: _active": "the recording under way; leaves when it ends",
}
"""All that the process keeps between calls, what it is, and who empties it. The lock guards it, or it is a thread's."""


def process_state(tree: ast.Module) -> Iterator[str]:
    """Names of a module that are bound to something which changes: an empty or lower-case collection, an object of the
    module's own, a context variable."""
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            value, made = node.value, dotted(node.value.func) if isinstance(node.value, ast.Call) else ""
            items = getattr(value, "elts", getattr(value, "keys", None))
            if (
                made == "ContextVar"
                or (name.islower() and made in own)
                or (isinstance(value, ast.List | ast.Dict | ast.Set) and (not items or name.islower()))
            ):
                yield name


def test_what_the_process_keeps_is_listed() -> None:
    assert list(process_state(ast.parse("_a = []\n_B: dict[int, int] = {}\n_C = [1]\n__all__ = ['x']"))) == [
        "_a",
        "_B",
        "__all__",
    ]
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in process_state(tree_of(path))
        if name != "__all__"
    }
    assert found <= PROCESS_STATE.keys(), "keep it in an object that ends with its work, or say here what empties it"


def test_the_linter_bounds_lines_branches_and_arguments() -> None:
    ruff = PYPROJECT["tool"]["ruff"]
    assert (ruff["line-length"], ruff["lint"]["mccabe"]["max-complexity"], ruff["lint"]["pylint"]["max-args"]) == (
        120,
        15,
        8,
    )
    assert {"C901", "PLR0913", "E"} <= set(ruff["lint"]["select"])


def test_the_lines_of_the_rooms_are_all_lines() -> None:
    head, *rooms, total = python(".ci/lines.py", "fxmem").stdout.splitlines()
    assert head.split() == ["room", "files", "lines", "code", "tokens"]
    assert {row.split()[0].split("/")[0] for row in rooms} == {*ROOMS, "__init__.py", "__main__.py", "errors.py"}
    lines = [int(row.split()[2].replace(",", "")) for row in (*rooms, total)]
    counted = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES)
    assert (sum(lines[:-1]), lines[-1]) == (counted, counted)


def test_more_lines_than_the_wall_fail(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "module.py").write_text('"""Words."""\n\n# why\nx = [\n    1,\n]\ny = 2\n')
    enough = python(".ci/lines.py", str(tmp_path), "--most", "4")
    assert (enough.returncode, enough.stdout.splitlines()[1].split()) == (0, ["room", "1", "7", "4", "9"])
    more = python(".ci/lines.py", str(tmp_path), "--most", "3")
    assert more.returncode == 1
    assert more.stderr == "expected at most 3 lines of code (pyproject.toml, tool.house), got 4\n"


MOST_ATTRIBUTES = 25
"""Of an object, whichever method makes them; one with more has several trades."""


def test_there_is_one_recording_and_no_object_of_many_trades() -> None:
    recordings, crowded = [], []
    for path in SOURCES:
        tree = tree_of(path)
        for each in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            recordings += [each.name] * ("Recording" in each.name)
            names = {
                node.attr
                for node in ast.walk(each)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            }
            crowded += [f"{each.name}: {len(names)}"] * (len(names) > MOST_ATTRIBUTES)
    assert recordings == ["Recording"]
    assert not crowded


# --- what is declared and pinned ----------------------------------------------------------------------------------


def package(requirement: str) -> str:
    """Name of the package a requirement asks for."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def declared() -> dict[str, list[str]]:
    """Name of each list of dependencies to its packages."""
    project = PYPROJECT["project"]
    lists = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    return {name: [package(requirement) for requirement in requirements] for name, requirements in lists.items()}


def test_every_dependency_says_why() -> None:
    project = PYPROJECT["project"]
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    for requirement in (
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ):
        assert any(re.fullmatch(rf'\s*"{re.escape(requirement)}",\s*# \S.*', line) for line in lines), requirement


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    trees = [tree_of(path) for path in SOURCES]
    imported = (
        {name.partition(".")[0] for tree in trees for _, name in imported_modules(tree)}
        - sys.stdlib_module_names
        - {"fxmem"}
    )
    needed, *optional = (
        {name.replace("-", "_") for name in declared()[each]}
        for each in ("dependencies", "dask", "mcp", "pytest", "serve", "zoo")
    )
    assert imported - set().union(*optional) == needed


def pinned() -> dict[str, str]:
    """Package and version to its block of constraints.txt."""
    blocks = re.findall(r"^([a-z0-9][\w.-]*==[^\s;\\]+)(.*(?:\n[ ].*)*)", CONSTRAINTS, flags=re.MULTILINE)
    return dict(blocks)


def test_everything_is_pinned_with_its_hashes() -> None:
    pins = pinned()
    assert all("--hash=sha256:" in block for block in pins.values())
    names = {pin.partition("==")[0] for pin in pins}
    assert {name for each in declared().values() for name in each} - {"fxmem"} <= names
    # Nothing but pins, hashes and comments: no options, hence no index.
    assert [
        line
        for line in CONSTRAINTS.splitlines()
        if not re.match(r"[a-z0-9][\w.-]*==|\s+--hash=sha256:[0-9a-f]{64}|\s*#", line)
    ] == []


def test_the_pins_name_no_place_and_no_local_build() -> None:
    assert re.findall(r".*(?:://|\bfile:|--\w*index|--find-links).*", CONSTRAINTS) == []
    assert [pin for pin in pinned() if "+" in pin] == []


def test_the_makefile_and_the_pins_agree_on_torch() -> None:
    (version,) = re.findall(
        r"^PINNED_TORCH := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert [pin for pin in pinned() if pin.startswith("torch==")] == [f"torch=={version}"]


# --- what must stand nowhere --------------------------------------------------------------------------------------

HIDDEN = (".ci", ".github", ".gitignore")
"""What is the repository's own though its name begins with a dot."""
UNWANTED = {
    "a path on somebody's machine": r"(?<![\w.:])/(?:home/(?!user/)|root/|work/|Users/)",
    "the host of a package index": r"\bpypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org",
    "a mark of unfinished work": r"\b(?:TO(?:DO)|FIX(?:ME)|X(?:XX))\b",
}


def files() -> list[Path]:
    """What git has or would take; where there is no git, every file outside the tools' hidden folders."""
    asked = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(asked, capture_output=True, check=False)
    except FileNotFoundError:
        listed = None
    if (ROOT / ".git").exists() and listed is not None and listed.returncode == 0:
        return sorted(ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name)
    return sorted(
        path
        for path in ROOT.rglob("*")
        if all(not part.startswith((".", "__pycache__")) or part in HIDDEN for part in path.relative_to(ROOT).parts)
    )


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file of the repository."""
    for path in files():
        if path.is_file():
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a picture or another binary file


@pytest.mark.parametrize("what", UNWANTED)
def test_nowhere_is_there(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:160]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(UNWANTED[what], line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_files_that_git_ignores_are_nobodys_business() -> None:
    named = {str(path.relative_to(ROOT)) for path in files()}
    assert {"README.md", "fxmem/__init__.py", ".ci/run"} <= named
    assert not [name for name in named if "__pycache__" in name or name.startswith((".venv", ".git/"))]
