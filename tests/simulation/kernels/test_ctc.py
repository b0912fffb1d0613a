"""CTC losses, whose buffers follow from the lengths of the targets."""

import pytest
import torch
from torch import nn

from fxmem import analyze
from fxmem.errors import AnalysisError
from fxmem.records.profile import Kind

TIME, LONGEST = 20, 5
TARGETS = torch.tensor([[1, 2, 3, 4, 5], [1, 1, 0, 0, 0]])


class Speech(nn.Module):
    """A linear layer over frames, trained on targets of several lengths in one row."""

    def __init__(self, longest=LONGEST):
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.longest = longest

    def forward(self, frames, targets):
        log_probs = self.linear(frames).log_softmax(-1).transpose(0, 1)
        present = targets[:, : self.longest] != 0
        frames_each = torch.full((frames.shape[0],), frames.shape[1], device=frames.device)
        return nn.functional.ctc_loss(log_probs, targets[:, : self.longest][present], frames_each, present.sum(-1))


@pytest.mark.parametrize("longest", [LONGEST, 3])
def test_two_places_for_each_label_and_one(longest):
    profile = analyze(Speech(longest), (torch.randn(2, TIME, 8), TARGETS), target="h100").profile
    nbytes = 2 * TIME * (2 * longest + 1) * 4
    (loss,) = [node for node in profile.nodes if node.name.startswith("ctc_loss")]
    (log_beta,) = [storage for storage in profile.storages if storage.name == "log_beta"]
    assert (log_beta.nbytes, log_beta.kind) == (nbytes, Kind.WORKSPACE)
    assert nbytes < loss.saved_bytes < nbytes + 256  # beside log_alpha: one loss for each item, targets and lengths


def test_lengths_nobody_knows_are_refused():
    with pytest.raises(AnalysisError):
        analyze(Speech(), (torch.randn(2, TIME, 8), TARGETS.to("meta")), target="h100")
