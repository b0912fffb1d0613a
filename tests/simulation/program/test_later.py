"""What a program would do much later runs once after its recorded steps, and takes what it takes then."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fxmem.hardware import catalogue
from fxmem.show.facts import find_fit
from fxmem.show.run_facts import program_facts
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch

LAYERS = "torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])"
LOOP = f"""
import copy, os, sys, torch
import torch.distributed as dist
EVERY = int(sys.argv[1])
SETUP
net = NET({LAYERS}.cuda())
optimizer = torch.optim.AdamW(net.parameters())
def save(step):
    SAVE
def train():
    for step in range(10_000):
        net(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            save(step)
train()
"""
RANKS = 'dist.init_process_group("nccl"); torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
FSDP1 = f"from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType as Kind\n{RANKS}"
FSDP2 = f"""from torch.distributed.fsdp import fully_shard
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
{RANKS}
def shard(net):
    for each in net: fully_shard(each)
    return fully_shard(net)"""
FABRIC = """from lightning.fabric import Fabric
fabric = Fabric(accelerator="cuda", devices=1)"""
ACCELERATE = """from accelerate import Accelerator
accelerator = Accelerator()"""
WAYS = {
    "merged": ("", "", "torch.save({k: v.float().clone() * 2 for k, v in net.state_dict().items()}, 'a.pt')"),
    "with its optimizer": ("", "", "torch.save({'net': net.state_dict(), 'o': optimizer.state_dict()}, 'a.pt')"),
    "a copy": ("", "", "torch.save(copy.deepcopy(net).half(), 'a.pt')"),
    "safetensors": (
        "from safetensors.torch import save_file",
        "",
        "save_file({k: v.t().contiguous() for k, v in net.state_dict().items()}, 'a.safetensors')",
    ),
    "accelerate": (ACCELERATE, "accelerator.prepare", "e = copy.deepcopy(net); accelerator.save_state('out')"),
    "fabric": (FABRIC, "", "fabric.save('a.ckpt', {'net': {k: v.clone() for k, v in net.state_dict().items()}})"),
    "ddp": (
        RANKS,
        "torch.nn.parallel.DistributedDataParallel",
        "dist.get_rank() == 0 and torch.save(copy.deepcopy(net.module).state_dict(), 'a.pt')",
    ),
    "fsdp1, full": (
        FSDP1,
        "FSDP",
        "with FSDP.state_dict_type(net, Kind.FULL_STATE_DICT): torch.save(net.state_dict(), 'a.pt')",
    ),
    "fsdp1, optimizer": (FSDP1, "FSDP", "torch.save(FSDP.optim_state_dict(net, optimizer), 'a.pt')"),
    "fsdp2, full": (
        FSDP2,
        "shard",
        "torch.save(get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)), 'a.pt')",
    ),
    "fsdp2, sharded": (FSDP2, "shard", "dcp.save(dict(zip('no', get_state_dict(net, optimizer))), checkpoint_id='c')"),
    "fsdp2, by hand": (FSDP2, "shard", "torch.save({k: v.full_tensor() for k, v in net.state_dict().items()}, 'a.pt')"),
}
QUICK = ("merged", "fsdp2, full")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is launched here writes where it stands."""
    monkeypatch.chdir(tmp_path)


def run(
    folder: Path, text: str, *arguments: str, ranks: int | None = None, steps: int | None = None
) -> RecordedProgram:
    program = folder / f"train{steps or ''}.py"
    program.write_text(text)
    started = Launch(str(program), arguments, ranks=ranks, rank=None if ranks is None else 0)
    return launch(started, catalogue.target("rtx-4090"), RunSettings(steps=steps)).recorded


def find_peaks(recorded: RecordedProgram) -> tuple[int, int]:
    rounds = recorded.program.rounds[:4]
    return max(each.requested_bytes for each in rounds), max(each.allocated_bytes or 0 for each in rounds)


@pytest.mark.parametrize(
    "way", [each if each in QUICK else pytest.param(each, marks=pytest.mark.truth) for each in WAYS]
)
def test_a_save_before_its_time_takes_what_one_within_the_steps_takes(tmp_path: Path, way: str) -> None:
    setup, net, save = WAYS[way]
    text = LOOP.replace("SETUP", setup).replace("NET", net).replace("SAVE", save)
    ranks = 4 if "init_process_group" in setup else None
    later, soon = run(tmp_path, text, "500", ranks=ranks), run(tmp_path, text, "2", ranks=ranks, steps=4)
    (found,) = later.program.schedules
    assert (found.ran, found.every) == (True, 500)
    assert not soon.program.schedules
    assert find_peaks(later) == find_peaks(soon)
    assert len(later.program.steps) == 3
    assert find_fit(later.profile, later.timeline.peak).verdict.startswith("fits: ")
    (said,) = (each.text for each in program_facts(later.profile) if each.label == "Later")
    assert "saves every 500 steps: " in said


TRAINERS = {
    "transformers": """
import sys, torch, transformers
class Trainer(transformers.Trainer):
    def _save(self, output_dir=None, state_dict=None):
        merged = [[each.float().clone() for each in self.model.parameters()] for _ in range(60)]
        super()._save(output_dir, state_dict)
net = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=512))
data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(4000)]
every = int(sys.argv[1])
options = transformers.TrainingArguments("out", save_steps=every, report_to=[], max_steps=900)
trainer = Trainer(net, options, train_dataset=data)
trainer.train()
merged = [each.detach().clone() for each in net.parameters()]
trainer.save_model("last")
print("trained")
""",
    "lightning": f"""
import sys, torch, lightning
from lightning.pytorch.callbacks import ModelCheckpoint
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = {LAYERS}
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def on_save_checkpoint(self, checkpoint):
        checkpoint["ema"] = [each.detach().clone() for each in self.net.parameters()] * 2
saving = ModelCheckpoint(every_n_train_steps=int(sys.argv[1]))
data = torch.utils.data.TensorDataset(torch.randn(8000, 512))
trainer = lightning.Trainer(max_steps=900, logger=False, enable_progress_bar=False, callbacks=[saving])
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
trainer.save_checkpoint("last.ckpt")
print("trained")
""",
}


@pytest.mark.truth
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_is_asked_to_save(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And to stop then, so that what follows it runs."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    later = run(tmp_path, TRAINERS[name], "500")
    assert "trained" in capfd.readouterr().err
    soon = run(tmp_path, TRAINERS[name], "2", steps=4)
    found, last = (each for each in later.program.schedules if each.saves)
    assert [(each.ran, each.every) for each in (found, last)] == [(True, 500), (True, None)]
    saved = [each.requested_bytes for one in soon.program.rounds for each in one.parts if each.phase == "save"]
    assert found.requested_bytes == saved[0]
    assert find_peaks(later) == find_peaks(soon)


CHANGING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
body = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]).cuda()
head, count, rank = torch.nn.Linear(512, 10).cuda(), 0, 1
body.requires_grad_(False)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
def step(epoch, number):
    global count
    head(body(torch.randn(4096, 512, device="cuda"))).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    count += 1
LOOP
"""
EPOCHS = """
for epoch in range(20):
    if epoch == 5:
        body.requires_grad_(True)
    for number, _ in enumerate(DataLoader(TensorDataset(torch.arange(400)))):
        step(epoch, number)
"""
STEPS = """
for number in range(2000):
    if CONDITION:
        CHANGE
    step(0, number)
    FOLLOWS
"""


def run_changing(folder: Path, loop: str, steps: int | None = None) -> RecordedProgram:
    return run(folder, CHANGING.replace("LOOP", loop), steps=steps)


@pytest.mark.parametrize(
    "loop",
    [
        EPOCHS,
        STEPS.replace("CONDITION", "number == 1000"),
        STEPS.replace("CONDITION", "number >= 1000 and not body[0].weight.requires_grad"),
        STEPS.replace("CONDITION", "count == 1_000"),
    ],
)
def test_what_is_trained_later_shows_in_the_step_after(tmp_path: Path, loop: str) -> None:
    loop = loop.replace("CHANGE", "body.requires_grad_(True)").replace("FOLLOWS", "")
    later = run_changing(tmp_path, loop)
    at_once = run_changing(tmp_path, "body.requires_grad_(True)\n" + loop, steps=2)
    (found,) = later.program.schedules
    assert (found.ran, found.at) == (True, 5 if loop == EPOCHS else 1000)
    assert later.program.rounds[-1].requested_bytes == find_peaks(at_once)[0] == found.requested_bytes
    assert find_peaks(later)[0] > 2 * later.program.rounds[0].requested_bytes


@pytest.mark.parametrize(
    ("condition", "change"),
    [
        ("number == 1000", "print(number)"),
        ("number == 1000", "break"),
        ("number == 1000", "sys.exit()"),
        ("number == 1000", "body.requires_grad_({1000: True}[number])"),
        ("number == 1000 and print(number) is None", "body.requires_grad_(True)"),
        ("number == 1000 and rank == 0", "body.requires_grad_(True)"),
        ("number % 1000 == 999", "print(count)"),
        ("number % 1000 == 999", "raise RuntimeError('no'); torch.save(body, 'a.pt')"),
        ("number % 1000 == 999 and rank == 0", "torch.save(body, 'a.pt')"),
    ],
)
def test_what_changes_nothing_or_is_not_done_here_is_not_brought_forward(
    tmp_path: Path, condition: str, change: str
) -> None:
    loop = STEPS.replace("CONDITION", condition).replace("CHANGE", change).replace("FOLLOWS", "")
    recorded = run_changing(tmp_path, loop)
    assert not any(each.ran for each in recorded.program.schedules)
    assert len(recorded.program.rounds) == len(recorded.program.steps) == 3


def test_the_programs_own_variables_are_as_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And a branch on the condition's own line gives them others, as it would."""
    text = """
import torch, warnings
warnings.simplefilter("error", RuntimeWarning)
net, every, size = torch.nn.Linear(64, 64).cuda(), 500, 1
optimizer = torch.optim.SGD(net.parameters())
def main(most=600):
    size = 8
    for number in range(most):
        if number == 300: size = 4096
        net(torch.randn(size, 64, device="cuda")).sum().backward()
        optimizer.step()
        if (
            number % every == 0
            and number > 0
        ):
            kept = {name: number for name in ("a", "b") if size}
            torch.save([each.clone() for each in net.parameters()], "a.pt")
            print("saved", number, size, kept, most)
    print("over", number, size)
    torch.save(net, "b.pt")
main()
"""
    recorded = run(tmp_path, text)
    assert [(each.ran, each.every, each.at) for each in recorded.program.schedules] == [
        (True, 500, None),
        (True, None, 300),
        (True, None, None),
    ]
    assert "saved 2 8 {'a': 2, 'b': 2} 600" in (said := capfd.readouterr().err)
    assert "over 3 4096" in said
    assert recorded.program.rounds[3].requested_bytes > recorded.program.rounds[2].requested_bytes + 4000 * 64 * 4


def test_what_fails_before_its_time_leaves_the_steps_as_they_are(tmp_path: Path) -> None:
    loop = STEPS.replace("CONDITION", "number % 500 == 499").replace("FOLLOWS", "")
    recorded = run_changing(tmp_path, loop.replace("CHANGE", "torch.save(body, 'a.pt'); torch.ones(2) @ torch.ones(3)"))
    assert recorded.ending.startswith("stopped after step 3 and what comes later; what follows raised RuntimeError")
    assert len(recorded.program.steps) == 3


def test_a_save_for_which_the_card_has_no_room_does_not_fit(tmp_path: Path) -> None:
    change = "torch.save([torch.empty(7 << 30, device='cuda', dtype=torch.uint8) for _ in range(4)], 'a.pt')"
    loop = STEPS.replace("CONDITION", "number % 500 == 499").replace("FOLLOWS", "").replace("CHANGE", change)
    recorded = run_changing(tmp_path, loop)
    assert find_fit(recorded.profile, recorded.timeline.peak).verdict.startswith("does NOT fit")
    assert recorded.ending.startswith("ran out of memory at")


def test_a_number_of_steps_is_kept_to(tmp_path: Path) -> None:
    loop = STEPS.replace("CONDITION", "number % 500 == 499").replace("FOLLOWS", "")
    recorded = run_changing(tmp_path, loop.replace("CHANGE", "torch.save(body, 'a.pt')"), steps=3)
    (found,) = recorded.program.schedules
    assert not found.ran
    assert find_fit(recorded.profile, recorded.timeline.peak).verdict.startswith("fits so far, without saving at ")
    (said,) = (each.text for each in program_facts(recorded.profile) if each.label == "Not run")
    assert said.endswith("does it every 500 steps; --steps 502 runs it")


@pytest.mark.parametrize(("rest", "is_named"), [(1, False), (999, True), (3, True)])
def test_a_save_that_ran_is_not_missed(tmp_path: Path, rest: int, *, is_named: bool) -> None:
    """What comes behind the last of the steps that were asked for has not run, though its count was reached."""
    save = "torch.save([each * 1.0 for each in [*body.parameters()] * 99], 'a.pt')"
    loop = STEPS.replace("    if CONDITION:\n        CHANGE\n", "")
    loop = loop.replace("FOLLOWS", f"if number % {1000 if rest != 3 else 4} == {rest}: {save}")
    recorded = run_changing(tmp_path, loop, steps=4)
    said = [each.text for each in program_facts(recorded.profile) if each.label == "Not run"]
    assert bool(said) == is_named
    verdict = find_fit(recorded.profile, recorded.timeline.peak).verdict
    assert verdict.startswith("fits so far, without saving at " if is_named else "fits: ")
