"""Settings that every test shares, made before anything imports torch."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fxmem.records.pause_gc import freeze_gc, pause_gc

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # several workers run side by side; one thread each leaves no core fought over
# For the same reason an analysis has one core (joblib reads this), but for some tests (`two_cores`): a fork that works
# for a fraction of a second takes as long again to copy what a process of tests has in memory.
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")
# Each process that compiles for the CPU would build programs to learn whether vectors work that the CPU says it has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on the network
# A shell has what it runs in the background ignore SIGINT, and all that this starts would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and none judged by the clock.
settings.register_profile("fxmem", derandomize=True, deadline=None, database=None)
settings.load_profile("fxmem")


LONGEST = (
    *("benchmarks/test_published.py", "simulation/step/generation/test_generate.py", "benchmarks/test_zoo.py"),
    *("examples/test_examples.py", "simulation/ranks/test_gloo.py", "validation/test_cpu_truth.py"),
    *("checkpointing/test_models.py", "checkpointing/test_frameworks.py", "whatif/advice/test_advise.py"),
    *(
        "simulation/recording/compiled/test_truth.py",
        "simulation/recording/compiled/test_programs.py",
        "benchmarks/test_accuracy.py",
    ),
    *("simulation/program/test_rollouts.py", "simulation/processes/sandbox/test_files.py", "cli/test_subjects.py"),
    *("simulation/ranks/test_pipelines.py", "simulation/program/test_evaluations.py", "extension/test_extension.py"),
    *("simulation/program/test_host_memory.py", "simulation/ranks/test_compiled.py", "whatif/test_verified_plan.py"),
    *("validation/test_fuzz.py", "cli/tools/test_mcp.py", "whatif/test_max_batch.py", "memory/test_lengths.py"),
)
"""Modules of the long tests that are begun first, so that none of them is what the others' processes wait for."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m truth` leave modules out that have no long test, with `-m "not truth"` those that have no other."""
    chosen = config.option.markexpr
    if chosen not in ("truth", "not truth") or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if chosen == "truth":
        return "truth" not in text or None
    return bool(re.search(r"^pytestmark = \[?pytest\.mark\.truth\b", text, re.MULTILINE)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all modules of tests, and all that they import, without looking for garbage among it again and again."""
    with pause_gc(stays=True):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest modules first, and each in its own order."""
    place = {f"tests/{name}": index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_collectstart() -> None:
    """Before any module of tests is imported."""
    _run_backward()


@functools.cache
def _run_backward() -> None:
    """Run autograd's engine once, while torch knows of no card.

    It counts the devices that once. Of the stand-in for CUDA's device guard, which the first FakeTensorMode makes,
    there are eight, each with a thread of the engine (`Engine::start_device_threads`, torch/csrc/autograd/engine.cpp);
    no fork of a process with such threads runs backward, and every program of a later test would run in a new Python.
    """
    import torch

    if not torch.cuda.is_available():
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


@pytest.fixture
def others_frozen() -> Iterator[None]:
    """What collects, or looks at all objects, looks at those of the test alone: in the gate there are a million."""
    with freeze_gc():
        yield


@pytest.fixture(autouse=True)
def _others_are_unseen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has the modules of its test alone: other tests have names like its own, and much to look through."""
    if "fxmem.simulation.recording.residents" not in sys.modules:
        return
    from fxmem.simulation.code import round_rule, source_lines
    from fxmem.simulation.recording import residents

    find_all, folder = source_lines.program_modules, f"{Path(__file__).parent}{os.sep}"
    own = {"bounded_meter", "causing", "growing", request.path.stem}

    def find() -> list[tuple[str, dict[str, Any]]]:
        found = []
        for name, scope in find_all():
            if not scope["__file__"].startswith(folder) or Path(scope["__file__"]).stem in own:
                found.append((name, scope))  # a comprehension would have a frame of its own
        return found

    # A frame of this file would be the program's, and where it was when its memory rose.
    find.__code__ = find.__code__.replace(co_filename=source_lines.__file__)
    monkeypatch.setattr(source_lines, "program_modules", find)
    monkeypatch.setattr(residents, "program_modules", find)
    monkeypatch.setattr(round_rule, "program_modules", find)


@pytest.fixture(scope="session")
def compiler() -> Iterator[None]:
    """Dynamo and inductor, imported: forks of this process have them, each of which would take three seconds for them.

    To import inductor, as `torch.compile` does where it is first called, warns of what it uses itself, too.
    """
    from fxmem._torch.compiler import dynamo as torch_dynamo  # after the settings above
    from tests.simulation.recording.compiled.real import believe_the_cpu

    torch_dynamo.load_compiler()
    with believe_the_cpu():
        yield


@pytest.fixture(autouse=True)
def _added_plugins_are_forgotten() -> Iterator[None]:
    """What a test registers. What of fxmem's own it was the first to import stays: no second import registers that."""
    from fxmem.records.registry import CAUSES, EXPORTERS, PACKAGES, STRATEGIES

    registered = [(each, set(each)) for each in (CAUSES, EXPORTERS, PACKAGES, STRATEGIES)]
    yield
    for registry, names in registered:
        for name in set(registry) - names:
            del registry._registered[name]


class _WokenError(Exception):
    """Torch asked for the card to be woken."""


@pytest.fixture(autouse=True)
def _card_sleeps() -> Iterator[None]:
    """After every test torch still knows that no card works: what asks for one wakes it first.

    `device_lazy_init` (torch/csrc/utils/device_lazy_init.cpp) keeps in C++ that a card has been woken, where nothing
    restores it; threads of a program then reach the driver, and no line of fxmem.
    """
    import torch  # after the settings above

    yield

    def wake() -> Any:
        raise _WokenError

    if torch.cuda.is_available():
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "_lazy_init", wake)
        with pytest.raises(_WokenError):
            torch.ones(1).to("cuda")
