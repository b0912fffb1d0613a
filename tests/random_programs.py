"""Programs made at random from what loops and models do beside `random_models`: indexed assignment, views of views,
storages that grow, gradients within forward, numbers read back, and steps of several parts.

A number that is read back and decides is the same in every run: it hangs on no weight.
"""

from __future__ import annotations

import random
import warnings
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_models import BATCH, BINARY, UNARY, WIDTH, Binary, RandomModel, Unary


def _rows(x: Tensor) -> Tensor:
    """Every other row's place."""
    return torch.arange(0, BATCH, 2, device=x.device)


def _labels(x: Tensor) -> Tensor:
    return torch.arange(BATCH, device=x.device) % 7


def _odd(x: Tensor) -> Tensor:
    """A mask of rows."""
    return torch.arange(BATCH, device=x.device) % 2 == 1


# --- indexed assignment -----------------------------------------------------------------------------------------------


def _assign_list(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[[0, 2, 5]] = x[:3] * 2
    return y


def _assign_rows(_: nn.Module, x: Tensor) -> Tensor:
    y, rows = x * 1, _rows(x)
    y[rows] = torch.tanh(x[rows + 1])
    return y


def _assign_row_twice(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[_rows(x)] = x[BATCH // 2 :] * 2
    y[1] = y[0]
    return y


def _assign_masked_number(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[_odd(x)] = 0.5
    return y


def _assign_masked(_: nn.Module, x: Tensor) -> Tensor:
    y, odd = x * 1, _odd(x)
    y[odd] = x[~odd] * 0.5
    return y


def _assign_elements(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 1
    y[y >= -1e9] *= 0.5
    return y


def _assign_steps(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[::2, 1::3] = y[1::2, ::3].narrow(1, 0, len(range(1, WIDTH, 3))) * 3
    return y


def _assign_column(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[..., 3] = x.mean(1)
    y[:, -1] += 1
    return y


def _assign_pairs(_: nn.Module, x: Tensor) -> Tensor:
    y, places = x.clone(), torch.arange(BATCH, device=x.device)
    y[places, places] = x.sum(1)
    return y


def _assign_columns(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, torch.arange(8, device=x.device)] = x[:, 8:16].sigmoid()
    return y


def _assign_to_zeros(_: nn.Module, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, : WIDTH // 2] = x[:, WIDTH // 2 :] * 2
    y[_rows(x), WIDTH // 2 :] = 1.0
    return y


def _assign_in_a_loop(m: nn.Module, x: Tensor) -> Tensor:
    y = torch.empty(BATCH, WIDTH, device=x.device)
    for start in range(0, BATCH, BATCH // 4):
        y[start : start + BATCH // 4] = m.first(x[start : start + BATCH // 4])
    return y


def _add_at(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y.index_put_((_labels(x),), x, accumulate=True)
    return y / BATCH


def _put_apart(_: nn.Module, x: Tensor) -> Tensor:
    return x.index_put((_rows(x),), x[BATCH // 2 :] * 2)


def _augment_rows(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 1
    y[_rows(x)] += x[: BATCH // 2]
    y[:, 2] *= 2
    return y


def _fill_diagonal(_: nn.Module, x: Tensor) -> Tensor:
    return (x * 2).fill_diagonal_(0.0)


def _scatter(_: nn.Module, x: Tensor) -> Tensor:
    places = torch.arange(WIDTH, device=x.device).flip(0).expand(BATCH, WIDTH)
    return torch.zeros_like(x).scatter_(1, places, x)


def _scatter_add(_: nn.Module, x: Tensor) -> Tensor:
    places = _labels(x).unsqueeze(1).expand(BATCH, WIDTH)
    return x + torch.zeros(7, WIDTH, device=x.device).scatter_add(0, places, x)[_labels(x)]


def _reduce_at(_: nn.Module, x: Tensor) -> Tensor:
    places = _labels(x).unsqueeze(1).expand(BATCH, WIDTH)
    return x - x.new_zeros(7, WIDTH).scatter_reduce(0, places, x, "amax").index_select(0, _labels(x))


def _masked_scatter(_: nn.Module, x: Tensor) -> Tensor:
    return x.masked_scatter(_odd(x).unsqueeze(1).expand_as(x), x * 2)


# --- views of views ---------------------------------------------------------------------------------------------------


def _write_into_views(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y.view(4, BATCH // 4, WIDTH).transpose(0, 1)[2].narrow(1, 8, 16).mul_(2)
    return y


def _write_between_views(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 1
    half = y[: BATCH // 2]
    half[:, ::2].add_(1)
    quarter = half.view(-1, 2, WIDTH)[:, 0]
    quarter.mul_(x[: BATCH // 4])
    return y + y.detach()[0]


def _read_view_of_written(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    view = y.view(-1).view(WIDTH, BATCH).t()
    y.mul_(0.5)
    return view + x


def _keep_a_small_view(_: nn.Module, x: Tensor) -> Tensor:
    first = x.repeat(3, 1).view(3, BATCH, WIDTH)[1][:, :4].unsqueeze(1).squeeze(1)
    return torch.cat([x[:, 4:], first], 1)


def _unfold(_: nn.Module, x: Tensor) -> Tensor:
    return x.unfold(1, 4, 4).flatten(1).unflatten(1, (4, -1)).movedim(1, 2).reshape(BATCH, WIDTH)


def _strided(_: nn.Module, x: Tensor) -> Tensor:
    return (x * 2).as_strided((BATCH, WIDTH), (1, BATCH)) + x


def _diagonals(_: nn.Module, x: Tensor) -> Tensor:
    return x + torch.diagonal(x.view(2, BATCH // 2, WIDTH)[:, :WIDTH], 0, 1, 2).sum(0)[:1]


def _unbind(_: nn.Module, x: Tensor) -> Tensor:
    return (
        torch.cat([each.view(-1)[: WIDTH * 6] for each in x.view(4, BATCH // 4, WIDTH).unbind()])
        .view(-1, WIDTH)
        .repeat(4, 1)
    )


def _chunks_in_place(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    a, b = y.detach().chunk(2, 1)
    a.sub_(b)
    return y


def _complex(_: nn.Module, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(BATCH, WIDTH // 2, 2))
    return torch.view_as_real(pairs * 2).flatten(1)


def _other_dtype(_: nn.Module, x: Tensor) -> Tensor:
    bits = x.detach().clone().view(torch.int32)
    bits.view(-1)[: WIDTH * 8].zero_()
    return x + bits.view(torch.float32)


def _transposed_twice(_: nn.Module, x: Tensor) -> Tensor:
    return x.t().contiguous().t().swapaxes(0, 1).clone().T


def _expanded_view(m: nn.Module, x: Tensor) -> Tensor:
    return (x.view(1, BATCH, WIDTH).expand(3, -1, -1) * m.bias).select(0, 1).view_as(x)


def _in_place_through_detached(_: nn.Module, x: Tensor) -> Tensor:
    y = x + 1
    y.detach()[:, 1:3].t().zero_()
    return y


def _scatter_into_views(_: nn.Module, x: Tensor) -> Tensor:
    return x.slice_scatter(x[: BATCH // 2] * 2, 0, 0, BATCH, 2).select_scatter(x[3], 0, 4).diagonal_scatter(x[:, 0])


# --- storages that grow -----------------------------------------------------------------------------------------------


@torch.no_grad()
def _out_of_empty(_: nn.Module, x: Tensor) -> Tensor:
    made = torch.empty(0, device=x.device)
    torch.mul(x, 2, out=made)
    torch.add(made, 1, out=made)
    return made


@torch.no_grad()
def _out_too_small(_: nn.Module, x: Tensor) -> Tensor:
    made = torch.ones(4, WIDTH, device=x.device)
    view = made[:2]
    with warnings.catch_warnings(action="ignore"):
        torch.sigmoid(x, out=made)
    return made + view.sum()


@torch.no_grad()
def _out_too_large(_: nn.Module, x: Tensor) -> Tensor:
    made = torch.empty(2 * BATCH, WIDTH, device=x.device)
    with warnings.catch_warnings(action="ignore"):
        return torch.matmul(x, x[:WIDTH].t() @ x, out=made) / WIDTH


@torch.no_grad()
def _out_of_cat(_: nn.Module, x: Tensor) -> Tensor:
    made = torch.empty(0, device=x.device)
    torch.cat([x, x], out=made)
    values = torch.empty(0, device=x.device)
    torch.amax(made, 0, out=values)
    return x - values


@torch.no_grad()
def _resize(_: nn.Module, x: Tensor) -> Tensor:
    made = torch.zeros(8, device=x.device)
    made.resize_(BATCH, WIDTH).zero_()
    return made.add_(x)


@torch.no_grad()
def _shrink_and_grow(_: nn.Module, x: Tensor) -> Tensor:
    made = torch.zeros(2 * BATCH, WIDTH, device=x.device)
    made.resize_(4).resize_as_(x)
    made.resize_(3 * BATCH, WIDTH).zero_()
    return x + made[:BATCH]


@torch.no_grad()
def _grow_by_steps(_: nn.Module, x: Tensor) -> Tensor:
    made = torch.empty(0, WIDTH, device=x.device)
    for start in range(0, BATCH, BATCH // 4):
        made.resize_(start + BATCH // 4, WIDTH)
        made[start:] = x[start : start + BATCH // 4]
    return made * 2


def _grow_by_cat(_: nn.Module, x: Tensor) -> Tensor:
    made = x[:0]
    for start in range(0, BATCH, BATCH // 4):
        made = torch.cat([made, x[start : start + BATCH // 4] * 2])
    return made


@torch.no_grad()
def _storage_of_zero(_: nn.Module, x: Tensor) -> Tensor:
    made = x.repeat(2, 1)
    size = made.untyped_storage().nbytes()
    made.untyped_storage().resize_(0)
    y = x * 3
    made.untyped_storage().resize_(size)
    return y + made.zero_()[:BATCH]


# --- gradients within -------------------------------------------------------------------------------------------------


def _inner_gradient(m: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_(True)
        return x + torch.autograd.grad(F.gelu(m.first(y)).sum(), y)[0]


def _penalty(m: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(torch.tanh(m.first(y)).sum(), y, create_graph=True)
    return x + found.square()


def _inner_backward(m: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().clone().requires_grad_(True)
        m.shared(y).relu().sum().backward(inputs=[y])
    assert y.grad is not None
    return x - y.grad


# --- numbers read back ------------------------------------------------------------------------------------------------


def _nonzero(_: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([x[_odd(x).nonzero().squeeze(1)], x[: BATCH // 2]])


def _nonzero_tuple(_: nn.Module, x: Tensor) -> Tensor:
    (places,) = torch.nonzero(~_odd(x), as_tuple=True)
    return x.index_add(0, places, x[: len(places)])


def _where_all(_: nn.Module, x: Tensor) -> Tensor:
    rows, columns = torch.where(x.detach() > -1e9)
    return x[rows, columns].view(BATCH, -1)


def _select_masked(_: nn.Module, x: Tensor) -> Tensor:
    return x.masked_select(_odd(x).unsqueeze(1)).view(-1, WIDTH).repeat(2, 1)


def _boolean_rows(_: nn.Module, x: Tensor) -> Tensor:
    chosen = x[_odd(x)]
    return torch.cat([chosen, x[~_odd(x)]]) * (1 / chosen.shape[0])


def _unique(_: nn.Module, x: Tensor) -> Tensor:
    kinds, counts = _labels(x).unique(return_counts=True)
    sums = torch.zeros(len(kinds), WIDTH, device=x.device).index_add_(0, _labels(x), x)
    return x + (sums / counts.unsqueeze(1))[_labels(x)]


def _unique_back(_: nn.Module, x: Tensor) -> Tensor:
    kinds, places = torch.unique(_labels(x) * 3, return_inverse=True)
    return x * (kinds.float() / 18)[places].unsqueeze(1)


def _count(_: nn.Module, x: Tensor) -> Tensor:
    count = int(_odd(x).sum())
    return torch.cat([x[:count] * 2, x[count:]])


def _count_classes(_: nn.Module, x: Tensor) -> Tensor:
    counts = torch.bincount(_labels(x), minlength=7)
    return torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in x.split(counts.tolist())])


def _one_hot(_: nn.Module, x: Tensor) -> Tensor:
    chosen = F.one_hot(_labels(x)).float()
    return x + (chosen.t() @ x)[_labels(x)] / BATCH


def _to_list(_: nn.Module, x: Tensor) -> Tensor:
    y = x
    for number in _labels(x)[:3].tolist():
        y = y * (number + 1)
    return y


def _item_bound(_: nn.Module, x: Tensor) -> Tensor:
    most = _labels(x).max().item()
    return x.view(BATCH, -1)[:, : WIDTH // 2].repeat(1, int(most) - 4)


def _any_and_all(_: nn.Module, x: Tensor) -> Tensor:
    if _odd(x).any() and not _odd(x).all():
        return x.repeat(1, 2)[:, ::2]
    return x


def _repeat_each(_: nn.Module, x: Tensor) -> Tensor:
    times = (torch.arange(BATCH // 2, device=x.device) % 3).sub(1).abs() * 2
    found = x[: BATCH // 2].repeat_interleave(times, 0)
    return F.pad(found, (0, 0, 0, BATCH - len(found))) + x if len(found) <= BATCH else found[:BATCH]


def _cumulated_lengths(_: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.tensor([10, 30, 40, 16], device=x.device)
    ends = lengths.cumsum(0).tolist()
    return torch.cat([x[end - n : end].softmax(0) for end, n in zip(ends, lengths.tolist(), strict=True)])


def _scaled_by_item(_: nn.Module, x: Tensor) -> Tensor:
    most = x.detach().abs().amax().item()
    return x / most if most > 1 else x * 0.5


ASSIGNED: dict[str, Unary] = {
    "assign_list": _assign_list,
    "assign_rows": _assign_rows,
    "assign_row_twice": _assign_row_twice,
    "assign_masked_number": _assign_masked_number,
    "assign_masked": _assign_masked,
    "assign_elements": _assign_elements,
    "assign_steps": _assign_steps,
    "assign_column": _assign_column,
    "assign_pairs": _assign_pairs,
    "assign_columns": _assign_columns,
    "assign_to_zeros": _assign_to_zeros,
    "assign_in_a_loop": _assign_in_a_loop,
    "add_at": _add_at,
    "put_apart": _put_apart,
    "augment_rows": _augment_rows,
    "fill_diagonal": _fill_diagonal,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "reduce_at": _reduce_at,
    "masked_scatter": _masked_scatter,
    "index_copy": lambda _, x: x.index_copy(0, _rows(x), x[: BATCH // 2]),
    "index_fill": lambda _, x: (x * 1).index_fill_(0, _rows(x), 0.0),
    "index_add": lambda _, x: (x * 1).index_add_(0, _labels(x), x, alpha=0.1),
}
VIEWED: dict[str, Unary] = {
    "write_into_views": _write_into_views,
    "write_between_views": _write_between_views,
    "read_view_of_written": _read_view_of_written,
    "keep_a_small_view": _keep_a_small_view,
    "unfold": _unfold,
    "strided": _strided,
    "diagonals": _diagonals,
    "unbind": _unbind,
    "chunks_in_place": _chunks_in_place,
    "complex": _complex,
    "other_dtype": _other_dtype,
    "transposed_twice": _transposed_twice,
    "expanded_view": _expanded_view,
    "in_place_through_detached": _in_place_through_detached,
    "scatter_into_views": _scatter_into_views,
}
GROWN: dict[str, Unary] = {
    name: lambda m, x, made=made: x + made(m, x)
    for name, made in {
        "out_of_empty": _out_of_empty,
        "out_too_small": _out_too_small,
        "out_too_large": _out_too_large,
        "out_of_cat": _out_of_cat,
        "resize": _resize,
        "shrink_and_grow": _shrink_and_grow,
        "grow_by_steps": _grow_by_steps,
        "grow_by_cat": _grow_by_cat,
        "storage_of_zero": _storage_of_zero,
    }.items()
}
INNER: dict[str, Unary] = {
    "inner_gradient": _inner_gradient,
    "penalty": _penalty,
    "inner_backward": _inner_backward,
}
READ: dict[str, Unary] = {
    "nonzero": _nonzero,
    "nonzero_tuple": _nonzero_tuple,
    "where_all": _where_all,
    "select_masked": _select_masked,
    "boolean_rows": _boolean_rows,
    "unique": _unique,
    "unique_back": _unique_back,
    "count": _count,
    "count_classes": _count_classes,
    "one_hot": _one_hot,
    "to_list": _to_list,
    "item_bound": _item_bound,
    "any_and_all": _any_and_all,
    "repeat_each": _repeat_each,
    "cumulated_lengths": _cumulated_lengths,
    "scaled_by_item": _scaled_by_item,
}
WIDER_UNARY: dict[str, Unary] = {**ASSIGNED, **VIEWED, **GROWN, **INNER, **READ}
WIDER_BINARY: dict[str, Binary] = {
    "assign_other": lambda _, x, y: _assigned(x, slice(1, BATCH, 2), y[: BATCH // 2]),
    "assign_other_rows": lambda _, x, y: _assigned(x, _rows(x), y[BATCH // 2 :]),
    "assign_other_masked": lambda _, x, y: _assigned(x, _odd(x), y[_odd(y)]),
    "assign_both": lambda _, x, y: _assigned(torch.zeros_like(x), (slice(None), slice(None)), x + y),
    "write_view_of_other": lambda _, x, y: _view_written(x, y),
    "copied": lambda _, x, y: (x * 1).copy_(y),
    "where_read": lambda _, x, y: x if bool(_odd(y)[1]) else y,
}


def _assigned(x: Tensor, places: object, value: Tensor) -> Tensor:
    made = x.clone()
    made[places] = value  # type: ignore[index]
    return made


def _view_written(x: Tensor, y: Tensor) -> Tensor:
    made = x.clone()
    made.view(BATCH, 2, -1)[:, 1].copy_(y[:, : WIDTH // 2])
    return made


class WiderModel(RandomModel):
    """A program of the wider statements and of those of `RandomModel`."""

    unary: ClassVar = {**UNARY, **WIDER_UNARY}
    binary: ClassVar = {**BINARY, **WIDER_BINARY}

    @property
    def values(self) -> str:
        """What decides where it reads numbers that no constant decides."""
        return "real" if any(name == "scaled_by_item" for name, _ in self.statements) else "bound"


class Loop:
    """A training loop around a random model: micro-batches, calls of backward, what it reads and keeps, how it steps.

    A call runs it.
    """

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"loop {seed}")
        self.seed = seed
        self.micro_batches = chance.choice((1, 1, 2, 3))
        self.optimizer = chance.choice(("adamw", "sgd", "momentum", "none"))
        self.backward = chance.choice(
            ("once", "once", "twice", "parts", *(("grad",) if self.optimizer != "none" else ()))
        )
        self.clears = chance.choice(("after", "before forward", "before backward", "zeros"))
        self.clips = chance.random() < 0.3
        self.reads = tuple(
            sorted(chance.sample(("loss", "correct", "finite", "list", "classes"), chance.randint(0, 3)))
        )
        self.keeps = chance.choice(("names", "nothing", "history", "losses", "average"))
        self.evaluates = chance.random() < 0.2
        self.model = WiderModel(seed)

    def __repr__(self) -> str:
        own = {key: value for key, value in vars(self).items() if key not in ("model", "history")}
        return str(own)

    def __call__(self, steps: int) -> None:
        """Run so many steps."""
        torch.manual_seed(self.seed)
        model = WiderModel(self.seed)
        head = nn.Linear(WIDTH, 7)
        parameters = [*model.parameters(), *head.parameters()]
        optimizer = self._make_optimizer(parameters)
        average = [parameter.detach().clone() for parameter in parameters] if self.keeps == "average" else []
        self.history: list[object] = []
        for _ in range(steps):
            if self.clears == "before forward":
                self._clear(parameters)
            for _ in range(self.micro_batches):
                x, labels = torch.randn(BATCH, WIDTH), torch.arange(BATCH) % 7
                if self.keeps == "nothing":
                    self._train(model, head, x, labels, parameters)
                else:
                    out, loss = self._train(model, head, x, labels, parameters)
                    if self.keeps == "history":
                        self.history.append(out.detach())
                    elif self.keeps == "losses":
                        self.history.append(loss)
            if self.clips:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            self._step(optimizer, parameters)
            for mean, parameter in zip(average, parameters, strict=False):
                mean.lerp_(parameter.detach(), 0.1)
            if self.clears in ("after", "zeros"):
                self._clear(parameters)
            if self.evaluates:
                model.eval()
                with torch.no_grad():
                    self.history.append(_first(model(torch.randn(BATCH, WIDTH))).argmax(1).unique().numel() > 0)
                model.train()

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        match self.optimizer:
            case "adamw":
                return torch.optim.AdamW(parameters)
            case "none":
                return None
            case _:
                return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if self.optimizer == "momentum" else 0.0)

    def _train(
        self, model: nn.Module, head: nn.Module, x: Tensor, labels: Tensor, parameters: list[nn.Parameter]
    ) -> tuple[Tensor, Tensor]:
        end = _first(model(x))
        out = head(end)
        loss = F.cross_entropy(out, labels)
        if self.clears == "before backward":
            self._clear(parameters)
        match self.backward:
            case "twice":
                loss.backward(retain_graph=True)
                end.square().mean().backward()
            case "parts":
                (loss / 2).backward(retain_graph=True)
                loss.backward()
            case "grad":
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
                for parameter, grad in zip(parameters, found, strict=True):
                    if grad is not None:
                        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            case _:
                loss.backward()
        self._read(out, loss, labels)
        return out, loss

    def _read(self, out: Tensor, loss: Tensor, labels: Tensor) -> None:
        for what in self.reads:
            match what:
                case "loss":
                    self.history.append(loss.item())
                case "correct":
                    self.history.append((out.argmax(1) == labels).sum().item())
                case "finite":
                    if not torch.isfinite(loss):
                        raise ValueError(f"loss is {loss}")
                case "list":
                    self.history.append(out.detach()[0].tolist())
                case "classes":
                    self.history.append([(kind, (labels == kind).sum().item()) for kind in labels.unique().tolist()])

    def _clear(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if self.clears != "zeros":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _step(self, optimizer: torch.optim.Optimizer | None, parameters: list[nn.Parameter]) -> None:
        if optimizer is not None:
            optimizer.step()
            return
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-3)


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
