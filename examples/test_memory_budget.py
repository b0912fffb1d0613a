"""Tests that fail when a model takes more memory than it may, or more than it took; they need no GPU.

    pytest examples/test_memory_budget.py --fxmem-update  # once: writes fxmem-baseline.json beside this file; commit it
    pytest examples/test_memory_budget.py                 # from then on, in every pull request

The fixture `fxmem_peak` comes with fxmem. A peak that is more than 1 % above the one in the file fails its test, with
the nodes and kinds of tensors that grew; `--fxmem-tolerance 64MiB` allows another amount.
"""

import pytest
import torch
from torch import nn

import fxmem
from fxmem.testing import assert_peak_below


def build(width=512):
    """The model under test."""
    return nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def batch(samples=1024):
    """Inputs of the shape that is trained with; on meta nothing is allocated."""
    return torch.empty(samples, 256, device="meta")


@pytest.mark.parametrize("card", ["rtx3080", "h100"])
def test_training_fits_the_cards_we_have(card):
    """Whatever it took before, more than this nobody has."""
    assert_peak_below(build, batch(), "200MiB", target=card)


def test_training_takes_no_more_than_it_did(fxmem_peak):
    """The peak is in the baseline under the test's name."""
    fxmem_peak(build, batch(), target="rtx4090")


def test_inference_takes_no_more_than_it_did(fxmem_peak):
    """Several peaks in one test have names; here none may grow by a byte."""
    for samples in (1, 1024):
        fxmem_peak(build, batch(samples), target="rtx4090", mode="infer", name=f"batch {samples}", tolerance=0)


def test_half_of_the_peak_is_for_activations_at_most():
    """An analysis is plain data: anything it says can be asserted."""
    peak = fxmem.analyze(build, batch(), target="rtx4090").peak
    assert peak.by_kind["saved"] <= peak.requested_bytes / 2
