"""Models of other shapes than a plain module of plain tensors: analysed and held against a real CPU run, or refused in
one line that says what to do."""

import typing

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from torchao import quantization

from fxmem import analyze
from fxmem.errors import AnalysisError, FxmemError, UsageError
from fxmem.records.profile import Kind
from fxmem.records.validation import Quantity
from fxmem.simulation.step.given import quantize_weights
from fxmem.validation.validate import validate

WIDTH = 64


class Doing(nn.Module):
    """A module whose forward is a function of it and its arguments, over two linear layers and whatever else is
    given."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.function(self, *args)


def squares(out):
    """A loss whose gradient is no expanded scalar, which CPU products would copy."""
    leaves = [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(out)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    return sum(leaf.square().sum() for leaf in leaves)


def batch(rows=512, width=WIDTH):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def assert_as_measured(model, inputs, *, modes=("train", "infer"), loss=squares, optimizer="adamw"):
    """The predicted peak against the profiler's, what kernels take within one call set aside; the two differ by a
    scalar or two at most."""
    for mode in modes:
        step = {"loss": loss, "optimizer": optimizer} if mode == "train" else {}
        found = validate(model, inputs, mode=mode, **step)
        held = next(c for c in found.comparisons if c.quantity is Quantity.REQUESTED_WITHOUT_SCRATCH)
        assert abs(held.predicted_bytes - held.measured_bytes) <= 16, (mode, held)


def refusal(model, inputs, *, kind=AnalysisError, **step):
    """The one line a model is refused with."""
    with pytest.raises(FxmemError) as caught:
        analyze(model, inputs, **step)
    assert type(caught.value) is kind, caught.value
    text = str(caught.value)
    assert "\n" not in text
    assert "FakeTensor" not in text.replace("runs on FakeTensors", "")
    return text


def notes(analysis, topic="model"):
    return [assumption.text for assumption in analysis.profile.assumptions if assumption.topic == topic]


# --- custom autograd functions ----------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Two outputs, a saved tensor, one kept as an attribute, an argument that is no tensor."""

    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b)
        ctx.scale, ctx.doubled = scale, a * 2
        return a * b * scale, a + b

    @staticmethod
    def backward(ctx, product, total):
        a, b = ctx.saved_tensors
        of_a = product * b * ctx.scale + total if ctx.needs_input_grad[0] else None
        of_b = product * a * ctx.scale + total + ctx.doubled if ctx.needs_input_grad[1] else None
        return of_a, of_b, None


class Largest(torch.autograd.Function):
    """An output that has no gradient: backward is given zeros for it, of its own shape and dtype."""

    @staticmethod
    def forward(ctx, a):
        values, indices = a.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx, of_values, of_indices):
        (indices,) = ctx.saved_tensors
        return torch.empty_like(of_values).scatter_(-1, indices, of_values)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(a):
        return a.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.mark_dirty(a)
        return a.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


FUNCTIONS = {
    "several outputs, attributes": lambda model, x: Product.apply(model.first(x), model.second(x), 3.0),
    "an input without gradient": lambda model, x: Product.apply(x, model.second(x), 3.0),
    "an output without gradient": lambda model, x: Largest.apply(model.first(x)),
    "setup_context, once_differentiable": lambda model, x: model.second(Exponential.apply(model.first(x))),
    "mark_dirty": lambda model, x: model.second(Doubled.apply(model.first(x))),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_custom_functions(function):
    assert_as_measured(Doing(function), batch())


def test_a_step_that_clips_gradients():
    def clipping(parameters):
        optimizer = torch.optim.AdamW(parameters, foreach=False)

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    assert_as_measured(layers(), batch(), modes=("train",), optimizer=clipping)
    assert analyze(layers(), batch(), optimizer=clipping).profile.step.optimizer == "AdamW"


# --- torch.compile, wrappers, exported programs -----------------------------------------------------------------------


def layers():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


@torch.compile(backend="eager")
def compiled_function(x):
    return torch.sin(x) * x


def compiled_in_place():
    model = layers()
    model.compile(backend="eager")
    return model


COMPILED = {
    "the model": (lambda: torch.compile(layers(), backend="eager"), layers),
    "in place": (compiled_in_place, layers),
    "a submodule": (
        lambda: Doing(lambda m, x: m.part(m.first(x)), part=torch.compile(layers(), backend="eager")),
        lambda: Doing(lambda m, x: m.part(m.first(x)), part=layers()),
    ),
    "a function": (
        lambda: Doing(lambda m, x: m.second(compiled_function(m.first(x)))),
        lambda: Doing(lambda m, x: m.second(torch.sin(y := m.first(x)) * y)),
    ),
    "in mid-step": (
        lambda: Doing(lambda m, x: torch.compile(m.second)(m.first(x))),
        lambda: Doing(lambda m, x: m.second(m.first(x))),
    ),
}


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize(("compiled", "eager"), COMPILED.values(), ids=COMPILED)
def test_compiled_code_is_analysed_as_eager_and_says_so(compiled, eager, target):
    analysis, plain = analyze(compiled(), batch(), target=target), analyze(eager(), batch(), target=target)
    assert analysis.peak.requested_bytes == plain.peak.requested_bytes
    assert [node.name for node in analysis.profile.nodes] == [node.name for node in plain.profile.nodes]
    assert any("torch.compile" in note for note in notes(analysis))
    assert not any("torch.compile" in note for note in notes(plain))
    assert compiled_function.__name__ == "compiled_function"


def test_the_graph_of_a_compiled_part_runs_on_the_given_model():
    model, x = Doing(lambda m, x: m.part(m.first(x)), part=torch.compile(layers(), backend="eager")), batch()
    graph_module = analyze(model, x).graph_module
    assert torch.equal(graph_module(x), model.part._orig_mod(model.first(x)))


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_data_parallel_is_taken_off(target):
    plain, wrapped = (
        analyze(layers(), batch(), target=target),
        analyze(nn.DataParallel(layers()), batch(), target=target),
    )
    assert wrapped.peak.requested_bytes == plain.peak.requested_bytes
    assert wrapped.profile.model == "Sequential"
    assert any("DataParallel is left out" in note for note in notes(wrapped))


@pytest.mark.parametrize("path", ["", "part"])
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda model: torch.jit.trace(model, batch())], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused(make, path):
    scripted = make(layers())
    text = refusal(Doing(lambda m, x: m.part(x), part=scripted) if path else scripted, batch())
    assert f"{path or 'the model'} (" in text
    assert "is TorchScript" in text
    assert "Pass the module it was made from" in text


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel_is_taken_off_and_its_buckets_are_named(one_process):
    plain, wrapped = analyze(layers(), batch()), analyze(nn.parallel.DistributedDataParallel(layers()), batch())
    assert wrapped.peak.requested_bytes == plain.peak.requested_bytes
    assert any(
        f"its buckets for reducing gradients ({2 * (WIDTH * WIDTH + WIDTH) * 4} bytes" in note
        for note in notes(wrapped)
    )


def test_sharded_modules_are_refused(one_process):
    sharded = fully_shard(layers(), mesh=one_process)
    text = refusal(sharded, batch())
    assert "the model (FSDPSequential) is sharded by FSDP" in text
    assert "before it is wrapped" in text


def test_exported_programs():
    model = layers()
    program = torch.export.export(model, (batch(),))
    assert "pass program.module()" in refusal(program, batch(), kind=UsageError)
    exported, plain = (analyze(m, batch(), target="cpu", mode="train", loss=squares) for m in (program.module(), model))
    assert exported.peak.requested_bytes == plain.peak.requested_bytes


def test_graph_modules():
    assert_as_measured(torch.fx.symbolic_trace(layers()), batch())


# --- what has no shape of its own -------------------------------------------------------------------------------------


def test_lazy_modules_are_refused_until_they_have_run():
    model = nn.Sequential(nn.LazyLinear(WIDTH))
    assert "0.weight gets its shape at the first call. Run the model once" in refusal(model, batch())
    model(batch())
    assert_as_measured(model, batch())


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_refused(sparse):
    model = Doing(lambda m, x: m.adjacency @ m.first(x))
    model.register_buffer("adjacency", sparse(torch.eye(WIDTH)))
    text = refusal(model, batch(WIDTH))
    assert "adjacency is torch.sparse" in text
    assert "adjacency.to_dense()" in text


@pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization|torch.quantize)")
def test_torch_ao_quantised_modules_are_refused():
    quantised = torch.ao.quantization.quantize_dynamic(layers(), {nn.Linear})
    text = refusal(quantised, batch(), mode="infer")
    assert text.startswith("expected a module that runs on FakeTensors; 0 (Linear) is quantised by torch.ao")
    assert "torchao.quantization.quantize_" in text


# --- quantised weights, adapters --------------------------------------------------------------------------------------


def quantised(config):
    """Two linear layers whose weights torchao has quantised."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    quantization.quantize_(model, getattr(quantization, config)())
    return model


@pytest.mark.parametrize(("config", "weight_bytes"), [("Int8WeightOnlyConfig", 1), ("Float8WeightOnlyConfig", 1)])
def test_torchao_weights_count_as_what_holds_them(config, weight_bytes):
    model = quantised(config)
    assert_as_measured(model, batch(64, 256), modes=("infer",))
    storages = analyze(model, batch(64, 256), mode="infer").profile.storages
    held = {storage.name: storage.nbytes for storage in storages if storage.kind is Kind.PARAMETER}
    assert held["0.weight.qdata"] == 256 * 256 * weight_bytes
    assert held["0.weight.scale"] == 256 * 4


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_trained_layer_before_a_quantised_one(kind):
    frozen = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    quantize_weights(frozen, kind)
    assert_as_measured(nn.Sequential(nn.Linear(256, 256), frozen), batch(64, 256))


@pytest.mark.parametrize(
    ("kind", "rows", "expected"),
    [
        # Rows fill up to 304; a scale and a zero point of bfloat16 for each 128 weights.
        ("int4", 300, {"qdata": 304 * 1024 // 2, "scale_and_zero": 304 * 8 * 2 * 2}),
        # A nibble a weight, a byte for each block of 64, of those a factor for each block of 256; then what is once.
        (
            "nf4",
            320,
            {
                "quantized_data": 320 * 1024 // 2,
                "quantized_scalers": 320 * 16,
                "quantization_factor": 20 * 2,
                "scaler_mean": 2,
                "nf4": 16 * 2,
            },
        ),
    ],
)
def test_quantised_weights_take_the_bytes_of_their_format(kind, rows, expected):
    model = nn.Linear(1024, rows, bias=False, dtype=torch.bfloat16, device="meta")
    quantize_weights(model, kind)
    batch = torch.empty(2, 1024, dtype=torch.bfloat16, device="meta")
    storages = analyze(model, batch, mode="infer", target="h100").profile.storages
    held = {each.name.removeprefix("weight."): each.nbytes for each in storages if each.kind is Kind.PARAMETER}
    assert held == expected


def test_the_head_of_a_quantised_language_model_stays_for_nf4():
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    assert quantize_weights(model, "nf4").startswith("the weights of 7 linear layers are nf4")
    assert type(model.lm_head.weight) is nn.Parameter


def test_what_int4_takes_is_named():
    with pytest.raises(UsageError, match=r"--quantize int4: .*bfloat16.*; --weights bf16 casts the model first"):
        quantize_weights(nn.Linear(1024, 8), "int4")
    assert not torch.cuda.is_available()


class Adapted(nn.Module):
    """A frozen layer with int8 weights and a trained correction of low rank beside it, added in place."""

    def __init__(self):
        super().__init__()
        self.base = quantised("Int8WeightOnlyConfig").requires_grad_(False)
        self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)

    def forward(self, x):
        for layer in self.base:
            result = layer(x)
            if isinstance(layer, nn.Linear):
                result += self.up(self.down(x)) * 2
            x = result
        return x


def test_adapters_beside_quantised_weights():
    assert_as_measured(Adapted, batch(64, 256))


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
@pytest.mark.parametrize("loss", [None, squares])
def test_peft_over_torchao(loss):
    import peft  # seconds, of which other processes that collect this module are spared

    def build():
        return peft.get_peft_model(quantised("Int8WeightOnlyConfig"), peft.LoraConfig(r=4, target_modules=["0", "2"]))

    assert_as_measured(build, batch(64, 256), modes=("train",), loss=loss)


def test_lora_trains_the_adapters_only():
    import peft

    base = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "2"]))
    assert_as_measured(model, batch(64, 256))
    profile = analyze(model, batch(64, 256)).profile
    trained = {storage.name.removesuffix(".grad") for storage in profile.storages if storage.kind is Kind.GRADIENT}
    assert trained
    assert all("lora_" in name for name in trained)


# --- embeddings, complex numbers, parametrizations --------------------------------------------------------------------


def tokens(*shape):
    return torch.randint(0, 1000, shape, generator=torch.Generator().manual_seed(0))


def tied():
    model = nn.Sequential(nn.Embedding(1000, WIDTH), nn.Linear(WIDTH, 1000, bias=False))
    model[1].weight = model[0].weight
    return model


def with_buffers():
    model = Doing(lambda m, x: m.second(m.first(x)) * m.halves.float() + m.whole.sum() + m.flags.float())
    model.register_buffer("halves", torch.ones(WIDTH, dtype=torch.half))
    model.register_buffer("whole", torch.arange(WIDTH))
    model.register_buffer("flags", torch.ones(WIDTH, dtype=torch.bool))
    model.register_buffer("eight", torch.ones(WIDTH).to(torch.float8_e4m3fn))
    return model


PLAIN = {
    "EmbeddingBag": lambda: (
        Doing(lambda m, x, o: m.first(m.bag(x, o)).relu(), bag=nn.EmbeddingBag(1000, WIDTH)),
        (tokens(512), torch.arange(0, 512, 4)),
    ),
    "EmbeddingBag max": lambda: (
        Doing(lambda m, x: m.first(m.bag(x)).relu(), bag=nn.EmbeddingBag(1000, WIDTH, mode="max")),
        tokens(128, 8),
    ),
    "tied weights": lambda: (tied(), tokens(8, 16)),
    "buffers of many dtypes": lambda: (with_buffers(), batch()),
    "FFT": lambda: (
        Doing(
            lambda m, x: torch.fft.irfft(torch.fft.rfft(m.first(x)) * m.filter, n=WIDTH),
            filter=nn.Parameter(torch.ones(33, dtype=torch.cfloat)),
        ),
        batch(),
    ),
    "complex Linear": lambda: (
        Doing(
            lambda m, x: m.mixing(torch.complex(m.first(x), m.second(x))).abs(),
            mixing=nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat),
        ),
        batch(),
    ),
    "weight_norm": lambda: (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))), batch()),
    "spectral_norm": lambda: (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))), batch()),
    "functional_call": lambda: (
        Doing(
            lambda m, x: torch.func.functional_call(
                m.first, {"weight": m.maker(x.mean(0)).view(WIDTH, WIDTH), "bias": m.first.bias}, (x,)
            ),
            maker=nn.Linear(WIDTH, WIDTH * WIDTH),
        ),
        batch(),
    ),
    "GRU": lambda: (Doing(lambda m, x: m.part(m.first(x))[0], part=nn.GRU(WIDTH, WIDTH, 2)), torch.randn(16, 4, WIDTH)),
    "detached branch": lambda: (Doing(lambda m, x: m.second(m.first(x)) + m.first(x).detach() * 2), batch()),
    "no_grad part": lambda: (Doing(lambda m, x: m.second(torch.no_grad()(m.first)(x).relu())), batch()),
    "inference_mode part": lambda: (
        Doing(lambda m, x: m.second(torch.inference_mode()(m.first)(x).relu().clone())),
        batch(),
    ),
}


def penalised(model, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(torch.tanh(model.first(x)).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_other_kinds_of_layer(make):
    assert_as_measured(*make())


def test_a_module_made_and_moved_within_the_step():
    """Losses of some detectors are; a program may also move what it has used already to where it is."""

    def moving(model, x):
        part = nn.Sequential(nn.Linear(WIDTH, 1 << 10), nn.BatchNorm1d(1 << 10))
        part[0].scale = nn.Parameter(torch.tensor([0.5]), requires_grad=False)
        hidden = part.to(x.device).double()(model.first(x).double()) * part[0].scale
        return model.second.to(x.device)(hidden[:, :WIDTH].float() + part.double()[1].weight[:WIDTH].float())

    assert_as_measured(Doing(moving), batch())
    parameters = {(s.shape, s.dtype) for s in analyze(Doing(moving), batch(), target="h100").profile.storages}
    assert ((1 << 10, WIDTH), "float64") in parameters


def test_operators_under_inference_mode_are_taken_apart():
    profile = analyze(PLAIN["inference_mode part"]()[0], batch(), mode="infer").profile
    names = {op.name for op in profile.ops}
    assert "aten.addmm.default" in names
    assert "aten.linear.default" not in names
    assert not [unknown for unknown in profile.unknowns if unknown.topic == "flops"]


def test_a_gradient_taken_inside_forward():
    assert_as_measured(Doing(penalised), batch(), modes=("train",))


@pytest.mark.parametrize("function", [torch.tanh, lambda row: (row * row).sin()])
def test_vmap_over_what_the_step_has_computed(function):
    assert_as_measured(Doing(lambda m, x: torch.func.vmap(function)(m.first(x))), batch())


def test_a_complex_output_needs_a_loss():
    model, x = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat), torch.randn(32, WIDTH, dtype=torch.cfloat)
    assert "complex" in refusal(model, x, kind=UsageError)
    assert_as_measured(model, x, loss=lambda out: out.abs().square().sum())


# --- what a model returns ---------------------------------------------------------------------------------------------


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "pack",
    [Pair, lambda a, b: {"a": {"b": [a, (b,)]}, "n": 3}, lambda a, b: [a, [b, None]]],
    ids=["NamedTuple", "nested dict", "nested list"],
)
def test_outputs_of_many_shapes(pack):
    assert_as_measured(Doing(lambda m, x: pack(m.first(x), m.second(x))), batch())


# --- checkpointing and saved tensors that a program has of its own ----------------------------------------------------


def selective(model, x):
    def keep_products(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(keep_products)

    def body(y):
        return model.second(torch.tanh(model.first(y)).exp()).sin()

    return checkpoint(body, model.second(x), use_reentrant=False, context_fn=contexts, preserve_rng_state=False)


def in_half(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return model.second(torch.tanh(model.first(x)))


def on_cpu(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model.second(torch.tanh(model.first(x)))


CHECKPOINTED = {
    "reentrant": lambda m, x: checkpoint(
        lambda y: m.second(torch.tanh(m.first(y))), m.first(x), use_reentrant=True, preserve_rng_state=False
    ),
    "non-reentrant": lambda m, x: checkpoint(
        lambda y: m.second(torch.tanh(m.first(y))), m.first(x), use_reentrant=False, preserve_rng_state=False
    ),
    "sequential": lambda m, x: checkpoint_sequential(
        [m.first, m.second, m.first, m.second], 2, x, use_reentrant=False, preserve_rng_state=False
    ),
    "selective": selective,
    "packed in half precision": in_half,
    "save_on_cpu": on_cpu,
}


@pytest.mark.parametrize("function", CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_programs_that_choose_what_to_save(function):
    assert_as_measured(Doing(function), batch(), modes=("train",))


def test_save_on_cpu_takes_what_is_saved_off_the_card():
    kept = analyze(Doing(lambda m, x: m.second(torch.tanh(m.first(x)))), batch())
    offloaded = analyze(Doing(on_cpu), batch())
    assert kept.profile.saved_bytes == 2 * 512 * WIDTH * 4 - 512 * WIDTH * 4
    assert offloaded.profile.saved_bytes == 0


# --- hooks ------------------------------------------------------------------------------------------------------------


def deep(width=256, layers=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def stepping_in_backward(optimizer=torch.optim.SGD):
    """https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    model = deep()
    optimizers = {parameter: optimizer([parameter], foreach=False) for parameter in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return model


def scaling_gradients():
    model = deep()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
    return model


def watched_backward():
    model = deep()
    for layer in model[1:]:
        layer.register_full_backward_hook(lambda module, given, made: None)
    return model


@pytest.mark.parametrize("make", [stepping_in_backward, scaling_gradients, watched_backward])
def test_hooks_of_parameters_and_modules(make):
    assert_as_measured(
        make, batch(64, 256), modes=("train",), optimizer=None if make is stepping_in_backward else "adamw"
    )


def test_an_optimizer_within_backward_frees_gradients_as_it_goes():
    model = stepping_in_backward(torch.optim.Adam)
    stepping = analyze(model, batch(64, 256), optimizer=None, loss=squares)
    storages = stepping.profile.storages
    gradients = [s for s in storages if s.nbytes == 256 * 256 * 4 and s.birth > 0 and s.death < stepping.profile.ticks]
    assert len(gradients) >= 4
    momenta = sum(s.nbytes for s in storages if s.birth == 0 and s.kind is Kind.BUFFER)
    assert momenta >= 2 * sum(p.numel() * 4 for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def extractor():
    """Keeps what its layers return, from hooks that close over a dictionary."""
    model, features = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]), {}

    def keep(name):
        def hook(module, args, output):
            features[name] = output

        return hook

    for index, block in enumerate(model):
        block.register_forward_hook(keep(index))
    model.features = features
    return model


def test_hooks_that_keep_features_keep_them_in_the_copy():
    model = extractor()
    kept = analyze(model, batch(64, 256), mode="infer", target="cpu")
    assert not model.features  # nothing of the run is left in the user's own dictionary
    # The four of the step before are there until each is replaced: at the peak with the first layer's results, before
    # and after its ReLU.
    assert kept.peak.requested_bytes == 4 * (256 * 256 + 256) * 4 + (1 + 4 + 2) * 64 * 256 * 4


def test_a_forward_that_closes_over_the_model_runs_on_the_copy():
    model = layers()
    inner = model[0].forward
    model[0].forward = lambda x: inner(x) * model[2].bias.mean()
    assert_as_measured(lambda: model, batch())
    assert analyze(model, batch()).profile.target.device == "cuda"


def test_a_loss_that_closes_over_the_model():
    model = layers()
    plain = analyze(model, batch(), loss=squares)
    decayed = analyze(model, batch(), loss=lambda out: squares(out) + model[0].weight.square().sum())
    assert plain.peak.requested_bytes <= decayed.peak.requested_bytes


def teacher():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]).requires_grad_(False)


def closed_over():
    frozen, target = teacher(), batch()

    def loss(out):
        with torch.no_grad():
            wanted = frozen(target)
        return nn.functional.mse_loss(out, wanted)

    return loss


class Distillation:
    def __init__(self):
        self.frozen = teacher()

    def __call__(self, out):
        return self.compute(out)

    def compute(self, out):
        return (out - self.frozen(out.detach())).square().sum()


GLOBAL_TEACHER = teacher()


def in_a_default():
    def loss(out, *, frozen=GLOBAL_TEACHER):
        return (out - frozen(out.detach())).square().sum()

    return loss


def named_globally(out):
    return (out - GLOBAL_TEACHER(out.detach())).square().sum()


LOSSES = {
    "closure": closed_over,
    "list": lambda: (lambda teachers: lambda out: (out - teachers[0](out.detach())).square().sum())([teacher()]),
    "method": lambda: Distillation().compute,
    "object": lambda: Distillation(),
    "default": in_a_default,
    "global": lambda: named_globally,
}


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_what_the_loss_closes_over_is_resident(make):
    loss, student = make(), layers()
    size = 5 * (WIDTH * WIDTH + WIDTH) * 4
    assert_as_measured(student, batch(), modes=("train",), loss=loss, optimizer="sgd")
    for target in ("cpu", "h100"):
        profile = analyze(student, batch(), loss=loss, optimizer="sgd", target=target).profile
        behind = [s for s in profile.storages if s.name.startswith("loss.") and s.kind is Kind.BUFFER]
        assert sum(storage.nbytes for storage in behind) == size
        assert all(storage.birth == 0 and storage.death == profile.ticks for storage in behind)
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in GLOBAL_TEACHER.parameters())


# --- torch.func -------------------------------------------------------------------------------------------------------

ACTIVATION = 512 * WIDTH * 4
PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH) * 4
FUNC = {
    # Activations alive at the peak of an inference, beside the input.
    "vmap": (lambda m, x: torch.func.vmap(lambda row: torch.tanh(m.first(row)))(x), 2),
    "grad": (lambda m, x: torch.func.grad(lambda y: torch.tanh(m.first(y)).sum())(x), 3),
    "jvp": (lambda m, x: torch.func.jvp(torch.tanh, (m.first(x),), (x,))[1], 3),
}


@pytest.mark.parametrize(("function", "activations"), FUNC.values(), ids=FUNC)
def test_transforms(function, activations):
    assert_as_measured(Doing(function), batch(), modes=("infer",))
    analysis = analyze(Doing(function), batch(), mode="infer", target="cpu", keep_outputs=False)
    assert 0 <= analysis.peak.requested_bytes - PARAMETERS - ACTIVATION * (1 + activations) <= 16
    assert analyze(Doing(function), batch(), loss=squares).profile.saved_bytes >= ACTIVATION


def test_gradients_for_each_sample():
    def each(model, x):
        def loss(parameters, row):
            return torch.func.functional_call(model.first, parameters, (row,)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.first.named_parameters()), x)[
            "weight"
        ]

    analysis = analyze(Doing(each), batch(64), mode="infer")
    assert any(storage.nbytes == 64 * WIDTH * WIDTH * 4 for storage in analysis.profile.storages)


# --- operators of one's own -------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmem_tests::unknown", mutates_args=())
def unknown(a: torch.Tensor) -> torch.Tensor:
    return a * 2


@torch.library.custom_op("fxmem_tests::known", mutates_args=())
def known(a: torch.Tensor) -> torch.Tensor:
    return a * 2


known.register_fake(torch.empty_like)
known.register_autograd(lambda ctx, grad: grad * 2)

_LIBRARY = torch.library.Library("fxmem_tests_cpu", "DEF")
_LIBRARY.define("only(Tensor a) -> Tensor")
_LIBRARY.impl("only", lambda a: a * 3, "CPU")


def test_custom_operators_with_a_fake_kernel():
    assert_as_measured(Doing(lambda m, x: m.second(known(m.first(x)))), batch())
    profile = analyze(Doing(lambda m, x: m.second(known(m.first(x)))), batch()).profile
    assert any(u.topic == "flops" and "fxmem_tests.known" in u.what for u in profile.unknowns)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda m, x: unknown(x), "fxmem_tests::unknown"),
        (lambda m, x: torch.ops.fxmem_tests_cpu.only(x), "fxmem_tests_cpu::only"),
    ],
    ids=["custom_op", "Library"],
)
def test_custom_operators_without_one_are_refused(call, name):
    text = refusal(Doing(call), batch(), mode="infer")
    assert f"{name} has none at {__file__}:" in text
    assert f"@torch.library.register_fake('{name}')" in text


def test_triton_kernels_are_not_launched():
    triton = pytest.importorskip("triton")

    def double(source, target, n):
        raise AssertionError("never runs")

    kernel = triton.jit(double)

    def launching(model, x):
        hidden = model.first(x)
        out = torch.empty_like(hidden)
        kernel[(triton.cdiv(hidden.numel(), 128),)](hidden, out, hidden.numel())
        return model.second(out)

    plain = analyze(Doing(lambda m, x: m.second(torch.empty_like(m.first(x)))), batch())
    analysis = analyze(Doing(launching), batch())
    assert analysis.peak.requested_bytes == pytest.approx(plain.peak.requested_bytes, rel=0.01)
    assert any(u.topic == "flops" and u.what == "triton.double" for u in analysis.profile.unknowns)


# --- flex_attention ---------------------------------------------------------------------------------------------------


def attend_by_scores(model, x, attend=flex_attention):
    first, second = (part(x).view(2, 256, 4, 16).transpose(1, 2) for part in (model.first, model.second))
    return attend(first, second, first, score_mod=model.score and model.score(model), block_mask=model.mask)


def is_before(item, head, query, key):
    return query >= key


def distances(model):
    return lambda score, item, head, query, key: score + (query - key)


def learned_variable(model):
    table = model.table
    return lambda score, item, head, query, key: score + table[head, query - key + 255]


def learned_attribute(model):
    return lambda score, item, head, query, key: score + model.table[head, query - key + 255]


SCORES = [None, distances, learned_variable, learned_attribute]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of its arguments
@pytest.mark.parametrize("score", SCORES, ids=lambda score: getattr(score, "__name__", "plain"))
def test_flex_attention_that_is_not_compiled_keeps_its_scores_as_measured(score, monkeypatch):
    # Its dense kernel runs everywhere, and its gradient is refused on the CPU before that.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    mask = create_block_mask(is_before, None, None, 256, 256, device="cpu") if score is None else None
    table = nn.Parameter(torch.randn(4, 511))
    learns = score in (learned_variable, learned_attribute)
    model = Doing(attend_by_scores, score=score, mask=mask, table=table if learns else None)
    assert_as_measured(model, batch(), optimizer=None)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # as inductor is imported
def test_flex_attention_that_is_compiled_keeps_no_scores():
    def analyze_with(attend, **settings):
        model = Doing(lambda m, x: attend_by_scores(m, x, attend), score=None, mask=None)
        return analyze(model, batch(), loss=squares, target="h100", **settings)

    eager, compiled = analyze_with(flex_attention), analyze_with(torch.compile(flex_attention))
    inductor = analyze_with(flex_attention, compile=True)
    scores = 2 * 4 * 256 * 256 * 4
    made = [{each.nbytes for each in it.profile.storages} for it in (eager, compiled, inductor)]
    assert [scores in sizes for sizes in made] == [True, False, False]
    saved = [sum(node.saved_bytes for node in it.profile.nodes) for it in (compiled, inductor)]
    assert saved[0] == saved[1]
    assert ["torch.compile" in "".join(notes(it)) for it in (eager, compiled)] == [False, True]


# --- refused, with the line -------------------------------------------------------------------------------------------


def with_values(model, x):
    return model.second(x) * len(model.first(x).tolist())


def with_numpy(model, x):
    return model.second(torch.from_numpy(model.first(x).detach().numpy()))


def with_a_branch(model, x):
    return model.second(x) if model.first(x).sum() > 0 else x


def with_packing(model, x):
    packed = nn.utils.rnn.pack_padded_sequence(model.first(x), torch.full((x.shape[0],), x.shape[1]), batch_first=True)
    return model.recurrent(packed)[0].data


def with_nested(model, x):
    return torch.cat(torch.nested.nested_tensor_from_jagged(model.first(x), x[:3, 0].long()).unbind())


def with_two_devices(model, x):
    return model.first(x) + torch.ones(WIDTH)


def with_the_driver(model, x):
    torch.cuda.current_blas_handle()
    return model.first(x)


def with_cond(model, x):
    return torch.cond(x.sum() > 0, model.first, model.second, (x,))


REFUSED = [
    (with_values, "asks for a tensor's value", "Replace .item(), .tolist()"),
    (with_numpy, "asks for a tensor's value (.numpy())", ".numpy()"),
    (with_a_branch, "asks for a tensor's value", "torch.where"),
    (with_packing, "packs sequences by their lengths", "padded batch"),
    (with_nested, "nested tensor, whose lengths are data", "padded batch"),
    (with_two_devices, "mixes cuda:0 with cpu", "device=x.device"),
    (with_the_driver, "CUDA driver", "target='cpu'"),
    (with_cond, "torch's cond", "Call the branch"),
]


def test_a_jagged_tensor_of_known_lengths_is_as_measured():
    def first(model, x):
        return model.first(torch.nested.nested_tensor([x[:100], x[100:]], layout=torch.jagged)).relu().values()

    assert_as_measured(Doing(first), batch())


@pytest.mark.parametrize(("function", "what", "advice"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_only_data_can_tell_is_refused_with_its_line(function, what, advice):
    x = torch.randn(4, 8, WIDTH) if function is with_packing else batch(8)
    text = refusal(Doing(function, recurrent=nn.GRU(WIDTH, WIDTH, batch_first=True)), x, mode="infer")
    assert what in text
    assert advice in text
    assert f"{__file__}:" in text
    assert f"in {function.__name__}: `" in text


def test_nested_inputs_are_refused():
    nested = torch.nested.nested_tensor([batch(4), batch(2)], layout=torch.jagged)
    assert "layout torch.jagged" in refusal(Doing(lambda m, x: m.first(x)), nested)


def test_sparse_gradients_have_a_row_for_each_index():
    model = nn.Sequential(nn.Embedding(1000, WIDTH, sparse=True))
    assert "Adam does not support sparse gradients" in refusal(model, tokens(8, 16), optimizer=torch.optim.Adam)
    assert_as_measured(model, tokens(8, 16), optimizer=torch.optim.SparseAdam)


def test_generators_are_refused():
    def forward(model, x):
        yield model.first(x)

    for mode in ("train", "infer"):
        assert "got a generator" in refusal(Doing(forward), batch(), kind=UsageError, mode=mode)


def test_modules_nested_as_deep_as_python_runs_them():
    class Nested(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.layer, self.inner = nn.Linear(4, 4), Nested(depth - 1) if depth else None

        def forward(self, x):
            return self.layer(x) if self.inner is None else self.inner(self.layer(x))

    model = Nested(150)
    assert model(torch.randn(2, 4)).shape == (2, 4)
    assert len(analyze(model, torch.randn(2, 4), mode="infer").profile.modules) == 1 + 2 * 150 + 1


def test_calls_of_torch_cuda_are_answered_for_the_target():
    def asking(model, x):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert "H100" in torch.cuda.get_device_name()
        return model.second(model.first(x) + torch.zeros(WIDTH, device="cuda") + torch.zeros(WIDTH).cuda())

    assert analyze(Doing(asking), batch()).profile.target.name == "h100"


def test_a_kernel_that_tracers_take_apart_in_python_is_one_operator():
    """Not `_native_batch_norm_legit`, into which `torch._decomp` takes it apart, nor the products that SiLU's backward
    is where there is no kernel for it."""
    found = analyze(nn.Sequential(nn.BatchNorm1d(3), nn.SiLU()), torch.empty(2, 3, device="meta"), target="cpu")
    assert {"aten.native_batch_norm.default", "aten.silu_backward.default"} <= {op.name for op in found.profile.ops}
