"""A sample of `make -C benchmarks generations`: ways to generate and families of decoders, predicted and run."""

import pytest

from benchmarks.programs import generations

pytestmark = pytest.mark.truth

WAYS = ("LLaVA, image in the prompt", "assisted decoding", "loop that keeps the old cache")
FAMILIES = ("deepseek_v3",)


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_generate_is_predicted(name):
    row = generations.way_row(name)
    assert row["predicted"] == row["measured"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_default_generation_of_a_family_is_predicted(name):
    row = generations.family_row(name)
    assert row["predicted"] == row["measured"]
    assert row["recorded"] == 8  # its steps grow evenly
