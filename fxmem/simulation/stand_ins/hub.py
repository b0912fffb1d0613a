"""What a program gets of the Hugging Face hub where there is no network: models of fxmem's tables, untrained.

A repository that is asked for, of which nothing is cached, is written into the program's cache as the hub would give
it: configurations, schedulers, tokenizers with next to no vocabulary, and weights as files of zeros that take no room
on the disk. The libraries load it by themselves. Files of a program are apart from the user's, and go with it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.modules import patch_when_imported
from fxmem.records.profile import Assumption
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.card.host_ledger import HostLedger
from fxmem.simulation.processes.sandbox.isolation import Isolation
from fxmem.simulation.processes.sandbox.written_files import GIVEN_COMMIT
from fxmem.simulation.stand_ins import hub_models, hub_pipelines
from fxmem.simulation.stand_ins.checkpoints import write_safetensors

_ADDRESS: Final = re.compile(r"/(?:api/models/)?((?:[\w.-]+/)?[\w.-]+?)(?:/(?:resolve|revision|tree)/.*)?")
"""The path of a repository's address, or of a file in it."""
_WORDS: Final = r"\n|\w+|[^\w\s]"
"""What the tokenizers take for a token: about as many as those with a vocabulary make of a prompt."""
_TEMPLATE: Final = (
    "{% for each in messages %}{{ eos_token + each['role'] }}\n{% if each['content'] is string %}{{ each['content'] }}"
    "{% else %}{% for part in each['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token }}assistant\n{% endif %}"
)
_TOKENS: Final = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


_ASSUMED: Final = (
    "{name} is that of fxmem's table of {day}, untrained, as the hub was out of reach; its tokenizers take a word for "
    "a token, or a letter"
)


class Hub:
    """Stands in for the hub.

    Args:
        notes: told what is made up.
        host: told which weights files stand in for.
        isolation: where files lie.
    """

    def __init__(self, notes: MadeUpNotes, host: HostLedger, isolation: Isolation) -> None:
        self._notes = notes
        self._host = host
        self._isolation = isolation
        self._cache = ""
        """The folder of the cache, as the program's last download had it."""
        self._given: set[str] = set()

    def patches(self) -> torch_common.Patches:
        """Patches of what reads the hub; none where the program writes for real."""
        if self._isolation.redirect is None and not self._isolation.in_overlay:
            return

        def patch_client(module: Any) -> torch_common.Patches:
            yield torch_common.wrap(module.Client, "send", self._send)

        def patch_downloads(module: Any) -> torch_common.Patches:
            # To which every download of a file goes, since 0.24.
            yield torch_common.wrap(module, "_hf_hub_download_to_cache_dir", self._download)

        yield torch_common.wrap(torch.UntypedStorage, "from_file", self._map)
        clients = dict.fromkeys(("httpx", "httpx2"), patch_client)
        yield patch_when_imported({**clients, "huggingface_hub.file_download": patch_downloads})

    def _download(self, original: Callable[..., Any], *, repo_id: str, cache_dir: str, **kwargs: Any) -> Any:
        self._cache = cache_dir
        if kwargs.get("local_files_only") and kwargs.get("repo_type", "model") == "model":
            self._give(repo_id)
        return original(repo_id=repo_id, cache_dir=cache_dir, **kwargs)

    def _send(self, original: Callable[..., Any], client: Any, request: Any, **kwargs: Any) -> Any:
        try:
            return original(client, request, **kwargs)
        except Exception as error:
            hub = importlib.import_module("huggingface_hub")
            found = _ADDRESS.fullmatch(str(request.url).partition("?")[0].removeprefix(hub.constants.ENDPOINT))
            if found is None or not self._give(found[1]):
                raise
            # Which is tried no second time, and after which the cache is looked at.
            raise hub.errors.OfflineModeIsEnabled(f"no network: {found[1]} is that of fxmem's table") from error

    def _map(self, original: Callable[..., Any], filename: Any, shared: bool = False, *args: Any, **more: Any) -> Any:
        """`UntypedStorage.from_file`. What is shared with a file needs no memory, however large it is."""
        is_ours = GIVEN_COMMIT in os.fspath(filename)
        storage = original(filename, shared or is_ours, *args, **more)
        if is_ours:
            self._host.note_stand_in(storage)
        return storage

    def _give(self, name: str) -> bool:
        """Write a repository of the tables into the cache, unless some of it is there; whether it is ours."""
        cache = Path(self._cache or importlib.import_module("huggingface_hub").constants.HF_HUB_CACHE)
        folder = cache / f"models--{name.replace('/', '--')}"
        if str(folder) in self._given or (folder / "snapshots").is_dir():
            return str(folder) in self._given
        parts, day = _find_parts(name)
        if not parts:
            return False
        self._given.add(str(folder))
        for each in (folder / "refs", folder / "snapshots" / GIVEN_COMMIT):
            each.mkdir(parents=True)
        (folder / "refs" / "main").write_text(GIVEN_COMMIT, encoding="ascii")
        with torch_common.no_modes():
            for inside, part in parts.items():
                _write_part(folder / "snapshots" / GIVEN_COMMIT / inside, part)
        self._notes.assumed.append(Assumption(topic="model", text=_ASSUMED.format(name=name, day=day)))
        return True


_Part = Mapping[str, Any]
"""A folder of a repository, or all of it, as the table of pipelines has its parts."""


def _find_parts(name: str) -> tuple[dict[str, _Part], str]:
    """The parts of a repository by their folders, and the day of the table; none where it is in no table."""
    if "/" in name and (pipeline := hub_pipelines.find(name)) is not None:
        own = pipeline.values
        index = {each: [part["library"], part["class"]] for each, part in pipeline.parts.items()}
        whole = {"library": "diffusers", "class": own["class"], "config": {**own.get("config", {}), **index}}
        parts = {inside: {"dtype": own["dtype"], **part} for inside, part in pipeline.parts.items()}
        return {"": whole, **parts}, hub_pipelines.read_table()["as_of"]
    found = hub_models.find_in_table(name) if "/" in name or name in hub_models.list_names() else None
    if found is None or "quantization_config" in found.values:
        return {}, ""
    config = {**found.values, "tokens": {"model_max_length": found.values.get("max_position_embeddings", 10**30)}}
    dtype = config.get("dtype") or config.get("text_config", {}).get("dtype") or "float32"
    whole = {"library": "transformers", "class": config["architectures"][0], "config": config, "dtype": dtype}
    return {"": whole}, hub_models.read_table()["as_of"]


def _write_part(folder: Path, part: _Part) -> None:
    folder.mkdir(exist_ok=True)
    library, kind, config = part["library"], part["class"], dict(part.get("config", {}))
    if (tokens := config.pop("tokens", None)) is not None:
        _write_tokenizer(folder, {"kind": kind, **tokens})
        if not config:
            return
    names = {"Pipeline": "model_index", "Scheduler": "scheduler_config", "Processor": "preprocessor_config"}
    known = next((each for end, each in names.items() if kind.endswith(end)), "config")
    which = {"_class_name": kind} if library == "diffusers" else {"architectures": [kind]}
    (folder / f"{known}.json").write_text(json.dumps({**which, **config}), encoding="utf-8")
    if known == "config":
        stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
        weights = dict(_list_weights(build_part(library, kind, config), getattr(torch, part["dtype"])))
        for variant in ("", ".fp16", ".bf16"):
            with open(folder / f"{stem}{variant}.safetensors", "wb") as file:
                write_safetensors(weights, {"format": "pt"}, file)


def build_part(library: str, kind: str, config: Mapping[str, Any]) -> Any:
    """A model of a table, on meta: its class made from its configuration."""
    cls = getattr(importlib.import_module(library), kind)
    with torch.device("meta"):
        return cls.from_config(config) if library == "diffusers" else cls(cls.config_class.from_dict(dict(config)))


def _list_weights(module: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """What a file has of a module: each tensor once, where its like are tied."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)


def _write_tokenizer(folder: Path, tokens: Mapping[str, Any]) -> None:
    """A tokenizer that knows a word from the next, and none by its meaning.

    Args:
        folder: of the tokenizer.
        tokens: fields of its configuration; its class, and in `frame` the special tokens around a text.
    """
    tokenizers = importlib.import_module("tokenizers")
    settings = {"model_max_length": 512, "chat_template": _TEMPLATE, "frame": "$A", "kind": "", **tokens}
    frame, kind = settings.pop("frame"), settings.pop("kind")
    words = [*_TOKENS.values(), *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]  # letters, for some classes
    ids = {each: number for number, each in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, _TOKENS["unk_token"]))
    if kind.startswith("T5"):  # whose class takes no other
        made.model = tokenizers.models.Unigram([(each, 0.0) for each in words], ids[_TOKENS["unk_token"]], False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "removed", invert=True)
    pairs = [(each, ids[each]) for each in frame.split() if each in ids]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=frame, special_tokens=pairs)
    made.add_special_tokens(list(_TOKENS.values()))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **_TOKENS, **settings}
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
