"""The verbs of the command line, one module each.

A verb's module has `BRIEF` (one line for the list of commands), `DESCRIPTION`, `EXAMPLES` (lines for its help),
`ARGUMENTS` and `run(options)`, which returns the exit code and the text for stdout. None imports torch before it runs.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from types import ModuleType

from fxmem import __version__
from fxmem.cli.parser import Parser

GROUPS = {
    "does it fit?": ("analyze", "run", "generate"),
    "what is wrong?": ("explain",),
    "what to change?": ("advise", "plan"),
    "how large, on which cards?": ("max-batch", "cards", "shard", "sweep", "serve-size"),
    "what changed?": ("compare",),
    "is it true?": ("validate",),
    "look closer": ("show", "lines", "layers", "report", "serve", "graph", "timeline", "export"),
    "of fxmem": ("help", "doctor", "schema", "mcp", "completion"),
}
"""The verbs by the question they answer, in the order `fxmem --help` lists them."""
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
_EXAMPLES = """\
examples:
  fxmem analyze torchvision:resnet50 --input 32x3x224x224 --target rtx4090
  fxmem analyze model.py:build --input x:8x1024:int64 --json report.json
  fxmem run --target rtx4090 train.py --batch-size 16
  fxmem plan model.py:build --input x:8x1024:int64 --budget 60%
  fxmem report report.json -o report.html --open

`fxmem COMMAND --help` has a command's options, `fxmem help step` every step's."""


class _Commands(Parser):
    """The parser of `fxmem` itself: its help has the commands in groups."""

    def format_help(self) -> str:
        """The usage, the commands, the options and a few examples."""
        parts = ["usage: fxmem COMMAND ...", self.description or ""]
        lists = [
            [f"{group}", *(f"  {verb:<11}{load(verb).BRIEF}" for verb in verbs)] for group, verbs in GROUPS.items()
        ]
        parts.append("\n".join(itertools.chain(*lists, ["  --version  show the version"])))
        return "\n\n".join([*parts, _EXAMPLES]) + "\n"


def load(verb: str) -> ModuleType:
    """Import the module of a verb."""
    return import_module(f"fxmem.cli.verbs.{verb.replace('-', '_')}")


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of `fxmem`, and the parser of each verb by the verb's name."""
    parser = _Commands(
        prog="fxmem", description="Predicts the memory of a PyTorch training step from the model alone: no GPU."
    )
    parser.add_argument("--version", action="version", version=f"fxmem {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    parsers = {}
    for verb in VERBS:
        module = load(verb)
        added: Parser = commands.add_parser(verb, help=module.BRIEF, description=module.DESCRIPTION)
        added.examples = module.EXAMPLES
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.add_arguments(module.ARGUMENTS).set_defaults(run=module.run, parser=added)
        parsers[verb] = added
    return parser, parsers
