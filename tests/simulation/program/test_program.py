"""Programs as they are, on a card that is not there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import io
import re
import shutil
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.quantization import NF4Tensor

import fxmem
from fxmem._torch.common import FakeTensor
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.context import context_range
from fxmem.memory.allocator import CachingAllocator, known_levels, read_settings, replay
from fxmem.memory.figures import find_place
from fxmem.planning.estimate import estimate
from fxmem.records.profile import Kind, Phase, Round
from fxmem.records.units import format_bytes
from fxmem.show.run_facts import program_facts
from fxmem.simulation.program.rounds import FinishedRound
from fxmem.simulation.stand_ins import checkpoints


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.first(x)))
        return hidden


class Conv(nn.Module):
    """A convolution, its norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(32 * 16 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class Chosen(nn.Module):
    """One of many scores of each row, whose backward writes into zeros of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = -self.head(x)
        return torch.gather(scores, -1, torch.zeros(len(x), 1, dtype=torch.int64, device=x.device))


class Attention(nn.Module):
    """An encoder layer, a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.layer(self.embed(tokens)))
        return logits


def training(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int = 10) -> None:
    """The step that `fxmem.analyze` runs, as a script would write it."""

    def step() -> None:
        out = model(x)
        loss = out.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        step()


TEMPLATES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], str]] = {
    "mlp": (Mlp, lambda: torch.randn(64, 256), "adamw"),
    "mlp with sgd": (Mlp, lambda: torch.randn(64, 256), "sgd"),
    "gather": (Chosen, lambda: torch.randn(2048, 256), "sgd"),
    "convolution": (Conv, lambda: torch.randn(8, 3, 16, 16), "adamw"),
    "attention": (Attention, lambda: torch.randint(0, 1000, (4, 128)), "adam"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("target", ["h100", "rtx3090"])
def test_a_step_recorded_is_the_step_analysed(name: str, target: str) -> None:
    build, batch, optimizer = TEMPLATES[name]
    analysed = fxmem.analyze(build(), batch(), optimizer=optimizer, target=target).peak
    with fxmem.record(target, steps=3) as recorded:
        model = build()
        made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        stepping = made(model.parameters())
        model.to("cuda")  # after the optimizer has its parameters
        training(model, stepping, batch().cuda())
    peak = recorded.peak
    assert (peak.requested_bytes, peak.allocated_bytes, peak.reserved_bytes) == (
        analysed.requested_bytes,
        analysed.allocated_bytes,
        analysed.reserved_bytes,
    )
    assert recorded.program.steady
    assert recorded.ending == "stopped after step 3"
    last = recorded.rounds[-1]
    assert last.phases == (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    # The allocator that was driven live has a history of its own: what it could not split stays larger.
    assert last.allocated_bytes is not None
    assert last.allocated_bytes == pytest.approx(analysed.allocated_bytes, rel=0.01)


def test_rounds_of_two_optimizers_with_evaluation_and_an_average() -> None:
    with fxmem.record("h100", steps=3) as recorded:
        generator, critic = Mlp().cuda(), nn.Linear(256, 1).cuda()
        average = copy.deepcopy(generator)
        for_generator, for_critic = torch.optim.Adam(generator.parameters()), torch.optim.SGD(critic.parameters())
        while True:
            noise = torch.randn(32, 256, device="cuda")
            made = generator(noise)
            loss = critic(made.detach()).mean()
            for_critic.zero_grad()
            loss.backward()
            for_critic.step()
            loss = critic(made).mean()
            for_generator.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
            for_generator.step()
            generator.eval()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), generator.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                generator(noise)
            generator.train()
    forward, backward, optimizer = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
    expected = (forward, Phase.EVALUATION, forward, backward, optimizer, forward, backward, optimizer)
    assert recorded.rounds[-1].phases == expected
    assert recorded.program.optimizers == ("SGD", "Adam")
    names = {s.name for s in recorded.profile.storages if s.kind is Kind.PARAMETER}
    assert {"generator.first.weight", "critic.weight", "average.first.weight"} <= names
    assert {"generator", "critic"} <= set(recorded.profile.modules)
    state = {s.name for s in recorded.profile.storages if s.kind is Kind.OPTIMIZER_STATE}
    assert {"generator.first.weight.exp_avg", "generator.second.bias.exp_avg_sq"} <= state


def test_micro_batches_make_one_round() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        model = Mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            for _ in range(3):
                model(torch.randn(16, 256).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    phases = recorded.rounds[-1].phases
    assert phases[:-1] == (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER) * 2 + (Phase.FORWARD, Phase.BACKWARD)
    single = fxmem.analyze(Mlp(), torch.randn(16, 256)).profile
    batch = 16 * 256 * 4  # moved to the card within the round, and saved by the first layer
    assert recorded.profile.saved_bytes == single.saved_bytes + batch  # of one forward, not of three


def test_a_program_without_an_optimizer_ends_a_round_with_each_backward() -> None:
    with fxmem.record("h100", steps=3) as recorded:
        model = Mlp().cuda()
        while True:
            model(torch.randn(16, 256, device="cuda")).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
    assert len(recorded.rounds) == 3
    assert recorded.program.steady


def test_steps_and_phases_that_the_program_marks() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        fxmem.mark("forward")
        weight = torch.zeros(64, 64, device="cuda")
        while True:
            out = weight @ weight
            fxmem.mark("optimizer")
            weight.add_(out)
            fxmem.mark_step()
    assert recorded.rounds[-1].phases == (Phase.FORWARD, Phase.OPTIMIZER)
    assert len(recorded.rounds) == 2
    fxmem.mark_step()  # nothing outside a recording
    with pytest.raises(UsageError, match="expected a phase of forward, backward"):
        fxmem.mark("validation")


def test_half_precision_with_a_scaler() -> None:
    with fxmem.record("h100", steps=3) as recorded:
        model = Mlp().cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        scales = []
        while True:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(16, 256).cuda()).float().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert scales == [65536.0, 65536.0]
    assert not recorded.made_up


def test_a_backward_of_part_of_the_graph_within_forward_belongs_to_it() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        critic = nn.Linear(8, 1).cuda()
        optimizer = torch.optim.Adam(critic.parameters())
        while True:
            x = torch.randn(4, 8, device="cuda", requires_grad=True)
            out = critic(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.mean() + slope.norm()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorded.rounds[-1].phases == (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


# --- what is made up --------------------------------------------------------------------------------------------------


def test_numbers_read_back_are_listed_and_so_are_decisions_by_them() -> None:
    with fxmem.record("h100") as recorded:
        model = Mlp().cuda()
        loss = model(torch.randn(4, 256).cuda()).sum()
        total = loss.item() / 2
        assert 1 / (total - total) == 1  # a made-up number never divides by zero
        if total < 3:
            loss.backward()
        known = torch.arange(4, device="cuda").sum().item()
        assert known == 6
    kinds = [(each.kind, each.what) for each in recorded.made_up]
    assert ("read", "float32") in kinds
    assert ("decided", "lt 3") in kinds
    assert all(Path(__file__).name in each.place for each in recorded.made_up)
    assert "a decision by a made-up number: lt 3" in recorded.table()


def test_shapes_that_hang_on_data_are_taken_at_their_largest() -> None:
    with fxmem.record("h100") as recorded:
        x = torch.randn(10, 4, device="cuda")
        assert x[x > 0].shape == (40,)
        assert torch.nonzero(x).shape == (40, 2)
        assert x.masked_select(x > 0).shape == (40,)
        assert torch.unique(x).shape == (40,)
    assert {each.kind for each in recorded.made_up} == {"shape"}


def test_labels_from_a_loader_keep_their_values_on_the_card() -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8)), batch_size=4, pin_memory=True)
    with fxmem.record("h100") as recorded:
        _, labels = next(iter(loader))
        labels = labels.to("cuda", non_blocking=True)
        assert isinstance(labels, FakeTensor)
        assert (labels == 3).sum().item() == 1
        assert labels.cpu().tolist() == [0, 1, 2, 3]
        torch.zeros(1, device="cuda")
    assert not recorded.made_up


def test_numbers_in_pinned_memory_keep_their_values_on_the_card() -> None:
    with fxmem.record("h100") as recorded:
        window = torch.tensor(3, dtype=torch.int32, pin_memory=True).cuda(non_blocking=True)
        assert window.item() == 3
    assert not recorded.made_up


def test_checkpoints_are_files_without_values_that_read_back_as_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.pt"
    monkeypatch.chdir(tmp_path)
    with fxmem.record("h100") as recorded:
        model = Mlp().cuda()
        torch.save({"model": model.state_dict(), "step": 3}, file)
        found = torch.load(file)
        model.load_state_dict(found["model"])
        assert found["step"] == 3
        assert file.stat().st_size > sum(each.nbytes for each in model.parameters())
        other = torch.load(shutil.copy(file, tmp_path / "best.pt"))
        assert isinstance(other["model"]["first.weight"], FakeTensor)
    assert not file.exists()
    assert [each.kind for each in recorded.made_up] == ["file"]
    assert recorded.files is not None
    assert [each.path for each in recorded.files.written] == ["best.pt", "model.pt"]


def test_a_checkpoint_kept_by_someone_who_has_no_fxmem_is_one_of_zeros(tmp_path: Path) -> None:
    with fxmem.record("h100", write=True):
        model, counter = Mlp().cuda(), torch.arange(3).cuda()
        torch.save({"model": model.state_dict(), "counter": counter, "step": 3}, tmp_path / "model.pt")
        save_file({**model.state_dict(), "counter": counter}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.pt").stat().st_blocks * 512 < 100_000  # of two megabytes
    found = torch.load(tmp_path / "model.pt", "cpu")
    assert (found["step"], found["model"]["first.weight"].shape) == (3, (1024, 256))
    assert not found["model"]["first.weight"].any()
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["counter"].tolist() == [0, 1, 2]  # what is known stands there
    assert not tensors["second.weight"].any()


def test_a_mark_that_someone_else_has_written_is_none(tmp_path: Path) -> None:
    """Only what this process has pickled is unpickled without `weights_only`."""
    with fxmem.record("h100", write=True):
        torch.save({"x": torch.ones(2, device="cuda")}, tmp_path / "model.pt")
        assert torch.load(tmp_path / "model.pt")["x"].is_cuda
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(checkpoints, "_TOKEN", b"another process.")
            assert torch.load(tmp_path / "model.pt", "cpu")["x"].tolist() == [0, 0]


def test_what_a_checkpoint_keeps_takes_no_memory_on_the_card_until_it_is_loaded(tmp_path: Path) -> None:
    with fxmem.record("h100"):
        model, stream = Mlp().cuda(), io.BytesIO()
        needed = torch.cuda.memory_allocated()
        torch.save({"model": model, "step": torch.tensor(3)}, stream)
        del model
        assert torch.cuda.memory_allocated() == 0
        (tmp_path / "model.pt").write_bytes(stream.getvalue())  # as a program writes that counts bytes or uploads them
        for where, nbytes in (("cpu", 0), (None, needed)):
            found = torch.load(tmp_path / "model.pt", where, weights_only=False)
            assert torch.cuda.memory_allocated() == nbytes
            assert isinstance(found["model"].first.weight, nn.Parameter)
            assert found["model"].first.weight.device.type == (where or "cuda")
        assert found["step"].item() == 3


def test_a_state_of_the_cards_generator_is_saved_and_put_back(tmp_path: Path) -> None:
    """As transformers' Trainer does, by the module's own name."""
    with fxmem.record("h100"):
        torch.save({"cuda": torch.cuda.random.get_rng_state(), "cpu": torch.get_rng_state()}, tmp_path / "rng.pt")
        found = torch.load(tmp_path / "rng.pt")
        torch.cuda.random.set_rng_state(found["cuda"])
        torch.cuda.random.set_rng_state_all(torch.cuda.get_rng_state_all())
        assert torch.equal(found["cpu"], torch.get_rng_state())


def test_tied_weights_are_found_by_their_addresses() -> None:
    with fxmem.record("h100"):
        one, other = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
        address = one.untyped_storage().data_ptr()
        assert address == one[1:].untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_nothing_is_written_in_the_format_of_safetensors_or_as_a_whole_module(tmp_path: Path) -> None:
    file, whole, real = tmp_path / "model.safetensors", tmp_path / "whole.pt", tmp_path / "real.safetensors"
    file.write_bytes(b"an earlier one")
    with fxmem.record("h100") as recorded:
        from safetensors.torch import load_file, save_model

        model = Mlp().cuda()
        save_file(model.state_dict(), file)  # a name from before the recording
        save_model(model, str(file))
        assert load_file(file).keys() == model.state_dict().keys()
        torch.save(model, whole)
        save_model(nn.Linear(2, 2), str(real))
    assert file.read_bytes() == b"an earlier one"
    assert not whole.exists()
    assert not real.exists()
    assert [each.kind for each in recorded.made_up] == ["file", "file", "file"]


def test_a_library_that_is_imported_meanwhile_asks_for_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.utils.import_utils"
    monkeypatch.delitem(sys.modules, name, raising=False)
    library = types.ModuleType(name)
    library.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor)  # type: ignore[attr-defined]
    with fxmem.record("h100"):
        monkeypatch.setitem(sys.modules, name, library)
        Mlp().cuda()(torch.randn(2, 256).cuda())
        assert not library.is_fake_tensor(torch.arange(4, device="cuda"))
        assert library.is_fake_tensor(torch.randn(4, device="cuda"))
        fake = torch.arange(4, device="cuda")
    assert library.is_fake_tensor(fake)


def test_a_model_may_have_the_name_of_a_method_of_modules() -> None:
    with fxmem.record("rtx3080") as recorded:
        modules = torch.nn.Linear(8, 8).cuda()
        modules(torch.randn(4, 8, device="cuda")).sum().backward()
    assert "modules_" in {node.module for node in recorded.profile.nodes}


def test_what_is_not_on_the_card_is_real(tmp_path: Path) -> None:
    file = tmp_path / "real.pt"
    with fxmem.record("h100"):
        on_host = torch.arange(4.0)
        torch.save(on_host, file)
        model = nn.Linear(4, 1)
        model(on_host).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[0.0, 1.0, 2.0, 3.0]]
        model.cuda()
        assert type(model.weight.grad) is FakeTensor
        assert torch.load(file).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not file.exists()


# --- the card ---------------------------------------------------------------------------------------------------------


def test_parameters_keep_their_identity() -> None:
    with fxmem.record("h100"):
        model = Attention()
        model.embed.weight.note = "mine"  # type: ignore[attr-defined]
        before = list(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.to("cuda").half()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert model.out.weight is model.embed.weight is optimizer.param_groups[0]["params"][0]
        assert model.embed.weight.note == "mine"  # type: ignore[attr-defined]
        assert model.embed.weight.dtype is torch.float16
        assert isinstance(model.embed.weight, nn.Parameter)
        model.cpu()
        assert not isinstance(model.embed.weight, FakeTensor)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_parameters_move_by_their_data() -> None:
    with fxmem.record("h100", steps=1) as run:
        model = nn.Linear(2048, 1024)  # its weight is made without memory, its bias on the host
        model.weight.tag = model.bias.tag = "mine"  # type: ignore[attr-defined, assignment]
        for parameter in model.parameters():
            parameter.data = parameter.data.to("cuda")
        assert all(each.is_cuda and each.tag == "mine" for each in model.parameters())  # type: ignore[attr-defined]
        model(torch.zeros(4, 2048, device="cuda")).sum().backward()
        for parameter in model.parameters():
            parameter.data = parameter.data.cpu()
        assert not any(each.is_cuda for each in model.parameters())
        assert model.weight.tag == "mine"  # type: ignore[attr-defined]
    assert run.peak.by_kind[Kind.PARAMETER] == (2048 + 1) * 1024 * 4


def test_what_works_on_the_host_is_not_the_card_s_however_large() -> None:
    with fxmem.record("h100", steps=2) as run:
        model = nn.Sequential(*[nn.Linear(1200, 1200) for _ in range(3)])  # each weight is made without memory
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 1200)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.memory_allocated() == 0
        optimizer = torch.optim.AdamW(model.cuda().parameters())
        for _ in range(2):
            model(torch.randn(4, 1200, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(run.rounds) == 2
    layers = [node.module for node in run.profile.nodes if node.op == "call_module"]
    assert layers == ["model.0", "model.1", "model.2"]


def test_a_checkpoint_goes_to_the_card_whole(tmp_path: Path) -> None:
    with fxmem.record("h100"):
        model = nn.Linear(2048, 1024)  # its weight is made without memory, its bias on the host
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 2048)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
        found = torch.load(tmp_path / "both.pt", map_location="cuda")
        states = [tensor for state in found["optimizer"]["state"].values() for tensor in state.values()]
        assert all(each.is_cuda for each in (*found["model"].values(), *states))
        assert len(states) == 6
        # Parameters and two states as large, and of each the number of its step.
        assert torch.cuda.memory_allocated() == 3 * 4 * (2048 + 1) * 1024 + 2 * 512


def test_a_storage_of_a_checkpoint_comes_to_the_card_once_and_whole(tmp_path: Path) -> None:
    """As torch loads each by its number in the file: tied weights, and all that a saved view is a view of."""
    rows = torch.zeros(8, 1 << 18)
    torch.save({"one": rows, "tied": rows, "apart": rows.clone()}, tmp_path / "tied.pt")
    torch.save({"last": rows[6:].t()}, tmp_path / "view.pt")
    with fxmem.record("h100"):
        tied = torch.load(tmp_path / "tied.pt", map_location="cuda")
        assert torch.cuda.memory_allocated() == 2 * 8 << 20
        assert tied["one"].data_ptr() == tied["tied"].data_ptr() != tied["apart"].data_ptr()
        last = torch.load(tmp_path / "view.pt", map_location="cuda")["last"]
        assert torch.cuda.memory_allocated() == 3 * 8 << 20
        assert (last.shape, last.stride()) == ((1 << 18, 2), (1, 1 << 18))


def test_a_deep_copy_shares_memory_where_the_original_does() -> None:
    with fxmem.record("h100"):
        whole = torch.arange(8 << 20, dtype=torch.int64, device="cuda").view(8, -1)
        state = {"whole": whole, "rows": list(whole), "last": whole[-1:, ::2].t()}
        one = torch.tensor([3], device="cuda")
        before = torch.cuda.memory_allocated()
        copied = copy.deepcopy(state)
        assert torch.cuda.memory_allocated() - before == 64 << 20
        assert [each.shape for each in copied["rows"]] == [each.shape for each in state["rows"]]
        assert copied["last"].stride() == state["last"].stride()
        del copied["whole"], copied["last"]
        alone = copy.deepcopy(copied["rows"][3])  # a card copies the whole storage as well
        assert torch.cuda.memory_allocated() - before == 128 << 20
        assert alone.shape == (1 << 20,)
        assert copy.deepcopy(one).item() == 3


def test_a_deep_copy_clones_each_parameter_without_its_gradient() -> None:
    """`Parameter.__deepcopy__`: what shared a block, as FSDP's or cuDNN's flat weights do, has one each."""
    with fxmem.record("h100"):
        flat = torch.zeros(1024, 256, device="cuda")
        layer = nn.Linear(256, 512, bias=False, device="cuda")
        layer.weight.data, layer.other = flat[:512], nn.Parameter(flat[512:768], requires_grad=False)
        layer(flat[:2]).sum().backward()
        layer.weight.note = "ours"
        before = torch.cuda.memory_allocated()
        copied = copy.deepcopy(layer)
        assert torch.cuda.memory_allocated() - before == 4 * 768 * 256
    assert [each.requires_grad for each in (copied.weight, copied.other)] == [True, False]
    assert copied.weight.grad is None
    assert not hasattr(copied.weight, "note")


@pytest.mark.truth
def test_weights_of_a_copied_lstm_are_packed_at_each_call_until_it_flattens_them() -> None:
    nbytes = 4 * (4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 + 128 + 2))

    def train(flatten: bool) -> fxmem.ProgramStep:
        with fxmem.record("h100") as recorded:
            lstm = nn.LSTM(64, 128, num_layers=2, device="cuda")  # one block, as on a card
            assert len({each.untyped_storage().data_ptr() for each in lstm.parameters()}) == 1
            assert len({each.data_ptr() for each in lstm.parameters()}) == 8
            lstm = copy.deepcopy(lstm)
            if flatten:
                lstm.flatten_parameters()
            x = torch.ones(1, 2, 64, device="cuda")
            sum(lstm(x)[0].sum() for _ in range(3)).backward()
        return recorded

    packed, flat = train(False), train(True)
    assert packed.profile.saved_bytes - flat.profile.saved_bytes == 3 * nbytes


def test_a_deep_copy_of_packed_weights_is_recorded() -> None:
    with fxmem.record("h100"):
        weight = NF4Tensor.from_tensor(torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda"), 64, 256)
        layer = nn.Module()
        layer.weight = nn.Parameter(weight, requires_grad=False)
        del weight
        before = torch.cuda.memory_allocated()
        copied = copy.deepcopy(layer)
        assert isinstance(copied.weight, nn.Parameter)
        assert torch.cuda.memory_allocated() == 2 * before > 2 << 19


def test_a_workspace_that_an_earlier_step_took_is_in_the_profile() -> None:
    """Set-up multiplies, the steps do not. From torch 2.15 on each product frees its own."""
    with fxmem.record("h100,torch=2.14") as recorded:
        weight = nn.Parameter(torch.ones(250, 1000, device="cuda"))
        optimizer = torch.optim.SGD([weight], 0.1)
        with torch.no_grad():
            weight @ weight.t()
        for _ in range(2):
            (weight * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (workspace,) = [each for each in recorded.profile.storages if each.name.startswith("cuBLAS workspace")]
    assert (workspace.nbytes, workspace.op, workspace.birth) == (32 << 20, None, 0)
    assert recorded.rounds[-1].requested_bytes == recorded.peak.requested_bytes
    assert recorded.rounds[-1].allocated_bytes == recorded.peak.allocated_bytes


def test_torch_cuda_answers_with_the_prediction() -> None:
    with fxmem.record("h100") as recorded:
        assert torch.cuda.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.cuda.memory_allocated() == 0
        kept = torch.empty(1000, device="cuda")
        assert torch.cuda.memory_allocated() == 4096
        assert torch.cuda.memory_reserved() == 2 << 20
        torch.empty(1 << 20, device="cuda")
        assert torch.cuda.max_memory_allocated() == 4096 + (4 << 20)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 4096
        free, total = torch.cuda.mem_get_info()
        context = context_range(catalogue.target("h100"))
        assert context is not None
        assert total - free == torch.cuda.memory_reserved() + context.low
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
        assert "predicted by fxmem" in torch.cuda.memory_summary()
        del kept
    assert recorded.rounds[0].requested_bytes == 4000 + (4 << 20)


def test_a_round_requests_what_its_allocator_is_asked_for() -> None:
    """Workspaces of libraries among it, which are no tensors of the program."""
    answered = []
    with fxmem.record("rtx4090") as recorded:
        model = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.zeros(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            answered.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
            torch.cuda.reset_peak_memory_stats()
    assert [each.requested_bytes for each in recorded.rounds] == answered
    assert recorded.peak.requested_bytes == max(answered)
    assert recorded.peak.by_kind[Kind.WORKSPACE] > 8 << 20


def test_the_card_counts_workspaces_of_convolutions_in_rounds_below_the_peak() -> None:
    peaks = []
    with fxmem.record("h100"):
        large, conv = nn.Linear(4096, 4096, device="cuda"), nn.Conv2d(64, 128, 3, padding=1, device="cuda")
        optimizer = torch.optim.SGD([*large.parameters(), *conv.parameters()])
        images = torch.empty(4, 64, 32, 32, device="cuda")
        for model, x in ((large, torch.empty(512, 4096, device="cuda")), (conv, images), (conv, images)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            optimizer.step()
            optimizer.zero_grad()
    assert peaks[1] == peaks[2] < peaks[0]  # in the one in which cuDNN first met it as well


def test_the_first_round_counts_workspaces_of_convolutions_once_it_is_over() -> None:
    with fxmem.record("h100") as recorded:
        conv = nn.Conv2d(64, 128, 3, padding=1, device="cuda")
        optimizer = torch.optim.SGD(conv.parameters())
        for _ in range(3):
            conv(torch.empty(4, 64, 32, 32, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    first, second, third = recorded.rounds
    assert any(storage.kind is Kind.WORKSPACE and storage.birth for storage in recorded.profile.storages)
    assert first.allocated_bytes == second.allocated_bytes == third.allocated_bytes == recorded.peak.allocated_bytes
    assert first.reserved_bytes == third.reserved_bytes == recorded.peak.reserved_bytes


def test_what_setting_up_has_reserved_stays_reserved() -> None:
    with fxmem.record("h100") as recorded:
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(8))).to(torch.bfloat16)
        with torch.no_grad():
            model(torch.empty(8, 2048, device="cuda", dtype=torch.bfloat16))
        printed = torch.cuda.max_memory_reserved()
    alone = replay(recorded.profile).reserved_bytes
    assert alone is not None
    assert recorded.peak.reserved_bytes == printed > alone >= 2048 * 2048 * 8 * 4
    process = recorded.peak.process_bytes
    assert process is not None
    assert process.low > printed
    assert recorded.program.shown == 0  # set-up is the highest: each weight in both dtypes
    levels = known_levels(recorded.profile, recorded.timeline, read_settings({}))
    assert levels is not None
    assert set(levels.reserved_bytes) == {printed}


def test_a_librarys_workspace_comes_after_the_output_of_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an H100's log of a first generation has it: the output of q_proj, the workspace, the output of k_proj."""
    order: list[int] = []
    malloc = CachingAllocator.malloc

    def note(self: CachingAllocator, nbytes: int, stream: int = 0) -> int:
        order.append(nbytes)
        return malloc(self, nbytes, stream)

    monkeypatch.setattr(CachingAllocator, "malloc", note)
    with fxmem.record("h100") as recorded, torch.no_grad():
        layers = nn.Linear(256, 128, bias=False, device="cuda"), nn.Linear(256, 32, bias=False, device="cuda")
        x = torch.empty(48, 256, device="cuda")
        kept = [layer(x) for layer in layers]
        assert len(kept) == torch.cuda.device_count() + 1
    live, order[:] = list(order), []
    replay(recorded.profile, max_steps=1)
    workspace = next(each.nbytes for each in recorded.profile.storages if each.kind is Kind.WORKSPACE)
    expected = [48 * 128 * 4, workspace, 48 * 32 * 4]
    assert [each for each in live if each in expected][:3] == expected
    assert [each for each in order if each in expected][:3] == expected


def test_out_of_memory_is_raised_where_the_card_would_raise_it() -> None:
    with fxmem.record("rtx3090") as recorded:
        kept = [torch.empty(2 << 30, dtype=torch.uint8, device="cuda") for _ in range(10)]
        # As torch writes it, with the least that a context takes.
        said = r"Tried to allocate 4\.00 GiB\. GPU 0 has a total capacity of [\d.]+ GiB of which [\d.]+ GiB is free\. "
        with pytest.raises(torch.cuda.OutOfMemoryError, match=f"{said}Including non-PyTorch memory, this") as raised:
            torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        assert raised.value.__context__ is None
        kept.append(torch.empty(1 << 20, device="cuda"))  # and the program may go on
    assert recorded.peak.requested_bytes == (20 << 30) + (4 << 20)
    with fxmem.record("rtx3090", out_of_memory="continue") as recorded:
        kept = [torch.empty(4 << 30, dtype=torch.uint8, device="cuda") for _ in range(10)]
    assert recorded.peak.requested_bytes == 40 << 30
    assert recorded.peak.fits is False


def test_what_a_layer_made_until_the_memory_ran_out_is_its_own() -> None:
    """Beside a program that catches the error, and runs the layer on less."""
    with fxmem.record("8GB") as recorded:
        layer = nn.MultiheadAttention(512, 8, batch_first=True).cuda()
        optimizer = torch.optim.AdamW(layer.parameters())
        for rows in (1 << 14, 256):
            x = torch.randn(8, rows, 512, device="cuda")
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                out, _ = layer(x, x, x)
        out.sum().backward()
    name = "multiheadattention"
    nodes, peak = recorded.profile.nodes, recorded.peak
    assert peak.op is not None
    assert nodes[recorded.profile.ops[peak.op].node].target == name
    refused, ran = (index for index, each in enumerate(nodes) if each.target == name)
    assert (nodes[refused].outputs, len(nodes[ran].outputs)) == ((), 2)
    products = [each.node for each in recorded.profile.ops if each.name == "aten.bmm.default"]
    assert products.count(refused) < products.count(ran)
    table = recorded.table()
    assert "optimizer: none that stepped" in table
    del optimizer


def test_a_program_that_ends_for_want_of_memory_has_a_record() -> None:
    def fill() -> None:
        kept = []
        with fxmem.record("rtx3080") as recorded:
            records.append(recorded)
            while True:
                kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))

    records: list[fxmem.RecordedProgram] = []
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fill()
    (recorded,) = records
    assert recorded.peak.fits is False
    assert recorded.peak.requested_bytes == 9 << 30
    assert Path(__file__).name in recorded.peak.shortage
    assert recorded.ending.startswith("ran out of memory at")


OWNERS: tuple[Any, ...] = (
    *(torch, torch.Tensor, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.accelerator),
    *(torch.autograd, torch.jit, torch.utils, torch.multiprocessing, torch.distributed, torch.nn.functional),
    *(nn.Module, nn.DataParallel, nn.parallel, nn.parallel.distributed, DataLoader, torch.optim.Optimizer),
    *(subprocess.Popen, shutil, concurrent.futures.ThreadPoolExecutor),
)
"""Whose names a recording exchanges."""


@pytest.mark.parametrize("has_card", [False, True])
@pytest.mark.parametrize("ending", [None, ZeroDivisionError, KeyboardInterrupt])
def test_torch_is_as_it_was_afterwards(
    ending: type[BaseException] | None, has_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_card:  # whose driver answers, and which nothing may wake

        def wake() -> None:
            raise AssertionError("the card of this machine was touched")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "_lazy_init", wake)
    before = [dict(vars(owner)) for owner in OWNERS]
    state, swaps = torch.get_rng_state(), torch.__future__.get_swap_module_params_on_conversion()
    ended = pytest.raises(ending) if ending else contextlib.nullcontext()
    with ended, fxmem.record("h100") as recorded:
        assert torch.cuda.device_count() == 1
        torch.manual_seed(7)
        model = Attention().cuda()
        training(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2, 8, dtype=torch.long).cuda(), 2)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() > 0
        if ending is not None:
            raise ending
    assert len(recorded.rounds) == 2
    for owner, names in zip(OWNERS, before, strict=True):
        found = vars(owner)
        assert [name for name, value in names.items() if found.get(name, owner) is not value] == [], owner
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.__future__.get_swap_module_params_on_conversion() is swaps
    assert type(torch.zeros(1)) is torch.Tensor
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_program_that_is_stopped_before_its_first_step_ends_is_told_so() -> None:
    with fxmem.record("h100", max_operators=2) as recorded:
        layer = torch.nn.Linear(3, 3, device="cuda")
        for _ in range(5):
            layer(torch.ones(2, 3, device="cuda")).sum().backward()
    said = r"stopped within step 1 at .*, after 2 operators: --max-operators N .* more, .*\. Until then it requested "
    with pytest.raises(AnalysisError, match=said):
        _ = recorded.profile


def test_operators_count_without_a_module_and_in_set_up() -> None:
    with fxmem.record("h100", max_operators=20) as recorded:
        x = torch.zeros(4, device="cuda")
        while True:
            x = torch.sin(x) * 2
    assert re.fullmatch(r"stopped within set-up at .*test_program\.py:\d+, after 100 operators: .*", recorded.ending)


def test_a_program_that_never_uses_the_card_is_told_so() -> None:
    with fxmem.record("h100") as recorded:
        torch.zeros(3)
    with pytest.raises(AnalysisError, match=r"nothing ran on h100"):
        _ = recorded.profile

    def train() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fxmem.record("h100"):
            for _ in range(100):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    with pytest.raises(AnalysisError, match="trains on the CPU"):
        train()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps of at least 1"),
        ({"out_of_memory": "ignore"}, "out_of_memory 'raise' or 'continue'"),
        ({"target": "h1000"}, "h1000"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message), fxmem.record(**wrong):
        pass


def test_a_recording_within_another_is_refused() -> None:
    with pytest.raises(UsageError, match="no analysis within another"), fxmem.record("h100"):
        fxmem.analyze(Mlp(), torch.randn(2, 256))


# --- the CPU as target ------------------------------------------------------------------------------------------------


def test_a_program_for_the_cpu() -> None:
    loader = DataLoader(TensorDataset(torch.randn(64, 256), torch.arange(64) % 4), batch_size=16, num_workers=2)
    with fxmem.record("cpu", steps=2) as recorded:
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorded.peak.allocated_bytes is None
    assert len(recorded.rounds) == 2
    assert recorded.rounds[-1].requested_bytes == recorded.peak.requested_bytes


def test_a_model_made_before_the_recording_trains_on_the_cpu() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Mlp()
        return model, torch.optim.AdamW(model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        while True:
            model(torch.randn(16, 256)).sum().backward()
            assert all(each.data.shape == each.shape for each in model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    before = make()
    with fxmem.record("cpu", steps=2) as recorded:
        train(*before)
    with fxmem.record("cpu", steps=2) as within:
        train(*make())
    assert [each.requested_bytes for each in recorded.rounds] == [each.requested_bytes for each in within.rounds]
    assert recorded.profile.step.optimizer == "AdamW"


def test_what_a_file_gives_within_a_step_is_no_operators_on_the_cpu() -> None:
    layer, file = nn.Linear(8, 64), io.BytesIO()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with fxmem.record("cpu") as recorded:
        for step in range(2):
            if step:
                torch.save(torch.get_rng_state(), file)
                file.seek(0)
                loaded = torch.load(file)
            layer(torch.ones(512, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    profile, states = recorded.profile, [each for each in recorded.profile.storages if each.dtype == "uint8"]
    made = [(each, profile.ops[each.op]) for each in profile.storages if each.op is not None]
    assert all(op.begin <= each.birth < op.end for each, op in made)
    assert [each.op is None for each in states] == [False, True, True]  # the generator's, in the file, and read from it
    assert {each.nbytes for each in states} == {loaded.nbytes}
    assert not recorded.findings


def test_a_round_on_the_cpu_counts_what_a_kernel_has_for_itself() -> None:
    """`_log_softmax` copies an input that is not contiguous."""
    layer = torch.nn.Linear(8, 64)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with fxmem.record("cpu", steps=2) as recorded:
        while True:
            torch.log_softmax(layer(torch.zeros(512, 8)).t(), 1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    copied = [each for each in recorded.profile.storages if each.kind is Kind.WORKSPACE]
    assert max(each.nbytes for each in copied) == 512 * 64 * 4
    assert recorded.rounds[-1].requested_bytes == recorded.peak.requested_bytes


def test_pooling_backward_copies_what_lies_in_another_layout_on_the_cpu() -> None:
    with fxmem.record("cpu") as recorded:
        x = torch.empty_strided((1, 16, 28, 66), (29568, 1, 1056, 16)).requires_grad_()  # as channels_last
        pooled = nn.functional.max_pool2d(x, (1, 2)).transpose(1, 3)
        pooled.backward(torch.ones(pooled.shape))
    copied = sorted(each.nbytes for each in recorded.profile.storages if each.kind is Kind.WORKSPACE)
    elements = 16 * 28 * 33
    assert copied == [4 * elements, 8 * elements, 2 * 4 * elements]  # gradient, indices, result


def test_integers_are_real_on_the_cpu_and_counted() -> None:
    with fxmem.record("cpu") as recorded:
        kept = torch.arange(1000)
        assert int(kept.sum()) == 499_500
        torch.zeros(500)
        kept.numpy()  # the same memory
        torch.from_numpy(kept.float().numpy())  # numpy's own
        del kept
    assert recorded.rounds[0].requested_bytes == 8000 + 4000


def test_numpys_memory_is_not_counted_on_the_cpu() -> None:
    array = np.ones((1000, 250), np.float32)
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: torch.from_numpy(array),
        lambda: torch.FloatTensor(array),
        lambda: torch.as_tensor(array)[:, :10],
        lambda: torch.frombuffer(array, dtype=torch.float32).view(1000, 250),
        lambda: torch.utils.dlpack.from_dlpack(array),
    ]
    for make in makers:
        with fxmem.record("cpu") as recorded:
            found = make()
            made = found.t() * found[:].t()  # torch's own, of views
        assert recorded.peak.requested_bytes == 4 * made.numel()
    with fxmem.record("cpu") as recorded:
        copied = torch.tensor(array)
    assert recorded.peak.requested_bytes == 4 * copied.numel()
    with fxmem.record("h100") as recorded:
        moved = torch.from_numpy(array).cuda()
    assert recorded.peak.requested_bytes == 4 * moved.numel()


def test_an_array_keeps_the_memory_of_its_tensor_on_the_cpu() -> None:
    with fxmem.record("cpu") as recorded:
        array = torch.ones(1000, 250).numpy()[:10]
        torch.ones(1000, 250)
        del array
        torch.ones(1000, 375)
    assert recorded.peak.requested_bytes == 2 * 1_000_000
    with fxmem.record("h100") as recorded:
        arrays = [torch.ones(1000, 250, device="cuda").cpu().numpy() for _ in range(2)]
    assert len(arrays) == 2
    assert recorded.peak.requested_bytes == 1_000_000


class Bag:
    """A batch of a class of its own."""

    def __init__(self, rows: list[int]) -> None:
        self.store = {"x": torch.ones(len(rows), 250), "at": torch.tensor(rows)}


def test_batches_of_any_class_are_counted_on_the_cpu() -> None:
    with fxmem.record("cpu") as recorded:
        batches = list(DataLoader(range(2000), batch_size=1000, collate_fn=Bag))
        torch.ones(1, 250)
        assert [batch.store["x"].view(-1).sum() is not None for batch in batches] == [True, True]
    assert recorded.peak.requested_bytes == 2 * (1_000_000 + 8000) + 1000


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_a_model_that_processes_share_is_as_large_as_any(target: str) -> None:
    device = "cpu" if target == "cpu" else "cuda"
    with fxmem.record(target) as recorded:
        model = nn.Linear(250, 1000, device=device).share_memory()
        assert model.weight.share_memory_() is model.weight
    assert recorded.peak.requested_bytes == 1_000_000 + 4000


def test_a_file_in_memory_is_counted_on_the_cpu_as_torch_reports_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000, 250)}, tmp_path / "w.pt")
    save_file({"w": torch.ones(1000, 250)}, tmp_path / "w.safetensors")
    loads: list[tuple[Callable[[], dict[str, torch.Tensor]], str]] = [
        (lambda: torch.load(tmp_path / "w.pt"), ""),
        (lambda: torch.load(tmp_path / "w.pt", mmap=True), "w.pt"),
        (lambda: load_file(tmp_path / "w.safetensors"), "w.safetensors"),
    ]
    for load, file in loads:
        held = (tmp_path / file).stat().st_size if file else 1_000_000
        with fxmem.record("cpu", steps=1) as recorded:
            layer = nn.Linear(250, 1000, bias=False)
            layer.load_state_dict({"weight": load()["w"]}, assign=True)
            view = layer.weight.detach().view(-1)  # the same memory
            optimizer = torch.optim.SGD(layer.parameters())
            layer(torch.ones(2, 250)).sum().backward()
            optimizer.step()
            del view
        first = recorded.rounds[0]
        assert first.requested_bytes == held + 1_000_000 + 2000 + 8000 + 2 * 4
        by_name = {each.name: each.nbytes for each in recorded.profile.storages if each.kind is Kind.PARAMETER}
        assert by_name == {file or "linear.weight": held}


@torch.library.custom_op("fxmem_tests::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    """An operator whose kernel keeps its frames, and with them all around it, in a cycle."""
    error = RuntimeError("no data")
    raise error


failing.register_fake(torch.empty_like)


def test_a_kernel_that_fails_within_keeps_nothing_of_the_program() -> None:
    def run() -> None:
        batch = torch.zeros(1 << 20, device="cuda")
        failing(batch)

    with fxmem.record("h100") as recorded:
        run()
        torch.zeros(1 << 20, device="cuda")
    assert recorded.peak.requested_bytes == 2 * (4 << 20)


def test_what_a_function_drops_is_freed_although_its_module_was_named() -> None:
    def train(model: nn.Module) -> None:
        batch = torch.randn(1 << 20, 1, device="cuda")
        model(torch.randn(1, 256, device="cuda"))  # its name is looked for among these variables
        before = torch.cuda.memory_allocated()
        del batch
        assert torch.cuda.memory_allocated() == before - (4 << 20)

    with fxmem.record("h100"):
        train(Mlp().cuda())


def test_what_a_programs_own_locals_keeps_stays_although_its_variables_are_looked_at() -> None:
    def train(model: nn.Module) -> None:
        nn.functional.linear(torch.ones(1, 256, device="cuda"), torch.ones(256, 256, device="cuda"))
        batch = torch.randn(1 << 20, 1, device="cuda")
        locals()
        before = torch.cuda.memory_allocated()
        del batch
        model(torch.randn(1, 256, device="cuda"))  # its name is looked for among these variables
        kept = 4 << 20 if sys.version_info < (3, 13) else 0  # there each `locals()` is a copy (PEP 667)
        assert torch.cuda.memory_allocated() == before - (4 << 20) + kept
        locals()
        assert torch.cuda.memory_allocated() == before - (4 << 20)

    with fxmem.record("h100"):
        train(Mlp().cuda())


def test_a_model_that_the_program_drops_is_freed_and_its_calls_keep_their_names() -> None:
    def train() -> None:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1)).cuda()
        for _ in range(2):
            model(torch.randn(4, 256, device="cuda")).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    with fxmem.record("h100") as recorded:
        train()
        train()
    first, _, third, _ = recorded.rounds
    assert third.requested_bytes == first.requested_bytes
    with fxmem.record("h100") as recorded:
        nn.Conv2d(3, 8, 3).cuda()(torch.randn(1, 3, 8, 8, device="cuda"))
        model = nn.Linear(256, 256).cuda()
        model(torch.randn(4, 256, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert recorded.profile.modules == {"": "ProgramRoot", "conv2d": "Conv2d", "model": "Linear"}


def test_lbfgs_goes_on_as_where_nothing_has_converged() -> None:
    calls = 0
    with fxmem.record("h100", steps=2) as recorded:
        model = nn.Linear(256, 256).cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.randn(4, 256, device="cuda")).square().mean()
            loss.backward()
            return loss

        while True:
            optimizer.step(closure)
    assert calls == 8
    vectors = [s for s in recorded.profile.storages if s.shape == (256 * 257,) and s.death >= recorded.profile.ticks]
    assert len(vectors) >= 6  # directions and steps of three iterations


def test_pages_and_notes_show_the_rounds_and_what_is_made_up() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        model = Mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training_with_a_look_at_the_loss(model, optimizer)
    page, note = recorded._repr_html_(), recorded.table(width=100)
    for text in (page, note):
        assert "stopped after step 2" in text
        assert "a number read back" in text


def training_with_a_look_at_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A loop that reads its loss."""
    while True:
        loss = model(torch.randn(4, 256, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() > 0


def recorded_with_evaluation(plan: fxmem.Plan | None = None) -> fxmem.RecordedProgram:
    """A net of eight blocks, trained and evaluated; with checkpoints if there is a plan."""
    with fxmem.record("h100", steps=2) as recorded:
        net = nn.Sequential(*(Mlp() for _ in range(8))).cuda()
        if plan is not None:
            fxmem.checkpoint(net, plan)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(4096, 256, device="cuda")
        while True:
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            net.eval()
            with torch.no_grad():
                net(x)
            net.train()
    return recorded


def test_a_plan_from_a_recording_is_carried_out_in_the_program() -> None:
    before = recorded_with_evaluation()
    plan = estimate(before.profile, before.peak, "flat", "75%")
    assert plan.regions
    assert {path for region in plan.all_regions() for path in region.modules} <= set("01234567")
    after = recorded_with_evaluation(plan)
    assert after.peak.requested_bytes == pytest.approx(plan.after.requested_bytes, rel=0.02)
    assert after.peak.counted_bytes < 0.77 * before.peak.counted_bytes
    assert after.rounds[-1].phases[-1] is before.rounds[-1].phases[-1]
    with pytest.raises(UsageError, match="expected application 'modules' for a program, got 'graph'"):
        estimate(before.profile, before.peak, "flat", "75%", "graph")


def test_a_plan_is_for_one_of_the_models_of_a_program() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        first, second = (nn.Sequential(*(Mlp() for _ in range(4))).cuda() for _ in range(2))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        while True:
            second(first(torch.randn(4096, 256, device="cuda"))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(UsageError, match="regions would be in first, second, and a plan is for one"):
        estimate(recorded.profile, recorded.peak, "flat", "65%")


def test_backward_begins_at_an_edge_of_the_graph_as_at_its_tensor() -> None:
    """`torch.autograd.graph.GradientEdge`, by which pipelines go on from outputs that they have let go of."""

    def rounds(root_of: Callable[[torch.Tensor], Any], *, keeps: bool) -> list[Any]:
        with fxmem.record("h100", steps=2) as run:
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                out = model(torch.zeros(128, 64, device="cuda"))
                root, gradient = root_of(out), torch.ones_like(out)
                if not keeps:
                    del out
                torch.autograd.backward((root,), (gradient,))
                out = root = gradient = None
                optimizer.step()
                optimizer.zero_grad()
        return [(each.requested_bytes, each.allocated_bytes) for each in run.rounds]

    edge = torch.autograd.graph.get_gradient_edge
    whole, at_edge, without = rounds(lambda out: out, keeps=True), rounds(edge, keeps=True), rounds(edge, keeps=False)
    assert at_edge == whole
    assert whole[1][0] - without[1][0] == 128 * 64 * 4


@pytest.mark.parametrize(
    ("sizes", "requested", "retained", "repeats"),
    [
        ([8, 8, 1024], 2000, 500, True),
        ([8, 1024], 2000, 500, True),  # DeepSpeed's third step asks other ranks for less than its second
        ([8, 1024], 2001, 500, False),  # as a second step, which begins with the optimizer's state
        ([8, 8, 8, 1024], 2000, 500, False),
        ([8, 1024], 2000, 501, False),
    ],
)
def test_a_step_that_asks_for_no_more_repeats_the_one_before(
    sizes: list[int], requested: int, retained: int, repeats: bool
) -> None:
    usual = Round(requested_bytes=2000, retained_bytes=500, phase=Phase.FORWARD, operators=1)
    record = usual.model_copy(update={"requested_bytes": requested, "retained_bytes": retained})
    before, after = FinishedRound(usual, Counter([8, 8, 1024])), FinishedRound(record, Counter(sizes))
    assert after.repeats(before) == repeats


def test_a_round_is_at_its_peak_where_the_kernels_own_buffers_make_it_one() -> None:
    """All tensors are most in forward; what softmax has for itself in backward is more."""
    with fxmem.record("h100") as run:
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        y = x.softmax(-1)
        torch.empty(2560, 1024, device="cuda")
        y.backward(torch.ones_like(y))
    (only,) = run.program.rounds
    assert (only.phase, run.peak.phase) == (Phase.BACKWARD, Phase.BACKWARD)
    assert only.requested_bytes == run.peak.requested_bytes > 4.5 * (4 << 20)


def test_a_round_is_at_its_peak_where_a_workspace_makes_it_one_that_is_asked_for_after_it() -> None:
    with fxmem.record("v100") as run:
        model = torch.nn.Conv2d(3, 8, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.zeros(32, 3, 64, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    first, second = run.program.steps
    assert first.requested_bytes == second.requested_bytes == run.peak.requested_bytes
    assert first.phase == second.phase == run.peak.phase == Phase.FORWARD
    assert first.place == second.place


def test_a_step_whose_most_is_in_backward_names_the_line_that_its_peak_does() -> None:
    with fxmem.record("h100") as found:
        weight = torch.rand(256, 256, device="cuda", requires_grad=True)
        optimizer = torch.optim.Adam([weight])
        for _ in range(2):
            hidden = (torch.rand(4096, 256, device="cuda") @ weight).sin()
            hidden.cos().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert found.program is not None
    peak, profile = found.peak, found.profile
    assert peak.op is not None
    place = find_place(profile, profile.ops[peak.op].node)
    assert "test_program.py" in place
    assert [(each.phase, each.place) for each in found.program.rounds[:2]] == [(Phase.BACKWARD, place)] * 2


def train_in_parts(micro: int, *, is_gan: bool = False) -> fxmem.RecordedProgram:
    with fxmem.record("l4") as recorded:
        net, other = (nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)).cuda() for _ in range(2))
        optimizer = torch.optim.AdamW([*net.parameters(), *other.parameters()])
        for _ in range(3):
            for number in range(micro):
                x = torch.randn(1024, 512, device="cuda")
                (other if is_gan and number else net)(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorded


def test_a_step_of_several_micro_batches_says_what_one_would_take() -> None:
    many, one = train_in_parts(4), train_in_parts(1)
    (said,) = (each.text for each in program_facts(many.profile) if each.label == "Batches")
    alone, most = (format_bytes(each.peak.requested_bytes) for each in (one, many))
    assert said == f"4 micro-batches to a step, which requests {most}; one alone, {alone}"
    assert alone != most
    for other in (one, train_in_parts(2, is_gan=True)):
        assert "Batches" not in {each.label for each in program_facts(other.profile)}
