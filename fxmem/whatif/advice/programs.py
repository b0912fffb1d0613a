"""Changes to a program: it runs again with each."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from fxmem.memory.figures import find_outermost
from fxmem.records.advice import Effect
from fxmem.records.parts import Growth
from fxmem.records.plan import Plan
from fxmem.records.profile import Kind, Phase, Profile, Report, SourceLine
from fxmem.simulation.code.source_lines import is_own_file
from fxmem.whatif.advice import pipelines, statements
from fxmem.whatif.advice.changes import EXPANDABLE, expandable_segments
from fxmem.whatif.advice.in_place import free_by_record, release_changes, sort_activations
from fxmem.whatif.advice.optimizer import FORMS
from fxmem.whatif.advice.statements import Edits
from fxmem.whatif.advice.variant import (
    AnyChange,
    Bench,
    Bound,
    NotApplicableError,
    RunWay,
    bound_saving,
    code_for_modules,
    known_change,
    list_refused,
)
from fxmem.whatif.program_step import ProgramCommand, ProgramEdits, ProgramStep
from fxmem.whatif.source_edits import SourceEdit, apply_edits, write_patch

_MOST_GROWING: Final = 3
"""Owners that grow whose lines are rewritten."""
_PLAIN: Final = dict.fromkeys(("ReLU", "ReLU6", "Hardtanh"), "")
"""Activations without a slope, whose results are the same to the bit in place."""
_GRAPHS: Final[tuple[tuple[str, str, Effect, tuple[str, ...]], ...]] = (
    ("no-grad", "no graph where none is needed", "none", ("unused-graph", "unstepped-gradients")),
    ("fixed-target", "no graph of the target", "training", ("trained-target",)),
)
"""Changes that make no graph, and the causes that ask for each."""
_HALF, _BF16 = ("bfloat16", "float16"), "torch.bfloat16"


@dataclasses.dataclass(frozen=True)
class ProgramWay(RunWay):
    """One way of running a program."""

    step: ProgramStep
    """As it is."""
    edits: ProgramEdits

    unseen_edits: Edits | None = ()
    """What writes the way's environment, which an analysis need not run; None: it is written nowhere."""

    def edit(self, **changes: Any) -> ProgramWay:
        """Return the way with other edits."""
        return dataclasses.replace(self, edits=dataclasses.replace(self.edits, **changes))

    def rewrite(self, edits: Edits) -> ProgramWay:
        """Return the way with edits of the program's source. Raises NotApplicableError where they are of lines that
        are edited already."""
        found = tuple(dict.fromkeys((*self.edits.source_edits, *edits)))
        try:
            apply_edits(found)
        except ValueError as error:
            raise NotApplicableError("its line is changed already") from error
        return self.edit(source_edits=found)

    def write_patch(self) -> str:
        """See `RunWay.write_patch`: of files below the working folder."""
        is_written = self.edits == ProgramEdits(source_edits=self.edits.source_edits)
        if self.unseen_edits is None or self.released or not is_written:
            return ""
        edits = (*self.edits.source_edits, *self.unseen_edits)
        if not all(is_own_file(each.path) for each in edits):
            return ""
        try:
            return write_patch(edits, os.getcwd())
        except ValueError:
            return ""

    def is_like(self, other: ProgramWay) -> bool:
        """Whether both have the same edits."""
        return self.edits == other.edits

    def analyse(self) -> ProgramStep:
        """Run the program."""
        return self.step.vary(self.edits)


ProgramChange = AnyChange[ProgramWay, ProgramStep]


class ProgramBench(Bench[ProgramWay, ProgramStep]):
    """Tries changes to a program."""

    def __init__(self, step: ProgramStep) -> None:
        super().__init__(step, ProgramWay(step, step.edits, environ=dict(os.environ)))

    def changes(self) -> Iterator[ProgramChange]:
        """Every change that can be tried."""
        profile = self.step.profile
        bound = functools.partial(bound_saving, self.step, self.start.environ)
        yield _in_place_change(self.step, self._files, bound)
        if profile.step.mode == "train":
            span = _find_forward(profile) if self._files else None
            edits = () if span is None else statements.run_within(*span, self._autocast)
            code, make = f"with {self._autocast}:\n    loss = loss_fn(model(x))", self._halve(edits, {"autocast": True})
            yield AnyChange("bf16-autocast", "bfloat16 autocast", "rounding", code, make)
            names = dict.fromkeys(profile.step.program.optimizers if profile.step.program else ())
            for form, title, argument in FORMS:
                code = f"# give {' and '.join(names) or 'the optimizer'} this argument\n{argument}"
                key, most = f"{form}-optimizer", bound(of=Phase.OPTIMIZER)
                edits = statements.add_argument(self._files, names, argument, ("fused", "foreach"))
                make = _write(edits, {"optimizer_form": form})
                yield AnyChange(key, title, "none", code, make, excludes="optimizer", most=most)
            gradients = [index for index, each in enumerate(profile.storages) if each.kind is Kind.GRADIENT]
            most = bound({*gradients}, of=Phase.OPTIMIZER)
            edits = statements.add_after(self._files, names, "import fxmem\nfxmem.release_gradients({})")
            yield known_change("within-backward", _write(edits, {"releases_gradients": True}), most)
        else:
            for way, edits in pipelines.list_ways(self._files, profile):
                yield AnyChange(way.key, way.title, way.effect, way.code, _write(edits), excludes=way.excludes)
            yield from self._half_changes()
        yield from self._graph_changes()
        yield from growth_changes(self.step)
        if self._is_replayed:
            yield from release_changes(self.step, self._release)
        if profile.target.device == "cuda":
            change = expandable_segments()
            yield dataclasses.replace(change, make=functools.partial(self._extend_segments, change.make))

    def _graph_changes(self) -> Iterator[ProgramChange]:
        """Yield a change that makes no graphs where no backward follows, and one for each graph that is retained."""
        profile = self.step.profile
        for key, title, effect, causes in _GRAPHS if self._files else ():
            places = {each.place for each in self.step.findings if each.cause in causes and each.place}
            calls = [self._run_calls_within("torch.no_grad()", [each]) for each in self._calls if each.place in places]
            if changed := [each for each in calls if each]:
                code = "\n".join(map(statements.write_statement, changed))
                edits = tuple(dict.fromkeys(edit for each in changed for edit in each))
                yield AnyChange(key, title, effect, code, _write(edits), f"at {' and '.join(sorted(places))}")
        loaded = (each.place for each in self.step.findings if each.cause == "weights-twice" and each.place)
        for file, _, number in (each.rpartition(":") for each in (loaded if self._files else ())):
            if edits := statements.set_argument(file, int(number), "load", 'map_location="cpu"'):
                code, title = 'torch.load(path, map_location="cpu")', "the checkpoint on the host"
                yield AnyChange("load-on-host", title, "none", code, _write(edits), f"at {file}:{number}")
        written = [each for each in self.step.findings if each.cause == "written-activation" and each.place]
        for each, (file, _, number) in ((each, each.place.rpartition(":")) for each in written if self._files):
            code = each.change.partition(" in its place")[0]
            if is_own_file(file) and (edits := statements.call_activation(file, int(number), code)):
                title = f"one call for the activation at {os.path.basename(each.place)}"
                yield AnyChange(f"activation:{each.place}", title, "rounding", code, _write(edits))
        if profile.step.mode == "train":
            for file in self._files:
                for line, dropped in statements.drop_argument(file, "backward", "retain_graph=True"):
                    place = f"{os.path.basename(file)}:{line}"
                    title = f"no graph retained at {place}"
                    yield AnyChange(f"free-graph:{place}", title, "none", "loss.backward()", _write(dropped))

    def _half_changes(self) -> Iterator[ProgramChange]:
        """Yield bfloat16 for a program that only runs: for what its models compute, and for their weights as well,
        whose inputs may stay as they are under autocast."""
        around = self._run_calls_within(self._autocast, self._calls)
        weights = [each for source in self._calls for each in statements.cast_called(source.file, source.line, _BF16)]
        code = f"with {self._autocast}:\n    out = model(x)"
        ways = [("bf16-autocast", "bfloat16 autocast", code, around)] if around else []
        if around and weights:
            code = f"{statements.write_statement(tuple(weights))}\n{code}"
            ways.append(("bf16-weights", "weights in bfloat16, under autocast", code, (*weights, *around)))
        for key, title, code, edits in ways:
            yield AnyChange(key, title, "rounding", code, self._halve(edits), excludes="dtype")

    @functools.cached_property
    def _calls(self) -> list[SourceLine]:
        """The program's own lines that call its models."""
        found = dict.fromkeys(each.source for each in find_outermost(self.step.profile) if each.source)
        return [each for each in found if self._files and is_own_file(each.file)]

    def _run_calls_within(self, context: str, calls: Iterable[SourceLine]) -> Edits:
        edits: list[SourceEdit] = []
        for each in calls:
            within = statements.run_within(each.file, each.line, each.line, context)
            edits += (*within, *statements.add_import(each.file, "import torch")) if within else ()
        return tuple(dict.fromkeys(edits))

    @functools.cached_property
    def _files(self) -> list[str]:
        """The program's own files; none of a function, whose source stays as it is."""
        program = self.step.program
        if not isinstance(program, ProgramCommand):
            return []
        profile = self.step.profile
        sources = [each.source for each in profile.nodes] + [each.source for each in profile.calls]
        files = [program.launch.program, *(each.file for each in sources if each is not None)]
        paths = dict.fromkeys(map(os.path.realpath, files))
        return [each for each in paths if is_own_file(each) and each.endswith(".py")]

    @property
    def _autocast(self) -> str:
        return f'torch.autocast("{self.step.profile.target.device}", dtype={_BF16})'

    def _halve(self, edits: Edits, otherwise: dict[str, Any] | None = None) -> Callable[[ProgramWay, Any], ProgramWay]:
        def make(way: ProgramWay, step: ProgramStep) -> ProgramWay:
            if any(output.dtype in _HALF for node in step.profile.nodes for output in node.outputs):
                raise NotApplicableError("the program computes in half precision already")
            return _write(edits, otherwise)(way, step)

        return make

    def _release(self, names: frozenset[str], node: int, holder: str) -> Callable[[Any, Any], Any]:
        """See `release_changes`: what holds the results is bound where the node's line is, or one that leads to it."""
        profile = self.step.profile
        calls = (each for each in reversed(profile.calls) if each.first_node <= node < each.last_node)
        for source in (profile.nodes[node].source, *(each.source for each in calls)):
            if self._files and source and (edits := statements.delete_name(source.file, source.line, holder)):
                return _write(edits)
        return free_by_record(names)

    @functools.cached_property
    def _is_replayed(self) -> bool:
        """Whether the record gives its peak again on an allocator: not where the program empties the cache, nor where
        calls were made of others. What trains is taken to."""
        peaks = self.step.peak, self.step.replay(self.start.environ).peak
        is_same = len({(each.counted_bytes, each.reserved_bytes) for each in peaks}) == 1
        return self.step.profile.step.mode == "train" or is_same

    def _extend_segments(self, make: Callable[[Any, Any], Any], way: ProgramWay, step: ProgramStep) -> ProgramWay:
        edits: Edits = ()
        program = self.step.program
        if isinstance(program, ProgramCommand) and (script := os.path.realpath(program.launch.program)) in self._files:
            edits = statements.set_variable(script, *next(iter(EXPANDABLE.items())))
        if not self._is_replayed:
            if not edits:
                raise NotApplicableError("the record of the program does not give its allocator's peak again")
            return way.rewrite(edits)
        made: ProgramWay = make(way, step)
        return dataclasses.replace(made, unseen_edits=edits or None)

    def takes_long(self, change: ProgramChange) -> bool:
        """See `Bench.takes_long`: a script runs again. A function may have to be run where it is."""
        return isinstance(self.step.program, ProgramCommand)

    def read(self, way: ProgramWay, report: Report) -> ProgramStep:
        """See `Bench.read`."""
        step = way.analyse()
        step.profile = report
        return step

    def write_plan(self, plan: Plan, key: str) -> ProgramChange | None:
        """See `Bench.write_plan`."""
        edits = _write_edits(plan) if self._files else ()
        title = f"activation checkpoints: {plan.extent}"
        return AnyChange(key, title, "none", "", _write(edits)) if edits else None

    def plan_code(self, plan: Plan, budget: float) -> tuple[str, str]:
        """See `Bench.plan_code`."""
        program = self.step.program
        if isinstance(program, ProgramCommand):
            given = shlex.join([*program.given, "--budget", str(budget), "--json", "plan.json"])
            made = f"# fxmem plan {given} --run {program.name}\nplan = fxmem.load_plan('plan.json')"
        else:
            options = {"target": program.target.spelling, **program.options}
            made = f"plan = fxmem.plan(train, budget={budget}, {', '.join(f'{k}={v!r}' for k, v in options.items())})"
        return f"import fxmem\n{made}\nmodel = fxmem.checkpoint(model, plan)", "before the model is called"


_IMPORTS: Final = {
    "functools.": "import functools",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "fxmem.": "import fxmem",
}
"""What lines of a plan need, by a word in them."""


def _write_edits(plan: Plan) -> Edits:
    """The edits of a plan's regions; none where one has no edit, or one of an installed package."""
    edits: list[SourceEdit] = []
    for edit in dict.fromkeys(region.edit for region in plan.all_regions()):
        written: Edits = ()
        if edit is not None and is_own_file(edit.source.file):
            file = edit.source.file
            written = statements.replace_statement(file, edit.source.line, edit.source.code, edit.after)
            needed = [line for word, line in _IMPORTS.items() if word in edit.after]
            edits += [each for line in needed for each in statements.add_import(file, line)]
        if not written:
            return ()
        edits += written
    return tuple(dict.fromkeys(edits))


def _write(edits: Edits, otherwise: dict[str, Any] | None = None) -> Callable[[ProgramWay, Any], ProgramWay]:
    """Edit the source where it is known how, else the objects that it makes."""
    return lambda way, _: way.rewrite(edits) if edits else way.edit(**(otherwise or {}))


def _in_place_change(step: ProgramStep, files: Iterable[str], bound: Callable[[set[int]], Bound]) -> ProgramChange:
    profile = step.profile
    allowed, refused = sort_activations(profile, lambda node: _PLAIN.get(node.module_type))
    kinds = {node.module_type for node in profile.nodes if node.module in allowed}
    edits = () if refused else statements.add_argument(files, kinds, "inplace=True")

    def make(way: ProgramWay, _: ProgramStep) -> ProgramWay:
        if not allowed:
            raise NotApplicableError(
                list_refused(refused) or "the program has no activation modules that could run in place and do not"
            )
        return _write(edits, {"in_place": tuple(allowed)})(way, step)

    inner = [path.partition(".")[2] for path in allowed]
    code = code_for_modules(inner, "module.inplace = True")
    note = f"not {list_refused(refused)}" if refused else ""
    made = (output.storage for node in profile.nodes if node.module in allowed for output in node.outputs)
    most = bound({each for each in made if each is not None}) if allowed else None
    return AnyChange("inplace", "activations in place", "none", code, make, note=note, most=most)


def _find_forward(profile: Profile) -> tuple[str, int, int] | None:
    """The file, and the lines from the call of a model to where its loss is made, before the first backward; None where
    they are not the program's own."""
    # A round begins with what follows the optimizer's step of the one before.
    begin, call = next(((c.first_node, c.source) for c in profile.calls if "." not in c.module and c.source), (0, None))
    if call is None or not is_own_file(call.file):
        return None
    end = next((index for index, op in enumerate(profile.ops) if op.phase is Phase.BACKWARD), None)
    there = (profile.nodes[op.node].source for op in profile.ops[:end] if op.node >= begin)
    own = (each.line for each in there if each and (each.file, each.function) == (call.file, call.function))
    return call.file, call.line, max([call.line, *own])


# --- what grows -------------------------------------------------------------------------------------------------------


def growth_changes(step: ProgramStep) -> Iterator[AnyChange[Any, Any]]:
    """Yield a change for each line by which a program keeps more after each step, or batch of an evaluation, the most
    first, and one for all of them: two may keep the same."""
    program = step.profile.step.program
    grown = [] if program is None else [*program.grown, *(one for of in program.evaluations for one in of.grown)]
    lines = [_KeepingLine.find(each) for each in grown if each.kept_at][:_MOST_GROWING]
    for each in [*([lines] if len(lines) > 1 else []), *([line] for line in lines)]:
        owners = " and ".join(line.owner for line in each)
        code = "\n".join(statements.write_statement(line.edits) if line.edits else "" for line in each)
        note = "at " + " and ".join(line.place for line in each)
        title = f"keep nothing of the card in {owners}"
        make = functools.partial(_rewrite, each)
        yield AnyChange(f"let-go:{owners.replace(' and ', ',')}", title, "none", code, make, note)

    graphs = [each for each in grown if each.is_graph]
    places = dict.fromkeys(place for each in graphs for place in (each.kept_at, each.made_at) if place)
    found = {place: edits for place in places if (edits := _detach(place))}
    # Two lines may keep the same graph, as a sum and a sum of squares do.
    for chosen in [*([[*found]] if len(found) > 1 else []), *([place] for place in found)]:
        together = tuple(dict.fromkeys(edit for place in chosen for edit in found[place]))
        title = f"no graph of what {' and '.join(chosen)} makes"
        code = "\n".join(statements.write_statement(found[each]) for each in chosen)
        yield AnyChange(f"detach:{','.join(chosen)}", title, "none", code, _write(together))


def _detach(place: str) -> Edits:
    """Edits that let a line keep no graph; none where it is no line of the program's own that can be changed so."""
    file, _, line = place.rpartition(":")
    return statements.detach(file, int(line)) if is_own_file(os.path.realpath(file)) else ()


class _KeepingLine(NamedTuple):
    """A line by which an owner keeps more."""

    owner: str
    place: str
    edits: Edits

    @classmethod
    def find(cls, grown: Growth) -> _KeepingLine:
        owner = grown.holder.rpartition(" ")[2].rpartition(".")[2]
        file, _, line = grown.kept_at.rpartition(":")
        return cls(owner, grown.kept_at, statements.let_go(file, int(line), owner))


def _rewrite(lines: Sequence[_KeepingLine], way: ProgramWay, step: ProgramStep) -> ProgramWay:
    if not all(each.edits for each in lines):
        raise NotApplicableError("no simple way of writing its line is known: keep numbers, or .detach().cpu()")
    if not isinstance(step.program, ProgramCommand):
        raise NotApplicableError("a function's source stays as it is: try it on a script (fxmem advise --run)")
    return way.rewrite(tuple(edit for each in lines for edit in each.edits))
