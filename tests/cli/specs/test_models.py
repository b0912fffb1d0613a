"""Building models: what each form of spec gives, that no weights are allocated, and what each mistake is answered
with."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sys
import textwrap
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fxmem.cli.specs import BuiltModel, build_model, parse_settings
from fxmem.errors import AnalysisError, EnvironmentLacksError, FxmemError, UsageError
from fxmem.simulation.processes.process_guard import process_unchanged, without_network

TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a Python file and returns its path."""

    def write_file(source: str, name: str = "models.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write_file


def registered(built: BuiltModel) -> dict[str, torch.Tensor]:
    module = built.module
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def config(built: BuiltModel) -> Any:
    return built.module.config


def random_states() -> tuple[object, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def assert_all_on_meta(built: BuiltModel) -> None:
    tensors = registered(built)
    assert tensors
    assert [name for name, tensor in tensors.items() if not tensor.is_meta] == []


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-3", 0.001),
        ("true", True),
        ("True", True),
        ("null", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("(1, 2)", (1, 2)),
        ('{"a": 1}', {"a": 1}),
        ("text", "text"),
        ("a=b", "a=b"),
        ("", ""),
        ("__import__('os').getcwd()", "__import__('os').getcwd()"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_a_setting_is_json_or_a_python_literal_or_text(text: str, value: object) -> None:
    assert parse_settings([f"key={text}", "text_config.width=2"]) == {"key": value, "text_config.width": 2}


@pytest.mark.parametrize("text", ["width", "=3", "a b=3", "a..b=3", "3a=1"])
def test_a_setting_needs_a_name_and_a_value(text: str) -> None:
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        parse_settings([text])


def test_a_setting_is_given_once() -> None:
    with pytest.raises(UsageError, match="'a' is given twice"):
        parse_settings(["a=1", "a=2"])


# --- the collections --------------------------------------------------------------------------------------------------


def test_torchvision_is_built_on_meta() -> None:
    built = build_model("torchvision:resnet18", {"num_classes": 7})
    assert_all_on_meta(built)
    assert built.built_on == "meta"
    assert built.notes == ()
    assert built.weights_dtype == torch.float32
    assert registered(built)["fc.weight"].shape == (7, 512)


@pytest.mark.parametrize("name", ["googlenet", "fcn_resnet50", "fasterrcnn_mobilenet_v3_large_320_fpn"])
def test_torchvision_loads_no_weights_and_warns_of_none(name: str) -> None:
    assert_all_on_meta(build_model(f"torchvision:{name}"))


def test_a_constructor_that_reads_values_runs_on_the_cpu() -> None:
    built = build_model("torchvision:regnet_y_400mf")
    assert_all_on_meta(built)
    assert built.built_on == "cpu"
    assert "its constructor reads values (NotImplementedError: Cannot copy out of meta tensor" in built.notes[0]
    assert sum(p.numel() for p in built.module.parameters()) == 4_344_144  # what torchvision's documentation says


def test_timm_is_built_on_meta() -> None:
    built = build_model("timm:vit_tiny_patch16_224.augreg_in21k", {"img_size": 32, "num_classes": 10})
    assert_all_on_meta(built)
    assert registered(built)["pos_embed"].shape == (1, 5, 192)


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("GPT2LMHeadModel", ["transformer.wte.weight", "lm_head.weight"]),
        (
            "T5ForConditionalGeneration",
            ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
        ),
        ("BertForMaskedLM", ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"]),
    ],
)
@pytest.mark.parametrize("weights_dtype", [None, "bf16"])
def test_tied_weights_stay_tied(name: str, tied: list[str], weights_dtype: Any) -> None:
    built = build_model(f"hf:{name}", weights_dtype=weights_dtype)
    assert_all_on_meta(built)
    tensors = registered(built)
    assert len({id(tensors[key]) for key in tied}) == 1


def test_the_cache_is_off_in_training_only() -> None:
    train, infer = (build_model("hf:T5Model", mode=mode) for mode in ("train", "infer"))
    assert train.module.training
    assert not infer.module.training
    parts: list[Any] = [part for part in train.module.modules() if hasattr(part, "config")]
    assert {part.config.use_cache for part in parts} == {False}
    assert config(infer).use_cache


def test_settings_are_fields_of_the_config() -> None:
    built = build_model(
        "hf:LlamaForCausalLM", {**TINY_LLAMA, "rope_parameters.rope_theta": 5e5, "attn_implementation": "eager"}
    )
    assert (config(built).hidden_size, config(built).head_dim) == (64, 16)
    assert config(built).rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
    assert config(built)._attn_implementation == "eager"
    assert config(build_model("hf:GPT2LMHeadModel", {"num_hidden_layers": 1})).n_layer == 1  # an alias


def test_settings_reach_sub_configs_and_leave_the_rest_of_them() -> None:
    text = {f"text_config.{key}": value for key, value in TINY_LLAMA.items()}
    made = config(build_model("hf:LlavaForConditionalGeneration", {**text, "vision_config": {"num_hidden_layers": 1}}))
    assert (made.text_config.hidden_size, made.text_config.head_dim) == (64, 16)
    assert (made.vision_config.num_hidden_layers, made.vision_config.hidden_size, made.vision_config.image_size) == (
        1,
        1024,
        336,
    )


def test_a_config_file_names_its_class_and_dtype(tmp_path: Path) -> None:
    fields = TINY_LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"quantization_config": {"quant_method": "fp8"}}))
    for spec in (f"hf:{path}", f"hf:{tmp_path}"):
        built = build_model(spec, {"num_hidden_layers": 1})
        assert_all_on_meta(built)
        assert type(built.module).__name__ == "LlamaForCausalLM"
        assert built.weights_dtype == torch.bfloat16
        assert config(built).num_hidden_layers == 1
        assert [re.split(r"[,;]| and take", note)[0] for note in built.notes] == [
            "weights in bfloat16",
            "the checkpoint's weights are packed (fp8)",
        ]
    assert torch.get_default_dtype() == torch.float32
    assert build_model(spec, {"dtype": "float32"}).weights_dtype == torch.float32


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_seventy_billion_parameters_take_no_memory() -> None:
    import resource

    settings = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64}
    build_model("hf:LlamaForCausalLM", TINY_LLAMA)  # the imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    built = build_model("hf:LlamaForCausalLM", settings | {"num_key_value_heads": 8, "vocab_size": 128256})
    assert sum(p.numel() for p in built.module.parameters()) == 70_553_706_496  # what Llama 3 70B's card says
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_a_model_built_on_the_cpu_takes_no_memory_either(write: Any) -> None:
    import resource

    path = write("""
        import torch
        class Wide(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.width = int(torch.tensor(8192).item())
                self.layers = torch.nn.ModuleList(torch.nn.Linear(self.width, self.width) for _ in range(8))
                for layer in self.layers:
                    torch.nn.init.trunc_normal_(layer.weight)
    """)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    built = build_model(f"{path}:Wide", weights_dtype="bf16", channels_last=True)
    assert built.built_on == "cpu"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB; one layer alone is 256 MiB


# --- casts and layouts ------------------------------------------------------------------------------------------------


def test_weights_are_cast_and_integers_are_not() -> None:
    tensors = registered(build_model("torchvision:resnet18", weights_dtype="fp16"))
    assert tensors["bn1.running_mean"].dtype == tensors["conv1.weight"].dtype == torch.float16
    assert tensors["bn1.num_batches_tracked"].dtype == torch.int64


def test_channels_last_is_a_layout_of_4d_and_5d_weights(write: Any) -> None:
    path = write("""
        from torch.nn import Conv2d, Conv3d, LazyLinear, Sequential
        def mixed():
            return Sequential(Conv2d(3, 8, 3), Conv3d(3, 8, 3), LazyLinear(3))
    """)
    built = build_model(f"{path}:mixed", channels_last=True)
    tensors = registered(built)
    assert tensors["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert tensors["1.weight"].is_contiguous(memory_format=torch.channels_last_3d)
    assert built.channels_last


# --- models of one's own ----------------------------------------------------------------------------------------------


OWN = """
    import dataclasses, torch
    import sibling

    @dataclasses.dataclass
    class Sizes:
        width: int = 4

    class Net(torch.nn.Module):
        def __init__(self, width: int = Sizes().width, *, depth: int = 1) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))

    class Outer:
        @staticmethod
        def build(**sizes):
            from late import doubled
            print("building")
            return Net(**doubled(sizes))
"""


@pytest.fixture
def own(write: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    write("VALUE = 1", "sibling.py")
    write("def doubled(sizes): return {key: 2 * value for key, value in sizes.items()}", "late.py")
    for name in ("sibling", "late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(write(OWN))


@pytest.mark.parametrize(("name", "width", "depth"), [("Net", 3, 2), ("Outer.build", 6, 4)])
def test_a_file_gives_a_class_or_a_function(
    own: str, name: str, width: int, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list(sys.path)
    built = build_model(f"{own}:{name}", {"width": 3, "depth": 2})
    assert_all_on_meta(built)
    assert [tensor.shape for name, tensor in registered(built).items() if name.endswith("weight")] == [
        (width, width)
    ] * depth
    assert sys.path == path
    assert "models" not in sys.modules
    assert capsys.readouterr().out == ""


def test_a_file_is_read_anew_each_time(write: Any) -> None:
    path = write("from torch.nn import Linear\ndef make(): return Linear(2, 2)")
    first = build_model(f"{path}:make")
    os.utime(write("from torch.nn import Linear\ndef make(): return Linear(2, 333)"), (1, 1))
    assert registered(first)["weight"].shape == (2, 2)
    assert registered(build_model(f"{path}:make"))["weight"].shape == (333, 2)


def test_a_module_is_found_from_the_working_directory(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("", "own_package/__init__.py")
    write("from torch.nn import Linear\nready = Linear(2, 3)", "own_package/models.py")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    try:
        built = build_model("own_package.models:ready", mode="infer")
    finally:
        for name in ("own_package", "own_package.models"):
            sys.modules.pop(name, None)
    assert built.built_on == "cpu"
    assert built.notes == ("its parameters were allocated before fxmem saw the module",)
    assert not built.module.training
    assert sys.path == path


AWKWARD = """
    import torch
    class Old(torch.nn.Module):
        def __init__(self, reads_values: bool) -> None:
            super().__init__()
            if reads_values:
                self.rates = torch.linspace(0, 1, 3).tolist()
            self.a = torch.nn.Module()
            self.a.weight = torch.nn.Parameter(torch.Tensor(3, 4), requires_grad=False)
            self.b = torch.nn.Module()
            self.b.weight = self.b.again = self.a.weight
            raw = torch.nn.Parameter(torch.FloatTensor(2))
            self.c, self.d = raw, raw
            self.register_buffer("table", torch.from_numpy(__import__("numpy").arange(5)), persistent=False)
            self.rnn = torch.nn.LSTM(3, 4)
            torch.nn.init.orthogonal_(self.rnn.weight_hh_l0)
"""


@pytest.mark.parametrize("reads_values", [False, True])
def test_old_ways_to_make_tensors_go_to_meta_and_keep_their_ties(write: Any, reads_values: bool) -> None:
    built = build_model(f"{write(AWKWARD)}:Old", {"reads_values": reads_values})
    assert built.built_on == ("cpu" if reads_values else "meta")
    assert_all_on_meta(built)
    module: Any = built.module
    assert module.a.weight is module.b.weight is module.b.again
    assert module.c is module.d
    assert not module.a.weight.requires_grad
    assert module.table.dtype == torch.int64
    assert "table" not in module.state_dict()
    assert all(weight.is_meta for weight in module.rnn.all_weights[0])
    assert len(list(module.parameters())) == 2 + 4


def test_the_process_is_left_as_it_was(write: Any) -> None:
    path = write("""
        import random, sys, numpy, torch
        sys.path.append("/nowhere")
        torch.manual_seed(1)
        def make(fail):
            random.seed(1); numpy.random.seed(1); torch.manual_seed(1); torch.rand(3, device="cpu")
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("cpu")
            torch.set_grad_enabled(False)
            if fail == "value":
                torch.ones(1).item()
            if fail == "error":
                raise ValueError("no")
            return torch.nn.Linear(2, 2)
    """)
    before = random_states(), list(sys.path), dict(os.environ)
    for fail in ("", "value", "error"):
        try:
            built = build_model(f"{path}:make", {"fail": fail})
        except AnalysisError:
            assert fail == "error"
        else:
            assert_all_on_meta(built)
            assert built.weights_dtype == torch.float64
        assert (random_states(), list(sys.path), dict(os.environ)) == before
        assert torch.get_default_dtype() == torch.float32
        assert torch.ones(1).device.type == "cpu"
        assert not torch.overrides.has_torch_function((torch.ones(1),))
        assert torch.is_grad_enabled()


def test_a_device_that_is_current_is_not_made_the_default() -> None:
    with torch.device("meta"), process_unchanged():
        assert torch.ones(1).is_meta
    with torch.overrides.BaseTorchFunctionMode(), process_unchanged():
        pass
    assert torch.ones(1).device.type == "cpu"


# --- no network -------------------------------------------------------------------------------------------------------


def test_without_network_refuses_this_thread_and_restores() -> None:
    from huggingface_hub import constants, get_session, is_offline_mode
    from huggingface_hub.errors import OfflineModeIsEnabled

    before, environment, offline = socket.getaddrinfo, dict(os.environ), constants.HF_HUB_OFFLINE
    with without_network():
        with pytest.raises(ConnectionError, match="downloads nothing"):
            socket.create_connection(("localhost", 1))
        assert is_offline_mode()
        with pytest.raises(OfflineModeIsEnabled):
            get_session().get("http://localhost:1")
        others: list[object] = []
        other = threading.Thread(target=lambda: others.append(socket.getaddrinfo("127.0.0.1", 80)))
        other.start()
        other.join()
        assert others[0]
    assert socket.getaddrinfo is before
    assert constants.HF_HUB_OFFLINE is offline
    assert dict(os.environ) == environment


def test_a_model_that_wants_to_download_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    monkeypatch.setattr(
        timm, "create_model", lambda *args, **kwargs: urllib.request.urlopen("http://example.invalid/weights")
    )
    with pytest.raises(
        UsageError, match=r"timm:resnet18 wanted to download something .*from their configuration alone"
    ):
        build_model("timm:resnet18")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (
            "resnet50",
            {},
            r"expected a model as torchvision:NAME, .* got 'resnet50'; did you mean torchvision:resnet50\?",
        ),
        ("vit_tiny_patch16_224", {}, r"did you mean timm:vit_tiny_patch16_224\?"),
        ("LlamaForCausalLM", {}, r"did you mean hf:LlamaForCausalLM\?"),
        ("some model", {}, "expected a model as .* got 'some model'$"),
        ("a..b:f", {}, "expected a model as"),
        ("torchvision:resnet5O", {}, "torchvision has no model 'resnet5O'; closest: .*resnet50"),
        ("torchvision:zzzzzzzzzz", {}, r"no model 'zzzzzzzzzz'; see torchvision.models.list_models\(\)"),
        ("timm:rexnet50", {}, "timm has no model 'rexnet50'; closest: rexnet"),
        ("timm:hf-hub:timm/resnet50", {}, "timm has no model 'hf-hub:timm/resnet50'"),
        ("timm:resnet50.a1_in2k", {}, "timm has no 'resnet50.a1_in2k'; closest: .*resnet50.a1_in1k"),
        ("hf:LlamaForCausalML", {}, "transformers has no model class 'LlamaForCausalML'; closest: LlamaForCausalLM"),
        (
            "hf:meta-llama/Llama-3.1-8",
            {},
            "no configuration of hf:meta-llama/Llama-3.1-8 is at hand; closest: meta-llama/Llama-3.1-8B",
        ),
        ("hf:AutoModelForCausalLM", {}, "picks a class from a checkpoint; name the class itself"),
        ("hf:LlamaConfig", {}, "no model class with a config"),
        ("hf:PreTrainedModel", {}, "no model class with a config"),
        (
            "hf:nowhere/config.json",
            {},
            "expected a local config.json, got 'nowhere/config.json': No such file or directory",
        ),
        (
            "torchvision:resnet18",
            {"num_class": 7},
            "has no setting 'num_class'; closest: num_classes; it has groups, .*num_classes",
        ),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, "setting 'weights' is about weights; fxmem never loads any"),
        ("timm:resnet18", {"num_class": 7}, "has no setting 'num_class'; closest: num_classes.*; it has .*num_classes"),
        ("timm:resnet18", {"pretrained": True}, "setting 'pretrained' is about weights"),
        (
            "hf:LlamaForCausalLM",
            {"hiden_size": 7},
            "has no setting 'hiden_size'; closest: hidden_size, .*; it has .*vocab_size$",
        ),
        ("hf:LlamaForCausalLM", {"vocab_size.a": 7}, "no setting 'vocab_size.a': vocab_size is 32000"),
        (
            "hf:LlamaForCausalLM",
            {"hidden_size": "big"},
            "LlamaConfig takes no such settings: .*hidden_size.*expected int, got str",
        ),
        (
            "hf:LlavaForConditionalGeneration",
            {"text_config.hiden_size": 7},
            "text_config has no setting 'hiden_size'; closest: hidden_size",
        ),
        (
            "torch.nn:Linear",
            {"in_features": 3},
            r"torch.nn:Linear needs out_features; say e.g. --set out_features=VALUE",
        ),
        (
            "torch.nn:Linear",
            {"in_featurs": 3},
            "has no setting 'in_featurs'; closest: in_features.*; it has bias, device, dtype, in_features",
        ),
        ("torch.nn:Linaer", {}, "torch.nn has no 'Linaer'; closest: Linear"),
        ("torch.nn:Linear.a.b", {}, "torch.nn has no 'Linear.a.b'"),
        ("math:pi", {}, "math:pi is a float; expected an nn.Module class"),
        ("datetime:datetime.now", {}, "datetime:datetime.now returned a datetime; expected a torch.nn.Module"),
        ("transformers:LlamaForCausalLM", {}, "is a transformers class; write hf:LlamaForCausalLM"),
        ("no_such_package.models:f", {}, "no module 'no_such_package.models' in the working directory or on sys.path"),
        ("nowhere/models.py:Net", {}, "no file nowhere/models.py"),
        ("setup/models.txt:Net", {}, "no file setup/models.txt"),
    ],
)
def test_a_mistake_is_answered_in_one_line(spec: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        build_model(spec, settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("def make(:\n    pass", UsageError, "models.py is not Python: line 1: invalid syntax"),
        ("def make(): return None", UsageError, "make returned None; expected a torch.nn.Module"),
        ("import torch\ndef make(): return torch.nn.Linear", UsageError, "make returned the class Linear; expected"),
        (
            "import torch\ndef make(): return torch.nn.Linear(2, 2), 3",
            UsageError,
            "returned a tuple whose first item is one: return the module alone",
        ),
        ("make = 3", UsageError, "make is a int; expected an nn.Module class, a function"),
        ("def mak(): pass", UsageError, "models.py has no 'make'; closest: mak"),
        (
            "import not_installed_anywhere",
            EnvironmentLacksError,
            r"importing .*models.py needs something that is not installed at .*models.py:1: .*'not_installed_anywhere'",
        ),
        (
            "def make():\n  import not_installed_anywhere",
            EnvironmentLacksError,
            r"make needs something that is not installed at .*models.py:2: ",
        ),
        (
            "def make():\n  raise ImportError('needs apex')",
            EnvironmentLacksError,
            "not installed at .*models.py:2: ImportError: needs apex",
        ),
        (
            "def make():\n  from math import nothing",
            AnalysisError,
            "make raised at .*models.py:2: ImportError: cannot import name 'nothing'",
        ),
        (
            "\n1 / 0",
            AnalysisError,
            r"importing .*models.py raised at .*models.py:2: ZeroDivisionError: division by zero",
        ),
        (
            "def make():\n  x = 1\n  raise ValueError('bad\\nwidth')",
            AnalysisError,
            r"make raised at .*models.py:3: ValueError: bad width$",
        ),
        (
            "import torch\ndef make():\n  return torch.nn.Linear('a', 2)",
            AnalysisError,
            r"make raised at .*models.py:3: TypeError: ",
        ),
        ("def make():\n  raise ValueError('x' * 999)", AnalysisError, r"x\.\.\.$"),
        ("def make():\n  raise AssertionError", AnalysisError, "models.py:2: AssertionError$"),
        (
            "import sys\nsys.exit(3)",
            AnalysisError,
            "importing .* called sys.exit at .*models.py:2; keep what a script runs under `if __name__",
        ),
        ("def make():\n  raise SystemExit", AnalysisError, "make called sys.exit at .*models.py:2"),
        (
            "def make():\n  def inner(): pass\n  inner(depth=1)",
            AnalysisError,
            "models.py:3: TypeError: .*unexpected keyword argument 'depth'",
        ),
        (
            "import torch\ndef make():\n  torch.ones(1).item()\n  raise ValueError('after')",
            AnalysisError,
            "models.py:4: ValueError: after",
        ),
    ],
)
def test_a_fault_in_the_users_file_names_its_line(
    write: Any, source: str, error: type[FxmemError], message: str
) -> None:
    modules = set(sys.modules)
    with pytest.raises(error, match=message) as raised:
        build_model(f"{write(source)}:make")
    assert type(raised.value) is error
    assert "\n" not in str(raised.value)
    if "importing" in message:
        assert not any(name.startswith("_fxmem_") for name in set(sys.modules) - modules)


def test_a_fault_in_a_neighbouring_file_names_that_file(write: Any) -> None:
    write("x = (", "broken_neighbour.py")
    with pytest.raises(AnalysisError, match=r"importing .*models.py raised at .*broken_neighbour.py:1: SyntaxError"):
        build_model(f"{write('import broken_neighbour')}:make")


def test_bytes_are_not_python(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_bytes(b"\x00\xff\x00")
    with pytest.raises(UsageError, match=r"models.py is not Python"):
        build_model(f"{tmp_path}/models.py:make")
    (tmp_path / "models.txt").write_text("")
    with pytest.raises(UsageError, match=r"expected a .py file, got .*models.txt"):
        build_model(f"{tmp_path}/models.txt:make")


def test_a_module_that_exists_takes_no_settings(write: Any) -> None:
    with pytest.raises(UsageError, match="is a module already, it takes no settings"):
        build_model(f"{write('import torch; make = torch.nn.Linear(2, 2)')}:make", {"width": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json', which is no JSON"),
        ("[]", 'names no model class; add one, e.g. "architectures"'),
        ('{"architectures": []}', "names no model class"),
        ('{"architectures": ["RemoteForCausalLM"]}', "transformers has no model class 'RemoteForCausalLM'"),
        (
            '{"architectures": ["LlamaForCausalLM"], "hidden_size": 65}',
            "LlamaConfig takes no such configuration: .*not a multiple of",
        ),
    ],
)
def test_a_config_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        build_model(f"hf:{tmp_path}/config.json")


@pytest.mark.parametrize("package", ["torchvision", "timm", "transformers"])
def test_a_missing_collection_says_how_to_get_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    spec = {"transformers": "hf:LlamaForCausalLM"}.get(package, f"{package}:resnet18")
    with pytest.raises(EnvironmentLacksError, match=rf'{package} is not installed; pip install "fxmem\[zoo\]"'):
        build_model(spec)


def test_a_broken_collection_says_what_is_wrong(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("from math import nothing", "timm/__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name == "timm" or name.startswith("timm.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        EnvironmentLacksError, match=r"timm cannot be imported .ImportError: cannot import name 'nothing'"
    ):
        build_model("timm:resnet18")


def test_a_file_without_a_name_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"own\.py:NAME"):
        build_model(str(tmp_path / "own.py"))
