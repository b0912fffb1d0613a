"""What a launcher on the command line starts: `torchrun`, `accelerate launch`, `deepspeed`, `fabric run`, `python`.

So is the command of an installed package: the file of that name.

Its processes become ranks. A launcher that starts nothing while it reads its words reads them here (torch's,
accelerate's). The options of the others stand below, as of DeepSpeed 0.18 (deepspeed/launcher/runner.py), Lightning 2.6
(lightning/fabric/cli.py) and Python 3.13, so that none of them need be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import linecache
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from fxmem._torch import common as torch_common
from fxmem.errors import UsageError, closest, one_line
from fxmem.hardware.catalogue import PER_MACHINE
from fxmem.simulation.processes.sandbox.network import command_words

# --- a program on the command line, and what a notebook means there ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program on the command line: `python train.py --batch-size 64`, or `python -m pkg.train`."""

    program: str
    """A file, a module's name, or a launcher: `torchrun`, `accelerate`, `python`."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    ranks: int | None = None
    """How many ranks there are, of which it runs as one; None for one process alone."""
    rank: int | None = None
    """Which of them; None for one of each class of equal ranks, of which the largest is shown."""
    per_machine: int = PER_MACHINE
    """How many ranks a machine has."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that its launcher sets."""
    launcher: str = ""
    """What its launcher starts besides it, in words; empty for nothing."""
    typed: str = ""
    """The command line with its launcher; empty where there is none."""

    @property
    def command(self) -> str:
        """As it was typed."""
        return self.typed or " ".join([*(["-m"] if self.is_module else []), self.program, *self.arguments])

    @property
    def is_notebook(self) -> bool:
        """Whether it is a Jupyter notebook."""
        return not self.is_module and self.program.endswith(".ipynb")


def notebook_cells(file: str) -> Iterator[tuple[str, str]]:
    """Name and Python text of each code cell; lines that are IPython's (`%time`, `!pip`, `name?`) are left out.

    Of those that are assigned, the name is: `files = !ls` makes an empty list, `x = %magic` None.

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
        text, name = _OF_IPYTHON.sub(_stand_in, source), f"{file}[{number}]"
        linecache.cache[name] = len(source), None, text.splitlines(keepends=True), name
        yield name, text


_PYTHON_CELLS: Final = ("%%time", "%%timeit", "%%capture")
_OF_IPYTHON: Final = re.compile(r"(?m)^([ \t]*)(?:([^\W\d][\w.,\[\] ]*= *)?([!%])(?:.*\\\n)*.*|[\w.?]*\?[\w.]*$)")
"""The indentation of a line, with those that it goes on in; what is assigned by it, if anything; and its sign."""


def _stand_in(line: re.Match[str]) -> str:
    """What stands in the place of a line of IPython's, in as many lines."""
    indent, assigned, sign = line.groups(default="")
    return f"{indent}{assigned + str([] if sign == '!' else None) if assigned else 'pass'}" + "\n" * line[0].count("\n")


# --- what a launcher on the command line starts -----------------------------------------------------------------------


def find_started(program: Launch) -> Launch:
    """Find the program that runs in the end: of a launcher, what it starts, with its variables and ranks.

    Ranks that are given hold against a launcher's.

    Raises:
        UsageError: a launcher's command line that it would not take, or that starts no Python.
    """
    while (read := find_launcher(program)) is not None:
        started = read(program)
        program = dataclasses.replace(
            started,
            ranks=started.ranks if program.ranks is None else program.ranks,
            rank=program.rank,
            environment=(*program.environment, *started.environment),
            launcher=started.launcher or program.launcher,
            typed=program.command,
        )
    return program


def check_program(program: Launch) -> None:
    """Refuse a script that is not there. Raises UsageError."""
    if program.is_module or os.path.isfile(program.program) or find_launcher(program) is not None:
        return
    near = closest(program.program, [*_COMMANDS, "python", *map(str, Path().glob("*.py"))])
    raise UsageError(f"expected a Python file to run, got {program.program!r}, which is no file{near}")


_Read = Callable[[Launch], Launch]


def find_launcher(program: Launch) -> _Read | None:
    """What reads the words of a launcher; None for any other program."""
    if program.is_module:
        return _MODULES.get(program.program)
    name = os.path.basename(program.program).removesuffix(".exe")
    if re.fullmatch(r"python(\d(\.\d+)?)?", name):
        return _read_python
    return _COMMANDS.get(name) or (_read_command if _find_command(program.program) else None)


def _ranks(name: str, count: int | None, per_machine: int | None) -> dict[str, Any]:
    """Fields of the `Launch` of one of so many processes; of None, which is as many as there are cards, it is alone."""
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    alone |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    launcher = f"{name} of {count} processes" if count != 1 else ""
    if count is None:
        launcher = f"{name} of as many processes as there are cards"
    fields = {"environment": tuple(alone.items()), "launcher": launcher, "ranks": count}
    return fields if per_machine is None else {**fields, "per_machine": per_machine}


@contextlib.contextmanager
def _reading(name: str, parser: argparse.ArgumentParser | None = None) -> Iterator[None]:
    """What a launcher says of its words becomes one line, with options of its parser that look like an unknown one."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            yield
    except UsageError:
        raise
    except (SystemExit, Exception) as error:
        lines = said.getvalue().strip().splitlines() or [""]
        why = one_line(error) if isinstance(error, Exception) else lines[-1].rpartition("error: ")[2]
        if isinstance(error, SystemExit) and not error.code:
            why = "it asks for its help"
        unknown = re.search(r"unrecognized arguments: (\S+)", why)
        known = [] if parser is None else [option for action in parser._actions for option in action.option_strings]
        near = closest(unknown[1].partition("=")[0], known) if unknown else ""
        raise UsageError(f"expected a command line that {name} takes, with a program in it: {why}{near}") from error


# --- the launchers that read their own words --------------------------------------------------------------------------


def _read_torchrun(program: Launch) -> Launch:
    run: Any = importlib.import_module("torch.distributed.run")
    with _reading("torchrun", run.get_args_parser()):
        return _of_torchrun("torchrun", run.parse_args(list(program.arguments)))


def _read_torch_launch(program: Launch) -> Launch:
    """`python -m torch.distributed.launch`, which says the local rank as an option."""
    launch: Any = importlib.import_module("torch.distributed.launch")
    with _reading("torch.distributed.launch", launch.get_args_parser()):
        options = launch.parse_args(list(program.arguments))
        started = _of_torchrun("torch.distributed.launch", options)
        said = () if options.use_env else ("--local-rank=0",)
        return dataclasses.replace(started, arguments=(*said, *started.arguments))


def _of_torchrun(name: str, options: Any, environment: Sequence[tuple[str, str]] = ()) -> Launch:
    """The program that torchrun starts with these options, which accelerate hands to it as well."""
    per_machine = int(options.nproc_per_node) if str(options.nproc_per_node).isdigit() else None
    machines = int(str(options.nnodes).partition(":")[0])
    fields = _ranks(name, None if per_machine is None else per_machine * machines, per_machine)
    fields["environment"] = (*fields["environment"], ("TORCHELASTIC_RUN_ID", "none"), *environment)
    return _script(name, options, fields)


def _script(name: str, options: Any, fields: dict[str, Any]) -> Launch:
    """The program among a launcher's options. Raises UsageError where it starts no Python."""
    script = Launch(options.training_script, tuple(options.training_script_args), options.module, **fields)
    if options.no_python and find_launcher(script) is None:
        raise UsageError(f"expected {name} to start a Python program, got {script.program} without Python")
    return script


def _read_accelerate(program: Launch) -> Launch:
    """`accelerate launch`: what it hands to its launcher for this machine."""
    words = list(program.arguments)
    if program.program.endswith(("accelerate", "accelerate_cli")):
        words = _after(program, "launch")
    try:
        command: Any = importlib.import_module("accelerate.commands.launch")
        utilities: Any = importlib.import_module("accelerate.utils.launch")
    except ImportError:
        raise UsageError("expected accelerate to be installed, since the program is started by it") from None
    name = "accelerate launch"
    parser = command.launch_command_parser()
    with _reading(name, parser):
        options = parser.parse_args(words)
    cards, found = options.num_processes or 1, list[Launch]()

    def start_group(options: Any, *, by_deepspeed: bool = False) -> None:
        utilities_args = argparse.Namespace(**vars(options))
        if by_deepspeed:
            _, environment_there = command.prepare_deepspeed_cmd_env(utilities_args)
        else:
            environment_there = command.prepare_multi_gpu_env(utilities_args)
        environment = _changed(environment_there)
        count, machines = options.num_processes or 1, options.num_machines or 1
        utilities_args.nproc_per_node, utilities_args.nnodes = max(count // machines, 1), machines
        found.append(_of_torchrun(name, utilities_args, environment))

    def start_one(options: Any) -> None:
        _, environment = command.prepare_simple_launcher_cmd_env(options)
        found.append(_script(name, options, {"environment": _changed(environment)}))

    launchers = {
        "simple_launcher": start_one,
        "multi_gpu_launcher": start_group,
        "deepspeed_launcher": functools.partial(start_group, by_deepspeed=True),
        **dict.fromkeys(("tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher"), _refuse),
    }
    with contextlib.ExitStack() as stack:
        for each, launcher in launchers.items():
            stack.enter_context(torch_common.replace(command, each, launcher))
        stack.enter_context(torch_common.replace(utilities, "is_port_in_use", lambda *_: False))
        for asked, answer in (("is_available", True), ("device_count", cards), ("is_bf16_supported", True)):
            stack.enter_context(torch_common.replace(torch.cuda, asked, lambda *_, answer=answer, **__: answer))
        stack.enter_context(_reading(name))
        command.launch_command(options)
    return found[0]


def _changed(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in environment.items() if os.environ.get(key) != value)


def _refuse(*_: Any) -> None:
    raise UsageError("expected accelerate launch on cards of this machine, without TPUs")


# --- the launchers whose options stand here ---------------------------------------------------------------------------


class _Options(argparse.ArgumentParser):
    """A launcher's options: those with a value, and those without."""

    def __init__(self, name: str, values: str, flags: str = "") -> None:
        super().__init__(prog=name, add_help=False, usage="")
        for each in values.split():
            self.add_argument(*each.split("|"), default="")
        for each in flags.split():
            self.add_argument(*each.split("|"), action="store_true")
        self.add_argument("script")


_DEEPSPEED: Final = (
    "-H|--hostfile -i|--include -e|--exclude --num_nodes --min_elastic_nodes --max_elastic_nodes "
    "--num_gpus|--num_accelerators --master_port --master_addr --node_rank --launcher --launcher_args "
    "--enable_each_rank_log --autotuning --comment --account --bind_core_list --ssh_port --venv_script",
    "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid --elastic_training "
    "--bind_cores_to_rank",
)
_FABRIC: Final = (
    "--accelerator --strategy --devices --num-nodes|--num_nodes --node-rank|--node_rank --main-address|--main_address "
    "--main-port|--main_port --precision"
)
_FABRIC_TELLS: Final = "accelerator strategy devices num_nodes precision"


def _read_deepspeed(program: Launch) -> Launch:
    """`deepspeed`, which says the local rank as an option."""
    parser = _Options("deepspeed", *_DEEPSPEED)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    with _reading("deepspeed", parser):
        options = parser.parse_args(program.arguments)
        slots = _find_slots(options)
    count = None if None in slots else sum(each or 0 for each in slots)
    fields = _ranks("deepspeed", count, slots[0])
    options.training_script = options.script
    said = () if options.no_local_rank else ("--local_rank=0",)
    options.training_script_args = (*said, *options.arguments)
    return _script("deepspeed", options, fields)


def _find_slots(options: argparse.Namespace) -> list[int | None]:
    """How many processes run on each machine; None where the launcher would count its cards."""
    if options.include:
        hosts = [each.partition(":")[2] for each in options.include.split("@")]
        return [len(each.split(",")) if each else None for each in hosts]
    nodes = int(options.num_nodes or 0)
    slots: list[int | None] = [None] * max(nodes, 1)
    if options.hostfile:
        lines = Path(options.hostfile).read_text(encoding="utf-8").splitlines()
        slots = [int(found[1]) for line in lines if (found := re.match(r"\s*[^#\s]\S*\s+slots=(\d+)", line))]
        slots = slots[: nodes or None] or [None]
    if options.num_gpus:
        slots = [int(options.num_gpus)] * len(slots)
    return [None] if options.exclude else slots


def _read_fabric(program: Launch) -> Launch:
    """`fabric run`, once `lightning run`: its options may stand behind the script as well."""
    words = _after(program, "run")
    parser = _Options("fabric run", _FABRIC)
    with _reading("fabric run", parser):
        options, rest = parser.parse_known_args(words[words[:1] == ["model"] :])
        devices, nodes = options.devices or "1", int(options.num_nodes or 1)
        if options.script.startswith("-") or not os.path.isfile(options.script):
            raise ValueError(f"got {options.script!r}, which is no file")
    listed = [each for each in devices.strip("[]").split(",") if each.strip()]
    number = 1 if devices == "auto" or options.strategy == "dp" else len(listed)
    if devices.isdigit():
        number = int(devices)
    count = None if devices == "-1" else number
    fields = _ranks("fabric run", None if count is None else count * nodes, count)
    told = {name: getattr(options, name) for name in _FABRIC_TELLS.split()} | {"devices": devices, "num_nodes": nodes}
    variables = {"LT_CLI_USED": "1"} | {f"LT_{name.upper()}": str(value) for name, value in told.items() if value}
    fields["environment"] = (*fields["environment"], ("TORCHELASTIC_RUN_ID", "none"), *variables.items())
    return Launch(options.script, tuple(rest), **fields)


_PYTHON: Final = re.compile(r"-([bBdEiIOPqRsSuvx]*)([cmWX]?)(.*)")
"""A word of options: letters, perhaps one with a value last, and the value if it follows at once."""


def _read_python(program: Launch) -> Launch:
    """`python` with options of the interpreter, of which none changes what a program allocates."""
    words = list(program.arguments)
    while words and words[0].startswith("-"):
        found = _PYTHON.fullmatch(words[0])
        if found is None or (found[3] and not found[2]) or found[2] == "c" or words[0] == "-":
            got = "a program on standard input" if words[0] == "-" else words[0]
            raise UsageError(f"expected a script, or -m and a module, after {program.program}; got {got}")
        words = [*([found[3]] if found[3] else []), *words[1:]] if found[2] else words[1:]
        if found[2] == "m" and words:
            return Launch(words[0], tuple(words[1:]), is_module=True)
        words = words[bool(found[2]) :]
    if not words:
        raise UsageError(f"expected a script, or -m and a module, after {program.program}; got nothing")
    return Launch(words[0], tuple(words[1:]))


def _find_command(name: str) -> str | None:
    """The file of an installed package's command (`axolotl`, `tune`), which is Python; None for any other name."""
    file = None if os.path.isfile(name) or os.path.basename(name) != name else shutil.which(name)
    if file is None:
        return None
    with open(file, "rb") as stream:
        return file if re.match(rb"#!.*python", stream.readline(256)) else None


def _read_command(program: Launch) -> Launch:
    return Launch(_find_command(program.program) or program.program, program.arguments)


def _after(program: Launch, word: str) -> list[str]:
    """The words after a launcher's own command."""
    if program.arguments[:1] != (word,):
        expected = f"{os.path.basename(program.program)} {word}"
        raise UsageError(f"expected `{expected}` with a script, got `{program.command}`")
    return list(program.arguments[1:])


_COMMANDS: Final[dict[str, _Read]] = {
    "torchrun": _read_torchrun,
    "accelerate": _read_accelerate,
    "accelerate-launch": _read_accelerate,
    "deepspeed": _read_deepspeed,
    "fabric": _read_fabric,
    "lightning": _read_fabric,
}
_MODULES: Final[dict[str, _Read]] = {
    "torch.distributed.run": _read_torchrun,
    "torch.distributed.launch": _read_torch_launch,
    "accelerate.commands.launch": _read_accelerate,
    "accelerate.commands.accelerate_cli": _read_accelerate,
    "deepspeed.launcher.runner": _read_deepspeed,
}


# --- where a program starts another one in its place, which runs there instead: `axolotl train`, `swift sft` ----------
# `os.exec*` always does. A command that only starts Python, waits for it and ends, is known by its name.


_STARTERS: Final = ("llamafactory-cli", "llamafactory.cli", "swift", "swift.cli.main")
"""Commands and modules of LLaMA-Factory 0.9 and ms-swift 4.6."""


class HandedOver(BaseException):
    """What a program starts in its place."""

    def __init__(self, started: Launch) -> None:
        self.started = started


@contextlib.contextmanager
def handing_over(program: Launch) -> Iterator[None]:
    """Raise `HandedOver` where the program would start another in its place."""
    with torch_common.wrap(os, "execv", _replace), torch_common.wrap(os, "execve", _replace):
        if os.path.basename(program.program) not in _STARTERS:
            yield
            return
        with torch_common.wrap(subprocess.Popen, "__init__", _start):
            yield


def _replace(
    original: Callable[..., NoReturn], path: Any, words: Sequence[Any], environment: Mapping[Any, Any] | None = None
) -> NoReturn:
    _hand_over(words, environment)
    original(path, words, *([] if environment is None else [environment]))


def _start(original: Callable[..., None], process: Any, args: Any, *further: Any, **settings: Any) -> None:
    _hand_over(args, settings.get("env"))
    original(process, args, *further, **settings)


def _hand_over(args: Any, environment: Mapping[Any, Any] | None) -> None:
    """Raise `HandedOver` for a command line that is Python's or a launcher's; return for any other."""
    first, *words = command_words(args) or ("",)
    changed = {os.fsdecode(name): os.fsdecode(value) for name, value in (environment or {}).items()}
    variables = tuple((name, value) for name, value in changed.items() if os.environ.get(name) != value)
    started = Launch(first, tuple(words), environment=variables)
    if find_launcher(started) is not None:
        with contextlib.suppress(UsageError):  # as `python -c`
            raise HandedOver(find_started(started))
