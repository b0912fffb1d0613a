"""Run public training scripts, untouched, with `fxmem run`; write what came of each.

    python -m benchmarks.programs.scripts.run                all of scripts.toml (`make scripts`)
    python -m benchmarks.programs.scripts.run --only 'nanoGPT*' TRL*

Each repository is checked out at its commit into a folder of its own, data is made up beside it, and the program stops
after three optimizer steps. FXMEM_SCRIPTS_FROM is where repositories come from, with `{owner}` and `{name}` in it; the
default is GitHub. Nothing is installed: --python names an interpreter that has what the programs import, and fxmem's
own dependencies (`benchmarks/programs/scripts/requirements.txt`).

The result is a JSON file and a Markdown table of the day's date under `benchmarks/results/`; scripts run before on the
same day keep their rows unless they are run again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import json
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
import termios
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.programs.scripts.data import MAKERS

HERE = Path(__file__).resolve().parent
SOURCE = os.environ.get("FXMEM_SCRIPTS_FROM", "https://github.com/{owner}/{name}")
TARGET = "h100"
STEPS = 3
SECONDS = 600
"""After which a program is ended; 60 seconds of processor time is the aim."""
MIB = 1 << 20
CHECKED_OUT = ".checked-out"
"""A file beside a repository that is there; what is copied to a machine without a network has it."""


def check_out(script: dict[str, Any], folder: Path) -> None:
    """Put the repository of a script at its commit into a folder, only the parts that it needs."""
    if "repository" not in script:
        folder.mkdir(parents=True, exist_ok=True)
        return
    owner, _, name = script["repository"].partition("/")
    origin = SOURCE.format(owner=owner, name=name)
    git = ["git", "-C", str(folder), "-c", "advice.detachedHead=false"]
    clone = ["git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", origin, str(folder)]
    subprocess.run(clone, check=True)
    if script.get("folder") or "sparse" in script:
        parts = script.get("sparse") or [script["folder"]]
        patterns = ["/*", "!/*/", *(f"!/{part[1:]}" if part[0] == "!" else f"/{part}" for part in parts)]
        subprocess.run([*git, "sparse-checkout", "set", "--no-cone", *patterns], check=True)
    subprocess.run([*git, "checkout", "--quiet", script["commit"]], check=True)


def environment(script: dict[str, Any], folder: Path) -> dict[str, str]:
    """The environment of a script."""
    paths = [str((folder / each).resolve()) for each in script.get("path", ())]
    if script.get("offline"):
        paths.append(str(HERE / "offline"))
    found = {**os.environ, **script.get("environment", {})}
    found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def prepare(script: dict[str, Any], folder: Path, python: str) -> Path:
    """Check a script out, if it is not there, and make its data up; the folder that it is started in."""
    start = folder / script.get("folder", "")
    if (folder / ".ready").exists():
        return start
    if not (folder / CHECKED_OUT).exists():
        shutil.rmtree(folder, ignore_errors=True)
        check_out(script, folder)
        (folder / CHECKED_OUT).touch()
    if "repository" not in script or script.get("loop"):
        shutil.copy(HERE / "loops" / script["command"][0], start)
    for each in script.get("data", ()):
        settings = {key: value for key, value in each.items() if key not in ("maker", "folder")}
        MAKERS[each["maker"]]((start / each["folder"]).resolve(), **settings)
    for command in script.get("before", ()):
        subprocess.run([python, *command], cwd=start, env=environment(script, start), check=True)
    (folder / ".ready").touch()
    return start


def folder_of(script: dict[str, Any], work: Path) -> Path:
    """Where a script is checked out."""
    return work / re.sub(r"\W", "_", script["name"])


def read_scripts() -> list[dict[str, Any]]:
    """All of `scripts.toml`."""
    return tomllib.loads((HERE / "scripts.toml").read_text())["script"]


def run(script: dict[str, Any], folder: Path, python: str) -> dict[str, Any]:
    """Run one script; its row."""
    row: dict[str, Any] = {key: script[key] for key in ("name", "repository", "commit") if key in script}
    row["command"] = " ".join(script["command"])
    try:
        start = prepare(script, folder, python)
    except subprocess.CalledProcessError as error:
        what = "its repository could not be fetched" if error.cmd[0] == "git" else "it could not be prepared"
        return {**row, "failed": f"{what} where this table was made"}
    until = ["--until", script["until"]] if "until" in script else ["--steps", str(STEPS)]
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [python, "-m", "fxmem", "run", "--target", TARGET, *until, "--json", str(report), *script["command"]]
    began = processor_seconds()
    with (folder / "log.txt").open("w") as log, terminal() as keyboard:
        streams = {"stdin": keyboard, "stdout": log, "stderr": log}
        try:
            done = subprocess.run(
                command, cwd=start, env=environment(script, start), **streams, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return {**row, "failed": f"ran for more than {SECONDS} seconds"}
    row["seconds"] = round(processor_seconds() - began, 1)
    if report.exists():
        row.update(read_report(json.loads(report.read_text())))
    if done.returncode:
        lines = (folder / "log.txt").read_text().strip().splitlines()
        row["failed"] = row.get("ending") or (lines[-1][:300] if lines else f"exit code {done.returncode}")
    return row


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """A terminal of 80 columns for standard input: some programs ask it for its width. Nobody types."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


def processor_seconds() -> float:
    """Seconds of processor time of all programs that have ended: a busy machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_report(report: dict[str, Any]) -> dict[str, Any]:
    """What a row has from the report of a program."""
    program = report["step"]["program"]
    peak = report["peak"]
    shown = program["rounds"][program["shown"] - 1]
    return {
        "ending": program["ending"],
        "steps": len(program["rounds"]),
        "requested_bytes": shown["requested_bytes"],
        "allocated_bytes": shown["allocated_bytes"],
        "reserved_bytes": shown["reserved_bytes"],
        "peak_phase": shown["phase"],
        "fits": peak.get("fits"),
        "phases": program["rounds"][-1]["phases"],
        "operators": program["rounds"][-1]["operators"],
        "steady": program["steady"],
        "optimizers": program["optimizers"],
        "made_up": sorted({f"{each['kind']}: {each['what']}" for each in program["made_up"]}),
        "found": [
            {key: each.get(key) for key in ("cause", "text", "place", "nbytes", "of", "saved_bytes")}
            for each in report.get("findings", ())
        ],
    }


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows and their table."""
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of those that ran, and the list of those that did not."""
    ran, failed = [row for row in rows if "failed" not in row], [row for row in rows if "failed" in row]
    lines = [
        f"{len(ran)} of {len(rows)} programs ran.",
        "",
        "| Program | MiB | Optimizer | Phases of the last step | Steady | Made up |",
        "|---|---:|---|---|---|---|",
    ]
    for row in ran:
        kinds = dict.fromkeys(each.partition(":")[0] for each in row["made_up"])
        cells = [
            row["name"],
            mib(row["allocated_bytes"]),
            ", ".join(row["optimizers"]) or "-",
            phases(row["phases"]),
            {True: "yes", False: "no", None: "-"}[row["steady"]],
            ", ".join(kinds) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *findings(ran)]
    lines += ["", "These ended with an error:", ""] if failed else []
    for row in failed:
        lines += textwrap.wrap(f"- {row['name']}: {row['failed']}", 118, subsequent_indent="  ")
    return "\n".join(lines).strip() + "\n"


def findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of what is found in them, with what came of reading the program (`judged.toml`)."""
    judged = {
        (each["program"], each["cause"], each["place"]): each["judged"]
        for each in tomllib.loads((HERE / "judged.toml").read_text())["finding"]
    }
    lines = ["| Program | Found | Where | MiB | of | Judged |", "|---|---|---|---:|---|---|"]
    for row in rows:
        for each in row.get("found", ()):
            place = Path(each["place"] or "").name
            verdict = judged.get((row["name"], each["cause"], place), "not read")
            cells = [row["name"], each["cause"], place or "-", mib(each["nbytes"]), each["of"], verdict]
            lines.append(f"| {' | '.join(cells)} |")
    silent = [row["name"] for row in rows if "found" in row and not row["found"]]
    return [*lines, "", *textwrap.wrap(f"Nothing is found in {len(silent)}: {'; '.join(silent)}.", 118)]


def phases(names: Sequence[str]) -> str:
    """The first letters of phases, of which a row of equals is counted: `4(fb)o`."""
    letters = "".join(name[0] for name in names)
    return re.sub(r"(\w{2,}?)\1+", lambda found: f"{len(found[0]) // len(found[1])}({found[1]})", letters)


def mib(nbytes: int | None) -> str:
    """Bytes as MiB, one place behind the point."""
    return "" if nbytes is None else f"{nbytes / MIB:,.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="run public scripts with fxmem run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the scripts with these names, as patterns")
    parser.add_argument("--work", type=Path, default=Path("build/scripts"), help="where they are checked out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the result")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs them")
    options = parser.parse_args(arguments)
    scripts = read_scripts()
    path = options.results / f"scripts-{datetime.date.today():%Y-%m-%d}"
    known = path.with_suffix(".json")
    rows = {row["name"]: row for row in json.loads(known.read_text())} if known.exists() else {}
    for script in scripts:
        name = script["name"]
        if options.only and not any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
            continue
        rows[name] = run(script, folder_of(script, options.work).resolve(), options.python)
        row = rows[name]
        print(f"{name}: {row.get('failed') or mib(row['requested_bytes'])} in {row.get('seconds')} s", flush=True)
        write([rows[each["name"]] for each in scripts if each["name"] in rows], path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
