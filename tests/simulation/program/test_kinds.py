"""Kinds of programs that run on a card: sparse gradients, communication hooks, packed sequences, classes of tensors."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxmem
from fxmem.errors import AnalysisError
from fxmem.hardware.tensor_layouts import ITEM_BYTES
from fxmem.records.profile import Kind

IDS = torch.tensor([[7, 7, 3], [900, 3, 7]])
WIDTH = 64


def lookup(device: str) -> tuple[nn.Embedding, torch.Tensor]:
    """A table, whose gradient has three rows, and the sum of what is looked up."""
    table = nn.Embedding(1000, WIDTH, sparse=True).to(device)
    return table, table(IDS.to(device)).square().sum()


def test_a_sparse_gradient_is_indices_and_values() -> None:
    real, loss = lookup("cpu")
    loss.backward()  # type: ignore[no-untyped-call]
    with fxmem.record("h100", steps=1) as run:
        table, loss = lookup("cuda")
        loss.backward()  # type: ignore[no-untyped-call]
        found, wanted = table.weight.grad, real.weight.grad
        assert found is not None
        assert wanted is not None
        for one, other in ((found, wanted), (found.coalesce(), wanted.coalesce())):
            assert one.is_sparse
            assert (one._nnz(), one.is_coalesced()) == (other._nnz(), other.is_coalesced())
            assert one._indices().shape == other._indices().shape
            assert one._values().shape == other._values().shape
        assert (found + found)._nnz() == 2 * IDS.numel()  # on a card, the places of both
        places = found.coalesce().indices().tolist()
        del found, one
        torch.optim.SparseAdam(table.parameters()).step()
    assert places == wanted.coalesce().indices().tolist() == [[3, 7, 900]]
    gradient = [each for each in run.profile.storages if each.kind is Kind.GRADIENT]
    assert sorted(each.nbytes for each in gradient) == [IDS.numel() * 8, IDS.numel() * WIDTH * 4]
    names = {each.name for each in gradient}
    assert names == {"table.weight.grad.indices", "table.weight.grad.values"}


def test_a_sparse_matrix_times_a_dense_one() -> None:
    places = torch.tensor([[0, 2, 2, 5], [1, 4, 4, 0]])
    with fxmem.record("h100", steps=1) as run:
        edges = torch.sparse_coo_tensor(places, torch.ones(4), (6, 5)).cuda()
        weight = nn.Parameter(torch.randn(5, 3).cuda())
        product = torch.spmm(edges, weight)
        product.square().sum().backward()  # type: ignore[no-untyped-call]
        assert product.shape == (6, 3)
        assert edges.t().shape == (5, 6)
        assert edges.coalesce()._nnz() == 3
        assert weight.grad is not None
        torch.optim.SGD([weight]).step()
    profile = run.profile
    made = [each for each in profile.storages if each.dtype == "int32"]
    assert [each.nbytes for each in made] == [
        7 * 4,
        3 * 4,
        3 * 4,
        6 * 4,
        3 * 4,
        3 * 4,
    ]  # rows from here to here; places
    assert "cuSPARSE workspace" in str(profile.unknowns)


def test_the_parts_of_a_sparse_matrix_are_called_as_the_program_calls_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.graph = nn.Embedding(100, WIDTH), torch.eye(100).to_sparse().cuda()

        def forward(self) -> torch.Tensor:
            return torch.sparse.mm(self.graph, self.table.weight)

    with fxmem.record("h100", steps=2) as run:
        net = Net().cuda()
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            net().sum().backward()
            optimizer.step()
    titles = {each.title for each in run.profile.storages if each.birth == 0 and each.kind is not Kind.PARAMETER}
    assert {each for each in titles if "graph" in each} == {"net.graph.indices", "net.graph.values"}
    assert not any(each.startswith(".") for each in titles)


def test_rows_that_nobody_knows_are_taken_for_distinct() -> None:
    model = nn.Sequential(nn.Embedding(1000, WIDTH, sparse=True))
    peaks = []
    for ids in (
        torch.zeros(400, dtype=torch.int64),
        torch.arange(400),
        torch.empty(400, dtype=torch.int64, device="meta"),
    ):
        analysis = fxmem.analyze(model, ids, optimizer="sparseadam", target="h100")
        peaks.append(analysis.peak.requested_bytes)
    assert peaks[0] < peaks[1] == peaks[2]
    assert "coalesce: no two places equal" in " ".join(each.text for each in analysis.profile.assumptions)


class Rank:
    """A model under DistributedDataParallel on a card, of one bucket of 1,051,648 numbers."""

    def __init__(self, hook: Any, state: Any = lambda: None, steps: int = 3) -> None:
        with fxmem.record("h100", steps=steps) as run:
            torch.distributed.init_process_group("nccl")
            inner = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 3, bias=False)).cuda()
            model = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=100)
            if hook is not None:
                hook(model) if state is None else model.register_comm_hook(state(), hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            while True:
                model(torch.randn(4, 1024, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        self.profile = run.profile
        self.peaks = [each.requested_bytes for each in run.rounds]

    def count(self, numbers: int, itemsize: int) -> int:
        """Storages of a step that hold so many numbers."""
        wanted = numbers * itemsize
        return sum(each.nbytes == wanted and each.birth > 0 for each in self.profile.storages)


BUCKET = 1024 * 1024 + 3 * 1024


def finished(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook that reduces nothing and makes a tensor."""
    assert bucket.is_last()
    assert bucket.index() == 0
    assert [tuple(each.shape) for each in bucket.gradients()] == [(3, 1024), (1024, 1024)]
    assert len(bucket.parameters()) == 2
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def test_a_communication_hook_takes_what_it_makes() -> None:
    plain = Rank(None)
    assert plain.count(BUCKET, 4) == 0
    own = Rank(finished)
    # What it makes becomes the gradients' values, and is kept until it has made another.
    assert own.count(BUCKET, 4) == 1
    is_highest = own.peaks[0] > plain.peaks[0]  # with torch 2.15 another moment of the step is
    assert is_highest == (torch.__version__ < "2.15")
    if is_highest:
        assert own.peaks == [own.peaks[0], own.peaks[0], own.peaks[0] + 4 * BUCKET]
    for hook in (default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook):
        halved = Rank(hook)
        assert halved.count(BUCKET, 2) == 1
        if is_highest:
            assert halved.peaks == [own.peaks[0] - 2 * BUCKET] * 3  # freed when it has been widened
    wrapped = Rank(
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), lambda: torch.distributed.group.WORLD
    )
    assert wrapped.count(BUCKET, 2) == 1
    assert Rank(default_hooks.allreduce_hook).peaks == plain.peaks
    kind = torch.distributed.BuiltinCommHookType.FP16_COMPRESS
    assert Rank(lambda model: model._register_builtin_comm_hook(kind), None).count(BUCKET, 2) == 1


def test_gradients_are_compressed_to_a_low_rank() -> None:
    def state() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    low = Rank(powerSGD_hook.powerSGD_hook, state, steps=4)
    assert low.peaks[0] < low.peaks[-1]  # the errors of the steps before are kept from the second on


def test_nccl_takes_no_sparse_gradients() -> None:
    def train() -> None:
        with fxmem.record("h100"):
            torch.distributed.init_process_group("nccl")
            model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(9, 3, sparse=True)).cuda())
            model(IDS.clamp(max=8).cuda()).sum().backward()

    with pytest.raises(ValueError, match="must be CUDA and dense"):
        train()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_has_as_many_rows_as_there_are_steps(cell: type[nn.RNNBase]) -> None:
    lengths = torch.tensor([5, 9, 2])
    with fxmem.record("h100", steps=1) as run:
        model = cell(16, 32, batch_first=True).cuda()  # type: ignore[call-arg]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(3, 9, 16, device="cuda")
        out, _ = model(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        padded, again = pad_packed_sequence(out, batch_first=True)
        found = tuple(out.data.shape), tuple(padded.shape), again.tolist()
        padded.sum().backward()
        optimizer.step()
    assert found == ((16, 32), (3, 9, 32), lengths.tolist())
    steps = {op.name for op in run.profile.ops}
    assert {"aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"} <= steps


def test_ctc_takes_lengths_of_the_host_and_of_the_card() -> None:
    lengths = torch.tensor([20, 20]), torch.tensor([5, 3])
    peaks = []
    for device in ("cpu", "cuda"):
        with fxmem.record("h100", steps=1) as run:
            model = nn.Linear(8, 16).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            log_probs = model(torch.randn(20, 2, 8, device="cuda")).log_softmax(-1)
            targets = torch.ones(2, 5, dtype=torch.int64, device="cuda")
            nn.functional.ctc_loss(log_probs, targets, *(each.to(device) for each in lengths)).backward()
            optimizer.step()
        (log_beta,) = [each for each in run.profile.storages if each.name == "log_beta"]
        assert log_beta.nbytes == 2 * 20 * (2 * 5 + 1) * 4
        peaks.append(run.peak.requested_bytes)
    assert 0 <= peaks[1] - peaks[0] <= 32  # the lengths


def test_no_compiler_of_cuda_is_started() -> None:
    from torch.utils import cpp_extension

    def train() -> None:
        with pytest.raises(RuntimeError, match="the extension 'ours' is built of some"):
            cpp_extension.load("ours", ["ours.cpp", "ours.cu"])
        with pytest.raises(RuntimeError, match="No compiler of CUDA runs here"):
            cpp_extension.load_inline("ours", "", cuda_sources="__global__ void f() {}")

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            train()
            return x.relu()

    with fxmem.record("h100"):
        train()
        torch.ones(3, device="cuda")
    fxmem.analyze(Model(), torch.ones(3), mode="infer", target="h100")


def test_a_module_goes_to_meta_and_back() -> None:
    with fxmem.record("h100") as run:
        model = nn.Linear(8, 4)
        weight = model.weight
        model.to("meta")
        assert model.weight is weight
        assert weight.is_meta
        model.to_empty(device="cuda")
        assert weight.is_cuda
        model(torch.ones(2, 8, device="cuda"))
    assert run.peak.requested_bytes >= 8 * 4 * 4


def test_safetensors_are_written_as_on_a_card() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    dtypes = {"a": torch.float32, "b": torch.int64, "c": torch.uint16, "d": torch.complex64, "e": torch.bool}
    wanted = [safetensors.save({name: torch.zeros(7).to(dtype)}) for name, dtype in dtypes.items()]
    wanted.append(safetensors.save({name: torch.zeros(7).to(dtype) for name, dtype in dtypes.items()}))
    with fxmem.record("h100"):
        tensors = {name: torch.zeros(7, device="cuda").to(dtype) for name, dtype in dtypes.items()}
        assert [safetensors.save({name: each}) for name, each in tensors.items()] == wanted[:-1]
        assert safetensors.save(tensors) == wanted[-1]


def test_every_dtype_has_its_bytes() -> None:
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    known = {str(each).removeprefix("torch."): each for each in dtypes}
    assert {name: known[name].itemsize for name in ITEM_BYTES if name in known} == {
        name: nbytes for name, nbytes in ITEM_BYTES.items() if name in known
    }
    missing = {name for name in known if name not in ITEM_BYTES}
    assert not {name for name in missing if not name.startswith(("q", "bits", "int", "uint"))}  # of quantised numbers


class Packed(nn.Parameter):
    """A parameter of a class of its own, which packs itself where it moves, as 4-bit weights do."""

    def __new__(cls, data: torch.Tensor) -> Packed:
        """A parameter that needs no gradient."""
        made: Packed = torch.Tensor._make_subclass(cls, data, False)
        made.data = data
        return made

    def cuda(self, device: Any = None) -> Packed:  # type: ignore[override]
        """Half a byte for each number."""
        packed = self.data.to("cuda").view(-1, 2)[:, :1].to(torch.uint8).contiguous()
        return Packed(packed)


def test_a_parameter_of_a_class_of_its_own_packs_itself() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Packed(torch.empty(128, 128))  # larger than what is real on the host

    with fxmem.record("h100") as run:
        layer = Layer().cuda()
        assert isinstance(layer.weight, Packed)
        assert layer.weight.shape == (128 * 64, 1)
        assert torch.cuda.memory_allocated() == 128 * 64
        torch.ones(3, device="cuda")
    assert run.peak.requested_bytes >= 128 * 64


@pytest.fixture
def bnb() -> Iterator[Any]:
    """bitsandbytes, which warns of what it does not find."""
    with warnings.catch_warnings(action="ignore"):
        yield pytest.importorskip("bitsandbytes")


def test_four_bit_weights_are_as_a_real_quantisation_makes_them(bnb: Any) -> None:
    weight = bnb.nn.Params4bit(torch.randn(384, 512), requires_grad=False, quant_type="nf4").to("cpu")

    def sizes(weight: Any) -> list[tuple[Any, ...]]:
        state = weight.quant_state
        inside = weight.data, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code
        return [(tuple(each.shape), each.dtype) for each in inside]

    with fxmem.record("h100", steps=1) as run:
        layer = bnb.nn.Linear4bit(512, 384, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
        head = nn.Linear(384, 4).cuda().bfloat16()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        found = sizes(layer.weight)
        x = torch.randn(2, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        head(layer(x)).sum().backward()
        optimizer.step()
    assert found == sizes(weight)
    # Backward makes the weights anew in the type they had, and then in that of the product.
    made = {each.dtype for each in run.profile.storages if each.kind is Kind.TEMPORARY and each.nbytes >= 384 * 512}
    assert made == {"float32", "bfloat16"}
    of = {run.profile.nodes[op.node].name for op in run.profile.ops if "cdequantize_blockwise" in op.name}
    assert of == {"mat_mul4bit_apply"}


@pytest.mark.parametrize(("rows", "unpacked"), [(1, 0), (4096, 4096 * 4096 * (2 + 4 / 64 + 4 / 64))])
def test_products_of_many_rows_unpack_four_bit_weights_and_scales(bnb: Any, rows: int, unpacked: float) -> None:
    with fxmem.record("h100"), torch.no_grad():
        layer = bnb.nn.Linear4bit(4096, 4096, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
        torch.mm(x[:8], weight)  # cuBLAS has its workspace, which later releases of torch take for each product
        most = []
        for run in (lambda: layer(x), lambda: torch.mm(x, weight)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            most.append(torch.cuda.max_memory_allocated() - before)
    assert most[0] == unpacked + (most[1] if unpacked else 2 * rows * 4096)


def test_packages_that_take_the_library_from_bitsandbytes_have_the_rows(bnb: Any) -> None:
    # As axolotl and Unsloth unpack weights: axolotl/kernels/quantize.py, unsloth/kernels/utils.py.
    with fxmem.record("h100") as run:
        weight = bnb.nn.Linear4bit(512, 384, bias=False, quant_type="nf4").cuda().weight
        library, pointer = bnb.functional.lib, bnb.functional.get_ptr
        made = torch.empty(384, 512, device="cuda", dtype=torch.bfloat16)
        unpack, sizes = library.cdequantize_blockwise_bf16_nf4, (ctypes.c_int(64), ctypes.c_int(384 * 512))
        unpack(None, pointer(weight), pointer(weight.quant_state.absmax), pointer(made), *sizes, ctypes.c_void_p(0))
        assert library.cquantize_blockwise_cpu_fp32.argtypes == bnb.functional.lib.cquantize_blockwise_cpu_fp32.argtypes
    assert [op.flops for op in run.profile.ops if op.name.endswith("cdequantize_blockwise_bf16_nf4")] == [384 * 512]


def test_four_bit_weights_move_with_their_scales(bnb: Any) -> None:
    with fxmem.record("h100") as run:
        layer = bnb.nn.Linear4bit(512, 384, bias=False, compress_statistics=False, quant_type="nf4")
        model = nn.Sequential(layer).cuda()
        weight, on_card = model[0].weight, torch.cuda.memory_allocated()
        for device in ("cpu", "cuda") * 2:
            model.to(device)
            assert model[0].weight is weight
            assert isinstance(weight, bnb.nn.Params4bit)
            assert {weight.device.type, weight.quant_state.absmax.device.type} == {device}
            assert torch.cuda.memory_allocated() == (on_card if device == "cuda" else 0)
        assert weight.quant_state.shape == (384, 512)
    assert run.peak.requested_bytes >= 384 * 512 // 2


class Blocks(nn.Parameter):
    """A parameter whose results are of its class, with its attribute, as GGUF's are in diffusers."""

    def __new__(cls, data: torch.Tensor, kind: str) -> Blocks:
        """A parameter that needs no gradient."""
        made: Blocks = torch.Tensor._make_subclass(cls, data, False)
        made.kind = kind
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch makes, in this class."""
        result = torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)  # type: ignore[attr-defined]
        return cls(result, args[0].kind) if isinstance(result, torch.Tensor) else result


def test_a_parameter_that_hands_its_attribute_on_moves() -> None:
    layer = nn.Module()
    layer.weight = Blocks(torch.ones(512, dtype=torch.uint8), "q8")
    with fxmem.record("h100") as run:
        layer.to("cuda")
        assert torch.cuda.memory_allocated() == 512
        plain = torch.Tensor._make_subclass(torch.Tensor, layer.weight)  # as it is unpacked
        assert plain.view(2, 256).float().shape == (2, 256)
        assert isinstance(layer.weight, Blocks)
        assert layer.weight.kind == "q8"
        torch.ones(3, device="cuda")
    assert run.peak.requested_bytes >= 512 + 4 * 512


def test_eight_bit_layers_multiply_whole_numbers_and_find_no_outliers(bnb: Any) -> None:
    with fxmem.record("h100", steps=1) as run:
        layer = bnb.nn.Linear8bitLt(512, 384, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
        head = nn.Linear(384, 4).cuda().half()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        x = torch.randn(64, 512, device="cuda", dtype=torch.half, requires_grad=True)
        head(layer(x)).sum().backward()
        optimizer.step()
    assert layer.weight.dtype is torch.int8
    products = [op.flops for op in run.profile.ops if op.name == "libbitsandbytes_cuda.cigemmlt_32"]
    assert products == [2 * 64 * 512 * 384]
    made = {(each.shape, each.dtype) for each in run.profile.storages}
    assert {((64, 384), "int32"), ((64, 512), "int8"), ((64, 512), "bool")} <= made  # the product, its factor, a mask
    assert any(
        "libbitsandbytes_cuda allocate as in bitsandbytes 0.50.2" in each.text for each in run.profile.assumptions
    )


@pytest.mark.parametrize(("name", "on_card"), [("AdamW8bit", 2 << 20), ("PagedAdamW8bit", 0), ("PagedAdamW32bit", 0)])
def test_states_of_paged_optimizers_are_not_on_the_card(bnb: Any, name: str, on_card: int) -> None:
    with fxmem.record("h100", steps=3) as run:
        model = nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = getattr(bnb.optim, name)(model.parameters())
        x = torch.randn(4, 1024, device="cuda")
        while True:
            out = model(x)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = optimizer.state[model.weight]
    assert {state[each].device.type for each in ("state1", "state2")} == {"cuda" if on_card else "cpu"}
    assert state["state1"].shape == (1024, 1024)
    large = [each for each in run.profile.storages if each.kind is Kind.OPTIMIZER_STATE and each.nbytes >= 1 << 20]
    assert sum(each.nbytes for each in large) == on_card
    analysed = fxmem.analyze(
        nn.Linear(1024, 1024, bias=False), torch.randn(4, 1024), optimizer=f"bnb:{name}", target="h100"
    )
    assert analysed.peak.requested_bytes == run.peak.requested_bytes
    assert fxmem.analyze(nn.Linear(8, 8), torch.randn(4, 8), optimizer=f"bnb:{name}", target="cpu").peak.requested_bytes


@pytest.mark.truth
def test_a_fused_loss_of_triton_keeps_no_logits() -> None:
    rows, width, words = 2048, 512, 32000
    with warnings.catch_warnings(action="ignore"):
        liger = pytest.importorskip("liger_kernel.transformers")
    with fxmem.record("h100", steps=3) as run:
        norm = liger.LigerRMSNorm(width).cuda().bfloat16()
        head = nn.Linear(width, words, bias=False).cuda().bfloat16()
        loss = liger.LigerFusedLinearCrossEntropyLoss()
        optimizer = torch.optim.SGD([*norm.parameters(), *head.parameters()], lr=0.1)
        while True:
            x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            loss(head.weight, norm(x), torch.randint(words, (rows,), device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.ending == "stopped after step 3"
    # The largest are the weight, its gradient and cuBLAS' workspace; then come the logits of 64 rows at a time.
    sizes = sorted({each.nbytes for each in run.profile.storages}, reverse=True)
    assert sizes[:3] == [32 << 20, words * width * 2, 64 * words * 2]
    assert sum(op.name == "triton.liger_cross_entropy_kernel" for op in run.profile.ops) == rows // 64


LENGTHS = (30, 50, 70)


class Rows(nn.Module):
    """Layers that work on each row alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.narrow(self.norm(self.wide(x)).relu())
        return result


@pytest.mark.parametrize("where", ["made there", "moved there"])
def test_a_jagged_tensor_takes_what_its_rows_take(where: str) -> None:
    def batch(is_jagged: bool) -> torch.Tensor:
        rows = [torch.randn(length, 64) for length in LENGTHS]
        if not is_jagged:
            return torch.cat(rows).cuda()
        if where == "moved there":
            return torch.nested.nested_tensor(rows, layout=torch.jagged).cuda()
        return torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")

    peaks = []
    for is_jagged in (False, True):
        with fxmem.record("h100", steps=3) as run:
            model = Rows().cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            while True:
                x = batch(is_jagged)
                out = model(x)
                out = out.values() if is_jagged else out
                out.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(run.peak.requested_bytes)
    assert peaks[1] - peaks[0] == 8 * (len(LENGTHS) + 1)  # where each begins, and the end
    assert not hasattr(torch.Tensor, "nested_int_memo")


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float16, "flash"), (torch.float32, "efficient")])
def test_jagged_attention_runs_the_kernel_of_the_card(dtype: torch.dtype, kernel: str) -> None:
    with fxmem.record("h100") as run:
        project = nn.Linear(64, 192).cuda().to(dtype)
        x = torch.nested.nested_tensor([torch.randn(each, 64) for each in LENGTHS], layout=torch.jagged).cuda()
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in project(x.to(dtype)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        found = out.cpu()
        assert out.values().shape == found.values().shape == (sum(LENGTHS), 64)
        assert found.offsets().tolist() == [0, 30, 80, 150]
        out.values().sum().backward()
    names = {op.name for op in run.profile.ops}
    assert {f"aten._{kernel}_attention_forward.default", f"aten._{kernel}_attention_backward.default"} <= names


@pytest.mark.truth
def test_attention_is_compiled_with_the_math_way_off() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (each.unflatten(-1, (2, 32)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    torch.backends.cuda.enable_math_sdp(False)
    try:
        off = fxmem.analyze(Model().bfloat16(), x, compile=True, target="h100")
        assert not torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert (
        off.peak.requested_bytes
        == fxmem.analyze(Model().bfloat16(), x, compile=True, target="h100").peak.requested_bytes
    )


def test_a_dense_optimizer_says_what_it_does_not_take() -> None:
    with pytest.raises(AnalysisError, match="Adam does not support sparse gradients, please consider SparseAdam"):
        fxmem.analyze(nn.Embedding(9, 3, sparse=True), IDS.clamp(max=8), optimizer="adam", target="h100")


class Quantised(torch.Tensor):
    """A weight whose class has a way of its own for `linear`, found in a table by functions as libraries keep them."""

    def __new__(cls, inner: torch.Tensor) -> Quantised:
        """A tensor that looks like bfloat16."""
        made: Quantised = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=torch.bfloat16, device=inner.device
        )  # type: ignore[attr-defined]
        made.inner = inner
        return made

    inner: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUANTISED:
            return QUANTISED[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"no {func} of quantised weights")


QUANTISED: dict[Any, Callable[..., Any]] = {}


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_library_finds_its_own_way_by_the_function(when: str) -> None:
    def multiply(x: torch.Tensor, weight: Quantised, bias: Any = None) -> torch.Tensor:
        return x @ weight.inner.to(x.dtype).t()

    QUANTISED.clear()
    if when == "before":
        QUANTISED[F.linear] = multiply
    with fxmem.record("h100") as run:
        if when == "within":
            QUANTISED[F.linear] = multiply
        weight = Quantised(torch.zeros(64, 64, dtype=torch.int8, device="cuda"))
        assert F.linear(torch.randn(8, 64, device="cuda", dtype=torch.bfloat16), weight).shape == (8, 64)
    assert run.peak.requested_bytes > 64 * 64


class Mlp(nn.Module):
    """Two layers, on a line of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


def test_the_layers_of_a_data_parallel_model_are_its_own() -> None:
    """As those of the model alone, with its lines and its peak."""

    def train(wrap: Callable[[nn.Module], nn.Module]) -> fxmem.RecordedProgram:
        with fxmem.record("h100", steps=2) as run:
            net = wrap(Mlp().cuda())
            optimizer = torch.optim.SGD(net.parameters())
            for _ in range(2):
                net(torch.randn(8, WIDTH, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return run

    alone, wrapped = train(lambda net: net), train(nn.DataParallel)
    layers = [
        [(node.target, node.source) for node in run.profile.nodes if node.op in ("call_module", "call_method")]
        for run in (alone, wrapped)
    ]
    assert [name for name, _ in layers[0]] == ["net.up", "relu", "net.down", "sum"]
    assert layers[1] == [(name.replace("net.", "net.module."), source) for name, source in layers[0]]
    assert wrapped.peak.requested_bytes == alone.peak.requested_bytes
