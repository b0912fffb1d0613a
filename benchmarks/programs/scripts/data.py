"""Data made up for public scripts: files in the shape that they read, with no content.

Each function writes into a folder and takes what `scripts.toml` gives it.
"""

from __future__ import annotations

import base64
import gzip
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


def names(folder: Path, *, files: list[str], count: int = 64) -> None:
    """Write lists of the names of made-up pictures, without their endings."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).write_text("".join(f"{number:04d}\n" for number in range(count)))


def labelled_pictures(folder: Path, *, count: int = 16, width: int = 640, height: int = 480) -> None:
    """Write a data set of pictures with labelled boxes, in the form of COCO."""
    (folder / "annotations").mkdir(parents=True)
    for part in ("train2017", "val2017"):
        pictures(folder / part, count=count, width=width, height=height, suffix=".jpg")
        images = [
            {"id": number, "file_name": f"{number:04d}.jpg", "width": width, "height": height}
            for number in range(count)
        ]
        boxes = [
            {
                **{"id": number, "image_id": number // 4, "category_id": 1 + number % 90, "iscrowd": 0},
                **{"bbox": [40 * (number % 4), 30, 120, 90], "area": 120 * 90},
            }
            for number in range(4 * count)
        ]
        classes = [{"id": number, "name": f"class {number}"} for number in range(1, 91)]
        made = {"images": images, "annotations": boxes, "categories": classes}
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(made))


def hub_weights(folder: Path, *, name: str, file: str) -> None:
    """Write fresh weights of a model of torchvision where torch.hub keeps downloads."""
    import torch
    import torchvision

    (folder / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(torchvision.models.get_model(name).state_dict(), folder / "hub" / "checkpoints" / file)


def font(folder: Path, *, file: str) -> None:
    """Write the font that matplotlib brings, for one that would be downloaded."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes((Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf").read_bytes())


def speech(folder: Path, *, count: int = 96, phones: int = 60, frames: int = 6) -> None:
    """Write spoken sentences as FastSpeech 2 reads them: mel spectrograms, pitch, energy and lengths of phones."""
    lines = []
    for number in range(count):
        spoken = phones - number % 16
        made = {
            "mel": RANDOM.normal(size=(spoken * frames, 80)).astype(np.float32),
            "pitch": RANDOM.normal(size=spoken),
            "energy": RANDOM.normal(size=spoken).astype(np.float32),
            "duration": np.full(spoken, frames),
        }
        for kind, values in made.items():
            (folder / kind).mkdir(parents=True, exist_ok=True)
            np.save(folder / kind / f"LJSpeech-{kind}-{number:04d}.npy", values)
        lines.append(f"{number:04d}|LJSpeech|{{{' '.join(['AH0'] * spoken)}}}|made up\n")
    (folder / "train.txt").write_text("".join(lines))


def citations(folder: Path, *, papers: int = 2708, words: int = 1433, cited: int = 5429, classes: int = 7) -> None:
    """Write a graph of papers with words and citations, in the form and the sizes of Cora."""
    folder.mkdir(parents=True, exist_ok=True)
    found = RANDOM.random((papers, words)) < 0.0125
    lines = (f"{number} {' '.join(map(str, row))} class{number % classes}\n" for number, row in enumerate(found * 1))
    (folder / "cora.content").write_text("".join(lines))
    pairs = RANDOM.integers(0, papers, (cited, 2))
    (folder / "cora.cites").write_text("".join(f"{one}\t{other}\n" for one, other in pairs))


def graphs(folder: Path, *, name: str, count: int = 188, nodes: int = 18, kinds: int = 7) -> None:
    """Write labelled graphs, rings of nodes of a few kinds, in the form of the TU data sets."""
    folder.mkdir(parents=True, exist_ok=True)
    ring = [(node, (node + 1) % nodes) for node in range(nodes)]
    edges = [
        (nodes * graph + 1 + a, nodes * graph + 1 + b)
        for graph in range(count)
        for one, other in ring
        for a, b in ((one, other), (other, one))
    ]
    (folder / f"{name}_A.txt").write_text("".join(f"{a}, {b}\n" for a, b in edges))
    for kind, values in (
        ("graph_indicator", [graph + 1 for graph in range(count) for _ in range(nodes)]),
        ("graph_labels", [graph % 2 for graph in range(count)]),
        ("node_labels", [node % kinds for node in range(count * nodes)]),
    ):
        (folder / f"{name}_{kind}.txt").write_text("".join(f"{value}\n" for value in values))


def documents(folder: Path, *, files: list[str], count: int = 1000, words: int = 60_000) -> None:
    """Write documents of 50 to 2,500 made-up words, a column `text` of Parquet in groups of 50."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    known = np.array(["".join(RANDOM.choice(letters, length)) for length in RANDOM.integers(2, 10, words)])
    for file in files:
        texts = [" ".join(RANDOM.choice(known, length)) for length in RANDOM.integers(50, 2500, count)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / file, row_group_size=50)


def interactions(folder: Path, *, file: str, users: int = 1000, items: int = 3000, each: int = 60) -> None:
    """Write which items a user took, a pair a line, in order of time."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = RANDOM.integers(1, items + 1, (users, each))
    (folder / file).write_text("".join(f"{user + 1} {item}\n" for user in range(users) for item in taken[user]))


def molecules(folder: Path, *, file: str, count: int = 80, waters: int = 8) -> None:
    """Write boxes of water with energies and forces, in the extended XYZ form."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    made = []
    for _ in range(count):
        centres = np.array([[number % 2, number // 2 % 2, number // 4] for number in range(waters)]) * 3.0
        places = (centres[:, None] + shape).reshape(-1, 3) + RANDOM.normal(size=(3 * waters, 3)) * 0.02
        forces = RANDOM.normal(size=places.shape)
        head = f'Properties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy={RANDOM.normal():.6f} pbc="F F F"'
        numbers = (
            " ".join(f"{value:.6f}" for value in (*place, *force)) for place, force in zip(places, forces, strict=True)
        )
        atoms = (f"{'OHH'[number % 3]} {line}" for number, line in enumerate(numbers))
        made.append("\n".join([str(3 * waters), head, *atoms]))
    (folder / file).write_text("\n".join(made) + "\n")


def views(folder: Path, *, count: int = 10, size: int = 200) -> None:
    """Write pictures of a scene with the places of the camera, in the form of NeRF's synthetic scenes."""
    from PIL import Image

    for part in ("train", "val", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        frames = []
        for number in range(count):
            noise = RANDOM.integers(0, 256, (size, size, 4), dtype=np.uint8)
            Image.fromarray(noise).save(folder / part / f"r_{number}.png")
            turn = 2 * np.pi * number / count
            place = [[np.cos(turn), 0, np.sin(turn), 4 * np.sin(turn)], [0, 1, 0, 0]]
            place += [[-np.sin(turn), 0, np.cos(turn), 4 * np.cos(turn)], [0, 0, 0, 1]]
            frames.append({"file_path": f"./{part}/r_{number}", "transform_matrix": place})
        made = {"camera_angle_x": 0.69, "frames": frames}
        (folder / f"transforms_{part}.json").write_text(json.dumps(made))


def archive(folder: Path, *, file: str, count: int = 95_000_000) -> None:
    """Write a compressed file of text: all bytes that are letters, over and over."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = bytes(range(32, 127))
    with gzip.open(folder / file, "wb", compresslevel=1) as out:
        out.write(letters * (count // len(letters) + 1))


def flows(folder: Path, *, count: int = 12, width: int = 1242, height: int = 375) -> None:
    """Write pairs of pictures with the flow between them, in the form of KITTI."""
    import cv2

    for part in ("image_2", "flow_occ"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        for which in (10, 11):
            noise = RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / "image_2" / f"{number:06d}_{which}.png"), noise)
        flow = RANDOM.integers(2**15 - 500, 2**15 + 500, (height, width, 3), dtype=np.uint16)
        cv2.imwrite(str(folder / "flow_occ" / f"{number:06d}_10.png"), flow)


def clouds(folder: Path, *, classes: int = 40, points: int = 1024) -> None:
    """Write clouds of points with normals, two a class, in the form of ModelNet40."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [f"class{number}" for number in range(classes)]
    (folder / "modelnet40_shape_names.txt").write_text("".join(f"{kind}\n" for kind in kinds))
    for part, number in (("train", 1), ("test", 2)):
        (folder / f"modelnet40_{part}.txt").write_text("".join(f"{kind}_{number:04d}\n" for kind in kinds))
        for kind in kinds:
            (folder / kind).mkdir(exist_ok=True)
            np.savetxt(folder / kind / f"{kind}_{number:04d}.txt", RANDOM.normal(size=(points, 6)), "%.4f", ",")


def picture_table(folder: Path, *, pictures: list[str], texts: list[str], count: int = 32, size: int = 256) -> None:
    """Write a table of pictures and texts, as `datasets` loads it."""
    import datasets
    from PIL import Image

    def picture() -> Image.Image:
        return Image.fromarray(RANDOM.integers(0, 256, (size, size, 3), dtype=np.uint8))

    columns: dict[str, list[Any]] = {name: [picture() for _ in range(count)] for name in pictures[:1]}
    columns |= {name: [f"made up {number}" for number in range(count)] for name in texts}
    columns |= {name: [picture() for _ in range(count)] for name in pictures[1:]}
    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(folder / "train.parquet")


def text_to_image(folder: Path, *, large: bool = False) -> None:
    """Write a pipeline of Stable Diffusion, or of SDXL, with fresh weights and fewer layers."""
    import diffusers
    import transformers

    tokens = folder / "tokens"
    tokens.mkdir(parents=True)
    letters = [chr(each) for each in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (tokens / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (tokens / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(tokens / "vocab.json"), str(tokens / "merges.txt"), model_max_length=77)

    sizes = {"vocab_size": len(words), "bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1}
    first = transformers.CLIPTextConfig(**sizes, hidden_size=768, intermediate_size=3072, num_hidden_layers=6)
    second = transformers.CLIPTextConfig(**sizes, hidden_size=1280, intermediate_size=5120, projection_dim=1280)
    widths = (128, 256, 512)
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")}
    blocks["up_block_types"] = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    extra = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256} if large else {}
    extra |= {"projection_class_embeddings_input_dim": 6 * 256 + 1280} if large else {}
    parts = {
        "vae": diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(64, 128, 256, 256),
            layers_per_block=2,
            latent_channels=4,
        ),
        "text_encoder": transformers.CLIPTextModel(first),
        "tokenizer": tokenizer,
        "unet": diffusers.UNet2DConditionModel(
            sample_size=32,
            block_out_channels=widths,
            cross_attention_dim=768 + 1280 if large else 768,
            attention_head_dim=8,
            **blocks,
            **extra,
        ),
        "scheduler": diffusers.DDPMScheduler(steps_offset=1, clip_sample=False),
    }
    if large:
        parts |= {"text_encoder_2": transformers.CLIPTextModelWithProjection(second), "tokenizer_2": tokenizer}
        diffusers.StableDiffusionXLPipeline(**parts).save_pretrained(folder)
    else:
        nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        diffusers.StableDiffusionPipeline(**parts, **nothing).save_pretrained(folder)


MAKERS: Final[dict[str, Callable[..., None]]] = {
    maker.__name__: maker
    for maker in (
        *(mnist, cifar, pictures, tokens, text, records, boxes),
        *(names, labelled_pictures, hub_weights, font, speech, citations, graphs, interactions, molecules, views),
        *(archive, flows, clouds, picture_table, text_to_image, documents),
        *(language_model, picture_classifier, picture_encoder, picture_model, checkpoint, byte_tokenizer, metric),
    )
}
