"""Plug-ins by name: fxmem's own are found by their files, others by registering or by an entry point."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from fxmem.errors import UsageError
from fxmem.planning import STRATEGIES
from fxmem.records.registry import CAUSES, Registry


def registry() -> Registry[object]:
    return Registry("strategy", "fxmem.planning.regions.strategies", "fxmem.planners")


def test_own_plugins_are_named_by_their_files_and_described_by_their_first_line() -> None:
    assert {"auto", "flat", "mincut"} <= set(registry())
    assert list(registry()) == sorted(registry())
    assert registry().briefs["flat"] == "optimal under one level of regions with any borders"
    assert CAUSES.briefs["ddp-buckets"].startswith("DDP has ")


def test_every_own_plugin_registers_itself_under_its_files_name() -> None:
    assert [STRATEGIES.get(name).name for name in STRATEGIES.briefs] == list(STRATEGIES.briefs)


def test_names_are_known_without_importing_a_plugin() -> None:
    code = """if True:
        import sys
        from fxmem.records.registry import CAUSES, Registry
        assert "flat" in Registry("strategy", "fxmem.planning.regions.strategies", "fxmem.planners")
        print(sorted({"pydantic", "numpy", "torch", "importlib.metadata"} & sys.modules.keys()))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_registered_is_found_and_no_name_is_taken_twice() -> None:
    own = registry()
    own.register("mine", 1)
    assert own.get("mine") == 1
    assert list(own)[-1] == "mine"
    with pytest.raises(UsageError, match="expected a new name for a strategy, got 'mine'"):
        own.register("mine", 2)


def test_a_name_of_fxmems_own_is_taken_even_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fxmem.planning.regions.strategies.flat", raising=False)
    with pytest.raises(UsageError, match="'flat', which another one has"):
        registry().register("flat", 1)


def test_an_entry_point_of_another_package_registers_its_plugin_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = registry()

    class Declared(EntryPoint):
        def load(self) -> None:
            own.register(self.name, "loaded")

    found = EntryPoints((Declared("theirs", "their.module", "fxmem.planners"), Declared("other", "a", "fxmem.views")))
    monkeypatch.setattr("fxmem.records.registry._read_entry_points", lambda: found)
    assert "theirs" in own
    assert list(own)[-1] == "theirs"
    assert own.get("theirs") == "loaded"


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"expected strategy to be one of auto, chen, .*; got 'cube'"):
        registry().get("cube")
