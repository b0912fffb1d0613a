"""The examples run as they stand, and print what a pencil says: each figure checked here is worked out in a comment."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import cache_from_source
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from fxmem.__main__ import main
from fxmem.hardware.releases import find_release
from fxmem.records.profile import Report
from fxmem.records.units import format_bytes
from tests import ROOT
from tests.show.graph.test_graph import boxes_of, text_of
from tests.show.test_html import Page

pytestmark = pytest.mark.truth

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
PUBLIC = {"fxmem.planning", "fxmem.records.profile", "fxmem.show.export", "fxmem.testing"}
WITH_LIBRARIES = {"generate_llama.py", "record_trainer.py"}
"""Whose libraries warn of what is theirs."""
Run = Callable[[str], str]


SERVER = """
import atexit, importlib, os, runpy, sys, warnings

for name in ("torch", "torchvision", "transformers.models.llama.modeling_llama", "torch.distributed.tensor.parallel"):
    importlib.import_module(name)
import fxmem, torch

torch.ones(1, requires_grad=True).sum().backward()  # before torch pretends that there are cards: tests/conftest.py
fxmem.plan(fxmem.analyze(torch.nn.Linear(8, 8), torch.zeros(4, 8), target="h100"))
for line in sys.stdin:
    action, path, out, err = line.rstrip("\\n").split("\\t")
    pid = os.fork()
    if not pid:
        for descriptor, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        warnings.simplefilter(action)
        sys.argv, sys.path[0] = [path], os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)  # taking every module of torch apart is more than half of what most of them take
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs each script in a fork, which has torch, the collections of models and an analysis' modules already."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    """Runs an example as its user would, in an empty folder, and gives what it prints; once each."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "FXMEM_CACHE_DIR": str(folder / "cache")}
    if not Path(cache_from_source(torch.__file__)).exists():
        # Nobody keeps the bytecode of torch's two thousand modules here; compiling them would take half of every run.
        environment |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    printed: dict[str, str] = {}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None
    assert server.stdout is not None
    asked, answers = server.stdin, server.stdout

    def once(name: str) -> str:
        if name not in printed:
            out, err = folder / f"{name}.out", folder / f"{name}.err"
            action = "ignore" if name in WITH_LIBRARIES else "error"
            asked.write("\t".join([action, str(EXAMPLES / name), str(out), str(err)]).encode() + b"\n")
            asked.flush()
            code, said = answers.readline().strip(), err.read_text(encoding="utf-8")
            assert (code, said) == (b"0", "") or (code == b"0" and name in WITH_LIBRARIES)
            printed[name] = out.read_text(encoding="utf-8")
        return printed[name]

    with server:
        yield once
        asked.close()


def rows(text: str) -> dict[str, list[int]]:
    """The first word of each line to the whole numbers further on in it."""
    found = {}
    for line in text.splitlines():
        first, *rest = line.split() or [""]
        found[first] = [int(word.replace(",", "")) for word in rest if re.fullmatch(r"\d[\d,]*", word)]
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_is_short_and_says_what_it_shows(name: str) -> None:
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 65
    assert ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_runs(run: Run, name: str) -> None:
    run(name)  # which asserts that it ends well


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_uses_the_public_face_alone(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    from_fxmem = [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fxmem")
    ]
    assert "fxmem" in imported
    assert set(from_fxmem) <= PUBLIC
    assert not [name for name in imported if name.startswith("fxmem.")]


def test_record_trainer(run: Run) -> None:
    text = run("record_trainer.py")
    # Embeddings, 4 bytes each: (1000 + 128) x 128. Each of two blocks: two norms of 2 x 128, attention 128 x 512 + 512,
    # MLP 2 x 128 x 512 + 512 + 128; the last norm 2 x 128.
    assert "parameters: 2,164,736 bytes" in text
    assert "stopped after step 2" in text
    assert "made up: read, float32" in text


def test_generate_llama(run: Run) -> None:
    *caches, served = run("generate_llama.py").splitlines()
    dynamic, static = (int(line.split()[-2].replace(",", "")) for line in caches)
    if find_release(torch.__version__)[0].keeps_workspaces:  # otherwise both peak in a product, beside its workspace
        # While decoding, the grown keys of one layer are there twice: 8 x 4 heads x 383 tokens x 32 x 4 bytes.
        assert dynamic - static >= 8 * 4 * 383 * 32 * 4
    assert max(dynamic, static) < min(int(line.split()[2].replace(",", "")) for line in caches)  # of the prompt
    low, high = (int(word.replace(",", "")) for word in served.split() if word[0].isdigit())
    assert 0 < low <= high < 0.9 * 16 * 2**30


def test_small_cnn(run: Run) -> None:
    text = run("small_cnn.py")
    figures = rows(text)
    # Parameters, 4 bytes each: 1 x 32 x 9 + 32 = 320, 32 x 64 x 9 + 64 = 18,496, 9216 x 128 + 128 = 1,179,776, 128 x 10
    # + 10 = 1290. Results, batch of 64: 64 x 32 x 26 x 26 x 4, 64 x 64 x 24 x 24 x 4, 64 x 64 x 12 x 12 x 4; a ReLU as
    # large as what it is given. Saved: ReLUs keep their results, and max_pool2d the 8-byte index of each maximum: 64 x
    # 64 x 12 x 12 x 8; fc1 what it is given. conv1's input is the step's own; conv2's, max_pool2d's and fc2's is the
    # result of a ReLU, which the ReLU kept already.
    assert figures["conv1"] == [1_280, 5_537_792, 0]
    assert figures["relu"] == [0, 5_537_792, 5_537_792]
    assert figures["conv2"] == [73_984, 9_437_184, 0]
    assert figures["relu_1"] == [0, 9_437_184, 9_437_184]
    assert figures["max_pool2d"] == [0, 2_359_296, 4_718_592]
    assert figures["flatten"] == [0, 0, 0]
    assert figures["fc1"] == [4_719_104, 64 * 128 * 4, 2_359_296]
    assert figures["relu_2"] == [0, 64 * 128 * 4, 64 * 128 * 4]
    assert figures["fc2"] == [5_160, 64 * 10 * 4, 0]
    # At the peak: 1,199,882 parameters, Adam's two averages of them, and the batch of 64 x 28 x 28.
    assert figures["parameter"] == [4_799_528]
    assert figures["optimizer_state"] == [9_599_056]
    assert figures["input"] == [200_704]
    peak = int(re.findall(r"^peak: ([\d,]+) bytes", text, re.MULTILINE)[0].replace(",", ""))
    assert peak == sum(figures[kind][0] for kind in re.findall(r"^  (\w+)", text, re.MULTILINE))


def test_flops_per_layer(run: Run) -> None:
    text = run("flops_per_layer.py")
    figures = rows(text)
    # Convolution: 2 x batch x channels out x pixels out x channels in x 3 x 3. Backward is twice that: the gradients of
    # weight and input; the first convolution's input is the image, whose gradient nobody wants.
    first = 2 * 4 * 32 * (32 * 32) * 3 * 9
    second = 2 * 4 * 64 * (16 * 16) * 32 * 9
    third = 2 * 4 * 128 * (8 * 8) * 64 * 9
    assert (first, second, third) == (7_077_888, 37_748_736, 37_748_736)
    assert figures["0"] == [first, first]
    assert figures["3"] == [second, 2 * second]
    assert figures["6"] == [third, 2 * third]
    # Linear: 2 x batch x inputs x outputs, twice in backward, and there the bias's gradient, a sum over the batch.
    for layer, inputs, outputs in (("10", 2048, 256), ("12", 256, 64), ("14", 64, 10)):
        assert figures[layer] == [2 * 4 * inputs * outputs, 2 * (2 * 4 * inputs * outputs) + 4 * outputs]
    assert re.search(r"^9 +Flatten +4x2048 +0 +0$", text, re.MULTILINE)
    assert "86,905,856 forward" in text
    assert "not counted" not in text


def test_inplace_relu(run: Run) -> None:
    text = run("inplace_relu.py")
    images = 16 * 3 * 128 * 128 * 4
    first, second = 16 * 64 * 128 * 128 * 4, 16 * 128 * 64 * 64 * 4  # what the convolutions return
    pooled, indices = first // 4, 2 * (first // 4)  # a quarter as many elements; their indices take 8 bytes each
    params = 4 * (3 * 64 * 9 + 64 + 64 * 128 * 9 + 128)
    # Kept for backward: both ReLUs' results, both poolings' indices, and what the second convolution is given.
    saved = first + second + indices + second // 2 + pooled
    # Inference peaks where the first pooling runs, in place, and where the first ReLU does, out of place.
    in_place, out_of_place = images + params + first + pooled + indices, images + params + 2 * first
    lines = [re.findall(r"[\d,]+", line) for line in text.splitlines() if line.startswith(("train", "infer"))]
    figures = [[int(figure.replace(",", "")) for figure in line] for line in lines]
    assert [line[:3] for line in figures] == [
        [first + second, first + second, saved],
        [0, first + second, saved],
        [first + second, 0, 0],
        [0, 0, 0],
    ]
    assert figures[0][3] == figures[1][3]
    assert [line[3] for line in figures[2:]] == [out_of_place, in_place]
    assert "_4 (ReLU) writes into the output of _3 (Conv2d)" in text


def test_vgg_memory(run: Run) -> None:
    text = run("vgg_memory.py")
    # 138,357,544 and 143,667,240 parameters of 4 bytes (Simonyan and Zisserman, arXiv 1409.1556, tables 1 and 2: 138
    # and 144 million).
    assert "553,430,176 bytes" in text
    assert "574,668,960 bytes" in text
    # The three linear layers: (25088 x 4096 + 4096) + (4096 x 4096 + 4096) + (4096 x 1000 + 1000) = 123,642,856, x 4 =
    # 471.7 MiB.
    assert [line.split()[1:4] for line in text.splitlines() if line.startswith("  classifier")] == [
        ["471.7", "MiB", "89%"],
        ["471.7", "MiB", "86%"],
    ]
    # Block 1: the results of two ReLUs, 32 x 64 x 224 x 224 x 4 = 392 MiB each, and the pooling's indices, 32 x 64 x
    # 112 x 112 x 8 = 196 MiB. Block 2: what its first convolution is given, 98 MiB; two results of 196 MiB; indices of
    # 98 MiB.
    assert [line.split()[5] for line in text.splitlines() if line.startswith("  block 1")] == ["980.0", "980.0"]
    assert [line.split()[5] for line in text.splitlines() if line.startswith("  block 2")] == ["588.0", "588.0"]


def test_ten_block_resnet(run: Run) -> None:
    text = run("ten_block_resnet.py")
    assert re.search(r"^    1-4 x4 \(Block\) +290\.0 KiB +224\.0 MiB +128\.0 MiB", text, re.MULTILINE)
    figures = rows(text)
    # A block of C channels keeps four results of 128 x C x pixels x 4 bytes (what each normalisation is given and what
    # each ReLU returns) and two normalisations' statistics of 2 x C x 4. The first also keeps what its convolution is
    # given: no ReLU before it did.
    wide, narrow = 128 * 64 * 32 * 32 * 4, 128 * 128 * 16 * 16 * 4
    statistics = 2 * 2 * 64 * 4
    # Two convolutions of C x C x 9; per normalisation weight, bias, mean, variance of C, and a counter of 8 bytes.
    params = 4 * 2 * 64 * 64 * 9 + 2 * (4 * 4 * 64 + 8)
    assert figures["0"] == [params, 5 * wide + statistics]
    assert [figures[str(block)] for block in (1, 2, 3, 4)] == [[params, 4 * wide + statistics]] * 4
    # Block 5 goes from 64 to 128 channels, and its shortcut is a convolution of 64 x 128.
    bridge = 4 * (64 * 128 * 9 + 128 * 128 * 9 + 64 * 128) + 2 * (4 * 4 * 128 + 8)
    assert figures["5"] == [bridge, 4 * narrow + 2 * statistics]
    last = 4 * 2 * 128 * 128 * 9 + 2 * (4 * 4 * 128 + 8)
    assert [figures[str(block)] for block in (6, 7, 8, 9)] == [[last, 4 * narrow + 2 * statistics]] * 4


def test_thousand_layers(run: Run) -> None:
    text = run("thousand_layers.py")
    result = (
        4096 * 1024 * 4
    )  # of one layer, 16 MiB; each keeps what it is given but the first, whose input is the step's
    layer = (1024 * 1024 + 1024) * 4  # weight and bias, 4 MiB and 4 KiB
    assert f"saved by the first layers: [0, {result}, {result}], in all {999 * result:,} bytes" in text
    # Going back one layer frees 16 MiB and adds the 4 MiB of its gradients. Highest is the first: all weights, the
    # input, the output, the results of layers 0 to 998, the gradient that leaves layer 999, that of its weight, the
    # sum's gradient, which is one number seen everywhere, copied for the product, and of the loss 4 bytes and its
    # gradient's 4.
    peak = 1000 * layer + result + result + 999 * result + result + 1024 * 1024 * 4 + result + 8
    assert f"peak: {peak:,} bytes in backward, while _999 runs" in text
    # It starts and ends with the weights, the input, and an output as large: of the step before, then of this one. That
    # is 1000 x 4,198,400 + 2 x 16,777,216 bytes = 3.94 GiB.
    bars = [line.split()[:2] for line in text.splitlines() if "GiB" in line]
    assert (bars[0], bars[-1]) == (["forward", "3.94"], ["optimizer", "3.94"])


def test_small_gpt(run: Run) -> None:
    text = run("small_gpt.py")

    def figures(label: str) -> list[int]:
        found = re.search(rf"^{label} +([\d,]+) +([\d,]+)$", text, re.MULTILINE)
        assert found
        return [int(figure.replace(",", "")) for figure in found.groups()]

    # Embeddings (8192 + 1024) x 512; per block normalisations 4 x 512, linear layers (512 + 1) x (1536 + 512 + 2048) +
    # (2048 + 1) x 512; a normalisation of 2 x 512 and a head of 512 x 8192. Autocast leaves them in float32.
    params = (8192 + 1024) * 512 + 6 * (4 * 512 + 513 * (1536 + 512 + 2048) + 2049 * 512) + 2 * 512 + 512 * 8192
    assert figures("at the peak: parameter") == [4 * params, 4 * params]
    # Elements of batch x tokens x width; attention keeps its result and, in one tensor, q, k and v; beside them the
    # float32 logarithms of the rows' sums, batch x heads x tokens, and 16 bytes of random state, which the kernel for
    # float32 keeps on the CPU.
    elements = 8 * 1024 * 512
    rows = 8 * 8 * 1024 * 4
    assert figures("saved by attention") == [4 * 4 * elements + rows, 2 * 4 * elements + rows + 16]
    # A linear layer keeps what it is given, under autocast in bf16 together with the bf16 copy of its weight, 2048 x
    # 512.
    assert figures("saved by blocks_0_up") == [4 * elements, 2 * elements + 2 * 2048 * 512]
    assert figures("saved by gelu") == [4 * 4 * elements, 2 * 4 * elements]
    assert (
        "attention, autocast off: aten._scaled_dot_product_efficient_attention.default" in text
    )  # no other kernel takes float32
    assert re.search(r"attention, autocast bf16: aten\._scaled_dot_product_(flash|cudnn)_attention\.default", text)


def test_training_step(run: Run) -> None:
    lines = [line.rsplit(maxsplit=2) for line in run("training_step.py").splitlines()]
    assert [optimizer for _, optimizer, _ in lines] == ["SGD"] * 3
    own, named, squares = (int(peak.replace(",", "")) for *_, peak in lines)
    assert named == own + 64 * 10 * 4  # labels are made as the loader has them; no variable keeps the output
    assert own != squares


def test_own_model(run: Run) -> None:
    figures = re.findall(r"width +(\d+): +([\d,]+) bytes of parameters, +([\d,]+) saved", run("own_model.py"))
    for width, (found, params, saved) in zip((64, 256, 1024), figures, strict=True):
        assert int(found) == width
        assert int(params.replace(",", "")) == 4 * (101 * width + 4 * (width + 1) * width + width + 1)
        # Five hyperbolic tangents keep their results, and the loss keeps what it squares.
        assert int(saved.replace(",", "")) == 5 * 256 * width * 4 + 256 * 4


def test_register_exporter_and_planner(run: Run) -> None:
    text = run("register_exporter_and_planner.py")
    # A block is Linear(64, 256), GELU, Linear(256, 64) over 128 rows of float32: it saves its input, 128 * 64 * 4 bytes
    # (the step's own input is not counted), and what GELU and the second Linear read, 128 * 256 * 4 bytes each.
    found = rows(text)
    assert (found["_1_0"], found["_1_1"], found["_1_2"]) == ([128 * 64 * 4], [128 * 256 * 4], [128 * 256 * 4])
    assert "_0_0" not in found
    # Each second block gives back the two wide ones …
    regions = re.findall(r"checkpoint (\d): frees ([\d,]+) bytes", text)
    assert regions == [(number, f"{2 * 128 * 256 * 4:,}") for number in "135"]
    # … all but the last one's, which are computed again where the peak is.
    peak = re.search(r"peak ([\d,]+) -> ([\d,]+) bytes", text)
    assert peak is not None
    before, after = (int(number.replace(",", "")) for number in peak.groups())
    assert before - after == 2 * 2 * 128 * 256 * 4


OWN_MODEL = ast.get_docstring(ast.parse((EXAMPLES / "own_model.py").read_text(encoding="utf-8"))) or ""
COMMANDS = re.findall(r"^ +(fxmem .+)$", OWN_MODEL.replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize(("command", "width"), list(zip(COMMANDS, (64, 256), strict=True)))
def test_the_commands_for_a_model_of_your_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert main([*shlex.split(command)[1:], "--quiet", "--json", "-"]) == 0
    report = Report.model_validate_json(capsys.readouterr().out)
    assert report.peak.by_kind["parameter"] == 4 * (101 * width + 4 * (width + 1) * width + width + 1)
    assert {tensor.name: tensor.shape for tensor in report.inputs} == {"features": (256, 100), "weights": (256,)}


def test_lines_of_a_file(run: Run) -> None:
    text = run("lines_of_a_file.py")
    found = {
        int(words[0]): [int(word.replace(",", "")) for word in words[1:5]]
        for line in text.splitlines()
        if (words := line.split()) and words[0].isdigit()
    }
    # A batch of 16 x 128 positions of 256 numbers is 2,097,152 bytes; four times as wide 8,388,608; a norm's mean and
    # 1/deviation 8,192 each.
    narrow, wide, statistics = 2_097_152, 8_388_608, 2 * 8_192
    # The norm keeps its input (the first block's is the step's own) and statistics; `up` its input and gelu its own;
    # `down` its input.
    assert found[24] == [6, 6 * (narrow + statistics), 6 * (narrow + statistics), 5 * narrow + 6 * statistics]
    assert found[25] == [12, 12 * wide, 12 * wide, 6 * (narrow + wide)]
    assert found[26] == [12, 12 * narrow, 6 * narrow, 6 * wide]  # what `down` returns goes once it is added
    assert found[40] == [2, 16 * 256 * 4 + 16 * 10 * 4, 16 * 256 * 4 + 16 * 10 * 4, 16 * 256 * 4]


def test_compare_two_settings(run: Run) -> None:
    text = run("compare_two_settings.py")
    # Half of 32 x 64 x 64 x 64 float32 numbers, 33,554,432 bytes; the norm keeps the second convolution's result and 2
    # x 64 statistics.
    assert "  layer 1 (was 1, ReLU): saves -16,777,216\n" in text
    assert "  layer 3 (added, BatchNorm2d): saves +33,554,944\n" in text
    assert "was 3" not in text.partition("a batch norm")[2]


def test_checkpoint_resnet50(run: Run) -> None:
    text = run("checkpoint_resnet50.py")
    bytes_of = {
        label: int(number.replace(",", ""))
        for label, number in re.findall(r"^(without plan|promised|with plan) +([\d,]+) bytes", text, re.MULTILINE)
    }
    assert bytes_of["with plan"] == bytes_of["promised"] <= 0.6 * bytes_of["without plan"]
    assert "gradients equal: True, batch norm's statistics equal: True\n" in text
    assert "a ResNet again, of 25,557,032 parameters\n" in text


def test_selective_checkpoints(run: Run) -> None:
    text = run("selective_checkpoints.py")
    found = rows(text)
    tokens = 8 * 256
    unit = tokens * 256 * 4
    # Of the 16 tensors a block keeps 10, and the means and deviations of two norms go as well; the last block has them
    # again when the peak is reached. Each region holds the state of the random generator, and each attention that is
    # kept and yet to be handed out again, 5,056 bytes.
    assert found["plain"][0] - found["selective"][0] == 7 * (6 * unit + 4 * tokens * 4) - (8 + 7) * 5056
    # qkv, project and up are 3 + 1 + 4 products of 256 x 256 for each token, attention two of 256 x 256 tokens' worth;
    # they run again if the whole block does.
    products = 8 * (8 * 2 * tokens * 256 * 256 + 2 * 2 * tokens * 256 * 256)
    assert found["whole"][1] - found["selective"][1] == products
    assert found["fxmem"][0] <= found["selective"][0]
    assert found["plain"][1] < found["fxmem"][1] < found["selective"][1]
    assert "gradients equal: True" in text


def test_offload_layers(run: Run) -> None:
    text = run("offload_layers.py")
    without, found = re.findall(r"([\d,]+) of ([\d,]+) bytes, ([\d.]+)% slower", text)
    for peak, before, _ in (without, found):
        assert int(peak.replace(",", "")) <= 0.6 * int(before.replace(",", ""))
    assert float(found[2]) < float(without[2])
    host = int(re.findall(r"([\d,]+) bytes of the host", text)[0].replace(",", ""))
    assert host > 0
    assert host % (32768 * 1024 * 4) == 0  # rows of 1,024 or 4,096 floats, each a power of two
    assert "gradients equal: True" in text


def test_largest_batch(run: Run) -> None:
    text = run("largest_batch.py")
    found = re.search(r"batch (\d+) fits, (\d+) does not", text)
    assert found
    assert int(found[2]) == int(found[1]) + 1
    # The peak is in backward of the last block's second convolution. Per sample, in pieces of 64 channels x 109 x 109 x
    # 4 bytes: of each block what the normalisation and the second convolution are given, of two also the sum, and what
    # the first block is given, nine in all; the gradients it takes and gives; and cuDNN's workspace of two. The image
    # is 3 x 224 x 224 x 4.
    sample = re.search(r"([\d,]+) bytes a sample", text)
    assert sample
    assert int(sample[1].replace(",", "")) == pytest.approx(
        (9 + 2 + 2) * 64 * 109 * 109 * 4 + 3 * 224 * 224 * 4, rel=1e-3
    )
    rows = re.findall(r"^ +(\d+) +([\d,]+) (fits|too much)$", text, re.MULTILINE)
    assert all((int(nbytes.replace(",", "")) <= 1 << 30) == (verdict == "fits") for _, nbytes, verdict in rows)
    largest = re.search(r"texts of (\d+) tokens", text)
    assert largest
    assert {(largest[1], "fits"), (str(int(largest[1]) + 1), "too much")} <= {
        (size, verdict) for size, _, verdict in rows
    }


def test_draw_resnet50(run: Run, folder: Path) -> None:
    run("draw_resnet50.py")
    # Stages of 3, 4, 6 and 3 bottlenecks; all but the first of each are equal.
    titles = [
        text_of(box).partition(" | ")[0]
        for name, box in boxes_of(ET.parse(folder / "resnet50.svg").getroot()).items()
        if "module" in box.get("class", "")
    ]
    assert titles == [
        "layer1.0",
        "layer1.1-2 x2",
        "layer2.0",
        "layer2.1-3 x3",
        "layer3.0",
        "layer3.1-5 x5",
        "layer4.0",
        "layer4.1-2 x2",
    ]


def test_draw_checkpoints(run: Run, folder: Path) -> None:
    *regions, last = run("draw_checkpoints.py").splitlines()
    freed = [int(line.split()[2].replace(",", "")) for line in regions]
    (before, after) = (int(number.replace(",", "")) for number in re.findall(r"[\d,]{7,}", last))
    assert after <= 0.8 * before
    groups = ET.parse(folder / "checkpoints.svg").getroot().iter("{http://www.w3.org/2000/svg}g")
    heads = [text_of(each) for each in groups if each.get("class") == "heading checkpoint"]
    assert heads
    assert all(any(f"frees {format_bytes(nbytes)}" in head for head in heads) for nbytes in freed)


def test_export_resnet50(run: Run, folder: Path) -> None:
    text = run("export_resnet50.py")
    peak = int(re.findall(r"the peak of ([\d,]+) bytes", text)[0].replace(",", ""))
    (trace,) = pickle.loads((folder / "resnet50.PREDICTED.pickle").read_bytes())["device_traces"]
    sign = {"alloc": 1, "free_completed": -1}
    live = highest = 0
    for event in trace:
        live += sign.get(event["action"], 0) * event["size"]
        highest = max(highest, live)
    assert highest == peak
    speedscope = json.loads((folder / "resnet50.speedscope.json").read_text(encoding="utf-8"))
    assert speedscope["profiles"][0]["endValue"] == peak


def test_report_resnet50(run: Run, folder: Path) -> None:
    run("report_resnet50.py")
    text = (folder / "resnet50.html").read_text(encoding="utf-8")
    page = Page(text)
    # Each of ResNet-50's 53 convolutions, as many normalisations, 49 ReLUs, 16 additions, two poolings, flatten, the
    # linear layer, the input, the output, the loss and the optimizer.
    assert len(re.findall(r'<tr id="n\d+"', text)) == 53 + 53 + 49 + 16 + 2 + 1 + 1 + 1 + 1 + 2
    assert "rtx4090" in page.said["header"][0] + page.said["section"][0]
    assert len(text) < 1_500_000
