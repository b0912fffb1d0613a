"""Models of three collections, trained with and without checkpoints: everything a step leaves behind is the same to the
last bit."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from fxmem import analyze
from fxmem.checkpointing import apply, graph_names, record_survey, uncheckpoint
from fxmem.cli.specs import build_model
from fxmem.errors import UsageError
from fxmem.records.plan import Region
from fxmem.records.units import Application
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import default_loss
from fxmem.validation.measure_cpu import measure_cpu
from tests.remade import regions_of

_TEXT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
_KV = {**_TEXT, "num_key_value_heads": 1}
_T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 50}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 50,
    "decoder_start_token_id": 0,
}
_BART |= {
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_VIT = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 2,
    "num_classes": 5,
    "proj_drop_rate": 0.1,
    "drop_path_rate": 0.1,
}

_MIXER = {"num_classes": 5, "patch_size": 16, "num_blocks": 2, "embed_dim": 128, "proj_drop_rate": 0.1}
_SWIN = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [7, 7]}

# model, settings, side of the image (0: text), whether torch.fx can trace it; of each way to build one, the smallest
MODELS = [
    ("torchvision:resnet18", {"num_classes": 5}, 32, True),
    (
        "torchvision.models.shufflenetv2:ShuffleNetV2",
        {"stages_repeats": [2, 2, 2], "stages_out_channels": [24, 48, 96, 192, 256], "num_classes": 5},
        32,
        True,
    ),
    (
        "torchvision.models.densenet:DenseNet",
        {"growth_rate": 8, "block_config": [2, 3], "num_init_features": 16, "num_classes": 5},
        32,
        True,
    ),
    ("timm:convnext_atto", {"num_classes": 5, "depths": [1, 1, 2, 1], "drop_path_rate": 0.1}, 32, True),
    ("timm.models.mlp_mixer:MlpMixer", {**_MIXER, "img_size": 32, "drop_rate": 0.1}, 32, True),
    ("timm:vit_tiny_patch16_224", _VIT, 32, False),
    (
        "hf:GPT2LMHeadModel",
        {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0},
        0,
        False,
    ),
    ("hf:LlamaForCausalLM", {**_KV, "attention_dropout": 0.1}, 0, False),
    ("hf:Gemma2ForCausalLM", {**_KV, "head_dim": 16}, 0, False),
    ("hf:T5ForConditionalGeneration", _T5, 0, False),
    ("hf:BartForConditionalGeneration", _BART, 0, False),
]


def _inputs(spec, side, batch):
    generator = torch.Generator().manual_seed(batch)
    if side:
        return {
            "x" if spec.startswith(("torchvision", "timm")) else "pixel_values": torch.randn(
                batch, 3, side, side, generator=generator
            )
        }
    tokens = torch.randint(3, 50, (batch, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens, **({"decoder_input_ids": tokens} if "T5" in spec else {})}


def _call(model, inputs):
    return model(inputs["x"]) if "x" in inputs else model(**inputs)


def step(model, inputs):
    """What a training step leaves: outputs, gradients, buffers, the generator's state."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    loss = default_loss(_call(model, inputs))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss.detach(),
        **gradients,
        **{name: buffer.clone() for name, buffer in model.named_buffers()},
        "generator": torch.get_rng_state(),
    }


def differences(one, other):
    assert list(one) == list(other)
    return [
        name
        for name in one
        if (one[name] is None) != (other[name] is None)
        or (one[name] is not None and not torch.equal(one[name], other[name]))
    ]


def region(first, last, names=(), regions=(), **fields):
    return Region(first_node=first, last_node=last, nodes=tuple(names), regions=tuple(regions), **fields)


def at_depth(model, depths):
    """Modules that have others in them, at these depths; one in another."""
    return [
        region(0, 1, modules=(path,))
        for path, module in model.named_modules()
        if path
        and path.count(".") + 1 in depths
        and any(module.children())
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if not _begins_in_place(module)
    ]


def _begins_in_place(module):
    return getattr(next((part for part in module.modules() if not any(part.children())), module), "inplace", False)


def halves(model):
    """Both halves of each `nn.Sequential`, and the middle of each half."""
    found = []
    for path, module in model.named_modules():
        if type(module).forward is nn.Sequential.forward and len(module) >= 4:
            names = [f"{path}.{name}" if path else name for name in module._modules]
            keep = [i for i, child in enumerate(module) if not _begins_in_place(child)]
            cut = min((i for i in keep if i >= len(module) // 2), default=0)
            for first, last in ((keep[0], cut), (cut, len(module))):
                inner = [i for i in keep if first < i < last - 1][:1]
                nested = [region(0, 1, modules=tuple(names[inner[0] : last]))] if inner and last - inner[0] > 1 else []
                if last - first > 1:
                    found.append(region(0, 1, modules=tuple(names[first:last]), regions=nested))
    return found


def remade(model, args, kwargs, share):
    """All that is saved is recomputed, but for this share of values, which are kept."""
    copied = copy.deepcopy(model)
    survey = record_survey(copied)
    copied(*args, **kwargs)
    chance = random.Random(0)
    return regions_of(*survey.finish(), holds=lambda value: chance.random() < share)


def random_cuts(profile, names, seed):
    """Regions with random borders, each with a region of random borders in it; none begins between the making of a
    tensor and a write to it."""
    writing = {op.node for op in profile.ops if op.phase == "forward" and op.name.split(".")[1].endswith("_")}
    torn = {border for i in writing for border in range((profile.nodes[i].view_of or i - 1) + 1, i + 1)}
    at = [i for i, name in enumerate(names) if name is not None]
    whole = [position for position, i in enumerate(at) if i not in torn]
    chance = random.Random(seed)
    found = []
    for first, last in itertools.pairwise(sorted(chance.sample(whole, min(9, len(whole) // 2)))):
        inner = sorted(chance.sample([position for position in whole if first <= position <= last], 2))
        nested = [region(at[inner[0]], at[inner[1] - 1] + 1, [names[i] for i in at[slice(*inner)]])]
        found.append(region(at[first], at[last - 1] + 1, [names[i] for i in at[first:last]], nested))
    return found


@pytest.mark.truth
@pytest.mark.parametrize(("spec", "settings", "side", "traceable"), MODELS, ids=[spec for spec, *_ in MODELS])
def test_a_step_is_the_same_to_the_last_bit(spec, settings, side, traceable):
    torch.manual_seed(0)
    model = build_model(spec, settings, mode="train", device="cpu").module.train()
    batches = [_inputs(spec, side, batch) for batch in (2, 3)]
    plain = copy.deepcopy(model)
    expected = [step(plain, batch) for batch in batches]
    plans = [at_depth(model, (1, 2, 3)), halves(model)]
    assert plans[0]
    for regions in filter(None, plans):
        checkpointed = copy.deepcopy(model)
        assert apply(checkpointed, regions, Application.MODULES) is checkpointed
        assert [differences(one, step(checkpointed, batch)) for one, batch in zip(expected, batches, strict=True)] == [
            [],
            [],
        ]
    args, kwargs = ((batches[0]["x"],), {}) if side else ((), batches[0])
    for regions in (remade(model, args, kwargs, 0.0), remade(model, args, kwargs, 0.3)):
        checkpointed = copy.deepcopy(model)
        apply(checkpointed, regions, Application.OPERATORS)
        assert [differences(one, step(checkpointed, batch)) for one, batch in zip(expected, batches, strict=True)] == [
            [],
            [],
        ]
    profile = analyze(model, args or kwargs, target="cpu", optimizer=None).profile
    if not traceable:
        with pytest.raises(UsageError, match="cannot be rewritten as a graph"):
            graph_names(model, profile, args, kwargs)
        return
    names = graph_names(model, profile, args, kwargs)
    checkpointed = copy.deepcopy(model)
    apply(checkpointed, random_cuts(profile, names, 1), Application.GRAPH)
    assert [differences(one, step(checkpointed, batch)) for one, batch in zip(expected, batches, strict=True)] == [
        [],
        [],
    ]
    assert list(checkpointed.state_dict()) == list(model.state_dict())
    assert type(uncheckpoint(checkpointed)) is type(model)


@pytest.mark.truth
@pytest.mark.parametrize(
    ("spec", "settings", "side", "application"),
    [
        ("timm.models.mlp_mixer:MlpMixer", {**_MIXER, "img_size": 96}, 96, Application.MODULES),
        ("timm.models.mlp_mixer:MlpMixer", {**_MIXER, "img_size": 96}, 96, Application.GRAPH),
        ("torchvision.models.swin_transformer:SwinTransformer", {**_SWIN, "num_classes": 5}, 64, Application.GRAPH),
        ("hf:LlamaForCausalLM", {**_KV, "num_hidden_layers": 4}, 0, Application.MODULES),
        ("hf:AlbertForMaskedLM", {**_TEXT, "embedding_size": 16}, 0, Application.MODULES),
    ],
)
def test_the_analysis_of_a_checkpointed_model_is_what_it_takes(spec, settings, side, application):
    torch.manual_seed(0)
    model = build_model(spec, settings, mode="train", device="cpu").module.train()
    batch = _inputs(spec, side, 8)
    args, kwargs = ((batch["x"],), {}) if side else ((), batch)
    before = analyze(model, args or kwargs, target="cpu", optimizer=None)
    names = graph_names(model, before.profile, args, kwargs) if application is Application.GRAPH else ()
    regions = random_cuts(before.profile, names, 2) if names else at_depth(model, (2, 3))
    apply(model, regions, application)
    after = analyze(model, args or kwargs, target="cpu", optimizer=None)
    measured = measure_cpu(model, StepRequest(args=args, kwargs=kwargs, optimizer=None))
    assert after.profile.saved_bytes < before.profile.saved_bytes
    assert after.peak.requested_bytes < before.peak.requested_bytes
    # The state of the CPU's generator, 5056 bytes for each run of a region that keeps it, is no tensor of the
    # program's.
    kept = 5056 * len(after.profile.recomputed)
    assert 0 <= measured.peak_without_kernel_scratch_bytes - after.peak.requested_bytes <= kept + 256


def test_a_key_value_cache_is_refused_by_its_name():
    torch.manual_seed(0)
    model = build_model("hf:LlamaForCausalLM", _KV, mode="train", device="cpu").module.train()
    batch = _inputs("hf:LlamaForCausalLM", 0, 2)
    apply(model, [region(0, 1, modules=("model.layers.1",))], Application.MODULES)
    with pytest.raises(
        UsageError,
        match=(
            r"region model\.layers\.1 must not be recomputed: it writes to its argument past_key_values "
            r"\(DynamicCache\)"
        ),
    ):
        model(**batch, use_cache=True)
    assert model(**batch, use_cache=False).loss.requires_grad
