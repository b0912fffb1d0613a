"""Programs that keep something of each step, and their innocent twins: `growing.py KIND leaks|twin [STEPS]`.

A kind is a function that makes, of a list of what a leak keeps, what is called after each step with the batch, the
output and the loss. What leaks is 1,024 x 256 floats, 1,048,576 bytes a step, where nothing else is said.
"""

from __future__ import annotations

import collections
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MIB = 1 << 20
ROWS, WIDTH = 1024, 256
After = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]
LEAKS: dict[str, Callable[[], After]] = {}
TWINS: dict[str, Callable[[], After]] = {}
EXPECTED: dict[str, tuple[str, int]] = {}
"""By leak, its holder and its bytes a step."""


def leak(name: str, holder: str, nbytes: int = MIB) -> Callable[[Callable[[], After]], Callable[[], After]]:
    """Register a leak."""

    def register(make: Callable[[], After]) -> Callable[[], After]:
        LEAKS[name], EXPECTED[name] = make, (holder, nbytes)
        return make

    return register


def twin(name: str) -> Callable[[Callable[[], After]], Callable[[], After]]:
    """Register an innocent twin."""

    def register(make: Callable[[], After]) -> Callable[[], After]:
        TWINS[name] = make
        return make

    return register


# --- lists ------------------------------------------------------------------------------------------------------------

preds: list[Any] = []
recent: list[Any] = []
seen: dict[Any, Any] = {}
history: set[Any] = set()


@leak("list of outputs", "preds", MIB)
def list_of_outputs() -> After:
    """With the graph, whose saved input is a batch as large."""
    return lambda net, x, out, loss: preds.append(out)


@leak("list of detached outputs", "preds")
def list_of_detached() -> After:
    """Without the graph."""
    return lambda net, x, out, loss: preds.append(out.detach())


@leak("list of pairs", "preds", 2 * MIB)
def list_of_pairs() -> After:
    """Batch and output."""
    return lambda net, x, out, loss: preds.append((x, out.detach()))


@leak("list of dictionaries", "preds")
def list_of_dictionaries() -> After:
    """As loggers of metrics keep them."""
    return lambda net, x, out, loss: preds.append({"out": out.detach(), "step": 1})


@leak("list that is added to", "preds")
def list_added() -> After:
    """`+=`."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        global preds
        preds += [out.detach()]

    return after


@twin("list on the host")
def list_on_host() -> After:
    """`.cpu()`."""
    return lambda net, x, out, loss: recent.append(out.detach().cpu())


@twin("list of numbers")
def list_of_numbers() -> After:
    """`.item()`."""
    return lambda net, x, out, loss: recent.append(loss.item())


@twin("list that is cut")
def list_cut() -> After:
    """The last three."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        recent.append(out.detach())
        del recent[:-3]

    return after


@twin("list that is cleared")
def list_cleared() -> After:
    """After every fourth step."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        recent.append(out.detach())
        if len(recent) == 4:
            recent.clear()

    return after


@twin("list of shapes")
def list_of_shapes() -> After:
    """Nothing of the card."""
    return lambda net, x, out, loss: recent.append(out.shape)


# --- dictionaries and sets --------------------------------------------------------------------------------------------


@leak("dictionary by step", "seen")
def dictionary_by_step() -> After:
    """A key for each step."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        seen[len(seen)] = out.detach()

    return after


@leak("dictionary of lists", "seen")
def dictionary_of_lists() -> After:
    """One key, a list."""
    return lambda net, x, out, loss: seen.setdefault("out", []).append(out.detach())


@leak("cache by identity", "seen")
def cache_by_identity() -> After:
    """Batches are never the same."""
    return lambda net, x, out, loss: seen.update({id(x): x})


@twin("dictionary by name")
def dictionary_by_name() -> After:
    """The same key each time."""
    return lambda net, x, out, loss: seen.update(out=out.detach(), loss=loss.detach())


@twin("cache of four keys")
def cache_of_keys() -> After:
    """A remainder of the step."""
    count = iter(range(1000))
    return lambda net, x, out, loss: seen.update({next(count) % 4: out.detach()})


@twin("dictionary of best")
def dictionary_of_best() -> After:
    """A copy of the weights that is replaced."""
    return lambda net, x, out, loss: seen.update(best=copy.deepcopy(net.state_dict()))


# --- attributes -------------------------------------------------------------------------------------------------------


class Meter:
    """A metric of people's own."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.total: Any = 0
        self.joined: Tensor | None = None


@leak("attribute", "meter.values")
def attribute() -> After:
    """A list in an object."""
    meter = Meter()

    def update(self: Meter, out: Tensor) -> None:
        self.values.append(out.detach())

    keeping.append(meter)
    return lambda net, x, out, loss: update(meter, out)


@leak("metric that concatenates", "meter.joined")
def metric_concatenates() -> After:
    """One tensor, which grows."""
    meter = Meter()
    keeping.append(meter)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        meter.joined = out.detach() if meter.joined is None else torch.cat([meter.joined, out.detach()])

    return after


@leak("attribute of a module", "net.outputs")
def attribute_of_module() -> After:
    """As a Lightning module keeps them."""

    def after(net: Any, x: Tensor, out: Tensor, loss: Tensor) -> None:
        if not hasattr(net, "outputs"):
            net.outputs = []
        net.outputs.append(out.detach())

    return after


@twin("attribute that is replaced")
def attribute_replaced() -> After:
    """The last output."""
    meter = Meter()
    keeping.append(meter)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        meter.joined = out.detach()

    return after


@twin("running mean")
def running_mean() -> After:
    """As large as one output."""
    meter = Meter()
    keeping.append(meter)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        meter.joined = out.detach() if meter.joined is None else 0.9 * meter.joined + 0.1 * out.detach()

    return after


@twin("metric that is reset")
def metric_reset() -> After:
    """An epoch of three steps."""
    meter = Meter()
    keeping.append(meter)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        meter.values.append(out.detach())
        if len(meter.values) == 3:
            meter.values = []

    return after


# --- graphs -----------------------------------------------------------------------------------------------------------

keeping: list[Any] = []
total: Any = 0


@leak("loss with its graph", "graph of losses", 2 * MIB)
def loss_with_graph() -> After:
    """A second forward, whose graph no backward frees: the result of tanh, and what the loss squares."""
    losses: list[Tensor] = []
    keeping.append(losses)
    return lambda net, x, out, loss: losses.append(net(x.detach()).tanh().pow(2).mean())


@leak("sum of losses", "graph of total", 2 * MIB)
def sum_of_losses() -> After:
    """`total += loss` of what is only watched."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        global total
        total += net(x.detach()).tanh().pow(2).mean()

    return after


@leak("chain of states", "graph of state")
def chain_of_states() -> After:
    """A recurrent state that is never detached."""
    state: list[Tensor] = [torch.zeros(ROWS, WIDTH, device="cuda", requires_grad=True)]
    keeping.append(state)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        state[0] = torch.tanh(state[0])

    return after


@twin("sum of detached losses")
def sum_of_detached() -> After:
    """`total += loss.detach()`."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        global total
        total += loss.detach()

    return after


@twin("state that is detached")
def state_detached() -> After:
    """Truncated."""
    state: list[Tensor] = [torch.zeros(ROWS, WIDTH, device="cuda", requires_grad=True)]
    keeping.append(state)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        state[0] = torch.tanh(state[0]).detach()

    return after


@twin("watched under no_grad")
def watched_without_grad() -> After:
    """No graph."""
    losses: list[Tensor] = []
    keeping.append(losses)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        with torch.no_grad():
            losses.append(net(x).tanh().pow(2).mean())
            del losses[:-1]

    return after


# --- hooks and closures -----------------------------------------------------------------------------------------------


@leak("hook's list", "found", MIB)
def hooks_list() -> After:
    """A forward hook that keeps what it sees."""
    found: list[Tensor] = []
    hooked: list[bool] = []

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        if not hooked:
            net.register_forward_hook(lambda module, given, out: found.append(out.detach()))
            hooked.append(True)

    return after


@leak("closure", "callbacks")
def closure() -> After:
    """Functions in a list, each with its output."""
    callbacks: list[Callable[[], Any]] = []
    keeping.append(callbacks)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        kept = out.detach()
        callbacks.append(lambda: kept.sum())

    return after


@leak("default argument", "callbacks")
def default_argument() -> After:
    """As a default of a function."""
    callbacks: list[Callable[..., Any]] = []
    keeping.append(callbacks)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        callbacks.append(lambda kept=out.detach(): kept.sum())  # noqa: B008 - the mistake itself

    return after


@twin("hook that counts")
def hook_counts() -> After:
    """Numbers of elements."""
    found: list[int] = []
    hooked: list[bool] = []

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        if not hooked:
            net.register_forward_hook(lambda module, given, out: found.append(out.numel()))
            hooked.append(True)

    return after


@twin("hook that is removed")
def hook_removed() -> After:
    """One hook at a time."""
    hooks: list[Any] = []

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        for each in hooks:
            each.remove()
        kept = out.detach()
        hooks[:] = [net.register_forward_hook(lambda module, given, out: kept.sum() and None)]

    return after


@twin("closure that is replaced")
def closure_replaced() -> After:
    """The last one alone."""
    callbacks: dict[str, Callable[[], Any]] = {}
    keeping.append(callbacks)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        kept = out.detach()
        callbacks["last"] = lambda: kept.sum()

    return after


# --- copies of weights ------------------------------------------------------------------------------------------------

WEIGHTS = (WIDTH * WIDTH + WIDTH) * 4


@leak("snapshots of weights", "snapshots", WEIGHTS)
def snapshots_of_weights() -> After:
    """A state_dict of every step."""
    snapshots: list[Any] = []
    keeping.append(snapshots)
    return lambda net, x, out, loss: snapshots.append(copy.deepcopy(net.state_dict()))


@leak("average with its graph", "graph of averages", WIDTH * WIDTH * 4)
def average_with_graph() -> After:
    """An exponential mean without no_grad, whose square keeps each value."""
    averages = [torch.zeros(WIDTH, WIDTH, device="cuda")]
    keeping.append(averages)

    def after(net: Any, x: Tensor, out: Tensor, loss: Tensor) -> None:
        averages[0] = (0.9 * averages[0] + 0.1 * net.weight).exp()

    return after


@leak("optimizers", "optimizers", WEIGHTS)
def optimizers_kept() -> After:
    """A new one each step, with its momentum."""
    optimizers: list[Any] = []
    keeping.append(optimizers)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        optimizers.append({"exp_avg": [torch.zeros_like(each) for each in net.parameters()]})

    return after


@twin("average under no_grad")
def average_without_graph() -> After:
    """In place."""
    averages: list[Tensor] = []
    keeping.append(averages)

    def after(net: Any, x: Tensor, out: Tensor, loss: Tensor) -> None:
        with torch.no_grad():
            if not averages:
                averages.append(net.weight.clone())
            averages[0].mul_(0.9).add_(net.weight, alpha=0.1)

    return after


@twin("snapshot on the host")
def snapshot_on_host() -> After:
    """`.cpu()` of each weight."""
    snapshots: list[Any] = []
    keeping.append(snapshots)
    return lambda net, x, out, loss: snapshots.append({name: each.cpu() for name, each in net.state_dict().items()})


@twin("snapshot that is replaced")
def snapshot_replaced() -> After:
    """The last one alone."""
    meter = Meter()
    keeping.append(meter)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        meter.total = copy.deepcopy(net)

    return after


# --- buffers ----------------------------------------------------------------------------------------------------------


@leak("replay without end", "memory", 2 * MIB)
def replay() -> After:
    """A deque without a bound."""
    memory: collections.deque[Any] = collections.deque()
    keeping.append(memory)
    return lambda net, x, out, loss: memory.append((x, out.detach()))


@leak("buffer that is joined", "joined")
def buffer_joined() -> After:
    """`torch.cat` of all so far."""
    joined = [torch.empty(0, WIDTH, device="cuda")]
    keeping.append(joined)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        joined[0] = torch.cat([joined[0], out.detach()])

    return after


@leak("buffer that is stacked", "stacked")
def buffer_stacked() -> After:
    """As a function of what was there."""
    stacked: dict[str, Tensor] = {}
    keeping.append(stacked)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        before = [stacked["all"]] if stacked else []
        stacked["all"] = torch.cat([*before, out.detach()[None]])

    return after


@twin("queue of five")
def queue_of_five() -> After:
    """`maxlen=5`."""
    memory: collections.deque[Any] = collections.deque(maxlen=5)
    keeping.append(memory)
    return lambda net, x, out, loss: memory.append(out.detach())


@twin("queue of ten without maxlen")
def queue_of_ten() -> After:
    """Cut by hand, after ten steps."""
    memory: collections.deque[Any] = collections.deque()
    keeping.append(memory)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        memory.append(out.detach())
        if len(memory) > 10:
            memory.popleft()

    return after


class Buffer:
    """Results of former steps, of which a later one picks: as in CycleGAN."""

    def __init__(self, max_size: int) -> None:
        self.data: list[Tensor] = []
        self.max_size = max_size

    def push(self, value: Tensor) -> None:
        """Keep it, in the place of another where there are enough."""
        if len(self.data) < self.max_size:
            self.data.append(value)
        else:
            self.data[0] = value


@twin("buffer of twelve")
def buffer_of_twelve() -> After:
    """Its class fills it up to `max_size`."""
    buffer = Buffer(12)
    keeping.append(buffer)
    return lambda net, x, out, loss: buffer.push(out.detach())


@twin("ring in one tensor")
def ring_in_tensor() -> After:
    """Made once."""
    ring: list[Tensor] = []
    keeping.append(ring)
    count = iter(range(1000))

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        if not ring:
            ring.append(torch.empty(8, ROWS, WIDTH, device="cuda"))
        ring[0][next(count) % 8] = out.detach()

    return after


# --- backward ---------------------------------------------------------------------------------------------------------


@leak("gradients that are kept", "gradients", WEIGHTS)
def gradients_kept() -> After:
    """A copy of each."""
    gradients: list[Any] = []
    keeping.append(gradients)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        gradients.append([each.grad.clone() for each in net.parameters() if each.grad is not None])

    return after


@leak("gradients of gradients", "graph of norms", 2 * MIB)
def gradients_of_gradients() -> After:
    """`create_graph`, and the norm with it."""
    norms: list[Tensor] = []
    keeping.append(norms)

    def after(net: Any, x: Tensor, out: Tensor, loss: Tensor) -> None:
        y = torch.tanh(torch.nn.functional.linear(x, net.weight.detach().requires_grad_()))
        norms.append(y.sum())

    return after


@leak("graph that is retained", "graph of kept", 2 * MIB)
def graph_retained() -> After:
    """`retain_graph=True`, and the result in a list."""
    kept: list[Tensor] = []
    keeping.append(kept)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        again = net(x.detach()).tanh().pow(2).mean()
        torch.autograd.grad(again, list(net.parameters()), retain_graph=True)
        kept.append(again)

    return after


@twin("norms of gradients")
def norms_of_gradients() -> After:
    """Numbers."""
    norms: list[float] = []
    return lambda net, x, out, loss: norms.append(sum(float(each.grad.norm()) for each in net.parameters()))


@twin("graph retained and dropped")
def graph_dropped() -> After:
    """`retain_graph=True`, twice backward."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        again = net(x.detach()).tanh().pow(2).mean()
        torch.autograd.grad(again, list(net.parameters()), retain_graph=True)
        torch.autograd.grad(again, list(net.parameters()))

    return after


@twin("gradients that are set to zero")
def gradients_zeroed() -> After:
    """They stay, in place."""

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        for each in net.parameters():
            if each.grad is not None:
                each.grad.zero_()

    return after


# --- loggers and schedules --------------------------------------------------------------------------------------------


class Logger:
    """Keeps what it is told until it is flushed."""

    def __init__(self, most: int | None) -> None:
        self.records: list[Any] = []
        self.most = most

    def log(self, **values: Any) -> None:
        """Keep a record."""
        self.records.append(values)
        if self.most is not None and len(self.records) >= self.most:
            self.records.clear()


@leak("logger", "own.records")
def logger() -> After:
    """Never flushed."""
    own = Logger(None)
    keeping.append(own)
    return lambda net, x, out, loss: own.log(out=out.detach())


@leak("default of a function", "log_all.kept")
def default_of_function() -> After:
    """The mutable default of a function that everyone makes once."""

    def log_all(value: Tensor, kept: list[Tensor] = []) -> None:  # noqa: B006 - the mistake itself
        kept.append(value)

    keeping.append(log_all)
    return lambda net, x, out, loss: log_all(out.detach())


@leak("iterator that remembers", "remembered")
def iterator_remembers() -> After:
    """A list of batches beside the loader, as `itertools.cycle` keeps one."""
    remembered: list[Tensor] = []
    keeping.append(remembered)
    return lambda net, x, out, loss: remembered.insert(0, x)


@twin("logger that is flushed")
def logger_flushed() -> After:
    """After every second record."""
    own = Logger(2)
    keeping.append(own)
    return lambda net, x, out, loss: own.log(out=out.detach())


@leak("copies for a search of the rate", "states", WEIGHTS)
def rate_search() -> After:
    """As a finder of learning rates keeps what it may go back to."""
    states: list[Any] = []
    keeping.append(states)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        states.extend([[each.detach().clone() for each in net.parameters()]])

    return after


@twin("evaluation now and then")
def evaluation() -> After:
    """After every third step, of which nothing is kept."""
    count = iter(range(1000))

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        if next(count) % 3 == 2:
            with torch.no_grad():
                net.eval()(x).sum()
            net.train()

    return after


@twin("warm-up")
def warm_up() -> After:
    """The first four steps bring a buffer each."""
    buffers: list[Tensor] = []
    keeping.append(buffers)

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        if len(buffers) < 4:
            buffers.append(torch.zeros(ROWS, WIDTH, device="cuda"))

    return after


@twin("lengths that vary")
def lengths_vary() -> After:
    """Longer and longer batches, of which the last is kept."""
    meter = Meter()
    keeping.append(meter)
    count = iter(range(1, 1000))

    def after(net: nn.Module, x: Tensor, out: Tensor, loss: Tensor) -> None:
        meter.joined = torch.zeros(next(count) ** 2, WIDTH, device="cuda")

    return after


def main(kind: str, which: str, steps: str = "1000000") -> None:
    """Train, and after each step do what the kind does."""
    after = (LEAKS if which == "leaks" else TWINS)[kind]()
    net = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(int(steps)):
        x = torch.randn(ROWS, WIDTH, device="cuda")
        out = net(x)
        loss = out.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(net, x, out, loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
