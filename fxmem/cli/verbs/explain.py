"""Why did it run out of memory? from the error, a log, a snapshot.

Say what the numbers of an out-of-memory message mean, what held the card, and what the cause is: the program's size,
fragmentation, another process, the context, a limit, or that the host's memory ran out. Reads text of any kind: one
error, a pipe, the log of a job with several ranks. Of a memory snapshot: who held the memory at the peak, what grew,
what lies in pieces. Nothing in the file is run, and no torch is needed. With a program (--run) or a model as well: the
failing line under prediction, who holds the memory there, beside what a snapshot has at the same lines, and the
smallest set of changes that fits, tried.

    fxmem explain oom.txt
    python train.py 2>&1 | fxmem explain -
    fxmem explain logs/
    fxmem explain snapshot.pickle
    fxmem explain snapshot.pickle --target rtx4090 --run train.py
    fxmem explain oom.txt --target rtx4090 --run train.py --batch-size 16
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import BESIDE, RUNNABLE, TARGET, TORCH, text_output
from fxmem.cli.output import layout, write_file, write_json
from fxmem.cli.parser import argument, flag
from fxmem.cli.progress import Progress
from fxmem.cli.step import analyze_subject, check_generation, read_program, refuse_compile
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.cli.step import ProgramWords
    from fxmem.records.shortage import Explanation

_TARGET = argument(
    "--target NAME|FILE.json", help="the card that ran out (default: the one with the memory that the message names)"
)._replace(variable=TARGET.variable, group=TARGET.group)
ARGUMENTS = (
    argument(
        "file FILE|FOLDER|-",
        nargs="+",
        help="a text with the message, or what torch.cuda.memory._dump_snapshot wrote; `-` reads standard input; "
        "several texts, or a folder of them, are one job's log",
    ),
    *(_TARGET if each is TARGET else each for each in RUNNABLE if each not in (TORCH, *BESIDE)),
    flag("--quick", "with a program or a model: try only changes of one line that often decide, and no checkpoints"),
    *text_output("explanation"),
    argument("--markdown FILE|-", help="write it as Markdown; `-` writes that to stdout instead of the text"),
    argument("--html FILE.html", help="of a snapshot: write the page, beside the prediction if any"),
)
_RANK = re.compile(r"rank[-_]?(\d{1,9})|[/\\](\d{1,9})[/\\][^/\\]*$")
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How a text begins that PowerShell writes."""
_EXPECTED = "expected the text of an out-of-memory error, a log with one, or a memory snapshot"


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem explain`; return the exit code and the text for stdout."""
    from fxmem.show.text import explanation as reporting

    *files, last = options.file
    if files and options.model is None and options.run_program is None and last != "-" and not Path(last).exists():
        options.file, options.model = files, last
    is_given = options.model is not None or options.run_program is not None
    program = read_program(options) if is_given else None
    explanation = read_explanation(options.file)
    if options.html is not None and explanation.snapshot is None:
        raise UsageError(f"expected --html with a memory snapshot, got a text, {explanation.source!r}")
    if is_given:
        explanation = _reproduce(options, program, explanation)

    markdown = "" if options.markdown is None else reporting.markdown(explanation)
    if options.html is not None:
        from fxmem.show.html import snapshot_html

        write_file(options, options.html, snapshot_html(explanation))

    show = partial(reporting.table, explanation, **layout(options))
    return 0, write_json(options, explanation.model_dump_json, show, markdown)


def read_explanation(files: Sequence[str]) -> Explanation:
    """Read a snapshot, or one text; several, or a folder of them, are one job's log."""
    from fxmem.memory.shortage import read_messages
    from fxmem.memory.snapshots import is_pickle, read_dump, report_dump
    from fxmem.records.shortage import Explanation

    source = " ".join(files)
    listed = (sorted(filter(_is_text, each.rglob("*"))) if each.is_dir() else [each] for each in map(Path, files))
    paths = [*itertools.chain.from_iterable(listed)]
    if [is_pickle(each) for each in paths] == [True]:
        return Explanation(source=source, snapshot=report_dump(read_dump(paths[0])))
    if any(map(is_pickle, paths)):
        raise UsageError(f"{_EXPECTED}: several files are the texts of one job; got {source!r}, with a snapshot")
    messages = read_messages("\n".join(_read_text(each, is_one=len(paths) == 1) for each in paths))
    if not messages:
        raise UsageError(f"{_EXPECTED}, got {source!r}, in which no memory runs out")
    return Explanation(source=source, shortages=messages)


def _is_text(path: Path) -> bool:
    """Whether a file of a folder may be a log: what begins with bytes that no text has, as checkpoints do, is none."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    return head.startswith(_WIDE) or b"\0" not in head


def _read_text(path: Path, *, is_one: bool) -> str:
    """A text; of several, each line with the rank that the file's name has: `rank3.log`, `3/stderr.log`."""
    from fxmem.records import json_reader

    content = json_reader.read(path, _EXPECTED)
    if is_one and not content.strip():
        raise UsageError(f"{_EXPECTED}, got {str(path)!r}, which is empty")
    text = content.decode("utf-16" if content.startswith(_WIDE) else "utf-8", errors="replace")
    if is_one or (rank := _RANK.search(str(path))) is None:
        return text
    begin = f"[rank{rank[1] or rank[2]}]: "
    return "\n".join(line if line.startswith("[rank") else begin + line for line in text.splitlines())


def _reproduce(options: argparse.Namespace, program: ProgramWords | None, explanation: Explanation) -> Explanation:
    """Predict what ran out, on the card that it ran out on."""
    check_generation(options)
    refuse_compile(options, "changes are tried in eager code")
    message = next(
        iter(explanation.shortages or (explanation.snapshot.shortages if explanation.snapshot else ())), None
    )
    options.target = options.target or _find_card(None if message is None else message.capacity_bytes)
    with Progress(options.quiet) as progress:
        step = analyze_subject(options, program, progress, again=True)
        from fxmem.whatif.reproduction import reproduce

        reproduction = reproduce(
            step,
            message,
            explanation.snapshot,
            quick=options.quick,
            progress=progress,
            found=lambda each: progress.found(each.title),
        )
    return explanation.model_copy(update={"reproduction": reproduction})


def _find_card(nbytes: int | None) -> str:
    """The card with this memory."""
    from fxmem.hardware import catalogue
    from fxmem.records.units import format_bytes

    names = () if nbytes is None else catalogue.find_by_memory(nbytes)
    if len(names) == 1:
        return names[0]
    size = "the file does not say how large the card is" if nbytes is None else format_bytes(nbytes)
    known = f": {', '.join(names)} have that" if names else ", which no card of the catalogue has"
    raise UsageError(f"expected --target with the card that ran out; {size}{known if nbytes is not None else ''}")
