"""Real steps on the CPU, small enough to add up with a pencil. Sizes are prime, so that no two sums agree by
accident."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fxmem._torch.common import TorchDispatchMode
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.profile import Kind, Phase, Step
from fxmem.records.validation import Measurement
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import make_optimizer, run_step
from fxmem.validation.measure_cpu import _measurement, measure_cpu, resident_bytes
from fxmem.validation.profiler_log import (
    WORKSPACE_KERNELS,
    MeasuredCall,
    ProfilerEvent,
    assign_phases,
    scratch_events,
)

FLOAT = 4
N = 997


def measure(model: nn.Module, *args: torch.Tensor, steps: int = 3, **settings: Any) -> Measurement:
    return measure_cpu(
        model, StepRequest(args=args, **{"optimizer": "sgd", "keep_outputs": False, **settings}), steps=steps
    )


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Scale(nn.Module):
    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class KeepsItsLocals(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x.neg()
        second = first.exp()
        return second.tanh()


class Dropper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.neg()
        x = x.exp()
        return x.tanh()


class Keeper(nn.Module):
    """Keeps what it returned until its next step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.neg()
        return x.exp()


# --- peaks a person can add up ----------------------------------------------------------------------------------------


def test_training_step_of_one_product() -> None:
    measured = measure(Scale(), torch.ones(N))
    weight, x, out, grad = (FLOAT * N,) * 4
    loss, root_gradient = FLOAT, FLOAT
    assert measured.resident_by_kind == {Kind.PARAMETER: weight, Kind.INPUT: x}
    assert measured.peak_bytes == weight + x + out + loss + root_gradient + grad
    assert measured.peak_by_phase[Phase.FORWARD] == weight + x + out + loss
    assert measured.peak_phase is Phase.BACKWARD
    assert measured.peak_op == "aten.mul.Tensor"
    assert measured.retained_bytes == 0


def test_what_the_program_holds_in_its_locals_is_alive() -> None:
    x = torch.ones(N)
    assert measure(KeepsItsLocals(), x, mode="infer").peak_bytes == 4 * FLOAT * N
    assert measure(Dropper(), x, mode="infer").peak_bytes == 3 * FLOAT * N


def test_what_a_model_keeps_until_its_next_step_is_let_go_in_it() -> None:
    x = torch.ones(N)
    measured = measure(Keeper(), x, mode="infer")
    assert measured.resident_by_kind == {Kind.INPUT: FLOAT * N, Kind.BUFFER: FLOAT * N}
    # The input, what was kept beside what takes its place; then the result in the place of the first of these.
    assert (measured.peak_bytes, measured.retained_bytes) == (3 * FLOAT * N, 0)


def test_the_log_adds_up_to_the_peak() -> None:
    measured = measure(
        nn.Sequential(nn.Linear(11, 13), nn.GELU(), nn.Linear(13, 7)), torch.ones(5, 11), optimizer="adamw"
    )
    live = peak = measured.resident_bytes
    for nbytes in measured.events:
        live += nbytes
        peak = max(peak, live)
    assert (peak, live) == (measured.peak_bytes, measured.resident_bytes + measured.retained_bytes)
    assert max(measured.peak_by_phase.values()) == measured.peak_bytes


def test_optimizer_state_is_there_before_the_measured_step() -> None:
    measured = measure(Scale(), torch.ones(N), optimizer="adamw")
    step_counter = FLOAT
    assert measured.resident_by_kind[Kind.OPTIMIZER_STATE] == 2 * FLOAT * N + step_counter
    assert measured.retained_bytes == 0
    assert measured.step == Step(
        mode="train", optimizer="AdamW", loss=measured.step.loss, precision=None, keep_outputs=False
    )


def test_without_an_optimizer_the_gradients_stay_and_do_not_pile_up() -> None:
    measured = measure(Scale(), torch.ones(N), optimizer=None, steps=4)
    assert measured.retained_bytes == FLOAT * N
    assert Kind.GRADIENT not in measured.resident_by_kind


def test_a_gradient_that_nobody_clears_is_resident() -> None:
    measured = measure(Scale(), torch.ones(N, requires_grad=True))
    assert measured.resident_by_kind[Kind.GRADIENT] == FLOAT * N
    assert measured.retained_bytes == 0


def test_inference_runs_without_gradients_and_in_forward_only() -> None:
    measured = measure(Scale(), torch.ones(N), mode="infer")
    assert set(measured.peak_by_phase) == {Phase.FORWARD}
    assert measured.step == Step(mode="infer", optimizer=None, loss=None, precision=None, keep_outputs=False)
    assert measured.peak_bytes == 3 * FLOAT * N


def test_autocast_keeps_half_copies_of_the_weights_until_it_ends() -> None:
    model = nn.Sequential(nn.Linear(31, 37, bias=False), nn.Linear(37, 41, bias=False))
    measured = measure(model, torch.ones(101, 31), mode="infer", precision="bf16")
    resident = FLOAT * (31 * 37 + 37 * 41 + 101 * 31)
    half_weights, hidden, output = 2 * (31 * 37 + 37 * 41), 2 * 101 * 37, 2 * 101 * 41
    assert measured.step.precision == "bf16"
    assert measured.peak_without_scratch_bytes == resident + half_weights + hidden + output
    assert measured.retained_bytes == 0


def test_a_cycle_in_the_program_is_not_collected_during_the_step() -> None:
    class Cyclic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            knot = [x.neg()]
            knot.append(knot)  # type: ignore[arg-type]
            return x.exp()

    assert gc.isenabled()
    measured = measure(Cyclic(), torch.ones(N), mode="infer")
    assert measured.retained_bytes == FLOAT * N
    assert gc.isenabled()


def test_a_transform_frees_what_it_wraps_within_the_step() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.vmap(lambda row: row.neg().exp().tanh())(x)

    measured = measure(Rows(), torch.ones(7, N), mode="infer")
    assert measured.resident_bytes == FLOAT * 7 * N
    assert measured.peak_bytes == FLOAT * 7 * N * 3


# --- scratch ----------------------------------------------------------------------------------------------------------


def test_convolution_scratch_is_named_and_set_aside(threads: int) -> None:
    model, x = nn.Conv2d(3, 32, 3, padding=1, bias=False), torch.ones(2, 3, 23, 29)
    measured = measure(model, x, mode="infer")
    resident = FLOAT * (32 * 3 * 9 + 2 * 3 * 23 * 29)
    output = FLOAT * 2 * 32 * 23 * 29
    assert measured.machine.threads == threads
    assert measured.resident_bytes == resident
    assert measured.peak_without_kernel_scratch_bytes == measured.peak_without_scratch_bytes == resident + output
    assert measured.peak_bytes > resident + output
    assert measured.peak_op == "aten.convolution.default"
    (op,) = measured.scratch
    assert (op.name, op.phase, op.calls) == ("aten.convolution.default", Phase.FORWARD, 1)
    assert op.input_shapes[:2] == ((2, 3, 23, 29), (32, 3, 3, 3))
    assert op.scratch_bytes >= op.at_peak_bytes == measured.peak_bytes - resident - output
    assert op.kernel != "aten.empty.memory_format"


def test_what_is_left_after_scratch_does_not_depend_on_threads() -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        torch.ones(2, 3, 41, 43),
    )
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(measure(model, x, optimizer="adamw").peak_without_kernel_scratch_bytes)
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_only_the_named_operators_are_set_aside() -> None:
    model, x = nn.Conv2d(3, 8, 3, bias=False), torch.ones(1, 3, 19, 17)
    measured = measure_cpu(model, StepRequest(args=(x,), mode="infer"), set_aside=())
    assert measured.peak_without_kernel_scratch_bytes == measured.peak_bytes > measured.peak_without_scratch_bytes


def test_calls_are_what_a_dispatch_mode_sees() -> None:
    """Composite operators are taken apart, autocast's wrappers too, and nothing below a leaf operator shows."""

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.linear, self.norm = nn.Conv2d(3, 5, 3), nn.Linear(7, 11), nn.LayerNorm(11)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.max_pool2d(self.convolution(x).relu(), 2)
            x = self.norm(self.linear(x.flatten(1)[:, :7]))
            return (x @ x.T).roll((1, 2), (0, 1)).softmax(-1)

    model, x = Mixed(), torch.rand(4, 3, 9, 9)
    for precision in (None, "bf16"):
        with Names() as mode:
            request = StepRequest(args=(x,), mode="infer", precision=precision)
            run_step(model, request, optimizer=None, device_type="cpu", mark=lambda _: None)
        measured = measure(model, x, mode="infer", precision=precision)
        assert {op.name for op in measured.scratch} <= set(mode.seen)
        rolls = [op for op in measured.scratch if op.name == "aten.roll.default"]
        assert [op.calls for op in rolls] == [1]
        assert not {"aten.conv2d.default", "aten.linear.default", "aten.matmul.default", "aten.max_pool2d.default"} & {
            op.name for op in measured.scratch
        }


def test_scratch_is_born_and_gone_inside_one_call() -> None:
    first, second = MeasuredCall("a"), MeasuredCall("a")
    events = [
        ProfilerEvent(10, address=1, call=first),
        ProfilerEvent(20, address=2, call=first),
        ProfilerEvent(-10, address=1, call=first),
        ProfilerEvent(30, address=1, call=second),  # the address again, another block
        ProfilerEvent(-20, address=2, call=second),  # an output of the first call
        ProfilerEvent(-30, address=1),  # freed between two calls
        ProfilerEvent(40, address=3),
        ProfilerEvent(-40, address=3),
        ProfilerEvent(-50, address=9, call=second),  # there before the step
    ]
    assert scratch_events(events) == {0: first, 2: first}


def test_what_a_recurrent_layer_keeps_for_its_backward_is_scratch_too() -> None:
    layer = MeasuredCall("aten.mkldnn_rnn_layer.default", ((3, 5, 7),))
    path = (layer.name, "aten.empty.memory_format")
    results = [ProfilerEvent(100 + n, n, Phase.FORWARD, layer, path) for n in range(3)]
    events = [
        *results,
        ProfilerEvent(40, 3, Phase.FORWARD, layer, path),  # the kernel's own, for the length of the call
        ProfilerEvent(4096, 4, Phase.FORWARD, layer, path),
        ProfilerEvent(-40, 3, Phase.FORWARD, layer, path),
        ProfilerEvent(8192, 5, Phase.FORWARD, MeasuredCall(layer.name), path),  # the first result of another call
        ProfilerEvent(-4096, 4, Phase.BACKWARD),
    ]
    assert scratch_events(events) == {3: layer, 4: layer, 5: layer, 7: layer}
    measured = _measurement(
        "Toy",
        Step(mode="infer", optimizer=None, loss=None, precision=None, keep_outputs=False),
        {},
        events,
        WORKSPACE_KERNELS,
    )
    assert measured.peak_without_kernel_scratch_bytes == 100 + 101 + 102 + 8192
    (row,) = measured.scratch
    assert (row.kernel, row.calls, row.allocations, row.scratch_bytes, row.at_peak_bytes) == (
        path[-1],
        1,
        2,
        4096 + 40,
        4096,
    )


def test_peaks_and_rows_of_a_log_made_by_hand() -> None:
    library, other = MeasuredCall(WORKSPACE_KERNELS[0], ((2, 3), None)), MeasuredCall("aten.roll.default", ((5,),))
    path = (library.name, "aten.mkldnn_convolution.default")
    events = [
        ProfilerEvent(100, 1, Phase.FORWARD, library, path),
        ProfilerEvent(7, 2, Phase.FORWARD, library, (*path, "aten.empty.memory_format")),
        ProfilerEvent(-7, 2, Phase.FORWARD, library, path),
        ProfilerEvent(11, 3, Phase.FORWARD, library, path),
        ProfilerEvent(-11, 3, Phase.FORWARD, library, path),
        ProfilerEvent(5, 4, Phase.BACKWARD, other, (other.name,)),
        ProfilerEvent(-5, 4, Phase.BACKWARD, other, (other.name,)),
        ProfilerEvent(-100, 1, Phase.BACKWARD),
    ]
    measured = _measurement(
        "Toy",
        Step(mode="infer", optimizer=None, loss=None, precision=None, keep_outputs=False),
        {Kind.INPUT: 1000},
        events,
        WORKSPACE_KERNELS,
    )
    assert (measured.peak_bytes, measured.peak_without_kernel_scratch_bytes, measured.peak_without_scratch_bytes) == (
        1111,
        1105,
        1100,
    )
    assert measured.peak_by_phase == {Phase.FORWARD: 1111, Phase.BACKWARD: 1105}
    rows = [
        (op.name, op.kernel, op.phase, op.calls, op.allocations, op.scratch_bytes, op.at_peak_bytes)
        for op in measured.scratch
    ]
    assert rows == [
        (library.name, "aten.mkldnn_convolution.default", Phase.FORWARD, 1, 2, 11, 11),
        (other.name, other.name, Phase.BACKWARD, 1, 1, 5, 0),
    ]


def test_a_step_that_allocates_nothing_peaks_where_it_began() -> None:
    measured = _measurement(
        "Toy",
        Step(mode="infer", optimizer=None, loss=None, precision=None, keep_outputs=False),
        {Kind.INPUT: 10},
        [],
        (),
    )
    assert (measured.peak_bytes, measured.peak_phase, measured.peak_op) == (10, Phase.FORWARD, "")


def test_events_belong_to_the_phase_that_was_announced_last() -> None:
    log = [ProfilerEvent(1, 1), Phase.BACKWARD, ProfilerEvent(2, 2), Phase.OPTIMIZER, ProfilerEvent(3, 3)]
    assert [event.phase for event in assign_phases(iter(log))] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


# --- what is resident -------------------------------------------------------------------------------------------------


def test_each_storage_is_counted_once_under_its_first_kind() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 5))
            self.tied = self.weight
            self.register_buffer("table", torch.ones(7))
            self.register_buffer("view", self.weight.detach()[0])
            self.cache = {"keys": [torch.ones(11)]}

    model = Holder()
    x = torch.ones(13)
    optimizer = make_optimizer("sgd-momentum", model.parameters())
    request = StepRequest(args=(x, x[2:]), kwargs={"again": model.cache["keys"][0]})
    assert resident_bytes(model, request, optimizer) == {
        Kind.PARAMETER: FLOAT * 15,
        Kind.BUFFER: FLOAT * (7 + 11),
        Kind.INPUT: FLOAT * 13,
    }


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_one_step_is_no_steady_state() -> None:
    with pytest.raises(UsageError, match="at least 2 steps"):
        measure(Scale(), torch.ones(N), steps=1)


def test_everything_must_be_on_the_cpu() -> None:
    with pytest.raises(UsageError, match="weight is on meta"):
        measure(Scale().to("meta"), torch.ones(N))
    with pytest.raises(UsageError, match="input 0 is on meta"):
        measure(Scale(), torch.ones(N, device="meta"))


def test_a_model_that_raises_is_reported_with_its_line() -> None:
    with pytest.raises(
        AnalysisError, match=r"a real step on the CPU raised at .*test_measure_cpu\.py:\d+: RuntimeError"
    ):
        measure(Scale(3), torch.ones(N))


def test_the_environment_is_left_as_it_was() -> None:
    before = os.environ.get("KINETO_LOG_LEVEL")
    measure(Scale(), torch.ones(N))
    assert os.environ.get("KINETO_LOG_LEVEL") == before


# --- what is alive outside of modules' attributes ---------------------------------------------------------------------

ROWS, KEPT = 48, 16 * 7
GLOBAL = torch.ones(KEPT, 16)


class _Keeping(nn.Module):
    """A layer that adds the first row of something it has at hand."""

    def __init__(self, at_hand):
        super().__init__()
        self.layer, self.at_hand = nn.Linear(16, 16), at_hand

    def forward(self, x):
        return self.layer(x + self.at_hand())


class _Holder:
    def __init__(self):
        self.table = torch.ones(KEPT, 16)

    def __call__(self):
        return self.table[0]


class _Teacher(list):
    """In a list, so that it is no part of the model."""

    def __init__(self):
        super().__init__([nn.Linear(16, KEPT, bias=False).requires_grad_(False)])

    def __call__(self):
        return self[0].weight[0]


class _GlobalUser(nn.Linear):
    def forward(self, x):
        return super().forward(x + GLOBAL[0])


def _with_features():
    layer, features = nn.Linear(16, 16), {}
    layer.register_forward_hook(lambda module, args, out: features.update(out=out.detach().clone()))
    return layer


def _averaging(parameters):
    optimizer, averages = torch.optim.SGD(parameters), []

    def average(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        averages[:] = averages or [p.detach().clone() for p in parameters]
        for mean, p in zip(averages, parameters, strict=True):
            mean.lerp_(p.detach(), 0.1)

    optimizer.register_step_post_hook(average)
    return optimizer


class _RetainingGradient(nn.Linear):
    def forward(self, x):
        self.kept = super().forward(x)
        if self.training:
            self.kept.retain_grad()
        return self.kept.tanh()


@pytest.mark.parametrize(
    ("model", "optimizer", "beside"),
    [
        (lambda: _Keeping(_Holder()), None, KEPT * 16 * 4),
        (lambda: _GlobalUser(16, 16), None, KEPT * 16 * 4),
        (lambda: _Keeping(_Teacher()), None, KEPT * 16 * 4),
        (_with_features, None, ROWS * 16 * 4),
        (lambda: nn.Linear(16, 16), _averaging, (16 * 16 + 16) * 4),
        # The tensor, its gradient and what its graph saved, of the step before.
        (lambda: _RetainingGradient(16, 16), None, 2 * ROWS * 16 * 4),
    ],
    ids=["object", "global", "module in a list", "hook", "optimizer's hook", "retained gradient"],
)
def test_what_is_alive_elsewhere_is_resident(model, optimizer, beside):
    measured = measure_cpu(
        model().train(),
        StepRequest(args=(torch.ones(ROWS, 16),), mode="train", optimizer=optimizer, keep_outputs=False),
        steps=2,
    )
    weights = (16 * 16 + 16) * 4
    assert measured.resident_bytes == weights + ROWS * 16 * 4 + beside
