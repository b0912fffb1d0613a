"""Steps that others measured with `fxmem validate --share`, as the command line has them."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.cli.parser import Parser
from fxmem.cli.step import build_step, replace, step_request
from fxmem.cli.verbs.validate import ARGUMENTS
from fxmem.records.profile import Peak, Target
from fxmem.simulation.recording.compiled import read_compile
from fxmem.simulation.step.analysis import analyze_step

from . import Typed


def step_of_words(words: Sequence[str]) -> Typed:
    """Build the step that these words ask `fxmem validate` for."""

    def analyze(target: str | Target) -> Peak:
        options = Parser().add_arguments(ARGUMENTS).parse_args(words)
        compiled = read_compile(options.compile, options.compile_option)
        built, args, kwargs = build_step(options, lambda _: None)
        request = step_request(options, target=target, compile=compiled)
        return analyze_step(built.module, replace(request, args=args, kwargs=kwargs, name=built.spec)).peak

    return Typed(analyze)
