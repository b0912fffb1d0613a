"""Every command and every piece of Python in README and docs/ runs, and prints what the page shows.

README shows the pinned release of torch, which is what `make demo` brings: `make sample` runs it. The other pages show
the newest, which is what `pip install` brings: `make sample TORCH=latest`. `FXMEM_UPDATE=1` writes into the pages what
is printed now.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import HOME, PAGES, ROOT, Reader, blocks, expand, of_torch, shown_torch

pytestmark = pytest.mark.truth

WITH_BLOCKS = [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for one page, which is left behind empty of modules; its name is as long as the one in the pages."""
    path = Path(tempfile.mkdtemp(prefix="fxmem-", dir="/tmp"))
    assert len(str(path)) == len(HOME)
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("COLUMNS", "88")
    loaded = set(sys.modules)
    yield path
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(path)):
            del sys.modules[name]
    shutil.rmtree(path)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=str(page.relative_to(ROOT)), marks=of_torch(shown_torch(page))) for page in WITH_BLOCKS],
)
def test_what_a_page_shows_is_what_is_printed(page: Path, folder: Path) -> None:
    text, reader = page.read_text(encoding="utf-8"), Reader(folder)
    for block in blocks((ROOT / "docs/tutorial.md").read_text(encoding="utf-8")):
        if block.title:  # the guides go on with the tutorial's files
            (folder / block.title).write_text(block.text, encoding="utf-8")
    now = reader.rewrite(text)
    if os.environ.get("FXMEM_UPDATE"):
        page.write_text(now, encoding="utf-8")
    else:
        assert now == text


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("a\nb\n", "a\nc\n", "a\nc\n"),
        ("...\nPeak 1\n...\n", "x\nPeak 2\ny\nz\n", "...\nPeak 2\n...\n"),
        ("x\n...\nPeak 1\nb\n", "x\ny\nPeak 2\nc\n", "x\n...\nPeak 2\nc\n"),
        ("...\nPeak 1\n", "x\ny\n", "x\ny\n"),
    ],
)
def test_lines_that_a_page_leaves_out_stay_out(shown: str, printed: str, expected: str) -> None:
    assert expand(shown, printed) == expected


def test_a_block_that_no_test_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no test runs"):
        Reader(tmp_path).rewrite("```rust\nfn main() {}\n```\n")
    with pytest.raises(AssertionError, match="nothing printed"):
        Reader(tmp_path).rewrite("```text\nmade up\n```\n")


def test_output_that_is_made_up_is_found(tmp_path: Path) -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert Reader(tmp_path).rewrite(page) == page.replace("3", "2")
