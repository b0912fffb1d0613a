"""Files that anybody may have written: each verb that reads one refuses it in one line, or takes it for what it is;
nothing in it is run."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import fxmem
from fxmem.__main__ import main
from fxmem.errors import UsageError
from fxmem.hardware.catalogue import load_target
from fxmem.memory.report_reader import load_plan
from fxmem.records import json_reader
from fxmem.records.profile import Record, Report
from fxmem.testing.peak_checks import load_baseline
from tests.memory.test_report_reader import small_report
from tests.no_files import NO_FILES
from tests.profiles import small_profile
from tests.show.test_html import small_plan

MIB = 1 << 20
Content = dict[str, Any]

READERS = {
    "show": "show BAD",
    "graph": "graph BAD -o out.svg",
    "graph --by time": "graph BAD --by time -o out.svg",
    "graph --by module": "graph BAD --by module -o out.svg",
    "graph --after": "graph good.json --by time --after BAD -o out.svg",
    "report": "report BAD -o out.html",
    "show --by line": "show BAD --by line",
    "show --by layer": "show BAD --by layer",
    "compare": "compare good.json BAD",
    "compare, the other way round": "compare BAD good.json",
    "export": "export BAD --to csv -o out.csv",
    "plan": "plan BAD --budget 100%",
}
"""Every way of the command line to a report."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "good.json").write_text(small_report().model_dump_json(), encoding="utf-8")
    return tmp_path


def changed(change: Callable[[Content], object]) -> bytes:
    """`small_report`, after `change` has had its way with the JSON."""
    content = json.loads(small_report().model_dump_json())
    change(content)
    return json.dumps(content).encode()


def spliced(key: str, value: str) -> bytes:
    """`small_report` with a text in the place of the first value of a key, JSON or not."""
    before, after = small_report().model_dump_json().split(f'"{key}":', 1)
    rest = after[min(after.index(end) for end in ",}" if end in after) :]
    return f'{before}"{key}":{value}{rest}'.encode()


def cycle(content: Content) -> None:
    content["nodes"][1]["view_of"], content["nodes"][2]["view_of"] = 2, 1


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "which is empty"),
    "spaces": (lambda: b" \n\t " * 1000, "which is empty"),
    "a part": (lambda: changed(lambda _: None)[:1000], "only a part of one"),
    "no JSON": (lambda: b"PK\x03\x04", "no JSON"),
    "a pickle": (
        lambda: b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        "no JSON",
    ),
    "another encoding": (lambda: spliced("model", '"\u00e9"').decode().encode("latin-1"), "no utf-8 at byte"),
    "half of a character": (lambda: spliced("model", r'"\ud800"'), "half of a surrogate pair"),
    "a list": (lambda: b"[]", "the whole is wrong"),
    "a number": (lambda: b"7", "the whole is wrong"),
    "deep lists": (lambda: b"[" * 10**6, "no JSON"),
    "a deep value": (lambda: spliced("model", "[" * 10**5 + "]" * 10**5), "nested too deeply"),
    "NaN": (lambda: spliced("nbytes", "NaN"), "NaN is no number"),
    "Infinity": (lambda: spliced("ticks", "-Infinity"), "-Infinity is no number"),
    "thousands of digits": (lambda: spliced("nbytes", "9" * 5000), "Exceeds the limit"),
    "hundreds of digits": (lambda: spliced("nbytes", "9" * 400), "storages.0.nbytes is wrong"),
    "a key twice": (lambda: spliced("model", '"one","model":"two"'), "the key 'model' is given twice"),
    "another version": (lambda: spliced("schema_version", '"27"'), "got version '27'"),
    "a version that is none": (lambda: spliced("schema_version", '{"a":[]}'), "got version"),
    "a field too many": (
        lambda: changed(lambda c: c["nodes"][3].update(invented=1)),
        "nodes.3.invented is wrong: Extra",
    ),
    "a field too few": (lambda: changed(lambda c: c["nodes"][3].pop("name")), "nodes.3.name is wrong: Field required"),
    "a name that is none": (lambda: changed(lambda c: c["nodes"][0].update(name=["a"])), "nodes.0.name is wrong"),
    "a kind that is none": (
        lambda: changed(lambda c: c["peak"]["by_kind"].update(gold=1)),
        "peak.by_kind.gold is wrong",
    ),
    "a module that is none": (
        lambda: changed(lambda c: c["modules"].update(a=None)),
        "modules.a is wrong: Input should be a valid string",
    ),
    "negative bytes": (lambda: changed(lambda c: c["storages"][0].update(nbytes=-1)), "storages.0.nbytes is wrong"),
    "an op outside": (lambda: changed(lambda c: c["storages"][-1].update(op=10**6)), "but there are"),
    "a node outside": (lambda: changed(lambda c: c["ops"][0].update(node=-1)), "ops[0].node is -1"),
    "a free before its allocation": (
        lambda: changed(lambda c: c["storages"][-1].update(birth=9, death=3)),
        "before that",
    ),
    "more ticks than memory": (lambda: changed(lambda c: c.update(ticks=10**15)), "which says 1000000000000000 ticks"),
    "views of each other": (lambda: changed(cycle), "does not come before it"),
    "a node that reads itself": (
        lambda: changed(lambda c: c["nodes"][2].update(inputs=[2])),
        "does not come before it",
    ),
    "modules without end": (lambda: changed(lambda c: c["nodes"][0].update(module="a." * 10**4 + "a")), "levels deep"),
    "names of modules without end": (
        lambda: changed(lambda c: c["modules"].update({"a." * 10**4 + "a": "A"})),
        "levels deep",
    ),
    "a peak that is none": (
        lambda: changed(lambda c: c["peak"].update(requested_bytes=1)),
        "peak.requested_bytes is not what follows",
    ),
}
"""What is in the file, and a part of what is said of it."""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that a command which refuses its file writes; there must be nothing else, and no file."""
    before = sorted(os.listdir())
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("fxmem: ")
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()
    assert len(err) < 1000
    assert sorted(os.listdir()) == before
    return err


EVERYWHERE = {
    "a part",
    "deep lists",
    "another version",
    "hundreds of digits",
    "views of each other",
    "a peak that is none",
}
"""Tried with every reader; the others of `BAD` with four, because all read by the same function."""


@pytest.mark.parametrize(
    ("reader", "what"),
    [
        (reader, what)
        for what in BAD
        for reader in READERS
        if what in EVERYWHERE or reader in ("show", "graph --after", "compare", "plan")
    ],
)
def test_a_bad_report_is_refused_by_every_reader(
    capsys: pytest.CaptureFixture[str], folder: Path, reader: str, what: str
) -> None:
    make, complaint = BAD[what]
    (folder / "bad.json").write_bytes(make())
    assert complaint in refused(capsys, *READERS[reader].replace("BAD", "bad.json").split())


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (lambda path: None, "No such file"),
    "a pipe that nothing writes to": (NO_FILES["a pipe that nothing writes to"], "a pipe that nobody writes to"),
    "a directory": (NO_FILES["a directory"], "Is a directory"),
    "a link to a device that never ends": (NO_FILES["a link to a device that never ends"], "a device or a socket"),
    "a link to an empty device": (NO_FILES["a link to an empty device"], "a device or a socket"),
    "a link to nothing": (NO_FILES["a link to nothing"], "No such file"),
    "a link to itself": (NO_FILES["a link to itself"], "symbolic links"),
    "a socket": (listener, "a device or a socket"),
    "a file that may not be read": (lambda path: path.touch(0), "ermission denied" if os.geteuid() else "is empty"),
}


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs the devices of a Unix")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", PLACES)
def test_what_is_no_file_is_refused_by_every_reader(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, reader: str, what: str
) -> None:
    monkeypatch.setattr(json_reader, "_PATIENCE_S", 0.1)
    make, complaint = PLACES[what]
    make(folder / "bad.json")
    assert complaint in refused(capsys, *READERS[reader].replace("BAD", "bad.json").split())


@pytest.mark.skipif(os.name != "posix", reason="needs the pipes of a Unix")
@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_a_pipe_is_read_to_its_end(capsys: pytest.CaptureFixture[str], pause: float) -> None:
    os.mkfifo("pipe.json")
    command = f"sleep {pause}; exec > pipe.json; sleep {pause}; cat good.json"
    with subprocess.Popen(["sh", "-c", command]) as writer:
        if (code := main(["show", "pipe.json", "--json", "-"])) != 0:
            writer.kill()  # nobody opens the other end
    assert (code, writer.returncode) == (0, 0)
    assert capsys.readouterr().out == Path("good.json").read_text(encoding="utf-8") + "\n"


@pytest.mark.parametrize("reader", READERS)
def test_a_report_larger_than_the_limit_is_refused_by_every_reader(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    size = Path("good.json").stat().st_size
    Path("bad.json").write_bytes(Path("good.json").read_bytes() + b" ")
    monkeypatch.setenv("FXMEM_MAX_FILE_BYTES", str(size))
    arguments = READERS[reader].replace("BAD", "bad.json").split()
    assert (
        f"of at most {size} bytes, got 'bad.json', which is longer; FXMEM_MAX_FILE_BYTES sets another limit"
        in refused(capsys, *arguments)
    )
    monkeypatch.setenv("FXMEM_MAX_FILE_BYTES", str(size + 1))
    assert main(arguments) == 0


@pytest.mark.parametrize("text", ["1GiB", "-1", "0", "9" * 30, "\u0663"])
def test_a_limit_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("FXMEM_MAX_FILE_BYTES", text)
    assert "expected FXMEM_MAX_FILE_BYTES to be a number of bytes above zero" in refused(capsys, "show", "good.json")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_what_a_shell_wrote_when_it_redirected_is_read(folder: Path, encoding: str) -> None:
    (folder / "good.json").write_text(small_report().model_dump_json(), encoding=encoding)
    assert main(["show", "good.json"]) == 0


# --- as many mistakes as the file is long -----------------------------------------------------------------------------


def many(field: str, item: str) -> Callable[[], bytes]:
    return lambda: changed(lambda c: c.update({field: "ITEMS"})).replace(
        b'"ITEMS"', b"[" + f"{item},".encode() * 20_000 + item.encode() + b"]"
    )


LONG: dict[str, Callable[[], bytes]] = {
    "numbers for storages": many("storages", "0"),
    "empty storages": many("storages", "{}"),
    "negative storages": many("storages", '{"nbytes":-1,"kind":"saved","birth":0,"death":1}'),
    "words for sizes": many("inputs", '{"name":"x","dtype":"float32","shape":["a","a","a","a"]}'),
    "unknown fields": lambda: changed(lambda c: c.update({f"k{i}": 0 for i in range(20_000)})),
    "unknown fields of a storage": lambda: changed(
        lambda c: c["storages"][0].update({f"k{i}": 0 for i in range(20_000)})
    ),
    "unknown fields of a phase": lambda: changed(  # `phases` is a mapping in a comparison
        lambda c: c["phases"][0].update({f"k{i}": 0 for i in range(20_000)})
    ),
    "unknown kinds": lambda: changed(lambda c: c["peak"]["by_kind"].update({f"k{i}": 0 for i in range(20_000)})),
    "numbers for classes": lambda: changed(lambda c: c["modules"].update({f"k{i}": 0 for i in range(20_000)})),
}


@pytest.mark.parametrize("what", LONG)
def test_no_more_than_a_few_mistakes_are_ever_listed(what: str) -> None:
    """pydantic takes more than a kilobyte for each, many times what it takes to write one."""
    path, text = Path("bad.json"), LONG[what]()
    with pytest.raises(UsageError, match="is wrong") as refusal:
        json_reader.validate(Report, json_reader.parse(text, path, "expected"), path, "expected")
    cause = refusal.value.__cause__
    assert cause is None or (isinstance(cause, ValidationError) and cause.error_count() < 50)


def test_no_field_is_a_mapping_in_one_record_and_a_record_in_another() -> None:
    """A wide object is let through where a mapping may stand, by the field's name alone."""
    known = [Record]
    for kind in known:
        known += kind.__subclasses__()
    for kind in known:
        for name, field in kind.model_fields.items():
            if name in json_reader._mapping_fields():
                assert not (isinstance(field.annotation, type) and issubclass(field.annotation, Record)), (kind, name)
            assert len(kind.model_fields) < json_reader._MOST_FIELDS / 2


# --- other files ------------------------------------------------------------------------------------------------------


def others(read: Callable[[Path], object], good: Callable[[], Content]) -> Callable[[Path, str], None]:
    def check(path: Path, what: str) -> None:
        content = good()
        bad = {
            "a part": json.dumps(content)[:-9].encode(),
            "empty": b"",
            "a list": b"[]",
            "deep": b"[" * 10**6,
            "bytes": b"\x80\x04\x95",
            "a field too many": json.dumps({**content, "invented": 1}).encode(),
            "a key twice": json.dumps(content)[:-1].encode() + b', "' + next(iter(content)).encode() + b'": 1}',
            "huge": (json.dumps(content)[:-1] + ', "z": ' + "9" * 5000 + "}").encode(),
            "NaN": (json.dumps(content)[:-1] + ', "z": NaN}').encode(),
        }
        path.write_text(json.dumps(content), encoding="utf-8")
        read(path)
        path.write_bytes(bad[what])
        with pytest.raises(UsageError) as refusal:
            read(path)
        assert "\n" not in str(refusal.value)

    return check


OTHERS = {
    "plan": others(load_plan, lambda: json.loads(small_plan(small_profile()).model_dump_json())),
    "target": others(
        load_target, lambda: {"name": "mine", "device": "cuda", "memory_bytes": 1 << 30, "capability": [8, 9]}
    ),
    "baseline": others(load_baseline, lambda: {"schema_version": "1", "peaks": {}}),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(
    "what", ["a part", "empty", "a list", "deep", "bytes", "a field too many", "a key twice", "huge", "NaN"]
)
def test_bad_plans_targets_and_baselines_are_refused(folder: Path, kind: str, what: str) -> None:
    OTHERS[kind](folder / "file.json", what)


OTHER_READERS = {
    "plan": "report good.json --plan BAD -o out.html",
    "target": "analyze torch.nn:Identity --input 2 --target BAD",
    "configuration": "analyze hf:BAD",
    "snapshot": "validate torch.nn:Identity --input 2 --target h100 --snapshot BAD",
    "model": "analyze BAD:make",
    "batch": "analyze torch.nn:Identity --input BAD:make",
    "loss": "analyze torch.nn:Identity --input 2 --loss BAD:loss",
    "program": "run BAD",
    "planned program": "plan --budget 60% --run BAD",
}
"""Every way of the command line to another file."""


@pytest.mark.skipif(os.name != "posix", reason="needs the files of a Unix")
@pytest.mark.parametrize("reader", OTHER_READERS)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_refused_whatever_it_is_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reader: str, what: str
) -> None:
    monkeypatch.setattr(json_reader, "_PATIENCE_S", 0.1)
    words = OTHER_READERS[reader]
    name = "bad.json" if reader in ("plan", "target", "configuration", "snapshot") else "bad.py"
    NO_FILES[what](Path(name))
    options = [] if reader in ("plan", "program") else ["--quiet"]
    verb, *rest = words.replace("BAD", name).split()
    assert name in refused(capsys, verb, *options, *rest)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema_version": "27"}, "expected a plan of schema version '1', got version '27'"),
        ({"regions": [{"first_node": 3, "last_node": 3}]}, r"covers nodes \[3, 3\)"),
        ({"regions": [{"first_node": -1, "last_node": 3}]}, r"covers nodes \[-1, 3\)"),
        (
            {"regions": [{"first_node": 0, "last_node": 3, "regions": [{"first_node": 1, "last_node": 4}]}]},
            "goes beyond it",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(folder: Path, change: Content, complaint: str) -> None:
    (folder / "plan.json").write_text(
        json.dumps({**json.loads(small_plan(small_profile()).model_dump_json()), **change}), encoding="utf-8"
    )
    with pytest.raises(UsageError, match=complaint):
        load_plan(folder / "plan.json")


@pytest.mark.parametrize(
    "command",
    [
        "graph good.json -o out.svg --plan",
        "graph good.json --by time -o out.svg --plan",
        "report good.json -o out.html --plan",
    ],
)
@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"{}", b"\xff"])
def test_a_bad_plan_is_refused_by_every_reader(
    capsys: pytest.CaptureFixture[str], folder: Path, command: str, content: bytes
) -> None:
    (folder / "plan.json").write_bytes(content)
    assert "expected --plan to name a plan written by `fxmem plan --json`, got 'plan.json'" in refused(
        capsys, *command.split(), "plan.json"
    )


# --- nothing is run ---------------------------------------------------------------------------------------------------

ROOT = Path(fxmem.__file__).parent
RUNS = re.compile(
    r"(eval|exec|compile|__import__)|(pickle|marshal|shelve|runpy|importlib|import_module|subprocess)\b.*|.*\b(torch|numpy|np)\.load|os\.(system|popen|exec\w+|spawn\w+)"
)
ALLOWED = {
    ("__init__.py", "import_module"): "the public names, as they stand in that file",
    ("cli/verbs/__init__.py", "import_module"): "the verbs, as they stand in that file",
    ("testing/__init__.py", "import_module"): "its public names, as they stand in that file",
    ("hardware/operators/__init__.py", "import_module"): "the families of operators, by their files beside that one",
    ("show/svg.py", "importlib.util.find_spec"): "whether vl-convert is installed",
    ("show/svg.py", "subprocess.run"): "an installed converter; what it draws reaches it as text on stdin",
    ("_torch/compiler/inductor.py", "importlib.util.find_spec"): "whether triton is installed",
    ("_torch/compiler/inductor.py", "importlib.import_module"): "triton, by its name",
    ("cli/sample_pipeline.py", "importlib.import_module"): "diffusers, whose pipeline was asked for by name",
    ("_torch/compiler/inductor.py", "compile"): "a function given to it, which takes dynamo's graph",
    (
        "simulation/kernels/packages/libbitsandbytes_cuda.py",
        "importlib.import_module",
    ): "bitsandbytes, where the program has imported it",
    ("_torch/programs.py", "importlib.import_module"): "torch._dynamo, by its name",
    ("whatif/bisection.py", "subprocess.run"): "git, and this Python with the words of fxmem that were typed",
    ("simulation/run/branches.py", "compile"): "the program's own branch, which it would run later",
    ("simulation/run/branches.py", "exec"): "the same",
    (
        "simulation/run/schedules.py",
        "compile",
    ): "the program's own condition, which it asks itself, without what it calls",
    ("simulation/run/schedules.py", "eval"): "the same",
    ("whatif/program_step.py", "compile"): "the user's own file, with a line rewritten, as Python would run it",
    ("simulation/step/given/adapters.py", "importlib.import_module"): "peft and torchao, by their names",
    ("cli/verbs/serve.py", "importlib.util.find_spec"): "whether the extra `serve` is installed",
    ("cli/verbs/mcp.py", "importlib.util.find_spec"): "whether the extra `mcp` is installed",
    ("cli/server/worker.py", "subprocess.run"): "this Python with a program that stands in that file; options as JSON",
    ("whatif/advice/optimizer.py", "importlib.import_module"): "optimizers of packages named in that file",
    ("whatif/advice/optimizer.py", "importlib.util.find_spec"): "whether they are installed",
    (
        "checkpointing/fx_rewrite.py",
        "compile",
    ): "the graph of the user's own model, as torch.fx writes it; of a plan only names that are nodes of that graph",
    ("checkpointing/fx_rewrite.py", "exec"): "the same",
    (
        "simulation/recording/observe/backward_hooks.py",
        "eval",
    ): "a call of a torch function with as many arguments as it is given",
    ("cli/step.py", "importlib.util.find_spec"): "whether torch is installed",
    ("show/export/formats/memory_viz.py", "pickle.dumps"): "written for PyTorch's viewer, never read",
    ("simulation/stand_ins/cuda.py", "pickle.dump"): "the same, where a program asks for it",
    ("validation/measure_cuda.py", "subprocess.run"): "nvidia-smi",
    ("validation/measure_program.py", "subprocess.run"): "this Python, with the program that the command line names",
    (
        "cli/specs/recipes.py",
        "compile",
    ): "the file that a model spec on the command line names: whether it is Python",
    (
        "cli/specs/recipes.py",
        "importlib.import_module",
    ): "torchvision, timm and transformers; the module that a model spec on the command line names",
    (
        "records/registry.py",
        "import_module",
    ): "strategies and exporters: modules of this package, or installed entry points",
    ("records/registry.py", "import_module('fxmem.show.text.printed').write"): "a module of this package",
    **dict.fromkeys(
        (
            ("simulation/program/launcher.py", name)
            for name in ("runpy.run_path", "runpy.run_module", "exec", "compile")
        ),
        "the program that the command line of `fxmem run` names",
    ),
    ("simulation/stand_ins/checkpoints.py", "importlib.import_module"): "safetensors, where it is installed",
    ("simulation/program/recorded_code.py", "np.load"): "a value that the command line gives, without pickle",
    ("simulation/program/recorded_code.py", "torch.load"): "a value that the command line gives, with weights_only",
    ("simulation/program/launchers.py", "importlib.import_module"): "torchrun and accelerate, which that line may name",
    **dict.fromkeys(
        (("simulation/stand_ins/checkpoints.py", f"pickle.{name}") for name in ("Pickler", "Unpickler")),
        "what the program itself saves and loads, in memory",
    ),
    **dict.fromkeys(
        (("simulation/processes/sandbox/process.py", name) for name in ("pickle.dumps", "pickle.loads")),
        "what this process asks of a new one that it starts",
    ),
    ("simulation/processes/sandbox/process.py", "subprocess.Popen"): "this Python, to run the program",
    ("simulation/processes/executor.py", "importlib.util.find_spec"): "whether dask is installed",
    ("simulation/kernels/packages/transformer_engine_torch.py", "__import__"): "a module of rows, by its own name",
    ("simulation/kernels/packages/transformer_engine_torch.py", "importlib.metadata.version"): "which release of it",
    ("simulation/engines/releases.py", "importlib.metadata.version"): "which release of an engine is installed",
    **dict.fromkeys(
        (
            ("simulation/kernels/subclass_ways.py", f"importlib.util.{each}")
            for each in ("find_spec", "spec_from_loader")
        ),
        "modules made of rows; whether the package around one is installed",
    ),
    ("simulation/kernels/subclass_ways.py", "importlib.metadata.version"): "which release of it",
    ("simulation/processes/sandbox/landlock.py", "os.execvp"): "what a program starts, once it may not write",
    ("simulation/processes/sandbox/isolation.py", "subprocess.call"): "what a program gives to os.system",
    ("simulation/processes/process_guard.py", "importlib.import_module"): "the constants of huggingface_hub",
    ("simulation/stand_ins/hub_models.py", "importlib.import_module"): "huggingface_hub, where --download asks for it",
    (
        "simulation/stand_ins/hub.py",
        "importlib.import_module",
    ): "huggingface_hub and tokenizers, by their names; libraries of classes that the shipped table names",
    ("cli/specs/recipes.py", "importlib.util.module_from_spec"): "the same",
    ("cli/spec_names.py", "importlib.util.find_spec"): "where a collection's files lie, whose names are read",
    ("cli/specs/recipes.py", "importlib.util.spec_from_file_location"): "the same",
    ("hardware/workspaces/cudnn_client.py", "subprocess.Popen"): "this Python, to ask cuDNN",
    ("hardware/workspaces/cudnn_client.py", "subprocess.run"): "pip or uv, where `fxmem doctor --fetch` asks for it",
}
"""Where something is imported, run or written as a pickle, and why that is nothing a file says."""


def runs(path: Path) -> Iterator[str]:
    """What a file calls that may run code, or read or write a pickle, as it is written there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and RUNS.fullmatch(ast.unparse(node.func)):
            yield ast.unparse(node.func)


@pytest.mark.parametrize(
    "code",
    [
        "eval(x)",
        "pickle.loads(x)",
        "import torch\ntorch.load(x)",
        "np.load(x)",
        "importlib.import_module(x)",
        "os.system(x)",
    ],
)
def test_what_can_run_code_is_recognised(tmp_path: Path, code: str) -> None:
    (tmp_path / "file.py").write_text(code, encoding="utf-8")
    assert list(runs(tmp_path / "file.py"))


@pytest.mark.truth
def test_what_can_run_code_is_known_and_has_a_reason() -> None:
    found = {(path.relative_to(ROOT).as_posix(), written) for path in ROOT.rglob("*.py") for written in runs(path)}
    assert found == set(ALLOWED)
