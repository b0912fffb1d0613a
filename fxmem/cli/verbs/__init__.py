"""The verbs of the command line, one module each.

A verb's module has `BRIEF` (one line for the list of commands), `DESCRIPTION`, `add_options(parser)` and
`run(options)`, which returns the exit code and the text for stdout. None imports torch before it runs.
"""

VERBS = (
    "analyze",
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
