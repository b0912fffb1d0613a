"""Pipelines of diffusers by name: a shipped table held to published counts, and the program that a name stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.cli import given_program
from fxmem.cli.given_program import SIZES, find_pipeline, spell_program
from fxmem.cli.verbs import build_parser
from fxmem.errors import UsageError
from fxmem.simulation.stand_ins import hub, hub_models, hub_pipelines

TABLE = hub_pipelines.read_table()
MODELS = [
    name
    for name, part in TABLE["parts"].items()
    if "tokens" not in part.get("config", ()) and not part["class"].endswith(("Scheduler", "Processor"))
]


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the library's own parts
@pytest.mark.parametrize("name", MODELS)
def test_a_part_has_the_parameters_that_were_published(name: str) -> None:
    part = hub_pipelines.find_part(name)
    built = hub.build_part(part["library"], part["class"], part["config"])
    count = sum(each.numel() for each in built.parameters())
    assert all(each.is_meta for each in built.parameters())
    published = part.get("parameters")
    if isinstance(published, str):
        unit = {"M": 10**6, "B": 10**9}[published[-1]]
        assert f"{count / unit:.{len(published[:-1].partition('.')[2])}f}" == published[:-1]
    elif published is not None:
        assert count == published


def test_each_entry_has_a_source_and_parts_of_the_table() -> None:
    assert len(TABLE["pipelines"]) >= 20
    for part in TABLE["parts"].values():
        assert part["source"].partition(":")[0].partition(";")[0] in TABLE["sources"]
        assert ("parameters" in part) == ("counted" in part)
        assert part.get("counted", "class").partition(":")[0] in TABLE["sources"]
        if part["source"] == "hub_models":
            entry = hub_models.read_table()["models"][part["config"]]
            assert part["parameters"] == entry["parameters"] - sum(entry.get("stored besides", {}).values())
    used = {part for entry in TABLE["pipelines"].values() for part in entry["components"].values()}
    assert used == set(TABLE["parts"])
    names = [each.lower() for each in hub_pipelines.list_names()]
    assert len(set(names)) == len(names)


def test_most_pipelines_are_held_to_a_published_count() -> None:
    """Of the model that is theirs alone. Of these four only sizes are published that are no count of it."""
    free = set()
    for name, entry in TABLE["pipelines"].items():
        own = entry["components"].get("transformer") or entry["components"]["unet"]
        if "parameters" not in TABLE["parts"][own]:
            free.add(name.partition("/")[2])
    assert free == {"stable-diffusion-2-1", "Wan2.1-T2V-1.3B-Diffusers", "LTX-Video", "CogVideoX-5b"}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_"),
    [
        ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-dev"),
        ("flux.1-dev", "black-forest-labs/FLUX.1-dev"),
        ("THUDM/CogVideoX-5b", "zai-org/CogVideoX-5b"),
        ("someone/FLUX.1-dev", None),
    ],
)
def test_a_name_is_found(name: str, is_: str | None) -> None:
    found = hub_pipelines.find(name)
    assert (found and found.name) == is_


@pytest.mark.parametrize(
    ("name", "near"),
    [("FLUX.1-dve", "FLUX.1-dev"), ("Qwen/Qwen-Imag", "Qwen/Qwen-Image"), ("Wan2.1-T2V-15B", "Wan2.1")],
)
def test_a_misspelt_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"no pipeline diffusers:{name} is at hand; closest: .*{near}"):
        find_pipeline(f"diffusers:{name}")


# --- the program that it stands for -----------------------------------------------------------------------------------


def give_program(words: list[str]) -> list[str]:
    return given_program.give_program(words, build_parser()[0])


def test_a_name_stands_for_a_program_with_its_sizes() -> None:
    words = give_program(["analyze", "--target", "rtx4090", "diffusers:FLUX.1-dev", "--height=512", "--steps", "4"])
    assert words[:4] == ["analyze", "--target", "rtx4090", "--run"]
    assert words[5:] == ["black-forest-labs/FLUX.1-dev", "--height=512", "--steps", "4"]
    source = Path(words[4]).read_text(encoding="utf-8")
    assert "DiffusionPipeline" in source
    assert all(f'"{each}"' in source for each in SIZES)
    assert spell_program(words[4:]) == ["diffusers:black-forest-labs/FLUX.1-dev", "--height=512", "--steps", "4"]
    assert give_program(["run", "diffusers:FLUX.1-dev"])[2:] == ["black-forest-labs/FLUX.1-dev"]
    assert give_program(["max-batch", "diffusers:FLUX.1-dev"])[-2:] == ["--batch", "{}"]
    assert give_program(["max-batch", "diffusers:FLUX.1-dev", "--height", "{}"])[-2:] == ["--height", "{}"]


def test_other_command_lines_stay_as_they_are() -> None:
    program = ["mine.py", "diffusers:FLUX.1-dev", "--steps", "4"]  # which is one of its own arguments
    for words in (["analyze", "hf:gpt2"], ["analyze", "--run", *program], ["run", "--target", "t4", *program], []):
        assert give_program(words) == words
    assert spell_program(["mine.py", "1"]) == ["--run", "mine.py", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["analyze", "diffusers:FLUX.1-dve"], "no pipeline diffusers:FLUX.1-dve is at hand; closest: FLUX.1-dev"),
        (["kv-cache", "diffusers:FLUX.1-dev"], "diffusers:FLUX.1-dev is a program: fxmem analyze runs it"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.truth
def test_a_pipeline_runs_by_its_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    words = ["analyze", "diffusers:stable-diffusion-v1-5", "--target", "rtx4090", "--steps", "2"]
    assert main([*words, "--json", str(report)]) == 0
    said = " ".join(capfd.readouterr().out.split())  # in a terminal of any width
    assert "fxmem advise --target rtx4090 diffusers:stable-diffusion-v1-5/" in said
    text = report.read_text(encoding="utf-8")
    assert f"fxmem's table of {TABLE['as_of']}, untrained" in text
    assert json.loads(text)["model"] == "diffusers:stable-diffusion-v1-5/stable-diffusion-v1-5 --steps 2"


@pytest.mark.truth
def test_a_pipeline_gets_advice_and_cards_by_its_name(tmp_path: Path) -> None:
    spec, size = "diffusers:stable-diffusion-v1-5", ["--steps", "2", "--quiet", "--json"]
    assert main(["advise", spec, "--target", "3GB", "--quick", *size, str(tmp_path / "advice.json")]) == 0
    advice = json.loads((tmp_path / "advice.json").read_text(encoding="utf-8"))
    (best, *_) = advice["suggestions"]
    assert (best["key"], best["code"]) == ("model-offload", "pipeline.enable_model_cpu_offload()")
    assert not advice["before"]["fits"]
    assert best["peak"]["fits"]
    assert "patch" not in best  # of no file of the user's
    assert main(["cards", spec, "--only", "rtx4060", *size, str(tmp_path / "cards.json")]) == 0


@pytest.mark.truth
@pytest.mark.parametrize(
    "way",
    [
        "enable_sequential_cpu_offload()",
        'enable_group_offload(torch.device("cuda"), offload_type="leaf_level", use_stream=True)',
    ],
)
def test_weights_of_the_table_are_offloaded_as_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sample.py").write_text(f"""
import torch
from diffusers import StableDiffusionPipeline

pipe = StableDiffusionPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5", torch_dtype=torch.float16)
pipe.{way}
pipe("a cat", num_inference_steps=1)
""")
    assert main(["run", "--target", "3GB", "--quiet", "--json", "report.json", "sample.py"]) == 0
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert report["peak"]["requested_bytes"] < 1.3 * 2**30  # of 2.6 GiB of weights
    assert sum(each.get("host_bytes", 0) for each in report["ops"]) > 2**31
