"""The answer in three lines, and the few modules below it."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from fxmem.hardware.context import give_room
from fxmem.memory.liveness import timeline
from fxmem.records.profile import Kind, ProcessBytes, Profile, Target
from fxmem.records.units import BUCKET
from fxmem.show.facts import describe_weights
from fxmem.show.text import overview, table
from tests.profiles import deep_profile, small_profile

CARD = give_room(Target(name="card", device="cuda", capability=(8, 0)), 8 << 30)
PROCESS = ProcessBytes(low=3 << 30, high=4 << 30, grounds="a guess")


def shown(profile: Profile, *, peak: dict[str, object] | None = None, **options: object) -> str:
    at = timeline(profile)
    at = at.model_copy(update={"peak": at.peak.model_copy(update=peak or {})})
    return overview(profile, at, **options)  # type: ignore[arg-type]


def answer(text: str) -> list[str]:
    """The lines before the first empty one."""
    return text.partition("\n\n")[0].splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("profile", [small_profile(), deep_profile(6)], ids=["small", "deep"])
def test_no_line_is_wider_than_asked_for(profile: Profile, width: int) -> None:
    text = shown(profile, following="fxmem advise " + "a-word " * 30, width=width)
    assert max(map(cell_len, text.splitlines())) == width


@pytest.mark.parametrize(
    ("width", "process"),
    [(80, "; nvidia-smi: 4.00 GiB"), (120, " reserved; 3.00 GiB to 4.00 GiB in nvidia-smi")],
)
def test_the_answer_is_three_lines(width: int, process: str) -> None:
    peak = {"allocated_bytes": 3 << 29, "reserved_bytes": 2 << 30, "fits": True, "process_bytes": PROCESS}
    profile = small_profile().model_copy(update={"target": CARD})
    memory, where, following = answer(shown(profile, peak=peak, following="fxmem advise m", width=width))
    assert memory == f"Memory      fits: 2.00 GiB of 8.00 GiB on card, 25.0 %{process}"
    assert re.match(r"Peak        1.50 GiB (allocated, )?in backward at block.conv, ", where)
    assert following == "Next        fxmem advise m"


def test_where_it_runs_out_is_in_the_answer() -> None:
    peak = {"reserved_bytes": 9 << 30, "fits": False, "shortage": "It runs out in forward", "process_bytes": PROCESS}
    text = shown(small_profile().model_copy(update={"target": CARD}), peak=peak, width=120)
    assert answer(text)[0] == "Memory      does NOT fit: 9.00 GiB of 8.00 GiB on card, 112.5 %. It runs out in forward"


def test_colour_repeats_the_verdict() -> None:
    fitting, wanting = (
        small_profile().model_copy(update={"target": target})
        for target in (CARD, CARD.model_copy(update={"memory_bytes": 9}))
    )
    assert "\x1b[1;32mfits" in shown(fitting, color=True)
    assert "\x1b[1;31mdoes NOT fit" in shown(wanting, color=True)
    assert "\x1b[" not in shown(wanting)


def test_what_is_left_out_is_counted_and_is_there_in_full() -> None:
    profile = small_profile()
    brief, full = shown(profile), shown(profile, full=True)
    assert brief.endswith("the largest tensors, 2 assumptions, 1 unknown\n")
    assert "Split" not in brief
    assert full == "\n".join(answer(full)) + "\n\n" + table(profile, timeline(profile))
    assert answer(full) == answer(brief)


def test_more_levels_are_more_rows() -> None:
    rows = [len(shown(deep_profile(6), depth=depth).splitlines()) for depth in (0, 1, 9)]
    assert rows == sorted(set(rows))
    assert shown(deep_profile(6)).count("\n") <= shown(deep_profile(6), depth=2).count("\n")


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("net.lora_A.weight", "train", "trained: 2.00 MiB of 3.00 MiB (LoRA)"),
        ("net.weight", "train", "trained: 2.00 MiB of 3.00 MiB"),
        ("net.weight", "infer", ""),
        ("net, flat", "train", ""),
    ],
)
def test_what_is_trained_is_said_where_it_is_a_part_of_the_weights(name: str, mode: str, said: str) -> None:
    profile = small_profile()
    own = next(each for each in profile.storages if each.kind is Kind.PARAMETER)
    named = [each.model_copy(update={"name": each.name.replace(own.name, name)}) for each in profile.storages]
    held = [*named, own.model_copy(update={"nbytes": 1 << 20, "is_frozen": True})]
    step = profile.step.model_copy(update={"mode": mode})
    text = describe_weights(profile.model_copy(update={"storages": tuple(held), "step": step}))
    assert text == said
    assert not describe_weights(profile)
    assert text in shown(profile.model_copy(update={"storages": tuple(held)}), width=200)


@pytest.mark.parametrize("kind", [Kind.GRADIENT, Kind.OPTIMIZER_STATE])
def test_what_never_gets_a_gradient_is_not_trained(kind: Kind) -> None:
    """An average of the weights in a list, and an autoencoder whose parameters want gradients."""
    profile = small_profile()
    own = next(each for each in profile.storages if each.kind is Kind.PARAMETER)
    parameters = [own.model_copy(update={"name": name, "nbytes": 1 << 20}) for name in ("net.weight", "vae.weight", "")]
    of_it = [own.model_copy(update={"kind": kind, "name": name}) for name in ("net.weight.grad", "exp_avg")]
    held = profile.model_copy(update={"storages": (*parameters, *of_it)})
    assert describe_weights(held) == "trained: 1.00 MiB of 3.00 MiB"
    scale = own.model_copy(update={"name": "net.scale", "nbytes": 4})  # nobody sees it
    assert describe_weights(held.model_copy(update={"storages": (parameters[0], scale, *of_it)})) == ""


def test_narrow_weights_are_said_to_have_no_float32_copy() -> None:
    profile = small_profile()
    own = next(each for each in profile.storages if each.kind is Kind.PARAMETER)
    narrow = own.model_copy(update={"name": "net.weight", "dtype": "bfloat16", "nbytes": 1 << 20})
    state = narrow.model_copy(update={"kind": Kind.OPTIMIZER_STATE, "name": "net.weight.exp_avg"})
    held = profile.model_copy(update={"storages": (narrow, state)})
    assert describe_weights(held) == "weights: bfloat16, no float32 copy"
    copied = held.model_copy(update={"storages": (narrow, state.model_copy(update={"dtype": "float32"}))})
    assert describe_weights(copied) == "weights: bfloat16"


def test_whose_gradients_lie_in_a_bucket_is_not_known() -> None:
    """Those of an LSTM whose weights are not flat: they are one tensor of cuDNN's. What an optimizer keeps tells."""
    profile = small_profile()
    own = next(each for each in profile.storages if each.kind is Kind.PARAMETER)
    parameters = [own.model_copy(update={"name": name, "nbytes": 1 << 20}) for name in ("net.weight", "lstm.weight")]
    gradients = [own.model_copy(update={"kind": Kind.GRADIENT, "name": name}) for name in ("net.weight.grad", BUCKET)]
    held = profile.model_copy(update={"storages": (*parameters, *gradients)})
    assert describe_weights(held) == ""
    state = own.model_copy(update={"kind": Kind.OPTIMIZER_STATE, "name": "net.weight.exp_avg"})
    stepped = held.model_copy(update={"storages": (*held.storages, state)})
    assert describe_weights(stepped) == "trained: 1.00 MiB of 2.00 MiB"
