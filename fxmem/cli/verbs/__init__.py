"""The verbs of the command line, one module each.

A verb's module has `BRIEF` (one line for the list of commands), `DESCRIPTION`, `ARGUMENTS` and `run(options)`,
which returns the exit code and the text for stdout. None imports torch before it runs.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from fxmem import __version__
from fxmem.cli.parser import Parser

VERBS = (
    "analyze",
    "run",
    "graph",
    "timeline",
    "report",
    "show",
    "lines",
    "layers",
    "compare",
    "export",
    "plan",
    "advise",
    "max-batch",
    "cards",
    "validate",
    "schema",
    "doctor",
)
"""In the order `fxmem --help` lists them."""


def load(verb: str) -> ModuleType:
    """Import the module of a verb."""
    return import_module(f"fxmem.cli.verbs.{verb.replace('-', '_')}")


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of `fxmem`, and the parser of each verb by the verb's name."""
    parser = Parser(
        prog="fxmem", description="Predicts the memory of a PyTorch training step from the model alone, with no GPU."
    )
    parser.add_argument("--version", action="version", version=f"fxmem {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    parsers = {}
    for verb in VERBS:
        module = load(verb)
        added: Parser = commands.add_parser(verb, help=module.BRIEF, description=module.DESCRIPTION)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.add_arguments(module.ARGUMENTS).set_defaults(run=module.run, parser=added)
        parsers[verb] = added
    return parser, parsers
