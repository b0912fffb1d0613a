"""`fxmem serve`: what it answers, and that it answers nobody else."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.cli.server.choice import StepChoice, change_options, change_shape, find_sizes, read_choice
from fxmem.cli.verbs import build_parser, serve
from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError

testclient = pytest.importorskip("starlette.testclient", reason="starlette is not installed (the extra `serve`)")
from fxmem.cli.server.app import PageKeeper, make_app  # noqa: E402

TOKEN, HOST = "a-random-token", "127.0.0.1:8123"
HERE = f"http://{HOST}"


@pytest.fixture
def asked() -> list[StepChoice]:
    return []


@pytest.fixture
def client(asked: list[StepChoice], tmp_path: Path) -> Iterator[Any]:
    def write(choice: StepChoice) -> str:
        asked.append(choice)
        if choice.batch == 13:
            raise AnalysisError("<b>expected</b> another batch")
        return f"<p>{choice.batch}</p>"

    (tmp_path / "model.py").write_text("one", encoding="utf-8")
    keeper = PageKeeper(write, lambda: tmp_path.glob("*.py"))
    with testclient.TestClient(make_app(keeper, "<p>live</p>", TOKEN, [HOST]), base_url=HERE) as found:
        yield found


def options_of(*words: str) -> argparse.Namespace:
    _, parsers = build_parser()
    return parsers["serve"].parse_args(list(words))


# --- what is answered -------------------------------------------------------------------------------------------------


def test_the_page_its_report_and_its_stamp(client: Any, asked: list[StepChoice], tmp_path: Path) -> None:
    assert client.get(f"/{TOKEN}/").text == "<p>live</p>"
    assert client.get(f"/{TOKEN}/report?batch=4&precision=bf16&target=h100&budget=60%25").text == "<p>4</p>"
    assert asked == [StepChoice(batch=4, precision="bf16", target="h100", budget="60%")]
    stamp = client.get(f"/{TOKEN}/stamp").text
    assert client.get(f"/{TOKEN}/stamp").text == stamp
    client.get(f"/{TOKEN}/report?precision=bf16&batch=4&target=h100&budget=60%25")
    assert len(asked) == 1
    os.utime(tmp_path / "model.py", ns=(1, 1))
    assert client.get(f"/{TOKEN}/stamp").text != stamp
    client.get(f"/{TOKEN}/report?batch=4&precision=bf16&target=h100&budget=60%25")
    assert len(asked) == 2


def test_every_answer_forbids_to_be_kept_framed_or_guessed_at(client: Any) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/stamp", f"/{TOKEN}/report", "/other/", f"/{TOKEN}/report?x=1"):
        headers = client.get(path).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-frame-options"] == "SAMEORIGIN"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


def test_what_cannot_be_analysed_is_text(client: Any) -> None:
    answer = client.get(f"/{TOKEN}/report?batch=13")
    assert (answer.status_code, answer.headers["content-type"]) == (422, "text/plain; charset=utf-8")
    assert answer.text == "<b>expected</b> another batch"


def test_pages_that_wait_leave_the_rest_answered(tmp_path: Path) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def write(choice: StepChoice) -> str:
        go_on.wait()
        return "page"

    def watched() -> Iterator[Path]:
        begun.release()
        return iter(())

    app = make_app(PageKeeper(write, watched), "<p>live</p>", TOKEN, [HOST])
    with testclient.TestClient(app, base_url=HERE) as client, ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(client.get, f"/{TOKEN}/report?batch={batch}") for batch in range(1, 61)]
        begun.acquire()
        refused = [each.result() for each in islice(as_completed(waiting), 52)]
        assert client.get(f"/{TOKEN}/").text == "<p>live</p>"
        go_on.set()
    assert {answer.status_code for answer in refused} == {422}
    assert "expected at most 8 pages to be made at a time" in refused[0].text
    assert sum(each.result().status_code == 200 for each in waiting) == 8


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1"}, 421),
        ({"host": "127.0.0.1:8124"}, 421),
        ({"host": f"{HOST}.evil.example"}, 421),
        ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"https://{HOST}"}, 403),
        ({"origin": "http://localhost:8123"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": HERE}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
    ],
)
def test_only_this_machines_browser_is_answered(
    client: Any, asked: list[StepChoice], headers: dict[str, str], code: int
) -> None:
    assert client.get(f"/{TOKEN}/report", headers=headers).status_code == code
    assert len(asked) == (code == 200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_sent(client: Any, method: str) -> None:
    answer = client.request(method, f"/{TOKEN}/report")
    assert answer.status_code == 405
    assert "access-control-allow-methods" not in answer.headers


@pytest.mark.parametrize(
    "path",
    ["/", "/report", "//report", "/a-random-toke/", "/a-random-tokenx/", "/%00/", f"/{TOKEN}/../../etc/passwd",
     f"/{TOKEN}/x", f"/{TOKEN.upper()}/", "/%F0%9F%92%A9/report"],
)  # fmt: skip
def test_without_the_token_there_is_nothing(client: Any, asked: list[StepChoice], path: str) -> None:
    assert client.get(path).status_code == 404
    assert asked == []


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("batch=0", 422), ("batch=-1", 422), ("batch=1e3", 422), ("batch=9999999", 422), ("batch=%D9%A3", 422),
        ("sequence=--help", 422), ("precision=int8", 422), ("target=../../etc/passwd", 422), ("target=own.json", 422),
        ("budget=lots", 422), ("budget=" + "9" * 200, 422), ("loss=os:system", 422), ("batch=1&batch=2", 400),
        ("&".join(f"x{index}=1" for index in range(50)), 400), ("model=evil.py:f", 422),
    ],
)  # fmt: skip
def test_a_hostile_setting_reaches_no_analysis(client: Any, asked: list[StepChoice], query: str, code: int) -> None:
    assert client.get(f"/{TOKEN}/report?{query}").status_code == code
    assert asked == []


def test_only_some_pages_are_kept() -> None:
    made: list[int | None] = []

    def write(choice: StepChoice) -> str:
        made.append(choice.batch)
        return "page"

    keeper = PageKeeper(write, tuple)
    for batch in (*range(1, 41), 40, 1):
        keeper.page(StepChoice(batch=batch))
    assert made == [*range(1, 41), 1]


# --- settings ---------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))
def test_any_address_is_read_or_refused(query: dict[str, str]) -> None:
    try:
        choice = read_choice(query)
    except UsageError:
        return
    assert set(query) <= {"batch", "sequence", "precision", "target", "budget"}
    assert choice.batch is None or choice.batch >= 1


@pytest.mark.parametrize(
    ("spec", "changed"),
    [
        ("32x3x224x224", "4x3x224x224"),
        ("8x1024:int64", "4x512:int64"),
        ("input_ids:8x1024:int64", "input_ids:4x512:int64"),
        ("batch.image:16x3x64x64", "batch.image:4x3x64x64"),
        ("file.py:batch", "file.py:batch"),
    ],
)
def test_a_shape_takes_another_batch_and_sequence(spec: str, changed: str) -> None:
    assert change_shape(spec, 4, 512) == changed
    assert change_shape(spec, None, None) == spec


def test_sliders_begin_where_the_command_line_is() -> None:
    assert find_sizes(["x:8x1024:int64", "y:8x1024:int64"], None, 8) == (8, 1024)
    assert find_sizes(["32x3x224x224"], None, 8) == (32, None)
    assert find_sizes(["f.py:batch"], None, 8) == (None, None)
    assert find_sizes([], None, 8) == (8, None)


def test_the_options_of_the_command_line_are_kept() -> None:
    options = options_of("m.py:f", "--input", "8x16:int64", "--optimizer", "sgd", "--precision", "fp16")
    changed = change_options(options, StepChoice(batch=2, precision="fp32", target="h100", budget="8GiB"))
    assert json.loads(json.dumps(changed)) == changed
    assert {**vars(options), **changed} == {
        **vars(options), "input": ["2x16:int64"], "precision": None, "target": "h100", "budget": "8GiB",
    }  # fmt: skip
    assert "run" not in changed


def test_the_live_page_loads_nothing_from_elsewhere_and_escapes_names() -> None:
    page = serve.write_live_page(options_of('"><script>alert(1)</script>:f', "--input", "8x16:int64"))
    assert "<script>alert" not in page
    assert page.count("<script>") == 1
    assert "default-src 'none'" in page
    assert "connect-src 'self'; frame-src 'self'" in page
    assert 'name="batch" min="1" max="64" value="8"' in page
    assert 'name="sequence" min="1" max="128" value="16"' in page
    assert 'sandbox="allow-scripts"' in page


def test_the_files_beside_the_model_are_watched(tmp_path: Path) -> None:
    for name in ("model.py", "layers.py", "notes.txt"):
        (tmp_path / name).touch()
    found = serve.watched_files(options_of(f"{tmp_path / 'model.py'}:f"))
    assert {path.name for path in found} == {"model.py", "layers.py"}
    assert list(serve.watched_files(options_of("torchvision:resnet18"))) == []


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacksError, match=r"pip install 'fxmem\[serve\]'"):
        serve.run(options_of("m.py:f"))


@pytest.mark.truth
def test_a_step_is_analysed_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n\n\ndef build():\n    print('hello')\n    return torch.nn.Linear(3, 5)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    keeper = serve.make_keeper(options_of("own.py:build", "--input", "2x3", "--target", "cpu", "--quiet"))
    page = keeper.page(StepChoice(batch=7))
    assert page.startswith("<!DOCTYPE html>")
    assert "7x3 float32" in page
    assert "hello" not in page
    with pytest.raises(AnalysisError, match="reduction dim"):
        keeper.page(StepChoice(sequence=4))
