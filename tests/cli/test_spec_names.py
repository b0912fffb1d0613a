"""Misspelt names are refused before torch is imported, and no name that a library has is."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers

from fxmem.cli import spec_names
from fxmem.cli.spec_names import check_model, check_names
from fxmem.errors import UsageError
from fxmem.records.units import LOSSES
from fxmem.simulation.step.given import read_loss

WRONG = {
    "resnet50": r"got 'resnet50'; did you mean torchvision:resnet50\?",
    "resnt50": r"got 'resnt50'; did you mean torchvision:resnet50\?",
    "torchvision:resnet5O": "torchvision has no model 'resnet5O'; closest: .*resnet50",
    "timm:rexnet50": "timm has no model 'rexnet50'; closest: rexnet",
    "hf:LlamaForCausalML": "transformers has no model class 'LlamaForCausalML'; closest: LlamaForCausalLM",
    "hf:GPT2LMHeadModl": "closest: GPT2LMHeadModel",
    "modle.py:build": "no file modle.py; closest: model.py",
    "some model": "expected a model as .* got 'some model'$",
}


@pytest.mark.parametrize("spec", WRONG)
def test_a_misspelt_model(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=WRONG[spec]):
        check_model(spec)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("optimizer", "adamx", "expected an optimizer of torch.optim, got 'adamx'; closest: adamax, adam, radam"),
        (
            "optimizer",
            "lion",
            "got 'lion'; there are .*, sgd, sgd-momentum,.* or another package's: torchao:AdamW8bit, ",
        ),
        ("loss", "cee", "got 'cee'; or as ce, mse, bce or l1"),
        ("loss", "losses.py:fn", "no file losses.py"),
    ],
)
def test_a_misspelt_option(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_names(Namespace(**{"model": "torchvision:resnet18", name: value}))


def test_torch_is_not_imported_for_it() -> None:
    run = (
        "import sys; from fxmem.__main__ import main; "
        "codes = [main(['plan', *words.split()]) for words in sys.argv[1:]]; print(codes, 'torch' in sys.modules)"
    )
    words = ("timm:vitt", "hf:LlamaForCausalML", "torchvision:resnet18 --optimizer adamx", "resnet50", "modl.py:build")
    done = subprocess.run([sys.executable, "-c", run, *words], capture_output=True, text=True, check=False)
    assert done.stdout == "[2, 2, 2, 2, 2] False\n", done.stderr


def _find_names(pattern: re.Pattern[str], *where: str) -> Iterator[str]:
    for text in spec_names._texts(*where):
        yield from pattern.findall(text)


def test_every_name_of_a_collection_passes() -> None:
    assert spec_names._list_registered("torchvision") == set(torchvision.models.list_models())
    assert spec_names._list_registered("timm") >= set(timm.list_models())
    for spec in ("timm:vit_tiny_patch16_224.augreg_in21k", "timm:adv_inception_v3", "hf:T5Model", "hf:config.json"):
        check_model(spec)
    assert "LlamaForCausalLM" in (names := [*_find_names(spec_names._MODEL_CLASSES, "transformers")])
    assert {name for name in dir(transformers) if name.startswith("Llama") and name.endswith("Model")} <= set(names)


def test_every_optimizer_and_loss_passes() -> None:
    classes = {name for name, each in vars(torch.optim).items() if isinstance(each, type)}
    assert {*_find_names(spec_names._OPTIMIZERS, "torch", "optim/__init__.py")} >= classes
    for optimizer in ("AdamW", "adamw:fused", "sgd-momentum", "torchao:AdamW8bit", "torch.optim:SGD", "none"):
        check_names(Namespace(model="torch.nn:Linear", optimizer=optimizer))
    for loss in LOSSES:
        assert callable(read_loss(loss))
        check_names(Namespace(model="torch.nn:Linear", loss=loss.upper()))
