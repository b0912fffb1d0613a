"""Inputs: what each form of spec makes, what a model is given when nothing is said, and what each mistake is answered
with."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import make_inputs
from fxmem._torch.common import tree_leaves
from fxmem.cli.specs import build_model
from fxmem.cli.specs.inputs import (
    FactorySpec,
    InputSpec,
    TensorSpec,
    add_labels,
    default_inputs,
    make_batch,
    name_main_input,
    parse_input,
)
from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a Python file and returns its path."""

    def write_file(source: str) -> str:
        path = tmp_path / "batches.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write_file


# --- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec", "written"),
    [
        ("32x3x224x224", TensorSpec((32, 3, 224, 224)), "32x3x224x224"),
        ("8,1024", TensorSpec((8, 1024)), "8x1024"),
        ("7", TensorSpec((7,)), "7"),
        ("scalar", TensorSpec(()), "scalar"),
        ("2x3:bf16", TensorSpec((2, 3), "bfloat16"), "2x3:bfloat16"),
        ("2x3:fp16", TensorSpec((2, 3), "float16"), "2x3:float16"),
        ("2x3:fp32", TensorSpec((2, 3), "float32"), "2x3:float32"),
        ("2x3:torch.float64", TensorSpec((2, 3), "float64"), "2x3:float64"),
        ("2x3:long", TensorSpec((2, 3), "int64"), "2x3:int64"),
        ("2x3:int", TensorSpec((2, 3), "int32"), "2x3:int32"),
        ("2x3:bool", TensorSpec((2, 3), "bool"), "2x3:bool"),
        ("input_ids:8x1024:int64", TensorSpec((8, 1024), "int64", "input_ids"), "input_ids:8x1024:int64"),
        ("x:8x1024", TensorSpec((8, 1024), None, "x"), "x:8x1024"),
        ("t:scalar:float32", TensorSpec((), "float32", "t"), "t:scalar:float32"),
        ("pkg.mod:make_batch", FactorySpec("pkg.mod:make_batch"), "pkg.mod:make_batch"),
        ("a/b.py:Batches.make", FactorySpec("a/b.py:Batches.make"), "a/b.py:Batches.make"),
        ("C:/my dir/b.py:make", FactorySpec("C:/my dir/b.py:make"), "C:/my dir/b.py:make"),
    ],
)
def test_an_input_is_understood_and_written_back(text: str, spec: InputSpec, written: str) -> None:
    assert parse_input(text) == spec
    assert str(spec) == written
    assert parse_input(written) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "expected an input like 32x3x224x224, .*got 'hello'"),
        ("", "expected an input like"),
        ("2x:int64", "expected an input like"),
        ("2*3", "expected an input like"),
        ("a:b:c", "expected an input like"),
        ("x::float32", "expected an input like"),
        ("-1x3", "expected an input like"),
        ("2x0", "expected dimensions of at least 1, got '2x0'"),
        ("a b:2x3", "expected an argument's name before the shape, got 'a b' in 'a b:2x3'"),
        (":2x3", "expected an argument's name before the shape"),
        ("2x3:flot16", "expected a dtype like .*float16.*; got 'flot16' in '2x3:flot16'"),
        ("2x3:save", "expected a dtype like"),
        ("2x3:", "expected a dtype like float32, bf16, int64; got ''"),
    ],
)
def test_an_input_that_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_input(text)


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_inputs_are_on_meta_in_the_order_and_under_the_names_given() -> None:
    args, kwargs = make_inputs([parse_input(text) for text in ("2x3", "mask:4", "5:int64", "input_ids:6x7")])
    assert [(tuple(t.shape), t.dtype, t.device.type) for t in args] == [
        ((2, 3), torch.float32, "meta"),
        ((5,), torch.int64, "meta"),
    ]
    assert {name: (tuple(t.shape), t.device.type) for name, t in kwargs.items()} == {
        "mask": ((4,), "meta"),
        "input_ids": ((6, 7), "meta"),
    }


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("2x3", torch.bfloat16),
        ("pixel_values:2x3", torch.bfloat16),
        ("2x3:float32", torch.float32),
        ("input_ids:2x3", torch.int64),
        ("attention_mask:2x3", torch.int64),
        ("start_positions:2", torch.int64),
        ("labels:2x3", torch.int64),
        ("labels:2x3:fp32", torch.float32),
        ("covariates:2x3", torch.bfloat16),
    ],
)
def test_a_dtype_follows_the_weights_unless_said_or_named_otherwise(text: str, dtype: torch.dtype) -> None:
    args, kwargs = make_inputs([parse_input(text)], weights_dtype=torch.bfloat16)
    assert [tensor.dtype for tensor in (*args, *kwargs.values())] == [dtype]


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("hf:BertModel", ["4x128"], ["input_ids:4x128"]),
        ("hf:BertModel", ["4x128", "attention_mask:4x128"], ["input_ids:4x128", "attention_mask:4x128"]),
        ("hf:BertModel", ["4x128", "4x128"], ["4x128", "4x128"]),
        ("hf:BertModel", ["4x128x768"], ["4x128x768"]),
        ("hf:ViTModel", ["4x128"], ["4x128"]),
        ("torchvision:resnet18", ["4x128"], ["4x128"]),
    ],
)
def test_a_lone_shape_is_token_ids_where_a_model_takes_these(model: str, given: list[str], expected: list[str]) -> None:
    small = {"num_hidden_layers": 1} if model.startswith("hf:") else {}
    specs = name_main_input([parse_input(text) for text in given], build_model(model, small).module)
    assert [str(each) for each in specs] == expected


def test_channels_last_is_a_layout_of_4d_and_5d_inputs() -> None:
    specs = [parse_input(text) for text in ("2x3x4x5", "2x3x4x5x6", "2x3x4")]
    four, five, three = make_inputs(specs, channels_last=True)[0]
    assert four.stride() == (60, 1, 15, 3)
    assert five.is_contiguous(memory_format=torch.channels_last_3d)
    assert three.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in make_inputs(specs)[0])


def test_names_are_given_once_and_sizes_can_be_counted() -> None:
    with pytest.raises(UsageError, match="two inputs are named 'x'"):
        make_inputs([parse_input("x:2"), parse_input("x:3")])
    with pytest.raises(UsageError, match="no tensor can be as large as 99999999999x99999999999:int64"):
        make_inputs([parse_input("99999999999x99999999999:int64")])


# --- factories --------------------------------------------------------------------------------------------------------


BATCHES = """
    import collections, numpy, torch
    class Encoding(collections.UserDict): pass
    def tensor(): return torch.ones(2, 3)
    def several(): return torch.ones(2), [torch.ones(3), {"deep": torch.ones(4)}], 5
    def named(): return {"x": torch.ones(2, dtype=torch.float16), "flag": True}
    def encoding(): return Encoding(input_ids=torch.ones(2, 3, dtype=torch.int64))
    def from_numpy(): return torch.from_numpy(numpy.ones((2, 3)))
    def reads(): return torch.ones(int(torch.ones(7).sum().item()))
    def listed(): return [torch.ones(2)]
    def sized(n, m=2): return torch.ones(n)
    def fails():
        raise KeyError("no data")
    def nothing(): pass
    constant = 3
"""


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("tensor", [(2, 3)]),
        ("several", [(2,), (3,), (4,)]),
        ("named", [(2,)]),
        ("encoding", [(2, 3)]),
        ("from_numpy", [(2, 3)]),
        ("reads", [(7,)]),
    ],
)
def test_a_factory_gives_meta_tensors(write: Any, name: str, shapes: list[tuple[int, ...]]) -> None:
    state, path = torch.get_rng_state().tolist(), list(sys.path)
    args, kwargs = make_inputs([parse_input(f"{write(BATCHES)}:{name}")], weights_dtype=torch.bfloat16)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert torch.bfloat16 not in {tensor.dtype for tensor in tensors}
    assert (torch.get_rng_state().tolist(), sys.path) == (state, path)


def test_a_factory_keeps_its_values_where_these_are_asked_for(write: Any) -> None:
    path = write("import torch\n\ndef make():\n    return torch.full((2, 3), 7)\n")
    (made,) = make_batch([FactorySpec(f"{path}:make")], keep_values=True).args
    assert made.tolist() == [[7, 7, 7], [7, 7, 7]]


def test_a_tuple_is_positional_and_a_dict_is_keywords(write: Any) -> None:
    path = write(BATCHES)
    args, kwargs = make_inputs(
        [
            parse_input("9"),
            FactorySpec(f"{path}:several"),
            FactorySpec(f"{path}:named"),
            FactorySpec(f"{path}:encoding"),
        ]
    )
    assert len(args) == 4
    assert args[3] == 5
    assert list(kwargs) == ["x", "flag", "input_ids"]
    assert kwargs["flag"] is True
    with pytest.raises(UsageError, match="two inputs are named 'x'"):
        make_inputs([FactorySpec(f"{path}:named"), parse_input("x:2")])


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("listed", UsageError, r"listed returned a list; expected a tensor, a tuple .* return tuple\(batch\)"),
        ("nothing", UsageError, "nothing returned a NoneType; expected a tensor"),
        ("sized", UsageError, r"sized takes arguments \(n\); expected a function that can be called without any"),
        ("constant", UsageError, "constant is a int; expected a function that returns a tensor"),
        ("tensr", UsageError, "batches.py has no 'tensr'; closest: tensor"),
        ("fails", AnalysisError, r"fails raised at .*batches.py:13: KeyError: 'no data'"),
    ],
)
def test_a_factory_that_cannot_be_used(write: Any, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_inputs([FactorySpec(f"{write(BATCHES)}:{name}")])


def test_a_factory_that_lacks_a_package_says_which(write: Any) -> None:
    path = write("def make():\n    import not_installed_anywhere")
    with pytest.raises(
        EnvironmentLacksError, match=r"batches.py:2: ModuleNotFoundError: No module named 'not_installed_anywhere'"
    ):
        make_inputs([FactorySpec(f"{path}:make")])
    with pytest.raises(UsageError, match="no module 'no_such_module'"):
        make_inputs([FactorySpec("no_such_module:make")])


# --- defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.truth
@pytest.mark.parametrize(
    ("spec", "settings", "inputs"),
    [
        ("torchvision:resnet18", {}, ["2x3x224x224"]),
        ("torchvision:inception_v3", {}, ["2x3x299x299"]),
        ("torchvision:vit_b_16", {"image_size": 64}, ["2x3x64x64"]),
        ("torchvision:lraspp_mobilenet_v3_large", {}, ["2x3x520x520"]),
        ("torchvision:r3d_18", {}, ["2x3x16x112x112"]),
        ("torchvision:s3d", {}, ["2x3x16x224x224"]),
        ("torchvision:raft_small", {}, ["2x3x368x496", "2x3x368x496"]),
        ("timm:resnet18", {}, ["2x3x224x224"]),
        ("timm:vit_tiny_patch16_224", {"img_size": [64, 32], "in_chans": 1}, ["2x1x64x32"]),
        ("timm:tf_efficientnet_b1", {}, ["2x3x240x240"]),
        ("hf:GPT2LMHeadModel", {}, ["input_ids:2x1024:int64", "labels:2x1024:int64"]),
        (
            "hf:LlamaForCausalLM",
            {"num_hidden_layers": 1, "max_position_embeddings": 64},
            ["input_ids:2x64:int64", "labels:2x64:int64"],
        ),
        ("hf:RobertaForTokenClassification", {}, ["input_ids:2x510:int64", "labels:2x510:int64"]),
        ("hf:XLNetLMHeadModel", {}, ["input_ids:2x1024:int64", "labels:2x1024:int64"]),  # says -1 for no limit
        ("hf:BertForSequenceClassification", {}, ["input_ids:2x512:int64", "labels:2:int64"]),
        ("hf:BertForSequenceClassification", {"num_labels": 1}, ["input_ids:2x512:int64", "labels:2:float32"]),
        ("hf:BertForMultipleChoice", {}, ["input_ids:2x2x512:int64", "labels:2:int64"]),
        (
            "hf:BertForQuestionAnswering",
            {},
            ["input_ids:2x512:int64", "start_positions:2:int64", "end_positions:2:int64"],
        ),
        (
            "hf:T5ForConditionalGeneration",
            {},
            ["input_ids:2x1024:int64", "decoder_input_ids:2x1024:int64", "labels:2x1024:int64"],
        ),
        ("hf:T5EncoderModel", {}, ["input_ids:2x1024:int64"]),
        ("hf:MarianMTModel", {}, ["input_ids:2x1024:int64", "decoder_input_ids:2x1024:int64", "labels:2x1024:int64"]),
        (
            "hf:WhisperForConditionalGeneration",
            {},
            ["input_features:2x80x3000", "decoder_input_ids:2x448:int64", "labels:2x448:int64"],
        ),
        ("hf:ASTForAudioClassification", {}, ["input_values:2x1024x128", "labels:2:int64"]),
        (
            "hf:ViTForImageClassification",
            {"image_size": [64, 32], "num_channels": 1},
            ["pixel_values:2x1x64x32", "labels:2:int64"],
        ),
        ("hf:VideoMAEForVideoClassification", {}, ["pixel_values:2x16x3x224x224", "labels:2:int64"]),
        (
            "hf:BeitForSemanticSegmentation",
            {"out_indices": [3, 5, 7, 11]},
            ["pixel_values:2x3x224x224", "labels:2x224x224:int64"],
        ),
        ("hf:CLIPModel", {}, ["input_ids:2x77:int64", "pixel_values:2x3x224x224"]),
    ],
)
def test_a_known_model_gets_inputs_it_runs_on(spec: str, settings: dict[str, Any], inputs: list[str]) -> None:
    built = build_model(spec, settings)
    specs = add_labels(default_inputs(built, 2), built)
    assert [str(spec) for spec in specs] == inputs
    assert [parse_input(text) for text in inputs] == list(specs)


@pytest.mark.parametrize(
    ("spec", "weights_dtype"),
    [
        ("torchvision:raft_small", None),
        ("torchvision:r3d_18", "bf16"),
        ("timm:resnet18", "fp16"),
        ("hf:ViTForImageClassification", "bf16"),
        ("hf:BertForMultipleChoice", None),
    ],
)
def test_a_model_runs_on_its_default_inputs(spec: str, weights_dtype: Any) -> None:
    built = build_model(spec, weights_dtype=weights_dtype)
    args, kwargs = make_inputs(add_labels(default_inputs(built, 2), built), weights_dtype=built.weights_dtype)
    with torch.device("meta"), torch.no_grad():
        made = built.module(*args, **kwargs)
    assert tree_leaves(made)[0].is_meta


@pytest.mark.parametrize(
    ("spec", "given", "added"),
    [
        ("hf:GPT2LMHeadModel", ["input_ids:2x96"], ["labels:2x96:int64"]),
        ("hf:GPT2LMHeadModel", ["inputs_embeds:2x96x768"], ["labels:2x96:int64"]),
        ("hf:GPT2LMHeadModel", ["input_ids:2x96", "labels:2x96"], []),
        ("hf:GPT2LMHeadModel", ["pkg.mod:make_batch"], []),
        ("hf:BertForMaskedLM", ["2x96"] * 8, []),  # the eighth is labels
        ("hf:BertModel", ["input_ids:2x96"], []),
        ("hf:T5ForConditionalGeneration", ["input_ids:2x96", "decoder_input_ids:2x8"], ["labels:2x8:int64"]),
        ("hf:ViTForImageClassification", ["2x3x224x224"], ["labels:2:int64"]),
        ("torchvision:resnet18", ["2x3x224x224"], []),
    ],
)
def test_a_head_that_trains_gets_labels_of_the_inputs_given(spec: str, given: list[str], added: list[str]) -> None:
    inputs = [parse_input(text) for text in given]
    assert [str(each) for each in add_labels(inputs, build_model(spec))[len(given) :]] == added


def test_inference_has_no_labels() -> None:
    built = build_model("hf:T5ForConditionalGeneration", mode="infer")
    assert [str(spec) for spec in add_labels(default_inputs(built, 3), built)] == [
        "input_ids:3x1024:int64",
        "decoder_input_ids:3x1024:int64",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "torch.nn:Identity",
            r"its forward takes \(input\), write e.g. --input 2x3x224x224 or --input input:2x1024:int64",
        ),
        (
            "torchvision:fasterrcnn_mobilenet_v3_large_fpn",
            r"takes \(images, targets\), write e.g. --input file.py:make_batch",
        ),
        ("hf:ResNetForImageClassification", "write e.g. --input pixel_values:2x3x224x224"),
        ("hf:Wav2Vec2ForCTC", "write e.g. --input input_values:2x160000"),
        ("hf:Speech2TextForConditionalGeneration", "write e.g. --input input_features:2x1000x80"),
        ("hf:LlavaForConditionalGeneration", "write e.g. --input input_ids:2x1024:int64 or --input file.py:make_batch"),
        ("hf:VJEPA2Model", "write e.g. --input file.py:make_batch"),
    ],
)
def test_a_model_whose_inputs_cannot_be_known(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        default_inputs(build_model(spec), 2)
    assert "\n" not in str(raised.value)


def test_a_batch_has_at_least_one_example() -> None:
    with pytest.raises(UsageError, match="expected a batch size of at least 1, got 0"):
        default_inputs(build_model("torchvision:resnet18"), 0)
