"""Programs that keep something of each step, as people write them: up to a bound, without end, and innocent twins.

Each is a file of its own, `PRELUDE` and a text from one of the tables, and takes its number of steps.
"""

from __future__ import annotations

PRELUDE = """
import bisect, collections, dataclasses, functools, heapq, itertools, queue, random, sys, threading, weakref
import numpy as np
import torch
from torch import nn

STEPS = int(sys.argv[1])
N = 24
net = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def learn(rows=16):
    optimizer.zero_grad()
    out = net(torch.randn(rows, 16, device="cuda"))
    out.square().mean().backward()
    optimizer.step()
    return out.detach()


"""

# --- up to a bound, which is behind the steps that are run ------------------------------------------------------------

BOUNDED: dict[str, str] = {}
ENDLESS: dict[str, str] = {}
TWINS: dict[str, str] = {}

BOUNDED["own LRU"] = """
class LRU:
    def __init__(self, capacity):
        self.capacity = capacity
        self.entries = collections.OrderedDict()

    def get(self, key):
        if key not in self.entries:
            return None
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key, value):
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


cache = LRU(N)
for step in range(STEPS):
    cache.put(step, learn())
    cache.get(step - 3)
"""
BOUNDED["LRU while"] = """
entries = collections.OrderedDict()
for step in range(STEPS):
    entries[step] = learn()
    while len(entries) > N:
        entries.popitem(last=False)
"""
BOUNDED["heap of the best"] = """
best = []
for step in range(STEPS):
    entry = (random.random(), step, learn())
    if len(best) < N:
        heapq.heappush(best, entry)
    else:
        heapq.heappushpop(best, entry)
"""
BOUNDED["queue of maxsize"] = """
waiting = queue.Queue(maxsize=N)
for step in range(STEPS):
    if waiting.full():
        waiting.get()
    waiting.put(learn())
"""
BOUNDED["queue read later"] = """
waiting = queue.Queue()
for step in range(STEPS):
    waiting.put(learn())
    if step >= N:
        waiting.get()
"""
BOUNDED["reservoir"] = """
reservoir = []
for step in range(STEPS):
    out = learn()
    if len(reservoir) < N:
        reservoir.append(out)
    else:
        place = random.randint(0, step)
        if place < N:
            reservoir[place] = out
"""
BOUNDED["replay of DQN"] = """
class Replay:
    def __init__(self, capacity):
        self.capacity = capacity
        self.memory = []
        self.position = 0

    def push(self, *transition):
        if len(self.memory) < self.capacity:
            self.memory.append(None)
        self.memory[self.position] = transition
        self.position = (self.position + 1) % self.capacity


replay = Replay(N)
for step in range(STEPS):
    out = learn()
    replay.push(out, out + 1)
"""
BOUNDED["slice of a list"] = """
recent = []
for step in range(STEPS):
    recent.append(learn())
    recent = recent[-N:]
"""
BOUNDED["deleted slice"] = """
recent = []
for step in range(STEPS):
    recent.append(learn())
    del recent[:-N]
"""
BOUNDED["popped before"] = """
recent = []
for step in range(STEPS):
    out = learn()
    if len(recent) >= N:
        recent.pop(0)
    recent.append(out)
"""
BOUNDED["joined and cut"] = """
bank = torch.zeros(0, 16, device="cuda")
for step in range(STEPS):
    bank = torch.cat([bank, learn()])[-16 * N:].clone()
"""
BOUNDED["bank cut by size"] = """
bank = torch.zeros(0, 16, device="cuda")
for step in range(STEPS):
    bank = torch.cat([bank, learn()])
    if bank.size(0) > 16 * N:
        bank = bank[-16 * N:].clone()
"""
BOUNDED["remainder of the step"] = """
slots = {}
for step in range(STEPS):
    slots[step % N] = learn()
"""
BOUNDED["by the place in the data"] = """
data = torch.utils.data.DataLoader(torch.randn(16 * N, 16), batch_size=16)
memory = {}
for epoch in range(STEPS // N):
    for place, x in enumerate(data):
        memory[place] = learn()
"""
BOUNDED["snapshots"] = """
snapshots = []
for step in range(STEPS):
    learn()
    snapshots.append({name: each.clone() for name, each in net.state_dict().items()})
    if len(snapshots) > N:
        del snapshots[0]
"""
BOUNDED["first steps"] = """
watched = []
for step in range(STEPS):
    out = learn()
    if step < N:
        watched.append(out)
"""
BOUNDED["popped from a step on"] = """
delayed = collections.deque()
for step in range(STEPS):
    delayed.append(learn())
    if step >= N:
        delayed.popleft()
"""
BOUNDED["old key"] = """
outputs = {}
for step in range(STEPS):
    outputs[step] = learn()
    outputs.pop(step - N, None)
"""
BOUNDED["first key"] = """
outputs = {}
for step in range(STEPS):
    outputs[step] = learn()
    if len(outputs) > N:
        del outputs[next(iter(outputs))]
"""
BOUNDED["dataclass with a deque"] = """
@dataclasses.dataclass
class State:
    past: collections.deque = dataclasses.field(default_factory=lambda: collections.deque(maxlen=N))


state = State()
for step in range(STEPS):
    state.past.append(learn())
"""
BOUNDED["weak cache beside a deque"] = """
by_step = weakref.WeakValueDictionary()
strong = collections.deque([], N)
for step in range(STEPS):
    out = learn()
    by_step[step] = out
    strong.append(out)
"""
BOUNDED["stacked when full"] = """
outputs = []
for step in range(STEPS):
    outputs.append(learn())
    if len(outputs) == N:
        mean = torch.stack(outputs).mean()
        outputs = []
"""
BOUNDED["cleared every so often"] = """
outputs = []
for step in range(STEPS):
    outputs.append(learn())
    if (step + 1) % N == 0:
        outputs.clear()
"""
BOUNDED["array of objects"] = """
slots = np.empty(N, dtype=object)
for step in range(STEPS):
    slots[step % N] = learn()
"""
BOUNDED["list made before"] = """
slots = [None] * N
for step in range(STEPS):
    slots[step % N] = learn()
"""
BOUNDED["sum tree"] = """
class SumTree:
    def __init__(self, capacity):
        self.capacity = capacity
        self.tree = np.zeros(2 * capacity - 1)
        self.data = np.zeros(capacity, dtype=object)
        self.write = 0

    def add(self, priority, value):
        self.data[self.write] = value
        self.tree[self.write + self.capacity - 1] = priority
        self.write += 1
        if self.write >= self.capacity:
            self.write = 0


tree = SumTree(N)
for step in range(STEPS):
    tree.add(1.0, learn())
"""
BOUNDED["function that is cached"] = """
@functools.lru_cache(maxsize=N)
def mask(step):
    return torch.zeros(16, 16, device="cuda")


for step in range(STEPS):
    learn()
    mask(step)
"""
BOUNDED["taken in threes"] = """
waiting = collections.deque()
for step in range(STEPS):
    waiting.append(learn())
    if len(waiting) >= N:
        taken = [waiting.popleft() for _ in range(3)]
        del taken
"""
BOUNDED["until enough"] = """
kept = []
while len(kept) < N:
    kept.append(learn())
"""
BOUNDED["counted down"] = """
left, kept = N, []
while left > 0:
    kept.append(learn())
    left -= 1
"""
BOUNDED["sliced iterator"] = """
kept = []
for step in itertools.islice(itertools.count(), N):
    kept.append(learn())
"""
BOUNDED["left at a length"] = """
kept = []
for step in itertools.count():
    kept.append(learn())
    if len(kept) == N:
        break
"""
BOUNDED["episodes"] = """
steps = 0
while steps < STEPS:
    rollout, done = [], False
    while not done:
        rollout.append(learn())
        steps += 1
        done = len(rollout) == N
"""
BOUNDED["rollout of a size"] = """
rollout = {"outs": [], "values": []}
for step in range(STEPS):
    rollout["outs"].append(learn())
    if len(rollout["outs"]) >= N:
        for each in rollout.values():
            each.clear()
"""
BOUNDED["chain that is cut"] = """
state = torch.zeros(16, 16, device="cuda", requires_grad=True)
for step in range(STEPS):
    learn()
    state = torch.tanh(state)
    if step % N == N - 1:
        state = state.detach().requires_grad_()
"""
BOUNDED["cycled loader"] = """
def batches():
    for _ in range(N):
        yield torch.randn(16, 16, device="cuda")


for step, x in zip(range(STEPS), itertools.cycle(batches())):
    learn()
"""
BOUNDED["meter reset by epoch"] = """
class Meter:
    def __init__(self):
        self.outs = []

    def update(self, out):
        self.outs.append(out)

    def reset(self):
        self.outs = []


meter = Meter()
for epoch in range(STEPS // N):
    for step in range(N):
        meter.update(learn())
    meter.reset()
"""
BOUNDED["cleared by epoch"] = """
outs = []
for epoch in range(STEPS // N):
    for step in range(N):
        outs.append(learn())
    outs.clear()
"""
BOUNDED["nested deques"] = """
log = {"train": {"outs": collections.deque(maxlen=N)}}
for step in range(STEPS):
    log["train"]["outs"].append(learn())
"""
BOUNDED["handed to a function"] = """
def keep(buffer, value, most):
    buffer.append(value)
    while len(buffer) > most:
        buffer.pop(0)


history = []
for step in range(STEPS):
    keep(history, learn(), N)
"""
BOUNDED["filtered by age"] = """
tracks = []
for step in range(STEPS):
    tracks.append((step, learn()))
    tracks = [each for each in tracks if each[0] > step - N]
"""
BOUNDED["sorted and cut"] = """
best = []
for step in range(STEPS):
    best.append((random.random(), step, learn()))
    best = sorted(best, key=lambda each: each[0])[:N]
"""
BOUNDED["largest of a heap"] = """
from heapq import nlargest

best = []
for step in range(STEPS):
    best.append((random.random(), step, learn()))
    best = nlargest(N, best)
"""
BOUNDED["pruned by a function"] = """
def prune(kept):
    return list(itertools.islice(kept, max(len(kept) - N, 0), None))


kept = []
for step in range(STEPS):
    kept = prune(kept + [learn()])
"""
BOUNDED["own list that is cut"] = """
class Window(list):
    def append(self, value):
        super().append(value)
        if len(self) > N:
            del self[0]


window = Window()
for step in range(STEPS):
    window.append(learn())
"""
BOUNDED["object made anew"] = """
class Meter:
    def __init__(self):
        self.outs = []

    def update(self, out):
        self.outs.append(out)


meter = Meter()
for step in range(STEPS):
    meter.update(learn())
    if step % N == N - 1:
        meter = Meter()
"""
BOUNDED["cleared by another name"] = """
class Meter:
    def __init__(self):
        self.outs = []

    def update(self, out):
        self.outs.append(out)

    def flush(self):
        outs = self.outs
        outs.clear()


meter = Meter()
for step in range(STEPS):
    meter.update(learn())
    if step % N == N - 1:
        meter.flush()
"""
BOUNDED["lists cleared in a loop"] = """
log = {"outs": [], "losses": []}
for step in range(STEPS):
    log["outs"].append(learn())
    if step % N == N - 1:
        for each in log.values():
            each.clear()
"""
BOUNDED["states detached one by one"] = """
cell = nn.LSTMCell(16, 16).cuda()
hidden = (torch.zeros(4, 16, device="cuda"), torch.zeros(4, 16, device="cuda"))
for step in range(STEPS):
    learn()
    hidden = cell(torch.randn(4, 16, device="cuda"), hidden)
    if step % N == N - 1:
        hidden = tuple(each.detach() for each in hidden)
"""
BOUNDED["states repackaged"] = """
def repackage(given):
    if isinstance(given, torch.Tensor):
        return given.detach()
    return tuple(repackage(each) for each in given)


cell = nn.LSTMCell(16, 16).cuda()
hidden = (torch.zeros(4, 16, device="cuda"), torch.zeros(4, 16, device="cuda"))
for step in range(STEPS):
    learn()
    hidden = cell(torch.randn(4, 16, device="cuda"), hidden)
    if step % N == N - 1:
        hidden = repackage(hidden)
"""
BOUNDED["hook that returns early"] = """
class Watcher:
    def __init__(self):
        self.calls, self.outs = 0, []

    def __call__(self, module, given, out):
        self.calls += 1
        if self.calls > N:
            return
        self.outs.append(out.detach())


watcher = Watcher()
net.register_forward_hook(watcher)
for step in range(STEPS):
    learn()
"""
BOUNDED["passed over later"] = """
kept = []
for step in range(STEPS):
    out = learn()
    if step >= N:
        continue
    kept.append(out)
"""
BOUNDED["switched off"] = """
class Tracker:
    def __init__(self):
        self.is_on, self.outs = True, []

    def track(self, out):
        if self.is_on:
            self.outs.append(out)


tracker = Tracker()
for step in range(STEPS):
    tracker.track(learn())
    if step == N:
        tracker.is_on = False
"""
BOUNDED["warm-up by a flag"] = """
kept = []
for step in range(STEPS):
    out = learn()
    is_warming = step < N
    if is_warming:
        kept.append(out)
"""
BOUNDED["left for good"] = """
kept = []
for step in itertools.count():
    kept.append(learn())
    if step == N:
        sys.exit()
"""
BOUNDED["two conditions of a loop"] = """
kept, step, done = [], 0, False
while step < N and not done:
    kept.append(learn())
    step += 1
"""
BOUNDED["unequal"] = """
kept, step = [], 0
while step != N:
    kept.append(learn())
    step += 1
"""
BOUNDED["cut in place"] = """
kept = []
for step in range(STEPS):
    kept.append(learn())
    kept[:] = kept[-N:]
"""
BOUNDED["swapped"] = """
filling, full = [], []
for step in range(STEPS):
    filling.append(learn())
    if step % N == N - 1:
        filling, full = full, filling
        filling.clear()
"""
BOUNDED["taken over by another"] = """
class Collector:
    def __init__(self):
        self.outs = []

    def collect(self, out):
        self.outs.append(out)


def drain(collector):
    taken, collector.outs = collector.outs, []
    return len(taken)


collector = Collector()
for step in range(STEPS):
    collector.collect(learn())
    if step % N == N - 1:
        drain(collector)
"""
BOUNDED["consumed by a thread"] = """
waiting = queue.Queue()
begun = threading.Event()


def consume():
    begun.wait()
    while True:
        waiting.get()
        waiting.task_done()


threading.Thread(target=consume, daemon=True).start()
for step in range(STEPS):
    waiting.put(learn())
    if step >= N:
        begun.set()
        waiting.join()
"""
BOUNDED["set that is reduced"] = """
kept = set()
for step in range(STEPS):
    kept |= {learn()}
    if len(list(kept)) > N:
        kept -= set(list(kept)[:1])
"""
BOUNDED["rolled"] = """
window = torch.zeros(0, 16, device="cuda")
for step in range(STEPS):
    window = torch.cat([window, learn()])
    window = window.narrow(0, max(window.shape[0] - 16 * N, 0), min(window.shape[0], 16 * N)).clone()
"""
BOUNDED["ring of a queue"] = """
waiting = queue.Queue(maxsize=N)
for step in range(STEPS):
    try:
        waiting.put(learn(), block=False)
    except queue.Full:
        pass
"""

# --- without end ------------------------------------------------------------------------------------------------------

BOUNDED["hooks removed later"] = """
handles = collections.deque()
for step in range(STEPS):
    handles.append(net.register_forward_hook(lambda module, given, made, kept=learn(): None))
    if step >= N:
        handles.popleft().remove()
"""

BOUNDED["parameter groups taken off"] = """
for step in range(STEPS):
    learn()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(16, 16, device="cuda"))]})
    if step >= N:
        optimizer.param_groups.pop()
"""

BOUNDED["gradients by a hook, taken off"] = """
gradients = []
for step in range(STEPS):
    optimizer.zero_grad()
    out = net(torch.randn(16, 16, device="cuda"))
    out.register_hook(gradients.append)
    out.square().mean().backward()
    optimizer.step()
    del gradients[:-N]
"""

BOUNDED["measured by a function"] = """
pool = []


def is_full():
    if len(pool) >= N:
        return True
    return False


for step in range(STEPS):
    out = learn()
    if not is_full():
        pool.append(out)
"""

BOUNDED["switched by its length"] = """
pool, done = [], False
for step in range(STEPS):
    out = learn()
    if len(pool) >= N:
        done = True
    if not done:
        pool.append(out)
"""

BOUNDED["returns when it is full"] = """
pool = []


def keep(value):
    if len(pool) >= N:
        return
    pool.append(value)


for step in range(STEPS):
    keep(learn())
"""

BOUNDED["emptied by a function when it is full"] = """
pool = []


def train():
    if len(pool) < N:
        return
    forget()


def forget():
    pool.clear()


for step in range(STEPS):
    pool.append(learn())
    train()
"""

BOUNDED["ended by an event"] = """
pool, full = [], threading.Event()
for step in range(STEPS):
    out = learn()
    if not full.is_set():
        pool.append(out)
    if len(pool) >= N:
        full.set()
"""

BOUNDED["hooks cleared"] = """
for step in range(STEPS):
    net.register_forward_hook(lambda module, given, made, kept=learn(): None)
    if step % N == N - 1:
        net._forward_hooks.clear()
"""

BOUNDED["begun again by its own method"] = """
class Meter:
    def __init__(self):
        self.values = []


meter = Meter()
for step in range(STEPS):
    meter.values.append(learn())
    if step % N == N - 1:
        meter.__init__()
"""

BOUNDED["switched by another list"] = """
pool, full = [], []
for step in range(STEPS):
    out = learn()
    if not full:
        pool.append(out)
    if len(pool) >= N:
        full.append(step)
"""

BOUNDED["switched in a dictionary"] = """
class Pool:
    def __init__(self):
        self.data, self.options = [], dict(stop=False)

    def push(self, value):
        if not self.options["stop"]:
            self.data.append(value)
        if len(self.data) >= N:
            self.options.update(stop=True)


pool = Pool()
for step in range(STEPS):
    pool.push(learn())
"""

BOUNDED["taken off by a function of a library"] = """
import operator

pool = []
for step in range(STEPS):
    pool.append(learn())
    if len(pool) > N:
        operator.delitem(pool, 0)
"""

BOUNDED["groups of an optimizer made anew"] = """
for step in range(STEPS):
    learn()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(16, 16, device="cuda"))]})
    if step % N == N - 1:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""

ENDLESS["defaultdict of lists"] = """
log = collections.defaultdict(list)
for step in range(STEPS):
    log["out"].append(learn())
"""
ENDLESS["class attribute"] = """
class Tracker:
    history = []


for step in range(STEPS):
    Tracker.history.append(learn())
"""
ENDLESS["class attribute by self"] = """
class Tracker:
    history = []

    def track(self, value):
        self.history.append(value)


tracker = Tracker()
for step in range(STEPS):
    tracker.track(learn())
"""
ENDLESS["dataclass field"] = """
@dataclasses.dataclass
class State:
    outs: list = dataclasses.field(default_factory=list)


state = State()
for step in range(STEPS):
    state.outs.append(learn())
"""
ENDLESS["hook by name"] = """
acts = {}


def watch(name):
    def hook(module, given, out):
        acts.setdefault(name, []).append(out.detach())

    return hook


for name, module in net.named_modules():
    module.register_forward_hook(watch(name))
for step in range(STEPS):
    learn()
"""
ENDLESS["closure of a factory"] = """
def make_keeper():
    kept = []

    def keep(value):
        kept.append(value)

    return keep


keep = make_keeper()
for step in range(STEPS):
    keep(learn())
"""
ENDLESS["hidden state"] = """
cell = nn.RNNCell(16, 16).cuda()
hidden = torch.zeros(4, 16, device="cuda")
for step in range(STEPS):
    learn()
    hidden = cell(torch.randn(4, 16, device="cuda"), hidden)
"""
ENDLESS["longer tuple"] = """
kept = ()
for step in range(STEPS):
    kept = kept + (learn(),)
"""
ENDLESS["longer list"] = """
kept = []
for step in range(STEPS):
    kept = [*kept, learn()]
"""
ENDLESS["linked pairs"] = """
head = None
for step in range(STEPS):
    head = (learn(), head)
"""
ENDLESS["linked objects"] = """
class Node:
    def __init__(self, value, before):
        self.value, self.before = value, before


last = None
for step in range(STEPS):
    last = Node(learn(), last)
"""
ENDLESS["nested containers"] = """
log = {"train": {"outs": []}}
for step in range(STEPS):
    log["train"]["outs"].append(learn())
"""
ENDLESS["last list of lists"] = """
epochs = []
for epoch in range(STEPS // 8):
    epochs.append([])
    for _ in range(8):
        epochs[-1].append(learn())
"""
ENDLESS["by step"] = """
outputs = {}
for step in range(STEPS):
    outputs[step] = learn()
"""
ENDLESS["by name of the step"] = """
outputs = {}
for step in range(STEPS):
    outputs[f"step {step}"] = learn()
"""
ENDLESS["by counter"] = """
class Store:
    def __init__(self):
        self.count, self.outs = 0, {}

    def add(self, value):
        self.outs[self.count] = value
        self.count += 1


store = Store()
for step in range(STEPS):
    store.add(learn())
"""
ENDLESS["by epoch and batch"] = """
outputs = {}
for epoch in range(STEPS // 8):
    for place in range(8):
        outputs[epoch, place] = learn()
"""
ENDLESS["queue"] = """
waiting = queue.Queue()
for step in range(STEPS):
    waiting.put(learn())
"""
ENDLESS["simple queue"] = """
waiting = queue.SimpleQueue()
for step in range(STEPS):
    waiting.put(learn())
"""
ENDLESS["heap"] = """
heap = []
for step in range(STEPS):
    heapq.heappush(heap, (random.random(), step, learn()))
"""
ENDLESS["sorted list"] = """
kept = []
for step in range(STEPS):
    bisect.insort(kept, (random.random(), step, learn()))
"""
ENDLESS["slice at its end"] = """
kept = []
for step in range(STEPS):
    kept[len(kept):] = [learn()]
"""
ENDLESS["own list"] = """
class Log(list):
    def note(self, value):
        self.append(value)


log = Log()
for step in range(STEPS):
    log.note(learn())
"""
ENDLESS["UserList"] = """
class Log(collections.UserList):
    pass


log = Log()
for step in range(STEPS):
    log.append(learn())
"""
ENDLESS["thread's list"] = """
local = threading.local()
local.kept = []
for step in range(STEPS):
    local.kept.append(learn())
"""
ENDLESS["partials"] = """
jobs = []
for step in range(STEPS):
    jobs.append(functools.partial(torch.sum, learn()))
"""
ENDLESS["buffers of a module"] = """
for step in range(STEPS):
    net.register_buffer(f"out_{step}", learn())
"""
ENDLESS["attributes"] = """
class State:
    pass


state = State()
for step in range(STEPS):
    setattr(state, f"out_{step}", learn())
"""
ENDLESS["cycled endless loader"] = """
def batches():
    while True:
        yield torch.randn(16, 16, device="cuda")


for step, x in zip(range(STEPS), itertools.cycle(batches())):
    learn()
"""
ENDLESS["per epoch lists kept"] = """
history = []
for epoch in range(STEPS // 4):
    outs = []
    for _ in range(4):
        outs.append(learn())
    history.append(outs)
"""
ENDLESS["module list"] = """
layers = nn.ModuleList()
for step in range(STEPS):
    learn()
    layers.append(nn.Linear(16, 16, bias=False).cuda())
"""
ENDLESS["cached by step"] = """
@functools.cache
def mask(step):
    return torch.zeros(16, 16, device="cuda")


for step in range(STEPS):
    learn()
    mask(step)
"""
ENDLESS["set"] = """
kept = set()
for step in range(STEPS):
    kept.add(learn())
"""
ENDLESS["vstack"] = """
bank = None
for step in range(STEPS):
    out = learn()
    bank = out if bank is None else torch.vstack((bank, out))
"""
ENDLESS["padded"] = """
bank = torch.zeros(16, 16, device="cuda")
for step in range(STEPS):
    out = learn()
    bank = nn.functional.pad(bank, (0, 0, 0, 16))
    bank[-16:] = out
"""
ENDLESS["length that is printed"] = """
kept = []
for step in range(STEPS):
    kept.append(learn())
    if step % 10 == 0:
        print(len(kept))
"""
ENDLESS["kept on a condition"] = """
kept = []
for step in range(STEPS):
    out = learn()
    if out is not None:
        kept.append(out)
"""
ENDLESS["sampled from"] = """
pool = []
for step in range(STEPS):
    pool.append(learn())
    if len(pool) > 3:
        picked = random.sample(pool, 2)
        del picked
"""
ENDLESS["losses of a loss dictionary"] = """
sums = {"loss": 0}
for step in range(STEPS):
    learn()
    sums["loss"] += net(torch.randn(16, 16, device="cuda")).tanh().mean()
"""
ENDLESS["pushed to a parameter group"] = """
for step in range(STEPS):
    learn()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(16, 16, device="cuda"))]})
"""
ENDLESS["micro-batches"] = """
kept = []
for step in range(STEPS):
    optimizer.zero_grad()
    for _ in range(3):
        out = net(torch.randn(16, 16, device="cuda"))
        out.mean().backward()
        kept.append(out.detach())
    optimizer.step()
"""

ENDLESS["sum that is printed"] = """
total = 0
for step in range(STEPS):
    learn()
    total += net(torch.randn(16, 16, device="cuda")).tanh().mean()
    print(total.item())
"""
ENDLESS["replay that is sampled"] = """
replay = collections.deque()


def train_on_replay():
    if len(replay) < 4:
        return
    random.sample(replay, 4)


for step in range(STEPS):
    replay.append(learn())
    train_on_replay()
"""
ENDLESS["losses that are joined at last"] = """
losses = []
for step in range(STEPS):
    learn()
    losses.append(net(torch.randn(16, 16, device="cuda")).tanh().mean())
print(torch.stack(losses).mean().item())
"""
ENDLESS["every second step"] = """
kept = []
for step in range(STEPS):
    out = learn()
    if step % 2:
        continue
    kept.append(out)
"""
ENDLESS["best so far copied"] = """
copies = []
for step in range(STEPS):
    learn()
    copies.append([each.detach().clone() for each in net.parameters()])
    best = copies[-1]
"""

ENDLESS["replay that waits for a batch"] = """
replay = []


def train_on_replay():
    if len(replay) < 40:
        return
    random.sample(replay, 40)


for step in range(STEPS):
    replay.append(learn())
    train_on_replay()
"""

# --- innocent twins ---------------------------------------------------------------------------------------------------

ENDLESS["hooks that are never removed"] = """
for step in range(STEPS):
    net.register_forward_hook(lambda module, given, made, kept=learn(): None)
"""

ENDLESS["gradients by a hook"] = """
gradients = []
for step in range(STEPS):
    optimizer.zero_grad()
    out = net(torch.randn(16, 16, device="cuda"))
    out.register_hook(gradients.append)
    out.square().mean().backward()
    optimizer.step()
"""

ENDLESS["object array by step"] = """
outs = np.empty(STEPS, dtype=object)
for step in range(STEPS):
    outs[step] = learn()
"""

TWINS["growing batch"] = """
for step in range(STEPS):
    out = learn(16 + step)
"""
TWINS["sorted lengths"] = """
lengths = sorted(random.Random(0).randint(8, 500) for _ in range(STEPS))
for rows in lengths:
    out = learn(rows)
"""
TWINS["longest so far"] = """
longest = None
for step in range(STEPS):
    longest = learn(16 + step)
"""
TWINS["warming cache"] = """
masks = {}
for step in range(STEPS):
    rows = 16 + step % 5
    if rows not in masks:
        masks[rows] = torch.zeros(rows, rows, device="cuda")
    learn(rows)
"""
TWINS["unfrozen one by one"] = """
layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).cuda()
adam = torch.optim.AdamW(layers.parameters())
layers.requires_grad_(False)
for step in range(STEPS):
    layers[-1 - min(step, 5)].requires_grad_(True)
    adam.zero_grad()
    layers(torch.randn(16, 16, device="cuda")).mean().backward()
    adam.step()
    learn()
"""
TWINS["weak values"] = """
by_step = weakref.WeakValueDictionary()
for step in range(STEPS):
    out = learn()
    by_step[step] = out
"""
TWINS["shadow in place"] = """
shadow = [each.detach().clone() for each in net.parameters()]
for step in range(STEPS):
    learn()
    for mine, each in zip(shadow, net.parameters()):
        mine.lerp_(each.detach(), 0.1)
"""
TWINS["bank of MoCo"] = """
bank, place = torch.zeros(16 * N, 16, device="cuda"), 0
for step in range(STEPS):
    bank[place:place + 16] = learn()
    place = (place + 16) % bank.size(0)
"""
TWINS["fetched ahead"] = """
ahead = collections.deque(torch.randn(16, 16, device="cuda") for _ in range(2))
for step in range(STEPS):
    ahead.append(learn())
    ahead.popleft()
"""
TWINS["confusion matrix"] = """
counts = torch.zeros(16, 16, device="cuda")
for step in range(STEPS):
    counts += learn().T @ learn()
"""
TWINS["sums of numbers"] = """
sums = collections.defaultdict(float)
for step in range(STEPS):
    sums["loss"] += learn().mean().item()
"""
TWINS["shifted list"] = """
window = [torch.zeros(16, 16, device="cuda")] * 4
for step in range(STEPS):
    window = window[1:] + [learn()]
"""
TWINS["longer sequences"] = """
for step in range(STEPS):
    rows = min(16 * (1 + step // 2), 160)
    states = [learn(rows) for _ in range(1 + step % 3)]
    del states
"""
TWINS["grown to the largest"] = """
scratch = torch.empty(0, device="cuda")
for step in range(STEPS):
    rows = 16 * (1 + step % 7)
    if scratch.numel() < rows * 16:
        scratch = torch.empty(rows * 16, device="cuda")
    learn(rows)
"""
TWINS["two models in turn"] = """
other = nn.Linear(32, 32).cuda()
adam = torch.optim.AdamW(other.parameters())
for step in range(STEPS):
    learn()
    if step >= 2:
        other(torch.randn(16, 32, device="cuda")).mean().backward()
        adam.step()
        adam.zero_grad()
"""
