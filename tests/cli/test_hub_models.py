"""Models of the hub by name: a shipped table held to published counts, and the local cache, with no network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from fxmem.__main__ import main
from fxmem.cli.parser import Parser
from fxmem.cli.spec_names import check_model
from fxmem.cli.specs import build_model
from fxmem.cli.step import _say_least
from fxmem.cli.verbs import analyze
from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.memory.report_reader import load_report
from fxmem.records.profile import Kind
from fxmem.simulation.stand_ins import hub_models

TABLE = hub_models.read_table()
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Hugging Face's, and no way to the network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf" / "hub"


def store(hub: Path, name: str, values: dict[str, Any], commit: str = "a" * 40, main: str | None = "a" * 40) -> Path:
    """Write a configuration as huggingface_hub keeps it."""
    folder = hub / f"models--{name.replace('/', '--')}"
    path = folder / "snapshots" / commit / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(values), encoding="utf-8")
    if main is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(main, encoding="utf-8")
    return path


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TABLE["models"]))
def test_a_model_has_the_parameters_that_were_published(name: str) -> None:
    entry = TABLE["models"][name]
    built = build_model(f"hf:{name}", mode="infer")
    count = sum(each.numel() for each in built.module.parameters())
    published = entry["parameters"]
    if isinstance(published, str):
        unit = {"M": 10**6, "B": 10**9}[published[-1]]
        digits = len(published[:-1].partition(".")[2])
        assert f"{count / unit:.{digits}f}" == published[:-1]
    else:
        assert count + sum(entry.get("stored besides", {}).values()) == published
        assert hub_models.find_weights(name) == (count, str(built.weights_dtype).removeprefix("torch."))
    declared = entry["config"].get("dtype") or entry["config"].get("text_config", {}).get("dtype")
    assert str(built.weights_dtype) == f"torch.{declared or 'float32'}"
    assert any(note.endswith(f"is that of fxmem's table of {TABLE['as_of']}") for note in built.notes)


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (
            ["hf:gpt2"],
            "at least 474.7 MiB: 124,439,808 parameters in float32; 1.85 GiB with gradients and AdamW's two states of "
            "all",
        ),
        (
            ["hf:Qwen/Qwen3-8B", "--mode", "infer"],
            "at least 15.3 GiB: 8,190,735,360 parameters in bfloat16",
        ),
        (["hf:gpt2", "--lora", "4"], ""),
        (["hf:gpt2", "--quiet"], ""),
        (["hf:gpt2", "--optimizer", "sgd"], ""),
        (["hf:gpt2", "--set", "n_layer=1"], ""),
        (["hf:GPT2LMHeadModel"], ""),
        (["torchvision:resnet18"], ""),
    ],
)
def test_the_least_is_said_before_torch_is_there(
    words: list[str], least: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_least(Parser(prog="fxmem").add_arguments(analyze.ARGUMENTS).parse_args(words))
    assert capsys.readouterr().err == (f"fxmem: {least}; the whole follows\n" if least else "")


def test_the_least_is_no_more_than_the_peak(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "hf:gpt2", "--batch", "1", "--target", "h100", "--json", "gpt2.json"]) == 0
    found = hub_models.find_weights("gpt2")
    assert found is not None
    assert f"at least {found[0] * 4 / 2**20:.1f} MiB" in capfd.readouterr().err
    report = load_report(Path("gpt2.json"))
    kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
    there = sum(each.nbytes for each in report.storages if each.kind in kinds and each.dtype == "float32" and each.name)
    assert found[0] * 16 <= min(there, report.peak.requested_bytes)  # every parameter of this one is trained


def test_each_entry_has_a_source_and_a_name_of_its_own() -> None:
    names = [each for name, entry in TABLE["models"].items() for each in (name, *entry.get("also", ()))]
    assert len(TABLE["models"]) >= 100
    assert len({each.lower() for each in names}) == len(names)
    assert len({each.rpartition("/")[2].lower() for each in TABLE["models"]}) == len(TABLE["models"])
    for name, entry in TABLE["models"].items():
        assert {entry[key].partition(":")[0] for key in ("source", "counted")} <= set(TABLE["sources"]), name
        assert not {"auto_map", "_name_or_path"} & set(entry["config"])
        assert "model_type" in entry["config"], name  # `AutoConfig.from_pretrained` finds the class by it


@pytest.mark.parametrize(
    ("name", "is_"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("gpt2", "openai-community/gpt2"),
        ("someone/Qwen3-8B", None),
        ("LlamaForCausalLM", None),
        ("../etc", None),
        ("a b", None),
    ],
)
def test_a_name_is_found(name: str, is_: str | None) -> None:
    found = hub_models.find(name)
    assert (found and found.name) == is_


@pytest.mark.parametrize(
    ("name", "near"),
    [("Qwen/Qwen3-9B", "Qwen/Qwen3-8B"), ("Lama-3.1-8B", "Llama-3.1-8B"), ("Qwen/Qwen3-8B-Bsae", "Qwen/Qwen3-8B-Base")],
)
def test_a_misspelt_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"no configuration of hf:{name} is at hand; closest: .*{near}.*--download"):
        check_model(f"hf:{name}")


# --- the local cache --------------------------------------------------------------------------------------------------


def test_the_cache_comes_before_the_table(hub: Path) -> None:
    store(hub, "Qwen/Qwen3-8B", TINY, main="b" * 40)
    store(hub, "Qwen/Qwen3-8B", {**TINY, "vocab_size": 128}, "b" * 40, None)
    for spec in ("hf:Qwen/Qwen3-8B", "hf:Qwen3-8B"):
        check_model(spec)
        built = build_model(spec)
        assert built.module.get_submodule("lm_head").weight.shape == (128, 16)
        assert built.notes[0].endswith("Qwen/Qwen3-8B is that of the Hugging Face cache, commit bbbbbbbbbbbb")


@pytest.mark.parametrize("main", [None, "../../../elsewhere", "c" * 40, ""])
def test_without_a_main_branch_any_snapshot_will_do(hub: Path, main: str | None) -> None:
    path = store(hub, "me/mine", TINY, main=main)
    for name in ("me/mine", "mine"):
        found = hub_models.find(name)
        assert found is not None
        assert (found.name, found.path) == ("me/mine", path)
    assert "me/mine" in hub_models.list_names()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**TINY, "architectures": ["Evil"], "auto_map": {"AutoModel": "evil.Evil"}}, "code of its own .auto_map"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "names no model class"),
        ({**TINY, "architectures": ["os.system"]}, "no model class 'os.system'"),
        ({**TINY, "architectures": ["LlamaConfig"]}, "no model class with a config"),
    ],
)
def test_a_hostile_configuration_is_refused(hub: Path, values: dict[str, Any], message: str) -> None:
    store(hub, "me/mine", values)
    with pytest.raises(UsageError, match=message) as raised:
        build_model("hf:me/mine")
    assert "\n" not in str(raised.value)


# --- downloading ------------------------------------------------------------------------------------------------------


def test_only_download_asks_the_hub(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    asked = []

    def fetch(name: str, file: str, cache_dir: Path) -> str:
        asked.append((name, file, cache_dir))
        return str(store(cache_dir, name, TINY))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    words = ["analyze", "hf:me/mine", "--input", "input_ids:1x8", "--quiet", "--mode", "infer"]
    assert main(words) == 2
    assert asked == []
    assert main([*words, "--download"]) == 0
    assert asked == [("me/mine", "config.json", hub)]
    assert main(["analyze", "torchvision:resnet18", "--download"]) == 2
    assert "expected --download with hf:ORG/NAME, got 'torchvision:resnet18'" in capsys.readouterr().err


def test_what_the_hub_answers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("no\nway")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(EnvironmentLacksError, match=r"the hub is out of reach for me/mine's config.json: .* no way$"):
        hub_models.download("me/mine")


@pytest.mark.parametrize(("options", "expected"), [([], 1020), (["--prompt", "16"], 16)])
def test_a_prompt_and_its_new_tokens_are_within_the_positions(
    options: list[str], expected: int, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    words = ["generate", "hf:GPT2LMHeadModel", "--set", "n_layer=1", "--new", "4", "--quiet", "--json", str(file)]
    assert main([*words, *options]) == 0
    (ids, *_) = json.loads(file.read_text(encoding="utf-8"))["inputs"]
    assert ids["shape"] == [1, expected]
