"""Where changes to a rank's step are written: those to the whole model come before it is sharded."""

from __future__ import annotations

import dataclasses

from fxmem.records.profile import Profile
from fxmem.simulation.ranks import MeshPlan
from fxmem.simulation.request import StepRequest
from fxmem.whatif.advice.variant import Change

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
    if change.key == "bf16-autocast" and _gathers_by_precision(request):
        title = "bfloat16 in FSDP's gathers and in the products"
        return dataclasses.replace(change, title=title, code=_POLICY, note="of each fully_shard")
    if change.key not in _OF_THE_MODEL and not change.key.startswith(_FREEZING):
        return change
    return dataclasses.replace(change, note="; ".join(filter(None, (_name_place(request), change.note))))


def _gathers_by_precision(request: StepRequest) -> bool:
    """Whether a step's precision is that of the parameters that FSDP gathers, by a plan of fxmem's own."""
    return isinstance(request.parallelize, MeshPlan) and request.parallelize.takes_precision


def describe_ranks(request: StepRequest, profile: Profile) -> tuple[str, str]:
    """The arguments of `fxmem.analyze` for the same rank, each after a comma, and where its plan is kept."""
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
