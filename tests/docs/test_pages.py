"""What the pages name exists, and they are laid out as the house's rules say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import docs.pictures as pictures
import fxmem
from tests.docs.pages import CHANGES, FENCE, NEWEST, PAGES, PINNED, ROOT, SKILL, of_torch, shown_torch, targets_of_make

RESULTS = [ROOT / "benchmarks/results" / f"{name}.md" for name in (
    "accuracy", "oom-messages", "plans-and-speed", "published", "scripts",
)]  # fmt: skip
"""What `docs/evidence.md` has the short form of; the others are written by benchmarks."""
TEXTS = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"))]
TEXTS += RESULTS
FOLDERS = "benchmarks|docs|examples|fxmem|schemas|skills|tests"
ROOMS = [path.name for path in (ROOT / "fxmem").iterdir() if (path / "__init__.py").exists()]

every_page = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@every_page
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})(?:/[\w.-]+)+/?)`", prose(page))
    named += [f"fxmem/{path}" for path in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)`", prose(page))]
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


@every_page
def test_a_module_is_described_once(page: Path) -> None:
    named = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted({*named})


@every_page
def test_every_link_between_files_leads_somewhere(page: Path) -> None:
    if page.is_relative_to(ROOT / "docs"):
        return  # `make docs` follows those, into the pages it makes as well
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", prose(page))]
    targets += re.findall(r'src="([^"]+)"', prose(page))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@every_page
def test_every_target_of_make_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`make\s+(?:-C\s+(\w+)\s+)?(?:[A-Z]+=\S+\s+)*([a-z-]+)", prose(page)))
    assert {(folder, target) for folder, target in named if target not in targets_of_make(folder)} == set()


@every_page
def test_lines_and_tables_are_narrow(page: Path) -> None:
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) > 120] == []
    assert [line for line in lines if line.startswith("|") and line.count("|") - line.count(r"\|") > 7] == []


@every_page
def test_a_table_follows_a_blank_line(page: Path) -> None:
    """Else a page shows its source."""
    assert not re.search(r"^[^|\n]+\n\|.*\n\| ?:?--", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    versions = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert versions[0] == fxmem.__version__


def test_a_change_is_one_line_in_a_file_named_by_its_kind() -> None:
    for path in set(CHANGES.iterdir()) - {CHANGES / "README.md"}:
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|removed|fixed)\.md", path.name), path.name
        (line,) = path.read_text(encoding="utf-8").splitlines()
        assert line.startswith("- "), path.name
        assert len(line) <= 120, path.name


@pytest.mark.parametrize(("page", "release"), [("README.md", PINNED), ("docs/tutorial.md", NEWEST)])
def test_a_page_says_which_torch_it_shows(page: str, release: str) -> None:
    assert shown_torch(ROOT / page) == release
    assert f"of torch {release}" in (ROOT / page).read_text(encoding="utf-8")


def test_the_readme_says_which_torch_its_pictures_show() -> None:
    assert f"pictures are of torch {NEWEST}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_screen_of_the_readme_says_how_to_begin() -> None:
    screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20]
    for command in ("make demo", "source .venv/bin/activate", "make test"):
        assert any(line.startswith(command) for line in screen), command


def test_every_page_has_its_place() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert set(re.findall(r"[\w/-]+\.md", nav)) - {"reference/command-line.md"} == {
        page.relative_to(ROOT if page == SKILL else ROOT / "docs").as_posix()
        for page in PAGES
        if page.name != "README.md"
    }


def test_every_module_of_records_that_defines_one_is_in_the_reference() -> None:
    shown = set(re.findall(r"::: fxmem\.records\.(\w+)", (ROOT / "docs/reference/records.md").read_text("utf-8")))
    modules = {
        path.stem
        for path in (ROOT / "fxmem/records").glob("*.py")
        if re.search(r"^class \w+\((?:\w*Record|BaseModel)\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert modules <= shown


@pytest.mark.parametrize("name", pictures.PLANS)
def test_the_picture_of_the_rooms_is_the_contract(name: str) -> None:
    package, texts = pictures.PLANS[name]
    drawn = (ROOT / "docs/images" / name).read_text(encoding="utf-8")
    assert drawn == pictures.rooms(package, texts), "run: make pictures"
    floors, _ = pictures.contract(package)
    assert {room for floor in floors for room in floor} == texts.keys()


def words(svg: str) -> list[str]:
    """The texts of a drawing, in their order."""
    return [text for element in ElementTree.fromstring(svg).iter() if (text := (element.text or "").strip())]


@of_torch(NEWEST)
def test_the_pictures_show_what_is_drawn_today(tmp_path: Path) -> None:
    pictures.main(tmp_path)
    for path in sorted((ROOT / "docs/images").glob("*.svg")):
        drawn = (tmp_path / path.name).read_text(encoding="utf-8")
        assert words(path.read_text(encoding="utf-8")) == words(drawn), "run: make pictures TORCH=latest"
