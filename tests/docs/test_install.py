"""What others install from says what pyproject.toml says, and the workflow that publishes checks what it is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import fxmem
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = yaml.safe_load((ROOT / "docs/install/recipe.yaml").read_text(encoding="utf-8"))
STEPS = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8"))["jobs"]["build"]["steps"]
OF_CONDA = {"torch": "pytorch", "graphviz": "python-graphviz"}
"""Packages that conda-forge has by another name."""


def test_the_recipe_says_what_the_package_says() -> None:
    context = RECIPE["context"]
    assert context == {"version": fxmem.__version__, "python_min": PROJECT["requires-python"].removeprefix(">=")}
    python, *others = RECIPE["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    names = [re.fullmatch(r"([a-z0-9-]+)(.*)", each) for each in PROJECT["dependencies"]]
    assert others == [f"{OF_CONDA.get(name[1], name[1])} {name[2]}".strip() for name in names if name]
    assert RECIPE["build"]["python"]["entry_points"] == [f"{name} = {at}" for name, at in PROJECT["scripts"].items()]
    assert (RECIPE["about"]["summary"], RECIPE["about"]["license"]) == (PROJECT["description"], PROJECT["license"])


def test_the_container_file_names_extras_that_exist() -> None:
    text = (ROOT / "docs/install/Dockerfile").read_text(encoding="utf-8")
    (chosen,), (others,) = (
        re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE),
        re.findall(r"Others: (.*)\.$", text, re.M),
    )
    assert {*chosen.split(","), *others.split(", ")} == PROJECT["optional-dependencies"].keys() - {"dev", "docs"}


def publish(step: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the step of the workflow whose name begins so, in a folder."""
    (found,) = [each["run"] for each in STEPS if each.get("name", "").startswith(step)]
    given = {**os.environ, "VERSION": fxmem.__version__, "GITHUB_REF": f"refs/tags/v{fxmem.__version__}", **environment}
    return subprocess.run(
        ["bash", "-e", "-c", found], cwd=folder, env=given, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("environment", "code"), [({}, 0), ({"VERSION": "0.0.0"}, 1), ({"GITHUB_REF": "refs/heads/main"}, 1)]
)
def test_only_the_tag_of_the_version_that_was_typed_is_published(environment: dict[str, str], code: int) -> None:
    done = publish("Hold what was typed", ROOT, **environment)
    assert done.returncode == code, done.stdout + done.stderr


def test_the_page_on_the_index_leads_to_the_repository(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = publish("Name the repository", tmp_path, GITHUB_SERVER_URL="https://host", GITHUB_REPOSITORY="them/fxmem")
    assert done.returncode == 0, done.stderr
    readme, tag = (tmp_path / "README.md").read_text(encoding="utf-8"), f"v{fxmem.__version__}"
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", readme)
    assert targets
    for link, picture in targets:
        assert (link or picture).startswith(
            (f"https://host/them/fxmem/blob/{tag}/", f"https://host/them/fxmem/raw/{tag}/")
        )
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert urls["Repository"] == "https://host/them/fxmem"
