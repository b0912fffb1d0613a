"""Values that do not depend on data are computed, and nothing else is believed."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from fxmem import analyze
from fxmem.errors import AnalysisError
from fxmem.records.profile import Kind


class Asks(nn.Module):
    """Runs `question` on what it makes itself; the answer decides how large its output is."""

    def __init__(self, question):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.question = question

    def forward(self, x):
        return self.weight * torch.ones(1 + int(self.question(x)), 4, device=x.device)


def _rows(question, x=None):
    analysis = analyze(Asks(question), torch.randn(3, 4) if x is None else x, mode="infer", target="cpu")
    return analysis.profile.nodes[-4].outputs[0].shape[0] - 1


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda x: torch.arange(5, device=x.device).sum().item(), 10),
        (lambda x: (torch.arange(5, device=x.device).diff() != 1).any(), 0),
        (lambda x: torch.zeros(3, dtype=torch.long, device=x.device).add_(2)[1], 2),
        (lambda x: torch.ones_like(x, dtype=torch.bool).all(), 1),
        (lambda x: len(torch.nonzero(torch.arange(6, device=x.device) % 2)), 3),
        (lambda x: torch.full((2, 2), 3, device=x.device).view(-1).max(), 3),
        (lambda x: torch.tensor([1, 2, 3], device=x.device).sum(), 6),
        (lambda x: ((1.0 - torch.ones(2, 8, device=x.device)) * -1e9 < 0).any(), 0),
        (lambda x: (torch.arange(4, device=x.device).to(x.dtype) / 2).sum(), 3),
        (lambda x: len(x[torch.arange(3, device=x.device) > 0]), 2),
        (lambda x: x.masked_select(torch.arange(4, device=x.device) > 0).shape[0], 9),
        (lambda x: torch.empty(1).uniform_(2.0, 8.0), 5),
        (lambda x: torch.rand(1) * 8, 4),
        (lambda x: torch.full_like(x, 2.0).sum(), 24),
        (lambda x: torch.cat([x.new_ones(3), x.new_zeros(2), x.new_full((1,), 2), torch.ones_like(x[0])]).sum(), 9),
        (lambda x: torch.linspace(0, 4, 5, device=x.device).sum() + torch.eye(2, device=x.device).sum(), 12),
        (lambda x: torch.logspace(0, 1, 2, device=x.device).sum() + torch.zeros_like(x).sum(), 11),
        (lambda x: len(x[tuple(torch.arange(3, device=x.device)), tuple(torch.arange(1, 4, device=x.device))]), 3),
        (
            lambda x: (
                torch.arange(9, device=x.device).view(3, 3)[tuple(torch.arange(2, device=x.device)), [1, 2]].sum()
            ),
            6,
        ),
    ],
)
def test_what_comes_from_constants_is_known(question, answer):
    assert _rows(question) == answer


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_a_tensor_of_numbers_that_are_in_tensors(target):
    """`torch.tensor` of a list of them reads their memory; multimodal rotary positions are made so."""

    def question(x):
        ends = [torch.arange(5, device=x.device).max(), torch.ones(3, dtype=torch.long, device=x.device).sum()]
        return torch.tensor(ends, device=x.device).sum()

    analysis = analyze(Asks(question), torch.randn(3, 4), mode="infer", target=target)
    assert analysis.profile.nodes[-4].outputs[0].shape[0] - 1 == 7


def test_rows_and_columns_in_tuples_of_numbers_that_only_data_has():
    """Indexing makes them a tensor, by reading their memory; how many there are is known."""

    def write(x):
        columns = tuple(x[:, 0].long())
        x = x.clone()
        x[tuple(torch.arange(3, device=x.device)), columns] = 0
        return len(x[columns, columns])

    assert _rows(write) == 3


def test_what_is_known_on_the_cpu_stays_there():
    def question(x):
        return (torch.arange(5) + torch.repeat_interleave(torch.arange(2), torch.tensor([2, 3]))).sum() + torch.ones(
            3
        ).nonzero().cpu().sum()

    assert (
        analyze(Asks(question), torch.randn(3, 4), mode="infer", target="h100").profile.nodes[-4].outputs[0].shape[0]
        == 1 + 13 + 3
    )


def test_a_mask_over_tokens_expanded_to_their_features():
    """As models that see pick the places of image features in the text; expanded, it has too many elements to be
    kept."""

    def question(x):
        mask = (torch.arange(64, device=x.device) < 5)[:, None].expand(64, 1 << 15)
        return x.new_zeros(64, 1 << 15)[mask].numel() // (1 << 15) + len(mask.nonzero()) // (1 << 15)

    assert _rows(question) == 10


def test_values_of_small_integer_inputs_given_on_the_cpu_are_known():
    assert _rows(lambda x: x.sum(), torch.tensor([[1, 2, 3, 4]])) == 10


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.sum().long(),
        lambda x: torch.randint(0, 3, (2,), device=x.device).sum(),
        lambda x: (
            torch.zeros(3, dtype=torch.long, device=x.device)
            .index_add_(0, torch.arange(3, device=x.device), x[:, 0].long())
            .sum()
        ),
        lambda x: torch.zeros(3, dtype=torch.long, device=x.device)[:2].copy_(x[:2, 0].long()).sum(),
        lambda x: torch.ones(3, device=x.device).add_(x[:, 0]).sum(),
        lambda x: torch.ones(4, device=x.device).mul(x).sum(),
        lambda x: torch.zeros_like(x, memory_format=torch.preserve_format).sum(),  # an optimizer's state
        lambda x: torch.rand(2).sum(),
        lambda x: torch.ones(1 << 21, device=x.device).sum(),
    ],
)
def test_what_data_or_chance_went_into_is_not(question):
    with pytest.raises(AnalysisError, match="do not depend on the data"):
        _rows(question)


def test_a_view_of_what_data_was_written_into_is_not_believed():
    def question(x):
        base = torch.zeros(4, dtype=torch.long, device=x.device)
        view = base[:2]
        base.copy_(x[0].long())
        return view.sum()

    with pytest.raises(AnalysisError, match="do not depend on the data"):
        _rows(question)


def test_the_users_own_buffer_keeps_its_values():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    model = Counting()
    analyze(model, torch.randn(2, 4), target="cpu")
    assert model.calls.item() == 0


def test_transformers_skips_the_mask_it_would_skip_on_a_card():
    """Positions made by arange hold no packed sequences; with a mask, attention could not take the flash or cuDNN
    kernels."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=1,
        vocab_size=64,
        dtype=torch.bfloat16,
    )
    ids = torch.empty(2, 96, dtype=torch.long, device="meta")
    analysis = analyze(
        lambda: transformers.LlamaForCausalLM(config).bfloat16(),
        {"input_ids": ids, "use_cache": False},
        mode="infer",
        target="a100",
    )
    names = {op.name for op in analysis.profile.ops}
    assert "aten._scaled_dot_product_flash_attention.default" in names
    assert not [s for s in analysis.profile.storages if s.shape[-2:] == (96, 96)]


@pytest.mark.parametrize(
    "healthy",
    [
        lambda x: torch.isfinite(x).all(),
        lambda x: x.sum().isfinite(),
        lambda x: not torch.isnan(x).any(),
        lambda x: not x.isinf().any(),
        lambda x: torch.all(torch.isfinite(x)).item(),
        lambda x: torch.isfinite(x).all(dim=-1)[0],
    ],
)
def test_numbers_are_taken_to_be_finite_and_that_is_said(healthy):
    class Guarded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.clamp = torch.nn.Linear(8, 8), torch.nn.Hardtanh()

        def forward(self, x):
            x = self.linear(x)
            return x if healthy(x) else self.clamp(x)

    profile = analyze(Guarded(), torch.zeros(2, 8), target="cpu").profile
    assert "clamp" not in [node.name for node in profile.nodes]
    assert [assumption.text for assumption in profile.assumptions if assumption.topic == "values"] == [
        "all numbers are finite, where the program asks (isfinite, isnan, isinf)"
    ]


@pytest.mark.parametrize(
    "check",
    [
        lambda x: torch._check_tensor_all(x >= 0),
        lambda x: torch.distributions.Normal(x, x.exp(), validate_args=True).rsample(),
    ],
)
def test_what_the_program_checks_is_taken_to_hold_and_that_is_said(check):
    class Checked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            check(x)
            return x

    profile = analyze(Checked(), torch.zeros(2, 8), target="h100").profile
    assert any("checks of its tensors holds" in assumption.text for assumption in profile.assumptions)


def test_the_gradient_of_what_a_known_mask_picks():
    """SpecAugment writes one vector to places it draws in NumPy; their rows are picked from the gradient. The places a
    kernel looks up count."""

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.fill = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.zeros(8))

        def forward(self, x):
            x = self.linear(x)
            x[torch.arange(4, device=x.device) % 2 == 0] = self.fill
            return x

    profile = analyze(Masked(), torch.zeros(4, 8), target="cpu").profile
    assert {node.phase for node in profile.ops if node.name.startswith("aten.index.")} == {"backward"}
    rows = [storage for storage in profile.storages if storage.nbytes == 2 * 8 * 4 and storage.dtype == "float32"]
    assert rows
    assert 2 * 8 in [storage.nbytes for storage in profile.storages if storage.kind is Kind.WORKSPACE]


def test_a_layer_that_may_be_dropped_is_kept():
    class Dropping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                if not (self.training and torch.rand([]) < 0.1):
                    x = layer(x)
            return x

    profile = analyze(Dropping(), torch.zeros(2, 8), target="h100").profile
    assert [node.name for node in profile.nodes if node.op == "call_module"] == ["layers_0", "layers_1", "layers_2"]
    assert any("layer drop" in assumption.text for assumption in profile.assumptions)


class _Picks(nn.Module):
    """Results whose shapes only data tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y[y > 0].sum() + y[y < 0].sum() + y.masked_select(y > 1).sum() + torch.nonzero(y).sum()


def test_shapes_that_hang_on_data_are_taken_at_their_largest() -> None:
    profile = analyze(_Picks(), torch.randn(4, 8), target="cpu").profile
    said = [each.text for each in profile.assumptions if "depends on data is counted" in each.text]
    assert [text.rpartition(": ")[2] for text in said] == ["every element", "every element", "every place"]
    assert all(Path(__file__).name in text for text in said)
    # Of x[mask] and of its gradient, the two columns of places, each time; of nonzero, the places.
    assert [each.nbytes for each in profile.storages if each.dtype == "int64" and each.shape] == [2 * 32 * 8]
    workspaces = Counter(each.nbytes for each in profile.storages if each.kind is Kind.WORKSPACE)
    assert workspaces[2 * 32 * 8] == 4


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x):
        at = torch.arange(x.shape[1], device=x.device)
        return self.table(x).sum(2) + self.table(at).sum(1)


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_a_known_index_beyond_a_table_ends_the_program_as_on_a_card(target):
    ids = torch.empty(2, 5, dtype=torch.int64, device="meta")  # which may be any
    assert analyze(Positions(), ids[:, :4], target=target).profile.ops
    with pytest.raises(IndexError):
        Positions()(torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(
        AnalysisError, match=r"expected indices from 0 to 3, got 4; .*test_known_values.py:\d+ in forward"
    ):
        analyze(Positions(), ids, target=target)
