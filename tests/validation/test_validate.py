"""Predictions made by the whole of fxmem, held against real CPU steps."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxmem._torch.common import FakeTensorMode
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.profile import Kind
from fxmem.records.validation import Quantity
from fxmem.simulation.kernels.kernel_settings import KernelSettings
from fxmem.simulation.step.fake_model import real_model, real_values
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.validate import validate, validate_step

# --- the whole road ---------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.branch, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.head((x + self.branch(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(101, 64), nn.LayerNorm(64)
        self.attention, self.head = nn.MultiheadAttention(64, 4, batch_first=True), nn.Linear(64, 101)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y = self.norm(x)
        return self.head(x + self.attention(y, y, y, need_weights=False)[0])


class Reader(nn.Module):
    """A recurrent layer whose features, and the loss of them, are there until the next step takes their place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.head = (
            nn.Embedding(101, 48),
            nn.LSTM(48, 40, 2, bidirectional=True),
            nn.Linear(80, 101),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.features = self.read(self.embed(ids))[0]
        self.penalty = self.features.square().mean()
        return self.head(self.features)


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "convolutions": (Residual, torch.ones(4, 3, 31, 29)),
    "attention": (Block, torch.arange(6 * 43).reshape(6, 43) % 101),
    "recurrence": (Reader, torch.arange(6 * 43).reshape(6, 43) % 101),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw"},
        {"optimizer": "sgd-momentum"},
        {"optimizer": None},
        {"mode": "infer"},
    ],
    ids=str,
)
def test_a_prediction_is_what_a_real_step_takes(model: str, settings: dict[str, Any]) -> None:
    build, x = MODELS[model]
    found = validate(build, x, tolerance=0.0002, **settings)
    measured, predicted = found.measurement, found.predicted.requested_bytes
    # What a FakeTensor run cannot see: scratch inside operators that have a meta kernel, and Python numbers, which are
    # an 8-byte tensor, cast to a 4-byte one, for the length of a call.
    assert measured.peak_without_scratch_bytes - 12 <= predicted <= measured.peak_without_kernel_scratch_bytes
    assert found.judged is Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH
    assert found.within_tolerance
    for share in found.shares[:-1]:
        assert share.predicted_bytes == share.measured_bytes


def test_a_loss_and_keyword_inputs_reach_both_sides() -> None:
    found = validate(Block, {"ids": MODELS["attention"][1]}, loss=lambda out: out.square().mean(), optimizer="adam")
    assert found.within_tolerance
    assert found.measurement.step.loss == "test_a_loss_and_keyword_inputs_reach_both_sides.<locals>.<lambda>"


def test_the_model_the_inputs_and_the_random_states_are_left_alone() -> None:
    model, x = Residual(), MODELS["convolutions"][1].clone()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    validate(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.training, model.norm.training) == (True, False)
    assert torch.equal(x, MODELS["convolutions"][1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_kernel_settings_hold_in_the_prediction_and_in_the_run() -> None:
    seen: list[bool] = []

    class Notes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(x)

    before = torch.are_deterministic_algorithms_enabled()
    validate(Notes(3, 2), torch.ones(1, 3), settings=KernelSettings(deterministic=True))
    assert len(seen) > 2
    assert all(seen)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_progress_is_told() -> None:
    said: list[str] = []
    validate(nn.Linear(3, 2), torch.ones(1, 3), progress=said.append)
    assert said[-1] == "running the step on the CPU"


def test_only_the_cpu_can_be_measured() -> None:
    with pytest.raises(UsageError, match="expected device='cpu'"):
        validate(nn.Linear(3, 2), torch.ones(1, 3), device="tpu")  # type: ignore[arg-type]


# --- making things real -----------------------------------------------------------------------------------------------


def test_a_model_on_meta_gets_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
        model[0].weight.requires_grad_(False)
    made = real_model(model)
    assert {tensor.device.type for tensor in made.state_dict().values()} == {"cpu"}
    assert (made[0].weight.requires_grad, made[0].bias.requires_grad) == (False, True)
    assert made(torch.ones(3, 7)).isfinite().all()
    assert model[0].weight.is_meta


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    for device in ("meta", "cpu"):
        made = real_model(Tied().to(device) if device == "cpu" else _on_meta(Tied))
        assert made.head.weight is made.embed.weight
        assert not made.head.weight.is_meta


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_strides_survive() -> None:
    model = _on_meta(lambda: nn.Conv2d(3, 5, 3)).to(memory_format=torch.channels_last)
    assert real_model(model).weight.stride() == model.weight.stride()


def test_an_index_on_meta_is_refused_but_a_factory_is_not() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("index", torch.arange(4))

    with pytest.raises(UsageError, match=r"index is on meta and holds torch\.int64"):
        real_model(_on_meta(Indexed))
    assert real_model(Indexed).index.tolist() == [0, 1, 2, 3]


def test_a_hidden_tensor_on_meta_is_refused() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = [torch.ones(3)]

    with pytest.raises(UsageError, match="no parameter or buffer"):
        real_model(_on_meta(Hides))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.cache = model(torch.ones(1, 3))  # deepcopy takes only leaves of the graph
    with pytest.raises(
        UsageError, match=r"Linear cannot be copied \(RuntimeError: .*; pass a function that builds it instead"
    ):
        real_model(model)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (3, UsageError, "expected a torch.nn.Module or a function that builds one, got int"),
        (lambda: 3, UsageError, "expected the factory to return a torch.nn.Module, got int"),
        (lambda: nn.Linear(3, -1), AnalysisError, r"building the model raised at .*test_validate\.py"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        real_model(model)


def test_arguments_become_real() -> None:
    x, ids = torch.ones(2, 3, requires_grad=True), torch.empty(5, dtype=torch.int64, device="meta")
    with FakeTensorMode():
        mask = torch.empty(7, dtype=torch.bool)
    args, kwargs = real_values(((x, 3), {"nested": [ids, {"mask": mask}], "again": x}))
    assert args[0] is kwargs["again"] is not x
    assert args[0].requires_grad
    assert torch.equal(args[0], x)
    assert args[1] == 3
    assert kwargs["nested"][0].tolist() == [0] * 5
    assert kwargs["nested"][1]["mask"].tolist() == [True] * 7


def test_arguments_keep_their_strides() -> None:
    x = torch.empty(2, 3, 5, 7, device="meta").to(memory_format=torch.channels_last)
    assert real_values(x).stride() == x.stride()


def test_arguments_in_another_form_are_refused() -> None:
    with pytest.raises(UsageError, match="got list"):
        validate(nn.Linear(3, 2), [torch.ones(1, 3)])


def test_a_model_can_be_predicted_from_one_object_and_run_from_another() -> None:
    with torch.device("meta"):
        model, x = Block(), torch.empty(2, 17, dtype=torch.int64)
    found = validate_step(Block, model, StepRequest(args=(x,), name="my:block", optimizer=None), tolerance=0.0002)
    assert (found.model, found.measurement.model) == ("my:block", "Block")
    assert found.within_tolerance
    with pytest.raises(UsageError, match="expected device='cpu'"):
        validate_step(Block, model, StepRequest(args=(x,), name="my:block"), device="mps")  # type: ignore[arg-type]


def test_gradients_of_a_real_model_are_not_its_copys() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    found = validate(model, torch.ones(1, 3), optimizer=None)
    assert Kind.GRADIENT not in found.measurement.resident_by_kind
    assert model.weight.grad is not None
