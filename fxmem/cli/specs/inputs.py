"""The arguments of a step as meta tensors, from input specs.

    32x3x224x224                  one positional tensor; `,` separates as well as `x`, `scalar` is a 0-d tensor
    32x3x224x224:float16          of a dtype, by torch's name or bf16, fp16, fp32, fp64
    input_ids:8x1024:int64        a keyword argument
    batch.image:8x3x224x224       an item of a dict that is one argument
    pkg.mod:NAME, file.py:NAME    your own function that returns a tensor, a tuple (positional), a dict (keyword), a
                                  DataLoader or a Dataset; or one of these

Without a dtype, a name that ends in `_ids`, `_mask`, `_positions` or is `labels` gets int64, because torch indexes with
nothing less and transformers builds its masks so; everything else follows the model's weights. A lone shape of two
dimensions is the token ids of a model of transformers that takes them.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem._torch.common import tree_map_only
from fxmem.cli.spec_names import is_file_reference, is_reference
from fxmem.cli.specs import BuiltModel
from fxmem.cli.specs.configs import required_parameters
from fxmem.cli.specs.models import construct, construct_with_values
from fxmem.cli.specs.recipes import importable, load
from fxmem.errors import FxmemError, UsageError
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.given import Batch, ignore_moves, is_loader, read_batch

SEQUENCE_LENGTH = 1024
"""Tokens in a default text input, or as many as the model has positions for if that is fewer."""

_SHAPE = re.compile("[0-9]{1,18}([x,][0-9]{1,18})*")
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_INTEGER_NAMES = re.compile(r"(.*_)?(ids|mask|positions)|labels")
_FORMS = "32x3x224x224, 32x3x224x224:float16, input_ids:8x1024:int64, pkg.mod:make_batch or file.py:make_batch"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor; `str` gives the text that makes it."""

    shape: tuple[int, ...]
    dtype: str | None = None
    """torch's name, e.g. `float16`; None: by its name, else as the model's weights."""
    name: str | None = None
    """Keyword it is passed as, dotted for an item of a dict; None: positional."""

    def __str__(self) -> str:
        parts = (self.name, "x".join(map(str, self.shape)) or "scalar", self.dtype)
        return ":".join(part for part in parts if part is not None)


@dataclass(frozen=True)
class FactorySpec:
    """A function that makes the arguments; `str` gives the text that names it."""

    reference: str
    """`pkg.mod:name` or `file.py:name`."""

    def __str__(self) -> str:
        return self.reference


InputSpec = TensorSpec | FactorySpec


def parse_input(text: str) -> InputSpec:
    """Parse one `--input`.

    Raises:
        UsageError: none of the forms, a dimension of 0, or an unknown dtype.
    """
    parts = [part.strip() for part in text.split(":")]
    is_shape = [part == "scalar" or _SHAPE.fullmatch(part) is not None for part in parts]
    match parts, is_shape:
        case [shape], [True]:
            return TensorSpec(_parse_shape(shape, text))
        case [shape, dtype], [True, False]:
            return TensorSpec(_parse_shape(shape, text), _parse_dtype(dtype, text))
        case [name, shape], [False, True]:
            return TensorSpec(_parse_shape(shape, text), None, _parse_name(name, text))
        case [name, shape, dtype], [False, True, False]:
            return TensorSpec(_parse_shape(shape, text), _parse_dtype(dtype, text), _parse_name(name, text))
        case _ if is_file_reference(text) or (len(parts) == 2 and is_reference(text)):
            return FactorySpec(text)
    raise UsageError(f"expected an input like {_FORMS}; got {text!r}")


def name_main_input(specs: Sequence[InputSpec], module: torch.nn.Module) -> tuple[InputSpec, ...]:
    """The same specs, a lone shape taken for a language model's token ids."""
    main = str(getattr(module, "main_input_name", ""))
    lone = [each for each in specs if isinstance(each, TensorSpec) and each.name is None]
    if len(lone) != 1 or len(lone[0].shape) != 2 or not _INTEGER_NAMES.fullmatch(main):
        return tuple(specs)
    return tuple(replace(each, name=main) if each is lone[0] else each for each in specs)


def add_labels(specs: Sequence[InputSpec], built: BuiltModel) -> tuple[InputSpec, ...]:
    """The same specs, with the labels of a head of transformers in training.

    None are added where the class's name does not say what they are, where the specs have them, and to what a function
    makes.
    """
    module, tensors = built.module, [each for each in specs if isinstance(each, TensorSpec) and each.shape]
    if built.mode != "train" or not hasattr(module, "main_input_name") or not tensors or len(tensors) < len(specs):
        return tuple(specs)
    takes = [*inspect.signature(module.forward).parameters]
    places = iter(takes)
    by_name = {each.name or next(places, ""): each for each in tensors}
    text = [by_name[name].shape for name in _TEXT if name in by_name and len(by_name[name].shape) > 1]
    length = text[0][1] if text else _sequence_length(module.config, module)
    added = _labels(built, (tensors[0].shape[0], length), tensors[:1])
    if any(each.name in by_name or each.name not in takes for each in added):
        return tuple(specs)
    return (*specs, *added)


def make_batch(
    specs: Sequence[InputSpec],
    *,
    weights_dtype: torch.dtype | None = None,
    channels_last: bool = False,
    keep_values: bool = False,
) -> Batch:
    """Make the positional and keyword arguments that `specs` describe, their tensors on meta; and notes on them.

    Args:
        specs: In the order of the command line; what is positional is passed in this order.
        weights_dtype: dtype of floating-point tensors that name none, normally `BuiltModel.weights_dtype`; None means
            torch's default.
        channels_last: Lays 4-D tensors out as `torch.channels_last`, 5-D ones as `torch.channels_last_3d`. What a
            factory makes keeps the dtype and layout it has.
        keep_values: What a factory makes stays as it is, values and all.

    Else a factory runs under `torch.device("meta")`; if it reads values, it runs for real and what it made is moved to
    meta.

    Raises:
        UsageError: two inputs of one name, or a factory that cannot be found, takes arguments or returns something
            else.
        AnalysisError: a factory raised.
    """
    positional: list[Any] = []
    keyword: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    for spec in specs:
        if isinstance(spec, FactorySpec):
            made = _run_factory(spec, keep_values=keep_values)
            positional += made.args
            notes += made.notes
            for name, value in made.kwargs.items():
                _put(keyword, [name], value, name)
            continue
        tensor = _make_tensor(spec, weights_dtype, channels_last)
        if spec.name is None:
            positional.append(tensor)
        else:
            _put(keyword, spec.name.split("."), tensor, spec.name)
    return Batch(tuple(positional), keyword, notes)


def default_inputs(built: BuiltModel, batch_size: int) -> tuple[TensorSpec, ...]:
    """The inputs of a step when none are given, without labels.

    - timm: one image of the pretrained config's `input_size`; the settings `img_size` and `in_chans` count.
    - torchvision: by family: classification 224x224 (inception_v3 299x299; the model's `image_size` if it has one),
      segmentation 520x520, video 16 frames of 112x112 (of 224x224 for MViT, Swin3D and S3D), optical flow two images of
      368x496.
    - transformers, text: `input_ids` of `SEQUENCE_LENGTH` tokens, and `decoder_input_ids` of as many for an
      encoder-decoder.
    - transformers, images, video and audio features: what the config says; text and image together for CLIP and its
      kin.

    Raises:
        UsageError: the inputs cannot be known from the model; the message shows what to write.
    """
    if batch_size < 1:
        raise UsageError(f"expected a batch size of at least 1, got {batch_size}")
    module = built.module
    pretrained = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    if built.spec.startswith("torchvision:"):
        return _torchvision(built, batch_size)
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        return _transformers(built, batch_size)
    if isinstance(pretrained, Mapping) and pretrained.get("input_size"):
        channels, *size = pretrained["input_size"]
        size = _pair(built.settings.get("img_size")) or size
        return (TensorSpec((batch_size, built.settings.get("in_chans", channels), *size)),)
    tokens = ":".join([*required_parameters(module.forward)[:1], f"{batch_size}x{SEQUENCE_LENGTH}:int64"])
    raise _unknown_inputs_error(built, f"{batch_size}x3x224x224", tokens)


def _put(items: dict[str, Any], path: Sequence[str], value: Any, name: str) -> None:
    """Write one value into nested dicts."""
    head, *rest = path
    if rest and isinstance(items.setdefault(head, {}), dict):
        _put(items[head], rest, value, name)
    elif rest or head in items:
        raise UsageError(f"two inputs are named {name!r}; give each name once")
    else:
        items[head] = value


# --- one spec ---------------------------------------------------------------------------------------------------------


def _parse_shape(text: str, whole: str) -> tuple[int, ...]:
    shape = () if text == "scalar" else tuple(int(size) for size in re.split("[x,]", text))
    if 0 in shape:
        raise UsageError(f"expected dimensions of at least 1, got {whole!r}")
    return shape


def _parse_name(text: str, whole: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise UsageError(f"expected an argument's name before the shape, got {text!r} in {whole!r}")
    return text


def _parse_dtype(text: str, whole: str) -> str:
    name = text.removeprefix("torch.")
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        known = [*_SHORT_DTYPES, *(key for key, value in vars(torch).items() if isinstance(value, torch.dtype))]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or ["float32", "bf16", "int64"]
        raise UsageError(f"expected a dtype like {', '.join(near)}; got {text!r} in {whole!r}")
    return str(dtype).removeprefix("torch.")


def _make_tensor(spec: TensorSpec, weights_dtype: torch.dtype | None, channels_last: bool) -> torch.Tensor:
    if spec.dtype is not None:
        dtype: torch.dtype | None = getattr(torch, spec.dtype)
    elif spec.name is not None and _INTEGER_NAMES.fullmatch(spec.name.rpartition(".")[2]):
        dtype = torch.int64
    else:
        dtype = weights_dtype
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d} if channels_last else {}
    layout = layouts.get(len(spec.shape), torch.contiguous_format)
    try:
        return torch.empty(spec.shape, dtype=dtype, device="meta").contiguous(memory_format=layout)
    except RuntimeError as error:  # more bytes than an address can say
        raise UsageError(f"no tensor can be as large as {spec}") from error


def _run_factory(spec: FactorySpec, *, keep_values: bool) -> Batch:
    with process_unchanged(), importable(spec.reference):
        factory = load(spec.reference)
        if not callable(factory):
            batch = _read_made(spec, factory, "is", "a function that returns a tensor")
            return batch if keep_values else _move_to_meta(batch)
        if needed := ", ".join(required_parameters(factory)):
            raise UsageError(f"{spec} takes arguments ({needed}); expected a function that can be called without any")
        try:
            made, built_on, _ = (construct_with_values(factory), "cpu", ()) if keep_values else construct(factory)
            if is_loader(made) and built_on == "meta":
                made = construct_with_values(factory)
        except FxmemError:
            raise
        except (Exception, SystemExit) as error:
            raise user_code_error(error, str(spec)) from error
        batch = _read_made(spec, made, "returned", "a tensor")
        return batch if keep_values else _move_to_meta(batch)


def _read_made(spec: FactorySpec, made: object, is_or_returned: str, expected: str) -> Batch:
    """The batch that a reference names, or that its function returned."""
    if is_loader(made):
        with ignore_moves():
            return read_batch(made)
    if isinstance(made, torch.Tensor):
        return Batch((made,))
    if isinstance(made, Mapping) and all(isinstance(key, str) for key in made):
        return Batch((), dict(made))
    if isinstance(made, tuple):
        return Batch(tuple(made))
    kinds = f"{expected}, a tuple (positional) or a dict (keyword), a DataLoader or a Dataset"
    advice = "; return tuple(batch) to pass its items one by one, (batch,) to pass it whole"
    raise UsageError(
        f"{spec} {is_or_returned} a {type(made).__name__}; expected {kinds}{advice if isinstance(made, list) else ''}"
    )


def _move_to_meta(batch: Batch) -> Batch:
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (batch.args, dict(batch.kwargs)))
    return batch._replace(args=args, kwargs=kwargs)


# --- what models take -------------------------------------------------------------------------------------------------


def _unknown_inputs_error(built: BuiltModel, *examples: str) -> UsageError:
    takes = ", ".join(inspect.signature(built.module.forward).parameters)
    shown = f"write e.g. {' or '.join(f'--input {example}' for example in examples)}"
    return UsageError(f"{built.spec}: its inputs cannot be known from the model; its forward takes ({takes}), {shown}")


def _pair(size: Any) -> tuple[int, int] | None:
    """Height and width of a number, a pair or a dict; None of anything else."""
    match size:
        case int():
            return size, size
        case [int() as height, int() as width]:
            return height, width
        case {"height": int() as height, "width": int() as width}:
            return height, width
    return None


def _torchvision(built: BuiltModel, batch: int) -> tuple[TensorSpec, ...]:
    family = type(built.module).__module__.removeprefix("torchvision.models.")
    name = built.spec.removeprefix("torchvision:")
    match family.split("."):
        case ["detection", *_]:
            example = "file.py:make_batch (a list of images and, in training, a list of targets)"
            raise _unknown_inputs_error(built, example)
        case ["optical_flow", *_]:
            return (TensorSpec((batch, 3, 368, 496)), TensorSpec((batch, 3, 368, 496)))
        case ["segmentation", *_]:
            return (TensorSpec((batch, 3, 520, 520)),)
        case ["video", "resnet"]:
            return (TensorSpec((batch, 3, 16, 112, 112)),)
        case ["video", *_]:
            return (TensorSpec((batch, 3, 16, 224, 224)),)
    size = 299 if name.endswith("inception_v3") else getattr(built.module, "image_size", 224)
    return (TensorSpec((batch, 3, *(_pair(size) or (224, 224)))),)


def _transformers(built: BuiltModel, batch: int) -> tuple[TensorSpec, ...]:
    module: Any = built.module
    main, takes = str(module.main_input_name), inspect.signature(module.forward).parameters
    tokens = batch, _sequence_length(module.config, module)
    given = _inputs_without_labels(module, takes.keys(), tokens)
    # Not every encoder-decoder derives them from labels without a start token in its config.
    if "decoder_input_ids" in takes:
        given.append(TensorSpec(tokens, "int64", "decoder_input_ids"))
    names = {spec.name for spec in given}
    if main not in names or not names.issuperset(required_parameters(module.forward)):
        raise _unknown_inputs_error(built, *_examples(main, batch))
    return tuple(given)


def _inputs_without_labels(module: Any, takes: Set[str], tokens: tuple[int, int]) -> list[TensorSpec]:
    """Inputs without labels, if `main_input_name` and the config of the class give their shapes."""
    config, main, batch = module.config, module.main_input_name, tokens[0]
    text = TensorSpec(tokens, "int64", "input_ids")
    match main:
        case "input_ids" if {"return_loss", "pixel_values"} <= takes and hasattr(config, "vision_config"):
            return [text, *_image(config.vision_config, batch)]
        case "input_ids" if type(module).__name__.endswith("ForMultipleChoice"):
            return [TensorSpec((batch, 2, tokens[1]), "int64", "input_ids")]
        case "input_ids" if not takes & {"pixel_values", "pixel_values_videos", "input_features", "input_values"}:
            return [text]
        case "pixel_values" if "input_ids" not in takes:
            return _image(config, batch)
        case "input_features" | "input_values":
            return _audio(config, main, batch)
    return []


def _examples(main: str, batch: int) -> tuple[str, ...]:
    known = {
        "pixel_values": [f"pixel_values:{batch}x3x224x224"],
        "input_values": [f"input_values:{batch}x160000 (ten seconds at 16 kHz)"],
        "input_features": [f"input_features:{batch}x1000x80"],
        "input_ids": [f"input_ids:{batch}x{SEQUENCE_LENGTH}:int64", "file.py:make_batch (what the processor returns)"],
    }
    return tuple(known.get(main, ["file.py:make_batch (a dict of keyword arguments)"]))


def _sequence_length(config: Any, module: torch.nn.Module) -> int:
    """`SEQUENCE_LENGTH`, or the number of positions the model tells apart."""
    text = getattr(config, "text_config", config)
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    limits += [  # RoBERTa's first position is the one after the padding index
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in module.named_modules()
        if name.endswith("position_embeddings") and isinstance(table, torch.nn.Embedding)
    ]
    return min([SEQUENCE_LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _image(config: Any, batch: int) -> list[TensorSpec]:
    size = _pair(getattr(config, "image_size", None))
    if size is None:
        return []
    frames = getattr(config, "num_frames", None)
    several = (frames,) if isinstance(frames, int) else ()
    return [TensorSpec((batch, *several, getattr(config, "num_channels", 3), *size), None, "pixel_values")]


def _audio(config: Any, main: str, batch: int) -> list[TensorSpec]:
    """Spectrograms whose length the model fixes: Whisper's mel x 2 frames per position, AST's frames x mel."""
    names = ("num_mel_bins", "max_source_positions", "max_length")
    mel, positions, frames = (getattr(config, name, None) for name in names)
    if main == "input_features" and mel and positions:
        return [TensorSpec((batch, mel, 2 * positions), None, main)]
    return [TensorSpec((batch, frames, mel), None, main)] if main == "input_values" and mel and frames else []


_TEXT = ("decoder_input_ids", "input_ids", "inputs_embeds")
"""Inputs whose dimension 1 is the sequence that labels follow; the decoder's where there is one."""
_LABEL_EACH_TOKEN = (
    "ForCausalLM LMHeadModel MTModel ForMaskedLM ForTokenClassification ForConditionalGeneration".split()
)
_LABEL_EACH_SAMPLE = """
    ForSequenceClassification ForImageClassification ForVideoClassification ForAudioClassification ForMultipleChoice
    ForNextSentencePrediction
""".split()
"""Endings of names of transformers' classes, by what has a label of its own."""


def _labels(built: BuiltModel, tokens: tuple[int, int], given: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The labels of a transformers head, by the ending of its class's name; `tokens` are batch and length."""
    found = re.search(r"(LMHeadModel|MTModel|For[A-Z]\w*)$", type(built.module).__name__)
    each = tokens[:1]
    match found[1] if found else None:
        case task if task in _LABEL_EACH_TOKEN:
            return (TensorSpec(tokens, "int64", "labels"),)
        case "ForSequenceClassification" if getattr(built.module.config, "num_labels", None) == 1:  # a regression
            return (TensorSpec(each, str(built.weights_dtype).removeprefix("torch."), "labels"),)
        case task if task in _LABEL_EACH_SAMPLE:
            return (TensorSpec(each, "int64", "labels"),)
        case "ForQuestionAnswering":
            return (TensorSpec(each, "int64", "start_positions"), TensorSpec(each, "int64", "end_positions"))
        case "ForSemanticSegmentation":
            return tuple(TensorSpec((*each, *spec.shape[-2:]), "int64", "labels") for spec in given)
    return ()
