"""`fxmem explain`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxmem.cli.options import text_output
from fxmem.cli.output import check_output, layout, write_json
from fxmem.cli.parser import argument
from fxmem.errors import UsageError

BRIEF = "why a card ran out of memory, from its message or a snapshot"
DESCRIPTION = (
    "Say what the numbers of an out-of-memory message mean, what held the card, and what the cause is: the program's "
    "size, fragmentation, another process, the context or a limit. Reads text of any kind: one error, a pipe, the log "
    "of a job with several ranks. Nothing in it is run."
)

EXAMPLES = (
    "fxmem explain oom.txt",
    "python train.py 2>&1 | fxmem explain -",
)

ARGUMENTS = (
    argument("file", metavar="FILE|-", help="a text with the message; `-` reads standard input"),
    *text_output("explanation"),
)
_EXPECTED = "expected the text of an out-of-memory error, or a log with one"


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem explain`; return the exit code and the text for stdout."""
    from fxmem.memory.shortage import read_messages
    from fxmem.records import json_reader
    from fxmem.records.explanation import Explanation
    from fxmem.show.text import explanation as reporting

    check_output(options)
    content = json_reader.read(Path(options.file), _EXPECTED)
    if not content.strip():
        raise UsageError(f"{_EXPECTED}, got {options.file!r}, which is empty")
    messages = read_messages(content.decode(errors="replace"))
    if not messages:
        raise UsageError(f"{_EXPECTED}, got {options.file!r}, in which no memory runs out")
    explanation = Explanation(source=options.file, shortages=messages)
    return 0, write_json(
        options, explanation.model_dump_json(), lambda: reporting.table(explanation, **layout(options))
    )
