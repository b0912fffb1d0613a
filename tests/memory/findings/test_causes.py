"""Each cause is found where it is, with its bytes, and nothing is found in its twin."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fxmem
from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.memory import findings, liveness
from fxmem.memory.figures import find_place, find_place_of_peak
from fxmem.memory.findings import CAUSES, Finding
from fxmem.records.parts import ONLY_TORCH, HostUse
from fxmem.records.profile import Kind, ModuleCall, Node, Profile, Report, SourceLine, Timeline
from fxmem.records.units import format_bytes
from fxmem.show.plan_facts import describe, finding_facts
from fxmem.simulation.program import (
    IsolationSettings,
    Launch,
    RecordedProgram,
    RunSettings,
    launch,
    launch_apart,
)
from tests.profiles import small_profile

PROGRAM = str(Path(__file__).with_name("causing.py"))
VARIED = (
    "kept-results-of-evaluation", "kept-output-of-accumulation", "fragmentation-of-sizes", "unused-graph-of-detached",
    "kept-output-of-a-layer", "math-attention-of-weights", "math-attention-of-products", "wide-result-of-boxes",
    "wide-result-of-thresholds", "wide-result-of-diagonal", "wide-result-of-a-hook", "kept-output-of-preferences",
    "kept-results-of-create-graph", "written-activation-of-mish", "written-activation-of-gelu",
    "written-activation-of-tanh",
    "ddp-buckets-of-frozen", "fsdp-gather-of-micro-batches", "fsdp-gather-of-flat-micro-batches",
    "weights-twice-of-checkpoint", "weights-twice-of-a-loop", "unused-graph-of-batches",
    "unstepped-gradients-of-a-teacher",
    "unused-graph-of-validation", "unstepped-gradients-of-a-generator",
    "math-attention-of-scores",
    "math-attention-of-places", "save-on-card-of-shards",
)  # fmt: skip
CASES = [*(each for each in CAUSES if each != "loader-workers"), *VARIED]
OF_RANKS = (
    "save-on-card-of-shards",
    "ddp-buckets",
    "fsdp-gather",
    "ddp-buckets-of-frozen",
    *(each for each in VARIED if "micro" in each),
)
SMALL = ("fragmentation", "fragmentation-of-sizes")
"""They fill more than half of a card of 3 GB, and little of a larger one."""
TRIED = (
    "save-on-card", "save-on-card-of-shards",
    "kept-output", "kept-output-of-accumulation", "late-zero-grad", "unused-graph", "unused-parameters",
    "weights-twice", "frozen-saves", "unused-graph-of-detached", "kept-output-of-a-layer", "waiting-graphs",
    "ddp-buckets-of-frozen", "unused-graph-of-batches", "unused-graph-of-validation", "weights-twice-of-a-loop",
    "unstepped-gradients-of-a-teacher", "unstepped-gradients-of-a-generator",
    "kept-output-of-preferences", "written-activation", "written-activation-of-mish", "trained-target",
    "written-activation-of-gelu", "written-activation-of-tanh",
)  # fmt: skip


@functools.cache
def run(case: str, has: str) -> RecordedProgram:
    ranks = 2 if case in OF_RANKS else None
    started = Launch(PROGRAM, (case.replace("-", "_"), has), ranks=ranks, rank=0)
    card = "3GB" if case in SMALL else "h100"
    return launch(started, catalogue.target(card), RunSettings(reads_epoch=True)).recorded


def find_line(code: str) -> int:
    lines = Path(PROGRAM).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip() == code]
    return number


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_found_and_its_twin_is_silent(case: str) -> None:
    cause, _, _ = case.partition("-of-")
    found, of_twin = ({each.cause for each in run(case, has).findings} for has in ("on", "off"))
    assert (found, of_twin) == ({cause}, set())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("net, shards", "stage3_max_reuse_distance"),
        ("net._fsdp_wrapped_module._flat_param", "auto_wrap_policy"),
        ("net.0.weight", "fully_shard"),
    ],
)
def test_what_stays_gathered_is_changed_where_its_own_library_is_told(name: str, change: str) -> None:
    """As DeepSpeed's ZeRO-3, FSDP1 and FSDP2 name a parameter."""
    profile, timeline = run("fsdp-gather", "on").profile, run("fsdp-gather", "on").timeline
    named = [each.model_copy(update={"name": name} if each.kind is Kind.PARAMETER else {}) for each in profile.storages]
    (found,) = CAUSES.get("fsdp-gather")(profile.model_copy(update={"storages": tuple(named)}), timeline)
    assert change in found.change
    assert ("fully_shard" in found.change) == (change == "fully_shard")


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("flat-buffer", "weights-twice"),
        ("cast-in-place", "weights-twice"),
        ("average-of-weights", "weights-twice"),
        ("master-copies", "unstepped-gradients"),
        ("master-module", "unstepped-gradients"),
        ("clipped-together", "unstepped-gradients"),
        ("folds", "unstepped-gradients"),
        ("generator-of-both", "unstepped-gradients"),
        ("generator-that-accumulates", "unstepped-gradients"),
        ("functional-gradient", "unused-graph"),
        ("late-backward", "unused-graph"),
        ("shared-line", "unused-graph"),
        ("targets-of-each-other", "waiting-graphs"),
        ("adversarial-input", "frozen-saves"),
        ("other-gate", "written-activation"),
        ("quick-gelu", "written-activation"),
        ("other-gelu", "written-activation"),
        ("kept-input-gradients", "fsdp-gather"),
        ("triple-gelu", "written-activation"),
        ("metric-after-the-step", "kept-output"),
        ("other-targets", "trained-target"),
    ],
)
def test_what_would_change_the_training_is_not_advised(case: str, cause: str) -> None:
    """Or what is no copy of the weights is not said to be one."""
    assert cause not in {each.cause for each in run(case, "on").findings}


def test_a_graph_that_serves_a_later_one_as_its_target_need_not_wait() -> None:
    assert "waiting-graphs" in {each.cause for each in run("target-of-the-one-before", "on").findings}


WAITING = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    total = 0
    for _ in range(4):
        loss = net(torch.ones(8192, 512, device="cuda")).sum()
        total = total + loss
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_graphs_that_wait_are_of_the_line_that_calls_the_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITING, encoding="utf-8")
    found = launch(Launch(str(tmp_path / "train.py")), catalogue.target("h100"), RunSettings()).recorded.findings
    (place, text) = next((each.place, each.text) for each in found if each.cause == "waiting-graphs")
    assert WAITING.splitlines()[int(place.rpartition(":")[2]) - 1].strip().startswith("loss = net(")
    assert WAITING.splitlines()[int(text.rpartition(":")[2]) - 1].strip() == "total = total + loss"


def find_less(case: str) -> int:
    return run(case, "on").peak.requested_bytes - run(case, "off").peak.requested_bytes


@pytest.mark.parametrize("case", TRIED)
def test_what_was_tried_is_what_the_twin_has_less(case: str) -> None:
    """Within a fifth: what is freed early may leave its place to something else."""
    (found,) = (each for each in run(case, "on").findings if each.cause == case.partition("-of-")[0])
    assert found.saved_bytes == pytest.approx(find_less(case), rel=0.2)


def test_a_cause_whose_twin_has_less_than_was_tried_says_less() -> None:
    """Where the peak without it is elsewhere, as its twin runs other operators there."""
    (found,) = run("unstepped-gradients", "on").findings
    assert 0 < (found.saved_bytes or 0) < find_less("unstepped-gradients")


def test_the_remedies_of_fragmentation_are_replayed() -> None:
    (found,) = run("fragmentation", "on").findings
    peak = run("fragmentation", "on").peak
    assert found.of == "reserved"
    assert found.nbytes == (peak.reserved_bytes or 0) - (peak.allocated_bytes or 0)
    pieces, freed = (format_bytes(each or 0) for each in (found.nbytes, found.saved_bytes))
    assert describe(found) == (
        f"{pieces} of what is reserved is in pieces; PYTORCH_ALLOC_CONF=expandable_segments:True frees {freed}"
    )


def test_pieces_on_a_card_with_room_decide_nothing() -> None:
    recorded = run("fragmentation", "on")
    target = recorded.profile.target.model_copy(update={"memory_bytes": 24 << 30})
    assert not [*CAUSES.get("fragmentation")(recorded.profile.model_copy(update={"target": target}), recorded.timeline)]


def test_a_cache_that_steps_of_other_sizes_have_left_is_said_to_be_theirs() -> None:
    (found,) = run("fragmentation-of-sizes", "on").findings
    assert "steps of other sizes" in found.text
    assert found.nbytes >= (512 + 712) << 20
    assert found.saved_bytes is None


def test_attention_says_why_no_other_kernel_runs() -> None:
    (found,) = run("math-attention", "on").findings
    assert "flash_attention: dtype float64; efficient_attention: dtype float64" in found.text


@pytest.mark.parametrize(
    ("case", "calls", "change"),
    [
        ("math-attention-of-weights", "1 call", "need_weights=False in the call"),
        ("math-attention-of-products", "1 call", "F.scaled_dot_product_attention"),
        ("math-attention-of-places", "1 call", "F.scaled_dot_product_attention"),
        ("math-attention-of-scores", "2 calls", "F.scaled_dot_product_attention"),
    ],
)
def test_attention_that_is_written_out_is_told_what_does_it(case: str, calls: str, change: str) -> None:
    (found,) = run(case, "on").findings
    assert f"written out in {calls} " in found.text
    assert found.change.startswith(change)
    assert found.nbytes >= 2 * (2 * 8 * 512 * 512 * 4)  # scores and their softmax


def test_weights_that_a_program_keeps_are_wanted() -> None:
    profile, timeline = (
        run("math-attention-of-products", "on").profile,
        run("math-attention-of-products", "on").timeline,
    )
    held = tuple(each.model_copy(update={"holder": "maps[0]"}) for each in profile.storages)
    assert not [*CAUSES.get("math-attention")(profile.model_copy(update={"storages": held}), timeline)]


@pytest.mark.parametrize(("target", "waits"), [("add", True), ("maximum", False)])
def test_graphs_that_meet_in_more_than_a_sum_are_one(target: str, waits: bool) -> None:
    recorded = run("waiting-graphs", "on")
    nodes = tuple(
        each.model_copy(update={"target": target})
        if each.target.rpartition(".")[2].strip("_") in ("add", "iadd")
        else each
        for each in recorded.profile.nodes
    )
    profile = recorded.profile.model_copy(update={"nodes": nodes})
    assert bool([*CAUSES.get("waiting-graphs")(profile, recorded.timeline)]) == waits


def test_what_keeps_more_than_is_meant_is_told_how_to_keep_less() -> None:
    """A view of a result, all views of another, and an error with the functions that it came through."""
    found = {each.text.partition(" ")[0]: each for each in run("kept-views", "on").findings}
    assert found.keys() == {"first", "rows", "errors"}
    assert [found[name].nbytes // (512 * 256 * 4) for name in ("first", "rows", "errors")] == [1, 1, 2]
    assert "a view, and with it 256 times its bytes" in found["first"].text
    assert found["first"].change.startswith(".clone() or .cpu()")
    assert found["rows"].change.startswith(".cpu()")
    assert "str(error)" in found["errors"].change


def test_a_host_that_is_full_of_workers_is_told_to_have_fewer() -> None:
    def find(limit_bytes: int) -> list[Finding]:
        host = HostUse(
            peak_bytes=100, process_bytes=30, workers=4, workers_bytes=40, batches_bytes=20, worker_adds_bytes=15,
            pinned_bytes=10, limit_bytes=limit_bytes,
        )  # fmt: skip
        profile = run("unused-graph", "off").profile
        assert profile.step.program is not None
        step = profile.step.model_copy(update={"program": profile.step.program.model_copy(update={"host": host})})
        found = findings.find(profile.model_copy(update={"step": step}), liveness.timeline(profile))
        return [each for each in found if each.cause == "loader-workers"]

    (found,) = find(60)
    assert (found.nbytes, found.of) == (60, "host")
    assert "num_workers=1" in found.change
    assert not find(100)
    assert not find(39)  # without workers it is as full


@pytest.mark.truth
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks, and /proc says what they take")
def test_workers_that_a_host_has_no_room_for_are_found_in_a_run() -> None:
    """In processes of their own: this one may have other children, which would count."""

    def use_host(has: str, limit_bytes: int) -> Report:
        settings = RunSettings(reads_epoch=True, host_bytes=limit_bytes)
        started = Launch(PROGRAM, ("loader_workers", has))
        return launch_apart(started, catalogue.target("h100"), settings, IsolationSettings()).profile

    def find_most(has: str) -> int:
        run = use_host(has, 1 << 40).step.program
        assert run is not None
        assert run.host is not None
        return run.host.peak_bytes or 0

    most, least = map(find_most, ("on", "off"))
    full, room = ([*use_host(has, (most + least) // 2).findings] for has in ("on", "off"))
    assert [each.cause for each in full] == ["loader-workers"]
    assert full[0].nbytes >= (most - least) // 2
    assert re.search(r"num_workers=[0-3], or", full[0].change)
    assert room == []


@pytest.mark.parametrize("case", ["broadcast-loss", "autocast-copies"])
def test_its_bytes_are_what_the_twin_has_less(case: str) -> None:
    """Libraries' workspaces aside: they are where a product runs, which need not be at both peaks."""
    peaks = [run(case, has).peak for has in ("on", "off")]
    on, off = (peak.requested_bytes - peak.by_kind.get(Kind.WORKSPACE, 0) for peak in peaks)
    assert run(case, "on").findings[0].nbytes == pytest.approx(on - off, rel=0.1)


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("unused-graph", 'net(torch.randn(4096, 256, device="cuda")).argmax(-1)'),
        ("unstepped-gradients-of-a-teacher", "target = teacher(x)"),
        ("unstepped-gradients-of-a-generator", "made = generator(x)"),
        ("kept-results", "kept.append(out.detach() if HAS else out.detach().cpu())"),
        ("kept-results-of-evaluation", "kept.append(out if HAS else out.cpu())"),
        ("kept-results-of-create-graph", "net(x).sum().backward(create_graph=True)"),
        ("whole-checkpoint", "x = checkpoint(net, x, use_reentrant=False)"),
        ("broadcast-loss", "F.mse_loss(predicted if HAS else predicted.squeeze(-1), y).backward()"),
        ("wide-result-of-boxes", "pairs = box_iou(boxes.detach(), boxes.detach()[: 4096 if HAS else 4])"),
        ("wide-result-of-thresholds", "(scores.unsqueeze(-1) >= thresholds).long().sum(0)"),
        ("trained-target", "value = actor(later).gather(1, best)"),
        ("wide-result-of-a-hook", "of_tokens = torch.einsum(apart, grads[0], layer.read)"),
        ("written-activation", "return x * torch.sigmoid(x) if HAS else F.silu(x)"),
        ("layer-buffers", "return self.project(x * self.table[: len(x)])"),
    ],
)
def test_its_line_is_named(case: str, code: str) -> None:
    assert run(case, "on").findings[0].place.endswith(f"causing.py:{find_line(code)}")


@pytest.mark.parametrize(
    ("ending", "settings"),
    [
        ('torch.empty(1 << 40, device="cuda")', RunSettings()),
        ("1 / 0", RunSettings()),
        ("[x.sum() for _ in range(2000)]", RunSettings(max_operators=1000)),
    ],
)
def test_what_may_have_followed_is_not_missed(tmp_path: Path, ending: str, settings: RunSettings) -> None:
    """Where a program ends within its step, the backward of what ran has not come yet, nor the use of what did not."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "nets = [torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]).cuda() for _ in range(2)]\n"
        "optimizer = torch.optim.SGD([*nets[0].parameters(), *nets[1].parameters()])\n"
        'x = torch.randn(4096, 256, device="cuda")\n'
        "for step in range(4):\n"
        "    y = nets[0](x if step < 2 else torch.cat([x] * 8))\n"
        f"    step < 2 or {ending}\n"
        "    nets[1](y).sum().backward()\n"
        "    optimizer.step()\n"
    )
    recorded = launch(Launch(str(script)), catalogue.target("h100"), settings).recorded
    assert not recorded.program.rounds[recorded.program.shown - 1].is_whole
    assert recorded.findings == ()


@pytest.mark.parametrize(("rows", "causes"), [(1, []), (2048, ["kept-results"])])
def test_what_is_kept_until_a_known_step_is_said_where_it_comes_to_much(
    tmp_path: Path, rows: int, causes: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Linear(256, 256).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters())\n"
        "for _ in range(9):\n"
        "    kept = []\n"
        "    for _ in range(30):\n"
        '        net(torch.randn(32, 256, device="cuda")).sum().backward()\n'
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        f'        kept.append(torch.zeros({rows}, 256, device="cuda"))\n'
    )
    recorded = launch(Launch(str(script)), catalogue.target("h100"), RunSettings()).recorded
    assert [each.last for each in recorded.program.grown] == [30]
    assert [each.cause for each in recorded.findings] == causes


def test_a_report_keeps_them_and_an_answer_says_them() -> None:
    recorded = run("broadcast-loss", "on")
    report = Report.model_validate_json(recorded.to_json())
    assert report.findings == recorded.findings
    (fact,) = finding_facts(recorded.profile, recorded.timeline)
    assert fact.label == "Found"
    assert "the loss is of 4096x1 against 4096, broadcast to 4096x4096" in fact.text
    assert "To do: inputs of one shape" in fact.text


def test_a_cause_of_ones_own() -> None:
    def find(profile: Profile, timeline: Timeline) -> list[Finding]:
        return [Finding(cause="own", text="all of it", nbytes=timeline.peak.requested_bytes, change="less")]

    findings.register("own", find)
    recorded = run("unused-graph", "off")
    assert [each.cause for each in findings.find(recorded.profile, recorded.timeline)] == ["own"]
    with pytest.raises(UsageError, match="expected a new name for a cause, got 'own'"):
        findings.register("own", find)


def test_it_is_found_once_for_a_timeline() -> None:
    calls = []
    findings.register("counted", lambda *_: calls.append(1) or ())
    recorded = run("unused-graph", "off")
    for _ in range(2):
        assert findings.find(recorded.profile, recorded.timeline) == ()
    assert calls == [1]


def test_the_peak_within_a_hook_is_at_its_line() -> None:
    """And that of a backward without it at the line that calls the model."""
    wide, plain = run("wide-result-of-a-hook", "on"), run("broadcast-loss", "on")
    lines = ["layer.weight.of_samples = of_tokens.sum(1) if HAS else of_tokens"] * 2
    lines.append("F.mse_loss(predicted if HAS else predicted.squeeze(-1), y).backward()")
    step = wide.program.rounds[wide.program.shown - 1]
    places = [step.place, *(find_place_of_peak(each.profile, each.peak) for each in (wide, plain))]
    assert [each.rpartition(":")[2] for each in places] == [str(find_line(each)) for each in lines]


def test_the_line_is_the_users_where_a_package_made_the_call() -> None:
    """A call of a module of a package, from a line of the user's: of both, the user's."""
    packaged = SourceLine(file="/venv/lib/site-packages/nets/loss.py", line=7)
    own = SourceLine(file="train.py", line=3)
    inner = SourceLine(file="layers.py", line=5)
    nodes = tuple(
        Node(name=name, op="call_function", target=name, source=packaged, called_from=called_from)
        for name, called_from in (("loss", None), ("other", None), ("within", inner))
    )
    calls = (ModuleCall(module="net", first_node=0, last_node=1, source=own),)
    profile = small_profile().model_copy(update={"nodes": nodes, "calls": calls})
    assert find_place(profile, 0) == "train.py:3"
    assert find_place(profile, 1) == "nets/loss.py:7"
    assert find_place(profile, 2) == "layers.py:5"
    assert find_place(profile, None) == ""


def test_another_graph_is_no_cycle_of_gradients() -> None:
    texts = [each.text for each in run("other-cycle", "on").findings]
    assert any(each.startswith(ONLY_TORCH) for each in texts)
    assert not any("create_graph" in each for each in texts)


def test_the_activation_of_a_library_is_chosen_in_its_configuration() -> None:
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64)
    tokens = torch.zeros(64, 128, dtype=torch.int64, device="meta")
    found = fxmem.analyze(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, target="h100").findings
    (change,) = (each.change for each in found if each.cause == "written-activation")
    assert change.startswith('"gelu_pytorch_tanh" as the activation of the configuration in its place')
