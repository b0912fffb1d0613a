"""What people type first, on their own models: 26 attempts that work, and 33 mistakes that are answered in one line.

`ATTEMPTS` and `MISTAKES` are the lists; each entry has its place in a new user's first hour. All run in one folder, in
this process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fxmem
from fxmem.__main__ import main
from fxmem.records.profile import Kind, Report
from fxmem.records.units import NO_LOSS
from fxmem.simulation.step.analysis import Analysis

Capture = pytest.CaptureFixture[str]

FILES = {
    "nano/model.py": """
from dataclasses import dataclass, field
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class Norm:
    eps: float = 1e-5

@dataclass
class GPTConfig:
    vocab_size: int = 64
    n_layer: int = 1
    n_embd: int = 16
    norm: Norm = field(default_factory=Norm)

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln = nn.LayerNorm(config.n_embd, eps=config.norm.eps)
        self.fc = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return x + F.gelu(self.fc(self.ln(x)))

class GPT(nn.Module):
    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
""",
    "nano/train.py": """
import torch
from model import GPT, GPTConfig

torch.cuda.set_device(0)
device = torch.device("cuda")
model = GPT(GPTConfig()).to(device)

def make():
    return GPT(GPTConfig()).cuda()

def batch():
    return torch.zeros(2, 16, dtype=torch.int64, device="cuda")
""",
    "multi.py": """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(8, 4), nn.Embedding(10, 4)

    def forward(self, batch):
        return self.image(batch["image"]) + self.text(batch["tokens"]).mean(1)

def item():
    return {"image": torch.zeros(8), "tokens": torch.zeros(4, dtype=torch.int64)}

def collate():
    return {name: torch.stack([value] * 3) for name, value in item().items()}

class Items(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return item()

loader = DataLoader(Items(), batch_size=5, shuffle=True, num_workers=2)
""",
    "settings.py": """
import attrs
from pydantic import BaseModel
from torch import nn

class Size(BaseModel):
    width: int
    classes: int = 4

def pydantic(size: Size):
    return nn.Linear(size.width, size.classes)

@attrs.define
class Frozen:
    width: int = 3

class Mine(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.width, 4)

    def forward(self, x):
        return self.layer(x)

class MineConfig(Frozen):
    pass

def attr(cfg: "Frozen | None" = None):
    return nn.Linear(cfg.width, 4)

class Plain:
    width: int = 3

def plain(cfg: Plain):
    return nn.Linear(cfg.width, 4)
""",
    "first_attempts_pkg/__init__.py": "",
    "first_attempts_pkg/consts.py": "width = 8",
    "first_attempts_pkg/deep/__init__.py": "",
    "first_attempts_pkg/deep/net.py": """
from torch import nn
from ..consts import width
from first_attempts_pkg.consts import width as again

def make():
    return nn.Linear(width, again)
""",
    "lit.py": """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def log(self, *args, **kwargs):
        raise RuntimeError("no trainer")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

class Gan(Lit):
    def configure_optimizers(self):
        return [torch.optim.Adam(self.parameters()), torch.optim.SGD(self.parameters(), lr=0.1)]

loader = DataLoader(TensorDataset(torch.zeros(20, 8), torch.zeros(20, dtype=torch.int64)), batch_size=4, num_workers=2)
""",
    "mine.py": """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(10, 4)

    def forward(self, x):
        return self.inner(x)

class Tokens(Words):
    def forward(self, ids):
        return self.inner(ids)[:, : ids.shape[1]]

class Slices(Words):
    def forward(self, ids):
        return self.inner(ids[:, 1:])

class Two(UNet):
    def forward(self, a, b):
        return super().forward(a + b)

class NoForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

class Empty(nn.Module):
    pass

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)
        return x

def leaves():
    raise SystemExit(3)

def number():
    return 3

def pair():
    return nn.Linear(2, 2), None

def listed():
    return [torch.zeros(2, 8)]
""",
    "broken.py": "def make(:\n",
    "absent.py": "import nowhere_to_be_found\n",
    "script.py": "import sys\nsys.exit(1)\n",
    "a file.py": "from torch import nn\nnet = nn.Linear(8, 4)\n",
    "data.json": '{"a": 1}',
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of a new user."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXMEM_CACHE_DIR", "")
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("first_attempts_pkg", "model"):
            del sys.modules[name]


def analyze_line(line: str) -> Report:
    """The report of a command line."""
    words = re.findall(r"'[^']*'|\S+", line)
    arguments = ["analyze", *(word.strip("'") for word in words), "--quiet", "--json", "report.json"]
    assert main([*arguments, *([] if "--target" in arguments else ["--target", "cpu"])]) == 0
    return Report.model_validate_json(Path("report.json").read_bytes())


def shapes(report: Report) -> list[tuple[int, ...]]:
    """The shapes of the inputs, in their order."""
    return [each.shape for each in report.inputs]


def labels(report: Report) -> list[tuple[Any, ...]]:
    """Shape and dtype of labels that were made, and that they are there from the start."""
    found = [each for each in report.storages if each.name == "labels" and each.kind is Kind.INPUT and each.birth == 0]
    return [(*each.shape, each.dtype) for each in found]


def layers(report: Report) -> set[str]:
    """The outermost modules with parameters."""
    return {each.name.rpartition(".")[0] for each in report.storages if each.kind is Kind.PARAMETER}


def notes(report: Any) -> str:
    """What was taken for granted, in one text."""
    return "\n".join(each.text for each in report.assumptions)


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images and labels."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(8), torch.tensor(index % 4)


def linear() -> nn.Linear:
    """A classifier."""
    return nn.Linear(8, 4)


def analyze(model: Any, inputs: Any, **settings: Any) -> Analysis:
    """`fxmem.analyze` for the CPU, unless another target is given."""
    return fxmem.analyze(model, inputs, **{"target": "cpu", **settings})


NANO = "nano/model.py:GPT --input 2x16:int64"
SAID: dict[str, tuple[str, Callable[[Report], Any], Any]] = {
    "a script's model, moved to the card": ("nano/train.py:model --input 2x16:int64", shapes, [(2, 16)]),
    "a factory that calls .cuda()": ("nano/train.py:make --input 2x16:int64", shapes, [(2, 16)]),
    "inputs made on the card": ("nano/train.py:make --input nano/train.py:batch", shapes, [(2, 16)]),
    "a dataclass, one field": (f"{NANO} --set config.n_layer=2", lambda r: "h.1.fc" in layers(r), True),
    "a dataclass, as it is written": (
        f"{NANO} --set 'config=GPTConfig(n_layer=2)'",
        lambda r: "h.1.fc" in layers(r),
        True,
    ),
    "a dataclass in a dataclass": (
        f"{NANO} --set config.norm.eps=1e-3 --set config.n_embd=8",
        lambda r: next(each.nbytes for each in r.storages if each.name == "wte.weight"),
        64 * 8 * 4,
    ),
    "a pydantic model": ("settings.py:pydantic --input 2x8 --set size.width=8", shapes, [(2, 8)]),
    "an attrs class": ("settings.py:attr --input 2x8 --set cfg.width=8", shapes, [(2, 8)]),
    "a class found by its name": ("settings.py:Mine --input 2x8 --set config.width=8", shapes, [(2, 8)]),
    "a class with annotations": ("settings.py:plain --input 2x8 --set cfg.width=8", shapes, [(2, 8)]),
    "a batch that is one dict": ("multi.py:Multi --input multi.py:collate", shapes, [(3, 8), (3, 4)]),
    "items of a dict by name": (
        "multi.py:Multi --input batch.image:2x8 --input batch.tokens:2x4:int64",
        shapes,
        [(2, 8), (2, 4)],
    ),
    "a DataLoader": ("multi.py:Multi --input multi.py:loader", shapes, [(5, 8), (5, 4)]),
    "a Dataset class": ("multi.py:Multi --input multi.py:Items", shapes, [(8, 8), (8, 4)]),
    "a file in a package": ("first_attempts_pkg/deep/net.py:make --input 2x8", shapes, [(2, 8)]),
    "a card by its size": (
        "mine.py:net --input 2x8 --target 24GB",
        lambda r: (r.target.memory_bytes, "kernels and workspaces are those of l4," in notes(r)),
        (24 * 10**9, True),
    ),
    "a card as it is sold": ("mine.py:net --input 2x8 --target 'RTX 4090'", lambda r: r.target.name, "rtx4090"),
    "a precision by torch's name": ("mine.py:net --input 2x8 --precision bfloat16", lambda r: r.step.precision, "bf16"),
    "a Lightning module and its loader": (
        "lit.py:Lit --input lit.py:loader",
        lambda r: (shapes(r), r.step.loss, r.step.optimizer, layers(r)),
        ([(4, 8), (4,)], "training_step", "SGD", {"net"}),
    ),
    "a Lightning module for inference": (
        "lit.py:Lit --input 4x8 --mode infer",
        lambda r: (shapes(r), r.step.loss),
        ([(4, 8)], None),
    ),
    "cross-entropy of tokens": (f"{NANO} --set config.n_layer=1 --loss ce", labels, [(2, 16, "int64")]),
    "cross-entropy of classes": ("mine.py:net --input 2x8 --loss ce", labels, [(2, "int64")]),
    "cross-entropy of pixels": ("mine.py:UNet --input 2x3x8x8 --loss ce", labels, [(2, 8, 8, "int64")]),
    "mse": ("mine.py:net --input 2x8 --loss mse", labels, [(2, 4, "float32")]),
    "bce": ("mine.py:net --input 2x8 --loss bce --weights bf16", labels, [(2, 4, "bfloat16")]),
    "adapters of low rank": (
        f"{NANO} --set config.n_embd=8 --lora r=2",
        lambda r: {each.name for each in r.storages if each.kind is Kind.GRADIENT},
        {f"h.0.fc.lora_{part}.default.weight.grad" for part in "AB"},
    ),
    "adapters over quantised weights": (
        "mine.py:net --input 2x8 --quantize int8 --lora r=2,target=0",
        lambda r: {each.name: each.nbytes for each in r.storages if each.name.endswith("qdata")},
        {"0.base_layer.weight.qdata": 8 * 4},
    ),
    "an optimizer of torchao": (
        "nano/train.py:make --input 2x16:int64 --optimizer torchao:AdamW8bit",
        lambda r: (r.step.optimizer, "torchao compiles the optimizer's step" in notes(r)),
        ("AdamW8bit", True),
    ),
    "a module that exists": ("'a file.py:net' --input 2x8", shapes, [(2, 8)]),
}


@pytest.mark.parametrize("attempt", SAID)
def test_what_is_typed_first_works(attempt: str) -> None:
    line, question, answer = SAID[attempt]
    assert question(analyze_line(line)) == answer


def test_a_loader_starts_no_worker_and_leaves_random_states_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Pairs(), batch_size=4, shuffle=True, num_workers=2, generator=generator)
    before = generator.get_state(), torch.get_rng_state()
    profile = analyze(linear, loader).profile
    assert [each.shape for each in profile.inputs] == [(4, 8)]
    assert torch.equal(before[0], generator.get_state())
    assert torch.equal(before[1], torch.get_rng_state())
    assert "the first batch of the DataLoader" in notes(profile)
    assert "the rest (4; 32 bytes) is left out" in notes(profile)


def test_a_dataset_of_tensors_is_a_batch_too() -> None:
    profile = analyze(linear, TensorDataset(torch.zeros(20, 8))).profile
    assert [each.shape for each in profile.inputs] == [(8, 8)]


def test_an_optimizer_that_exists_is_taken_with_its_groups_and_left_alone() -> None:
    model = linear()
    given = torch.optim.SGD([{"params": [model.weight], "momentum": 0.9}, {"params": [model.bias]}], lr=0.1)
    profile = analyze(model, torch.zeros(2, 8), optimizer=given).profile
    assert profile.step.optimizer == "SGD"
    assert [each.name for each in profile.storages if each.kind is Kind.OPTIMIZER_STATE] == ["weight.momentum_buffer"]
    assert "one like the SGD that was given, its 2 groups included" in notes(profile)
    assert not given.state
    assert given.param_groups[0]["params"][0] is model.weight


def test_an_optimizer_of_another_copy_gives_its_class_and_settings() -> None:
    given = torch.optim.AdamW(linear().parameters(), lr=1e-4, amsgrad=True)
    profile = analyze(linear, torch.zeros(2, 8), optimizer=given).profile
    state = {each.name for each in profile.storages if each.kind is Kind.OPTIMIZER_STATE}
    assert "weight.max_exp_avg_sq" in state
    assert "over all parameters" in notes(profile)


def test_precision_is_a_dtype_too() -> None:
    assert analyze(linear, torch.zeros(2, 8), precision=torch.bfloat16).profile.step.precision == "bf16"
    assert analyze(linear, torch.zeros(2, 8), precision=torch.float32).profile.step.precision is None


def test_a_factory_may_move_its_model() -> None:
    moved = analyze(lambda: linear().to("cuda:0", non_blocking=True).cuda(), torch.zeros(2, 8))
    assert moved.peak.requested_bytes == analyze(linear, torch.zeros(2, 8)).peak.requested_bytes


def test_a_dict_is_given_whole_where_forward_takes_one() -> None:
    class Multi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(batch["x"]) * batch["y"]

    profile = analyze(Multi, {"x": torch.zeros(2, 8), "y": torch.zeros(2, 1)}).profile
    assert [each.shape for each in profile.inputs] == [(2, 8), (2, 1)]
    assert "forward takes one argument `batch`" in notes(profile)


def nano(vocabulary: int = 512) -> nn.Module:
    """A language model that computes its loss where it is given targets."""

    class Nano(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

        def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            logits = self.head(self.embedding(idx))
            if targets is None:
                return logits, None
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Nano()


TOKENS = torch.zeros(4, 64, dtype=torch.int64)


def test_a_loss_by_name_costs_what_the_model_s_own_does() -> None:
    targets = torch.zeros(4, 64, dtype=torch.int64)
    own = analyze(nano, (TOKENS, targets), loss=lambda out: out[1]).peak.requested_bytes
    named = [
        analyze(nano, TOKENS, loss=loss).peak.requested_bytes
        for loss in ("ce", nn.CrossEntropyLoss(), nn.functional.cross_entropy)
    ]
    assert named == [own] * 3


def test_a_step_without_a_loss_says_what_one_would_add() -> None:
    analysis = analyze(nano, TOKENS)
    head = " ".join(analysis.table().partition("Module ")[0].split())
    assert "Note no loss was given: cross_entropy of the output 4x64x512 would keep 512.0 KiB until backward" in head
    assert "say --loss ce (loss='ce'), or give forward its argument `targets`" in head
    more = analyze(nano, TOKENS, loss="ce")
    assert more.profile.saved_bytes - analysis.profile.saved_bytes >= 4 * 64 * 512 * 4
    assert "Note" not in more.table()


def test_a_loss_that_hardly_counts_is_not_mentioned() -> None:
    big = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 4))
    assert NO_LOSS not in analyze(big, torch.zeros(8, 1000)).table()


def test_a_prediction_with_a_named_loss_is_what_is_measured() -> None:
    verdict = fxmem.validate(nano, TOKENS, loss="ce")
    assert verdict.within_tolerance


def test_a_training_step_leaves_the_model_as_it_was() -> None:
    model = linear()
    kind = type("Lit", (nn.Linear,), {"training_step": lambda self, batch, i: self(batch[0]).sum()})
    model.__class__ = kind
    members = dict(vars(model))
    profile = analyze(model, DataLoader(Pairs(), batch_size=4)).profile
    assert profile.step.loss == "training_step"
    assert type(model) is kind
    assert vars(model) == members
    verdict = fxmem.validate(model, DataLoader(Pairs(), batch_size=4), optimizer="sgd")
    assert verdict.within_tolerance


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[int, str]] = {
    # models
    f"{NANO}": (2, r"needs config; say e\.g\. --set 'config=GPTConfig\(\)' or --set config\.vocab_size=64"),
    f"{NANO} --set n_layer=12": (2, r"'n_layer' is a field of config, a GPTConfig; say --set config\.n_layer=VALUE"),
    f"{NANO} --set config.n_layers=12": (2, "has no setting 'n_layers'; closest: n_layer"),
    f"{NANO} --set config=GPTConf(n_layer=1)": (2, "got 'GPTConf' in .*; closest: GPTConfig"),
    f"{NANO} --set config=GPTConfig(n_layer=open('x'))": (2, "expected a class .* got 'open'"),
    f"{NANO} --set config=GPTConfig(n_layer=1+x)": (2, "nothing is evaluated"),
    "settings.py:pydantic --input 2x8": (2, r"needs size; say e\.g\. --set size\.width=VALUE"),
    "settings.py:pydantic --input 2x8 --set size.classes=2": (2, "Size needs width; say --set size.width=VALUE"),
    "settings.py:pydantic --input 2x8 --set size.width=wide": (2, "Size takes no such fields: .*valid integer"),
    "mine.py:nte --input 2x8": (2, r"mine\.py has no 'nte'; closest: net"),
    "mine.py --input 2x8": (2, r"name the function or class in it that makes the model: mine\.py:NAME"),
    "nowhere.py:net --input 2x8": (2, "no file nowhere.py"),
    "broken.py:make --input 2x8": (2, "broken.py is not Python: line 1"),
    "absent.py:make --input 2x8": (3, "not installed at .*absent.py:1"),
    "script.py:make --input 2x8": (1, "keep what a script runs under `if __name__"),
    "mine.py:number --input 2x8": (2, "returned a int; expected a torch.nn.Module"),
    "mine.py:pair --input 2x8": (2, "return the module alone"),
    "mine.py:NoForward --input 2x2": (1, "NoForward.* forward"),
    "mine.py:Empty --input 2x2": (1, "Empty.* forward"),
    "mine.py:Reads --input 2x8": (1, r"mine\.py:\d+ in forward: `if x\.sum\(\) > 0:`"),
    "hf:meta-llama/Llama-3.1-8": (2, "closest: meta-llama/Llama-3.1-8B, .*--download fetches its config.json"),
    # inputs
    "mine.py:UNet --input 3x32x32": (1, r"is the batch missing\? --input 1x3x32x32"),
    "mine.py:Tokens --input 512:int64": (1, r"is the batch missing\? --input 1x512:int64"),
    "mine.py:Tokens --input ids:512:int64": (1, r"is the batch missing\? --input ids:1x512:int64"),
    "mine.py:Slices --input 512:int64": (1, r"is the batch missing\? --input 1x512:int64"),
    "mine.py:Tokens": (2, r"--input 8x3x224x224 or --input ids:8x1024:int64"),
    "mine.py:UNet --input 2x32x32x3": (1, r"are the channels last\? --input 2x3x32x32"),
    "mine.py:Words --input 8x32": (1, r"are these token ids\? --input 8x32:int64"),
    "mine.py:UNet --input 2x3x32x32:uint8": (1, r"are the bytes of images made floats first\? --input 2x3x32x32"),
    "mine.py:Two --input a:8x32": (1, "each is an input of its own: --input a:8x32 --input b:SHAPE"),
    "mine.py:UNet": (2, r"its forward takes \(x\), write e\.g\. --input"),
    "mine.py:net --input=-1x8": (2, "expected an input like"),
    "mine.py:net --input 2x8:flaot32": (2, "expected a dtype like float32"),
    "mine.py:net --input mine.py:listed": (2, r"return tuple\(batch\) to pass its items one by one"),
    "mine.py:UNet --input y:2x3x8x8": (2, r"forward has no argument 'y'; it takes \(x\)"),
    # the step
    "mine.py:net --input 2x8 --lora rank=2": (2, "expected --lora like r=8,alpha=16"),
    "mine.py:net --input 2x8 --lora r=2,target=nothing": (2, "Target modules .*nothing.* not found"),
    "mine.py:net --input 2x8 --optimizer torchao:AdamW9bit": (2, "closest: AdamW8bit"),
    "lit.py:Lit --input 4x8": (1, r"its batch has 2 items, each of them .*: --input 4x8 --input SHAPE:DTYPE"),
    "lit.py:Gan --input lit.py:loader": (1, "configure_optimizers of Gan makes 2. .*fxmem run train.py"),
    "mine.py:net --input 2x8 --loss cee": (2, "got 'cee'; or as ce, mse, bce or l1"),
    "mine.py:net --input 2x8 --optimizer adamww": (2, "closest: adamw"),
    "mine.py:net --input 2x8 --budget nan": (2, "expected --budget as bytes"),
    "mine.py:net --input 2x8 --target rtx4900": (2, "did you mean rtx4090"),
    "mine.py:net --input 2x8 --json nowhere/at/all.json": (2, "a folder that exists"),
    "mine.py:net --input 9999999999x8 --target 24GB --budget 24GB": (4, "does NOT keep .* 22.4 GiB: 745.1 GiB"),
}


@pytest.mark.parametrize(
    ("module", "words", "install"),
    [
        ("bitsandbytes.optim", "--optimizer bitsandbytes:AdamW8bit", "pip install bitsandbytes"),
        ("peft", "--lora r=8", "pip install 'fxmem[zoo]'"),
    ],
)
def test_a_library_that_is_not_there(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, module: str, words: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["analyze", *f"mine.py:net --input 2x8 --target cpu --quiet {words}".split()]) == 3
    assert install in capsys.readouterr().err


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_in_one_line(capsys: Capture, line: str) -> None:
    code, words = MISTAKES[line]
    known = line if "--target" in line else f"{line} --target cpu"
    assert main(["analyze", *re.findall(r"\S+", known), "--quiet"]) == code
    said = capsys.readouterr().err
    assert re.fullmatch(r"fxmem: [^\n]+\n", said)
    assert re.search(words, said)
    assert len(said.replace(os.getcwd(), "")) < 500  # without the folder of the test, which is as long as it is


def test_there_are_as_many_as_were_tried() -> None:
    assert len(MISTAKES) >= 32
