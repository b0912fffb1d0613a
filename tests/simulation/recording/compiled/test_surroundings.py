"""What a compiled analysis leaves as it was, what it refuses, and what its record says."""

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError
from fxmem.records.parts import CompileSettings
from fxmem.records.profile import Kind, Phase
from fxmem.simulation.recording.compiled.compiled_parts import Answers
from tests.simulation.recording.compiled.real import without_kernels

pytestmark = [pytest.mark.truth, pytest.mark.usefixtures("compiler")]


class Raises(nn.Module):
    """Raises in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such batch")


class Shared(nn.Module):
    """Its forward is compiled by the caller, and for an analysis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos().mul(2).sub(1)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))


class Indexes(nn.Module):
    """Reads by indices from memory, through masks, and in 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.table(x.long() * 2 + 1)).unflatten(0, (4, 4)).permute(2, 0, 1)
        pooled: torch.Tensor = nn.functional.max_pool2d(found, 3, 2, 1) + found.relu().mean((1, 2), keepdim=True)
        return pooled


def _state() -> tuple[object, ...]:
    names = ("is_available", "current_stream", "_lazy_init", "device", "get_device_properties")
    guards: Any = torch._C._dynamo.guards
    return (
        {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        [getattr(torch.cuda, name) for name in names],
        guards._empty_strided_cuda,
        guards._reinterpret_tensor,
        torch.nn.functional.scaled_dot_product_attention,
        torch.random.get_rng_state().tolist(),
        logging.getLogger("torch").level,
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ending", ["a step", "an error", "Ctrl-C while compiling", "a real step beside it"])
def test_caches_and_torch_are_left_as_they_were(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inductor, triton = tmp_path / "inductor", tmp_path / "triton"
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", inductor), ("TRITON_CACHE_DIR", triton)):
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    model, x = small(), torch.zeros(4, 32)
    before = _state()
    if ending == "an error":
        with pytest.raises(AnalysisError, match=r"the model raised ValueError: no such batch at .*in forward"):
            fxmem.analyze(Raises(), x, mode="infer", compile=True)
    elif ending == "Ctrl-C while compiling":
        monkeypatch.setattr(torch_inductor, "compile_fx", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            fxmem.analyze(model, x, compile=True)
    elif ending == "a step":
        fxmem.analyze(model, x, compile=True)
    else:
        with without_kernels():
            verdict = fxmem.validate(model, x, compile=True)
        assert verdict.within_tolerance
        assert "aten.addmm.out" in verdict.measurement.set_aside
    assert _state() == before
    assert [*inductor.iterdir(), *triton.iterdir()] == []


def test_what_the_caller_has_compiled_stays_compiled() -> None:
    torch._dynamo.reset()  # a function with many forms, those of other tests, is compiled anew
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    model, x = small(), torch.zeros(4, 32)
    mine: Any = torch.compile(model, backend=backend)
    shared: Any = torch.compile(Shared(), backend=backend)
    expected = mine(x), shared(x)
    before = len(compiled)
    for analysed in (model, Shared()):
        analysis = fxmem.analyze(analysed, x, target="cpu", mode="infer", compile=True)
        assert analysis.profile.step.compiled is not None
        assert analysis.profile.step.compiled.graphs == 1
    assert torch.equal(mine(x), expected[0])
    assert torch.equal(shared(x), expected[1])
    assert len(compiled) == before
    assert torch.equal(shared(torch.zeros(5, 32)), torch.ones(5, 32))
    for _ in range(6):  # dead forms count against dynamo's limit of 8
        again = fxmem.analyze(Shared(), x, target="cpu", mode="infer", compile=True).profile.step.compiled
        assert again is not None
        assert again.graphs == 1


def test_a_torch_compile_that_lightning_has_wrapped_is_called_too() -> None:
    """Its wrapper copies what it is called with, and the copy of a fake tensor reads an address that is not there."""
    import lightning  # noqa: F401 - it wraps torch.compile

    assert torch.compile.__module__ == "torch"
    assert hasattr(torch.compile, "__wrapped__")
    analysis = fxmem.analyze(nn.Linear(8, 8), torch.zeros(2, 8), target="cpu", compile=True)
    assert analysis.profile.step.compiled is not None


def test_what_is_spared_changes_no_line_that_inductor_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write() -> list[str]:
        written.clear()
        fxmem.analyze(Indexes(), torch.zeros(16, dtype=torch.int32), target="h100", compile=True)
        hashed = r"'backend_hash': '\w+'|# (kernel path|AOT ID): .*"  # of Triton's files, the names that come of it
        return [re.sub(hashed, "", text) for text in written]

    def find_outputs(source: str, original: Any = torch_inductor._triton_outputs) -> Any:
        written.append(source)
        return original(source)

    class Wrapper(torch_inductor.Wrapper):
        def __init__(self, path: str, text: str, *rest: Any, **named: Any) -> None:
            written.append(text)
            super().__init__(path, text, *rest, **named)

    monkeypatch.setattr(torch_inductor, "_triton_outputs", find_outputs)
    monkeypatch.setattr(torch_inductor, "Wrapper", Wrapper)
    spared = write()
    monkeypatch.setattr(torch_inductor, "spare_work", contextlib.nullcontext)
    assert any("tl.device_assert" in text or "tl.load(in_ptr0 + (tmp" in text for text in spared)
    assert spared == write()


def test_kernels_are_operators_with_the_line_and_the_module_they_are_of() -> None:
    analysis = fxmem.analyze(small(), torch.zeros(4, 32), target="h100", compile=True)
    profile = analysis.profile
    kernels = [op for op in profile.ops if op.name.startswith("triton_")]
    assert {op.phase for op in kernels} == {Phase.FORWARD, Phase.BACKWARD}
    fused = next(node for node in profile.nodes if node.name.startswith("triton_"))
    assert (fused.module, fused.module_type) == ("2", "LayerNorm")
    assert "addmm" in [node.name for node in profile.nodes]
    assert any(storage.kind is Kind.SAVED for storage in profile.storages)
    assert profile.step.compiled is not None
    assert profile.step.compiled.graphs == 2
    assert "torch.compile in mode default" in str([each.text for each in profile.assumptions])
    again = type(analysis.report()).model_validate_json(analysis.to_json())
    assert again.step.compiled == profile.step.compiled


@pytest.mark.parametrize("target", ["h100", "24GB"])
def test_what_is_decided_by_timing_has_two_answers(target: str) -> None:
    model = nn.Linear(1024, 1023, bias=False)
    analysis = fxmem.analyze(
        model, torch.zeros(2048, 1024), mode="infer", target=target, compile=True, precision="bf16", optimizer=None
    )
    made = analysis.profile.step.compiled
    assert made is not None
    assert "2048x1024 by 1024x1023" in made.timed[0].what
    assert made.lowest_peak_bytes is not None
    assert made.highest_peak_bytes is not None
    assert analysis.peak.counted_bytes == made.lowest_peak_bytes < made.highest_peak_bytes
    padded = analysis.vary(compile=CompileSettings(answers={"padding": "padded"}))
    assert padded.peak.counted_bytes == made.highest_peak_bytes
    assert "By timing" in analysis.table()
    assert "whether 1 matrix product is padded (not padded here)" in " ".join(analysis.table().split())


def tuned(answers: Answers) -> fxmem.Analysis:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    settings = CompileSettings(mode="max-autotune-no-cudagraphs", answers=answers)
    return fxmem.analyze(model, torch.zeros(16384, 64), target="h100", compile=settings, optimizer=None)


def test_which_kernel_computes_a_product_has_an_answer_for_each_kind() -> None:
    """The gradient of the weight multiplies 64 x 16384 by 16384 x 64, which is split along 16384."""
    analysis = tuned({})
    made, names = analysis.profile.step.compiled, {op.name for op in analysis.profile.ops}
    assert made is not None
    assert {each.question for each in made.timed} == {"kernel"}
    assert {each.taken for each in made.timed} == {"ATen's kernel"}
    assert any("mm" in name for name in names)
    assert "what kind of kernel computes 2 operators (ATen's kernel here)" in " ".join(analysis.table().split())

    template = tuned({"kernel": "Triton template"})
    assert made.lowest_peak_bytes is not None
    assert made.highest_peak_bytes is not None
    assert made.lowest_peak_bytes < made.highest_peak_bytes
    for each in (analysis, template):
        assert made.lowest_peak_bytes <= each.peak.counted_bytes <= made.highest_peak_bytes
    asked = template.profile.step.compiled
    assert asked is not None
    assert "fusion" in {each.question for each in asked.timed}
    forward = [op.name for op in template.profile.ops if op.phase is Phase.FORWARD]
    assert not any(name.startswith("aten.") and "mm" in name for name in forward)

    split = tuned({"kernel": "several kernels"}).profile
    parts = 128  # what inductor offers, its largest
    assert parts * 64 * 64 * 4 in {storage.nbytes for storage in split.storages}
    assert parts * 64 * 64 * 4 not in {storage.nbytes for storage in analysis.profile.storages}


def test_whether_kernels_become_one_has_two_answers() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Softmax(-1))
    analysis = fxmem.analyze(
        model, torch.zeros(512, 64), mode="infer", target="h100", compile={"options": {"benchmark_fusion": True}}
    )
    made = analysis.profile.step.compiled
    assert made is not None
    assert {each.question for each in made.timed} == {"fusion"}
    assert made.lowest_peak_bytes is not None
    assert made.highest_peak_bytes is not None
    assert made.lowest_peak_bytes == analysis.peak.counted_bytes < made.highest_peak_bytes


class Partly(nn.Module):
    """A compiled part beside one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64)))
        self.last = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x))
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that torch.compile imports
def test_what_comes_compiled_is_compiled_when_asked() -> None:
    def names(compile: str | None) -> set[str]:
        profile = fxmem.analyze(Partly(), torch.zeros(4, 32), target="cpu", compile=compile).profile
        return {op.name for op in profile.ops}

    as_is, eager = names("as-is"), names(None)
    assert any(name.startswith("cpp_fused_") and "native_layer_norm" in name for name in as_is)
    assert "aten.native_layer_norm.default" in eager - as_is
    assert "aten.addmm.default" in eager & as_is  # of the part that is not compiled


@pytest.mark.parametrize(
    ("compile", "message"),
    [
        ("defualt", "closest: default"),
        ({"modes": "default"}, "expected compile with mode, dynamic, options, activation_memory_budget, got 'modes'"),
        ({"options": {"epilogue_fusoin": True}}, "closest: epilogue_fusion"),
        ({"dynamic": "yes"}, "expected dynamic to be True, False or None"),
        ({"activation_memory_budget": 2}, "expected activation_memory_budget from 0"),
    ],
)
def test_arguments_that_torch_compile_does_not_take(compile: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fxmem.analyze(small(), torch.zeros(4, 32), compile=compile)  # type: ignore[arg-type]


def test_a_compiled_step_is_measured_on_the_cpu_alone() -> None:
    with pytest.raises(UsageError, match="expected device cpu with compile"):
        fxmem.validate(small(), torch.zeros(4, 32), device="cuda", compile=True)


def test_without_triton_there_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_inductor, "require_compiler", lambda device: "triton" if device == "cuda" else "")
    with pytest.raises(EnvironmentLacksError, match="expected triton to analyse a compiled step for h100"):
        fxmem.analyze(small(), torch.zeros(4, 32), target="h100", compile=True)


def test_what_eager_code_asks_of_known_numbers_is_answered_where_the_step_compiles() -> None:
    class Asks(nn.Module):
        """Splits its rows by numbers that it reads between two graphs."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            torch._dynamo.graph_break()
            parts = x.split([int(n) for n in _sizes()])
            return torch.cat([parts[0].tanh(), parts[1].relu()]).sum()

    @torch._dynamo.disable
    def _sizes() -> list[float]:
        return torch.arange(1, 3).mul(4).tolist()

    found = fxmem.analyze(Asks(), torch.zeros(12, 16), target="h100", compile=True, optimizer=None)
    assert found.profile.step.compiled is not None
    assert found.profile.step.compiled.graphs == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that torch.compile imports
def test_an_optimizer_that_computes_constants_and_compiles_its_step() -> None:
    pytest.importorskip("torchao")
    model = nn.Linear(64, 64, bias=False)
    model.compile()
    options: dict[str, Any] = {"compile": "as-is", "optimizer": "torchao:AdamW8bit"}
    compiled = fxmem.analyze(model, torch.zeros(2, 64), target="h100", **options).profile
    state = {each.name: each.nbytes for each in compiled.storages if each.kind is Kind.OPTIMIZER_STATE}
    assert state["weight.exp_avg.codes"] == 64 * 64
    assert state["weight.exp_avg.qmap"] == 256 * 4
    assert any("triton" in op.name for op in compiled.ops)
    assert not any("torchao compiles" in each.text for each in compiled.assumptions)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that torch.compile imports
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_a_compiled_step_whose_graph_has_constants_for_the_card(name: str) -> None:
    """The first is traced with tables of known numbers, which inductor copies to the card when it compiles."""
    optim = pytest.importorskip("torchao.optim")
    with fxmem.record("h100", steps=2, compile="as-is") as run:
        model = nn.Linear(64, 64, bias=False, device="cuda")
        optimizer = getattr(optim, name)(model.parameters())
        step = torch.compile(optimizer.step)
        while True:
            model(torch.zeros(2, 64, device="cuda")).sum().backward()
            step()
            optimizer.zero_grad()
    copies = {each.nbytes for each in run.profile.storages if each.name == "constant of a compiled graph"}
    assert copies == ({256 * 4} if name == "AdamW8bit" else set())
    assert len(run.rounds) == 2


def test_products_in_float8_are_written_where_inductor_allocated_their_results() -> None:
    pytest.importorskip("torchao")
    from torchao.float8 import convert_to_float8_training

    def build() -> nn.Module:
        layers = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
        converted: nn.Module = convert_to_float8_training(layers.bfloat16())
        return converted

    found = fxmem.analyze(build, torch.empty(64, 256, dtype=torch.bfloat16), compile="default")
    products = [op for op in found.profile.ops if op.name == "aten._scaled_mm.out"]
    assert len(products) == 5  # two of forward; the input's gradient is of the second alone
    assert not any(
        op.begin <= each.birth < op.end and each.kind is not Kind.WORKSPACE
        for op in products
        for each in found.profile.storages
    )
