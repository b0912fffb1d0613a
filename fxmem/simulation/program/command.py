"""A program on the command line, and what a launcher or a notebook means there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import linecache
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program on the command line: `python train.py --batch-size 64`, or `python -m pkg.train`."""

    program: str
    """A file, a module's name, or a launcher: `torchrun`, `accelerate`."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    ranks: int | None = None
    """How many ranks there are, of which it runs as one; None for one process alone."""
    rank: int | None = None
    """Which of them; None for one of each class of equal ranks, of which the largest is shown."""

    @property
    def command(self) -> str:
        """As it was typed."""
        return " ".join([*(["-m"] if self.is_module else []), self.program, *self.arguments])

    @property
    def is_notebook(self) -> bool:
        """Whether it is a Jupyter notebook."""
        return not self.is_module and self.program.endswith(".ipynb")


@dataclasses.dataclass(frozen=True)
class Started:
    """What a launcher would start as its first process."""

    program: Launch
    environment: dict[str, str]
    answer: str = ""
    """What the program is told otherwise than by the launcher, in words; empty for nothing."""


def find_started(program: Launch) -> Started:
    """Find the program that runs in the end, and its environment: of a launcher, that of its first process alone.

    Raises:
        UsageError: a launcher's command line that it would not take, or that starts no Python.
    """
    name = os.path.basename(program.program)
    if name in _TORCHRUN:
        return _find_torchrun_program(program)
    if name in _ACCELERATE:
        return _find_accelerate_program(program)
    return Started(program, {})


_TORCHRUN: Final = ("torchrun", "torch.distributed.run")
_ACCELERATE: Final = ("accelerate", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")
LAUNCHERS: Final = (_TORCHRUN[0], _ACCELERATE[0])
_ALONE: Final = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (SystemExit, ValueError) as error:
        how = "says:" if isinstance(error, ValueError) else "left with exit code"
        raise UsageError(f"expected a command line that {name} takes; it {how} {error}") from error


def _find_torchrun_program(program: Launch) -> Started:
    run: Any = importlib.import_module("torch.distributed.run")
    with _reading("torchrun"):
        options = run.parse_args(list(program.arguments))
    if options.no_python:
        raise UsageError("expected torchrun to start a Python program, got --no-python")
    count = f"{options.nproc_per_node} processes on {options.nnodes.partition(':')[0]} machines"
    script = Launch(options.training_script, tuple(options.training_script_args), options.module)
    return Started(script, _ALONE, f"torchrun of {count}: the first runs here, alone")


def _find_accelerate_program(program: Launch) -> Started:
    """Find what `accelerate launch` hands to its launcher for this machine."""
    try:
        command: Any = importlib.import_module("accelerate.commands.launch")
    except ImportError:
        raise UsageError("expected accelerate to be installed, since the program is started by it") from None
    words = list(program.arguments)
    if program.program != "accelerate.commands.launch" and words[:1] != ["launch"]:
        raise UsageError(f"expected `accelerate launch`, got `{program.command}`")
    found: list[tuple[Any, bool]] = []
    with contextlib.ExitStack() as stack, _reading("accelerate launch"):
        launchers = {
            "simple_launcher": lambda options: found.append((options, False)),
            "multi_gpu_launcher": lambda options: found.append((options, True)),
            **dict.fromkeys(("deepspeed_launcher", "tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher"), _refuse),
        }
        for name, launcher in launchers.items():
            stack.enter_context(torch_common.replace(command, name, launcher))
        words = words[words[:1] == ["launch"] :]
        command.launch_command(command.launch_command_parser().parse_args(words))
        options, is_group = found[0]
        line, environment = command.prepare_simple_launcher_cmd_env(options)
    if line[0] != sys.executable:
        raise UsageError(f"expected accelerate launch to start a Python program, got {line[0]}")
    is_module = line[1] == "-m"
    script, *arguments = line[2:] if is_module else line[1:]
    changed = {key: value for key, value in environment.items() if os.environ.get(key) != value}
    found_program = Launch(script, tuple(arguments), is_module)
    if not is_group:
        return Started(found_program, changed)
    answer = f"accelerate launch of {options.num_processes} processes: the first runs here, alone"
    return Started(found_program, {**changed, **_ALONE}, answer)


def _refuse(*_: Any) -> None:
    raise UsageError("expected accelerate launch on cards of this machine, without DeepSpeed and TPUs")


def notebook_cells(file: str) -> Iterator[tuple[str, str]]:
    """Name and Python text of each code cell; lines that are IPython's (`%time`, `!pip`) are left out.

    Raises:
        UsageError: no notebook.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            cells = json.load(stream)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"expected a Jupyter notebook in {file}, got something else: {error}") from error
    for number, source in enumerate(sources, 1):
        if source.lstrip().startswith("%%") and not source.lstrip().startswith(_PYTHON_CELLS):
            continue
        lines = [_blank(line) for line in source.splitlines(keepends=True)]
        name = f"{file}[{number}]"
        linecache.cache[name] = len(source), None, lines, name
        yield name, "".join(lines)


_PYTHON_CELLS: Final = ("%%time", "%%timeit", "%%capture")


def _blank(line: str) -> str:
    """A line, or `pass` in its place where it is IPython's."""
    indented = line.lstrip()
    return line if not indented.startswith(("%", "!")) else line[: len(line) - len(indented)] + "pass\n"
