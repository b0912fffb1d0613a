"""The meshes that a step fits: what is found is what an analysis of that mesh says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.cli.verbs import shard as shard_verb
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.records.fits import Fits
from fxmem.show.text.fits import fits_table
from fxmem.simulation.ranks import Mesh, MeshPlan, find_blocks
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif import shard
from fxmem.whatif.shard import find_meshes, list_candidates, shorten
from tests.sharded_models import Llama, loss, tokens
from tests.verbs import called

LAYERS = 4


def build() -> nn.Module:
    return Llama(LAYERS)


@pytest.mark.truth
def test_what_is_found_is_what_analyses_say(tmp_path: Path) -> None:
    own, written = tmp_path / "own.py", tmp_path / "meshes.json"
    own.write_text("from tests.sharded_models import loss\nfrom tests.whatif.test_shard import build\n")
    step = (f"{own}:build", "--input", "1x16:int64", "--loss", f"{own}:loss", "--seq", "32")
    code, _ = called(shard_verb, *step, "--cards", "2xh100", "--batch", "8", "--json", str(written))
    assert code == 0
    fits = Fits.model_validate_json(written.read_text())
    assert [each.mesh for each in fits.points] != []
    assert {each.mesh for each in fits.points} == {"fsdp=2", "replicate=2", "tp=2"}
    assert all(each.fits for each in fits.points)
    assert {*fits.dtypes.values()} == {"float32"}
    assert len(fits.dtypes) == 3
    seconds = [each.link_seconds or 0.0 for each in fits.points]
    assert seconds == sorted(seconds)
    for each in fits.points:
        assert each.size * each.accumulate == (8 if "tp" in each.mesh else 4)
    for each in fits.points[-1:]:
        inputs = torch.zeros(each.size, 32, dtype=torch.int64)
        analysis = fxmem.analyze(build, inputs, loss=loss, mesh=each.mesh, rank=0, accumulate=each.accumulate)
        assert each.requested_bytes == analysis.peak.requested_bytes
        assert each.reserved_bytes == analysis.peak.reserved_bytes
        ranks = analysis.profile.step.ranks
        assert ranks is not None
        assert each.moved_bytes == each.accumulate * sum(moved.moved_bytes for moved in ranks.collectives)
    assert "the bound was no more than the peak" in " ".join(each.text for each in fits.assumptions)


def find(memory: int, **settings: Any) -> Fits:
    target = catalogue.target("h100").model_copy(update={"memory_bytes": memory})
    request = StepRequest(args=(tokens(),), loss=loss, target=target)
    with torch.device("meta"):
        model = build()
    model.tp_plan = {}  # type: ignore[assignment]  # FSDP alone: half of the analyses
    return find_meshes(model, request, 2, 64, MeshPlan(Mesh(fsdp=2)), **settings)


@pytest.mark.truth
def test_batches_are_split_where_they_do_not_fit() -> None:
    inputs = torch.zeros(8, 32, dtype=torch.int64)
    peak = fxmem.analyze(build, inputs, loss=loss, mesh="fsdp=2", rank=0, accumulate=4).peak
    assert peak.reserved_bytes is not None
    fits = find(peak.reserved_bytes, shown=1)
    best = fits.fitting[0]
    assert best.accumulate > 1
    assert (best.reserved_bytes or 0) <= peak.reserved_bytes
    assert fits.ruled_out > 0


@pytest.mark.truth
def test_what_fits_nowhere_says_how_much_it_needs() -> None:
    with pytest.raises(AnalysisError, match=r"fsdp=2, 32 x 1 needs at least .* of 1\.00 MiB, the others more"):
        find(1 << 20)


def test_a_shorter_model_has_fewer_blocks_on_the_same_tensors() -> None:
    model = build()
    short = shorten(model, 2)
    assert short is not None
    assert (len(find_blocks(short)), len(find_blocks(model))) == (2, LAYERS)
    assert short.get_parameter("output.weight") is model.get_parameter("output.weight")
    assert shorten(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2) is None


def test_every_mesh_of_the_cards_is_a_candidate() -> None:
    meshes = {str(each.mesh) for each in list_candidates(8, 64, [1, 2, 4, 8])}
    assert meshes == {
        *("fsdp=8", "replicate=2,fsdp=4", "replicate=4,fsdp=2", "replicate=8"),
        *("fsdp=4,tp=2", "replicate=2,fsdp=2,tp=2", "fsdp=2,tp=4", "tp=8"),
    }
    assert {(each.micro, each.accumulate) for each in list_candidates(2, 12, [1])} == {(1, 6), (2, 3), (3, 2), (6, 1)}


def test_cards_without_a_number_are_the_fewest_that_it_fits() -> None:
    def plain() -> nn.Module:
        return nn.Linear(4, 4)

    one = fxmem.shard(plain, torch.empty(2, 4), cards="h100", batch=8)
    assert (one.space.ranks, one.assumptions[0].text) == (1, "as few of 1, 2, 4, ... cards as it fits")
    assert "\nnone " in fits_table(one)
    assert "1 x h100: fits as none" in one._repr_html_()
    too_few = one.points[0].model_copy(update={"fits": False})
    tried: list[int] = []

    def find_from(least: int | None, ruled_out: int = 0) -> Fits:
        def find(count: int) -> Fits:
            tried.append(count)
            if count <= ruled_out:
                raise shard._NoMesh(f"{count} are too few")
            if count > 8:
                raise UsageError("no mesh divides it")
            meshes = one.points if least is not None and count >= least else (too_few,)
            space = one.space.model_copy(update={"ranks": count})
            return one.model_copy(update={"space": space, "points": meshes})

        return shard._find_fewest(find)

    found = find_from(3, ruled_out=1)
    assert (found.space.ranks, found.assumptions[0].text[-17:]) == (4, "it does not fit 2")
    assert tried == [1, 2, 4]
    assert (find_from(None).space.ranks, find_from(None).fitting) == (8, ())
    with pytest.raises(AnalysisError, match="8 are too few"):
        find_from(None, ruled_out=8)


REFUSED = [
    ({"cards": "0xh100"}, "COUNTxCARD, e.g. 64xh100"),
    ({"cards": "h10"}, "h100"),
    ({"cards": "8xh10"}, "h100"),
    ({"cards": "8xcpu"}, "cards whose memory is known"),
    ({"cards": "8xh100", "batch": 0}, "at least 1, got 0"),
    ({"cards": "7xh100", "batch": 8}, "no mesh divides it"),
    ({"cards": "8xh100", "offload": "disk"}, "expected offload 'cpu'"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_before_an_analysis(settings: dict[str, Any], words: str) -> None:
    def plain() -> nn.Module:
        return nn.Linear(4, 4)

    with pytest.raises(UsageError) as caught:
        fxmem.shard(plain, torch.empty(2, 4), **{"batch": 8, **settings})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
