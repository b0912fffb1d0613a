"""What a job asks its scheduler for.

By hand, dstack 0.22, SkyPilot 0.14, kubernetes-validate 1.37 and sbatch of SLURM 22.05 read what is written here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fxmem.cli.verbs import export as export_verb
from fxmem.errors import AnalysisError, ExceededError
from fxmem.hardware import catalogue
from fxmem.hardware.catalogue import CATALOGUE
from fxmem.memory import liveness
from fxmem.records.parts import EvaluationPass, HostUse, LongestBatch, RankedStep, RankGroup
from fxmem.records.profile import ProcessBytes, Profile, ProgramRun
from fxmem.show.export import export
from tests.profiles import TRAINING, make_profile
from tests.verbs import called, saved

GIB = 1 << 30
FORMATS = ("slurm", "kubernetes", "skypilot", "dstack")
SHARED = ("kai", "hami")


def asked(to: str, gib: float, target: str = "rtx4090", *, fits: bool | None = True, **step: Any) -> str:
    """The request of a step of so many GiB of the card."""
    nbytes = int(gib * GIB)
    profile = make_profile(ticks=0, target=catalogue.target(target), step=TRAINING.model_copy(update=step))
    timeline = liveness.timeline(profile)
    process = ProcessBytes(low=nbytes, high=nbytes, grounds="by hand")
    peak = timeline.peak.model_copy(update={"reserved_bytes": nbytes, "process_bytes": process, "fits": fits})
    content = export(profile, timeline.model_copy(update={"peak": peak}), to)
    assert isinstance(content, str)
    return content


def ran(gib: float, **fields: Any) -> ProgramRun:
    """A program that has so many GiB of the host's memory."""
    host = HostUse(peak_bytes=int(gib * GIB), process_bytes=int(gib * GIB))
    return ProgramRun(ending="stopped after step 3", rounds=(), shown=0, host=host, **fields)


def test_any_card_sold_with_more_than_those_that_are_too_small() -> None:
    # 19.5 GiB fit an A10, sold as of 24 GB, whose driver leaves 22.1; 15 GiB do not fit a T4, which is sold as of 16.
    assert yaml.safe_load(asked("dstack", 19.5))["resources"] == {"gpu": "nvidia:20GB..:1"}
    assert yaml.safe_load(asked("dstack", 15))["resources"] == {"gpu": "nvidia:17GB..:1"}
    assert yaml.safe_load(asked("skypilot", 15))["resources"] == {"accelerators": "NVIDIA:17GB+:1"}
    assert 'key: nvidia.com/gpu.memory, operator: Gt, values: ["16384"]' in asked("kubernetes", 15)
    assert "# a card of 17 GB or more" in asked("slurm", 15)


@pytest.mark.parametrize(("to", "card"), [
    ("slurm", "# NVIDIA GeForce RTX 4090"),
    ("kubernetes", 'nvidia.com/gpu.product, operator: In, values: ["NVIDIA-GeForce-RTX-4090"]'),
    ("skypilot", "accelerators: RTX4090:1"),
    ("dstack", "gpu: RTX4090:24GB:1"),
])  # fmt: skip
def test_the_card_itself_where_others_of_its_size_are_too_small(to: str, card: str) -> None:
    assert card in asked(to, 23)  # of 23.5 GiB; an A10 of 24 GB has 22.1


def test_dstack_tells_cards_of_one_name_apart_by_memory() -> None:
    assert "gpu: V100:32GB:1" in asked("dstack", 31.5, "v100-32gb")  # an RTX 5090 of 32 GB has 31.4
    assert "accelerators: V100-32GB:1" in asked("skypilot", 31.5, "v100-32gb")


def test_a_driver_reports_less_than_a_card_is_sold_with() -> None:
    for card in CATALOGUE.values():
        share = (card.target.memory_bytes or 0) / GIB / (card.sold_gb or 1)
        assert card.target.device == "cpu" or 0.9 < share < 1


def test_memory_of_the_host_of_all_ranks_of_a_node() -> None:
    ranks = RankedStep(world=16, rank=0, groups=(RankGroup(name="all ranks", size=16, spread=1),))
    found = yaml.safe_load(asked("skypilot", 19.5, program=ran(3.5), ranks=ranks))
    assert found == {"num_nodes": 2, "resources": {"accelerators": "NVIDIA:20GB+:8", "memory": "30+"}}
    found = yaml.safe_load(asked("dstack", 19.5, program=ran(3.5), ranks=ranks))
    assert found == {"nodes": 2, "resources": {"gpu": "nvidia:20GB..:8", "memory": "30GB.."}}
    lines = [each for each in asked("slurm", 19.5, program=ran(3.5), ranks=ranks).splitlines() if each[1] != " "]
    assert lines[:2] == ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1"]
    assert lines[2:] == ["#SBATCH --gres=gpu:8", "#SBATCH --mem=30G"]
    assert "--nodes=1" in asked("slurm", 19.5, ranks=RankedStep(world=2, rank=0))
    assert "--nodes" not in asked("slurm", 19.5)
    limits = yaml.safe_load(asked("kubernetes", 19.5, program=ran(3.5)))["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 1, "memory": "4Gi"}
    assert "the host's memory is not known" in asked("slurm", 20)


@pytest.mark.parametrize("to", [*FORMATS, *SHARED])
def test_the_cpu_takes_no_card(to: str) -> None:
    assert "gpu" not in asked(to, 20, "cpu", fits=None, program=ran(3.5)).lower()


def test_a_part_of_a_card_is_what_the_steps_take_and_at_most_what_is_known() -> None:
    annotations = yaml.safe_load(asked("kai", 3.5))["metadata"]["annotations"]
    assert annotations == {"gpu-memory": "3584"}
    limits = yaml.safe_load(asked("hami", 3.5))["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3584}
    evaluations = (EvaluationPass(ran=2, batches=9, requested_bytes=3 * GIB, end_bytes=5 * GIB),)
    program = ran(
        3.5, evaluations=evaluations, longest=LongestBatch(batches=9, number=2, shape=(8,), reserved_bytes=4 * GIB)
    )
    found = yaml.safe_load(asked("kai", 3.5, program=program, ranks=RankedStep(world=2, rank=0)))
    assert found["metadata"]["annotations"] == {
        "gpu-memory": "3584", "gpu-memory.limit": "5120", "gpu-fraction-num-devices": "2"
    }  # fmt: skip
    assert found["spec"]["containers"][0]["resources"]["limits"] == {"memory": "8Gi"}
    assert "nvidia.com/gpumem: 5120 # evaluation" in asked("hami", 3.5, program=program)


@pytest.mark.parametrize("to", [*FORMATS, *SHARED])
def test_nothing_is_asked_for_what_does_not_fit(to: str, tmp_path: Path) -> None:
    with pytest.raises(ExceededError, match=r"does NOT fit: .*; fxmem cards says which cards have room"):
        asked(to, 24, fits=False)
    with pytest.raises(AnalysisError, match="known to its end"):
        asked(to, 19.5, program=ran(1, failed=True))
    report = saved(
        tmp_path / "r.json", Profile(**dict(make_profile(ticks=0, target=catalogue.target("t4")))), fits=False
    )
    with pytest.raises(ExceededError):
        called(export_verb, report, "--to", to, "-o", str(tmp_path / "job"))
    assert not (tmp_path / "job").exists()
