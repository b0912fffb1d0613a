"""Changes to a step: what each promises is held against real CPU runs of the changed program."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from fxmem import analyze
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.profile import Kind
from fxmem.simulation.kernels.kernel_settings import KernelSettings
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.whatif.advice.changes import ModelBench, chunked_forward, cross_entropy_in_chunks, find_changes
from fxmem.whatif.advice.in_place import write_release
from fxmem.whatif.advice.suggestions import try_changes
from fxmem.whatif.advice.variant import Change, NotApplicableError, Outcome, Variant, analyse_way

SMALL = 1e-3


class Mlp(nn.Module):
    """Activations of which all but the first may run in place: its input is kept by what made it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self.kept, self.one, self.two, self.three = nn.ReLU(), nn.LeakyReLU(), nn.LeakyReLU(), nn.LeakyReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.kept(torch.exp(self.a(x)))
        for activation in (self.one, self.two, self.three):
            x = activation(self.b(x))
        return self.c(x)


class Speaker(nn.Module):
    """Logits, a loss over them, and an output that holds both."""

    def __init__(self, vocabulary: int = 3000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()), "logits": logits}


def by_key(analysis: Analysis) -> dict[str, Change]:
    return {change.key: change for change in find_changes(analysis)}


def made(analysis: Analysis, key: str) -> Outcome:
    return analyse_way(
        by_key(analysis)[key].make(Variant(analysis.model, analysis.request, environ=dict(os.environ)), analysis)
    )


def measured(model: nn.Module, x: torch.Tensor, **step: Any) -> int:
    return measure_cpu(copy.deepcopy(model), StepRequest(args=(x,), **step)).peak_without_scratch_bytes


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    model(x).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_activations_are_put_in_place_where_autograd_allows_it() -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(512, 64)
    analysis = analyze(model, x, target="cpu")
    changed = made(analysis, "inplace")
    modules = dict(changed.variant.model.named_modules())
    assert [name for name in ("kept", "one", "two", "three") if modules[name].inplace] == ["one", "two", "three"]
    assert not model.one.inplace
    assert changed.peak.requested_bytes < analysis.peak.requested_bytes
    model.one.inplace = model.two.inplace = model.three.inplace = True
    assert changed.peak.requested_bytes == pytest.approx(measured(model, x), rel=SMALL)
    plain = Mlp()
    plain.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), gradients(plain, x), strict=True))
    model.kept.inplace = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, x)


@pytest.mark.parametrize(
    ("key", "optimizer"),
    [("sgd-optimizer", "sgd"), ("sgd-momentum-optimizer", "sgd-momentum"), ("adafactor-optimizer", "adafactor")],
)
def test_another_optimizer_is_worth_what_a_real_run_says(key: str, optimizer: str) -> None:
    model, x = Mlp(), torch.randn(16, 64)
    changed = made(analyze(model, x, target="cpu"), key)
    assert changed.peak.requested_bytes == pytest.approx(measured(model, x, optimizer=optimizer), rel=SMALL)


def test_bfloat16_weights_are_worth_what_a_real_run_says() -> None:
    model, x = Mlp(), torch.randn(512, 64)
    changed = made(analyze(model, x, target="cpu"), "bf16-weights")
    assert model.a.weight.dtype is torch.float32
    assert changed.peak.requested_bytes == pytest.approx(measured(model.to(torch.bfloat16), x.bfloat16()), rel=SMALL)


@pytest.mark.truth
def test_autocast_is_worth_what_a_real_run_says() -> None:
    model, x = Mlp(), torch.randn(2048, 64)
    changed = made(analyze(model, x, target="cpu"), "bf16-autocast")
    assert changed.peak.requested_bytes == pytest.approx(measured(model, x, precision="bf16"), rel=SMALL)


def test_letting_go_of_an_output_is_worth_what_a_real_run_says() -> None:
    class OnlyTheLoss(Speaker):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(ids)["loss"]

    ids = torch.randint(0, 3000, (4, 64))
    analysis = analyze(Speaker(), ids, target="cpu", loss=lambda out: out["loss"])
    release = [change for change in find_changes(analysis) if change.key == "release:head"]
    assert len(release) == 1
    assert release[0].code.startswith("del logits")
    changed = analyse_way(release[0].make(Variant(analysis.model, analysis.request, environ={}), analysis))
    assert changed.peak.requested_bytes < analysis.peak.requested_bytes - 2_000_000
    assert changed.peak.requested_bytes == pytest.approx(measured(OnlyTheLoss(), ids), rel=SMALL)


def test_cross_entropy_in_chunks_is_the_same_loss_and_leaves_torch_as_it_was() -> None:
    before = F.cross_entropy
    analysis = analyze(Speaker(), torch.randint(0, 3000, (4, 64)), target="cpu", loss=lambda out: out["loss"])
    changed = made(analysis, "chunked-loss")
    assert F.cross_entropy is before
    assert changed.peak.requested_bytes < analysis.peak.requested_bytes
    logits, labels = torch.randn(64, 50, dtype=torch.float64, requires_grad=True), torch.randint(0, 50, (64,))
    labels[3] = -100
    expected = F.cross_entropy(logits, labels)
    wanted = torch.autograd.grad(expected, logits)[0]
    with cross_entropy_in_chunks():
        loss = F.cross_entropy(logits, labels)
        smoothed = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert torch.allclose(torch.autograd.grad(loss, logits)[0], wanted, rtol=1e-12)
    assert torch.equal(smoothed, F.cross_entropy(logits, labels, label_smoothing=0.1))


def test_channels_last_is_for_convolutions_and_changes_no_tensor_of_the_users() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    analysis = analyze(model, torch.randn(2, 3, 16, 16), target="h100")
    assert made(analysis, "channels-last").variant.request.args[0].is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous()
    with pytest.raises(NotApplicableError, match="no convolutions"):
        made(analyze(Mlp(), torch.randn(2, 64), target="h100"), "channels-last")


def test_a_change_that_is_there_already_is_not_offered_twice() -> None:
    analysis = analyze(Mlp(), torch.randn(2, 64), target="cpu", precision="bf16")
    for key in ("bf16-autocast", "bf16-weights"):
        with pytest.raises(NotApplicableError, match="already"):
            made(analysis, key)
    assert "expandable-segments" not in by_key(analysis)
    assert not [
        key for key in by_key(analyze(Mlp(), torch.randn(2, 64), target="cpu", optimizer=None)) if "optimizer" in key
    ]


# --- changes of kernels, of what is trained, and of what waits --------------------------------------------------------


def test_a_frozen_part_is_worth_what_a_real_run_says() -> None:
    model, x = Mlp(), torch.randn(64, 64)
    analysis = analyze(model, x, target="cpu")
    for key, paths in (
        ("freeze:all-but-last", ("a", "b", "kept", "one", "two", "three", "c")[:2]),
        ("freeze:b", ("b",)),
    ):
        changed = made(analysis, key)
        assert all(p.requires_grad for p in model.parameters())
        real = copy.deepcopy(model)
        for path in paths:
            real.get_submodule(path).requires_grad_(False)
        assert changed.peak.requested_bytes < analysis.peak.requested_bytes
        whole = measure_cpu(
            real, StepRequest(args=(x,))
        ).peak_bytes  # with the copy of the sum's gradient for a product
        assert changed.peak.requested_bytes == pytest.approx(whole, rel=SMALL)


def test_batches_that_wait_are_counted_and_one_fewer_frees_one() -> None:
    model, x = Mlp(), torch.randn(512, 64)
    plain, waiting = analyze(model, x, target="cpu"), analyze(model, x, target="cpu", prefetch=2)
    nbytes = x.numel() * x.element_size()
    assert waiting.peak.requested_bytes == plain.peak.requested_bytes + 2 * nbytes
    assert waiting.peak.by_kind[Kind.INPUT] == 3 * nbytes
    assert waiting.profile.step.prefetch == 2
    assert any("2 further batches" in each.text for each in waiting.profile.assumptions)
    assert made(waiting, "prefetch-less").peak.requested_bytes == waiting.peak.requested_bytes - nbytes
    assert "prefetch-less" not in by_key(plain)
    with pytest.raises(UsageError, match="expected prefetch to be at least 0, got -1"):
        analyze(model, x, target="cpu", prefetch=-1)


def test_tf32_is_switched_off_for_convolutions_only_and_only_once() -> None:
    model, x = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU()), torch.zeros(8, 32, 32, 32)
    before = torch.backends.cudnn.allow_tf32
    changed = made(analyze(model, x), "tf32-off")
    assert changed.variant.request.settings is not None
    assert changed.variant.request.settings.allow_tf32 is False
    assert torch.backends.cudnn.allow_tf32 is before
    with pytest.raises(NotApplicableError, match="off already"):
        made(analyze(model, x, settings=KernelSettings(allow_tf32=False)), "tf32-off")
    with pytest.raises(NotApplicableError, match="no convolutions"):
        made(analyze(Mlp(), torch.zeros(8, 64)), "tf32-off")


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_kernels_that_do_not_run_are_offered_and_one_the_card_lacks_is_an_error_with_a_reason() -> None:
    analysis = analyze(Attentive(), torch.zeros(2, 256, 128), settings=KernelSettings(sdpa="math"))
    changes = by_key(analysis)
    assert {"sdpa-flash", "sdpa-efficient", "sdpa-cudnn"} <= changes.keys()
    better = made(analysis, "sdpa-efficient")
    assert better.peak.requested_bytes < analysis.peak.requested_bytes
    assert "sdpa-efficient" not in by_key(better.analysis)
    with pytest.raises(AnalysisError):
        made(analysis, "sdpa-flash")  # float32
    assert not [key for key in by_key(analyze(Mlp(), torch.zeros(8, 64))) if key.startswith("sdpa-")]


def test_eager_attention_of_transformers_gets_one_kernel() -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=256, attn_implementation="eager"
    )
    with torch.device("meta"):
        model = transformers.GPT2Model(config)
    ids = {"input_ids": torch.zeros(2, 256, dtype=torch.int64)}
    analysis = analyze(model, ids)
    changed = made(analysis, "sdpa")
    assert changed.peak.requested_bytes < analysis.peak.requested_bytes
    assert model.config._attn_implementation == "eager"
    with pytest.raises(NotApplicableError, match="no transformers model with eager attention"):
        made(changed.analysis, "sdpa")


def test_optimizers_of_other_packages_are_tried_where_they_are_and_never_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AdamW8bit(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, momentum=0.9)

    analysis = analyze(Mlp(), torch.zeros(16, 64), target="cpu")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in ("bitsandbytes", "torchao") else find(name, *rest),
    )
    for package in ("bitsandbytes", "torchao"):
        with pytest.raises(NotApplicableError, match=f"{package} is not installed"):
            made(analysis, f"{package}-8bit")
    package, inner = types.ModuleType("bitsandbytes"), types.ModuleType("bitsandbytes.optim")
    inner.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", inner)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "bitsandbytes" else find(name, *rest)
    )
    assert made(analysis, "bitsandbytes-8bit").peak == made(analysis, "sgd-momentum-optimizer").peak


# --- what is printed can be pasted ------------------------------------------------------------------------------------


def pasted(analysis: Analysis, key: str, **names: Any) -> dict[str, Any]:
    """What the code of a change does to the program's own names."""
    namespace = {
        "torch": torch,
        "model": copy.deepcopy(analysis.model),
        "x": next(iter(analysis.request.args), None),
        "loss_fn": lambda out: out.sum(),
        **names,
    }
    exec(by_key(analysis)[key].code, namespace)
    return namespace


def test_the_code_of_every_change_runs_and_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    model, x = Mlp(), torch.randn(8, 64)
    analysis = analyze(model, x, target="cpu", prefetch=1)
    changed = pasted(analysis, "inplace")["model"]
    assert [name for name in ("kept", "one", "two", "three") if changed.get_submodule(name).inplace] == [
        "one",
        "two",
        "three",
    ]
    assert pasted(analysis, "bf16-weights")["model"].a.weight.dtype is torch.bfloat16
    assert pasted(analysis, "bf16-autocast")["loss"].isfinite()
    images = analyze(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(1, 3, 8, 8))
    assert pasted(images, "channels-last")["x"].is_contiguous(memory_format=torch.channels_last)
    frozen = pasted(analysis, "freeze:all-but-last")["model"]
    assert [name for name, p in frozen.named_parameters() if p.requires_grad] == ["c.weight", "c.bias"]
    whole = copy.deepcopy(model)
    whole(x).sum().backward()
    parts = pasted(analysis, "micro-batches-2", loss_fn=lambda out: 2 * out.sum())["model"]
    assert torch.allclose(parts.a.weight.grad, whole.a.weight.grad, rtol=1e-4, atol=1e-5)
    for key, kind, setting in (
        ("fused-optimizer", "AdamW", {"fused": True}),
        ("forloop-optimizer", "AdamW", {"foreach": False}),
        ("sgd-optimizer", "SGD", {"momentum": 0}),
        ("sgd-momentum-optimizer", "SGD", {"momentum": 0.9}),
        ("adafactor-optimizer", "Adafactor", {}),
    ):
        made_with = pasted(analysis, key)["optimizer"]
        assert type(made_with).__name__ == kind
        assert setting.items() <= made_with.defaults.items()
    released = torch.optim.SGD(model.parameters())
    pasted(analysis, "within-backward", optimizer=released)
    with pytest.raises(UsageError, match="steps within backward already"):
        pasted(analysis, "within-backward", optimizer=released)
    logits, labels = torch.randn(64, 50), torch.randint(0, 50, (64,))
    assert torch.allclose(
        pasted(analysis, "chunked-loss", logits=logits, labels=labels)["loss"],
        F.cross_entropy(logits, labels),
        rtol=1e-5,
    )
    assert pasted(analysis, "prefetch-less", batches=iter([7]))["batch"] == 7


class TwoChanges(ModelBench):
    def changes(self) -> Iterator[Change]:
        return (each for each in super().changes() if each.key in ("within-backward", "fused-optimizer"))


def test_code_of_several_changes_releases_the_gradients_of_the_optimizer_that_it_makes() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    analysis = analyze(model, torch.zeros(1, 64), target="cpu")
    least = analysis.vary(optimizer="adamw:fused,in-backward").peak.requested_bytes
    together = try_changes(TwoChanges(analysis), least, plans=False, progress=lambda _: None).together
    assert together is not None
    assert "+" in together.key
    names: dict[str, Any] = {"model": model}
    exec(together.code, names)
    model(torch.ones(1, 64)).sum().backward()
    assert {int(state["step"]) for state in names["optimizer"].state.values()} == {1}


def test_the_code_of_changes_for_a_card_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    analysis = analyze(Attentive(), torch.zeros(2, 8, 128), settings=KernelSettings(sdpa="math"))
    pasted(analysis, "expandable-segments")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    seen = []

    def loss_fn(out: torch.Tensor) -> torch.Tensor:
        seen.append(
            (
                torch.backends.cuda.flash_sdp_enabled(),
                torch.backends.cuda.mem_efficient_sdp_enabled(),
                torch.backends.cuda.cudnn_sdp_enabled(),
            )
        )
        return out.sum()

    for key, model in (("sdpa-flash", nn.Identity()), ("sdpa-efficient", nn.Identity()), ("sdpa-cudnn", nn.Identity())):
        pasted(analysis, key, model=model, loss_fn=loss_fn)
    assert seen == [(True, False, False), (False, True, False), (False, False, True)]
    before = torch.backends.cudnn.allow_tf32
    try:
        pasted(analysis, "tf32-off")
        assert torch.backends.cudnn.allow_tf32 is False
    finally:
        torch.backends.cudnn.allow_tf32 = before


_NAMELESS = "# keep no name for it, and return without it"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("wide = self.a(x)", "del wide  # after its last use"),
        ("self.kept = self.a(x)", _NAMELESS),
        ("return self.head(x)", _NAMELESS),
        ("x = torch.cat([a,", _NAMELESS),
        ("", _NAMELESS),
    ],
)
def test_what_a_name_holds_is_let_go_by_name_and_what_has_none_otherwise(line: str, code: str) -> None:
    assert write_release(line) == code
    compile(code, "", "exec")


def test_code_is_not_broken_in_a_terminal() -> None:
    many = nn.Sequential(
        nn.Conv2d(3, 8, 3), *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(40))
    )
    changes = by_key(analyze(many, torch.zeros(1, 3, 8, 8), prefetch=1)).values()
    assert max(len(line) for change in changes for line in change.code.splitlines()) <= 64
    changed = pasted(analyze(many, torch.zeros(1, 3, 8, 8)), "inplace")["model"]
    assert all(module.inplace for module in changed.modules() if isinstance(module, nn.ReLU))


def causal(kind: str, **settings: Any) -> nn.Module:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=997, intermediate_size=48, **shape, **settings)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_an_output_layer_in_chunks_is_worth_what_a_real_run_says(kind: str) -> None:
    model, ids = causal(kind), torch.randint(0, 997, (2, 64), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :9] = -100
    analysis = analyze(model, {"input_ids": ids, "labels": labels}, target="cpu", optimizer=None)
    outcome = made(analysis, "chunked-head")
    whole, chunked = copy.deepcopy(model), copy.deepcopy(model)
    expected = whole(input_ids=ids, labels=labels).loss
    expected.backward()
    loss = pasted(analysis, "chunked-head", model=chunked, x=ids, labels=labels)["loss"]
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-6)
    for one, other in zip(chunked.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    model.__class__ = type(kind, (type(model),), {"forward": chunked_forward})
    request = StepRequest(kwargs={"input_ids": ids, "labels": labels}, optimizer=None)
    real = measure_cpu(model, request).peak_without_scratch_bytes
    assert outcome.peak.requested_bytes == pytest.approx(real, rel=SMALL)
    logits = 2 * 64 * 997 * 4
    assert analysis.peak.requested_bytes - outcome.peak.requested_bytes > 2 * logits
    assert outcome.analysis.model.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: causal("Gemma2", head_dim=16), "changes the logits before the loss"),
        (lambda: causal("Mixtral", output_router_logits=True), "the loss is more than the cross-entropy"),
        (lambda: Speaker(), "no causal language model of transformers"),
    ],
    ids=["soft-capped", "balanced", "another"],
)
def test_an_output_layer_that_is_more_than_a_product_stays_whole(model: Any, reason: str) -> None:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    inputs = (ids,) if reason.startswith("no causal") else {"input_ids": ids, "labels": ids}
    with pytest.raises(NotApplicableError, match=reason):
        made(analyze(model(), inputs, target="cpu", optimizer=None), "chunked-head")
