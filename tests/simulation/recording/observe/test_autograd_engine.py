"""The engine on real CPU tensors must give what the C++ engine gives, to the bit."""

import contextlib
import copy
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fxmem.simulation.recording.observe.autograd_engine import AutogradEngine


class Watching:
    def __init__(self):
        self.saved = []
        self.ran = []

    def on_save(self, value, handle):
        self.saved.append(handle)

    def on_unpack(self, tensor):
        pass

    def on_backward_node(self, sequence_number):
        self.ran.append(sequence_number)


class _Methods(TorchFunctionMode):
    """Tells the engine what the tracer would."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "register_hook":
            self.engine.hooks.note_tensor_hook(args[0])
        elif name == "retain_grad":
            self.engine.hooks.note_retain_grad(args[0])
        return result


def run(model, x, watching=None):
    engine = AutogradEngine(watching or Watching())
    torch.manual_seed(1)
    with engine.route(lambda cls, args, apply: apply(*args)), _Methods(engine):
        model(x).sum().backward()
    return engine


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factor, x, unused):
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return None, grad * 2, None


class Mixed(nn.Module):
    """Checkpointing, an autograd.Function with non-tensor arguments, views, hooks, fan-out, dropout."""

    def __init__(self, reentrant):
        super().__init__()
        self.linear, self.norm, self.dropout, self.reentrant = (
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Dropout(0.3),
            reentrant,
        )

    def block(self, x):
        return self.dropout(self.norm(self.linear(x)).relu()) * x

    def forward(self, x):
        x = x + checkpoint(self.block, x, use_reentrant=self.reentrant)
        x = Double.apply(3, x, None)
        left, right = x.chunk(2, 1)
        left.register_hook(lambda g: g * 2)
        x.retain_grad()
        self.kept = x
        return left * right + x[:, :4]


@pytest.mark.parametrize("reentrant", [False, True])
def test_mixed_program_equals_the_cpp_engine(reentrant):
    torch.manual_seed(0)
    reference = Mixed(reentrant)
    ours = copy.deepcopy(reference)
    x = torch.randn(2, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    reference(x).sum().backward()
    run(ours, y)
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(reference.kept.grad, ours.kept.grad)
    for a, b in zip(reference.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5"])
def test_torchvision_gradients_equal_the_cpp_engine(name):
    torch.manual_seed(0)
    reference = torchvision.models.get_model(name, weights=None, num_classes=5)
    ours = copy.deepcopy(reference)
    x = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    reference(x).sum().backward()
    run(ours, x)
    for a, b in zip(reference.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_what_a_node_saved_goes_when_it_has_run():
    watching = Watching()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    engine = AutogradEngine(watching)
    with engine.route(lambda cls, args, apply: apply(*args)):
        loss = model(torch.randn(2, 4)).sum()
        held = [handle() for handle in watching.saved]
        assert held
        assert all(handle is not None and handle.value is not None for handle in held)
        loss.backward()
        assert all(handle.value is None for handle in held)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_what_a_node_received_goes_before_what_it_saved(monkeypatch):
    received, gone = [], []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            received.append(weakref.ref(gradient))
            return x * 3

    engine = AutogradEngine(Watching())
    release = engine._saved.release

    def watch(number, unpacked):
        gone.extend(each() is None for each in received)
        received.clear()
        release(number, unpacked)

    monkeypatch.setattr(engine._saved, "release", watch)
    with engine.route(lambda cls, args, apply: apply(*args)):
        Probe.apply(torch.randn(4, requires_grad=True)).square().sum().backward()
    assert gone == [True]


def test_retain_graph_keeps_what_was_saved():
    model, x = nn.Linear(4, 1), torch.randn(2, 4)
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)):
        loss = model(x).pow(2).sum()
        loss.backward(retain_graph=True)
        once = model.weight.grad.clone()
        loss.backward()
    assert torch.equal(model.weight.grad, 2 * once)


def test_a_root_without_a_graph_is_refused_in_the_words_of_torch():
    """As of a loss behind reentrant checkpoints that were given no tensor that requires a gradient."""
    refusals = []
    for around in (contextlib.nullcontext(), AutogradEngine(Watching()).route(lambda cls, args, apply: apply(*args))):
        with around, pytest.raises(RuntimeError) as refused:
            torch.autograd.backward([torch.ones(1, requires_grad=True) * 2, torch.ones(1)])
        refusals.append(str(refused.value))
    assert refusals == ["element 1 of tensors does not require grad and does not have a grad_fn"] * 2


def test_autograd_grad_touches_no_leaf():
    x = torch.randn(3, requires_grad=True)
    w = torch.randn(3, requires_grad=True)
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)):
        hidden = x.sin() * w
        (gradient,) = torch.autograd.grad(hidden.exp().sum(), hidden)
        (of_x,) = torch.autograd.grad((x.sin() * w).sum(), x)
    assert torch.equal(gradient, hidden.exp())
    assert torch.equal(of_x, x.cos() * w)
    assert x.grad is None
    assert w.grad is None


def test_gradient_penalty_differentiates_twice():
    def penalty(x):
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return gradient.pow(2).sum()

    x = torch.randn(3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    penalty(x).backward()
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)):
        penalty(y).backward()
    assert torch.equal(x.grad, y.grad)


def test_hooks_run_where_the_cpp_engine_runs_them():
    def program(log):
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        model[1].register_full_backward_hook(lambda module, grad_in, grad_out: log.append("full"))
        model[0].weight.register_hook(lambda grad: log.append("tensor"))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
        return model

    x = torch.randn(2, 3)
    expected, came = [], []
    program(expected)(x).sum().backward()
    run(program(came), x)
    assert sorted(came) == sorted(expected)
    assert came.index("full") < came.index("tensor") < came.index("accumulated")


def test_hooks_on_nodes_of_cpp_run_as_the_cpp_engine_runs_them():
    """Those of a leaf's `AccumulateGrad`, by which trainers move gradients to buffers of their own, among them."""

    def program():
        log = []
        weight = nn.Parameter(torch.arange(3.0))
        weight.main_grad = torch.zeros(3, dtype=torch.float64)

        def to_main(inputs, received):
            log.append((len(inputs), received[0].tolist()))
            weight.main_grad.add_(weight.grad)
            weight.grad = None

        sink = weight.expand_as(weight).grad_fn.next_functions[0][0]
        sink.register_hook(to_main)
        sink.register_prehook(lambda received: (received[0] + 1,))
        removed = sink.register_hook(lambda *_: log.append("removed"))
        removed.remove()
        for factor in (2, 3):
            y = (weight * factor).sin()
            y.grad_fn.register_hook(lambda inputs, received: log.append(len(received)) or (inputs[0] * 5,))
            y.sum().backward()
        return log, weight.main_grad, weight.grad

    expected = program()
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)):
        log, main, gradient = program()
    assert log == expected[0]
    assert len(log) == 4
    assert torch.equal(main, expected[1])
    assert gradient is None


def test_a_leaf_that_a_function_has_saved_is_the_leaf_itself():
    found = []

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            found.append((weight is leaf, x is leaf, hasattr(weight, "was_added"), x.requires_grad))
            return gradient * weight, None

    leaf = nn.Parameter(torch.ones(3))
    leaf.was_added = False
    x = torch.ones(3, requires_grad=True)
    Times.apply(x.sin(), leaf).sum().backward()
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)):
        Times.apply(x.sin(), leaf).sum().backward()
    assert found == [(True, False, True, True)] * 2


def test_a_function_receives_none_for_an_output_that_is_no_tensor():
    received = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return None, x * 2, x + 1

        @staticmethod
        def backward(ctx, *gradients):
            received.append([None if each is None else each.tolist() for each in gradients])
            return gradients[1] * 2

    x = torch.ones(2, requires_grad=True)
    Twice.apply(x)[1].sum().backward()
    with AutogradEngine(Watching()).route(lambda cls, args, apply: apply(*args)):
        Twice.apply(x)[1].sum().backward()
    assert received == [[None, [1, 1], [0, 0]]] * 2


def test_the_engine_is_called_by_itself_for_roots_whose_data_is_freed():
    def program():
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        y = x.sin()
        y.data = torch.empty((1,))
        torch.autograd.Variable._execution_engine.run_backward(
            tensors=(y,),
            grad_tensors=(torch.ones(2, 3),),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        return x.grad

    expected, watching = program(), Watching()
    engine = AutogradEngine(watching)
    with engine.route(lambda cls, args, apply: apply(*args)):
        assert torch.equal(program(), expected)
    assert watching.ran


@pytest.mark.parametrize("only", [False, True])
def test_a_hook_waits_for_all_gradients_that_will_come(only):
    """Of tensors that are used, before and within backward, of leaves, and of one that no gradient reaches."""

    def program(log):
        leaf = torch.ones(3, requires_grad=True)
        first, unused = leaf.sin(), leaf.cos()
        second = first.exp()
        seen = torch.autograd.graph.register_multi_grad_hook
        seen([first, second, unused], lambda found: log.append([each is not None for each in found]))
        if only:
            torch.autograd.grad(second.sum(), [first])
        else:
            seen([first, leaf], lambda found: log.append([each.sum() for each in found]))
            second.sum().backward()

    expected, came = [], []
    program(expected)
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)), _Methods(engine):
        program(came)
    assert came == expected
    assert len(came) == (1 if only else 2)


def test_an_unpack_hook_may_ask_which_node_it_unpacks_for():
    """As hooks that offload do, to free in time (OffloadActivations of torchtune)."""

    def program(x, log):
        def unpack(tensor):
            log.append(type(torch._C._current_autograd_node()).__name__)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = Double.apply(3, x.sin(), None).exp().sum()
        loss.backward()
        log.append(torch._C._current_autograd_node())

    x = torch.randn(2, 3, requires_grad=True)
    expected, came = [], []
    program(x, expected)
    with AutogradEngine(Watching()).route(lambda cls, args, apply: apply(*args)):
        program(x, came)
    assert came == expected == ["ExpBackward0", "SinBackward0", None]


def test_a_leaf_takes_its_gradient_unless_somebody_else_sees_it():
    """x + w hands both inputs the same gradient: one may keep it, the other must copy."""
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)):
        ((a + b) * 1.0).sum().backward()
    assert a.grad.data_ptr() != b.grad.data_ptr()


def test_second_gradient_is_added_in_place():
    storages = set()

    class See(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
                storages.add(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, requires_grad=True)
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)):
        hidden = x.sin()
        loss = (hidden.exp() * hidden.cos()).sum()
        with See():
            loss.backward()
    assert storages == {torch.ops.aten.add_.Tensor}


def on_both_engines(program):
    """What a program returns on the C++ engine, and on ours."""
    expected = program()
    with AutogradEngine(Watching()).route(lambda cls, args, apply: apply(*args)):
        return expected, program()


class Cross(torch.autograd.Function):
    """Adds two tensors; notes the order in which the gradients it returns are freed."""

    freed: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, gradient):
        first, second = gradient * 2, gradient * 3
        weakref.finalize(first, Cross.freed.append, "first")
        weakref.finalize(second, Cross.freed.append, "second")
        return first, second


def test_what_was_added_to_other_gradients_is_freed_first_to_last():
    def program():
        Cross.freed.clear()
        a, b = (torch.randn(3, requires_grad=True).sin() for _ in range(2))
        crossed = Cross.apply(a, b)
        (crossed.sum() + (a * 2).sum() + (b * 3).sum()).backward()
        return list(Cross.freed)

    expected, found = on_both_engines(program)
    assert found == expected == ["first", "second"]


def test_a_gradient_with_a_graph_is_added_out_of_place():
    def program():
        added = set()

        class See(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
                    added.add(func)
                return func(*args, **(kwargs or {}))

        hidden = torch.randn(3, requires_grad=True).sin()
        loss = (hidden.exp() * hidden.cos()).sum()
        with See():
            torch.autograd.grad(loss, hidden, create_graph=True)
        return added

    expected, found = on_both_engines(program)
    assert found == expected == {torch.ops.aten.add.Tensor}


class Root(torch.autograd.Function):
    """Remembers the gradient that it received."""

    received: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Root.received[:] = [weakref.ref(gradient)]
        return gradient * 2


def test_a_cast_root_gradient_lives_until_backward_ends():
    def program():
        alive = []
        x = torch.randn(3, requires_grad=True)
        x.register_hook(lambda _: alive.append(Root.received[0]() is not None))
        y = Root.apply(x.sin())
        torch.autograd.backward(y, torch.ones(3, dtype=torch.float64))
        return *alive, Root.received[0]() is not None

    expected = program()
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)), _Methods(engine):
        found = program()
    assert found == expected == (True, False)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_has_the_strides_of_its_leaf(transposed):
    def program():
        leaf = torch.randn(4, 3).t().requires_grad_() if transposed else torch.randn(3, 4, requires_grad=True)
        (leaf if transposed else leaf.t()).contiguous().exp().sum().backward()
        return leaf.grad.stride()

    expected, found = on_both_engines(program)
    assert found == expected == ((1, 3) if transposed else (4, 1))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_with_a_graph_is_a_copy_in_the_leafs_layout(transposed):
    def program():
        came = []
        leaf = torch.randn(3, 4, requires_grad=True)
        leaf.register_hook(lambda gradient: came.append(gradient.data_ptr()))
        (leaf.t().contiguous() if transposed else leaf).pow(3).sum().backward(create_graph=True)
        return leaf.grad.data_ptr() in came, type(leaf.grad.grad_fn).__name__, leaf.grad.stride()

    expected = program()
    engine = AutogradEngine(Watching())
    with engine.route(lambda cls, args, apply: apply(*args)), _Methods(engine):
        found = program()
    assert found == expected == (False, "CopyBackwards", (4, 1))


def test_everything_is_put_back_after_an_error():
    before = (
        torch.autograd._engine_run_backward,
        torch._C._current_graph_task_id,
        torch.autograd.Variable._execution_engine,
    )
    applied = (
        vars(torch.autograd.Function).get("apply"),
        vars(torch.autograd.function._SingleLevelFunction).get("apply"),
    )
    engine = AutogradEngine(Watching())
    with pytest.raises(ZeroDivisionError), engine.route(lambda cls, args, apply: apply(*args)):
        raise ZeroDivisionError
    assert (
        torch.autograd._engine_run_backward,
        torch._C._current_graph_task_id,
        torch.autograd.Variable._execution_engine,
    ) == before
    assert (
        vars(torch.autograd.Function).get("apply"),
        vars(torch.autograd.function._SingleLevelFunction).get("apply"),
    ) == applied
    x = torch.randn(3, requires_grad=True)
    (x * x).sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_saved_handles_die_with_the_graph():
    watching = Watching()
    engine = AutogradEngine(watching)
    with engine.route(lambda cls, args, apply: apply(*args)):
        y = torch.randn(3, requires_grad=True).exp()
        assert [isinstance(h, weakref.ref) and h() is not None for h in watching.saved] == [True]
        del y
        assert watching.saved[0]() is None


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)])
def test_an_in_place_op_on_a_view_keeps_what_it_saved_until_it_runs(shape):
    """A linear layer of a 3-d input returns a view of its product; ReLU in place rebuilds that view's history before it
    saves."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    ours = copy.deepcopy(reference)
    x = torch.randn(shape)
    reference(x).sum().backward()
    run(ours, x)
    for a, b in zip(reference.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
