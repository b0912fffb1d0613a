"""What a change to a step works on, and what comes of it: of a model's step here, of any step by `Bench`."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from torch import nn

from fxmem.errors import FxmemError
from fxmem.memory.allocator import read_settings
from fxmem.memory.budget import BudgetLike
from fxmem.memory.liveness import free_after_last_use
from fxmem.records.advice import Effect
from fxmem.records.plan import Plan
from fxmem.records.profile import Peak, Phase, Profile, Report
from fxmem.simulation.code.profiled_step import ProfiledStep, ReportedStep
from fxmem.simulation.ranks import MeshPlan
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.generation import AnyAnalysis, analyze_request
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif import verified_plan

# --- upper bounds on what a change frees, by the record of the step as it is ------------------------------------------


class Bound(NamedTuple):
    """The most that a change frees, in bytes."""

    allocated: int
    """Of the peak."""
    reserved: int
    """Of what the allocator reserves, as it is replayed."""


def bound_saving(
    step: ProfiledStep, environ: Mapping[str, str], gone: Collection[int] = (), *, of: Phase | None = None
) -> Bound:
    """The most that a change frees which alters certain storages alone: all that there is without them stays.

    Args:
        step: as it is.
        environ: contains the allocator's settings.
        gone: indices of the storages.
        of: a phase, all storages of which are among them.
    """
    profile, peak = step.profile, step.peak
    spans = [(span.begin, span.end) for span in profile.phases if span.phase is of]
    storages = [
        each.model_copy(update={"nbytes": 0})
        if index in gone or any(begin <= each.birth < end for begin, end in spans)
        else each
        for index, each in enumerate(profile.storages)
    ]
    left = step.replay(environ, profile.model_copy(update={"storages": tuple(storages)})).peak
    allocated = max(peak.counted_bytes - left.counted_bytes, 0)
    return Bound(allocated, max((peak.reserved_bytes or 0) - (left.reserved_bytes or 0), 0))


# --- what a change to a step works on, and what comes of it: of a model's step here, of any step by `Bench` -----------


_CODE_WIDTH = 58
"""Columns of a line of code, so that it is not broken in an 80-column terminal and can be pasted."""
_LISTED = 3
"""Of what is refused, how many are named."""


class NotApplicableError(FxmemError):
    """The change does not apply here; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunWay:
    """One way of running a step."""

    environ: Mapping[str, str]
    """Where the allocator's settings are found."""
    released: frozenset[str] = frozenset()
    """Names of nodes whose results the program frees after their last use."""

    def is_like(self, other: Self) -> bool:
        """Whether both are one to an analysis, which sees neither of those."""
        raise NotImplementedError

    def analyse(self) -> ProfiledStep:
        """Analyse the step run in this way."""
        raise NotImplementedError

    def write_patch(self) -> str:
        """The way as a patch of the user's own files; empty where it is not one of their lines alone."""
        return ""

    def within(self) -> contextlib.AbstractContextManager[None]:
        """Where it is to be analysed: anywhere, unless a way says otherwise."""
        return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Variant(RunWay):
    """One way of running the step, or the generation, of a model."""

    model: nn.Module
    request: StepRequest
    around: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...] = ()
    """What the step runs within."""

    def is_like(self, other: Variant) -> bool:
        """Whether both are of the same model and request."""
        return self.model is other.model and self.request is other.request and self.around == other.around

    def analyse(self) -> AnyAnalysis:
        """Analyse the model."""
        with self.within():
            return analyze_request(self.model, self.request)

    def replace_step(self, model: nn.Module | None = None, **changes: Any) -> Variant:
        """Return the variant with other settings of the step, and another model if given."""
        request = dataclasses.replace(self.request, **changes)
        return dataclasses.replace(self, model=self.model if model is None else model, request=request)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Where the step is to be analysed."""
        with contextlib.ExitStack() as stack:
            for enter in self.around:
                stack.enter_context(enter())
            yield


WayT = TypeVar("WayT", bound=RunWay)
"""A way of running a step: a `Variant` of a model's."""
StepT = TypeVar("StepT", bound=ProfiledStep)


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[WayT, StepT]):
    """A way of running the step, analysed."""

    variant: WayT
    analysis: StepT
    """What an analysis sees of it."""
    replayed: ProfiledStep
    """The same with the way's allocator, and with what the program frees."""

    @property
    def profile(self) -> Profile:
        """The step, with what the program frees."""
        return self.replayed.profile

    @property
    def peak(self) -> Peak:
        """The peak, with the way's allocator."""
        return self.replayed.peak


@dataclasses.dataclass(frozen=True)
class AnyChange(Generic[WayT, StepT]):
    """One thing to do differently."""

    key: str
    title: str
    effect: Effect
    code: str
    make: Callable[[WayT, StepT], WayT]
    """The way changed; raises NotApplicableError. The step is the unchanged one."""
    note: str = ""
    excludes: str = ""
    """Of changes with the same word here only one can be made."""
    most: Bound | None = None
    """The most that it frees, by the record of the step as it is; None: no bound is known."""


Change = AnyChange[Variant, Analysis]
"""Of a model's step."""
TABLES: Final = tomllib.loads(Path(__file__).with_name("changes.toml").read_text(encoding="utf-8"))
"""Changes that are the same for every step, by their keys; those that are tried first; ways to set pipelines up."""


def known_change(key: str, make: Callable[[WayT, StepT], WayT], most: Bound | None = None) -> AnyChange[WayT, StepT]:
    """The change of this key in `changes.toml`."""
    return AnyChange(key, make=make, most=most, **TABLES["changes"][key])


class Bench(Generic[WayT, StepT]):
    """Where changes to one step are tried.

    Args:
        step: as it is.
        start: how it runs as it is.
        host_memory: as in `fxmem.plan`.
    """

    def __init__(self, step: StepT, start: WayT, host_memory: int | str | None = None) -> None:
        self.step, self.start, self.host_memory = step, start, host_memory

    def changes(self) -> Iterator[AnyChange[WayT, StepT]]:
        """Every change that can be tried."""
        raise NotImplementedError

    def takes_long(self, change: AnyChange[WayT, StepT]) -> bool:
        """Whether to try a change takes many times as long as most do."""
        return False

    def read(self, way: WayT, report: Report) -> ProfiledStep:
        """A way of running the step as it was analysed elsewhere."""
        return ReportedStep(report)

    def parts(self, reached: Outcome[WayT, StepT]) -> int:
        """How many micro-batches there are to one of the step as it is."""
        return 1

    def plan(
        self,
        reached: Outcome[WayT, StepT] | None,
        strategy: str,
        budget: BudgetLike | None,
        progress: Callable[[str], None],
    ) -> Plan:
        """Plan checkpoints, of the step as it is or on top of changes."""
        with contextlib.nullcontext() if reached is None else reached.variant.within():
            base: ProfiledStep = self.step if reached is None else reached.analysis
            if reached is not None and base.is_fixed:  # read
                base = reached.variant.analyse()
            host_memory = self.host_memory if strategy == "auto" else None
            return verified_plan.plan(base, strategy, budget, host_memory=host_memory, progress=progress)

    def plan_ends(self, progress: Callable[[str], None]) -> Plan:
        """Plan checkpoints of the step as it is: the plan of the smallest product of peak and time, its curve ending
        with the one that reaches lowest."""
        return verified_plan.plan_ends(self.step, host_memory=self.host_memory, progress=progress)

    def plan_code(self, plan: Plan, budget: float) -> tuple[str, str]:
        """What to write for a plan, which keeps this budget, and what to know before."""
        raise NotImplementedError

    def write_plan(self, plan: Plan, key: str) -> AnyChange[WayT, StepT] | None:
        """The plan as a change of the user's own lines; None where it is not one of those alone."""
        return None

    def has_norms(self) -> bool:
        """Whether plans of strategy "norms" are worth a try."""
        return False


def analyse_way(way: WayT, known: Iterable[Outcome[WayT, Any]] = ()) -> Outcome[WayT, Any]:
    """Analyse a way of running a step. The analysis of a known one that is like it is reused."""
    found = next((each.analysis for each in known if way.is_like(each.variant)), None)
    analysis = way.analyse() if found is None else found
    return replay_way(way, analysis)


def replay_way(way: WayT, analysis: StepT) -> Outcome[WayT, StepT]:
    """What comes of a way of running a step that has been analysed."""
    if not way.released and read_settings(way.environ) == read_settings(analysis.environ):
        return Outcome(way, analysis, analysis)
    return Outcome(way, analysis, analysis.replay(way.environ, free_after_last_use(analysis.profile, way.released)))


def code_for_modules(paths: Sequence[str], statement: str) -> str:
    """Code that does something to each of several modules, called `module` in the statement."""
    paths = textwrap.fill(
        " ".join(paths), _CODE_WIDTH, initial_indent=" " * 15, break_long_words=False, break_on_hyphens=False
    ).strip()
    return f'for path in """{paths}""".split():\n    module = model.get_submodule(path)\n    {statement}'


def list_refused(refused: Mapping[str, str]) -> str:
    """What is refused, each with its reason."""
    named = [f"{what} ({reason})" for what, reason in list(refused.items())[:_LISTED]]
    return ", ".join(named) + (f" and {len(refused) - _LISTED} more" if len(refused) > _LISTED else "")


# --- where a rank's changes are written -------------------------------------------------------------------------------

_OF_THE_MODEL = ("inplace", "bf16-weights", "channels-last", "sdpa")
"""Keys of changes to the model, and what those begin with that freeze a part."""
_FREEZING = "freeze:"
_POLICY = """from torch.distributed.fsdp import MixedPrecisionPolicy
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
fully_shard(..., mp_policy=policy)"""


def place_change(change: Change, request: StepRequest) -> Change:
    """A change as it is written for a rank's step; any other step's as it is."""
    if request.world is None:
        return change
    plan = request.parallelize
    if change.key == "bf16-autocast" and isinstance(plan, MeshPlan) and plan.takes_precision:  # of what is gathered
        title = "bfloat16 in FSDP's gathers and in the products"
        return dataclasses.replace(change, title=title, code=_POLICY, note="of each fully_shard")
    if change.key not in _OF_THE_MODEL and not change.key.startswith(_FREEZING):
        return change
    return dataclasses.replace(change, note="; ".join(filter(None, (_name_place(request), change.note))))


def describe_ranks(request: StepRequest, profile: Profile) -> tuple[str, str]:
    """What `fxmem.analyze` is given for the same rank, and where its plan is kept."""
    ranks, plan = profile.step.ranks, request.parallelize
    if ranks is None:
        return "", ""
    if not isinstance(plan, MeshPlan):
        arguments = f", ranks={ranks.world}, rank={ranks.rank}, parallelize={_name_function(request) or 'parallelize'}"
        return arguments, f"the last line {_name_place(request)}; "
    arguments = f", mesh={plan.mesh.dimensions}, rank={ranks.rank}".replace("'", '"')
    if plan.reshard_after_forward is not None:
        arguments += f", reshard_after_forward={plan.reshard_after_forward}"
    if plan.offload:
        arguments += ', offload="cpu"'
    return arguments, f"the last line {_name_place(request)}; "


def _name_place(request: StepRequest) -> str:
    if isinstance(request.parallelize, MeshPlan):
        return "before the model is sharded"
    return f"in {_name_function(request) or 'the function that shards the model'}, before it shards the model"


def _name_function(request: StepRequest) -> str:
    """Of the function that shards the model, unless it has none to write."""
    name = getattr(request.parallelize, "__name__", "")
    return name if name.isidentifier() else ""
