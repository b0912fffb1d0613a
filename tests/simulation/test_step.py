"""The step, its default loss and its optimizers."""

import gc
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fxmem.errors import UsageError
from fxmem.simulation.step.given.prepared_step import find_own_loss
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import Mark, autocast, default_loss, describe, make_optimizer, run_step, set_training


def step(
    model: nn.Module, x: torch.Tensor, *, optimizer: Optimizer | None = None, mark: Mark | None = None, **settings: Any
) -> list[str]:
    parts: list[str] = []
    run_step(
        model, StepRequest(args=(x,), **settings), optimizer=optimizer, device_type="cpu", mark=mark or parts.append
    )
    return parts


# --- the step ---------------------------------------------------------------------------------------------------------


def test_parts_are_announced_in_order() -> None:
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    assert step(model, x, optimizer=make_optimizer("sgd", model.parameters())) == [
        "forward",
        "loss",
        "backward",
        "optimizer",
    ]
    assert step(model, x) == ["forward", "loss", "backward"]
    assert step(model, x, mode="infer") == ["forward"]


def test_it_is_a_plain_training_step() -> None:
    torch.manual_seed(0)
    mine, x = nn.Linear(3, 2), torch.rand(5, 3)
    theirs = nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    optimizer = torch.optim.AdamW(theirs.parameters())
    theirs(x).sum().backward()
    optimizer.step()
    step(mine, x, optimizer=make_optimizer("adamw", mine.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in mine.parameters())


def test_gradients_stay_without_an_optimizer() -> None:
    model = nn.Linear(3, 2)
    step(model, torch.ones(1, 3))
    assert torch.equal(model.weight.grad, torch.ones(2, 3))


def test_output_and_loss_live_until_the_end_and_no_longer() -> None:
    held: dict[str, weakref.ref[torch.Tensor]] = {}
    alive: dict[str, list[str]] = {}

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            held["out"] = weakref.ref(out)
            return out

    def loss(out: torch.Tensor) -> torch.Tensor:
        value = out.sum()
        held["loss"] = weakref.ref(value)
        return value

    def mark(part: str) -> None:
        alive[part] = [name for name, reference in held.items() if reference() is not None]

    model = Model(3, 2)
    gc.collect()
    gc.disable()
    try:
        step(model, torch.ones(1, 3), loss=loss, optimizer=make_optimizer("sgd", model.parameters()), mark=mark)
        assert alive == {"forward": [], "loss": ["out"], "backward": ["out", "loss"], "optimizer": ["out", "loss"]}
        assert [name for name, reference in held.items() if reference() is not None] == []
    finally:
        gc.enable()


def test_inference_records_no_graph() -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_grad_enabled(), super().forward(x).requires_grad))
            return x

    step(Model(3, 2), torch.ones(1, 3), mode="infer")
    assert seen == [(False, False)]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: 1.0, "got float"),
        (lambda out: out, r"got a tensor of shape \(1, 2\)"),
        (lambda out: out.detach().sum(), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        step(nn.Linear(3, 2), torch.ones(1, 3), loss=loss)


def test_a_module_may_be_the_loss() -> None:
    class Total(nn.Sequential):
        """Empty, so that its truth value is False."""

        def forward(self, out: torch.Tensor) -> torch.Tensor:
            return 2 * out.sum()

    model = nn.Linear(3, 2)
    step(model, torch.ones(1, 3), loss=Total())
    assert torch.equal(model.bias.grad, torch.full((2,), 2.0))


# --- the default loss -------------------------------------------------------------------------------------------------


def test_one_scalar_beside_other_results_is_the_loss() -> None:
    scores = torch.ones(3, 4, requires_grad=True)
    loss = scores.mean()
    assert default_loss((scores, loss)) is loss
    assert find_own_loss((scores, loss))[1] == "the output's one scalar is taken for the loss; loss= names another"
    for out in (scores, (scores, loss.detach()), (scores, loss, scores.sum()), loss):
        assert find_own_loss(out) == (None, "")


def test_the_outputs_own_loss_comes_first() -> None:
    own = torch.tensor(5.0)
    assert default_loss(SimpleNamespace(loss=own, logits=torch.ones(3))) is own


@pytest.mark.parametrize(
    ("out", "total"),
    [
        (torch.ones(7), 7.0),
        ((torch.ones(2), [torch.ones(3, dtype=torch.float64)], torch.ones(5, dtype=torch.int64)), 5.0),
        (OrderedDict(b=torch.ones(11), a=None), 11.0),
        ({"hidden": torch.ones(4, dtype=torch.bool), "out": torch.ones(13)}, 13.0),
    ],
)
def test_else_it_is_the_sum_of_the_floating_point_tensors(out: Any, total: float) -> None:
    assert default_loss(out).item() == total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    total = default_loss(torch.full((70_001,), 1.0, dtype=dtype))
    assert (total.dtype, total.item()) == (torch.float32, 70_001.0)


def test_an_output_with_nothing_to_sum_is_refused() -> None:
    with pytest.raises(UsageError, match="got SimpleNamespace; pass loss="):
        default_loss(SimpleNamespace(loss=None, logits=torch.ones(3)))


# --- autocast and flags -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_is_torchs(precision: Any, dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Softmax(-1)), torch.ones(1, 3)
    with autocast("cpu", precision):
        mine = model(x), model[0](x)
    with torch.autocast("cpu", dtype):
        theirs = model(x), model[0](x)
    assert [t.dtype for t in mine] == [t.dtype for t in theirs]
    assert mine[1].dtype == dtype


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_autocast_is_on_inside_and_leaves_nothing_behind(device_type: str) -> None:
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def fail_inside() -> None:
        with autocast(device_type, "bf16"):
            assert torch.is_autocast_enabled(device_type)
            assert torch.get_autocast_dtype(device_type) is torch.bfloat16
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)) == before


def test_autocast_keeps_its_copies_of_weights_until_it_ends() -> None:
    model, x = nn.Linear(3, 1, bias=False), torch.ones(1, 3)

    def refill_and_run(value: float) -> float:
        with torch.no_grad():
            model.weight.fill_(value)
        return float(model(x).detach())

    with autocast("cpu", "bf16"):
        assert [refill_and_run(1), refill_and_run(2)] == [3, 3]
    with autocast("cpu", "bf16"):
        assert refill_and_run(2) == 6


def test_no_precision_changes_nothing() -> None:
    with autocast("cpu", None):
        assert not torch.is_autocast_enabled("cpu")


def test_frozen_parts_of_a_training_model_stay_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].eval()
    set_training(model, "train")
    assert (model.training, model[0].training) == (True, False)
    set_training(model, "infer")
    assert not any(module.training for module in model.modules())
    set_training(model, "train")
    assert all(module.training for module in model.modules())


def test_the_record_of_a_step() -> None:
    optimizer = make_optimizer("rmsprop", [nn.Parameter(torch.ones(1))])
    described = describe(StepRequest(precision="bf16"), optimizer)
    assert (described.optimizer, described.precision) == ("RMSprop", "bf16")
    assert described.loss is not None
    assert describe(StepRequest(loss=default_loss), None).loss == "default_loss"
    assert describe(StepRequest(mode="infer"), optimizer).model_dump() == {
        "mode": "infer",
        "optimizer": None,
        "loss": None,
        "precision": None,
        "accumulate": 1,
        "prefetch": 0,
        "program": None,
        "generation": None,
        "zero_grad": "after-step",
        "set_to_none": True,
        "keep_outputs": False,
        "inference_mode": False,
    }
    assert describe(StepRequest(mode="infer", inference_mode=True), None).inference_mode
    cleared = describe(StepRequest(zero_grad="before-backward", set_to_none=False), optimizer)
    assert (cleared.zero_grad, cleared.set_to_none) == ("before-backward", False)


# --- optimizers -------------------------------------------------------------------------------------------------------


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 5))]


@pytest.mark.parametrize(
    ("spec", "cls", "options"),
    [
        ("adamw", torch.optim.AdamW, {"foreach": None, "fused": None}),
        ("Adam", torch.optim.Adam, {"amsgrad": False}),
        ("sgd", torch.optim.SGD, {"momentum": 0}),
        ("sgd-momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("rmsprop", torch.optim.RMSprop, {}),
        ("adagrad", torch.optim.Adagrad, {}),
        ("adafactor", torch.optim.Adafactor, {}),
        ("NAdam", torch.optim.NAdam, {}),
        ("muon", torch.optim.Muon, {}),
        ("adamw:fused", torch.optim.AdamW, {"fused": True, "foreach": None}),
        ("adamw:foreach", torch.optim.AdamW, {"foreach": True}),
        ("adamw:forloop", torch.optim.AdamW, {"foreach": False}),
        ("adam:amsgrad,forloop", torch.optim.Adam, {"amsgrad": True, "foreach": False}),
        ("sgd:momentum=0.5, nesterov", torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
        (torch.optim.RAdam, torch.optim.RAdam, {"foreach": None}),
        (lambda params: torch.optim.Adam(params, lr=0.5), torch.optim.Adam, {"lr": 0.5, "foreach": None}),
    ],
)
def test_what_a_spec_names(spec: Any, cls: type, options: dict[str, Any]) -> None:
    made = make_optimizer(spec, parameters())
    assert type(made) is cls
    assert {name: made.defaults[name] for name in options} == options


@pytest.mark.parametrize(
    ("spec", "foreach"),
    [
        ("adamw", True),
        (torch.optim.AdamW, True),
        ("adamw:forloop", False),
        ("adamw:fused", None),  # torch refuses both at once
        (lambda params: torch.optim.AdamW(params, foreach=False), False),
    ],
)
def test_foreach_fills_in_where_nothing_else_decides(spec: Any, foreach: bool | None) -> None:
    made = make_optimizer(spec, parameters(), foreach=True)
    assert made is not None
    assert made.defaults["foreach"] is foreach


def test_foreach_is_not_forced_on_a_class_without_it() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    assert type(make_optimizer(Plain, parameters(), foreach=True)) is Plain


def test_no_optimizer() -> None:
    assert make_optimizer(None, parameters()) is None


@pytest.mark.parametrize(
    ("spec", "params", "message"),
    [
        ("adamm", 1, "got 'adamm'; closest: adam"),
        ("lbfgs", 1, "calls the model again"),
        (torch.optim.LBFGS, 1, "LBFGS calls the model again"),
        ("adamw:fuse", 1, "AdamW has no option 'fuse'; closest: fused"),
        ("sgd:momentum=lots", 1, "expected a number or True or False after '='"),
        ("sgd:nesterov", 1, "cannot take these 1 parameters: Nesterov momentum requires a momentum"),
        ("adamw", 0, "cannot take these 0 parameters"),
        (lambda params: params, 1, "expected optimizer factory .* to return a torch.optim.Optimizer, got list"),
    ],
)
def test_what_is_refused(spec: Any, params: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_optimizer(spec, parameters() * params)
