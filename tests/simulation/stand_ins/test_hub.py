"""What stands in for the Hugging Face hub: a model of fxmem's tables in the program's cache, and not in the user's."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

import fxmem
from fxmem.simulation.stand_ins import hub_models

hub = pytest.importorskip("huggingface_hub")
NAME = "openai-community/gpt2"
DAY = hub_models.read_table()["as_of"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("local", [True, False])
def test_a_model_of_the_table_is_downloaded(tmp_path: Path, local: bool) -> None:
    with fxmem.record("h100") as run:
        torch.ones(1, device="cuda")
        config, weights, words = (
            hub.hf_hub_download(NAME, each, cache_dir=tmp_path, local_files_only=local)
            for each in ("config.json", "model.safetensors", "tokenizer.json")
        )
        assert json.loads(Path(config).read_text(encoding="utf-8"))["n_embd"] == 768
        assert "<unk>" in Path(words).read_text(encoding="utf-8")
        with pytest.importorskip("safetensors").safe_open(weights, "pt") as file:
            assert file.get_slice("transformer.wte.weight").get_shape() == [50257, 768]
            assert "lm_head.weight" not in list(file.keys())  # which is tied
        nbytes = Path(weights).stat()
        assert nbytes.st_size > 4 * 124_439_808 > 512 * nbytes.st_blocks  # it takes no room
    assert [each.text for each in run.profile.assumptions if DAY in each.text] == [
        f"{NAME} is that of fxmem's table of {DAY}, untrained, as the hub was out of reach; its tokenizers take a word "
        "for a token, or a letter"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["someone/gpt2", "gpt2-of-nobody"])
def test_another_is_not(tmp_path: Path, name: str) -> None:
    with fxmem.record("h100"), pytest.raises(hub.errors.LocalEntryNotFoundError):
        hub.hf_hub_download(name, "config.json", cache_dir=tmp_path, local_files_only=True)


def test_what_is_cached_in_part_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "models--openai-community--gpt2" / "snapshots").mkdir(parents=True)
    with fxmem.record("h100"), pytest.raises(hub.errors.LocalEntryNotFoundError):
        hub.hf_hub_download(NAME, "config.json", cache_dir=tmp_path, local_files_only=True)


def test_a_program_that_writes_for_real_gets_nothing_made_up(tmp_path: Path) -> None:
    with fxmem.record("h100", write=True), pytest.raises(hub.errors.LocalEntryNotFoundError):
        hub.hf_hub_download(NAME, "config.json", cache_dir=tmp_path, local_files_only=True)


def test_weights_of_the_table_take_no_memory_where_they_are_cast_or_pinned(tmp_path: Path) -> None:
    def read_memory() -> int:
        """Bytes of this process that are of no file."""
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    with fxmem.record("h100") as run:
        weights = hub.hf_hub_download(NAME, "model.safetensors", cache_dir=tmp_path, local_files_only=True)
        with pytest.importorskip("safetensors").safe_open(weights, "pt") as file:
            tensors = list(map(file.get_tensor, file.keys()))
        before, nbytes = read_memory(), sum(each.nbytes for each in tensors)
        kept = [each.pin_memory() for each in tensors]
        cast = [each.to(torch.bfloat16) for each in tensors]
        assert read_memory() - before < nbytes // 10
        assert [each.shape for each in kept] == [each.shape for each in cast] == [each.shape for each in tensors]
        assert {each.dtype for each in cast} == {torch.bfloat16}
        assert tensors[0].to("meta").is_meta
        assert tensors[0].sum() == 0
        (kept[-1].cuda() * 2).sum()
    host = run.program.host
    assert host is not None
    assert host.pinned_bytes >= nbytes
