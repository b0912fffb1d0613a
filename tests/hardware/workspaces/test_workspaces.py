"""Memory that no tensor owns: which cuDNN calls torch makes, what cuDNN answers, and what kernels allocate unseen.

cuDNN's own figures are pinned to the version they were seen on; on another one the same tests hold bands instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fxmem.errors import UsageError
from fxmem.hardware.catalogue import target
from fxmem.hardware.context import cublas_workspaces, radix_sort_bytes
from fxmem.hardware.hidden_memory import HiddenEvent, RnnSignature, alloc, output
from fxmem.hardware.operators import OPERATORS, Call, Operator
from fxmem.hardware.operators.convolution import ConvolutionMemory
from fxmem.hardware.operators.products import matmul_copies, uses_cublas, uses_cublaslt
from fxmem.hardware.operators.reductions import reduction_events
from fxmem.hardware.releases import RELEASES, release_assumption
from fxmem.hardware.tensor_layouts import MemoryFormat, TensorLayout, dense_strides, fix_size_one_strides, read_layout
from fxmem.hardware.workspaces import (
    Collector,
    ConvSettings,
    ConvSignature,
    CpuCollector,
    HeldBuffer,
    HiddenMemory,
    conv_workspaces,
    cudnn_client,
    find_cudnn,
    read_cudnn_folder,
)
from fxmem.hardware.workspaces.cudnn_client import Workspace
from fxmem.records.profile import Phase, Target
from tests.hardware.workspaces.peaks import peak_bytes
from tests.no_files import NO_FILES

MIB = 1 << 20
H100, A100, T4, V100, RTX_3060 = map(target, ("h100", "a100", "t4", "v100", "rtx3060"))
CONTIGUOUS, CHANNELS_LAST = MemoryFormat.CONTIGUOUS, MemoryFormat.CHANNELS_LAST

try:
    CUDNN = find_cudnn()
except LookupError:
    CUDNN = None
needs_cudnn = pytest.mark.skipif(CUDNN is None, reason="needs the nvidia-cudnn wheel, whose library answers")
needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="torch's CPU build never chooses cuDNN")


@pytest.fixture(autouse=True)
def cache_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(folder))
    monkeypatch.delenv("TORCH_CUDNN_USE_HEURISTIC_MODE_B", raising=False)
    return folder


def tensor(*shape: int, dtype: str = "float32", layout: MemoryFormat = CONTIGUOUS) -> TensorLayout:
    return TensorLayout(shape=shape, stride=dense_strides(shape, layout), dtype=dtype)


Op = Literal["fwd", "dgrad", "wgrad"]


def square(
    op: Op,
    batch: int,
    channels: int,
    size: int,
    features: int,
    kernel: int,
    stride: int = 1,
    layout: MemoryFormat = CONTIGUOUS,
    dtype: str = "float32",
) -> ConvSignature:
    """A square 2-d convolution padded by half its kernel."""
    padding = kernel // 2
    small = (size + 2 * padding - kernel) // stride + 1
    x, w, y = (batch, channels, size, size), (features, channels, kernel, kernel), (batch, features, small, small)
    return ConvSignature(
        op=op, x=x, x_stride=dense_strides(x, layout), w=w, w_stride=dense_strides(w, layout), y=y,
        y_stride=dense_strides(y, layout), padding=(padding, padding), stride=(stride, stride), dilation=(1, 1),
        groups=1, dtype=dtype,
    )  # fmt: skip


VGG = square("fwd", 32, 64, 224, 64, 3)


def nbytes(signatures: list[ConvSignature], machine: Target) -> list[int | None]:
    return [answer.nbytes for answer in conv_workspaces(signatures, machine).values()]


def convolution_memory(
    op: str, args: Sequence[Any], card: Target, settings: ConvSettings | None = None
) -> ConvolutionMemory:
    seen = Collector(card, "2.11.0", {}, settings or ConvSettings()).find_hidden(op, args, None)
    assert seen is not None
    assert isinstance(seen.memory, ConvolutionMemory)
    return seen.memory


# Layouts, held against torch itself.


@st.composite
def torch_tensors(draw: st.DrawFn) -> torch.Tensor:
    rank = draw(st.integers(3, 5))
    shape = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    base = torch.empty(shape)
    choice = draw(st.sampled_from(["dense", "channels_last", "permuted", "expanded", "sliced"]))
    if choice == "channels_last" and rank > 3:
        return base.contiguous(memory_format=torch.channels_last if rank == 4 else torch.channels_last_3d)
    if choice == "permuted":
        return base.permute(draw(st.permutations(range(rank))))
    if choice == "expanded":
        return torch.empty(()).expand(shape)
    return base[..., ::2] if choice == "sliced" else base


@given(torch_tensors())
def test_layouts_agree_with_torch(real: torch.Tensor) -> None:
    layout = read_layout(real)
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(real.dim())
    assert layout.is_contiguous() == real.is_contiguous()
    assert layout.contiguous().stride == real.contiguous().stride()
    if wanted is None:
        assert layout.memory_format() is CONTIGUOUS
        return
    assert layout.is_contiguous(CHANNELS_LAST) == real.is_contiguous(memory_format=wanted)
    assert layout.contiguous(CHANNELS_LAST).stride == real.contiguous(memory_format=wanted).stride()
    # torch tells Python of the suggested format only through what it does: `empty_like` with preserve_format on dense
    # tensors.
    if real.is_contiguous() != real.is_contiguous(memory_format=wanted):
        assert (layout.memory_format() is CHANNELS_LAST) == real.is_contiguous(memory_format=wanted)


def test_strides_of_size_one_dimensions_are_made_what_cudnn_expects() -> None:
    assert fix_size_one_strides((8, 1, 5, 7), (35, 1, 7, 1), CONTIGUOUS) == (35, 35, 7, 1)
    assert fix_size_one_strides((8, 3, 1, 1), (3, 1, 1, 1), CHANNELS_LAST) == (3, 1, 3, 3)
    assert fix_size_one_strides((1, 4, 2, 2), (0, 4, 2, 1), CONTIGUOUS) == (16, 4, 2, 1)


# Which backend torch chooses, held against torch itself where its answer does not depend on the (missing) device.


def backend_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, bool, tuple[int, ...], bool]]:
    for groups, last in product((1, 4, 64), (False, True)):
        yield (2, 64, 10, 12), (64, 64 // groups, 3, 3), groups, False, (0, 0), last
        yield (2, 64, 10, 12), (64, 64 // groups, 3, 3), groups, True, (0, 0), last
        yield (2, 64, 4, 10, 12), (64, 64 // groups, 1, 3, 3), groups, False, (0, 0, 0), last
    yield (2, 64, 10, 12), (64, 8, 3, 3), 1, True, (2, 2), False
    yield (2, 64, 10, 12), (128, 1, 3, 3), 64, False, (0, 0), False
    yield (0, 64, 10, 12), (64, 64, 3, 3), 1, False, (0, 0), False


@needs_cuda_build
@pytest.mark.parametrize(("shape", "weight", "groups", "transposed", "extra", "last"), list(backend_cases()))
def test_backend_is_torchs(
    shape: tuple[int, ...], weight: tuple[int, ...], groups: int, transposed: bool, extra: tuple[int, ...], last: bool
) -> None:
    rank = len(shape) - 2
    with FakeTensorMode():
        x, w = torch.empty(shape, device="cuda"), torch.empty(weight, device="cuda")
        if last:
            x = x.contiguous(memory_format=torch.channels_last if rank == 2 else torch.channels_last_3d)
        window = ((2,) * rank, (1,) * rank, (1,) * rank, transposed, extra, groups)
        theirs = torch._C._select_conv_backend(x, w, None, *window, None)
    settings = ConvSettings(cudnn_version=torch.backends.cudnn.version() or 91900)
    assert convolution_memory("aten.convolution.default", (x, w, None, *window), H100, settings).backend == theirs.name


def forward(
    x: TensorLayout,
    w: TensorLayout,
    machine: Target = H100,
    groups: int = 1,
    dilation: int = 1,
    stride: int = 1,
    **settings: bool,
) -> str:
    rank = x.rank - 2
    args = (x, w, None, (stride,) * rank, (1,) * rank, (dilation,) * rank, False, (0,) * rank, groups)
    return convolution_memory("convolution", args, machine, ConvSettings(**settings)).backend.value


def test_what_depends_on_the_card() -> None:
    half, bf16 = tensor(2, 64, 32, 32, dtype="float16"), tensor(2, 64, 32, 32, dtype="bfloat16")
    dense, depthwise = tensor(64, 64, 3, 3, dtype="bfloat16"), tensor(64, 1, 3, 3, dtype="float16")
    assert forward(bf16, dense, A100) == "Cudnn"
    assert forward(bf16, dense, T4) == "Slow2d"
    assert forward(tensor(2, 64, 32, 32), tensor(64, 64, 3, 3), dilation=2) == "Cudnn"
    assert forward(tensor(2, 64, 32, 32), tensor(64, 64, 3, 3), enabled=False) == "Slow2d"
    assert forward(half, depthwise, groups=64) == "Cudnn"
    assert forward(half, depthwise, groups=64, dilation=2) == "CudaDepthwise2d"
    assert forward(half, depthwise, groups=64, stride=2) == "CudaDepthwise2d"
    assert forward(tensor(2, 64, 32, 32), tensor(64, 1, 3, 3), groups=64) == "CudaDepthwise2d"
    assert forward(tensor(2, 64, 32, 32, layout=CHANNELS_LAST), tensor(64, 1, 3, 3), groups=64) == "Cudnn"
    assert forward(tensor(2, 16, 8, 9, 9, dtype="float16"), tensor(16, 16, 3, 3, 3, dtype="float16")) == "Cudnn"


def test_wrong_3d_kernels_of_some_cudnn_releases_are_avoided() -> None:
    args = (
        tensor(2, 16, 8, 9, 9, dtype="float16"),
        tensor(16, 16, 3, 3, 3, dtype="float16"),
        None,
        (1,) * 3,
        (1,) * 3,
        (1,) * 3,
        False,
        (0,) * 3,
        1,
    )
    assert convolution_memory("convolution", args, H100, ConvSettings(cudnn_version=91002)).backend == "SlowDilated3d"


# What happens inside one op.


def script(memory: HiddenMemory) -> list[str]:
    return [
        event.name if event.action == "alloc" else f"-{event.name}" if event.action == "free" else f"={event.name}"
        for event in memory.events
    ]


WINDOW_2D = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
MASK = (True, True, True)


def test_forward_takes_its_workspace_after_the_output() -> None:
    memory = convolution_memory(
        "aten.convolution.default", (tensor(32, 64, 224, 224), tensor(64, 64, 3, 3), tensor(64), *WINDOW_2D), H100
    )
    assert script(memory) == ["=result", "cuDNN fwd workspace", "-cuDNN fwd workspace"]
    assert memory.signatures == (VGG,)
    assert memory.unknown_buffers == ("cuDNN fwd workspace",)
    filled = memory.fill_workspaces({VGG: 1000})
    assert (filled.signatures, filled.unknown_buffers, peak_bytes(filled), peak_bytes(filled, [5000])) == (
        (),
        (),
        1000,
        6000,
    )


def test_backward_computes_the_inputs_gradient_first() -> None:
    args = (tensor(32, 64, 224, 224), tensor(32, 64, 224, 224), tensor(64, 64, 3, 3), [64], *WINDOW_2D, MASK)
    memory = convolution_memory("aten.convolution_backward.default", args, H100)
    dgrad, wgrad = "cuDNN dgrad workspace", "cuDNN wgrad workspace"
    weights = [dgrad, f"-{dgrad}", "=grad_weight", wgrad, f"-{wgrad}"]
    assert script(memory) == ["=grad_input", *weights, "=grad_bias", "parts of the results", "semaphores"]
    assert [signature.op for signature in memory.signatures] == ["dgrad", "wgrad"]
    only_weight = convolution_memory("convolution_backward", (*args[:-1], (False, True, False)), H100)
    assert script(only_weight) == ["=grad_weight", wgrad, f"-{wgrad}"]


def test_copies_into_the_other_layout_are_seen() -> None:
    """Channels-last input with a contiguous weight: the weight is copied for the call; 1 prime number of channels
    each."""
    x, w = tensor(3, 5, 7, 11, layout=CHANNELS_LAST), tensor(13, 5, 3, 3)
    memory = convolution_memory("convolution", (x, w, None, *WINDOW_2D), H100)
    assert script(memory) == ["=result", "dense weight", "cuDNN fwd workspace", "-cuDNN fwd workspace", "-dense weight"]
    assert memory.events[1].nbytes == 13 * 5 * 3 * 3 * 4
    (signature,) = memory.signatures
    assert (signature.w_stride, signature.y_stride) == ((45, 1, 15, 5), (13 * 7 * 11, 1, 11 * 13, 13))


def test_an_expanded_gradient_is_copied_for_each_of_the_two_calls() -> None:
    """`sum().backward()` right behind a convolution hands it a gradient whose strides are all zero."""
    grad = TensorLayout(shape=(3, 13, 7, 11), stride=(0, 0, 0, 0), dtype="float32")
    memory = convolution_memory(
        "convolution_backward",
        (grad, tensor(3, 5, 7, 11), tensor(13, 5, 3, 3), [13], *WINDOW_2D, (True, True, False)),
        H100,
    )
    names = script(memory)
    assert (
        names.index("=grad_input")
        < names.index("dense operand")
        < names.index("dense narrow side")
        < names.index("=grad_weight")
    )
    assert peak_bytes(memory) == 3 * 13 * 7 * 11 * 4


def test_a_gradient_in_the_other_format_is_converted_once() -> None:
    grad = tensor(3, 13, 7, 11, layout=CHANNELS_LAST)
    memory = convolution_memory(
        "convolution_backward", (grad, tensor(3, 5, 7, 11), tensor(13, 5, 3, 3), [13], *WINDOW_2D, MASK), H100
    )
    converted = "grad_output in the input's memory format"
    assert script(memory)[0] == converted
    assert script(memory)[-2:] == [f"-{converted}", "=grad_bias"]


def test_transposed_convolutions_are_the_other_direction() -> None:
    x, w, window = tensor(2, 16, 7, 7), tensor(16, 8, 3, 3), ((2, 2), (1, 1), (1, 1), True, (1, 1), 1)
    (signature,) = convolution_memory("convolution", (x, w, None, *window), H100).signatures
    assert (signature.op, signature.x, signature.w, signature.y) == (
        "dgrad",
        (2, 8, 14, 14),
        (16, 8, 3, 3),
        (2, 16, 7, 7),
    )
    backward = convolution_memory(
        "convolution_backward", (tensor(2, 8, 14, 14), x, w, [8], *window, (True, True, False)), H100
    )
    assert [(found.op, found.x, found.y) for found in backward.signatures] == [
        ("fwd", (2, 8, 14, 14), (2, 16, 7, 7)),
        ("wgrad", (2, 8, 14, 14), (2, 16, 7, 7)),
    ]


def test_a_1d_convolution_is_a_2d_one_of_height_one() -> None:
    memory = convolution_memory(
        "convolution", (tensor(2, 16, 50), tensor(32, 16, 5), None, (2,), (2,), (1,), False, (0,), 1), H100
    )
    (signature,) = memory.signatures
    assert (signature.x, signature.w, signature.y) == ((2, 16, 1, 50), (32, 16, 1, 5), (2, 32, 1, 25))
    assert (signature.padding, signature.stride) == ((0, 2), (1, 2))


def test_the_ops_that_carry_their_own_settings() -> None:
    args = (tensor(2, 16, 9, 9), tensor(16, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, False, True, False)
    (plain,) = convolution_memory("aten.cudnn_convolution.default", args, H100).signatures
    assert (plain.op, plain.deterministic, plain.allow_tf32) == ("fwd", True, False)
    (transposed,) = convolution_memory(
        "aten.cudnn_convolution_transpose.default", (*args[:3], (0, 0), *args[3:]), H100
    ).signatures
    assert (transposed.op, transposed.deterministic) == ("dgrad", True)
    (old,) = convolution_memory(
        "aten._convolution.default", (*args[:2], None, *WINDOW_2D, False, True, True, False), H100
    ).signatures
    assert (old.deterministic, old.allow_tf32) == (True, False)


def test_bfloat16_before_ampere_unfolds_one_image_at_a_time() -> None:
    source, weight = tensor(2, 64, 9, 9, dtype="bfloat16"), tensor(32, 64, 3, 3, dtype="bfloat16")
    columns = 64 * 9 * 7 * 7 * 2
    window = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    forward = convolution_memory("convolution", (source, weight, None, *window), T4)
    assert [(event.action, event.nbytes) for event in forward.events] == [("output", None), ("alloc", columns)]
    point = convolution_memory("convolution", (source, tensor(32, 64, 1, 1, dtype="bfloat16"), None, *window), T4)
    assert script(point) == ["=result"]
    grad = tensor(2, 32, 7, 7, dtype="bfloat16", layout=CHANNELS_LAST)
    backward = convolution_memory(
        "convolution_backward", (grad, source, weight, None, *window, (True, True, False)), T4
    )
    assert [(event.action, event.nbytes) for event in backward.events] == [
        ("alloc", grad.nbytes), ("output", None), ("alloc", columns), ("output", None)
    ]  # fmt: skip


def test_native_kernels_are_unknown_and_empty_batches_free() -> None:
    dilated = ((1, 1), (1, 1), (2, 2), False, (0, 0), 1)
    args = (tensor(2, 64, 9, 9, dtype="bfloat16"), tensor(64, 64, 3, 3, dtype="bfloat16"), None, *dilated)
    assert convolution_memory("convolution", args, T4).unknown_buffers == ("SlowDilated2d kernel's buffers",)
    empty = convolution_memory("convolution", (tensor(0, 64, 9, 9), tensor(64, 64, 3, 3), None, *WINDOW_2D), H100)
    assert (script(empty), empty.unknown_buffers) == (["=result"], ())


# What cuDNN answers.


@needs_cudnn
def test_vgg_in_nchw_takes_copies_of_its_tensors_and_channels_last_next_to_nothing() -> None:
    last = square("fwd", 32, 64, 224, 64, 3, layout=CHANNELS_LAST)
    answers = conv_workspaces([VGG, last], H100)
    assert CUDNN is not None
    assert {answer.source for answer in answers.values()} == {f"cudnn {CUDNN.version}"}
    contiguous, channels_last = answers[VGG].nbytes, answers[last].nbytes
    assert contiguous is not None
    assert channels_last is not None
    if CUDNN.version == "9.19.0":
        assert (contiguous, channels_last) == (822_231_187, 131)
        # Later versions take another plan.
        tensors = (2 * 32 * 64 * 224 * 224 + 64 * 64 * 9) * 4
        assert 0.95 * tensors < contiguous < 1.05 * tensors
    assert channels_last < 1 << 20 < contiguous


RESNET50 = {
    square("fwd", 32, 3, 224, 64, 7, 2): 122_065_680,
    square("fwd", 32, 64, 56, 64, 3): 25_837_584,
    square("dgrad", 32, 64, 56, 64, 3): 51_527_696,
    square("wgrad", 32, 64, 56, 64, 3): 53_592_275,  # 468 bytes more on the card
    square("fwd", 32, 64, 56, 64, 1): 0,  # 400 on the card
    square("fwd", 32, 64, 56, 256, 1): 0,
}


@needs_cudnn
def test_resnet50_layers_on_sm_90() -> None:
    answers = nbytes(list(RESNET50), H100)
    assert CUDNN is not None
    if CUDNN.version == "9.19.0":
        assert answers == list(RESNET50.values())
    assert all(answer is not None and answer < 256 * MIB for answer in answers)


@needs_cudnn
def test_settings_change_the_plan() -> None:
    without_tf32 = VGG.model_copy(update={"allow_tf32": False})
    double = VGG.model_copy(update={"dtype": "float64"})
    with_cores, without, exact = nbytes([VGG, without_tf32, double], H100)
    assert with_cores is not None
    assert with_cores != without
    assert exact is not None
    old, new = nbytes([VGG], T4), nbytes([VGG], A100)
    assert old != new, "an architecture without TF32 takes another plan"


@needs_cudnn
@pytest.mark.parametrize("heuristic", ["instant", "b"])
def test_a_3d_convolution_avoids_the_engine_torch_avoids(heuristic: Literal["instant", "b"]) -> None:
    x, w = (2, 32, 8, 28, 28), (32, 32, 3, 3, 3)
    signature = ConvSignature(
        op="dgrad", x=x, x_stride=dense_strides(x), w=w, w_stride=dense_strides(w), y=x, y_stride=dense_strides(x),
        padding=(1,) * 3, stride=(1,) * 3, dilation=(1,) * 3, groups=1, dtype="bfloat16",
    )  # fmt: skip
    assert cudnn_client._blocked_engines(signature, "2.11.0", 91900, (9, 0)) == (23,)
    forward = signature.model_copy(update={"op": "fwd"})
    assert cudnn_client._blocked_engines(forward, "2.11.0", 91002, (9, 0)) == (23,)
    assert cudnn_client._blocked_engines(VGG, "2.11.0", 91002, (9, 0)) == ()
    assert cudnn_client._blocked_engines(VGG, "2.13.0", 92600, (12, 0)) == ()
    assert cudnn_client._blocked_engines(VGG, "2.15.0", 92600, (12, 0)) == (58,)
    assert cudnn_client._blocked_engines(VGG, "2.15.0", 92600, (9, 0)) == ()
    (answer,) = conv_workspaces([signature], H100, heuristic=heuristic).values()
    assert answer.nbytes is not None


@needs_cudnn
def test_what_cudnn_cannot_do_is_unknown_not_zero() -> None:
    nonsense = VGG.model_copy(update={"y": (32, 64, 200, 200), "y_stride": dense_strides((32, 64, 200, 200))})
    answers = conv_workspaces([nonsense, VGG], H100)
    assert answers[nonsense].nbytes is None
    assert answers[nonsense].note
    assert answers[VGG].nbytes


# The child may die, lie or be absent.


def child(tmp_path: Path, body: str) -> list[str]:
    """A command that answers the header line, then runs `body` once per request line with `answered` counting from
    1."""
    path = tmp_path / "child.py"
    path.write_text(
        "import json, os, sys, time\nfirst = sys.stdin.readline()\nprint(json.dumps({'cudnn': 91900}), flush=True)\n"
        "def answer(n): print(json.dumps({'workspace': n, 'knobs': [], 'error': None}), flush=True)\n"
        f"for answered, line in enumerate(sys.stdin, start=1):\n    {body}\n"
    )
    return [sys.executable, str(path)]


LIBRARY = cudnn_client.CudnnLibrary(version="9.19.0", cuda_major=13, libraries=())
FIVE = [square("fwd", batch, 64, 56, 64, 3) for batch in range(1, 6)]


def test_a_child_that_aborts_costs_one_answer(tmp_path: Path) -> None:
    aborting = child(tmp_path, "os.abort() if '[3, 64' in line else answer(100 + answered)")
    answers = list(conv_workspaces(FIVE, H100, library=LIBRARY, child=aborting).values())
    assert [answer.nbytes for answer in answers if answer.source == "cudnn 9.19.0"] == [101, 102, 101, 102]
    assert answers[2].source == "estimate"
    assert answers[2].nbytes == (2 * 3 * 64 * 56 * 56 + 64 * 64 * 9) * 4
    assert "ended with code -6" in answers[2].note


@pytest.mark.truth
def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    slow = child(tmp_path, "answer(7) if answered == 1 else time.sleep(60)")
    answers = list(conv_workspaces(FIVE, H100, library=LIBRARY, child=slow, timeout=3.0).values())
    assert [answer.source for answer in answers] == ["cudnn 9.19.0"] + ["estimate"] * 4
    assert answers[1].note.startswith("no answer from cuDNN within 3 s")


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (["/nonexistent/python"], "did not start"),
        ([sys.executable, "-c", "import os; os.abort()"], "ended with code -6"),
        ([sys.executable, "-c", 'print(\'{"error": "libcublasLt.so.13: cannot open"}\')'], "libcublasLt"),
        ([sys.executable, "-c", "print('Segmentation fault')"], "ended with code 0"),
    ],
)
def test_without_an_answer_the_figure_is_an_estimate_that_says_why(command: list[str], note: str) -> None:
    (answer,) = conv_workspaces([VGG], H100, library=LIBRARY, child=command).values()
    assert answer.source == "estimate"
    assert note in answer.note


@needs_cudnn
def test_a_missing_library_is_an_answer_not_an_abort() -> None:
    assert CUDNN is not None
    broken = CUDNN.model_copy(update={"libraries": (("/nonexistent/libcublasLt.so.13", True), *CUDNN.libraries)})
    (answer,) = conv_workspaces([VGG], H100, library=broken).values()
    assert (answer.source, "libcublasLt" in answer.note) == ("estimate", True)


def test_estimates_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> cudnn_client.CudnnLibrary:
        raise LookupError("cuDNN is not installed (package nvidia-cudnn-cu13)")

    monkeypatch.setattr(cudnn_client, "find_cudnn", missing)
    last = square("fwd", 32, 64, 224, 64, 3, layout=CHANNELS_LAST)
    answers = conv_workspaces([VGG, last, VGG.model_copy(update={"allow_tf32": False})], H100)
    tensors = (2 * 32 * 64 * 224 * 224 + 64 * 64 * 9) * 4
    assert [answer.nbytes for answer in answers.values()] == [tensors, 0, 0]
    assert {answer.source for answer in answers.values()} == {"estimate"}
    assert {answer.note for answer in answers.values()} == {"cuDNN is not installed (package nvidia-cudnn-cu13)"}


def test_an_older_card_has_the_answers_for_the_oldest_of_the_build_as_an_estimate(tmp_path: Path) -> None:
    body = "answer(42) if json.loads(first)['device']['deviceVer'] == 750 else answer(0)"
    (answer,) = conv_workspaces([VGG], V100, library=LIBRARY, child=child(tmp_path, body)).values()
    assert (answer.source, answer.nbytes) == ("estimate", 42)
    assert answer.note.startswith(
        "cuDNN 9.19.0 is not built for compute capability 7.0; counted is what it names for 7.5"
    )
    assert "which fxmem doctor --fetch cudnn 9.10 brings" in answer.note


def test_the_last_build_for_older_cards_answers_for_them(tmp_path: Path) -> None:
    lib = tmp_path / "nvidia" / "cudnn" / "lib"
    lib.mkdir(parents=True)
    (lib / "libcudnn.so.9").touch()
    (tmp_path / "nvidia_cudnn_cu12-9.10.2.21.dist-info").mkdir()
    library = read_cudnn_folder(tmp_path)
    assert (library.version, library.cuda_major, library.number) == ("9.10.2", 12, 91002)
    body = "answer(42) if json.loads(first)['device']['deviceVer'] == 700 else answer(0)"
    (answer,) = conv_workspaces([VGG], V100, library=library, child=child(tmp_path, body)).values()
    assert (answer.source.split()[0], answer.nbytes) == ("cudnn", 42)


def test_a_folder_without_cudnn_is_refused_with_the_package_that_fills_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"pip install --target {tmp_path} nvidia-cudnn-cu12==9\.10\.2\.21"):
        read_cudnn_folder(tmp_path)


def test_the_cpu_has_no_cudnn() -> None:
    with pytest.raises(UsageError, match="expected a CUDA target for a cuDNN workspace, got 'cpu'"):
        conv_workspaces([VGG], target("cpu"))


def test_old_libraries_and_odd_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_wheel(name: str) -> None:
        raise cudnn_client.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cudnn_client.metadata, "distribution", no_wheel)
    (tmp_path / "libcudnn.so.9.21.1").touch()
    (tmp_path / "libcudnn.so.9").symlink_to("libcudnn.so.9.21.1")
    (tmp_path / "libcublasLt.so.12").touch()
    found = find_cudnn({"LD_LIBRARY_PATH": f"/nonexistent:{tmp_path}"})
    assert found.version == "9.21.1"
    assert found.libraries == (
        (str(tmp_path / "libcublasLt.so.12"), True),
        ("libnvrtc.so.13", False),
        (str(tmp_path / "libcudnn.so.9"), True),
    )
    (tmp_path / "libcudnn.so.9").unlink()
    (tmp_path / "libcudnn.so.9").symlink_to("libcudnn.so.9.1.0")
    (tmp_path / "libcudnn.so.9.1.0").touch()
    with pytest.raises(LookupError, match=r"cuDNN 9\.1\.0 is installed; it can be asked from 9\.8 on"):
        find_cudnn({"LD_LIBRARY_PATH": str(tmp_path)})


# The cache.


def test_a_second_time_needs_no_child(tmp_path: Path) -> None:
    first = conv_workspaces(FIVE, H100, library=LIBRARY, child=child(tmp_path, "answer(10 * answered)"))
    again = conv_workspaces(FIVE, H100, library=LIBRARY, child=["/nonexistent"])
    assert (
        [answer.nbytes for answer in again.values()]
        == [answer.nbytes for answer in first.values()]
        == [10, 20, 30, 40, 50]
    )
    assert {answer.source for answer in again.values()} == {"cudnn 9.19.0"}
    elsewhere = conv_workspaces(FIVE[:1], A100, library=LIBRARY, child=["/nonexistent"])
    assert elsewhere[FIVE[0]].source == "estimate"
    other_mode = conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=["/nonexistent"], heuristic="b")
    assert other_mode[FIVE[0]].source == "estimate"


def test_the_plans_that_follow_are_kept_apart(tmp_path: Path) -> None:
    body = "answer(10 * answered)"
    conv_workspaces(FIVE, H100, library=LIBRARY, child=child(tmp_path, body))
    asked = conv_workspaces(FIVE, H100, library=LIBRARY, child=["/nonexistent"], smaller=True)
    assert {answer.source for answer in asked.values()} == {"estimate"}


@needs_cudnn
def test_the_plans_that_follow_have_smaller_workspaces_down_to_hardly_any() -> None:
    (answer,) = conv_workspaces([VGG], RTX_3060, smaller=True).values()
    sizes = [answer.nbytes, *answer.smaller_bytes]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] > 100 << 20
    assert sizes[-1] <= 1 << 20
    (alone,) = conv_workspaces([VGG], RTX_3060).values()
    assert (alone.nbytes, alone.smaller_bytes) == (answer.nbytes, ())
    (again,) = conv_workspaces([VGG], RTX_3060, smaller=True, child=["/nonexistent"]).values()
    assert again == answer


def test_estimates_are_not_kept(cache_in_tmp: Path) -> None:
    conv_workspaces([VGG], H100, library=LIBRARY, child=["/nonexistent"])
    assert not cache_in_tmp.exists()


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"format": 2, "workspaces": {}}', "\x00" * 64, "\udcff"])
def test_a_corrupted_cache_is_ignored_and_rewritten(content: str, cache_in_tmp: Path, tmp_path: Path) -> None:
    answering = child(tmp_path, "answer(42)")
    conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=answering)
    (file,) = cache_in_tmp.iterdir()
    file.write_text(content, errors="surrogateescape")
    assert conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=answering)[FIVE[0]] == Workspace(
        nbytes=42, source="cudnn 9.19.0"
    )
    assert conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=["/nonexistent"])[FIVE[0]].nbytes is not None


def test_an_answer_that_was_changed_is_asked_again(cache_in_tmp: Path, tmp_path: Path) -> None:
    answering = child(tmp_path, "answer(42)")
    conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=answering)
    (file,) = cache_in_tmp.iterdir()
    file.write_text(file.read_text().replace(": 42", ": 43"))
    assert conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=answering)[FIVE[0]].nbytes == 42


@pytest.mark.skipif(os.name != "posix", reason="needs the files of a Unix")
@pytest.mark.parametrize("what", [*NO_FILES, "a link to a file"])
def test_what_is_no_file_in_the_cache_is_replaced(what: str, cache_in_tmp: Path, tmp_path: Path) -> None:
    answering = child(tmp_path, "answer(42)")
    conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=answering)
    (file,) = cache_in_tmp.iterdir()
    elsewhere = file.rename(tmp_path / "elsewhere")
    before = elsewhere.read_text()
    NO_FILES.get(what, lambda path: path.symlink_to(elsewhere))(file)
    conv_workspaces(FIVE[1:2], H100, library=LIBRARY, child=answering)
    assert elsewhere.read_text() == before
    assert file.is_dir() or (file.is_file() and not file.is_symlink())
    name = file.stem.partition(f"-{cudnn_client._FORMAT}-")[2]
    assert list(cudnn_client.load(cache_in_tmp, name)) == [FIVE[1].key] * (not file.is_dir())


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path / "file" / "below"))
    (answer,) = conv_workspaces(FIVE[:1], H100, library=LIBRARY, child=child(tmp_path, "answer(42)")).values()
    assert answer.nbytes == 42


def test_concurrent_writers_leave_a_readable_file(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for entry in range(20):
            cudnn_client.store(tmp_path, "shared", {f"{writer}-{entry}": entry})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    kept = cudnn_client.load(tmp_path, "shared")
    assert kept
    assert all(value == int(key.split("-")[1]) for key, value in kept.items())
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_client, "_MAX_ENTRIES", 3)
    monkeypatch.setattr(cudnn_client, "_MAX_FILES", 2)
    for number in range(5):
        cudnn_client.store(tmp_path, "one", {f"key{number}": number})
        cudnn_client.store(tmp_path, f"file{number}", {"key": number})
        os.utime(tmp_path / f"cudnn-{cudnn_client._FORMAT}-file{number}.json", (number, number))
    assert cudnn_client.load(tmp_path, "one") == {"key2": 2, "key3": 3, "key4": 4}
    assert len(list(tmp_path.iterdir())) == 2


def test_where_the_cache_lies(tmp_path: Path) -> None:
    assert cudnn_client.cache_directory({"FXMEM_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cudnn_client.cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/fxmem")
    assert cudnn_client.cache_directory({}) == Path.home() / ".cache" / "fxmem"
    assert cudnn_client.cache_directory({"FXMEM_CACHE_DIR": ""}) is None
    cudnn_client.store(None, "name", {"key": 1})
    assert cudnn_client.load(None, "name") == {}


# cuBLAS.

SHARED, CACHED = "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "TORCH_CUBLAS_WORKSPACE_CACHE"


@pytest.mark.parametrize(
    ("torch", "name", "environ", "handle", "lt"),
    [
        ("2.11.0+cu130", "h100", {}, 33_554_432, 1_048_576),
        ("2.11.0", "a100", {}, 8_519_680, 1_048_576),
        ("2.11.0", "b200", {}, 8_519_680, 1_048_576),
        ("2.11.0", "h100", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 33_554_432, 1_048_576),
        ("2.11.0", "h100", {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, 8_519_680, 1_048_576),
        ("2.11.0", "h100", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 131_072, 131_072),
        ("2.11.0", "h100", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, 0, 0),
        ("2.11.0", "a100", {"CUBLASLT_WORKSPACE_SIZE": "4096"}, 8_519_680, 4_194_304),
        ("2.11.0", "a100", {"CUBLASLT_WORKSPACE_SIZE": "32768"}, 8_519_680, 8_519_680),
        ("2.11.0", "a100", {"CUBLASLT_WORKSPACE_SIZE": "32768", SHARED: "0"}, 8_519_680, 33_554_432),
        ("2.11.0", "a100", {SHARED: "1"}, 8_519_680, 0),
        # Run: what torch's own C++ asks of its allocator on a stand-in for the card.
        ("2.12.1", "b200", {}, 33_554_432, 0),
        ("2.12.1", "a100", {}, 8_519_680, 0),
        ("2.13.0", "a100", {SHARED: "0"}, 8_519_680, 1_048_576),
        ("2.13.0", "a100", {"CUBLASLT_WORKSPACE_SIZE": "32768"}, 8_519_680, 0),
        ("2.13.0", "a100", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 131_072, 0),
        ("2.15.0", "a100", {CACHED: "1"}, 8_519_680, 0),
    ],
)
def test_cublas_workspaces(torch: str, name: str, environ: dict[str, str], handle: int, lt: int) -> None:
    found = cublas_workspaces(target(name), torch, environ)
    assert found.is_kept
    assert (found.handle_bytes, found.lt_bytes, found.torch_version, found.notes) == (handle, lt, torch[:4], ())


@pytest.mark.parametrize(("version", "large"), [("2.11", [9]), ("2.13", [9, 10, 12]), ("2.14", [9, 10, 11, 12])])
def test_cards_with_a_large_cublas_workspace(version: str, large: list[int]) -> None:
    cards = {major: Target(name="mine", device="cuda", capability=(major, 0)) for major in range(7, 13)}
    sizes = {major: cublas_workspaces(card, version, {}).handle_bytes for major, card in cards.items()}
    assert [major for major, nbytes in sizes.items() if nbytes == 33_554_432] == large


@pytest.mark.parametrize(
    ("environ", "product", "linear"),
    [
        ({}, 33_554_432, 1_048_576),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 131_072, 1_048_576),
        ({"CUBLASLT_WORKSPACE_SIZE": "32768"}, 33_554_432, 33_554_432),
    ],
)
def test_each_product_allocates_its_workspace_since_2_15(environ: dict[str, str], product: int, linear: int) -> None:
    """Run: `+result +workspace -workspace`, for a product and for a linear layer with bias alike."""
    collector = Collector(H100, "2.15.0", environ, ConvSettings())
    x, w = tensor(128, 256), tensor(256, 512)
    collector.note(0, "aten.mm.default", (x, w), tensor(128, 512), Phase.FORWARD)
    collector.note(1, "aten.addmm.default", (tensor(512), x, w), tensor(128, 512), Phase.BACKWARD)
    collector.note(2, "aten._int_mm.default", (x, w), tensor(128, 512), Phase.FORWARD)
    memory = collector.resolve()
    assert script(memory[0]) == ["=result", "cuBLAS workspace"]
    assert script(memory[1]) == ["=result", "cuBLASLt workspace"]
    assert {at: peak_bytes(each) for at, each in memory.items()} == {0: product, 1: linear}
    assert collector.find_held() == {}
    assert any("each product allocates" in each.text for each in collector.assumptions())


@pytest.mark.parametrize(("version", "nbytes"), [("2.11.0", 33_554_432), ("2.12.1", 0)])
def test_products_of_integers_have_no_workspace_of_cublaslt(version: str, nbytes: int) -> None:
    collector = Collector(H100, version, {}, ConvSettings())
    call = (tensor(128, 256, dtype="int8"), tensor(256, 512, dtype="int8"))
    collector.note(0, "aten._int_mm.default", call, tensor(128, 512, dtype="int32"), Phase.FORWARD)
    assert sum(buffer.nbytes for buffer in collector.find_held().values()) == nbytes


def test_settings_cublas_cannot_read_are_ignored_as_torch_does() -> None:
    found = cublas_workspaces(A100, "2.11.0", {"CUBLAS_WORKSPACE_CONFIG": "big", "CUBLASLT_WORKSPACE_SIZE": "many"})
    assert (found.handle_bytes, found.lt_bytes) == (8_519_680, 1_048_576)
    assert found.notes == (
        "CUBLAS_WORKSPACE_CONFIG='big' is not of the form :SIZE:COUNT and is ignored",
        "CUBLASLT_WORKSPACE_SIZE='many' is not a number of KiB and is ignored",
    )


def test_forward_and_backward_hold_one_each() -> None:
    collector = Collector(H100, "2.11.0", {}, ConvSettings())
    collector.note(0, "aten.mm.default", (tensor(64, 32), tensor(32, 16)), tensor(64, 16), Phase.FORWARD)
    assert collector.find_held() == {"cuBLAS workspace, forward thread": HeldBuffer(33_554_432, 0)}
    linear = (tensor(16), tensor(64, 32), tensor(32, 16))
    collector.note(1, "aten.addmm.default", linear, tensor(64, 16), Phase.BACKWARD)
    assert {name: buffer.nbytes for name, buffer in collector.find_held().items()} == {
        "cuBLAS workspace, forward thread": 33_554_432,
        "cuBLAS workspace, autograd thread": 33_554_432,
        "cuBLASLt workspace, autograd thread": 1_048_576,
    }


@pytest.mark.parametrize(
    ("version", "release"), [("2.3.1", "2.4"), ("2.13.0a0+git1234", None), ("2.16.0", "2.15"), ("3.0", "2.15")]
)
def test_a_release_that_the_table_does_not_know_is_named(version: str, release: str | None) -> None:
    text = release_assumption(version)
    if release is None:
        assert text is None
    else:
        assert text is not None
        assert version in text
        assert f"those of torch {release}" in text
        assert cublas_workspaces(H100, version, {}).torch_version == release


def test_every_release_names_its_evidence_and_2_12_what_it_leaves_open() -> None:
    assert list(RELEASES) == [(2, minor) for minor in range(4, 16)]
    assert all(row.evidence.startswith("run, 2.") for row in RELEASES.values())
    assert [release for release in RELEASES if release_assumption(".".join(map(str, release)))] == [(2, 12)]


def test_versions_and_targets_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match=r"expected a torch version such as 2\.11\.0, got 'newest'"):
        cublas_workspaces(H100, "newest", {})
    with pytest.raises(UsageError, match="expected a CUDA target for a cuBLAS workspace, got 'cpu'"):
        cublas_workspaces(target("cpu"), "2.11.0", {})


def test_which_ops_run_on_cublas() -> None:
    ops = ("aten.mm.default", "aten.addmm.default", "aten::bmm", "aten.add.Tensor", "aten.convolution.default")
    assert [uses_cublas(op, "2.11") for op in ops] == [True, True, True, False, False]
    linear = (tensor(30), tensor(8, 20), tensor(20, 30))
    assert uses_cublaslt("aten.addmm.default", linear, {})
    assert not uses_cublaslt("aten.addmm.default", linear, {"DISABLE_ADDMM_CUDA_LT": "1"})
    assert not uses_cublaslt("aten.addmm.default", (tensor(8, 30), *linear[1:]), {})
    assert not uses_cublaslt("aten.addmm.default", (tensor(30), tensor(1, 20), tensor(20, 30)), {})
    assert not uses_cublaslt("aten.mm.default", linear[1:], {})


def test_operands_blas_cannot_read_are_copied() -> None:
    expanded = TensorLayout(shape=(8, 20), stride=(0, 0), dtype="bfloat16")
    transposed = TensorLayout(shape=(20, 30), stride=(1, 20), dtype="bfloat16")
    rows_of_a_larger_one = TensorLayout(shape=(20, 30), stride=(64, 1), dtype="bfloat16")
    every_other = TensorLayout(shape=(20, 30), stride=(60, 2), dtype="bfloat16")
    assert matmul_copies("aten.mm.default", (expanded, transposed)) == (8 * 20 * 2,)
    assert matmul_copies("aten.mm.default", (tensor(8, 20, dtype="bfloat16"), rows_of_a_larger_one)) == ()
    assert matmul_copies("aten.addmm.default", (tensor(30, dtype="bfloat16"), expanded, every_other)) == (
        8 * 20 * 2,
        20 * 30 * 2,
    )
    assert (
        matmul_copies(
            "aten.bmm.default", (TensorLayout(shape=(3, 8, 20), stride=(0, 20, 1), dtype="float32"), tensor(3, 20, 30))
        )
        == ()
    )
    assert matmul_copies("aten.add.Tensor", (expanded, expanded)) == ()
    batches = (tensor(3, 8, 30), TensorLayout(shape=(3, 8, 20), stride=(0, 0, 0), dtype="float32"), tensor(3, 20, 30))
    assert matmul_copies("aten.baddbmm.default", batches) == (3 * 8 * 20 * 4,)
    assert matmul_copies("aten._addmm_activation.default", (tensor(30), expanded, transposed)) == (8 * 20 * 2,)


# Attention.

Shape = tuple[int, ...]


def attention(kernel: str, card: Target, *args: Any, deterministic: bool = False) -> HiddenMemory:
    """What a call hides."""
    collector = Collector(card, "2.11.0", {}, ConvSettings(), deterministic=deterministic)
    seen = collector.find_hidden(f"aten._scaled_dot_product_{kernel}.default", args, None)
    assert seen is not None
    assert seen.memory is not None
    return seen.memory


def rows_first(shape: Shape, dtype: str, *, is_dense: bool = True) -> TensorLayout:
    """As a transpose after attention makes its results; not dense: one number seen from everywhere."""
    _, heads, rows, size = shape
    stride = (rows * heads * size, size, heads * size, 1) if is_dense else (0, 0, 0, 0)
    return TensorLayout(shape=shape, stride=stride, dtype=dtype)


def flash_forward(query: Shape, key: Shape, dropout_p: float, card: Target) -> HiddenMemory:
    return attention("flash_attention", card, tensor(*query), tensor(*key), tensor(*key), dropout_p)


def flash_backward(query: Shape, key: Shape, dtype: str, card: Target, *, dense: bool = True, **options: Any) -> Any:
    out, keys = rows_first(query, dtype), tensor(*key, dtype=dtype)
    grad = rows_first(query, dtype, is_dense=dense)
    return attention("flash_attention_backward", card, grad, out, keys, keys, out, **options)


def efficient_forward(query: Shape, value: Shape, dtype: str, card: Target) -> HiddenMemory:
    values = tensor(*value, dtype=dtype)
    return attention("efficient_attention", card, tensor(*query, dtype=dtype), values, values)


def efficient_backward(query: Shape, key: Shape, value: Shape, dtype: str, card: Target) -> HiddenMemory:
    grad = rows_first((*query[:3], value[3]), dtype)
    given = (tensor(*shape, dtype=dtype) for shape in (query, key, value))
    return attention("efficient_attention_backward", card, grad, *given)


def cudnn_attention_forward(query: Shape, key: Shape, dropout_p: float, card: Target) -> HiddenMemory:
    return attention("cudnn_attention", card, tensor(*query), tensor(*key), tensor(*key), None, True, dropout_p)


def cudnn_attention_backward(
    query: Shape, key: Shape, value: Shape, dropout_p: float, card: Target, *, dense: bool = True
) -> HiddenMemory:
    grad = rows_first((*query[:3], value[3]), "float16", is_dense=dense)
    given = (tensor(*shape, dtype="float16") for shape in (query, key, value))
    return attention("cudnn_attention_backward", card, grad, *given, *[None] * 9, dropout_p)


def test_flash_backward_by_hand() -> None:
    """Two sequences of 2000 tokens, 32 heads of 128, 8 for keys and values: 2000 rounds to 2048."""
    memory = flash_backward((2, 32, 2000, 128), (2, 8, 2000, 128), "bfloat16", H100)
    assert script(memory)[:3] == ["=grad_query", "=grad_key", "=grad_value"]
    sizes = {event.name: event.nbytes for event in memory.events if event.action == "alloc"}
    assert sizes == {
        "softmax_d": 2 * 32 * 2048 * 4,
        "dq_accum": 2 * 2048 * 32 * 128 * 4,
        "grad_key of every query head": 2 * 2000 * 32 * 128 * 2,
        "grad_value of every query head": 2 * 2000 * 32 * 128 * 2,
    }
    assert peak_bytes(memory) == sum(sizes.values())


def test_flash_backward_variants() -> None:
    shape = (1, 4, 100, 72)
    assert peak_bytes(flash_backward(shape, shape, "float16", H100)) == (4 * 128 + 128 * 4 * 96) * 4
    copied = flash_backward(shape, shape, "float16", H100, dense=False)
    assert copied.events[0].nbytes == 4 * 100 * 72 * 2
    # 132 multiprocessors over 4 blocks: 33 copies of the queries' gradient.
    assert (
        peak_bytes(flash_backward(shape, shape, "float16", H100, deterministic=True))
        == (4 * 128 + 33 * 128 * 4 * 96) * 4
    )
    assert (
        peak_bytes(flash_backward((1, 4, 100, 136), (1, 4, 100, 136), "float16", H100)) == (4 * 128 + 128 * 4 * 192) * 4
    )
    with pytest.raises(UsageError, match="expected a head size of at most 256 for flash attention, got 264"):
        flash_backward((1, 4, 100, 264), (1, 4, 100, 264), "float16", H100)


def test_flash_forward_splits_keys_when_the_card_would_idle() -> None:
    assert peak_bytes(flash_forward((8, 32, 2048, 128), (8, 32, 2048, 128), 0.0, H100)) == 0
    assert peak_bytes(flash_forward((1, 8, 64, 128), (1, 8, 8192, 128), 0.1, H100)) == 0
    # 8 blocks of work for 264 slots, 64 blocks of 128 keys: 32 splits fill 256 of them, 97 % of what is there.
    split = flash_forward((1, 8, 64, 128), (1, 8, 8192, 128), 0.0, H100)
    assert peak_bytes(split) == 32 * 8 * 64 * (1 + 128) * 4
    # One new token: the four query heads of a group become the rows.
    grouped = flash_forward((1, 32, 1, 128), (1, 8, 8192, 128), 0.0, H100)
    assert peak_bytes(grouped) == 32 * 8 * 4 * (1 + 128) * 4


def by_rows(kernel: str, card: Target, *args: Any) -> int:
    """The most that a call hides whose tensors are `(B, S, H, D)`, or packed."""
    seen = Collector(card, "2.11.0", {}, ConvSettings()).find_hidden(f"aten._{kernel}.default", args, None)
    assert seen is not None
    return 0 if seen.memory is None else peak_bytes(seen.memory)


def test_attention_by_rows_hides_what_it_does_by_heads() -> None:
    q, k = (2, 32, 2000, 136), (2, 8, 2000, 136)
    rows_q, rows_k = (tensor(b, s, h, d, dtype="bfloat16") for b, h, s, d in (q, k))
    lengths = None, None, 2000, 2000
    forward = by_rows("flash_attention_forward", H100, rows_q, rows_k, rows_k, *lengths, 0.0, True, False)
    assert forward == peak_bytes(flash_forward(q, k, 0.0, H100))
    given = rows_q, rows_q, rows_k, rows_k, rows_q
    backward = by_rows("flash_attention_backward", H100, *given, None, *lengths, 0.0, True, None, None)
    assert backward == peak_bytes(flash_backward(q, k, "bfloat16", H100))
    forward = by_rows("efficient_attention_forward", H100, rows_q, rows_q, rows_q, None, *lengths, 0.0, 0)
    assert forward == peak_bytes(efficient_forward(q, q, "bfloat16", H100))
    given = rows_q, rows_q, rows_q, rows_q, None
    backward = by_rows("efficient_attention_backward", H100, *given, None, *lengths, None, 0.0)
    assert backward == peak_bytes(efficient_backward(q, q, q, "bfloat16", H100))


def test_packed_sequences_have_one_batch_and_room_between_them() -> None:
    q, k, ends = tensor(300, 4, 40, dtype="float16"), tensor(300, 2, 40, dtype="float16"), tensor(4, dtype="int32")
    lengths = ends, ends, 128, 128
    assert by_rows("flash_attention_forward", H100, q, k, k, *lengths, 0.0, True, False) == 0
    backward = by_rows("flash_attention_backward", H100, q, q, k, k, q, None, *lengths, 0.0, True, None, None)
    rows = 300 + 3 * 128
    assert backward == 4 * (4 * rows + rows * 4 * 64) + 2 * 2 * 300 * 4 * 40
    one, cache = tensor(3, 32, 128, dtype="float16"), tensor(3 * 8192, 8, 128, dtype="float16")
    decoding = by_rows("flash_attention_forward", H100, one, cache, cache, ends, ends, 1, 8192, 0.0, True, False)
    assert decoding == peak_bytes(flash_forward((3, 32, 1, 128), (3, 8, 8192, 128), 0.0, H100))
    packed = tensor(1, 300, 4, 128, dtype="bfloat16")
    backward = by_rows("efficient_attention_backward", H100, *[packed] * 4, None, None, *lengths, None, 0.0)
    apart = efficient_backward((3, 4, 128, 128), (3, 4, 128, 128), (3, 4, 128, 128), "bfloat16", H100)
    assert backward - 300 * 4 * 4 == peak_bytes(apart) - 3 * 4 * 128 * 4  # less the sums, which are of all tokens


def test_memory_efficient_forward_accumulates_large_heads_in_float() -> None:
    assert peak_bytes(efficient_forward((2, 4, 100, 64), (2, 4, 100, 64), "bfloat16", H100)) == 0
    assert peak_bytes(efficient_forward((2, 4, 100, 160), (2, 4, 100, 160), "bfloat16", H100)) == 2 * 100 * 4 * 160 * 4
    assert peak_bytes(efficient_forward((2, 4, 100, 160), (2, 4, 100, 160), "float32", H100)) == 0
    assert efficient_forward((2, 4, 100, 64), (2, 4, 100, 64), "float16", T4).unknown_buffers == ("float output",)


def test_memory_efficient_backward_by_hand() -> None:
    """Blocks of 64 x 64 up to head size 64: 16 bytes of locks before 4096 floats, for every block of queries and each
    of 8 heads."""
    shape = (2, 4, 100, 64)
    sizes = {
        event.name: event.nbytes
        for event in efficient_backward(shape, shape, shape, "bfloat16", H100).events
        if event.action == "alloc"
    }
    assert sizes == {"delta": 8 * 100 * 4, "workspace": 8 * 2 * (16 + 4096 * 4)}
    # float32: the product is reduced to delta, reordered, and both are gone before the workspace comes.
    full = efficient_backward(shape, shape, shape, "float32", H100)
    assert script(full)[3:] == [
        "grad_output * output",
        "delta, unordered",
        "delta",
        "-delta, unordered",
        "-grad_output * output",
        "workspace",
    ]
    assert [event.nbytes for event in full.events if event.action == "alloc"][:3] == [
        8 * 100 * 64 * 4,
        8 * 100 * 4,
        8 * 100 * 4,
    ]
    assert peak_bytes(full) == 8 * 100 * 4 + 8 * 2 * (16 + 4096 * 4)


def test_memory_efficient_backward_depends_on_shared_memory() -> None:
    """Head size 128 in half precision wants 130 KiB of shared memory: an A100 has it, an L4 stages dK and dV in the
    workspace."""
    shape = (1, 4, 256, 128)
    large = efficient_backward(shape, shape, shape, "bfloat16", A100)
    staged = efficient_backward(shape, shape, shape, "bfloat16", target("l4"))
    assert large.events[-1].nbytes == 4 * 2 * 1 * (16 + 128 * 128 * 4)
    assert staged.events[-1].nbytes == 4 * (4 * 64 * (128 + 128) * 4 + 4 * 2 * (16 + 64 * 64 * 4))
    assert efficient_backward(shape, shape, shape, "bfloat16", T4).unknown_buffers == ("workspace",)
    shape = (1, 4, 256, 96)  # without dropout, blocks of 128 x 64
    assert efficient_backward(shape, shape, shape, "bfloat16", H100).events[-1].nbytes == 4 * 4 * (16 + 128 * 64 * 4)
    shape = (1, 4, 256, 256)  # blocks of 128 x 64 do not fit an L4 in float32
    on_l4 = efficient_backward(shape, shape, shape, "float32", target("l4"))
    assert on_l4.events[-1].nbytes == 4 * 4 * 4 * (16 + 64 * 64 * 4)


CUDNN_ATTENTION = [
    # Bytes cuDNN 9.19 named: card, (batch, heads, queries, head size), (key heads, keys, value's head size), dropout.
    ("h100", (2, 32, 2048, 128), (8, 2048, 128), 0.0, 134_742_272),
    ("h100", (8, 12, 512, 64), (12, 512, 64), 0.0, 12_779_776),
    ("h100", (1, 12, 577, 24), (1, 577, 24), 0.0, 1_357_488),
    ("h100", (4, 8, 100, 64), (8, 300, 64), 0.0, 832_256),
    ("b200", (2, 32, 2048, 128), (8, 2048, 128), 0.0, 134_742_144),
    ("b200", (16, 12, 256, 64), (12, 256, 64), 0.0, 12_779_520),
    ("b200", (4, 8, 100, 64), (8, 300, 64), 0.0, 1_684_096),
    ("b200", (8, 1, 512, 64), (1, 50, 96), 0.125, 1_130_624),
    ("b200", (3, 1, 255, 80), (1, 255, 80), 0.0, 247_860),
    ("b200", (2, 8, 1000, 96), (4, 1000, 96), 0.125, 14_449_280),
    ("a100", (2, 32, 2048, 128), (8, 2048, 128), 0.0, 201_851_008),
    ("rtx4090", (8, 12, 512, 64), (12, 512, 64), 0.0, 25_362_560),
    ("rtx5090", (8, 12, 512, 64), (12, 512, 64), 0.0, 25_362_560),
]


@pytest.mark.parametrize(("card", "query", "rest", "dropout", "nbytes"), CUDNN_ATTENTION)
def test_cudnn_attention_backward_takes_what_cudnn_named(
    card: str, query: tuple[int, ...], rest: tuple[int, int, int], dropout: float, nbytes: int
) -> None:
    heads, keys, size = rest
    key, value = (query[0], heads, keys, query[3]), (query[0], heads, keys, size)
    memory = cudnn_attention_backward(query, key, value, dropout, target(card))
    assert script(memory) == ["=grad_query", "=grad_key", "=grad_value", "cuDNN attention workspace"]
    assert memory.events[-1].nbytes == nbytes


def test_cudnn_attention_backward_by_hand() -> None:
    """Hopper, 16 heads of 64 for 1000 queries: a float gradient, a float for each row, 256 bytes."""
    shape = (1, 16, 1000, 64)
    memory = cudnn_attention_backward(shape, shape, shape, 0.1, H100, dense=False)
    assert script(memory)[3:] == ["dense grad_output", "cuDNN attention workspace"]
    assert [event.nbytes for event in memory.events[3:]] == [
        16 * 1000 * 64 * 2,
        16 * 1000 * 64 * 4 + 16 * 1000 * 4 + 256,
    ]


def test_cudnn_attention_forward_takes_next_to_nothing_but_for_blackwells_dropout() -> None:
    shape = (8, 8, 100, 40)
    found = {
        card: peak_bytes(cudnn_attention_forward(shape, shape, 0.125, target(card)))
        for card in ("h100", "b200", "a100", "rtx5090")
    }
    assert found == {"h100": 256, "b200": 131_200, "a100": 0, "rtx5090": 0}
    assert peak_bytes(cudnn_attention_forward(shape, shape, 0.0, target("b200"))) == 0


def test_cudnn_attention_is_unknown_where_nobody_asked() -> None:
    card = H100.model_copy(update={"capability": (10, 3)})
    shape = (1, 8, 256, 64)
    backward = cudnn_attention_backward(shape, shape, shape, 0.0, card)
    assert (
        cudnn_attention_forward(shape, shape, 0.0, card).unknown_buffers
        == backward.unknown_buffers
        == ("cuDNN attention workspace",)
    )


# What a step's collector says.


def collected(
    environ: dict[str, str] | None = None, *, settings: ConvSettings | None = None, deterministic: bool = False
) -> Collector:
    collector = Collector(H100, "2.11.0", environ or {}, settings or ConvSettings(), deterministic=deterministic)
    collector.note(0, "aten.mm.default", (tensor(64, 32), tensor(32, 16)), tensor(64, 16), Phase.FORWARD)
    return collector


@pytest.mark.parametrize(("config", "nbytes"), [(None, 32 << 20), (":16:8", 128 << 10), (":4096:2", 32 << 20)])
def test_deterministic_matrix_products_run_with_one_of_two_workspaces(config: str | None, nbytes: int) -> None:
    environ = {} if config is None else {"CUBLAS_WORKSPACE_CONFIG": config}
    collector = collected(environ, deterministic=True)
    assert collector.find_held() == {"cuBLAS workspace, forward thread": HeldBuffer(nbytes, 0)}
    said = [a.text for a in collector.assumptions() if "deterministic" in a.text]
    assert len(said) == (config != ":16:8")
    assert collected({"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}).find_held() == {
        "cuBLAS workspace, forward thread": HeldBuffer(8 << 20, 0)
    }


def test_plans_found_by_timing_are_unknown() -> None:
    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    call = (tensor(2, 8, 16, 16), tensor(8, 8, 3, 3), None, *window)
    found = {}
    for benchmark in (False, True):
        collector = collected(settings=ConvSettings(benchmark=benchmark, allow_tf32=False))
        collector.note(1, "aten.convolution.default", call, tensor(2, 8, 16, 16), Phase.FORWARD)
        collector.resolve()
        found[benchmark] = [(u.topic, u.count) for u in collector.unknowns() if "benchmark" in u.what]
        if CUDNN is not None:
            assert any("TF32 not allowed" in a.text for a in collector.assumptions())
    assert found == {False: [], True: [("memory", 1)]}


# Other kernels.


def hidden(name: str, *args: Any, result: Any = None) -> HiddenMemory | None:
    """What a call hides on an H100."""
    seen = Collector(H100, "2.11.0", {}, ConvSettings()).find_hidden(f"aten.{name}", args, result)
    return None if seen is None else seen.memory


def scratch(name: str, *args: Any, result: Any = None) -> int:
    """Most bytes that a call has allocated at once beside its results."""
    memory = hidden(name, *args, result=result)
    return 0 if memory is None else peak_bytes(memory)


def test_embedding_backward_by_hand() -> None:
    """4000 tokens into a table of 1000 rows of 96: parts of 10 rows, 1000 segments, 1400 parts at most."""
    name, made = "embedding_dense_backward.default", tensor(1000, 96, dtype="bfloat16")

    def backward(tokens: int) -> int:
        grad, index = tensor(4, tokens, 96, dtype="bfloat16"), tensor(4, tokens, dtype="int64")
        return scratch(name, grad, index, 1000, -1, False, result=made)

    assert backward(1000) == 8 * 4000 * 3 + 8 + 8 * 1000 * 2 + 8 + 8 * 1400 + 1400 * 96 * 4
    assert backward(700) == 0


def test_layer_norm_backward_sums_in_parts_only_for_many_short_rows() -> None:
    def backward(rows: int, columns: int, weight: TensorLayout | None) -> int:
        x, mean = tensor(rows, columns), tensor(rows, 1)
        args = (x, x, [columns], mean, mean, weight, weight, [True] * 3)
        return scratch("native_layer_norm_backward.default", *args, result=(x, weight, weight))

    # 100,000 rows of 96: 3 blocks across, so 3125 = ceil(100000 / 32) down, below 32768 // 3.
    assert backward(100_000, 96, tensor(96)) == 2 * (3125 + 1) * 96 * 4
    assert backward(60_000, 96, tensor(96)) == 0
    assert backward(100_000, 4096, tensor(4096)) == 0
    assert backward(100_000, 96, None) == 0


def test_softmax_backward_multiplies_first() -> None:
    scores = tensor(2, 8, 128, 128)
    memory = hidden("_softmax_backward_data.default", scores, scores, -1, torch.float32, result=scores)
    assert memory is not None
    assert script(memory) == ["=grad_input", "grad_output * output"]
    assert peak_bytes(memory) == 2 * 8 * 128 * 128 * 4
    dense = tensor(8, 100)
    assert scratch("_log_softmax_backward_data.default", dense, dense, -1, torch.float32, result=dense) == 0


def test_partial_norms_are_as_many_as_the_largest_tensor_has_chunks() -> None:
    assert scratch("_foreach_norm.Scalar", [tensor(100_000), tensor(10)]) == 2 * 2 * 4
    assert hidden("unique_consecutive.default", tensor(1000)) is None


def test_short_rows_are_sorted_in_the_results_and_long_ones_by_cub() -> None:
    assert scratch("sort.default", tensor(4096)) == 4096 * 8
    assert scratch("sort.default", tensor(512, 4096)) == 4096 * 8
    # Measured on an RTX 3090 for rows of 8192, 16384 and 32768 (Liger-Kernel's sparsemax).
    for length in (8192, 16384, 32768):
        assert scratch("sort.default", tensor(4096, length)) == 4096 * length * 20 + 512
    assert scratch("sort.default", tensor(4096, 32768, dtype="bfloat16")) == 4096 * 32768 * 18 + 512
    # Measured on an H200: one row of 512,000 is sorted by digits.
    assert scratch("sort.default", tensor(512_000)) == 512_000 * 8 + 6_251_007
    few = hidden("sort.stable", tensor(127, 4097))
    assert few is not None
    assert few.unknown_buffers == ("CUB's temporary storage",)
    assert peak_bytes(few) == 2 * 8 * 127 * 4097


def test_group_norm_sums_by_channel_and_has_factors_by_channel_and_group() -> None:
    """Measured on a B200: backward takes three floats for each channel of each image, two for each group."""
    x, weight, mean = tensor(8, 64, 16, 16), tensor(64), tensor(8, 32)
    collector = Collector(H100, "2.11.0", {}, ConvSettings())
    sizes = (8, 64, 256, 32)
    half = tensor(8, 64, 16, 16, dtype="bfloat16")
    calls = [
        ("native_group_norm", (x, weight, weight, *sizes, 1e-5)),
        ("native_group_norm", (half, weight, weight, *sizes, 1e-5)),
        ("native_group_norm", (x, None, None, *sizes, 1e-5)),
        ("native_group_norm_backward", (x, x, mean, mean, weight, *sizes, [True, True, True])),
        ("native_group_norm_backward", (half, half, mean, mean, weight, *sizes, [True, True, True])),
        ("native_group_norm_backward", (x, x, mean, mean, None, *sizes, [True, False, False])),
        ("native_group_norm_backward", (x, x, mean, mean, weight, *sizes, [False, True, True])),
        ("native_group_norm_backward", (x, x, mean, mean, weight, 8, 64, 1, 32, [True, True, True])),
        ("native_group_norm", (x, weight, None, *sizes, 1e-5)),
    ]
    for at, (name, args) in enumerate(calls):
        collector.note(at, f"aten.{name}.default", args, (x, weight, weight), Phase.BACKWARD)
    channel, group = 8 * 64 * 4, 8 * 32 * 4
    found = {at: peak_bytes(memory) for at, memory in collector.resolve().items()}
    assert found == {
        0: 2 * channel,
        1: 2 * channel,
        2: 0,
        3: 3 * channel + 2 * group,
        4: 3 * channel + 2 * group,
        5: 2 * channel + 2 * group,
        6: 2 * channel,
        7: 2 * group,
        8: 2 * channel,
    }


@pytest.mark.parametrize(("shape", "several"), [((8, 399), False), ((8, 400), True), ((399,), True)])
def test_long_slices_are_searched_by_several_blocks(shape: tuple[int, ...], several: bool) -> None:
    memory = hidden("topk.default", tensor(*shape), 5)
    assert memory is not None
    assert memory.unknown_buffers == ("buffers of several blocks for a slice",) * several


def test_rms_norm_backward_copies_an_expanded_gradient_and_sums_as_layer_norm_does() -> None:
    def backward(rows: int, columns: int, grad: TensorLayout) -> int:
        x, rstd, weight = tensor(rows, columns), tensor(rows, 1), tensor(columns)
        collector = Collector(H100, "2.11.0", {}, ConvSettings())
        args = (grad, x, [columns], rstd, weight, [True, True])
        collector.note(0, "aten._fused_rms_norm_backward.default", args, (x, weight), Phase.BACKWARD)
        return {at: peak_bytes(memory) for at, memory in collector.resolve().items()}[0]

    assert backward(2048, 4096, tensor(2048, 4096)) == 0
    expanded = TensorLayout(shape=(2048, 4096), stride=(0, 0), dtype="float32")
    assert backward(2048, 4096, expanded) == 2048 * 4096 * 4
    assert backward(100_000, 96, tensor(100_000, 96)) == (3125 + 1) * 96 * 4


def test_what_is_put_at_one_place_is_found_by_sorting() -> None:
    """2401 indices, as for a table of relative positions: the linear index, its sorted form, both kinds of positions,
    and what the sort takes: both again, one pass for the 8 bits of the largest index."""
    table, values, index = tensor(169, 4), tensor(2401, 4), tensor(2401, dtype="int64")
    nbytes = 4 * 2401 * 8 + radix_sort_bytes(2401, 8, 8, 8)
    assert scratch("_index_put_impl_.default", table, [index], values, True) == nbytes
    found = {}
    for accumulate, deterministic in product((False, True), repeat=2):
        collector = Collector(H100, "2.11.0", {}, ConvSettings(), deterministic=deterministic)
        collector.note(0, "aten.index_put_.default", (table, [index, None], values, accumulate), table, Phase.BACKWARD)
        found[accumulate, deterministic] = {at: peak_bytes(memory) for at, memory in collector.resolve().items()}
    assert found == {
        (False, False): {},
        **{key: {0: nbytes} for key in [(False, True), (True, False), (True, True)]},
    }


def test_the_row_that_is_sorted_is_the_one_of_the_dimension() -> None:
    collector = Collector(H100, "2.11.0", {}, ConvSettings())
    for at, (overload, dim) in enumerate((("default", (0,)), ("default", (-1,)), ("default", ()), ("stable", ()))):
        collector.note(at, f"aten.sort.{overload}", (tensor(30, 50), *dim), tensor(30, 50), Phase.FORWARD)
    assert {at: peak_bytes(memory) for at, memory in collector.resolve().items()} == {0: 240, 1: 400, 2: 400, 3: 400}


def test_one_row_is_all_that_a_further_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(call: Call) -> tuple[HiddenEvent, ...]:
        return alloc("scratch", call.layout().numel), output("result")

    monkeypatch.setitem(OPERATORS, "made_up", Operator(cuda=rule))
    assert scratch("made_up.default", tensor(3, 5), 7, result=tensor(3)) == 15
    monkeypatch.setitem(OPERATORS, "made_up", Operator(cpu=rule))
    assert hidden("made_up.default", tensor(3, 5), 7, result=tensor(3)) is None
    seen = CpuCollector().find_hidden("aten.made_up.default", (tensor(3, 5), 7), tensor(3))
    assert seen is not None
    assert seen.memory is not None
    assert peak_bytes(seen.memory) == 15


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        # Measured, in snapshots of a language model's training: gradients of norms' weights, and 32 bytes.
        ((4, 128, 1024), [0, 1], 0),
        ((4, 256, 1024), [0, 1], 2 * 4 * 256 * 1024 * 4 + 32),
        ((4, 512, 1024), [0, 1], 2 * 4 * 512 * 1024 * 4 + 32),
        ((4, 1024, 1024), [0, 1], 2 * 4 * 1024 * 1024 * 4 + 32),
        # By hand. Along the rows of 2048: a row's 512 vectors fill a warp and 4 rows a block, 2048 / 128 values each.
        ((4096, 2048), [1], 0),
        # One number from 64 Mi: 512 threads, 131,072 values each, 512 blocks at least, 132 x 4 fill the card: 528.
        ((8192, 8192), None, 528 * 4 + 4),
        # 32-bit offsets reach half of these 4 GiB: 512 threads, 256 values each.
        ((1000, 1 << 20), None, 500 * (1 << 20) // 512 // 256 * 4 + 4),
        # Two columns in one thread, 256 threads, 16 of 256 values each share a column.
        ((65536, 2), [0], 16 * 2 * 2 * 4 + 4),
        ((1, 1), [0], 0),
    ],
)
def test_a_reduction_by_several_blocks_keeps_their_parts(
    shape: tuple[int, ...], dims: list[int] | None, expected: int
) -> None:
    collector = Collector(H100, "2.11.0", {}, ConvSettings())
    arguments = (tensor(*shape),) if dims is None else (tensor(*shape), dims)
    overload = "default" if dims is None else "dim_IntList"
    collector.note(0, f"aten.sum.{overload}", arguments, tensor(1), Phase.BACKWARD)
    assert {at: peak_bytes(memory) for at, memory in collector.resolve().items()} == ({0: expected} if expected else {})


def test_where_all_strides_are_equal_a_block_is_as_wide_as_the_results() -> None:
    expanded = TensorLayout(shape=(2, 65536), stride=(0, 0), dtype="float32")
    events = reduction_events(expanded, [1], 4, H100)
    assert [event.nbytes for event in events] == [16 * 2 * 2 * 4, 4]


# Recurrent layers.

LSTM, GRU = 2, 3
SMALL_LAYER = {"hidden_size": 128, "proj_size": 0, "num_layers": 1, "bidirectional": False}


def rnn_signature(mode: int, dtype: str, *, backward: bool, **shape: Any) -> RnnSignature:
    shape = {**SMALL_LAYER, **shape}
    x, state = tensor(64, 8, 256, dtype=dtype), tensor(1, 8, shape["hidden_size"], dtype=dtype)
    own = (mode, *shape.values())
    options = (*own[:4], False, 0.0, True, own[4], [], None)
    if backward:
        args = (x, [state], 4, state, state, None, x, x, state, None, *options, x, [True] * 4)
    else:
        args = (x, [state], 4, None, state, None, *options)
    name = "_cudnn_rnn_backward" if backward else "_cudnn_rnn"
    memory = hidden(f"{name}.default", *args)
    assert memory is not None
    (signature, *_) = memory.signatures
    assert isinstance(signature, RnnSignature)
    assert (signature.steps, signature.batch, signature.input_size) == (64, 8, 256)
    return signature


@pytest.mark.parametrize(
    ("mode", "dtype", "backward", "shape", "algorithm"),
    [
        (LSTM, "float32", False, {"hidden_size": 192}, 3),
        (LSTM, "float32", True, {"hidden_size": 192}, 0),
        (LSTM, "float16", False, {"hidden_size": 256}, 1),
        (LSTM, "bfloat16", False, {"hidden_size": 256}, 0),
        (LSTM, "float16", False, {"hidden_size": 256, "num_layers": 2}, 0),
        (GRU, "float16", False, {"hidden_size": 256}, 0),
        (LSTM, "float32", False, {"proj_size": 64}, 0),
    ],
)
def test_a_recurrent_layer_runs_by_torchs_algorithm(
    mode: int, dtype: str, backward: bool, shape: dict[str, int], algorithm: int
) -> None:
    assert rnn_signature(mode, dtype, backward=backward, **shape).algorithm == algorithm


def test_a_cudnn_that_does_not_answer_as_measured_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXMEM_CACHE_DIR", "")
    layer = rnn_signature(LSTM, "float32", backward=False, hidden_size=512)
    other = tmp_path / "other.py"
    other.write_text(
        "from fxmem.hardware import cudnn_worker\ncudnn_worker._MEASURED_BYTES['float32'] += 1\ncudnn_worker.main()\n",
        encoding="utf-8",
    )
    known, unknown = (
        conv_workspaces([layer], H100, child=child)[layer].nbytes for child in (None, (sys.executable, str(other)))
    )
    assert known
    assert unknown is None


def test_to_2_8_each_product_of_cublaslt_allocates_a_workspace_and_frees_it() -> None:
    # As torch 2.6's own C++ did on a stand-in for a card: the result, 1 MiB, and cuBLAS's workspace, which stays.
    arguments = tuple(torch.empty(*shape, device="meta") for shape in ((512,), (128, 256), (256, 512)))
    kept = {}
    for version in ("2.6.0", "2.9.1"):
        collector = Collector(A100, version, {}, ConvSettings())
        collector.note(0, "aten.addmm.default", arguments, torch.empty(128, 512, device="meta"), Phase.FORWARD)
        hidden = collector.resolve().get(0)
        events = () if hidden is None else tuple((each.name, each.nbytes) for each in hidden.events)
        kept[version] = events, {name: buffer.nbytes for name, buffer in collector.find_held().items()}
    own = {"cuBLAS workspace, forward thread": 8_519_680}
    assert kept["2.6.0"] == ((("result", None), ("cuBLASLt workspace", MIB)), own)
    assert kept["2.9.1"] == ((), {**own, "cuBLASLt workspace, forward thread": MIB})


def test_before_2_8_layer_norm_sums_many_short_rows_without_partial_sums() -> None:
    rows, weight, one = (torch.empty(*shape, device="meta") for shape in ((100_000, 96), (96,), (100_000, 1)))
    arguments = (rows, rows, [96], one, one, weight, weight, [True, True, True])
    results = (rows, weight, weight)
    found = {}
    for version in ("2.7.1", "2.8.0"):
        collector = Collector(H100, version, {}, ConvSettings())
        collector.note(0, "aten.native_layer_norm_backward.default", arguments, results, Phase.BACKWARD)
        found[version] = [each.nbytes for each in collector.resolve()[0].events if each.action == "alloc"]
    assert found == {"2.7.1": [], "2.8.0": [1_200_000, 1_200_000, 384, 384]}
