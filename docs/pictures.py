"""Draw the pictures of README and docs/ into a folder: `python docs/pictures.py docs/images`, or `make pictures`."""

from __future__ import annotations

import sys
import tomllib
from html import escape
from pathlib import Path

import torch

from fxmem import generate
from fxmem.__main__ import main as fxmem

ROOT = Path(__file__).parent.parent
STEP = "torchvision:resnet50 --input 32x3x224x224 --target rtx4090 --quiet"
TOKENS = "--input input_ids:{0}:int64 --input labels:{0}:int64"
COMMANDS = (
    f"graph {STEP} -o resnet50-graph.svg",
    f"graph hf:GPT2LMHeadModel {TOKENS.format('4x1024')} --target h100 --quiet -o gpt2-graph.svg",
    f"graph hf:LlamaForCausalLM --set num_hidden_layers=32 {TOKENS.format('1x2048')} --precision bf16 --target h100 "
    "--quiet -o llama-graph.svg",
    f"graph --by time {STEP} -o resnet50-timeline.svg",
)
"""Commands of fxmem that draw."""
ROOMS = {
    "cli": "command line: verbs, their options, MODEL and --input",
    "testing": "assert_peak_below, pytest plugin",
    "whatif": "plan, advise, max-batch, cards: analyse again",
    "validation": "the real step beside its prediction",
    "checkpointing": "carries out a plan on a model",
    "simulation": "one step on fake tensors, recorded as a Profile",
    "_torch": "every private name of torch, with its reason",
    "show": "text, HTML, graphs, plots, exports",
    "planning": "from a profile and a budget to a plan",
    "memory": "live bytes, the allocator, budgets, modules, lines, layers",
    "hardware": "cards, rates, workspaces of libraries",
    "records": "the types that cross a border, JSON in and out",
    "errors": "the errors and their exit codes",
}
"""What each room is for, in the words of the picture."""
ROOMS_OF_SIMULATION = {
    "program": "a program: command line, ranks, rounds, its record",
    "step": "one step of a model, or a generation: what is given, a copy, the run",
    "run": "a whole run: growth, host, evaluations, lengths, later work",
    "stand_ins": "what a program finds: torch.cuda, NVML, files, an engine",
    "card": "a program's card: its memory, border, thread, acts",
    "recording": "operators, autograd, compiled code, FLOPs; a profile is built",
    "kernels": "which kernel a card would run",
    "processes": "forks, jobs, the sandbox",
    "ranks": "a world that is not there",
    "asked": "values that no kernel has computed",
    "code": "the user's lines and frames",
    "engines": "serving engines by release",
}
"""The same of the rooms that `simulation` has."""
PLANS = {"rooms.svg": ("fxmem", ROOMS), "rooms-of-simulation.svg": ("fxmem.simulation", ROOMS_OF_SIMULATION)}
"""The pictures of rooms: the package, and the words."""
CURVES = {"dynamic": "#c2571a", "static": "#1f6f8b"}
"""The color of each cache in the picture of a generation."""
WIDTH, ROW, GAP, LEFT = 760, 46, 12, 130


def contract(package: str) -> tuple[list[list[str]], set[str]]:
    """Return the rooms by floor, from the top, and those that import no torch, as pyproject.toml has them."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    floors = next(table["layers"] for table in tables if table.get("containers") == [package])
    free = next(table["source_modules"] for table in tables if "torch" in table.get("forbidden_modules", ()))
    return [floor.split(" | ") for floor in floors], {name.removeprefix("fxmem.") for name in free} | {"errors"}


def rooms(package: str, texts: dict[str, str]) -> str:
    """Return the SVG of the rooms: a row for each floor, the rooms without torch in another colour."""
    floors, free = contract(package)
    height = len(floors) * (ROW + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">',
        f"<title>The rooms of {package}</title>",
        "<desc>A room imports from the rooms below it only. Data goes up from simulation's Profile.</desc>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, floor in enumerate(floors):
        wide = (WIDTH - LEFT - GAP * len(floor)) / len(floor)
        for column, room in enumerate(floor):
            place = LEFT + column * (wide + GAP), GAP + index * (ROW + GAP)
            parts += box(room, texts[room], *place, wide, room in free)
    first_free = next((index for index, floor in enumerate(floors) if set(floor) <= free), len(floors))
    parts += side("with torch", 0, first_free, "#c2571a")
    if first_free < len(floors):
        parts += side("no torch", first_free, len(floors), "#1f6f8b")
    return "\n".join([*parts, "</svg>"]) + "\n"


def box(room: str, text: str, x: float, y: float, width: float, free: bool) -> list[str]:
    """Return a room's rectangle, its name and what it is for."""
    fill, line = ("#e8f3f6", "#1f6f8b") if free else ("#fdf0e6", "#c2571a")
    return [
        f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{ROW}" rx="5" fill="{fill}" stroke="{line}"/>',
        f'<text x="{x + 12:g}" y="{y + 19}" font-size="14" font-weight="bold" fill="#1a1a1a">{escape(room)}</text>',
        f'<text x="{x + 12:g}" y="{y + 36}" font-size="11.5" fill="#333333">{escape(text)}</text>',
    ]


def side(text: str, first: int, last: int, color: str) -> list[str]:
    """Return the bracket on the left of the floors from `first` to before `last`, with its words."""
    top, bottom = GAP + first * (ROW + GAP), last * (ROW + GAP)
    return [
        f'<path d="M{LEFT - 16} {top}h-8v{bottom - top}h8" fill="none" stroke="{color}" stroke-width="1.5"/>',
        f'<text x="{LEFT - 34}" y="{(top + bottom) / 2 + 4:g}" font-size="13" text-anchor="end" fill="{color}">'
        f"{escape(text)}</text>",
    ]


def serving() -> str:
    """Return the SVG of a generation: reserved and allocated bytes over its tokens, for two caches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=2, hidden_size=512, num_attention_heads=8, vocab_size=1000)
    ids = torch.empty(32, 64, dtype=torch.int64, device="meta")
    prompt = {"input_ids": ids, "attention_mask": ids}
    runs = {each: generate(lambda: LlamaForCausalLM(config), prompt, 400, cache=each).run for each in CURVES}
    most = max(token.reserved_bytes or 0 for run in runs.values() for token in run.tokens)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 320" width="{WIDTH}" height="320" '
        'font-family="Helvetica, Arial, sans-serif" role="img">',
        "<title>Reserved and allocated bytes of a generation</title>",
        "<desc>Over the tokens; a cache that grows reserves more than one that is set up once.</desc>",
        f'<rect width="{WIDTH}" height="320" fill="#ffffff"/>',
        f'<path d="M60 20V280H{WIDTH - 180}" fill="none" stroke="#333333"/>',
        '<text x="60" y="300" font-size="12" fill="#333333">token 1</text>',
        f'<text x="{WIDTH - 180}" y="300" font-size="12" text-anchor="end" fill="#333333">token 400</text>',
        f'<text x="52" y="30" font-size="12" text-anchor="end" fill="#333333">{most >> 20} MiB</text>',
    ]
    for (cache, color), run in zip(CURVES.items(), runs.values(), strict=True):
        for what, dash in (("reserved", ""), ("allocated", ' stroke-dasharray="5 4"')):
            sizes = [getattr(token, f"{what}_bytes") for token in run.tokens]
            points = " ".join(
                f"{60 + i * (WIDTH - 240) / len(sizes):.1f},{280 - 260 * size / most:.1f}"
                for i, size in enumerate(sizes)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
            row = 40 + 22 * (2 * list(CURVES).index(cache) + (what == "allocated"))
            parts.append(
                f'<path d="M{WIDTH - 165} {row - 4}h24" stroke="{color}" stroke-width="2"{dash}/>'
                f'<text x="{WIDTH - 135}" y="{row}" font-size="12" fill="#333333">{cache}, {what}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(folder: Path) -> None:
    """Write every picture into `folder`."""
    (folder / "serving.svg").write_text(serving(), encoding="utf-8")
    for name, drawn in PLANS.items():
        (folder / name).write_text(rooms(*drawn), encoding="utf-8")
    for command in COMMANDS:
        *words, name = command.split()
        if fxmem([*words, str(folder / name)]) != 0:
            sys.exit(f"fxmem {command} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
