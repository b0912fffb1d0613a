"""Predictions held against real CPU runs, byte by byte, over models of three collections and of our own.

The profiler's memory events are the truth. What convolution and attention kernels take for themselves inside one call
is measured per operator and set aside (`profiler_log.WORKSPACE_KERNELS`); everything else must agree within 0.01 %.
"""

import pytest
import torch

from benchmarks import make_inputs
from fxmem import analyze
from fxmem.cli.specs import build_model
from fxmem.cli.specs.inputs import parse_input
from fxmem.errors import UsageError
from fxmem.records.profile import Kind
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.validate import validate, validate_step
from fxmem.validation.verdict import verdict

_TEXT = ("input_ids:2x64", "labels:2x64")
_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}
_KV = {**_SMALL, "num_key_value_heads": 2}
_SWIN = {"patch_size": [4, 4], "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": [7, 7]}
_VIT = {"image_size": 64, "patch_size": 32, "num_layers": 2, "num_heads": 4, "hidden_dim": 128, "mlp_dim": 256}

GPT2 = ("hf:GPT2LMHeadModel", {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1000}, _TEXT)
LLAMA = ("hf:LlamaForCausalLM", _KV, _TEXT)
# Model, settings, inputs: of what is built from the same operators, one. `make -C benchmarks zoo` has all.
WITHOUT_CONVOLUTION = [
    ("torchvision.models.swin_transformer:SwinTransformer", _SWIN, ("1x3x96x96",)),
    GPT2,
    LLAMA,
    ("hf:Gemma2ForCausalLM", {**_KV, "head_dim": 32}, _TEXT),
    (
        "hf:T5ForConditionalGeneration",
        {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 32, "vocab_size": 1000},
        ("input_ids:2x64", "decoder_input_ids:2x32", "labels:2x32"),
    ),
]
WITH_CONVOLUTION = [
    ("torchvision:resnet18", {}, ("2x3x64x64",)),
    ("torchvision.models.densenet:DenseNet", {"block_config": [3, 4], "num_classes": 10}, ("2x3x64x64",)),
    ("torchvision:mobilenet_v3_small", {}, ("2x3x64x64",)),
    ("torchvision:googlenet", {"init_weights": False}, ("2x3x96x96",)),
    ("torchvision.models.vision_transformer:VisionTransformer", _VIT, ("2x3x64x64",)),
    ("timm:convnext_atto", {}, ("1x3x64x64",)),
]


def _verdict(spec, settings, inputs, mode, **step):
    built = build_model(spec, settings, mode=mode)
    inputs = inputs if mode == "train" else tuple(text for text in inputs if "labels" not in text)
    args, kwargs = make_inputs([parse_input(text) for text in inputs], weights_dtype=built.weights_dtype)
    return validate_step(
        lambda: build_model(spec, settings, mode=mode, device="cpu").module,
        built.module,
        StepRequest(args=args, kwargs=kwargs, name=spec, mode=mode, **step),
        tolerance=1e-4,
    )


@pytest.mark.truth
@pytest.mark.parametrize(
    ("spec", "settings", "inputs", "mode"),
    [(*case, "train") for case in WITHOUT_CONVOLUTION + WITH_CONVOLUTION]
    + [(*case, "infer") for case in WITHOUT_CONVOLUTION[::4] + WITH_CONVOLUTION[::4]],  # every fourth: no backward
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_within_a_hundredth_of_a_percent(spec, settings, inputs, mode):
    verdict = _verdict(spec, settings, inputs, mode)
    assert verdict.within_tolerance, verdict.model_dump_json(exclude={"measurement": {"events"}})


@pytest.mark.parametrize(
    "optimizer", ["sgd", "sgd-momentum", "adam", "rmsprop", "adagrad", "adafactor", "adamw:foreach", "nadam", None]
)
def test_every_optimizer(optimizer):
    assert _verdict(*GPT2, "train", optimizer=optimizer).within_tolerance


@pytest.mark.truth
@pytest.mark.parametrize("spec", ["hf:GPT2LMHeadModel", "torchvision:resnet18"])
def test_autocast(spec):
    case = next(c for c in WITHOUT_CONVOLUTION + WITH_CONVOLUTION if c[0] == spec)
    assert _verdict(*case, "train", precision="bf16").within_tolerance


@pytest.mark.parametrize("reentrant", [False, True])
def test_models_that_checkpoint_already(reentrant):
    spec, settings, inputs = GPT2

    def build(device):
        module = build_model(spec, settings, device=device).module
        kwargs = {"use_reentrant": reentrant}
        if hasattr(module, "activation_checkpointing_enable"):  # its name since transformers 5
            module.activation_checkpointing_enable(kwargs)
        else:
            module.gradient_checkpointing_enable(kwargs)
        return module

    args, kwargs = make_inputs([parse_input(text) for text in inputs])
    # Each region keeps a copy of the CPU's random-number state, 5,056 bytes, which is no tensor of the program.
    assert validate_step(
        lambda: build("cpu"), build("meta"), StepRequest(args=args, kwargs=kwargs, name=spec), tolerance=2e-3
    ).within_tolerance


@pytest.mark.truth
def test_half_precision_weights():
    spec, settings, inputs = LLAMA
    built = build_model(spec, settings, weights_dtype="bf16")
    args, kwargs = make_inputs([parse_input(text) for text in inputs])
    verdict = validate_step(
        lambda: build_model(spec, settings, weights_dtype="bf16", device="cpu").module,
        built.module,
        StepRequest(args=args, kwargs=kwargs, name=spec),
        tolerance=1e-4,
    )
    assert verdict.within_tolerance


def test_a_cache_kept_between_steps_is_there_before_the_measured_one():
    class Caching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)
            self.cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.ones(1024, 64)
            return self.linear(x) * self.cache[: x.shape[0]]

    x = torch.randn(32, 64)
    assert validate_step(Caching, Caching(), StepRequest(args=(x,), name="caching"), tolerance=1e-4).within_tolerance


@pytest.mark.parametrize("optimizer", ["adamw", None])
def test_the_last_of_several_micro_batches_finds_gradients(optimizer):
    class PartlyUsed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(64, 256), torch.nn.Linear(64, 512)

        def forward(self, x):
            return self.used(x).relu()

    x = torch.randn(512, 64)
    analysis = analyze(PartlyUsed(), x, target="cpu", optimizer=optimizer, accumulate=4)
    measured = measure_cpu(PartlyUsed(), StepRequest(args=(x,), optimizer=optimizer, accumulate=4))
    assert measured.resident_by_kind[Kind.GRADIENT] == 4 * (64 * 256 + 256)
    assert verdict(analysis.profile, analysis.peak, measured, 1e-4).within_tolerance


class Widest(torch.nn.Module):
    """Most is alive within forward; it gives a loss of its own, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 2048)

    def forward(self, x):
        logits = self.head(x)
        with torch.no_grad():
            scale = logits.repeat(8, 1).square().mean()
        return {"logits": logits, "loss": (logits * scale).square().mean()}


LOGITS = 4 * 128 * 2048


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"optimizer": None}, {"mode": "infer"}], ids=str)
def test_what_the_loop_holds_of_the_step_before_is_there_until_it_is_replaced(settings):
    x, loss = torch.randn(128, 64), None if "mode" in settings else lambda out: out["loss"]
    peaks, counted = [], []
    for keeps in (True, False):
        options = {"loss": loss, "keep_outputs": keeps, **settings}
        measured = measure_cpu(Widest(), StepRequest(args=(x,), **options))
        analysis = analyze(Widest(), x, target="cpu", **options)
        assert verdict(analysis.profile, analysis.peak, measured, 1e-6).within_tolerance
        assert measured.resident_by_kind.get(Kind.OUTPUT, 0) == (LOGITS + 4) * keeps
        peaks.append(analysis.peak.requested_bytes)
        counted.append(analysis.profile.step.outputs_bytes)
    assert peaks[0] - peaks[1] == LOGITS + 4
    assert counted == [LOGITS + 4] * 2


class Widens(torch.nn.Module):
    """Most is alive within forward, and one of its layers is never used."""

    def __init__(self, clears=False):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(64, 512), torch.nn.Linear(64, 512)
        self.clears = clears

    def forward(self, x):
        if self.clears:
            for parameter in self.parameters():
                parameter.grad = None
        y = self.used(x)
        with torch.no_grad():
            scale = y.repeat(40, 1).square().mean()
        return y.relu() * scale


WIDENS_GRADIENTS = 4 * (64 * 512 + 512)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", None])
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"zero_grad": "before-backward"}, WIDENS_GRADIENTS),
        ({"set_to_none": False}, WIDENS_GRADIENTS),
        ({"zero_grad": "before-backward", "set_to_none": False}, WIDENS_GRADIENTS),
    ],
    ids=str,
)
def test_gradients_of_the_step_before_live_on_where_they_are_kept(optimizer, options, more):
    x = torch.randn(16, 64)
    found = validate(Widens, x, optimizer=optimizer, tolerance=1e-6, **options)
    assert found.within_tolerance
    assert (
        found.predicted.requested_bytes - analyze(Widens(), x, target="cpu", optimizer=optimizer).peak.requested_bytes
        == more
    )
    assert found.measurement.resident_by_kind[Kind.GRADIENT] == WIDENS_GRADIENTS


def test_gradients_that_forward_clears_do_not_take_the_new_ones_with_them():
    x = torch.randn(16, 64)
    analysis = analyze(Widens(clears=True), x, target="cpu", accumulate=2)
    measured = measure_cpu(Widens(clears=True), StepRequest(args=(x,), accumulate=2))
    assert verdict(analysis.profile, analysis.peak, measured, 1e-6).within_tolerance
    kinds = {storage.name: storage.kind for storage in analysis.profile.storages if storage.birth > 0}
    assert kinds["used.weight.grad"] is Kind.GRADIENT


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_bags_of_embeddings(reduce):
    indices, offsets = torch.randint(100, (300,)), torch.arange(256)
    net = torch.nn.EmbeddingBag(100, 8, mode=reduce)
    assert validate(net, (indices, offsets), mode="infer", tolerance=1e-3).within_tolerance


def test_inference_mode_is_what_no_grad_is():
    x = torch.randn(16, 64)
    found = validate(Widens, x, mode="infer", inference_mode=True, tolerance=1e-6)
    assert found.within_tolerance
    assert any(
        "under inference_mode" in each.text
        for each in analyze(Widens, x, mode="infer", inference_mode=True).profile.assumptions
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"zero_grad": "never"}, "expected zero_grad 'after-step' or 'before-backward', got 'never'"),
        ({"zero_grad": "before-backward", "accumulate": 2}, "expected accumulate=1"),
        ({"inference_mode": True}, "expected inference_mode with mode 'infer'"),
    ],
)
def test_settings_of_gradients_that_exclude_each_other_are_refused(options, complaint):
    with pytest.raises(UsageError, match=complaint):
        StepRequest(**options)
