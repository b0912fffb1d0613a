"""The verbs of the command line, one module each.

The docstring of a verb's module is what its help says: one line, which the list of commands has too, a paragraph, and
indented lines to paste. The module has `ARGUMENTS` and `run(options)`, which returns the exit code and the text for
stdout. None imports torch before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

from fxmem import __version__
from fxmem.cli.parser import Parser
from fxmem.records.registry import to_brief

_OF_STEPS: Final = (
    "analyze", "run", "generate", "kv-cache",  # does it fit?
    "explain", "advise", "plan",  # it does not
    "max-batch", "cards", "shard", "sweep",  # how large, on which cards?
    "compare", "validate",
    "show", "graph", "report", "serve", "export",  # a closer look
)  # fmt: skip
_OF_FXMEM: Final = ("help", "doctor", "schema", "mcp", "completion")
_FOUND: Final = {path.stem.replace("_", "-") for path in Path(__file__).parent.glob("[a-z]*.py")}
_LISTED: Final = (*_OF_STEPS, *sorted(_FOUND - {*_OF_STEPS, *_OF_FXMEM}))
VERBS = (*_LISTED, *_OF_FXMEM)
"""The verbs, in the order `fxmem --help` lists them; one that has no place yet comes after those of steps."""
_EXAMPLES = """\
examples:
  fxmem run --target rtx4090 train.py --batch-size 16
  fxmem analyze torchvision:resnet50 --input 32x3x224x224 --json report.json
  fxmem show report.json --by line"""


class _Commands(Parser):
    """The parser of `fxmem` itself: its help has each command with the question that it answers."""

    def format_help(self) -> str:
        """The usage, the commands and a few examples."""
        listed = [f"  {verb:<11}{describe(verb).brief}" for verb in _LISTED]
        others = f"  {', '.join(_OF_FXMEM)}, --version: of fxmem itself"
        asked = "`fxmem COMMAND --help` has a command's options, `fxmem help step` every step's."
        return (
            "\n\n".join(
                ["usage: fxmem COMMAND ...", self.description or "", "\n".join([*listed, others]), _EXAMPLES, asked]
            )
            + "\n"
        )


def load(verb: str) -> ModuleType:
    """Import the module of a verb."""
    return import_module(f"fxmem.cli.verbs.{verb.replace('-', '_')}")


class VerbWords(NamedTuple):
    """What the docstring of a verb's module says."""

    brief: str
    """One line for the list of commands."""
    description: str
    examples: Sequence[str]
    """Lines to paste."""


def describe(verb: str) -> VerbWords:
    """The words of a verb; empty where Python drops docstrings (`-OO`)."""
    brief, description, examples = (load(verb).__doc__ or "\n\n\n\n").split("\n\n")
    lines = [line.strip() for line in examples.strip().splitlines()]
    return VerbWords(to_brief(brief), " ".join(description.split()), lines)


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of `fxmem`, and the parser of each verb by the verb's name."""
    parser = _Commands(
        prog="fxmem", description="Predicts the memory of a PyTorch training step from the model alone: no GPU."
    )
    parser.add_argument("--version", action="version", version=f"fxmem {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    parsers = {}
    for verb in VERBS:
        module, words = load(verb), describe(verb)
        added: Parser = commands.add_parser(verb, help=words.brief, description=words.description)
        added.examples = words.examples
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.add_arguments(module.ARGUMENTS).set_defaults(run=module.run, parser=added)
        parsers[verb] = added
    return parser, parsers
