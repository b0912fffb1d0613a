"""Whose a storage is that outlives a step.

What optimizers keep is named by one rule for steps of models and for programs. A program's modules are named here as it
makes them; a step names its model's tensors itself, before it runs and in the order in which they move to the card.
What neither has is looked for in all that the program holds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import queue
import re
import sys
import types
from collections import ChainMap, Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.profile import Kind
from fxmem.records.units import BUCKET, OF_FRAMES, OF_GRAPH
from fxmem.simulation.code.round_rule import Owner, find_names, split_path
from fxmem.simulation.code.source_lines import loop_variables, program_files, program_frames, program_modules, variables
from fxmem.simulation.code.source_trees import find_number
from fxmem.simulation.code.source_uses import Limit, find_limits, has_limits, read_sources
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.recording.referrers import find_keepers

_NOT_YET_NAMED: Final[dict[Kind, tuple[Kind | None, ...]]] = {
    Kind.PARAMETER: (None, Kind.BUFFER, Kind.INPUT, Kind.SAVED, Kind.OUTPUT),
    Kind.BUFFER: (None, Kind.INPUT, Kind.SAVED),
    Kind.OPTIMIZER_STATE: (None, Kind.BUFFER, Kind.INPUT, Kind.SAVED),
}
"""By kind, those that it takes the place of."""


_SHARD: Final = "ds_tensor"
"""The attribute of a parameter in which DeepSpeed's ZeRO-3 has this rank's shard of it (since 0.3.14)."""


def name_modules(log: StepLog, modules: Iterable[tuple[torch.nn.Module, str]]) -> dict[int, str]:
    """Name what modules keep, as far as a program has made it; the names of their parameters by `id`."""
    names: dict[int, str] = {}
    for module, root in modules:
        for path, parameter in module.named_parameters():
            name = f"{root}.{path}"
            if names.setdefault(id(parameter), name) != name:
                continue
            flat = f"{root}, flat" if _is_part(parameter) else name
            log.resident(parameter, Kind.PARAMETER, flat, _NOT_YET_NAMED[Kind.PARAMETER])
            if isinstance(shard := getattr(parameter, _SHARD, None), torch.Tensor):
                log.resident(shard, Kind.PARAMETER, f"{root}, shards", _NOT_YET_NAMED[Kind.PARAMETER])
            if parameter.grad is not None:
                bucket = BUCKET if _is_part(parameter.grad) else f"{name}.grad"
                log.resident(parameter.grad, Kind.GRADIENT, bucket, None)
        for path, buffer in module.named_buffers():
            log.resident(buffer, Kind.BUFFER, f"{root}.{path}", _NOT_YET_NAMED[Kind.BUFFER])
        note_derived(log, module)
    return names


def note_derived(log: StepLog, module: torch.nn.Module) -> None:
    """Note which buffers of a module no checkpoint has: what it makes of its settings alone."""
    for buffer in torch_modules.derived_buffers(module):
        for part in torch_wrappers.parts(buffer):
            if (index := log.find_storage(part)) is not None:
                log.storages[index].is_derived = True


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a larger one, as parameters and gradients of a rank do that are sent together."""
    parts = list(torch_wrappers.parts(tensor))
    return len(parts) == 1 and parts[0] is tensor and tensor.untyped_storage().nbytes() > tensor.nbytes


def name_optimizer_state(log: StepLog, optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """Name what optimizers keep: the tensors of their state, each after its parameter, and master weights.

    Args:
        log: of the storages.
        optimizers: those that have stepped, or may have.
        names: of parameters, by `id`.
    """
    for optimizer in optimizers:
        masters = _find_master_weights(optimizer, names)
        names = {**names, **{id(each): name for name, each in masters.items()}}
        for name, master in masters.items():
            log.resident(master, Kind.OPTIMIZER_STATE, name, _NOT_YET_NAMED[Kind.OPTIMIZER_STATE])
            if master.grad is not None:
                log.resident(master.grad, Kind.GRADIENT, f"{name}.grad", _NOT_YET_NAMED[Kind.BUFFER])
        for parameter, state in torch_common.optimizer_state(optimizer).items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    name = f"{names.get(id(parameter), '')}.{key}".lstrip(".")
                    log.resident(value, Kind.OPTIMIZER_STATE, name, _NOT_YET_NAMED[Kind.OPTIMIZER_STATE])


def _find_master_weights(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The copies of weights that an optimizer steps in the place of a model's parameters, by name.

    They are no `nn.Parameter`, and flat: each rank has its part of many in one, as ZeRO shares them. One that steps a
    model's own parameters has none.
    """
    stepped = [each for group in optimizer.param_groups for each in group["params"]]
    if not names or any(id(each) in names for each in stepped):
        return {}
    flat = [each for each in stepped if each.dim() == 1 and not isinstance(each, torch.nn.Parameter)]
    return {f"master weights[{index}]" if len(flat) > 1 else "master weights": each for index, each in enumerate(flat)}


# --- what the program holds -------------------------------------------------------------------------------------------

Place = tuple[str, Any]
"""What the program calls something, and the thing."""
Places = Iterable[tuple[Callable[[], Iterable[Place]], Kind | None]]
"""What is looked through, in this order, and the kind of what has none."""
Bounds = dict[str, dict[int, list[tuple[int, int]]]]
"""By container that the program's code bounds and by comparison that does, at each search how many elements it has, or
what counts them, and how many it may have."""


class _Scope(ChainMap[str, Any]):
    """What is beside something, and around it: the other attributes of its owner, then the program's variables."""

    owner: Owner = None
    first_owner: Owner = None
    """The owner of the list or dictionary around, if there is one."""


_CACHED: Final = type(functools.lru_cache(int))

_MOST_LOOKED_AT: Final = 100_000
"""Objects of one search; a program that holds more keeps few tensors among the last of them."""
_MOST_SEARCHES: Final = 3
"""For one storage: what only C++ holds has no name."""
_MOST_IF_FOUND: Final = 2
"""The same where it was found: by the next round its place in a list may be another's, and a graph alone keep it."""
_MOST_IN_VAIN: Final = 20
"""Searches of one program that do not find all, each of which looks at everything."""
_AS_MANY_IF_CUT: Final = 5
"""As many of these is one that looks at all that it may, and might go on."""
_ATOMS: Final = (
    *(int, float, complex, str, bytes, type(None), type(...), type, types.ModuleType, types.CodeType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.UntypedStorage),
)
"""What holds no tensor."""
OF_ARRAY: Final = "fxmem_memory"
"""The attribute of a stand-in's tensor, in which an array of numpy lies, that has the tensor it stands for."""
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_LONG: Final = 1000
"""Elements from which on a list whose first is a plain value is taken to hold nothing else."""


class Holders:
    """Finds what the program calls the storages that outlive a round.

    What modules and optimizers keep has its name already. All else is looked for from the program's own variables on,
    nearest first: through attributes, lists, dictionaries, functions with what they close over, and the graphs of
    autograd.

    Args:
        log: of the storages.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.bounds: Bounds = {}
        self._searches: Counter[int] = Counter()
        self._in_vain = 0

    def search(self, places: Places, saved: Mapping[int, int]) -> list[int]:
        """Look for every storage alive that has no name yet, or only a variable's; those that were not found.

        Args:
            places: what is looked through.
            saved: by storage that autograd keeps, the number of its node.
        """
        log, wanted = self._log, set[int]()
        for index in log.alive():
            storage = log.storages[index]
            most = _MOST_SEARCHES if not storage.holder or storage.holder.isidentifier() else _MOST_IF_FOUND
            if not storage.name and self._searches[index] < most:
                self._searches[index] += 1
                wanted.add(index)
        if not wanted or self._in_vain >= _MOST_IN_VAIN:
            return sorted(wanted)
        search = self._run(wanted, places, saved, self.bounds)
        for index, (path, _, kind) in search.found.items():
            log.storages[index].holder, log.storages[index].held_kind = path, kind
        is_in_vain = any(not log.storages[index].holder for index in search.wanted)
        self._in_vain += is_in_vain * (1 if search.is_whole else _AS_MANY_IF_CUT)
        return sorted(index for index in search.wanted if not log.storages[index].holder)

    def locate(
        self, wanted: Sequence[Collection[int]], places: Places, saved: Mapping[int, int]
    ) -> dict[int, tuple[str, Owner]]:
        """Who has these groups of storages now, and whose own that is; without those that no object of Python's has.

        Of a group of which the program's variables lead to some, the others are left out.
        """
        search = self._run({*itertools.chain(*wanted)}, places, saved, {})
        found = {index: (each.path, each.owner) for index, each in search.found.items()}
        lost = [each for each in wanted if found.keys().isdisjoint(each)]
        with torch_common.no_modes(), torch_common.pause_observers():
            return {**found, **find_keepers(self._log, lost)} if lost else found

    def _run(self, wanted: set[int], places: Places, saved: Mapping[int, int], bounds: Bounds) -> _Search:
        with torch_common.no_modes(), torch_common.pause_observers():
            search = _Search(self._log, wanted, saved, bounds)
            search.run([(name, value, kind) for find, kind in places for name, value in find()])
        return search


class Found(NamedTuple):
    """Where a storage was found."""

    path: str
    owner: Owner
    """Who has the first element on the way there as an attribute or variable."""
    kind: Kind | None = None


class _Search:
    """One search; the nearest place of a storage is its name.

    Args:
        log: of the storages.
        wanted: those that are looked for; without those that were found, afterwards.
        saved: as of `Holders.search`.
        bounds: to which those found are added.
    """

    def __init__(self, log: StepLog, wanted: set[int], saved: Mapping[int, int], bounds: Bounds) -> None:
        self._log, self.wanted, self._bounds = log, wanted, bounds
        self._held = Counter[int]()
        """By wanted storage, the bytes of the tensors in it that were found."""
        self.found: dict[int, Found] = {}
        self._saved: dict[int, list[int]] = {}
        """By node of autograd, the wanted storages that it keeps."""
        for index in wanted & saved.keys():
            self._saved.setdefault(saved[index], []).append(index)
        self._looked_at: dict[int, Any] = {}
        """By identity, what was looked at; kept, for identities are used again."""
        self._waiting: deque[tuple[str, Any, Kind | None, _Scope]] = deque()
        self._scope = _Scope({})
        """Of what is opened now."""
        self._frames, _ = program_frames(sys._getframe(1))
        self._files: dict[str, None] = dict.fromkeys(program_files(sys._getframe(1)))
        """Whose code may bound something."""
        self._sources = read_sources(self._files)
        self._is_limited: dict[str, bool] = {}
        """By the last word of a path, whether that code bounds something of such a name."""

    @property
    def is_whole(self) -> bool:
        """Whether all was looked through that had to be."""
        return len(self._looked_at) < _MOST_LOOKED_AT

    def run(self, places: Sequence[tuple[str, Any, Kind | None]]) -> None:
        """Look through these places, and what is in them, level by level."""
        all_wanted = {*self.wanted}
        self._scope = _Scope({name: value for name, value, _ in reversed(places)})
        for name, value, kind in places:
            self._wait(name, value, kind)
        while self._waiting and self.wanted and self.is_whole:
            path, value, kind, self._scope = self._waiting.popleft()
            # Whatever class an object pretends to be, it is asked for nothing that would run its own code.
            cls = type(value)
            if issubclass(cls, torch.Tensor):
                self._take(path, value, kind)
            elif issubclass(cls, dict):
                self._note_bounds(path, dict.__len__(value))
                self._scope = self._within(path, value)
                for key, each in list(dict.items(value)):
                    word = repr(key) if type(key) in (str, int) else "..."  # short and plain
                    self._wait(f"{path}[{word}]", each, kind)
            elif (base := next((each for each in _SEQUENCES if issubclass(cls, each)), None)) is not None:
                self._open_elements(path, base, value, kind)
            else:
                if issubclass(cls, BaseException):
                    self._wait(OF_FRAMES + path, value.__traceback__, kind)
                self._open(path, value, kind)
        for _, value, *_ in self._waiting:  # further views of what was found
            if issubclass(type(value), torch.Tensor):
                self._count(value)
        for index in all_wanted:
            self._log.storages[index].held_bytes = self._held[index]

    def _count(self, tensor: torch.Tensor) -> None:
        for part in torch_wrappers.parts(tensor):
            index = self._log.find_storage(part)
            if index is not None:
                self._held[index] += part.nbytes

    def _wait(self, path: str, value: Any, kind: Kind | None) -> None:
        """Look at a value later, unless it was, or holds nothing."""
        if issubclass(type(value), _ATOMS):
            return
        if id(value) not in self._looked_at:
            self._looked_at[id(value)] = value
            self._waiting.append((path, value, kind, self._scope))

    def _within(self, path: str, own: Mapping[Any, Any], owner: Owner = None) -> _Scope:
        """The scope of what is in an object, which has these names."""
        *around, variables_ = self._scope.maps
        found = _Scope(dict(own), *around[:_AROUND], variables_)
        found.owner = owner or self._scope.owner
        found.first_owner = self._scope.first_owner if "[" in path else found.owner
        return found

    def _take(self, path: str, tensor: torch.Tensor, kind: Kind | None) -> None:
        """Name what a tensor lies in, its gradient, and what its graph keeps."""
        kind = Kind.PARAMETER if isinstance(tensor, torch.nn.Parameter) else kind
        self._count(tensor)
        for inner, part in torch_wrappers.named_parts(tensor):
            self._name(self._log.find_storage(part), f"{path}.{inner}".rstrip("."), kind)
        if torch_autograd.is_view(tensor):
            return  # it may make its node anew where it is asked for it
        if not tensor.is_leaf:
            self._follow_graph(path, tensor.grad_fn)
        elif tensor.grad is not None:
            self._wait(f"{path}.grad", tensor.grad, Kind.GRADIENT)

    def _follow_graph(self, path: str, node: Any) -> None:
        nodes, name = [node], path if path.startswith(OF_GRAPH) else OF_GRAPH + path
        while nodes and self._saved:
            node = nodes.pop()
            if node is None or id(node) in self._looked_at:
                continue
            self._looked_at[id(node)] = node
            for index in self._saved.pop(torch_autograd.sequence_number(node), ()):
                self._name(index, name, None)
            nodes += [following for following, _ in node.next_functions]

    def _name(self, index: int | None, path: str, kind: Kind | None) -> None:
        if index in self.wanted:
            self.wanted.discard(index)
            self.found[index] = Found(path, self._scope.first_owner, kind)

    def _open_elements(self, path: str, base: Any, values: Any, kind: Kind | None) -> None:
        if base.__len__(values) >= _LONG and issubclass(type(next(base.__iter__(values))), _ATOMS):
            return
        self._note_bounds(path, base.__len__(values), deque.maxlen.__get__(values) if base is deque else None)
        names = getattr(type(values), "_fields", ())
        for position, each in enumerate(list(base.__iter__(values))):
            inner = f".{names[position]}" if position < len(names) else f"[{position}]"
            self._wait(path + inner, each, kind)

    def _open(self, path: str, value: Any, kind: Kind | None) -> None:
        """Look into an object later: its attributes, what a function closes over, what an iterator goes through."""
        if issubclass(type(value), torch.nn.Module):
            for name, each in (*torch_modules.own_tensors(value), *torch_modules.own_modules(value).items()):
                self._wait(f"{path}.{name}".lstrip("."), each, Kind.BUFFER if isinstance(each, torch.Tensor) else kind)
        elif issubclass(type(value), torch.optim.Optimizer):
            kind = Kind.OPTIMIZER_STATE
            if value.param_groups:  # `history_size` of L-BFGS
                self._files.setdefault(inspect.getfile(type(value)))
                self._sources = read_sources(self._files)
                self._scope = self._within(path, value.param_groups[0], type(value))
        elif issubclass(type(value), queue.Queue):
            self._note_bounds(f"{path}.queue", len(value.queue), value.maxsize or None)
        elif issubclass(type(value), types.FunctionType):
            own_values = _find_values(value)
            self._scope = self._within(path, own_values, value.__code__)
            for name, each in own_values.items():
                self._wait(f"{path}.{name}", each, kind)
            self._wait(path, value.__dict__, kind)
            return
        elif issubclass(type(value), types.GeneratorType):
            if value.gi_frame is not None:
                own_values = variables(value.gi_frame)
                self._scope = self._within(path, own_values, value.gi_code)
                for name, each in own_values.items():
                    self._wait(f"{path}.{name}", each, kind)
            return
        attributes = _find_attributes(value)
        self._scope = self._within(path, attributes, type(value))
        for name, each in attributes.items():
            is_modules = issubclass(type(value), torch.nn.Module)
            if is_modules and name.endswith("_hooks") and type(each) in (dict, OrderedDict):
                for hook in list(each.values()):
                    self._wait(f"hook of {path}", hook, kind)
                continue
            is_buffer = is_modules and isinstance(each, torch.Tensor)
            self._wait(f"{path}.{name}".lstrip("."), each, Kind.BUFFER if is_buffer else kind)
        if not attributes or issubclass(type(value), _CACHED):
            self._open_unseen(path, value, kind)

    def _open_unseen(self, path: str, value: Any, kind: Kind | None) -> None:
        """Look into an object of C later."""
        if issubclass(type(value), _CACHED):
            about = _CACHED.cache_info(value)
            self._note_bounds(path, about.currsize, about.maxsize)
        for each in _find_referents(value):
            self._wait(path, each, kind)

    def _note_bounds(self, path: str, count: int, most: int | None = None) -> None:
        """Note how full a container is that has a bound of its own, or that the program's code fills up to a number."""
        found = [] if most is None else [(count, most)]
        for each in self._find_limits(path):
            measured = count if each.measure is None else find_number(each.measure, self._scope)
            most = find_number(each.most, self._scope)
            found.append((measured, most) if measured is not None and most is not None else (0, -1))
        for number, (measured, most) in enumerate(found):
            self._bounds.setdefault(path, {}).setdefault(number, []).append((measured, most))

    def _find_limits(self, path: str) -> Sequence[Limit]:
        """The comparisons that bound what is called so, or what is in a dictionary under such a key."""
        word = _LAST_WORD.search(path)
        if word is None:
            return ()
        if word[1] not in self._is_limited:
            self._is_limited[word[1]] = has_limits(word[1], self._sources)
        if not self._is_limited[word[1]]:
            return ()
        names = [each._replace(name=word[1]) for each in find_names(path, self._scope.owner, self._frames)]
        return find_limits(names, split_path(path), self._sources)


_AROUND: Final = 3
"""Owners around something whose other attributes are looked at for its bound."""
_LAST_WORD: Final = re.compile(r"(\w+)\W*$")


def _find_values(function: types.FunctionType) -> dict[str, Any]:
    """What a function closes over, and its arguments' defaults, by name."""
    code, defaults, found = function.__code__, function.__defaults__ or (), dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet filled
            found[name] = cell.cell_contents
    names = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    return {**found, **dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


def _find_attributes(value: Any) -> dict[str, Any]:
    """What an object has in its dictionary, by name."""
    with contextlib.suppress(Exception):
        found = object.__getattribute__(value, "__dict__")
        if type(found) is dict:
            return dict(found)
    return {}


def _find_referents(value: Any) -> list[Any]:
    """What an object holds by Python's collector, and what an array of NumPy has or lies in, of which it knows none."""
    if "numpy" in sys.modules and issubclass(type(value), array := sys.modules["numpy"].ndarray):
        if array.dtype.__get__(value).hasobject:
            return list(array.flat.__get__(value))
        base = array.base.__get__(value)
        return [_find_attributes(base).get(OF_ARRAY, base)]
    return gc.get_referents(value)


def find_variables() -> Iterator[Place]:
    """The program's variables by their names: its functions' that run, its modules', then those of libraries' functions
    that run for it.

    A method's `self` is called by its class. What called the program is none of it.
    """
    own, libraries = program_frames(sys._getframe(1))
    for frame in own:
        yield from _name_variables(_find_lasting(frame))
    modules = {id(frame.f_globals): frame.f_globals for frame in own}
    for scope in modules.values():
        yield from _name_variables(scope)
    for frame in libraries:
        yield from _name_variables(_find_lasting(frame))
    for module, scope in program_modules():
        if id(scope) not in modules:
            yield from ((f"{module}.{name}", value) for name, value in _name_variables(scope))


def _find_lasting(frame: types.FrameType) -> dict[str, Any]:
    """A function's variables, without the `p` of `for p in parameters`: what was gone through has a name of its own."""
    found = variables(frame)
    tensors = {name: each for name, each in found.items() if issubclass(type(each), torch.Tensor)}
    weights = {name for name, each in tensors.items() if isinstance(each, torch.nn.Parameter)}
    passing = loop_variables(frame.f_code) if weights else frozenset()
    return {name: each for name, each in found.items() if name not in weights & passing}


def _name_variables(scope: Mapping[str, Any]) -> Iterator[Place]:
    for name, value in list(scope.items()):
        if issubclass(type(value), type) and value.__module__ == scope.get("__name__"):
            yield from ((f"{name}.{attribute}", each) for attribute, each in list(vars(value).items()))
        elif not name.startswith("__"):
            yield (type(value).__name__ if name == "self" else name), value
