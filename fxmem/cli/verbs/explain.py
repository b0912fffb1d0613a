"""`fxmem explain`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import text_output
from fxmem.cli.output import check_markdown, check_output, layout, write_file, write_json
from fxmem.cli.parser import argument
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.records.explanation import Explanation

BRIEF = "why a card ran out of memory, from its message or a snapshot"
DESCRIPTION = (
    "Say what the numbers of an out-of-memory message mean, what held the card, and what the cause is: the program's "
    "size, fragmentation, another process, the context or a limit. Reads text of any kind: one error, a pipe, the log "
    "of a job with several ranks. Of a memory snapshot: who held the memory at the peak, what grew, what lies in "
    "pieces. Nothing in the file is run; needs no torch."
)

EXAMPLES = (
    "fxmem explain oom.txt",
    "python train.py 2>&1 | fxmem explain -",
    "fxmem explain snapshot.pickle",
)

ARGUMENTS = (
    argument(
        "file",
        metavar="FILE|-",
        help="a text with the message, or what torch.cuda.memory._dump_snapshot wrote; `-` reads standard input",
    ),
    *text_output("explanation"),
    argument(
        "--markdown", metavar="FILE|-", help="write it as Markdown; `-` writes that to stdout instead of the text"
    ),
)
_EXPECTED = "expected the text of an out-of-memory error, a log with one, or a memory snapshot"


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem explain`; return the exit code and the text for stdout."""
    from fxmem.show.text import explanation as reporting

    check_output(options)
    check_markdown(options)
    explanation = read_explanation(options.file)

    markdown = "" if options.markdown is None else reporting.markdown(explanation)
    if options.markdown not in (None, "-"):
        write_file(options, options.markdown, markdown)

    def text() -> str:
        return markdown if options.markdown == "-" else reporting.table(explanation, **layout(options))

    return 0, write_json(options, explanation.model_dump_json(), text)


def read_explanation(file: str) -> Explanation:
    """Read a text or a snapshot."""
    from fxmem.memory.shortage import read_messages
    from fxmem.memory.snapshots import is_pickle, read_dump, report_dump
    from fxmem.records import json_reader
    from fxmem.records.explanation import Explanation

    path = Path(file)
    if is_pickle(path):
        return Explanation(source=file, snapshot=report_dump(read_dump(path)))
    content = json_reader.read(path, _EXPECTED)
    if not content.strip():
        raise UsageError(f"{_EXPECTED}, got {file!r}, which is empty")
    messages = read_messages(content.decode(errors="replace"))
    if not messages:
        raise UsageError(f"{_EXPECTED}, got {file!r}, in which no memory runs out")
    return Explanation(source=file, shortages=messages)
