"""Which modules are the program's own, and which have a function by name: also after others were seen before."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fxmem.simulation.code.source_lines import find_holders, program_modules

INSTALLED = Path(torch.__file__).parents[1]


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, folder: Path, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names, __file__=str(folder / f"{name}.py"))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_a_module_of_the_programs_own_that_takes_a_librarys_name_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded(monkeypatch, "made_up", INSTALLED)
    assert "made_up" not in dict(program_modules())
    own = loaded(monkeypatch, "made_up", tmp_path)
    assert dict(program_modules())["made_up"] is vars(own)
    loaded(monkeypatch, "made_up", INSTALLED)
    assert "made_up" not in dict(program_modules())


def test_who_imports_a_function_by_name_later_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def save() -> None:
        pass

    library = loaded(monkeypatch, "made_up_library", INSTALLED)
    own = loaded(monkeypatch, "made_up_program", tmp_path, keep=None)
    assert find_holders([save]) == find_holders([save]) == []
    library.store, own.keep = save, save  # type: ignore[attr-defined]
    for _ in range(2):
        assert find_holders([save]) == [(library, "store", save), (own, "keep", save)]
