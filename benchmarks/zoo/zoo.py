"""Analyse every architecture of torchvision and timm and every transformers class of fifteen tasks; write what came of
it.

    python -m benchmarks.zoo.zoo           all, for training with AdamW and for inference (`make zoo`)
      --quick                              the fixed sample, of which the tests analyse the hardest
      --only resnet18 'timm:*vit*'
      --quick --compile                    that sample's training steps as compiled (`make zoo-compiled`)

Nothing is allocated and no GPU is used: models are built on meta, the prediction is for an H100. The result is a JSON
file with every row, and a page of counts and failures, both with the day's date, under `benchmarks/results/`. A run
that was interrupted goes on where it stopped; `--again` does what it is asked for anew.

Counted as failed: fxmem raised, or its result cannot be true (`fxmem.memory.liveness.check`; parameters that are not
the model's or are more than the peak; kinds that do not sum to it), or its report cannot be printed, or read back.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import fnmatch
import importlib.metadata
import json
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.lib.workers import Lost, run_jobs
from fxmem import __version__

TARGET = "h100"
MODES = ("train", "infer")
PACKAGES = ("torch", "torchvision", "timm", "transformers")
MIB = 1 << 20
SECONDS_BETWEEN_WRITES = 20.0
"""What a run that is cut short may lose."""


class Why(enum.StrEnum):
    """Why an analysis failed."""

    DATA_DEPENDENT = "data-dependent"
    """The program asks for a value that only real data has."""
    PACKAGE = "needs a package"
    EAGER_TOO = "refuses in eager too"
    """The model raises on real tensors as well: seen in a run on the CPU (`eager.raises_in_eager`)."""
    NO_FAKE_KERNEL = "fake kernel missing"
    SLOW = "time limit"
    FXMEM = "fxmem bug"
    """Everything else, until somebody has shown that it is not ours."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One architecture, in the modes that are asked for."""

    spec: str
    modes: tuple[str, ...] = MODES
    recorded: bool = False
    """Whether the training step is to be recorded as a script's loop as well, and come out the same to the byte."""
    compiled: bool = False
    """Whether it is analysed as `torch.compile` would run it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of an architecture in one mode. Numbers are None where it failed."""

    architecture: str
    mode: str
    why: str | None = None
    """A value of `Why`; None where it worked."""
    reason: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the model, as `--set` takes them."""
    left_out: str = ""
    """Of the step, because it depends on the data; `reason` says where."""
    inputs: tuple[str, ...] = ()
    parameters_bytes: int | None = None
    peak_bytes: int | None = None
    """Requested bytes at the peak, kernel workspaces and allocator rounding as the profile's assumptions say."""
    saved_bytes: int | None = None
    """Kept for backward when forward ends."""
    nodes: int | None = None
    ops: int | None = None
    seconds: float | None = None
    """CPU time of the analysis alone, in a process that has imported everything; building the model is not in it."""
    unknown_flops: tuple[str, ...] = ()
    """Operators that compute and have no FLOP formula."""
    found: tuple[str, ...] = ()
    """What is found in the step: cause, bytes, text, and where."""

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all others."""
        return self.architecture, self.mode


# --- in a worker ------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Import once what every job needs; a collection is imported by the first model of it."""
    import logging
    import warnings

    import torch

    import fxmem

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    _ = fxmem.analyze


def examine(job: Job) -> list[Row]:
    """Build, analyse and check one architecture, a row for each mode."""
    return [_examine(job, mode) for mode in job.modes]


def _examine(job: Job, mode: str) -> Row:
    from benchmarks.zoo.architectures import build
    from benchmarks.zoo.calls import make_calls

    row = Row(job.spec, mode)
    try:
        built = build(job.spec, mode)
    except Exception as error:
        why, reason = _explain(error)
        return dataclasses.replace(row, why=Why.EAGER_TOO if why is Why.FXMEM else why, reason=reason)
    row = dataclasses.replace(row, settings=dict(built.settings))
    first: Row | None = None
    refused = False
    for way in make_calls(built):
        if refused and not way.when_refused:
            continue
        found = dataclasses.replace(_analyse(row, built, way.call, job), left_out=way.left_out)
        first = first or found
        if found.why is None:
            return dataclasses.replace(found, reason=first.reason if way.left_out else "")
        if found.why not in (Why.DATA_DEPENDENT, Why.EAGER_TOO):
            break
        refused = found.why == Why.EAGER_TOO
    assert first is not None
    return first


def _analyse(row: Row, built: Any, call: Any, job: Job) -> Row:
    from benchmarks.lib.eager import raises_in_eager
    from fxmem.records.parts import CompileSettings
    from fxmem.simulation.step.analysis import analyze_step
    from fxmem.simulation.step.request import StepRequest

    args, kwargs = call
    compile = CompileSettings() if job.compiled else None
    try:
        began = time.process_time()
        request = StepRequest(
            args=args, kwargs=kwargs, name=row.architecture, mode=row.mode, target=TARGET, compile=compile
        )
        analysis = analyze_step(built.module, request)
        profile, peak = analysis.profile, analysis.peak
        seconds = time.process_time() - began
        parameters_bytes = sum(p.numel() * p.element_size() for p in built.module.parameters())
        row = dataclasses.replace(
            row,
            inputs=tuple(f"{i.name}:{'x'.join(map(str, i.shape))}:{i.dtype}" for i in profile.inputs),
            parameters_bytes=parameters_bytes,
            peak_bytes=peak.requested_bytes,
            saved_bytes=profile.saved_bytes,
            nodes=len(profile.nodes),
            ops=len(profile.ops),
            seconds=round(seconds, 3),
            unknown_flops=tuple(unknown.what for unknown in profile.unknowns if unknown.topic == "flops"),
            found=tuple(
                _portable(f"{each.cause}, {each.nbytes / MIB:,.1f} MiB, {each.text} ({each.place or 'no line'})")
                for each in analysis.findings
            ),
        )
        _check(analysis, parameters_bytes)
        if job.recorded and row.mode == "train":
            _check_recording(analysis.peak, built.module, args, kwargs)
    except Exception as error:
        why, reason = _explain(error)
        if why is Why.FXMEM and (raised := raises_in_eager(built, args, kwargs)) is not None:
            why, reason = Why.EAGER_TOO, _explain(raised)[1]
        return dataclasses.replace(row, why=why.value, reason=reason)
    return row


def _check(analysis: Any, parameters_bytes: int) -> None:
    """Refuse a profile that cannot be true, and a report that cannot be written or read back."""
    from fxmem.memory import liveness
    from fxmem.records.profile import Report

    profile, peak = analysis.profile, analysis.peak
    liveness.check(profile)
    resident = sum(storage.nbytes for storage in profile.storages if storage.kind == "parameter")
    if resident != parameters_bytes:
        raise AssertionError(f"the profile has {resident} bytes of parameters, the model {parameters_bytes}")
    if peak.requested_bytes < parameters_bytes:
        raise AssertionError(f"a peak of {peak.requested_bytes} bytes is less than the parameters' {parameters_bytes}")
    if sum(peak.by_kind.values()) != peak.requested_bytes:
        raise AssertionError(
            f"the kinds at the peak sum to {sum(peak.by_kind.values())} bytes, the peak is {peak.requested_bytes}"
        )
    if Report.model_validate_json(analysis.to_json()) != analysis.report():
        raise AssertionError("the report read back from JSON is another")
    too_wide = [line for line in analysis.table(width=100).splitlines() if len(line) > 100]
    if too_wide:
        raise AssertionError(f"a line of the table is {len(too_wide[0])} characters wide, not 100: {too_wide[0]!r}")


def _check_recording(analysed: Any, model: Any, args: Any, kwargs: Any) -> None:
    """Refuse an analysis that is not, to the byte, what the same loop gives where it is recorded as a script's."""
    import copy

    import torch

    import fxmem
    from fxmem._torch.common import tree_map_only
    from fxmem.simulation.step.step import default_loss

    def to_card(tensor: Any) -> Any:
        if tensor.device.type != "meta":
            return tensor.to("cuda")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    def step() -> None:
        out = model(*args, **kwargs)
        loss = default_loss(out)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model = copy.deepcopy(model)
    with fxmem.record(TARGET, steps=2) as recorded:
        # As `to`, which meta tensors do not allow.
        model._apply(lambda tensor: torch.empty_like(tensor, device="cuda") if tensor.is_meta else tensor)
        optimizer = torch.optim.AdamW(model.parameters())
        args, kwargs = tree_map_only(torch.Tensor, to_card, (args, kwargs))
        while True:
            step()
    for name in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
        mine, theirs = getattr(analysed, name), getattr(recorded.peak, name)
        if mine != theirs:
            raise AssertionError(f"{name} at the peak are {mine} analysed and {theirs} recorded")


def _explain(error: BaseException) -> tuple[Why, str]:
    from fxmem._torch import common as torch_common
    from fxmem.errors import EnvironmentLacksError
    from fxmem.simulation.code.source_lines import describe_place

    cause = error.__cause__ or error
    where = describe_place(cause)
    text = " ".join(str(cause).split())
    said = _shortened(f"{type(cause).__name__}: {text}", 300) + where
    if isinstance(error, EnvironmentLacksError):
        return Why.PACKAGE, _portable(said)
    if isinstance(cause, torch_common.DATA_DEPENDENT) or ".numpy() is not supported for tensor subclasses" in text:
        return Why.DATA_DEPENDENT, _portable(f"{text}{where}")
    if isinstance(cause, torch_common.UnsupportedOperatorException):
        return Why.NO_FAKE_KERNEL, _portable(said)
    return Why.FXMEM, _portable(said)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _portable(text: str) -> str:
    """Without the directories that only this machine has."""
    return re.sub(rf"\S*/site-packages/|{re.escape(str(Path(__file__).parents[2]))}/", "", text)


# --- the table --------------------------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Any]) -> str:
    """The result for people: counts, and failures with their reasons."""
    rows = [
        Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
        for row in found["rows"]
    ]
    specs = list(dict.fromkeys(row.architecture for row in rows))
    compiled = bool(found.get("compiled"))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join(
        [
            f"# The zoo{', compiled' * compiled}, {found['date']}",
            "",
            f"`make zoo{'-compiled' * compiled}`: {len(specs)} architectures built on meta and analysed for "
            f"`{found['target']}`, "
            f"{'training with AdamW, as compiled' if compiled else 'training with AdamW and inference'}; "
            f"{versions}, Python {found['python']}.",
            "",
            *_counts(rows),
            "",
            *_failures(rows),
            *_findings(rows),
            f"Each architecture and mode has a row in `{_name(compiled)}-{found['date']}.json`.",
            "",
        ]
    )


def _counts(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Of those that run in eager:",
        "",
        (
            "| collection | train | infer | without a part that depends on data or needs more inputs | do not run in "
            "eager |"
        ),
        "|---|---:|---:|---:|---:|",
    ]
    collections = list(dict.fromkeys(row.architecture.partition(":")[0] for row in rows))
    for name in [*collections, "all"]:
        cells = []
        here = [row for row in rows if name == "all" or row.architecture.startswith(name + ":")]
        for mode in MODES:
            these = [row for row in here if row.mode == mode and row.why != Why.EAGER_TOO]
            cells.append(f"{sum(row.why is None for row in these)} of {len(these)}")
        cells.append(str(sum(bool(row.left_out) for row in here)))
        cells.append(str(len({row.architecture for row in here if row.why == Why.EAGER_TOO})))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _failures(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if row.why is not None]
    if not failed:
        return []
    lines = ["## Failures", ""]
    for why, count in Counter(row.why for row in failed).most_common():
        lines += [f"**{why}** ({count})", ""]
        reasons: dict[str, dict[str, list[str]]] = {}
        for row in failed:
            if row.why == why:
                reasons.setdefault(row.reason, {}).setdefault(row.architecture, []).append(row.mode)
        for reason, specs in reasons.items():
            named = [f"`{spec}` ({', '.join(modes)})" for spec, modes in specs.items()]
            lines.append(f"- {reason}: {', '.join(named)}")
        lines.append("")
    return lines


def _findings(rows: Sequence[Row]) -> list[str]:
    kinds: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for each in row.found:
            of_kind = kinds.setdefault(each.partition(",")[0], {})
            of_kind.setdefault(each, []).append(f"`{row.architecture}` ({row.mode})")
    lines = ["## What is found in them", ""] if kinds else []
    for cause, texts in kinds.items():
        lines += [f"**{cause}** ({sum(map(len, texts.values()))})", ""]
        lines += [f"- {text.partition(', ')[2]}: {', '.join(where)}" for text, where in texts.items()]
        lines.append("")
    return lines


# --- running ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if anything in the result is a bug of fxmem, else 0."""
    asked = _parse(arguments)
    from benchmarks.zoo.architectures import COLLECTIONS, SAMPLE, every_architecture

    patterns = SAMPLE if asked.quick else asked.only
    named = {pattern.partition(":")[0] for pattern in patterns}
    zoo = every_architecture(named if named <= set(COLLECTIONS) else COLLECTIONS)
    chosen = [spec for spec in zoo if _is_chosen(spec, patterns)]
    if not chosen:
        print(
            (
                f"expected names from the zoo like resnet18, 'timm:*vit*' or hf:LlamaForCausalLM; nothing is called "
                f"{' or '.join(patterns)}"
            ),
            file=sys.stderr,
        )
        return 2
    found = _open(asked.out, asked.compile)
    path = asked.out / f"{_name(asked.compile)}-{found['date']}"
    rows = {(row["architecture"], row["mode"]): row for row in found["rows"]}
    wanted = {
        spec: tuple(
            mode
            for mode in MODES[: 1 if asked.compile else None]
            if asked.again or (spec, mode) not in rows or (asked.retry and rows[spec, mode]["why"])
        )
        for spec in chosen
    }
    jobs = [Job(spec, modes, asked.recorded, asked.compile) for spec, modes in wanted.items() if modes]
    written = time.monotonic()
    for number, (job, result) in enumerate(
        run_jobs(
            jobs,
            examine,
            prepare=prepare,
            workers=asked.jobs,
            limit_s=asked.limit,
            jobs_per_worker=asked.jobs_per_worker,
        ),
        1,
    ):
        new = [Row(job.spec, mode, *_lost(result)) for mode in job.modes] if isinstance(result, Lost) else result
        rows.update({row.key: dataclasses.asdict(row) for row in new})
        found["rows"] = [
            rows[key] for key in sorted(rows, key=lambda key: (COLLECTIONS.index(key[0].partition(":")[0]), key))
        ]
        if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
            _write(path, found)
            written = time.monotonic()
        for row in new:
            print(f"{number}/{len(jobs)} {job.spec} {row.mode}: {_summary(row)}", file=sys.stderr, flush=True)
    _write(path, found)
    bugs = sum(row["why"] == Why.FXMEM for row in found["rows"])
    print(
        f"{path}.md: {len(found['rows'])} analyses, {sum(row['why'] is not None for row in found['rows'])} failed, "
        f"{bugs} of them bugs of fxmem"
    )
    return 1 if bugs else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Analyse every architecture of the model collections.")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=("*",),
        help="architectures by name or pattern: resnet18, 'timm:*vit*'",
    )
    parser.add_argument("--quick", action="store_true", help="a fixed sample")
    parser.add_argument("--again", action="store_true", help="also what is in the day's table already")
    parser.add_argument("--retry", action="store_true", help="also what failed")
    parser.add_argument("--recorded", action="store_true", help="also record each training step as a script's loop")
    parser.add_argument("--compile", action="store_true", help="training steps alone, as torch.compile would run them")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="SECONDS", help="time an analysis may take (default 180)"
    )
    parser.add_argument(
        "--jobs-per-worker",
        type=int,
        default=60,
        metavar="N",
        help="analyses after which a worker is replaced (default 60)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the table goes")
    return parser.parse_args(arguments)


def _is_chosen(spec: str, patterns: Iterable[str]) -> bool:
    name = spec.partition(":")[2]
    return any(fnmatch.fnmatchcase(spec, pattern) or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _name(compiled: bool) -> str:
    return "zoo-compiled" if compiled else "zoo"


def _open(out: Path, compiled: bool) -> dict[str, Any]:
    """The day's result as far as it is there and made with the same versions."""
    today = datetime.date.today().isoformat()
    new = {
        "date": today,
        "target": TARGET,
        **({"compiled": True} if compiled else {}),
        "versions": {"fxmem": __version__, **{name: importlib.metadata.version(name) for name in PACKAGES}},
        "python": platform.python_version(),
        "rows": [],
    }
    path = out / f"{_name(compiled)}-{today}.json"
    if path.is_file():
        old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {key: old.get(key) for key in new if key != "rows"} == {
            key: value for key, value in new.items() if key != "rows"
        }:
            return old
    return new


def _write(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", _one_row_a_line(found)), (".md", markdown(found))):
        whole = path.with_name(path.name + suffix)
        part = path.with_name(path.name + suffix + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(whole)


def _one_row_a_line(found: Mapping[str, Any]) -> str:
    head = json.dumps({key: value for key, value in found.items() if key != "rows"}, indent=1).removesuffix("\n}")
    rows = ",\n".join(json.dumps(row) for row in found["rows"])
    return f'{head},\n "rows": [\n{rows}\n]}}\n'


def _lost(lost: Lost) -> tuple[str, str]:
    return (Why.SLOW.value if "took longer" in lost.reason else Why.FXMEM.value), lost.reason


def _summary(row: Row) -> str:
    if row.why is not None:
        return f"{row.why}: {row.reason}"
    return f"peak {(row.peak_bytes or 0) / MIB:,.1f} MiB, {row.nodes} nodes, {row.seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
