"""Data made up for public scripts: files in the shape that they read, with no content.

Each function writes into a folder and takes what `scripts.toml` gives it.
"""

from __future__ import annotations

import base64
import json
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

RANDOM: Final = np.random.default_rng(0)


def mnist(folder: Path, *, train: int = 60_000, test: int = 10_000) -> None:
    """Write the four raw files of MNIST, as torchvision finds them after a download."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for kind, count in (("train", train), ("t10k", test)):
        pictures = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (raw / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pictures.tobytes())
        labels = RANDOM.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def cifar(folder: Path, *, classes: int = 10, count: int = 1000) -> None:
    """Write the batches of CIFAR-10 or CIFAR-100, smaller than the real ones."""
    ten = classes == 10
    root = folder / ("cifar-10-batches-py" if ten else "cifar-100-python")
    root.mkdir(parents=True, exist_ok=True)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"] if ten else ["train", "test"]
    for name in names:
        pictures = RANDOM.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = RANDOM.integers(0, classes, count).tolist()
        batch = {"data": pictures, "labels" if ten else "fine_labels": labels}
        (root / name).write_bytes(pickle.dumps(batch))
    meta = {"label_names" if ten else "fine_label_names": [f"class {number}" for number in range(classes)]}
    (root / ("batches.meta" if ten else "meta")).write_bytes(pickle.dumps(meta))


def pictures(
    folder: Path,
    *,
    count: int = 64,
    width: int = 64,
    height: int = 64,
    suffix: str = ".png",
    levels: int = 256,
    prefix: str = "",
    classes: int = 0,
) -> None:
    """Write pictures of noise, in a folder for each class; `levels` 2 gives grey masks of zeros and ones."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        shape = (height, width) if levels == 2 else (height, width, 3)
        noise = RANDOM.integers(0, levels, shape, dtype=np.uint8)
        into = folder / f"class{number % classes}" if classes else folder
        into.mkdir(exist_ok=True)
        Image.fromarray(noise).save(into / f"{prefix}{number:04d}{suffix}")


def tokens(folder: Path, *, files: list[str], count: int = 200_000, vocabulary: int = 50_257, header: int = 0) -> None:
    """Write binary files of 16-bit tokens, behind a header of 32-bit numbers where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        found = RANDOM.integers(0, vocabulary, count).astype(np.uint16).tobytes()
        numbers = np.zeros(header, dtype=np.int32)
        numbers[:3] = (20240520, 1, count)[: min(header, 3)]
        (folder / file).write_bytes(numbers.tobytes() + found)


def text(
    folder: Path,
    *,
    files: list[str],
    lines: int = 5000,
    words: int = 20,
    columns: int = 1,
    vocabulary: int = 2000,
    first: str | None = None,
) -> None:
    """Write lines of made-up words, in columns between tabs, after a first one."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        picked = RANDOM.integers(0, vocabulary, (lines, columns, words // columns))
        made = ("\t".join(" ".join(f"w{word}" for word in column) for column in line) for line in picked)
        (folder / file).write_text("\n".join([*([] if first is None else [first]), *made]) + "\n")


def records(
    folder: Path, *, file: str = "train.jsonl", count: int = 256, words: int = 200, fields: Sequence[str] = ("text",)
) -> None:
    """Write JSON lines of texts."""
    folder.mkdir(parents=True, exist_ok=True)
    picked = RANDOM.integers(0, 500, (count, len(fields), words // len(fields)))
    texts = ([" ".join(f"w{word}" for word in part) for part in line] for line in picked)
    lines = (json.dumps(dict(zip(fields, line, strict=True))) for line in texts)
    (folder / file).write_text("\n".join(lines) + "\n")


def boxes(folder: Path, *, count: int = 32, size: int = 640, classes: int = 4) -> None:
    """Write a data set of pictures with labelled boxes, in the form that ultralytics reads."""
    for part in ("train", "val"):
        pictures(folder / "images" / part, count=count, width=size, height=size, suffix=".jpg")
        labels = folder / "labels" / part
        labels.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (labels / f"{number:04d}.txt").write_text(f"{number % classes} 0.5 0.5 0.25 0.25\n" * 3)
    names = "\n".join(f"  {number}: class {number}" for number in range(classes))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}\n")


def language_model(folder: Path, *, classes: list[str], vocabulary: int = 1000, **settings: Any) -> None:
    """Write a language model of transformers with fresh weights and a tokenizer of whole words."""
    import tokenizers
    import transformers

    config, model = (getattr(transformers, name) for name in classes)
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(vocabulary - 3))]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    model(config(vocab_size=vocabulary, pad_token_id=0, eos_token_id=1, **settings)).save_pretrained(folder)


def picture_classifier(folder: Path, *, size: int = 224) -> None:
    """Write a vision transformer of transformers with fresh weights and the settings of its pictures."""
    import transformers

    transformers.ViTImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)
    transformers.ViTForImageClassification(transformers.ViTConfig(image_size=size)).save_pretrained(folder)


def metric(folder: Path, *, name: str = "accuracy") -> None:
    """Write a metric where `evaluate.load` looks before it asks the network."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(
        """import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / max(len(references), 1)}
"""
    )


def picture_encoder(folder: Path, *, repository: str) -> None:
    """Write an autoencoder of Stable Diffusion's sizes, with fresh weights, where the hub's client keeps downloads."""
    import diffusers

    kept = hub_snapshot(folder, repository)
    widths = (128, 256, 512, 512)
    diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=widths,
        layers_per_block=2,
        latent_channels=4,
        sample_size=256,
    ).save_pretrained(kept)


def hub_snapshot(folder: Path, repository: str) -> Path:
    """Make the folder in which the hub's client keeps a repository's newest files."""
    kept, commit = folder / "hub" / f"models--{repository.replace('/', '--')}", "0" * 40
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    (kept / "snapshots" / commit).mkdir(parents=True)
    return kept / "snapshots" / commit


def picture_model(folder: Path, *, name: str, repository: str) -> None:
    """Write a model of timm, with fresh weights, where the hub's client keeps downloads."""
    import timm
    from safetensors.torch import save_file

    save_file(timm.create_model(name).state_dict(), hub_snapshot(folder, repository) / "model.safetensors")


def checkpoint(folder: Path, *, classes: list[str], **settings: Any) -> None:
    """Write the checkpoint of a language model of transformers: zeros in bfloat16, a file that takes no disk."""
    import torch
    import transformers

    config, model = (getattr(transformers, name) for name in classes)
    made = config(**settings)
    folder.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(folder)
    with torch.device("meta"):
        tensors = {name: tensor for name, tensor in model(made).state_dict().items() if name != "lm_head.weight"}
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)


def byte_tokenizer(folder: Path, *, file: str = "tokenizer.model") -> None:
    """Write a tokenizer of single bytes in the form of tiktoken."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(bytes([number])).decode()} {number}" for number in range(256))
    (folder / file).write_text("\n".join(lines) + "\n")


MAKERS: Final[dict[str, Callable[..., None]]] = {
    maker.__name__: maker
    for maker in (
        *(mnist, cifar, pictures, tokens, text, records, boxes),
        *(language_model, picture_classifier, picture_encoder, picture_model, checkpoint, byte_tokenizer, metric),
    )
}
