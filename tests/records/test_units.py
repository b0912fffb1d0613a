"""Names as people read them."""

from __future__ import annotations

import pytest

from fxmem.records.profile import Kind, SourceLine
from fxmem.records.units import package_path, printable, to_words


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy/core.py"),
        ("/env/lib/python3.11/site-packages/timm/layers/mlp.py", "timm/layers/mlp.py"),
        (r"C:\env\Lib\site-packages\timm\layers\mlp.py", r"timm\layers\mlp.py"),
        ("/home/user/model.py", "/home/user/model.py"),
    ],
)
def test_an_installed_file_s_path_begins_at_its_package(file: str, shown: str) -> None:
    assert package_path(file) == shown
    assert SourceLine(file=file, line=7).place == f"{shown}:7"


def test_a_kind_in_words() -> None:
    assert to_words(Kind.OPTIMIZER_STATE) == "optimizer state"


@pytest.mark.parametrize("control", ["\x1b[31m", "\x9b31m", "\x9d0;title\x9c", "\u202e", "\r", "\x08"])
def test_nothing_that_a_terminal_obeys_is_printable(control: str) -> None:
    shown = printable(f"layer{control}")
    assert shown.startswith("layer\\")
    assert shown.isprintable()
