"""Which cuDNNs stand for a release of torch, and how one is fetched. No index is asked: the installer is a stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.hardware.catalogue import target
from fxmem.hardware.workspaces import CudnnLibrary, cudnn_client, fetch_cudnn, find_built, list_cudnns

RTX3060, V100 = target("rtx3060"), target("v100")
INSTALLED = CudnnLibrary(version="9.19.0", cuda_major=13, libraries=())


def put(folder: Path, version: str) -> None:
    """Lay out what an installed wheel looks like."""
    lib = folder / "nvidia" / "cudnn" / "lib"
    lib.mkdir(parents=True)
    (lib / "libcudnn.so.9").touch()
    (folder / f"nvidia_cudnn_cu12-{version}.dist-info").mkdir()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cudnn_client, "find_cudnn", lambda: INSTALLED)
    return tmp_path / "cudnn"


def versions(found: tuple[CudnnLibrary, ...]) -> list[str]:
    return [each.version for each in found]


def test_a_version_that_is_at_hand_is_asked_alone_and_else_all_the_nearest_first(home: Path) -> None:
    assert versions(list_cudnns("9.1.0", RTX3060)) == ["9.19.0"]
    put(home / "9.10", "9.10.2.21")
    put(home / "9.8", "9.8.0.87")
    assert versions(list_cudnns("9.1.0", RTX3060)) == ["9.8.0", "9.10.2", "9.19.0"]
    assert versions(list_cudnns("9.20.0", RTX3060)) == ["9.19.0", "9.10.2", "9.8.0"]
    assert versions(list_cudnns("9.10.2", RTX3060)) == ["9.10.2"]


def test_a_card_that_a_build_has_no_kernels_for_is_answered_by_one_that_has(home: Path) -> None:
    assert versions(list_cudnns("9.1.0", V100)) == ["9.19.0"]  # for want of a better one
    assert find_built(V100) == ()
    put(home / "9.10", "9.10.2.21")
    assert versions(list_cudnns("9.1.0", V100)) == versions(find_built(V100)) == ["9.10.2"]
    assert find_built(RTX3060) == ()


def test_fetching_installs_into_a_folder_of_its_own_and_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        put(Path(command[command.index("--target") + 1]), "9.8.0.87")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_cudnn("9.8").version == fetch_cudnn("9.8.0.87").version == "9.8.0"
    assert [command[-1] for command in commands] == ["nvidia-cudnn-cu12==9.8.*"]
    assert [folder.name for folder in home.iterdir()] == ["9.8"]
    put(home / "9.10.part", "9.10.2.21")  # whose fetch was killed
    assert versions(list_cudnns("9.10.2", RTX3060)) == ["9.8.0", "9.19.0"]
    # Who looks for a module `pip` has setuptools leave distutils to Python; inductor imports setuptools.
    hack = pytest.importorskip("_distutils_hack")
    assert "spec_for_distutils" not in vars(hack.DISTUTILS_FINDER)


@pytest.mark.parametrize(
    ("version", "code", "message"),
    [
        ("9.3", 0, "expected a version of cuDNN from 9.8 on, got '9.3'"),
        ("newest", 0, "expected a version of cuDNN from 9.8 on, got 'newest'"),
        ("9.99", 1, r"did not give nvidia-cudnn-cu12==9\.99\.\*: no such version"),
        ("9.12", 0, r"expected cuDNN 9\.12 from nvidia-cudnn-cu12==9\.12\.\*, got 9\.8\.0"),
    ],
)
def test_what_cannot_be_fetched_is_said_and_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, version: str, code: int, message: str
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        put(Path(command[command.index("--target") + 1]), "9.8.0.87")
        return subprocess.CompletedProcess(command, code, "", "looking\nno such version\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UsageError, match=message):
        fetch_cudnn(version)
    assert not home.exists() or not list(home.iterdir())


def test_without_a_folder_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXMEM_CACHE_DIR", "")
    with pytest.raises(EnvironmentLacksError, match="no folder to keep it in"):
        fetch_cudnn("9.8")
