"""The annotated graph of large models: whether it is drawn, in what time, and whether it can be read.

    python -m benchmarks.speed.drawings                    (some minutes; what is not installed is said and left out)
    python -m benchmarks.speed.drawings --keep FOLDER      keep the drawings

Each model's training step is analysed once. Its report is then drawn in five ways: as the overview; folded; folded,
with the step cut into checkpointed regions of sqrt(N) nodes that begin and end anywhere; unfolded, in at
most 400 boxes; and with a box for every call.

Of every drawing is checked, from its geometry: it is well-formed XML, no two boxes overlap, frames lie within each
other or apart, each box lies in its frame, and no box lies on a frame's heading. Where a Chromium is found, it lays out
every text with its own fonts: no text of a box or a heading may leave its rectangle or touch another text in it, and
none of the head's may leave the page or touch another.

Seconds are wall time of `fxmem.show.graph.render`, the median of the rounds (of one, where that takes over five
seconds): the choice of boxes, their places, and the writing.

Writes `benchmarks/results/drawings-DATE.json` and `.md`.
"""

from __future__ import annotations

import argparse
import datetime
import html
import importlib.metadata
import json
import math
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from fxmem import __version__
from fxmem.errors import FxmemError
from fxmem.memory import report_reader
from fxmem.records.profile import RecomputedRegion, Report
from fxmem.show import graph as drawing

SVG = "{http://www.w3.org/2000/svg}"
EVERY_CALL = 1_000_000
SLOW = 5.0
TOUCH = 0.5
"""Pixels by which things may meet: what is written is rounded to tenths."""

MLP = (
    "import torch\n\n\ndef build():\n    layers = [layer for _ in range(1000) for layer in (torch.nn.Linear(64, "
    "64), torch.nn.ReLU())]\n"
)
MLP += "    return torch.nn.Sequential(*layers)\n"
TOKENS = ("--input", "input_ids:1x512:int64", "--input", "labels:1x512:int64")
MODELS: Mapping[str, tuple[str, ...]] = {
    "GPT-2, 48 layers": ("hf:GPT2LMHeadModel", "--set", "n_layer=48", *TOKENS),
    "DenseNet-201": ("torchvision:densenet201", "--input", "32x3x224x224"),
    "Swin-B": ("torchvision:swin_b", "--input", "32x3x224x224"),
    "Inception-v3": ("torchvision:inception_v3", "--input", "32x3x299x299"),
    "MLP, 1000 layers": ("mlp.py:build", "--input", "32x64"),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "overview": {"max_boxes": 25},
    "folded": {"max_boxes": 400},
    "folded, regions": {"max_boxes": 400},
    "unfolded": {"fold": False, "max_boxes": 400},
    "every call": {"fold": False, "max_boxes": EVERY_CALL},
}
PACKAGES = ("torch", "torchvision", "transformers")


# --- drawing ----------------------------------------------------------------------------------------------------------


def analyzed(folder: Path, arguments: Sequence[str]) -> Report:
    """The report of a model, made in a process of its own."""
    (folder / "mlp.py").write_text(MLP, encoding="utf-8")
    out = folder / "report.json"
    command = [sys.executable, "-m", "fxmem", "analyze", *arguments, "--quiet", "--json", str(out)]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return report_reader.load_report(out)


def cut(report: Report) -> Report:
    """The same step, as if the program checkpointed it from end to end."""
    inside = [
        index
        for index, node in enumerate(report.nodes)
        if node.op not in ("placeholder", "output", "loss", "optimizer")
    ]
    first, last = inside[0], inside[-1] + 1
    size = math.isqrt(last - first)
    regions = tuple(
        RecomputedRegion(first_node=begin, last_node=min(begin + size, last)) for begin in range(first, last, size)
    )
    return report.model_copy(update={"recomputed": regions})


def measure(report: Report, options: Mapping[str, Any], rounds: int) -> tuple[list[float], str]:
    """Seconds, and the SVG; or what went wrong instead."""
    timeline = report_reader.timeline(report)
    seconds: list[float] = []
    text = ""
    while len(seconds) < rounds and not any(taken > SLOW for taken in seconds):
        start = time.perf_counter()
        try:
            text = drawing.render(report, timeline, drawing.DrawingOptions(**options)).svg
        except FxmemError as error:
            return [time.perf_counter() - start], str(error)
        seconds.append(time.perf_counter() - start)
    return seconds, text


# --- checking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Area:
    """A rectangle; right and bottom are past it."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Area) -> bool:
        """Whether they overlap by more than rounding."""
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > TOUCH and min(self.bottom, other.bottom) - max(self.top, other.top) > TOUCH

    def holds(self, other: Area) -> bool:
        """Whether the other lies in it."""
        across = self.left - TOUCH <= other.left and other.right <= self.right + TOUCH
        return across and self.top - TOUCH <= other.top and other.bottom <= self.bottom + TOUCH


def areas(root: ET.Element, kind: str) -> list[Area]:
    """Rectangles of the parts of a class: of a box the shape, of a frame its border, of a heading what is behind its
    words."""
    found = [each.findall(f"{SVG}rect")[-1] for each in root.iter(f"{SVG}g") if kind in each.get("class", "").split()]
    sizes = [[float(each.get(name, "nan")) for name in ("x", "y", "width", "height")] for each in found]
    return [Area(x, y, x + width, y + height) for x, y, width, height in sizes]


def complaints(root: ET.Element) -> Iterator[str]:
    """What is wrong with where things are."""
    (graph,) = (each for each in root.findall(f"{SVG}g") if each.get("transform"))
    boxes, frames, headings = areas(graph, "box"), areas(graph, "frame"), areas(graph, "heading")
    for what, one, other in [("boxes overlap", boxes, boxes), ("a heading is under a box", headings, boxes)]:
        number = sum(a.meets(b) for a, b in _near(one, other))
        if number:
            yield f"{what}: {number}"
    crossing = sum(a.meets(b) and not a.holds(b) and not b.holds(a) for a, b in _near(frames, frames))
    cut_off = sum(a.meets(b) and not a.holds(b) for a, b in _near(frames, boxes))
    if crossing or cut_off:
        yield f"frames cross: {crossing}; boxes across a frame: {cut_off}"


def _near(one: Sequence[Area], other: Sequence[Area]) -> Iterator[tuple[Area, Area]]:
    """Pairs that share a height, each once."""
    same = one is other
    found = sorted(
        [(area.top, 0, area) for area in one] + ([] if same else [(area.top, 1, area) for area in other]),
        key=lambda entry: entry[:2],
    )
    open_areas: list[tuple[int, Area]] = []
    for top, side, area in found:
        open_areas = [(theirs, each) for theirs, each in open_areas if each.bottom > top]
        for theirs, each in open_areas:
            if same or theirs != side:
                yield (each, area) if theirs <= side else (area, each)
        open_areas.append((side, area))


_MEASURE = """
const found = [], out = (a, b, by) => a.x < b.x - by || a.y < b.y - by ||
  a.x + a.width > b.x + b.width + by || a.y + a.height > b.y + b.height + by;
const meet = (a, b) => Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 1 &&
  Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 4;
const svg = document.querySelector('svg'), page = svg.querySelector('rect.page').getBBox();
const check = (texts, around) => {
  const boxes = texts.map(text => text.getBBox());
  boxes.forEach((box, i) => {
    if (out(box, around, 1)) found.push('leaves: ' + texts[i].textContent);
    for (let j = 0; j < i; j++)
      if (meet(box, boxes[j])) found.push('touches: ' + texts[i].textContent + ' | ' + texts[j].textContent);
  });
};
let texts = 0;
const all = (root, selector) => {
  const list = [...root.querySelectorAll(selector)];
  texts += list.length;
  return list;
};
for (const box of svg.querySelectorAll('g.box')) {
  const shapes = box.querySelectorAll('rect');
  check(all(box, 'text'), shapes[shapes.length - 1].getBBox());
}
const frames = [...svg.querySelectorAll('g[transform] g.frame')];
[...svg.querySelectorAll('g.heading')].forEach(
  (heading, i) => check(all(heading, 'text'), frames[i].querySelector('rect').getBBox()));
check([...svg.children].filter(each => each.tagName === 'text'), page);
document.body.dataset.found = JSON.stringify({texts: texts, found: found});
"""


def in_browser(browser: str, text: str, folder: Path) -> tuple[int, list[str]]:
    """How many texts a browser laid out, and what is wrong with them."""
    page = folder / "page.html"
    page.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><body>{text}<script>{_MEASURE}</script></body>", encoding="utf-8"
    )
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    (answer,) = re.findall(r'<body data-found="([^"]*)"', done.stdout)
    found = json.loads(html.unescape(answer))
    return found["texts"], found["found"]


def judged(text: str, browser: str | None, folder: Path) -> dict[str, Any]:
    """What a drawing is, and what is wrong with it."""
    root = ET.fromstring(text)
    texts, wrong = (None, []) if browser is None else in_browser(browser, text, folder)
    return {
        "width": round(float(root.get("viewBox", "").split()[2])),
        "height": round(float(root.get("viewBox", "").split()[3])),
        "bytes": len(text.encode()),
        "boxes": len(areas(root, "box")),
        "regions": sum("heading checkpoint" in each.get("class", "") for each in root.iter(f"{SVG}g")),
        "texts": texts,
        "complaints": [*complaints(root), *wrong],
    }


# --- report -----------------------------------------------------------------------------------------------------------


def run_all(rounds: int, keep: Path | None) -> dict[str, Any]:
    """Draw everything."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for model, arguments in MODELS.items():
            report = analyzed(folder, arguments)
            for way, options in WAYS.items():
                step = cut(report) if way == "folded, regions" else report
                seconds, text = measure(step, options, rounds)
                row: dict[str, Any] = {"model": model, "nodes": len(report.nodes), "way": way, "seconds": seconds}
                row |= judged(text, browser, folder) if text.startswith("<svg") else {"failed": text}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                if keep is not None and "failed" not in row:
                    name = re.sub("[^A-Za-z0-9]+", "-", f"{model} {way}")
                    (keep / f"{name}.svg").write_text(text, encoding="utf-8")
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {
            "fxmem": __version__,
            **dict(_versions()),
            **(_said_by(browser, "--version") if browser else {}),
        },
        "browser": browser is not None,
        "rounds": rounds,
        "rows": rows,
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def _said_by(program: str, option: str) -> dict[str, str]:
    found = shutil.which(program)
    if found is None:
        return {}
    done = subprocess.run([found, option], capture_output=True, text=True, check=False)
    return {Path(program).name: " ".join(re.findall(r"\d+(?:\.\d+)+", done.stdout + done.stderr)[:1])}


def markdown(found: Mapping[str, Any]) -> str:
    """The report for people."""
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    drawn = [row for row in rows if "failed" not in row]
    failed = [row for row in rows if "failed" in row]
    wrong = [row for row in drawn if row["complaints"]]
    texts = sum(row["texts"] or 0 for row in drawn)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    checked = (
        f"In a browser, with its fonts, {texts:,} texts were laid out"
        if found["browser"]
        else "No browser was there to lay out the texts"
    )
    verdict = (
        "nothing overlaps and no text leaves its place"
        if not wrong
        else f"{len(wrong)} of them have something wrong, named below"
    )
    lines = [
        f"# Drawings, {found['date']}",
        "",
        f"`python -m benchmarks.speed.drawings`; {versions}, Python {found['python']}; {found['machine']}. "
        f"Wall seconds, medians of {found['rounds']} rounds. "
        "What is drawn, how and what is checked is described in `benchmarks/speed/drawings.py`.",
        "",
        f"{len(drawn)} of {len(rows)} drawn, all of them well-formed; {verdict}. {checked}.",
        "",
        "| model | way | seconds | boxes | regions | pixels | KiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for before, row in pairwise([{}, *rows]):
        model = f"{row['model']}, {row['nodes']:,} nodes" if before.get("model") != row["model"] else ""
        cells = [model, row["way"], f"{statistics.median(row['seconds']):.2f}"]
        cells += (
            ["failed", "", "", ""]
            if "failed" in row
            else [
                f"{row['boxes']:,}",
                str(row["regions"] or ""),
                f"{row['width']:,} x {row['height']:,}",
                f"{row['bytes'] / 1024:,.0f}",
            ]
        )
        lines.append(f"| {' | '.join(cells)} |")
    for title, found_rows, text in (
        ("Not drawn", failed, lambda row: row["failed"]),
        ("Wrong", wrong, lambda row: "; ".join(row["complaints"][:5])),
    ):
        if found_rows:
            lines += [
                "",
                f"{title}:",
                "",
                *(f"- {row['model']}, {row['way']}: {text(row)}" for row in found_rows),
            ]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all and write the report."""
    parser = argparse.ArgumentParser(description="Large models drawn.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed (default 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the report goes")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the drawings go (default: nowhere)")
    asked = parser.parse_args(arguments)
    for folder in filter(None, (asked.out, asked.keep)):
        folder.mkdir(parents=True, exist_ok=True)
    found = run_all(asked.rounds, asked.keep)
    path = asked.out / f"drawings-{found['date']}"
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    print(markdown(found))
    return int(any(row.get("complaints") or "failed" in row for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
