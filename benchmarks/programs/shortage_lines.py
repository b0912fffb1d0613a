"""Hold the line where fxmem says a program runs out to the line that a public thread's traceback has.

    python -m benchmarks.programs.shortage_lines [--only NAME ...]

`shortages` has a program of ours for each thread of `shortages/threads.toml`, with random data and nothing downloaded:
what the thread says is stated, what it does not say is chosen, and both are written there. Each runs under prediction
on the part of the card that the published message leaves it, as `fxmem explain MESSAGE --run PROGRAM` does, without
trying changes.

A thread is hit where the line that is named is the one that stands for the line of the traceback. Beside it stands the
request that is refused there, and the one of the message.

The table is benchmarks/results/shortage-lines-DATE.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from benchmarks import RESULTS

FOLDER = Path(__file__).parent / "shortages"


class Thread(BaseModel):
    """A public thread in which a program runs out of memory, and what stands for it here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    program: str
    """Name of the program in `shortages`."""
    url: str
    target: str
    """The card of the thread, as `--target` takes it; where it does not say one, one that is chosen."""
    message: str
    """The lines of the traceback that count, without folders, and the message; empty where neither is text."""
    line: str
    """The program's line that stands for the line of the traceback."""
    said: str
    """What the thread says of the program."""
    chosen: str = ""
    """What it does not say."""
    miss: str = ""
    """Why another line is named; empty where that line is."""


class Outcome(NamedTuple):
    """What fxmem says of a program."""

    line: str
    """The line where it runs out; empty where it fits, or none is named."""
    requested: str
    """What is refused there, as torch writes it."""


def threads() -> list[Thread]:
    """Every thread of the table."""
    return TypeAdapter(list[Thread]).validate_python(tomllib.loads((FOLDER / "threads.toml").read_text())["thread"])


def predict(thread: Thread) -> Outcome:
    """Run a thread's program on the part of the card that its message leaves."""
    from fxmem.errors import FxmemError
    from fxmem.hardware import catalogue
    from fxmem.memory.shortage import read_messages
    from fxmem.simulation.program import Launch
    from fxmem.whatif.program_step import ProgramCommand, ProgramStep
    from fxmem.whatif.reproduction import find_refusal, leave_room

    program = FOLDER / f"{thread.program}.py"
    command = ProgramCommand(Launch(str(program)), catalogue.target(thread.target), steps=3)
    step, _ = leave_room(ProgramStep(command), next(iter(read_messages(thread.message)), None))
    try:
        if step.peak.fits:
            return Outcome("", "")
    except FxmemError as error:
        print(thread.program, error, sep=": ", file=sys.stderr)
        return Outcome("", "")
    file, _, number = find_refusal(step).rpartition(":")
    is_own = Path(file).name == program.name
    line = program.read_text().splitlines()[int(number) - 1].strip() if is_own else f"{Path(file).name}:{number}"
    asked = re.search(r"Tried to allocate ([0-9.]+ \w+)", step.peak.shortage)
    return Outcome(line, asked[1] if asked else "")


def table(found: Sequence[tuple[Thread, Outcome]]) -> Iterator[str]:
    """The results, in Markdown."""
    import torch

    hits = sum(outcome.line == thread.line for thread, outcome in found)
    yield f"# The failing line of public threads, {datetime.date.today()}"
    yield ""
    yield f"torch {torch.__version__}, no card. The line of the thread is named in **{hits} of {len(found)}**."
    yield ""
    yield "| Program | Thread | Line that is named | Refused, thread | Refused, fxmem | Same line |"
    yield "|---|---|---|---:|---:|---|"
    for thread, outcome in found:
        asked = re.search(r"Tried to allocate ([0-9.]+ \w+)", thread.message)
        name = "/".join(thread.url.split("/")[-3::2])
        answer = "yes" if outcome.line == thread.line else f"**no**: {thread.miss}"
        line = f"`{outcome.line}`" if outcome.line else "none"
        cells = (line, asked[1] if asked else "", outcome.requested, answer)
        yield f"| {thread.program} | [{name}]({thread.url}) | {' | '.join(cells)} |"


def main() -> None:
    """Run the programs and write their table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="programs; default all")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = []
    for thread in threads():
        if not options.only or thread.program in options.only:
            outcome = predict(thread)
            found.append((thread, outcome))
            print(thread.program, *outcome, outcome.line == thread.line, sep=" | ", file=sys.stderr, flush=True)
    lines = list(table(found))
    print("\n".join(lines))
    if not options.only:
        (RESULTS / f"shortage-lines-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
