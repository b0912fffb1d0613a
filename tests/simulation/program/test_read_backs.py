"""What a program reads back from the card is legal where it is read: it goes on as with a card's own numbers."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental import proxy_tensor

import fxmem
from fxmem.simulation.card.card_memory import describe_shortage
from fxmem.validation.snapshot import read_snapshot
from tests.benchmarks import on_measured_release


def train(read: Callable[[nn.Module, torch.Tensor], Any]) -> tuple[Any, fxmem.RecordedProgram]:
    """What a program reads of its model on the card, which then takes a step."""
    with fxmem.record("rtx3080") as recorded:
        net = nn.Linear(64, 10).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(32, 64).cuda()
        found = read(net, x)
        net(x).square().mean().backward()
        optimizer.step()
    return found, recorded


def choose(net: nn.Module, x: torch.Tensor) -> Any:
    p = net(x).softmax(-1)[0].detach().cpu()
    assert float(p.double().sum()) == 1
    return np.random.default_rng(0).choice(10, p=p.double().numpy())


def choose_in_half(net: nn.Module, x: torch.Tensor) -> Any:
    p = net(x).to(torch.bfloat16).softmax(-1).cpu()
    assert (p.sum(-1) == 1).all()
    return random.choices(range(10), weights=p[0].tolist())[0]


def sample(net: nn.Module, x: torch.Tensor) -> Any:
    drawn = torch.distributions.Categorical(net(x).softmax(-1).cpu()).sample()
    return torch.multinomial(net(x).softmax(-1).cpu(), 1).sum() + drawn.sum()


def rows_by_mask(net: nn.Module, x: torch.Tensor) -> Any:
    mask = (net(x) > -1e9).cpu()
    return [row[keep].tolist()[0] for row, keep in zip(net(x).cpu(), mask, strict=True)]


def divide_by_count(net: nn.Module, x: torch.Tensor) -> Any:
    return 1.0 / (net(x) > 0).sum().item()


def divide_by_norms(net: nn.Module, x: torch.Tensor) -> Any:
    return 1 / float(sum(each.norm().cpu() for each in net.parameters()))


def factorise(net: nn.Module, x: torch.Tensor) -> Any:
    square = (net(x).T @ net(x)).detach().cpu()
    return torch.linalg.inv(square), np.linalg.cholesky(square.numpy())


def order(net: nn.Module, x: torch.Tensor) -> Any:
    places = net(x).argsort(dim=-1).cpu()
    assert (places.sort(-1).values == torch.arange(10)).all()
    best = net(x).topk(3).indices[0].tolist()
    assert len(set(best)) == 3
    return best


def divide_by_frequencies(net: nn.Module, x: torch.Tensor) -> Any:
    """TimesNet: the periods of the largest frequencies but the constant one, by which a series is folded."""
    size = net(x).abs().mean(0)
    size[0] = 0
    for period in len(size) // size.topk(3).indices.cpu().numpy():
        assert 0 < period <= len(size)
    assert size.topk(1).indices.tolist() == [0]  # one alone may be a token's number
    return size.sort().indices.tolist()


def order_columns(net: nn.Module, x: torch.Tensor) -> Any:
    turned = net(x).t()
    assert int(turned.argsort(dim=0).cpu().max()) < 10
    assert int(turned.sort(dim=0, stable=True).indices.cpu().max()) < 10
    return turned.topk(2, dim=0).indices.cpu()


def cast(net: nn.Module, x: torch.Tensor) -> Any:
    p = net(x).softmax(-1)
    assert (p.half().cpu().sum(-1) == 1).all()
    assert p.long().cpu().dtype is torch.int64
    assert type(p[0, 0].long().item() + 0) is not float
    assert (net(x) > 0).sum().bool().item() is False
    return net(x).sigmoid().mul(255).byte().cpu(), net(x)[:, :0].softmax(-1).cpu()


def correlate(net: nn.Module, x: torch.Tensor) -> Any:
    table = np.corrcoef(net(x).detach().cpu().numpy(), rowvar=False)
    assert np.isfinite(table).all()
    return table


def count_classes(net: nn.Module, x: torch.Tensor) -> Any:
    assert torch.bincount(net(x).argmax(-1), minlength=3).shape == (10,)
    assert torch.unique(net(x).argmax(-1)).numel() == 10
    return torch.repeat_interleave(x, (net(x)[:, 0] > 0).long(), dim=0).shape


def count_pixels(net: nn.Module, x: torch.Tensor) -> Any:
    sizes = net(x).sigmoid().ceil()
    assert [net(x)[0, 0].item() for _ in range(2)][1] < 1  # each made-up fraction is below the one before
    assert int(sizes[0, 0].item()) == int(torch.rand(1).add(1e-6).ceil().item()) == 1  # as torchvision's key points
    return sizes[0, 0].cpu().item()


def compare(net: nn.Module, x: torch.Tensor) -> Any:
    assert torch.equal(x, x)
    assert torch.allclose(net.weight, net.weight)
    return torch.equal(net(x), net(x) + 1)


def write_and_read(net: nn.Module, x: torch.Tensor) -> Any:
    again = pickle.loads(pickle.dumps(net.state_dict()))
    net.load_state_dict(again)
    return again["weight"].is_cuda


@pytest.mark.parametrize(
    "read",
    [
        choose,
        choose_in_half,
        sample,
        rows_by_mask,
        divide_by_count,
        divide_by_norms,
        factorise,
        order,
        divide_by_frequencies,
        order_columns,
        cast,
        correlate,
        count_classes,
        count_pixels,
        compare,
        write_and_read,
    ],
)
def test_the_program_goes_on(read: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    found, recorded = train(read)
    assert found is not None
    assert recorded.program.steps


def test_a_mask_of_the_host_keeps_its_values_in_floating_point() -> None:
    """SimCLR's loss: one positive of each row, the others are negatives."""
    shapes: list[torch.Size] = []

    def pair(net: nn.Module, x: torch.Tensor) -> Any:
        labels = torch.cat([torch.arange(2048) for _ in range(2)])
        positive = (labels[None] == labels[:, None]).float().cuda()
        others = ~torch.eye(4096, dtype=torch.bool).cuda()
        positive = positive[others].view(4096, -1)
        similar = torch.empty(4096, 4096, device="cuda")[others].view(4096, -1)
        shapes.extend((similar[positive.bool()].shape, similar[~positive.bool()].shape))

    train(pair)
    assert shapes == [torch.Size([4096]), torch.Size([4096 * 4094])]


class Tagged(torch.Tensor):
    """A plain subclass with an attribute, as torchvision's and fastai's are."""

    tag: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Tagged):
            out.tag = next((each.tag for each in args if isinstance(each, Tagged)), None)
        return out


def test_a_subclass_of_the_host_stays_of_its_class_on_the_card() -> None:
    def move(net: nn.Module, x: torch.Tensor) -> Any:
        tagged = torch.randn(8, 64).as_subclass(Tagged)
        tagged.tag = "left"
        moved = tagged.to("cuda")
        assert isinstance(moved, Tagged)
        assert moved.tag == "left"
        nn.functional.mse_loss(net(moved), torch.zeros(8, 10).as_subclass(Tagged).cuda()).backward()
        return moved

    moved, recorded = train(move)
    assert moved.is_cuda
    assert recorded.peak.requested_bytes > 0


class Distribution(torch.Tensor):
    """BigGAN's noise: a tensor that is given to its class, and moves by its data. Results have no `kind`."""

    kind: str

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = Distribution(self)
        moved.kind = self.kind
        moved.data = super().to(*args, **kwargs)
        return moved

    def sample_(self) -> None:
        self.normal_()


def test_a_tensor_becomes_one_of_a_class_that_is_called_with_it() -> None:
    def draw(net: nn.Module, x: torch.Tensor) -> Any:
        noise = Distribution(torch.zeros(8, 64))
        noise.kind = "normal"
        assert noise.tolist() == torch.zeros(8, 64).tolist()
        noise = noise.to("cuda")
        assert noise.kind == "normal"
        noise.sample_()  # which takes what is known of its values
        net(noise[:4]).sum().backward()  # whose decompositions call `to`
        kept = torch.randn(8, 64, device="cuda")
        alias = Distribution(kept)
        assert alias.data_ptr() == kept.data_ptr()
        return noise, alias, Distribution(3)

    (noise, alias, sized), _ = train(draw)
    assert isinstance(noise, Distribution)
    assert noise.is_cuda
    assert isinstance(alias, Distribution)
    assert type(sized) is Distribution


class Noted(torch.Tensor):
    """A tensor whose results have all of its attributes, as those of libraries for pictures of patients have."""

    note: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        first = next((each for each in args if isinstance(each, Noted)), None)
        if isinstance(out, Noted) and first is not None:
            out.__dict__ = {name: copy.deepcopy(value) for name, value in first.__dict__.items()}
        return out


def test_a_subclass_that_replaces_its_attributes_runs_on_the_card() -> None:
    def move(net: nn.Module, x: torch.Tensor) -> Any:
        noted = torch.randn(8, 64).as_subclass(Noted)
        noted.note = "left"
        out = net(noted.to("cuda") * 2)
        nn.functional.mse_loss(out, torch.zeros(8, 10).cuda()).backward()
        return out, out.cpu(), out.as_subclass(torch.Tensor)

    (out, home, plain), recorded = train(move)
    assert isinstance(out, Noted)
    assert vars(out) == {"note": "left"}
    assert out.is_cuda
    assert type(home) is Noted
    assert home.note == "left"
    assert not isinstance(plain, Noted)
    assert recorded.peak.requested_bytes > 0


def test_a_program_asks_whether_two_tensors_are_one() -> None:
    def ask(net: nn.Module, x: torch.Tensor) -> Any:
        return [x.is_set_to(other) for other in (x, x[:], x[1:], x.clone())]

    assert train(ask)[0] == [True, True, False, False]


def test_a_program_traces_itself() -> None:
    def trace(net: nn.Module, x: torch.Tensor) -> Any:
        parameters = dict(net.named_parameters())

        def energy(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
            x = x.clone().requires_grad_()
            total = torch.func.functional_call(net, parameters, (x,)).sum()
            return total, torch.autograd.grad(total, x, create_graph=True)[0]

        traced = proxy_tensor.make_fx(energy, tracing_mode="symbolic")(parameters, x)
        total, force = traced(parameters, torch.randn(20, 64, device="cuda"))
        (total + force.square().mean()).backward()
        return force.shape

    shape, recorded = train(trace)
    assert shape == (20, 64)
    assert any(each.what == "make_fx: the code as it was written" for each in recorded.made_up)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_scripted_code_runs() -> None:
    def script(net: nn.Module, x: torch.Tensor) -> Any:
        @torch.jit.script
        def scale(x: torch.Tensor) -> torch.Tensor:
            return double(nn.functional.linear(x, x))  # found by its name, where this is written

        module = torch.jit.script(nn.Sequential(nn.Linear(64, 8), nn.ReLU())).cuda()
        module(x).sum().backward()
        return scale(x).shape

    assert train(script)[0] == (32, 32)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_is_one_to_the_program_and_is_saved() -> None:
    def script(net: nn.Module, x: torch.Tensor) -> Any:
        module = torch.jit.script(nn.Linear(64, 8).cuda())
        assert isinstance(module, torch.jit.ScriptModule)
        buffer = io.BytesIO()
        torch.jit.save(module, buffer)
        buffer.seek(0)
        loaded = torch.jit.load(buffer)
        assert isinstance(loaded, torch.jit.ScriptModule)
        assert loaded.weight is not module.weight
        return module(x).shape, loaded(x).shape

    assert train(script)[0] == ((32, 8), (32, 8))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_no_kernel_is_fused_of_a_scripted_function() -> None:
    """TorchScript does so at the third call, for a card that is there."""

    def script(net: nn.Module, x: torch.Tensor) -> Any:
        @torch.jit.script
        def activate(x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x * 2 + 1) * x

        for _ in range(4):
            out = activate(x)
        return out.shape

    assert train(script)[0] == (32, 64)


def test_the_card_is_named_by_the_default_type() -> None:
    with fxmem.record("rtx3080", steps=1) as recorded:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        net = nn.Linear(1024, 1024)
        assert net.weight.is_cuda
        assert torch.Tensor([1e10]).is_cuda
        assert torch.Tensor(2, 3).is_cuda
        assert not torch.isnan(net.weight).any()
        assert net.weight.cpu().device.type == "cpu"
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.randn(64, 1024)).square().mean().backward()
        optimizer.step()
    assert recorded.peak.requested_bytes > 4 << 20
    assert torch.empty(1).device.type == "cpu"
    assert torch.Tensor([1.0]).device.type == "cpu"
    assert torch.get_default_device().type == "cpu"


def test_products_of_half_precision_with_a_wide_result() -> None:
    shapes: list[Any] = []

    def multiply(net: nn.Module, x: torch.Tensor) -> Any:
        a, b = torch.randn(64, 32, device="cuda").half(), torch.randn(32, 16, device="cuda").half()
        total = torch.zeros(64, 16, device="cuda")
        for made in (
            torch.mm(a, b, out_dtype=torch.float32),
            torch.addmm(total, a, b, out_dtype=torch.float32),
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total),
            torch.bmm(a[None], b[None], out_dtype=torch.float32)[0],
            torch.baddbmm(total[None], a[None], b[None], out_dtype=torch.float32)[0],
        ):
            shapes.append((made.dtype, tuple(made.shape)))

    train(multiply)
    assert shapes == [(torch.float32, (64, 16))] * 5


def test_a_program_limits_its_share_of_the_card() -> None:
    with fxmem.record("rtx3080") as recorded:
        torch.cuda.set_per_process_memory_fraction(0.05)
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"499\.36 MiB allowed; ") as raised:
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    assert recorded.peak.requested_bytes == 1 << 28
    said = describe_shortage(str(raised.value), "train.py:1")
    share = "499.36 MiB allowed by set_per_process_memory_fraction"
    assert said == f"It runs out at train.py:1: Tried to allocate 1024.00 MiB, with {share}"
    with pytest.raises(ValueError, match="Invalid fraction value: 2"), fxmem.record("rtx3080"):
        torch.cuda.set_per_process_memory_fraction(2)


def test_a_convolution_runs_by_a_smaller_plan_where_a_program_has_little_room() -> None:
    """Its result, that of the round before and its input are 1,387 MiB; the first plan's workspace is 463 MiB more."""

    def convolve(share: float) -> fxmem.RecordedProgram:
        with fxmem.record("rtx3060") as recorded, torch.no_grad():
            torch.cuda.set_per_process_memory_fraction(share)
            layer, images = nn.Conv2d(64, 64, 3, padding=1).cuda(), torch.randn(256, 64, 86, 86, device="cuda")
            for _ in range(3):
                result = layer(images)
            del result
        return recorded

    peak, short = convolve(1.0).peak, convolve(0.12).peak
    assert peak.allocated_bytes is not None
    assert peak.allocated_bytes > 1800 << 20
    assert (peak.fits, peak.smaller_plans) == (True, 0)
    assert short.reserved_bytes is not None
    assert short.allocated_bytes is not None
    assert 1387 << 20 <= short.allocated_bytes <= short.reserved_bytes <= 0.12 * 12_622_168_064
    assert (short.fits, short.smaller_plans) == (True, 1)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate 464"):
        convolve(0.1)


def test_a_program_sets_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that grow leave pieces that expandable segments join."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    reserved = {}
    for setting in ("expandable_segments:False", "expandable_segments:True"):
        with fxmem.record("rtx3080") as recorded:
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
            kept = torch.empty(1, device="cuda")
            for i in range(1, 40):
                kept = torch.empty(i << 22, device="cuda")
        del kept
        reserved[setting] = recorded.peak.reserved_bytes
        assert recorded.environ["PYTORCH_CUDA_ALLOC_CONF"] == setting
    assert reserved["expandable_segments:True"] < reserved["expandable_segments:False"]


def test_settings_after_cuda_is_initialised_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H200: what a script sets after `torch.cuda.init()` changes nothing."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with fxmem.record("rtx3080") as recorded:
        torch.cuda.init()
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        kept = torch.empty(1 << 20, device="cuda")
    del kept
    assert "PYTORCH_CUDA_ALLOC_CONF" not in recorded.environ


def test_a_program_tries_another_kernel_of_attention() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with fxmem.record("h100"):
        q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
        mask = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="No available kernel"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).shape == q.shape


def group(device: str) -> list[list[int]]:
    """The places of RT-DETR's positive queries for denoising, of each image of a batch."""
    counts, groups = [4, 2, 3], 2
    padding = torch.zeros([3, 4], dtype=torch.bool, device=device)
    for image, count in enumerate(counts):
        padding[image, :count] = 1
    negative = torch.zeros([3, 8, 1], device=device)
    negative[:, 4:] = 1
    positive = (1 - negative.tile([1, groups, 1])).squeeze(-1) * padding.tile([1, 2 * groups])
    places = torch.nonzero(positive)[:, 1].split([count * groups for count in counts])
    return [each.tolist() for each in places]


def test_what_a_program_sets_in_a_mask_is_known() -> None:
    """A part of it is filled with a number; what a card's random numbers fill is not known."""
    with fxmem.record("h100"):
        assert group("cuda") == group("cpu")
        mask = torch.zeros(8, dtype=torch.int64, device="cuda")
        mask[:4].random_(0, 2)
        assert mask.nonzero().shape == (8, 1)


def test_known_results_of_several_tensors_are_on_the_card() -> None:
    with fxmem.record("h100"):
        ids = torch.arange(1 << 16, device="cuda") % 1000
        before = torch.cuda.memory_allocated()
        values, counts = ids.unique_consecutive(return_counts=True)
        assert (values.device.type, len(values), len(counts)) == ("cuda", 1 << 16, 1 << 16)
        assert torch.cuda.memory_allocated() - before == 2 * 8 << 16
        few = ids.unique()
        # The result is as large as what it is of, before it shrinks (seen on an H200).
        assert torch.cuda.memory_allocated() - before == 3 * 8 << 16
        assert len(few) == 1000


def test_a_history_is_written_once() -> None:
    """cuDNN is asked when the first round is over, and all is allocated anew with its workspaces: the history too."""
    with fxmem.record("rtx3080"):
        net = nn.Conv2d(64, 64, 3).cuda()
        torch.cuda.memory._record_memory_history()
        for _ in range(2):
            net(torch.randn(32, 64, 56, 56, device="cuda")).sum().backward()
            net.zero_grad()
        [trace] = torch.cuda.memory._snapshot()["device_traces"]
    rounds = [each["size"] for each in trace if each["action"] in {"alloc", "free_requested"}]
    half = len(rounds) // 2
    assert rounds[:half] == rounds[half:]
    batch = 4 * 32 * 64 * 56 * 56
    assert rounds.count(batch) == 4  # allocated and freed, twice
    tensors = {batch, 4 * 32 * 64 * 54 * 54, 4 * 64 * 64 * 9, 4 * 64, 4, 8}
    assert max(set(rounds) - tensors) > 32 << 20  # a workspace
    assert len({each["frames"][0]["line"] for each in trace}) == 2


def test_a_program_writes_a_snapshot(tmp_path: Path) -> None:
    """As people attach them to reports; `--snapshot` and memory_viz read it."""
    file = tmp_path / "snapshot.pickle"
    with fxmem.record("rtx3080", write=True) as recorded:
        net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
        torch.cuda.memory._record_memory_history(max_entries=10_000)
        net(torch.randn(64, 256, device="cuda")).sum().backward()
        torch.cuda.memory._dump_snapshot(str(file))
        alive, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        segments = torch.cuda.memory_snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
    content = pickle.loads(file.read_bytes())
    assert content["segments"] == segments
    assert sum(each["total_size"] for each in segments) == reserved
    assert sum(each["allocated_size"] for each in segments) == alive
    [trace] = content["device_traces"]
    assert {each["action"] for each in trace} == {"alloc", "free_requested", "free_completed", "segment_alloc"}
    assert all(each["frames"][0]["filename"] == __file__ for each in trace)
    found = read_snapshot(file)
    assert len(found.history) == sum(each["action"] != "free_completed" for each in trace)
    assert recorded.peak.requested_bytes > 0


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2001, 128)
        self.lstm = nn.LSTM(128, 1024, batch_first=True)
        self.linear = nn.Linear(1024, 2001)

    def forward(self, ids: torch.Tensor, states: Any) -> tuple[torch.Tensor, Any]:
        out, states = self.lstm(self.embed(ids), states)
        return self.linear(out.reshape(-1, 1024)), states


@on_measured_release
def test_what_it_reads_of_the_card_is_a_card_s_from_the_first_step_on() -> None:
    """`pytorch-tutorial, language model` on an H200 (benchmarks/results/gpu/h200-public-2026-11-28.json.gz): the
    workspaces of its recurrent layer count in the first step, too."""
    read = []
    with fxmem.record("h200"):
        model = LanguageModel().to("cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
        states = tuple(torch.zeros(1, 20, 1024).to("cuda") for _ in range(2))
        for _ in range(3):
            ids, targets = (torch.randint(0, 2001, (20, 30)).to("cuda") for _ in range(2))
            states = tuple(state.detach() for state in states)
            outputs, states = model(ids, states)
            loss = nn.functional.cross_entropy(outputs, targets.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            read.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    assert read == [(215_880_704, 239_075_328), *[(245_655_040, 281_018_368)] * 2]


def pick_labels(device: str) -> list[Any]:
    """What torchvision's detectors do with the labels of boxes: those above a score, class by class."""
    scores = torch.rand(40, 7, device=device)
    labels = torch.arange(7, device=device).view(1, -1).expand_as(scores)[:, 1:].reshape(-1)
    places = torch.where(scores[:, 1:].reshape(-1) >= 0)[0]
    kept = labels[places]
    kept = kept[scores[:, 1:].reshape(-1)[places] > -1]
    counts = [torch.where(kept == each)[0].numel() for each in torch.unique(kept)]
    drawn = scores.flatten().topk(50).indices
    joined = torch.cat([drawn % 7, kept])
    return [counts, len(kept), len(torch.unique(joined))]


def test_the_classes_of_what_is_picked_are_as_many_as_there_are() -> None:
    """All is picked, as shapes are counted at their largest: what is known of the labels then is what a CPU finds."""
    torch.manual_seed(0)
    with fxmem.record("h100"):
        assert pick_labels("cuda") == pick_labels("cpu") == [[40] * 6, 240, 7]
        x = torch.rand(24, device="cuda")
        table = torch.arange(24, device="cuda") // 6
        sorted_labels = table[x.argsort()]
        assert len(torch.unique(sorted_labels)) == 4  # not 24, and which are where is not known
        assert torch.where(sorted_labels == 2)[0].numel() == 24
        places = torch.where(x > 0.5)[0]
        assert torch.where(table[places.flip(0)] == 2)[0].numel() == 24
        assert torch.where(table[places] == 2)[0].numel() == 6
        assert len(torch.unique((table - 1)[x.argsort()])) == 24  # below zero is no index
        assert len(torch.unique(x * 50 % 7)) == 24
        written = table.clone()
        written[:] = torch.randint(0, 1 << 20, (24,), device="cuda")
        assert len(torch.unique(written)) == 24
