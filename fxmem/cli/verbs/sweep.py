"""Which of a grid of sizes, precisions, checkpoints and cards fit?

Predict a step with each value of each setting with each of the others: what fits, how long it takes and what it costs.
The table has a line for each case, with the largest batch that fits; --full has one for each point. What --json FILE
has of the same question is kept: a sweep that was ended goes on there. Of a program the batch stands as {} among its
arguments. Exit code 4 if nothing fits.

    fxmem sweep hf:GPT2LMHeadModel --over batch=1..64 --over length=256..1024 --over precision=none,bf16
    fxmem sweep model.py:build --input 8x64 --grid grid.toml --json sweep.json --svg front.svg
    fxmem sweep torchvision:resnet50 --over batch=8..512 --over card=l4,a100,h100 --price l4=0.8 --price h100=2.99
"""

from __future__ import annotations

import argparse
import contextlib
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fxmem.cli.options import ANALYSIS, LOOP, MODEL, PROGRAM, STEPS_OF_PROGRAM, TORCH, or_program, text_output
from fxmem.cli.output import layout, write_file, write_json
from fxmem.cli.parser import argument, flag, repeatable
from fxmem.cli.progress import Progress
from fxmem.cli.step import analyze_subject, read_program, require_torch
from fxmem.errors import FxmemError, UsageError, closest, unknown_name

if TYPE_CHECKING:
    from fxmem.records.fits import Fits, Space
    from fxmem.records.plan import Plan

_NAMES: Final = ("batch", "length", "precision", "checkpoints", "mesh", "card")
BEGIN: Final = "<!-- fxmem -->"
END: Final = "<!-- /fxmem -->"
_FORM: Final = "expected --over as batch=1,2,4, batch=1..64 (doubled), precision=none,bf16 or mesh=fsdp=8"

ARGUMENTS = (
    or_program(MODEL),
    *(each for each in ANALYSIS[1:] if each not in (TORCH, LOOP[-1])),
    repeatable(
        "--over NAME=VALUE[,VALUE]",
        help="values of batch, length, precision (none, bf16, fp16), checkpoints (none, blocks, PLAN.json), mesh "
        "(none,fsdp=8,fsdp=4,tp=2 are three) or card; 1..64 doubles; repeatable",
    ),
    argument("--grid FILE.toml", help="the same as lists by name, and a table [prices] by card"),
    repeatable("--price CARD=N", help="of an hour of a card, for the cost of a step; repeatable"),
    flag("--full", "a line for each point"),
    STEPS_OF_PROGRAM,
    *text_output("answer"),
    argument("--svg FILE.svg", help="also plot memory against time for a sample, with the front"),
    argument(
        "--markdown FILE.md|-",
        help=f"write the table into a README, between {BEGIN} and {END}, or into a new file; `-` for stdout",
    ),
    *PROGRAM,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem sweep`; return the exit code and the text for stdout."""
    from fxmem.show.plots import sweep_svg
    from fxmem.show.text.fits import fits_table, markdown

    around = ("", "") if options.markdown in (None, "-") else _read_around(Path(options.markdown))
    grid, plans = _read_grid(options)
    program = read_program(options)
    beside = getattr(options, "beside", "")
    grid = grid.model_copy(update={"card": tuple(f"{card}{beside}" for card in grid.card) or (options.target,)})
    options.target = grid.card[0]
    kept = None if options.json in (None, "-") else _read_kept(Path(options.json))
    with Progress(options.quiet) as progress:
        require_torch()
        from fxmem.whatif import sweep

        sweep.check_grid(grid, plans, is_program=program is not None)
        step = analyze_subject(options, program, progress, again=True)
        found = sweep.sweep(
            step, grid=grid, plans=plans, kept=kept, keep=lambda each: _keep(options, each), progress=progress.found
        )
    if options.svg is not None:
        write_file(options, options.svg, sweep_svg(found))
    made = "" if options.markdown is None else markdown(found, full=options.full).join(around)
    show = partial(fits_table, found, full=options.full, **layout(options))
    return (0 if found.fitting else 4), write_json(options, found.model_dump_json, show, made)


def _read_around(path: Path) -> tuple[str, str]:
    """What stands before and after the table in a file; of a new one the two lines alone."""
    if not path.exists():
        return f"{BEGIN}\n\n", f"\n{END}\n"
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(
            f"expected --markdown with a new file, or one with the lines {BEGIN} and {END} once, for the table between "
            f"them, got {str(path)!r}"
        )
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n", f"\n{END}{after}"


def _keep(options: argparse.Namespace, found: Fits) -> None:
    """Write what there is, so that a sweep that is ended can go on."""
    from fxmem.records.files import write_text

    if options.json not in (None, "-"):
        write_text(Path(options.json), found.model_dump_json() + "\n")


def _read_kept(path: Path) -> Fits | None:
    """The answer of an earlier sweep in the file; None where there is none."""
    from fxmem.records import json_reader
    from fxmem.records.fits import Fits

    with contextlib.suppress(FxmemError):
        return json_reader.load(Fits, path, "expected the answer of a sweep")
    return None


def _read_grid(options: argparse.Namespace) -> tuple[Space, dict[str, Plan]]:
    """The grid of `--grid` and `--over`, and the plans that it names."""
    from fxmem.memory import report_reader
    from fxmem.records.fits import Space

    values = _read_toml(Path(options.grid)) if options.grid is not None else {}
    for name in values:
        if name not in (*_NAMES, "prices"):
            raise unknown_name(f"a grid of {', '.join(_NAMES)} and prices in {options.grid}", name, _NAMES)
    for text in options.over:
        name, equals, words = text.partition("=")
        if not equals or name not in _NAMES:
            raise UsageError(f"{_FORM}, got {text!r}{closest(name, _NAMES)}")
        values.setdefault(name, []).extend(_read_values(name, words))
    prices = values.setdefault("prices", {})
    for text in options.price:
        card, _, price = text.partition("=")
        try:
            prices[card] = float(price)
        except ValueError:
            raise UsageError(f"expected --price as CARD=NUMBER, the price of an hour, got {text!r}") from None
    if not any(values.get(name) for name in _NAMES):
        raise UsageError(f"expected something to vary; {_FORM}, or --grid FILE.toml")
    plans = {
        name: report_reader.load_plan(name)
        for name in values.get("checkpoints", ())
        if isinstance(name, str) and name.endswith(".json")
    }
    try:
        return Space(**values), plans
    except ValueError as error:  # pydantic's, whose first line says what
        raise UsageError(f"expected a grid of {', '.join(_NAMES)} and prices; {_describe(error)}") from None


def _describe(error: Any) -> str:
    first = error.errors()[0]
    return f"got {str(first['input'])[:40]!r} for {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"


def _read_values(name: str, words: str) -> Iterator[str | int]:
    if name == "mesh":
        yield from _read_meshes(words)
        return
    for word in words.split(","):
        first, dots, last = word.partition("..")
        if name not in ("batch", "length"):
            yield word
        elif not first.isdecimal() or (dots and not last.isdecimal()) or not 0 < int(first) <= int(last or first):
            raise UsageError(f"{_FORM}, got {word!r} for {name}")
        else:
            size, most = int(first), int(last) if dots else int(first)
            while size <= most:
                yield size
                size *= 2


def _read_meshes(words: str) -> Iterator[str]:
    """Meshes, which have commas of their own: one begins where a dimension comes again, and around `none`."""
    mesh: list[str] = []
    for word in words.split(","):
        named = {each.partition("=")[0] for each in mesh}
        if mesh and (word.partition("=")[0] in named or "none" in (word, *mesh)):
            yield ",".join(mesh)
            mesh = []
        mesh.append(word)
    yield ",".join(mesh)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"expected --grid to name a file of TOML, got {str(path)!r}: {why}") from None
