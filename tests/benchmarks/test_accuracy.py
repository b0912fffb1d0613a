"""Predictions held against what was measured on cards, and the tools that measure and compare; none of it needs a card.

The files in `tests/data` are made up by hand, for the plumbing. Real measurements are those under
`benchmarks/results/gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy import accuracy, cases, gpu, probes
from fxmem.records.profile import Phase
from fxmem.records.validation import LogSide, Measurement
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.request import StepRequest
from fxmem.validation import measure_cuda
from fxmem.validation.measure_cpu import resident_bytes
from tests import ROOT
from tests.benchmarks import on_measured_release

pytestmark = pytest.mark.truth

DATA = ROOT / "tests" / "data"
PLAIN, MEASUREMENT = DATA / "made-up-plain.json", DATA / "made-up-measurement.json"
EVERY = 1 if os.environ.get("FXMEM_ALL") else 120
"""Of a measurement file with hundreds of steps one in 120 is predicted anew here; `make accuracy` holds all of them to
their bounds."""

# --- what was measured really -----------------------------------------------------------------------------------------


@on_measured_release
def test_what_was_measured_is_still_predicted() -> None:
    files = accuracy.kept()
    bounds = json.loads(accuracy.BOUNDS.read_text(encoding="utf-8")) if accuracy.BOUNDS.is_file() else {}
    for path in files:
        source = accuracy.read(path)
        assert source.name in bounds, f"make accuracy ACCURACY_ARGS=--bounds, and read what it says about {path.name}"
        sample = {measured.name for measured in source.measured[::EVERY]}
        rows = accuracy.rows_of(source, workers=0, chosen=lambda measured, sample=sample: measured.name in sample)
        of_rows = {row.name: bounds[source.name].get(row.name, {}) for row in rows}
        assert all(of_rows.values())
        assert accuracy.beyond(rows, of_rows) == []


OF_BOTH_SIDES = (
    *("dropout", "group_norm", "mha-module", "sdpa-dropout", "sdpa-mask"),
    *("lstm", "gru", "sdpa-MATH", "sdpa-FLASH_ATTENTION", "sdpa-EFFICIENT_ATTENTION"),
)


@on_measured_release
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_operators_allocate_block_by_block_what_an_h100_did(dtype: str) -> None:
    source = accuracy.read(accuracy.RESULTS / "h100-torch2.11.0-cudnn9.19.0.json")
    rows = accuracy.rows_of(
        source, workers=0, chosen=lambda of: of.name == f"ops/misc-{dtype}" and of.operator in OF_BOTH_SIDES
    )
    assert len(rows) == len(OF_BOTH_SIDES) - (dtype == "fp32")  # flash attention takes half precision only
    assert {row.name: row.differences for row in rows if row.differences} == {}
    assert [row.error("requested") for row in rows] == [0.0] * len(rows)


# --- reading, predicting, comparing -----------------------------------------------------------------------------------


def test_the_earlier_format_is_read() -> None:
    source = accuracy.read(PLAIN)
    assert (source.card.name, source.card.capability, source.card.memory_bytes) == (
        "made-up-card",
        (9, 0),
        80_000_000_000,
    )
    assert source.versions == {"torch": "2.11.0+cu130", "CUDA": "13.0", "cuDNN": "9.19.0"}
    assert source.context is None
    assert source.failed == {"ops/misc-bf16 sort": "made up", "hf/gpt2/train": "CUDA out of memory, made up"}
    alexnet, gelu = source.measured
    assert (alexnet.name, alexnet.operator, alexnet.resting) == ("tv/alexnet/train", None, 312_000_000)
    assert alexnet.events == (115200, 25088, 50176, 75264, 999999, -999999)
    assert alexnet.events_by_phase == {Phase.FORWARD: 6, Phase.BACKWARD: 0, Phase.OPTIMIZER: 0}
    assert gelu.events_by_phase == {Phase.FORWARD: 1, Phase.BACKWARD: 3}


def test_measurements_are_read_and_those_short_of_memory_are_not() -> None:
    source = accuracy.read(MEASUREMENT)
    (gelu,) = source.measured
    assert (gelu.operator, gelu.resting, gelu.peaks) == (
        "gelu",
        67108864,
        {"requested": 300000000, "allocated": 300000256, "reserved": 400000000},
    )
    assert source.failed == {"ops/misc-bf16 linear": "the card was short of memory"}
    assert source.allocator_settings == "max_split_size_mb:64"
    found = json.loads(MEASUREMENT.read_text(encoding="utf-8"))["results"]["ops/misc-bf16"]["ops"]["gelu"][
        "measurement"
    ]
    Measurement.model_validate(found)  # the hand-made one is what fxmem writes


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    source = accuracy.read(PLAIN)
    return {row.name: row for row in accuracy.rows_of(source, workers=0)}


@on_measured_release
def test_a_model_is_predicted_and_compared_in_three_numbers(rows: dict[str, Any]) -> None:
    row = rows["tv/alexnet/train"]
    # AlexNet's weights are 61,100,840 numbers of 4 bytes; their gradients come in a step with SGD, and cuBLAS holds
    # twice 32 MiB.
    assert (
        2 * 4 * 61_100_840 + 2 * (32 << 20)
        < row.predicted["requested"]
        <= row.predicted["allocated"]
        <= row.predicted["reserved"]
    )
    for quantity in accuracy.QUANTITIES:
        assert row.error(quantity) == row.predicted[quantity] / row.measured[quantity] - 1
    assert row.judged == row.error("allocated")
    first = row.differences[0]
    assert (first.side, first.phase) in {(LogSide.PREDICTED, Phase.FORWARD), (LogSide.MEASURED, Phase.FORWARD)}
    assert 999_999 in [difference.nbytes for difference in row.differences if difference.side is LogSide.MEASURED]
    assert first.op.startswith("aten.")


def test_an_operator_is_compared_by_what_it_adds(rows: dict[str, Any]) -> None:
    row = rows["ops/misc-bf16 gelu"]
    tensor = 4 * 2048 * 4096 * 2
    # The result, the gradient of ones and the gradient of the operand; the loss and its own gradient are one bfloat16
    # each.
    assert row.predicted == {"requested": 3 * tensor + 4}
    assert row.measured == {"requested": 200_000_000}
    assert row.judged == row.error("requested")
    assert [(d.side, d.nbytes) for d in row.differences] == [(LogSide.PREDICTED, 2), (LogSide.PREDICTED, 2)]


def test_the_table_gives_errors_by_family_and_lists_what_is_far_off(rows: dict[str, Any]) -> None:
    source = accuracy.read(PLAIN)
    text = accuracy.table([(source, list(rows.values()))])
    lines = text.splitlines()
    error = abs(rows["tv/alexnet/train"].judged)
    assert f"| torchvision | allocated | 1 | {error:.2%} | {error:.2%} | {error:.2%} | `tv/alexnet/train` |" in lines
    assert any(line.startswith("| ops | requested | 1 |") for line in lines)
    assert any(line.startswith("- `tv/alexnet/train`: requested ") for line in lines)
    assert "- `ops/misc-bf16 sort`: made up" in lines
    assert (
        f"| fxmem | allocated bytes of 1 training and inference steps on Made-up card, workspaces included | "
        f"{error:.1%} mean"
    ).replace("%", " %") in text
    assert [line.split(" | ")[2] for line in lines[-3:]] == [
        "up to 1.6 %",
        "3.7 % mean, 12.4 % worst",
        "10 % allowed either way",
    ]
    assert "not measured here" in text


def test_the_page_that_is_kept_is_the_one_that_would_be_written_as_long_as_nothing_is_measured() -> None:
    if not accuracy.kept():
        assert accuracy.TABLE.read_text(encoding="utf-8") == accuracy.table([])
        assert "Nothing is measured yet" in accuracy.table([])


def test_other_versions_than_the_measurements_are_named() -> None:
    source = accuracy.read(MEASUREMENT)
    assert f"Predicted by torch {torch.__version__}" in accuracy.table([(source, accuracy.rows_of(source, workers=0))])


def test_a_case_that_cannot_be_predicted_is_reported(rows: dict[str, Any]) -> None:
    job = accuracy.Job(
        {"family": "torchvision", "model": "no_such_model", "inputs": {}, "kw": {}},
        "tv/none",
        None,
        accuracy.read(PLAIN).card,
        "",
        None,
    )
    row = accuracy.predict(job)
    assert row.failure.startswith("UsageError: torchvision has no model 'no_such_model'")
    assert "- `tv/none`: UsageError" in accuracy.table([(accuracy.read(PLAIN), [*rows.values(), row])])
    assert accuracy.beyond([row], {"tv/none": {"requested": 0.01}}) == [
        f"tv/none: requested has no prediction any more: {row.failure}"
    ]


def test_a_bound_holds_what_it_was_written_for_and_no_more(rows: dict[str, Any]) -> None:
    bounds = accuracy.bounds_of(rows.values())
    assert set(bounds["tv/alexnet/train"]) == set(accuracy.QUANTITIES)
    assert accuracy.beyond(rows.values(), bounds) == []
    tighter = {"tv/alexnet/train": {"allocated": abs(rows["tv/alexnet/train"].judged) / 2}}
    (said,) = accuracy.beyond(rows.values(), tighter)
    assert said.startswith("tv/alexnet/train: allocated is -")


def test_the_command_writes_the_table_and_says_when_a_bound_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    monkeypatch.setattr(accuracy, "BOUNDS", tmp_path / "bounds.json")
    monkeypatch.setattr(accuracy, "TABLE", tmp_path / "accuracy.md")
    monkeypatch.setattr(accuracy, "kept", lambda: [MEASUREMENT])
    monkeypatch.setattr(accuracy, "keep_contexts", lambda found: contexts.extend(found))
    contexts: list[Any] = []
    assert accuracy.main(["--jobs", "0", "--bounds"]) == 0
    assert contexts == [None]
    assert "| ops | requested | 1 |" in (tmp_path / "accuracy.md").read_text(encoding="utf-8")
    bounds = json.loads((tmp_path / "bounds.json").read_text(encoding="utf-8"))
    assert bounds["made-up-measurement"].keys() == {"ops/misc-bf16 gelu"}
    (tmp_path / "bounds.json").write_text(
        json.dumps({"made-up-measurement": {"ops/misc-bf16 gelu": {"requested": 0.001}}}), encoding="utf-8"
    )
    assert accuracy.main(["--jobs", "0"]) == 4
    assert "the bound is 0.100%" in capsys.readouterr().err
    dry = tmp_path / "dry.json"
    dry.write_text(json.dumps({"about": {"dry_run": True}, "cases": {}, "results": {}}), encoding="utf-8")
    assert accuracy.main([str(dry)]) == 2
    assert accuracy.main([str(tmp_path / "none.json")]) == 2


def test_the_size_of_a_context_is_read_off_and_kept(tmp_path: Path) -> None:
    document = json.loads(MEASUREMENT.read_text(encoding="utf-8"))
    rows = [["before", 7, 0], ["context", 500, 0], ["adamw", 1000, 300]]
    document["cases"]["context"] = {"family": "context", "model": "context"}
    document["results"]["context"] = {"rows": rows, "columns": ["after", "card_used_bytes", "reserved_bytes"]}
    path = tmp_path / "made-up.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    source = accuracy.read(path)
    found = source.context
    assert (found.card, found.torch, found.cuda, found.nbytes) == ("Made-up card", "2.0", "13.0", 1000 - 300 - 7)
    assert found.source == "benchmarks/results/gpu/made-up.json"
    table = tmp_path / "context_sizes.json"
    other = {**found.model_dump(mode="json"), "capability": [1, 0], "source": "somebody"}
    table.write_text(json.dumps([other, {**found.model_dump(mode="json"), "nbytes": 5}]), encoding="utf-8")
    accuracy.keep_contexts([None, found], table)
    assert json.loads(table.read_text(encoding="utf-8")) == [other, found.model_dump(mode="json")]
    document["results"]["context"]["rows"] = [[after, None, None] for after, *_ in rows]  # of a dry run
    path.write_text(json.dumps(document), encoding="utf-8")
    assert accuracy.read(path).context is None


def test_the_table_says_what_plans_did(tmp_path: Path) -> None:
    document = json.loads(MEASUREMENT.read_text(encoding="utf-8"))
    alexnet = {"family": "torchvision", "model": "alexnet", "inputs": {"x": [[2, 3, 64, 64], None]}, "kw": {}}
    made_up = document["results"]["ops/misc-bf16"]["ops"]["gelu"]["measurement"]
    for name, allocated in (("tv/alexnet/train", 1000), ("tv/alexnet/train-plan-modules", 600)):
        document["cases"][name] = alexnet
        document["results"][name] = {"measurement": {**made_up, "allocated_bytes": allocated}}
    document["results"][name]["times"] = {"without_ms": [10.0, 30.0, 11.0], "with_ms": [12.0, 13.2, 40.0]}
    path = tmp_path / "made-up.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert "| tv/alexnet/train-plan-modules | 60.0% | 13.2 ms | 120.0% |" in accuracy.table([(accuracy.read(path), [])])
    document["results"][name]["times"] = {"error": "made up"}
    path.write_text(json.dumps(document), encoding="utf-8")
    assert "with a checkpoint plan" not in accuracy.table([(accuracy.read(path), [])])


# --- the cases --------------------------------------------------------------------------------------------------------


def test_a_case_survives_its_json() -> None:
    every = cases.every_case()
    assert len(every) >= 100
    for case in every.values():
        assert cases.Case.read(json.loads(json.dumps(case.as_dict()))).as_dict() == json.loads(
            json.dumps(case.as_dict()), object_hook=_tuples
        )
    with pytest.raises(TypeError, match="colour"):
        cases.Case.read({"family": "hf", "model": "M", "colour": "red"})


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (tuple(value[0]), value[1])
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)
        else value
        for key, value in fields.items()
    }


@on_measured_release
@pytest.mark.parametrize(
    "planned",
    [each for each in cases.PLANNED if EVERY == 1 or each.case.startswith("tv/")],
    ids=lambda planned: planned.name,
)
def test_a_plan_that_is_kept_is_still_carried_out(planned: Any) -> None:
    case = cases.every_case()[f"{planned.case}-plan-{planned.application.value}"]
    plan = cases.plan_of(planned.name)
    with cases.kernel_settings(case):
        built = cases.build(case, "meta")
        peak = analyze_step(
            built.module,
            StepRequest(
                args=built.args, kwargs=built.kwargs, name="planned", target="h200", optimizer=case.optimizer_spec
            ),
        ).peak
    assert plan.application is planned.application
    assert peak.allocated_bytes == pytest.approx(plan.after.allocated_bytes, rel=0.005)
    assert peak.allocated_bytes <= 1.005 * planned.budget * plan.before.allocated_bytes


def test_settings_of_a_case_are_put_back() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    with cases.kernel_settings(cases.Case("ops", "convs", tf32=False, deterministic=True)):
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic) == (False, True)
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic) == before


def test_operators_on_meta_are_those_on_the_cpu_and_run_there() -> None:
    case = cases.Case("ops", "misc", kw={"dtype": "fp32"})
    on_meta, on_cpu = probes.probes(case, "meta", tiny=True), probes.probes(case, "cpu", tiny=True)
    assert on_meta.keys() == on_cpu.keys()
    for name in ("linear+bias", "embedding", "lstm", "mha-module", "conv3d"):
        shadow, real = on_meta[name](), on_cpu[name]()
        assert {k: v.shape for k, v in shadow.state_dict().items()} == {
            k: v.shape for k, v in real.state_dict().items()
        }
        probes.gradient_of_ones(real()).backward()
        assert all(parameter.grad is not None for parameter in real.parameters())
        assert all(tensor.is_meta for tensor in shadow.state_dict().values())


def test_the_gradient_of_ones_is_that() -> None:
    x = torch.ones(3, 5, requires_grad=True)
    (x * 7).register_hook(lambda grad: None)
    loss = probes.gradient_of_ones(x * 7)
    loss.backward()
    assert loss.shape == ()
    assert torch.equal(x.grad, torch.full((3, 5), 7.0))


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, and it would be measured")
def test_without_a_card_one_line_and_exit_code_3(tmp_path: Path, capsys: Any) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert said.err.startswith("gpu.py: expected an NVIDIA GPU to measure on")
    assert (said.err.count("\n"), said.out, list(tmp_path.iterdir())) == (1, "", [])


def test_a_dry_run_goes_the_whole_road(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    every = {
        "context": cases.Case("context", "context"),
        "ops/convs": cases.Case("ops", "convs", kw={"dtype": "fp32", "layers": [(3, 4, 3, 1, 8), (4, 4, 1, 1, 8)]}),
        "tv/squeezenet1_1": cases.Case("torchvision", "squeezenet1_1", {"x": ((9, 3, 64, 64), None)}),
        "tv/squeezenet1_1-plan-graph": cases.Case(
            "torchvision", "squeezenet1_1", {"x": ((9, 3, 64, 64), None)}, plan="tv-resnet50-train-graph"
        ),
        "tv/none": cases.Case("torchvision", "no_such_model", {}),
    }
    begun: list[str] = []

    def here(arguments: Sequence[str], *, dry_run: bool, **_: Any) -> dict[str, Any]:
        """What a child would answer, without one."""
        begun.append(arguments[-1])
        answer = tmp_path / "answer.json"
        times = arguments[-1] if "--times" in arguments else None
        asked = argparse.Namespace(
            about="--about" in arguments, one=arguments[-1], times=times, dry_run=dry_run, answer=answer
        )
        assert gpu._answer(asked) == 0
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found

    monkeypatch.setattr(cases, "every_case", lambda: every)
    monkeypatch.setattr(gpu, "child", here)
    command = ["--dry-run", "--out", str(tmp_path / "results"), "--jobs", "1"]
    assert gpu.main(command) == 1
    document = json.loads((tmp_path / "results" / "dry-run.json").read_text(encoding="utf-8"))
    assert document["about"]["dry_run"]
    assert begun[:2] == ["--about", "context"]
    results = document["results"]
    assert results["tv/none"]["error"].startswith("UsageError: torchvision has no model")
    assert [row[0] for row in results["context"]["rows"]][-1] == "adamw"
    plain = Measurement.model_validate(results["tv/squeezenet1_1"]["measurement"])
    assert sum(plain.events_by_phase.values()) == len(plain.events)
    assert plain.resident_by_kind["input"] == 2 * 3 * 64 * 64 * 4  # tiny: a batch of two
    assert [op["measurement"]["step"]["optimizer"] for op in results["ops/convs"]["ops"].values()] == [None, None]
    assert "4 measured, 1 failed, 0 not reached" in capsys.readouterr().out
    planned = results["tv/squeezenet1_1-plan-graph"]
    events = [
        found.events_by_phase[Phase.BACKWARD] for found in (plain, Measurement.model_validate(planned["measurement"]))
    ]
    assert events[0] < events[1]  # something is made again
    assert [len(planned["times"][kind]) for kind in ("without_ms", "with_ms")] == [1, 1]
    assert begun[-1] == "tv/squeezenet1_1-plan-graph"  # after all that is measured
    begun.clear()
    del every["tv/none"]
    assert gpu.main(command) == 0
    assert begun == ["--about"]  # everything else is there
    assert gpu.main([*command, "--only", "tv/", "--again"]) == 0
    assert begun[-1] == "tv/squeezenet1_1-plan-graph"


class PretendedCard:
    """Everything `measuring_cuda` asks of a card, answered by the CPU: sizes grow with every look, and each phase logs
    one block of 7 MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.recorded: list[dict[str, Any]] = []
        properties = argparse.Namespace(name="NVIDIA H200", major=9, minor=0, total_memory=150_110_011_392)
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda _: (9, 0),
            "get_device_properties": lambda _: properties,
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "memory_stats": self.stats,
            "memory_reserved": lambda: 4000,
            "mem_get_info": lambda: (10_000 - self.looks, 20_000),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
        monkeypatch.setattr(measure_cuda, "_on_card", lambda tree: tree)
        monkeypatch.setattr(measure_cuda, "resident_bytes", lambda *args, device_type: resident_bytes(*args))
        monkeypatch.setattr(measure_cuda, "nvidia_smi", lambda field: "5")

    def stats(self) -> dict[str, int]:
        self.looks += 1
        sizes = dict.fromkeys(("requested", "allocated", "active", "reserved"), (1 << 30) + (self.looks << 10))
        return {
            "num_alloc_retries": 0,
            **{f"{kind}_bytes.all.{what}": size for kind, size in sizes.items() for what in ("current", "peak")},
        }

    def snapshot(self) -> dict[str, Any]:
        self.recorded += [{"action": "alloc", "size": 7 << 20}, {"action": "free_requested", "size": 7 << 20}]
        return {"device_traces": [list(self.recorded)]}


def test_the_road_on_a_card_from_measuring_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    every = {
        "tv/alexnet": cases.Case("torchvision", "alexnet", {"x": ((2, 3, 64, 64), None)}, optimizer="sgd"),
        "ops/convs": cases.Case("ops", "convs", kw={"dtype": "fp32", "layers": [(3, 4, 3, 1, 8)]}),
    }
    monkeypatch.setattr(cases, "every_case", lambda: every)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)  # nothing is kept of this card

    def here(arguments: Sequence[str], *, dry_run: bool, **_: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patches:
            PretendedCard(patches)
            answer = tmp_path / "answer.json"
            assert (
                gpu._answer(
                    argparse.Namespace(
                        about="--about" in arguments, one=arguments[-1], times=None, dry_run=dry_run, answer=answer
                    )
                )
                == 0
            )
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found

    monkeypatch.setattr(gpu, "child", here)
    assert gpu.main(["--out", str(tmp_path), "--jobs", "1"]) == 0
    (path,) = tmp_path.glob("h200-torch*.json")
    source = accuracy.read(path)
    assert (source.card.name, source.card.memory_bytes, source.versions["torch"]) == (
        "h200",
        150_110_011_392,
        torch.__version__,
    )
    alexnet, conv = sorted(source.measured, key=lambda measured: measured.name, reverse=True)
    assert (alexnet.operator, conv.operator) == (None, "3>4 3x3/1 @8")
    assert alexnet.events_by_phase == {Phase.FORWARD: 2, Phase.BACKWARD: 2, Phase.OPTIMIZER: 2}
    assert alexnet.events == (7 << 20, -7 << 20) * 3
    rows = accuracy.rows_of(source, workers=0)
    assert not any(row.failure for row in rows)
    assert "| all models | allocated | 1 |" in accuracy.table([(source, rows)])


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert gpu.main([]) == 3
    said = capsys.readouterr().err
    assert said.startswith("gpu.py: expected torch, no_such_package; not installed: no_such_package (")
    assert said.count("\n") == 1


def test_an_operator_that_cannot_be_built_leaves_the_others() -> None:
    def fails() -> None:
        raise ValueError("no such\nluck")

    step: dict[str, Any] = {"mode": "train", "loss": None, "optimizer": None, "precision": None}
    assert gpu._tried(fails, step, dry_run=True) == {"error": "ValueError: no such luck"}


def test_a_run_elsewhere_goes_on_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(cases, "every_case", lambda: {name: cases.Case("torchvision", name, {}) for name in ("a", "b")})
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "kept")
    answers = {"--about": {"name": "made-up", "dry_run": False}, "b": {"error": "no luck " * 99}}
    monkeypatch.setattr(gpu, "child", lambda arguments, **_: answers[arguments[-1]])
    gpu.write(tmp_path / "kept" / "made-up.json", {"results": {"a": {"rows": []}}})
    assert gpu.main(["--out", str(tmp_path / "out"), "--jobs", "1"]) == 1
    assert set(json.loads((tmp_path / "out" / "made-up.json").read_text(encoding="utf-8"))["results"]) == {"a", "b"}
    said = capsys.readouterr().out.splitlines()
    assert (said[0][:14], len(said[0]) < 170, said[1].endswith("1 measured, 1 failed, 0 not reached")) == (
        "  b: no luck n",
        True,
        True,
    )


def test_time_that_is_up_and_cases_short_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    every = {name: cases.Case("torchvision", name, {}) for name in ("context", "a", "b", "c")}
    answers: dict[str, list[dict[str, Any]]] = {
        "--about": [{"name": "made-up", "dry_run": False}] * 2,
        "context": [{"rows": []}],
        "a": [{"error": "CUDA out of memory"}, {"rows": []}],
        "b": [{"alloc_retries": 2, "rows": []}, {"rows": []}],
        "c": [{"error": "took longer than 3 s"}, {"rows": []}],
    }
    monkeypatch.setattr(cases, "every_case", lambda: every)
    monkeypatch.setattr(gpu, "child", lambda arguments, **_: answers[arguments[-1]].pop(0))
    assert gpu.main(["--out", str(tmp_path), "--jobs", "2"]) == 1
    assert "3 measured, 1 failed, 0 not reached" in capsys.readouterr().out  # a and b were run again alone
    assert gpu.main(["--out", str(tmp_path), "--jobs", "2", "--minutes", "0.1"]) == 1
    assert "3 measured, 0 failed, 1 not reached" in capsys.readouterr().out
    assert answers["c"] == [{"rows": []}]


def test_a_process_that_dies_or_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\ntime.sleep(60 if '--about' in sys.argv else 0)\nsys.exit('no such luck')\n", encoding="utf-8"
    )
    monkeypatch.setattr(gpu, "RUN", (str(script),))
    assert gpu.child(["--one", "a"], dry_run=False, limit_s=30, threads=1) == {
        "error": "its process ended with exit code 1: no such luck",
        "exit_code": 1,
    }
    assert gpu.child(["--about"], dry_run=False, limit_s=0.2, threads=1) == {"error": "took longer than 0 s"}


def test_names_that_are_none(capsys: Any) -> None:
    assert gpu.main(["--only", "no such case"]) == 2
    assert "--list shows them" in capsys.readouterr().err
    assert gpu.main(["--list", "--only", "vgg16/infer"]) == 0
    assert capsys.readouterr().out == "tv/vgg16/infer\n"
