"""What the environment is said to have and to lack. Whatever is really installed here, every case is made by hand."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxmem.cli import environment
from fxmem.hardware import catalogue
from fxmem.hardware.workspaces.cudnn_client import CudnnLibrary, Workspace
from tests import ROOT

GIB = 1 << 30


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cuDNN to ask and nothing of this machine's: tests that want one bring their own."""

    def no_cudnn() -> CudnnLibrary:
        raise LookupError("cuDNN is not installed (package nvidia-cudnn-cu13)")

    monkeypatch.setattr(environment, "find_cudnn", no_cudnn)
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "91")


def lines() -> dict[str, str]:
    """Each label of the report to its line."""
    found = [re.fullmatch(r"(\S+) +(.*)", line) for line in environment.report().splitlines()]
    assert all(found)
    return {match[1]: match[2] for match in found if match}


def test_one_plain_line_of_at_most_80_columns_for_each_thing() -> None:
    text = environment.report()
    assert list(lines()) == [
        "fxmem",
        "Python",
        "torch",
        "GPU",
        "cuDNN",
        "torchvision",
        "timm",
        "transformers",
        "Drawing",
        "Cache",
        "Terminal",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert text.replace("\n", "").isprintable()


def test_long_news_are_cut_to_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.0\x1b[31m" + "x" * 200)
    assert [
        len(line)
        for line in environment.report().splitlines()
        if line.startswith(("torchvision", "timm", "transformers"))
    ] == [80] * 3
    assert "\x1b" not in environment.report()


def test_importing_it_imports_no_torch() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import sys, fxmem.cli.environment; print(fxmem.cli.environment.catalogue()); sys.exit('torch' in "
                "sys.modules)"
            ),
        ],
        check=False,
    )
    assert done.returncode == 0


def test_the_oldest_torch_is_the_one_that_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={'.'.join(map(str, environment.OLDEST_TORCH))}" in project["dependencies"]


# --- torch and the GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "cuda", "said"),
    [
        ("2.11.0+cu130", "13.0", "2.11.0+cu130, built with CUDA 13.0: every target"),
        ("2.11.0+cpu", None, "2.11.0+cpu has no CUDA: only --target cpu, or torch's CUDA wheel"),
        ("2.9.1+cu126", "12.6", '2.9.1+cu126 is too old: pip install "torch>=2.11"'),
        ("3.0.0a0+git1234", "14.1", "3.0.0a0+git1234, built with CUDA 14.1: every target"),
    ],
)
def test_torch(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, said: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert lines()["torch"] == said


def without_torch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise error
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_torch_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    monkeypatch.setattr(environment.util, "find_spec", lambda _: None)
    assert lines()["torch"] == "missing: pip install torch; without it only reports can be shown"
    assert lines()["GPU"] == "not known without torch"


def test_torch_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch, OSError("libcudart.so.13: cannot open\nshared object file"))
    assert lines()["torch"] == "cannot be imported: OSError: libcudart.so.13: cannot open shared.."


def card(monkeypatch: pytest.MonkeyPatch, name: str, nbytes: int, count: int = 1) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name, total_memory=nbytes))


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lines()["GPU"] == "none found; no prediction needs one"


def test_a_gpu_comes_with_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "NVIDIA H200", 140 * GIB, count=8)
    assert lines()["GPU"] == "NVIDIA H200, 140.0 GiB, and 7 more: --target h200"


def test_a_gpu_nobody_has_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "NVIDIA Z1", 12 * GIB)
    assert lines()["GPU"] == "NVIDIA Z1, 12.0 GiB: not in the catalogue, write a target file"


def test_a_gpu_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA driver\ninitialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert lines()["GPU"] == "cannot be asked: RuntimeError: CUDA driver initialization failed"


# --- cuDNN, the collections, the cache, the terminal ----------------------------------------------------------------


def test_no_cudnn() -> None:
    assert lines()["cuDNN"] == "cuDNN is not installed (package nvidia-cudnn-cu13); estimating"


@pytest.mark.parametrize(
    ("version", "source", "note", "said"),
    [
        ("9.19.0", "cudnn 9.19.0", "", "9.19.0, asked for convolution workspaces"),
        ("", "cache", "", "of unknown version, asked for convolution workspaces"),
        ("9.19.0", "estimate", "no libcublasLt", "9.19.0 does not answer; estimating: no libcublasLt"),
    ],
)
def test_cudnn(monkeypatch: pytest.MonkeyPatch, version: str, source: str, note: str, said: str) -> None:
    library = CudnnLibrary(version=version, cuda_major=13, libraries=())
    monkeypatch.setattr(environment, "find_cudnn", lambda: library)
    monkeypatch.setattr(
        environment,
        "conv_workspaces",
        lambda asked, card, library: {each: Workspace(nbytes=0, source=source, note=note) for each in asked},
    )
    assert lines()["cuDNN"] == said


def test_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "timm":
            raise metadata.PackageNotFoundError(package)
        return "1.2.3"

    monkeypatch.setattr(metadata, "version", version)
    said = lines()
    assert said["torchvision"] == "1.2.3: models torchvision:NAME"
    assert said["timm"] == 'missing: pip install "fxmem[zoo]" for models timm:NAME'
    assert said["transformers"] == "1.2.3: models hf:ORG/NAME"


def test_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert lines()["Cache"].endswith("cache: nothing in it yet")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cudnn-a.json").write_bytes(b"12345")
    assert lines()["Cache"].endswith("cache: 1 file, 5 B")
    (tmp_path / "cache" / "cudnn-b.json").write_bytes(b"1234567")
    assert lines()["Cache"].endswith("cache: 2 files, 12 B")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lines()["Cache"] == "~/cache: 2 files, 12 B"
    monkeypatch.setenv("FXMEM_CACHE_DIR", "")
    assert lines()["Cache"] == "off: FXMEM_CACHE_DIR is empty, or there is no home directory"


def test_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert lines()["Terminal"] == "91 columns, colour off: stdout is no terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert lines()["Terminal"] == "91 columns, colour off: the terminal is dumb"
    monkeypatch.setenv("TERM", "xterm")
    assert lines()["Terminal"] == "91 columns, colour on"
    monkeypatch.setenv("NO_COLOR", "1")
    assert lines()["Terminal"] == "91 columns, colour off: NO_COLOR is set"


# --- the catalogue --------------------------------------------------------------------------------------------------


def test_the_catalogue_names_every_target() -> None:
    heading, *rows = environment.catalogue().split("\n\n")[0].splitlines()
    assert heading.split() == ["Target", "Memory", "Capability", "Full", "name"]
    assert [row.split()[0] for row in rows] == list(catalogue.names())
    # 84,942,979,072 / 2**30 = 79.1
    assert "h100          79.1 GiB         9.0  NVIDIA H100 80GB HBM3" in rows
    assert "cpu                  -           -  CPU" in rows


def test_the_catalogue_fits_80_columns() -> None:
    assert max(map(len, environment.catalogue().splitlines())) <= 80


def test_the_example_of_a_target_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(environment.catalogue().partition("e.g.")[2], encoding="utf-8")
    assert catalogue.load_target(path).capability == (8, 9)
