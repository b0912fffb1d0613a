"""`fxmem validate --share`: what stands in the file, and that nothing else can."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.cli import share
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import validate
from fxmem.records.shared import SharedMachine, SharedSettings, SharedVerdict
from fxmem.records.validation import Machine
from fxmem.simulation.stand_ins import hub_models

MODEL = """
import torch

class Sesame(torch.nn.Linear):
    def forward(self, cave):
        return super().forward(cave)

def build(treasure=3):
    return Sesame(3, treasure)

def gold(out):
    return out.square().mean()
"""
COMMAND = ["validate", "own.py:build", "--input", "cave:2x3", "--quiet", "--share", "mine.json"]
SECRETS = ("own", "esame", "treasure", "cave", "gold", "build", ".py", "/")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(MODEL, encoding="utf-8")
    return tmp_path


def shared(folder: Path) -> SharedVerdict:
    return SharedVerdict.model_validate_json((folder / "mine.json").read_text(encoding="utf-8"))


def options(*words: str) -> argparse.Namespace:
    return Parser().add_arguments(validate.ARGUMENTS).parse_args(words)


def test_a_model_of_the_users_own_has_no_name_in_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--set", "treasure=5", "--loss", "own.py:gold", "--optimizer", "sgd"]) == 0
    out = capsys.readouterr().out
    assert "path, host or user, no name of yours; left out: --set, --loss. Nothing was sent." in out
    assert "benchmarks/published/shared" in out
    text = (folder / "mine.json").read_text(encoding="utf-8")
    assert [each for each in (*SECRETS, platform.node(), str(folder)) if each in text] == []
    found = shared(folder)
    assert (found.subject, found.model, found.library_version, found.inputs) == ("model", None, None, ("2x3:float32",))
    assert (found.settings.optimizer, found.settings.loss, found.settings.settings) == ("sgd", None, ())
    assert found.left_out == ("--set", "--loss")
    assert found.machine.device == "cpu"
    assert found.within_tolerance
    figures = {each.quantity: each for each in found.comparisons[0]}
    assert figures[found.judged].predicted_bytes == figures[found.judged].measured_bytes


def test_a_miss_is_written_too_and_the_file_may_be_written_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # AdamW's own scalars are more than 1 % of so small a step
        assert main([*COMMAND, "--json", "-"]) == 4
        assert not json.loads(capsys.readouterr().out)["within_tolerance"]
        assert not shared(folder).within_tolerance
    assert sorted(each.name for each in folder.iterdir() if each.suffix) == ["mine.json", "own.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--share", "no/mine.json"], "expected --share to name a file in a folder that exists"),
        (["--share", "mine.txt"], "expected --share to name a file that ends in .json"),
        (["--share", "package.json"], "expected --share to name a new file, or one that --share wrote, got 'package."),
        (["--share", "broken.json"], "no JSON"),
        (["--share", "."], "expected --share to name a file that ends in .json"),
        (["--share", "both.json", "--json", "both.json"], "got 'both.json' for --json, too"),
    ],
)
def test_a_file_that_cannot_be_written_or_is_another_s_is_refused_before_the_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (folder / "package.json").write_text('{"name": "mine"}', encoding="utf-8")
    (folder / "broken.json").write_text("{", encoding="utf-8")
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    monkeypatch.setattr(validate, "_validate_step", lambda *_: pytest.fail("the step was run"))
    assert main([*COMMAND[:-2], *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


def test_a_model_is_public_only_where_everybody_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = folder / "hub" / "models--acme--secret" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}", encoding="utf-8")
    (folder / "local").mkdir()
    (folder / "local" / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    known = next(iter(hub_models.read_table()["models"]))
    names = ("torchvision:resnet18", "timm:vit_tiny_patch16_224", f"hf:{known}", "hf:LlamaForCausalLM")
    assert [each for each in names if not share._is_public(each)] == []
    own = ("own.py:build", "own:build", "hf:acme/secret", "hf:secret", "hf:local", "hf:path/config.json")
    assert [each for each in own if share._is_public(each)] == []


def test_settings_are_those_of_the_list_alone() -> None:
    typed = options("torchvision:resnet18", "--set", "num_classes=7", "--lora", "r=8,target=own", "--cudnn", "/srv/me")
    dests = ("settings", "lora", "cudnn", "optimizer")
    kept, refused = share._admit(SharedSettings, {dest: getattr(typed, dest) for dest in dests})
    assert (kept.settings, kept.optimizer, refused) == (("num_classes=7",), "adamw", ["cudnn", "lora"])
    for wrong in ("weights=/srv/x", "width=mine", "a.b=x"):
        assert share._admit(SharedSettings, {"settings": [wrong]})[1] == ["settings"]
    for own in ("own.mod:Adam", "own.py:Adam", "a/b:c"):
        assert share._admit(SharedSettings, {"optimizer": own})[1] == ["optimizer"]


def test_a_machine_says_nothing_of_its_owner() -> None:
    machine = Machine(
        device="cuda",
        name="NVIDIA RTX A6000",
        torch_version="2.11.0+acme",
        allocator_settings="expandable_segments:True,roundup_power2_divisions:[256:1,>:2]",
    )
    kept, refused = share._admit(SharedMachine, dict(machine))
    assert (kept.name, kept.torch_version, refused) == ("NVIDIA RTX A6000", None, ["torch_version"])
    assert kept.allocator_settings == machine.allocator_settings
    assert share._admit(SharedMachine, {**dict(machine), "allocator_settings": "backend:mine"})[1] == [
        "allocator_settings",
        "torch_version",
    ]


@pytest.mark.truth
def test_a_program_has_its_figures_step_by_step_and_no_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hideout.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(256, 512)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n"
        "    model(torch.ones(64, 256)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    command = ["validate", "--steps", "2", "--quiet", "--share", "mine.json", "--run", "hideout.py", "--word", "abc"]
    assert main(command) == 0
    text = (folder / "mine.json").read_text(encoding="utf-8")
    assert [each for each in ("hideout", "--word", "abc", str(folder)) if each in text] == []
    found = shared(folder)
    assert (found.subject, found.model, found.settings.steps, found.inputs) == ("program", None, 2, ())
    assert len(found.comparisons) == 2


def test_every_text_of_the_record_has_a_pattern_or_a_list() -> None:
    loose = []
    schema = SharedVerdict.model_json_schema()
    for name, each in [("", schema), *schema["$defs"].items()]:
        for field, value in each.get("properties", {}).items():
            forms = [value, *value.get("anyOf", ()), value.get("items", {})]
            if any(form.get("type") == "string" and not {"pattern", "enum", "const"} & set(form) for form in forms):
                loose.append(f"{name}.{field}")
    assert loose == [".schema_version"]
