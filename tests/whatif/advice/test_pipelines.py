"""Ways to run a pipeline of diffusers: how they are written into a program, and what each is worth."""

from __future__ import annotations

import importlib.util
import math
import shlex
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.hardware import catalogue
from fxmem.records.advice import Advice
from fxmem.records.profile import Report
from fxmem.records.units import format_bytes
from fxmem.simulation.program import Launch
from fxmem.whatif.advice import pipelines, statements
from fxmem.whatif.program_step import ProgramCommand
from fxmem.whatif.source_edits import apply_edits

FORMS = {
    'pipe = FluxPipeline.from_pretrained("x", torch_dtype=torch.bfloat16)\npipe.to("cuda")\npipe("a cat")': (
        'pipe = FluxPipeline.from_pretrained("x", torch_dtype=torch.bfloat16)\npipe.offload()\npipe("a cat")'
    ),
    'pipe = Pipeline(\n    unet,\n).to("cuda")': "pipe = Pipeline(\n    unet,\n)\npipe.offload()",
    'pipe = Pipeline(unet)\npipe = pipe.to("cuda", torch.float16)': (
        "pipe = Pipeline(unet)\npipe = pipe.to(torch.float16)\npipe.offload()"
    ),
    "def load(self):\n    self.pipe = AutoPipelineForText2Image.from_pretrained(name)\n    self.pipe.cuda()": (
        "def load(self):\n    self.pipe = AutoPipelineForText2Image.from_pretrained(name)\n    self.pipe.offload()"
    ),
    'pipe = Pipeline.from_pretrained(name, device_map="cuda", variant="fp16")': (
        'pipe = Pipeline.from_pretrained(name, variant="fp16")\npipe.offload()'
    ),
    "pipe = Pipeline(unet)\npipe.enable_model_cpu_offload()": "pipe = Pipeline(unet)\npipe.offload()",
    # Not known: two places, none, the same already, and what is no pipeline.
    'pipe = Pipeline(unet)\nif fast:\n    pipe.to("cuda")\nelse:\n    pipe.to("cpu")': "",
    "pipe = Pipeline(unet)": "",
    "pipe = Pipeline(unet)\npipe.offload()\npipe.to(torch.float16)": "",
    'config = PipelineQuantizationConfig(kind)\nmodel = Model().to("cuda")': "",
}


@pytest.mark.parametrize("source", FORMS)
def test_a_pipeline_is_put_on_the_card_in_another_way(tmp_path: Path, source: str) -> None:
    file = tmp_path / "sample.py"
    file.write_text(source + "\n")
    edits = [statements.place(each, f"{each.name}.offload()") for each in statements.find_placed(str(file), "Pipeline")]
    written = [text for each in edits for text in apply_edits(each).values()]
    assert written == ([FORMS[source] + "\n"] if FORMS[source] else [])


def test_a_setting_comes_after_the_pipeline_is_there(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text('pipe = Pipeline(unet)\nname = "a"\npipe.to("cuda")\npipe(name)\n')
    (placed,) = statements.find_placed(str(file), "Pipeline")
    (text,) = apply_edits(statements.set_up(placed, "pipe.vae.enable_tiling()")).values()
    assert text.splitlines()[2:4] == ['pipe.to("cuda")', "pipe.vae.enable_tiling()"]


LOADS = {
    'pipe = FluxPipeline.from_pretrained("x", device_map="cuda")': (
        'pipe = FluxPipeline.from_pretrained("x", device_map="cuda", {pipe})'
    ),
    'unet = UNet.from_pretrained(\n    "x",\n)\npipe = Pipeline.from_pretrained("x", unet=unet).to("cuda")': (
        'unet = UNet.from_pretrained(\n    "x",\nq=1)\npipe = Pipeline.from_pretrained("x", unet=unet).to("cuda")'
    ),
    # Not known: a part that is made otherwise, or twice, what has such an argument or may have it.
    'unet = UNet(4)\npipe = Pipeline.from_pretrained("x", unet=unet)': "",
    "unet = UNet.from_pretrained(a)\nunet = UNet.from_pretrained(b)\npipe = Pipeline(unet=unet)": "",
    'pipe = Pipeline.from_pretrained("x", q=2)': "",
    'pipe = Pipeline.from_pretrained("x", **options)': "",
}


@pytest.mark.parametrize("source", LOADS)
def test_a_part_is_loaded_with_an_argument(tmp_path: Path, source: str) -> None:
    file = tmp_path / "sample.py"
    file.write_text(source + "\n")
    (placed,) = statements.find_placed(str(file), "Pipeline")
    edits = statements.load_with(placed, "unet", "q=1", "q=[1]")
    written = "".join(apply_edits(edits).values()).rstrip("\n")
    assert written == LOADS[source].replace("{pipe}", "q=[1]")
    if edits:
        assert statements.write_statement(edits) in written


PROGRAM = """
import torch
from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

sizes = {"block_out_channels": (64, 128), "cross_attention_dim": 64, "attention_head_dim": 8, "layers_per_block": 1}
blocks = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
unet = UNet2DConditionModel(sample_size=32, down_block_types=blocks[0], up_block_types=blocks[1], **sizes)
ends = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
vae = AutoencoderKL(block_out_channels=(256, 512), sample_size=64, **ends)
options = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
pipe = StableDiffusionPipeline(vae, None, None, unet, DDIMScheduler(), **options)
pipe.to("cuda", torch.float16)
words = torch.randn(1, 77, 64, device="cuda", dtype=torch.float16)
pipe(prompt_embeds=words, negative_prompt_embeds=words, height=128, width=128, num_inference_steps=6, output_type="pt")
"""


@pytest.fixture
def advise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Advice]:
    """What is advised of a program, with options; it is `sample.py` of the working directory."""
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed")
    monkeypatch.chdir(tmp_path)

    def advise(program: str, options: str) -> Advice:
        Path("sample.py").write_text(program)
        assert main(shlex.split(f"advise --quiet {options} --json advice.json --run sample.py")) == 0
        return Advice.model_validate_json(Path("advice.json").read_text())

    return advise


@pytest.mark.truth
def test_each_way_is_worth_what_the_program_takes_with_it(
    advise: Callable[[str, str], Advice], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(program: str) -> Report:
        return ProgramCommand(Launch(f"{program}.py", ()), catalogue.target("rtx4090"), 1).run()

    advice = advise(PROGRAM, "--target rtx4090 --patch fix.diff")
    found = {each.key: each for each in advice.suggestions}
    before = run("sample")
    assert advice.before == before.peak
    # One picture is decoded at once in any case.
    assert {each.key for each in advice.refused} >= {"vae-slicing"}
    ways = {
        "model-offload": "pipe.to(torch.float16)\npipe.enable_model_cpu_offload()",
        "layer-offload": "pipe.to(torch.float16)\npipe.enable_sequential_cpu_offload()",
        "group-offload": 'pipe.to(torch.float16)\npipe.enable_group_offload(torch.device("cuda"), '
        'offload_type="leaf_level", use_stream=True)',
        "vae-tiling": 'pipe.to("cuda", torch.float16)\npipe.vae.enable_tiling()',
    }
    for key, lines in ways.items():
        Path(f"{key}.py").write_text(PROGRAM.replace('pipe.to("cuda", torch.float16)', lines))
        report, each = run(key), found[key]
        assert (each.peak.requested_bytes, each.peak.reserved_bytes) == (
            report.peak.requested_bytes,
            report.peak.reserved_bytes,
        ), key
        assert (each.link_bytes or 0) <= sum(op.host_bytes for op in report.ops), key
        assert each.host_bytes
    # Each model comes to the card once and goes back; each layer comes once a step.
    weights = Counter[str]()
    for each in before.storages:
        if each.kind == "parameter" and each.birth == 0:
            weights[each.name.partition(".")[0]] += each.nbytes
            weights[".".join(each.name.split(".")[:2])] += each.nbytes
    moved = {key: (each.link_bytes or 0) - (advice.before_link_bytes or 0) for key, each in found.items()}
    assert moved["model-offload"] == pytest.approx(2 * (weights["unet"] + weights["vae"]), rel=0.05)
    assert moved["layer-offload"] == pytest.approx(6 * weights["unet"] + weights["vae.decoder"], rel=0.05)
    assert moved["vae-tiling"] == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Host {format_bytes(advice.before_host_bytes)}; 0 B moved between it and the card" in said
    assert "enable_" in Path("fix.diff").read_text()


@pytest.mark.truth
def test_what_moves_least_comes_first_where_it_fits(advise: Callable[[str, str], Advice]) -> None:
    advice = advise(PROGRAM.replace("(64, 128)", "(640, 1280)"), "--target 1.1GB")
    assert advice.before.fits is False
    fits = [each.peak.fits for each in advice.suggestions]
    assert fits == sorted(fits, reverse=True)
    known = (each.link_bytes for each in advice.suggestions if each.peak.fits)
    moved = [math.inf if each is None else each for each in known]  # which comes last
    assert moved
    assert all(one <= other for one, other in pairwise(moved))


LOADED = """
import torch
from diffusers import StableDiffusionPipeline

nothing = None
pipe = StableDiffusionPipeline.from_pretrained(
    "saved", torch_dtype=torch.float16, safety_checker=nothing, feature_extractor=nothing,
    text_encoder=nothing, tokenizer=nothing,
)
pipe.to("cuda")
words = torch.randn(1, 77, 64, device="cuda", dtype=torch.float16)
pipe(prompt_embeds=words, negative_prompt_embeds=words, height=128, width=128, num_inference_steps=2, output_type="pt")
"""


@pytest.mark.truth
@pytest.mark.parametrize(("key", "kernel"), [("nf4-loaded:unet", "gemm_4bit"), ("int8-loaded:unet", "cigemmlt_32")])
def test_a_denoiser_is_loaded_in_fewer_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, kernel: str
) -> None:
    for name in ("diffusers", "bitsandbytes"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(action="ignore"):
        exec(PROGRAM.partition("pipe.to(")[0].replace("(64, 128)", "(320, 640)") + 'pipe.save_pretrained("saved")', {})

    def run(program: str) -> Report:
        Path("sample.py").write_text(program)
        return ProgramCommand(Launch("sample.py", ()), catalogue.target("rtx4090"), 1).run()

    before = run(LOADED)
    ways = {way.key: (way.code, edits) for way, edits in pipelines.list_ways([str(tmp_path / "sample.py")], before)}
    code, edits = ways[key]
    (text,) = apply_edits(edits).values()
    made = code.removeprefix("import diffusers\n")
    assert made in text
    after = run(text)
    assert any(kernel in op.name for op in after.ops)
    # The peak of so small a model may be larger, of numbers that the products in 8 bits make.
    kept = [sum(e.nbytes for e in each.storages if e.kind == "parameter") for each in (after, before)]
    assert kept[0] < kept[1]
