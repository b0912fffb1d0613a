"""A sample of the zoo: small architectures of every kind, analysed for a card as `make -C benchmarks zoo` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.zoo import architectures, zoo
from benchmarks.zoo.calls import make_calls

pytestmark = pytest.mark.truth

HARDEST = (
    *("torchvision:lraspp_mobilenet_v3_large", "torchvision:quantized_resnet18", "timm:dla34", "timm:test_vit_relpos"),
    *("timm:efficientvit_b0", "timm:levit_128", "hf:MixtralForCausalLM", "hf:FalconMambaForCausalLM"),
    *("hf:FNetForMaskedLM", "hf:DebertaV2ForMaskedLM", "hf:PegasusForConditionalGeneration", "hf:BigBirdForCausalLM"),
    *("hf:XGLMForCausalLM", "hf:WhisperForConditionalGeneration", "hf:LlavaForConditionalGeneration"),
)
"""Of the sample, one of each kind that has operators or data of its own; `zoo.py --quick` takes all."""
RECORDED = (
    *("timm:dla34", "timm:test_vit_relpos", "hf:XGLMForCausalLM", "hf:BigBirdForCausalLM", "hf:MixtralForCausalLM"),
    *("hf:PegasusForConditionalGeneration",),
)
"""Of those; `zoo.py --quick --recorded` holds all of the sample to that."""


def test_the_hardest_are_of_the_sample() -> None:
    assert set(RECORDED) < set(HARDEST) < set(architectures.SAMPLE)


@pytest.mark.filterwarnings("ignore")  # a collection's own
@pytest.mark.parametrize("spec", HARDEST)
def test_a_training_step(spec: str) -> None:
    """`zoo.examine` refuses a profile whose parts do not fit each other, the model's own count of parameters or its own
    report; and one that differs from the same loop recorded as a script's."""
    (row,) = zoo.examine(zoo.Job(spec, ("train",), recorded=spec in RECORDED))
    assert row.why is None, row.reason
    # A weight stays beside its gradient and AdamW's two moments; a few weights get no gradient.
    assert row.peak_bytes > 3.5 * row.parameters_bytes
    assert row.peak_bytes > row.parameters_bytes + row.saved_bytes > row.parameters_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", HARDEST[::5])
def test_inference(spec: str) -> None:
    (row,) = zoo.examine(zoo.Job(spec, ("infer",)))
    assert row.why is None, row.reason
    assert row.saved_bytes == 0
    assert row.peak_bytes > row.parameters_bytes


def test_what_is_left_out_is_said() -> None:
    """DETR's loss matches boxes by their values; the network is analysed without it."""
    (row,) = zoo.examine(zoo.Job("hf:DetrForObjectDetection", ("train",)))
    assert row.left_out == "its own loss"
    assert "loss_for_object_detection.py" in row.reason


def test_a_model_that_refuses_in_eager_too_is_no_failure_of_ours() -> None:
    (row,) = zoo.examine(zoo.Job("hf:ReformerModelWithLMHead", ("infer",)))
    assert row.why == zoo.Why.EAGER_TOO
    assert "is_decoder" in row.reason


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        ("hf:BartForSequenceClassification", "infer"),  # looks for the token that ends each text
        ("hf:LongformerForMaskedLM", "infer"),  # looks whether its mask has anything above 0
        ("hf:Wav2Vec2ForCTC", "train"),  # masks frames, and gathers their gradients
    ],
)
def test_what_depends_on_values_that_can_be_known(spec: str, mode: str) -> None:
    (row,) = zoo.examine(zoo.Job(spec, (mode,)))
    assert (row.why, row.left_out) == (None, ""), row.reason


def test_a_model_that_sees_is_asked_for_its_text_alone_at_the_last() -> None:
    built = architectures.build("hf:LlavaForConditionalGeneration", "train")
    first, *_, last = make_calls(built)
    assert "pixel_values" in first.call[1]
    assert not first.left_out
    assert sorted(last.call[1]) == ["input_ids", "labels"]
    assert last.left_out == "its images or sound"
    assert last.when_refused


def test_the_table_of_compiled_steps_is_one_of_its_own(tmp_path: Path) -> None:
    found = zoo._open(tmp_path, True)
    assert found["compiled"]
    assert zoo.markdown(found).startswith("# The zoo, compiled, ")
    assert "compiled" not in zoo._open(tmp_path, False)
