"""What verbs write: files, which are checked before the work, and JSON or text on stdout."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from fxmem.cli.given_program import spell_program
from fxmem.cli.options import ANALYSIS
from fxmem.cli.parser import Argument
from fxmem.cli.progress import say
from fxmem.cli.step import is_report
from fxmem.errors import FxmemError, UsageError
from fxmem.show.terminal import columns, why_plain

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget
    from fxmem.records.plan import Plan
    from fxmem.records.profile import Peak, Report, Timeline

DRAWINGS = (".svg", ".png", ".pdf")
"""Endings of a drawing's file."""


class TextLayout(TypedDict):
    """How text is laid out for the terminal: the keyword arguments of every table."""

    width: int
    """Columns."""
    color: bool


def layout(options: argparse.Namespace) -> TextLayout:
    """Lay text out as `--width` and the terminal ask."""
    return {"width": columns() if options.width is None else options.width, "color": not why_plain()}


def check_output(options: argparse.Namespace) -> None:
    """Refuse what cannot be written, before the work and not after it; of several documents on stdout, all but one."""
    document, markdown = (getattr(options, name, None) for name in ("json", "markdown"))
    for option, name in (("--json", document), ("--markdown", markdown)):
        if name not in (None, "-"):
            check_writable(options, option, name, ", or - for stdout")
    if document not in (None, "-"):
        _check_is_json(document)
    if document == markdown == "-":
        raise UsageError("expected stdout (-) for one of --json and --markdown, got it for both")
    if getattr(options, "svg", None) is not None:
        check_drawing(options, "--svg", options.svg)
    if getattr(options, "html", None) is not None:
        check_file(options, "--html", options.html, (".html", ".htm"))


def _check_is_json(name: str) -> None:
    """Refuse a file that is there and is no JSON: in `fxmem run --json train.py` the program would be replaced."""
    begin = b""
    if name.endswith(".json"):
        return
    with contextlib.suppress(OSError), open(name, "rb") as file:
        begin = file.read(64).lstrip()
    if begin and not begin.startswith(b"{"):
        raise UsageError(f"expected --json to name a new file, or one of JSON, got {name!r}, which is something else")


def check_writable(options: argparse.Namespace, option: str, name: str, or_else: str = "") -> None:
    """Refuse a file that cannot be written, or that another of the options names: what is read is never replaced."""
    path = Path(name).absolute()
    if not os.path.isdir(path.parent):
        raise UsageError(f"expected {option} to name a file in a folder that exists, got {name!r}")
    # A folder; or a device, which the file moved into place would replace.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"expected {option} to name a file{or_else}, got {name!r}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"expected {option} to name a file in a folder that can be written, got {name!r}")
    others = named_files({dest: value for dest, value in vars(options).items() if dest != option.lstrip("-")})
    if os.path.exists(path) and any(os.path.samefile(path, each) for each in others):
        raise UsageError(f"expected {option} to name a file that no other argument names, got {name!r}")


def check_folder(option: str, name: str) -> None:
    """Refuse a folder that is there and holds something, or that cannot be made."""
    path = Path(name).absolute()
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"expected {option} to name a new or an empty folder, got {name!r}")
    if not os.access(path if path.is_dir() else path.parent, os.W_OK):
        raise UsageError(f"expected {option} to name a folder that can be made, got {name!r}")


def named_files(options: Mapping[str, object]) -> set[str]:
    """The absolute paths of files that options name: whole, as FILE.py:NAME, hf:FILE or KEY=FILE; stdin for `-`."""
    values = [each for value in options.values() for each in (value if isinstance(value, list) else [value])]
    words = ["/dev/stdin" if each == "-" else each for each in values if isinstance(each, str)]
    names = {part for word in words for part in (word, word.rpartition(":")[0], *re.split("[:=]", word))}
    return {os.path.abspath(name) for name in names if name and os.path.isfile(name)}


def check_file(options: argparse.Namespace, option: str, name: str, endings: Sequence[str]) -> None:
    """Refuse a file with another ending, or what `check_writable` refuses."""
    if Path(name).suffix not in endings:
        raise UsageError(f"expected {option} to name a file that ends in {' or '.join(endings)}, got {name!r}")
    check_writable(options, option, name)


def write_report(
    options: argparse.Namespace, report: Report, timeline: Timeline, following: str, budget: Budget | None = None
) -> tuple[int, str]:
    """Write the files that `REPORT_OUTPUT` names; return the exit code of the verdict and the text for stdout.

    `following` is the command that answers the next question.
    """
    from fxmem.show import text as reporting
    from fxmem.show.facts import find_fit

    fit = find_fit(report, timeline.peak, budget)
    if options.check and report.target.memory_bytes is None:
        raise UsageError(f"expected --check with a target whose memory is known, got {report.target.name!r}")
    if options.svg is not None:
        from fxmem.show import graph

        write_drawing(options, options.svg, graph.render(report, timeline).svg)
    if options.html is not None:
        write_page(options, options.html, report, timeline)

    following = "" if fit.is_failed else following

    def overview() -> str:
        return reporting.overview(
            report, timeline, fit, following=following, full=options.full, depth=options.depth, **layout(options)
        )

    if fit.exit_code and (options.check or budget is not None or options.json == "-"):
        say(fit.verdict)
    return fit.exit_code, write_json(options, report.model_dump_json, overview)


def write_page(options: argparse.Namespace, name: str, report: Report, timeline: Timeline, **choices: Any) -> None:
    """Write a report's page; what is chosen for it is as `PageOptions` has it."""
    from fxmem.memory.allocator import read_settings
    from fxmem.show.html import PageOptions, report_html

    proposal = None if choices.get("plan") is not None else _propose_plan(report, timeline)
    page = PageOptions(proposal=proposal, settings=read_settings(os.environ), **choices)
    write_file(options, name, report_html(report, timeline, page))


def _propose_plan(report: Report, timeline: Timeline) -> Plan | None:
    """A plan of modules that edits of the program's lines checkpoint, by the record alone; None where there is none."""
    from fxmem.planning import estimate
    from fxmem.records.units import Application

    with contextlib.suppress(FxmemError):
        return estimate.estimate(report, timeline.peak, "auto", None, Application.MODULES, edits_only=True)
    return None


def write_file(options: argparse.Namespace, name: str, content: str | bytes) -> None:
    """Write a file whole or not at all, and report it; open it where `--open` asks."""
    from fxmem.records.files import write_bytes, write_text

    if isinstance(content, str):
        write_text(Path(name), content)
    else:
        write_bytes(Path(name), content)
    report_written(options, name)


def check_drawing(options: argparse.Namespace, option: str, name: str, *further: str) -> None:
    """Refuse a file of a drawing that cannot be written here, before the work; `further` are other endings."""
    check_file(options, option, name, (*DRAWINGS, *further))
    if (form := Path(name).suffix[1:]) in ("png", "pdf"):
        from fxmem.show.svg import require_image

        require_image(form)


def write_drawing(options: argparse.Namespace, name: str, svg: str) -> None:
    """Write a drawing as its file's ending says."""
    if name.endswith(".svg"):
        write_file(options, name, svg)
        return
    from fxmem.show.svg import convert

    write_file(options, name, convert("png" if name.endswith(".png") else "pdf", svg))


def report_written(options: argparse.Namespace, name: str) -> None:
    """Report on stderr that a file was written, unless `--quiet`; open it where `--open` asks."""
    path = Path(name)
    if not getattr(options, "quiet", False):
        say(f"wrote {name} ({_describe_size(path.stat().st_size)})")
    if getattr(options, "open", False):
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def _describe_size(nbytes: int) -> str:
    """A file's size as file managers show it."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    return f"{nbytes / 1e3:.0f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"


def write_json(
    options: argparse.Namespace, document: Callable[[], str], text: Callable[[], str], markdown: str = ""
) -> str:
    """Write the document where `--json` asks, and what `--markdown` does; return the text for stdout, or what is to
    stand there instead."""
    if markdown and options.markdown != "-":
        write_file(options, options.markdown, markdown)
    if options.json == "-":
        # What is not ASCII is escaped, for a stdout of any encoding; JSON has it in strings only.
        return re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], document())
    if options.json is not None:
        write_file(options, options.json, document() + "\n")
    return markdown if markdown and options.markdown == "-" else text()


# --- the command that answers the next question, spelt out so that it can be pasted -----------------------------------


def next_for(options: argparse.Namespace, report: Report) -> str:
    """The command for the subject that the options of `SUBJECT` name."""
    if options.run_program is not None:
        ranks = options.ranks, options.rank
        return "" if options.compile else next_for_program(report.target.spelling, options.run_program, ranks)
    if is_report(options.model):
        return next_for_report(options.model, report)
    if options.mode == "generate":
        return next_for_report(options.json or "-", report)
    return next_for_model(options, report.peak)


def next_for_model(options: argparse.Namespace, peak: Peak) -> str:
    """How large a batch fits; what to change where the step does not fit, or nothing is known of that.

    Advice is about eager code. Nothing for a compiled step where it is not known what fits.
    """
    compiled = options.compile is not None
    if compiled and peak.fits is None:
        return ""
    verb = "max-batch" if peak.fits or compiled else "advise"
    return shlex.join(["fxmem", verb, *(word for each in ANALYSIS for word in _spell(each, options))])


def next_for_program(target: str, words: Sequence[str], ranks: Sequence[int | None] = ()) -> str:
    """What to change in a program; `ranks` is how many it has, and which one ran."""
    given = zip(("--ranks", "--rank"), ranks, strict=False)
    place = [word for name, value in given if value is not None for word in (name, str(value))]
    return shlex.join(["fxmem", "advise", "--target", target, *place, *spell_program(words)])


def next_for_report(name: str, report: Report) -> str:
    """All of a report in one page; where the step does not fit, where checkpoints go. Nothing for standard input."""
    if name == "-":
        return ""
    if report.peak.fits is False and report.step.mode == "train" and report.step.program is None:
        from fxmem.hardware.context import room_bytes

        return shlex.join(["fxmem", "plan", name, "--budget", str(room_bytes(report.target))])
    return shlex.join(["fxmem", "report", name, "--output", str(Path(name).with_suffix(".html")), "--open"])


def _spell(each: Argument, options: argparse.Namespace) -> Iterator[str]:
    """The words of an argument that was given; none if it has its default. `--quiet` is not worth repeating."""
    name, value = each.names[-1], getattr(options, each.dest)
    default = each.settings.get("default", False if each.settings.get("action") == "store_true" else None)
    if not name.startswith("-"):
        yield str(value)
    elif value == default or name == "--quiet":
        return
    elif isinstance(value, bool):
        yield name if value else f"--no-{name[2:]}"
    else:
        for item in value if isinstance(value, list) else [value]:
            yield from (name, str(item))
