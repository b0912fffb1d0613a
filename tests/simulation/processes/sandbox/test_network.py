"""What a program has made does not leave the machine; downloads and servers of this machine are reached."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import http.server
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import huggingface_hub
import pytest
import requests
import torch
import transformers

import fxmem
from fxmem.__main__ import main
from fxmem._torch.common import nested
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.processes.sandbox.network import network_patches, sends
from fxmem.simulation.processes.sandbox.outside import Outside

AWAY = "http://hooks.example.invalid/x"  # RFC 2606: no such host, ever


WEIGHTS = b"weights" * 1000


def said(recorded: fxmem.RecordedProgram) -> list[str]:
    """What was not sent."""
    return [each.what for each in recorded.made_up if each.kind == "sent"]


def test_posts_get_an_answer_and_are_listed() -> None:
    with fxmem.record("cpu") as recorded:
        assert requests.post(AWAY, json={"loss": 0.0}, timeout=1).json() == {}
        assert requests.Session().put(f"{AWAY}?key=secret", timeout=1).status_code == 200
        assert httpx.post(AWAY, json={}).json() == {}
        with urllib.request.urlopen(urllib.request.Request(AWAY, data=b"{}"), timeout=1) as answer:
            assert answer.read() == b"{}"
        with pytest.raises(ConnectionRefusedError, match="fxmem sends nothing"):
            http.client.HTTPConnection("hooks.example.invalid").request("POST", "/x")
    assert said(recorded) == [
        "POST http://hooks.example.invalid/x",
        "PUT http://hooks.example.invalid/x",  # without the query, in which keys stand
        "POST http://hooks.example.invalid/x",
        "POST http://hooks.example.invalid/x",
        "POST http://hooks.example.invalid/x",
    ]


def test_posts_of_event_loops_are_refused() -> None:
    async def post(method: str) -> None:
        async with aiohttp.ClientSession() as session, session.request(method, AWAY):
            pass

    async def later() -> int:
        async with httpx.AsyncClient() as client:
            return (await client.post(AWAY)).status_code

    with fxmem.record("cpu") as recorded:
        with pytest.raises(ConnectionRefusedError, match="fxmem sends nothing"):
            asyncio.run(post("POST"))
        with pytest.raises(aiohttp.ClientError, match="Cannot connect"):
            asyncio.run(post("GET"))
        assert asyncio.run(later()) == 200
    assert len(said(recorded)) == 2


def test_reads_go_out() -> None:
    with fxmem.record("cpu") as recorded:
        with pytest.raises(requests.ConnectionError):
            requests.get(AWAY, timeout=1)
        with pytest.raises(httpx.ConnectError):
            httpx.get(AWAY)
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(AWAY, timeout=1)
    assert said(recorded) == []


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server of this machine, and what was posted to it."""
    posted: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(WEIGHTS)))
            self.end_headers()
            self.wfile.write(WEIGHTS)

        def do_POST(self) -> None:
            posted.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", posted
        served.shutdown()
        thread.join()


def test_servers_of_this_machine_are_reached(server: tuple[str, list[str]]) -> None:
    address, posted = server
    with fxmem.record("cpu") as recorded:
        assert requests.post(f"{address}/one", timeout=5).status_code == 204
        assert httpx.post(f"{address}/two").status_code == 204
        assert urllib.request.urlopen(urllib.request.Request(f"{address}/three", data=b""), timeout=5).status == 204
    assert (posted, said(recorded)) == (["/one", "/two", "/three"], [])


def test_a_program_that_may_send_does(server: tuple[str, list[str]]) -> None:
    before = requests.Session.send
    with fxmem.record("cpu", network=True):
        assert requests.Session.send is before
        assert "WANDB_MODE" not in os.environ
    with fxmem.record("cpu"):
        assert requests.Session.send is not before
        assert os.environ["WANDB_MODE"] == "offline"
    assert requests.Session.send is before
    assert "WANDB_MODE" not in os.environ


def test_nothing_is_pushed_to_the_hub(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with fxmem.record("cpu") as recorded:
        assert huggingface_hub.create_repo("me/model", exist_ok=True).repo_id == "me/model"
        assert huggingface_hub.upload_folder(repo_id="me/model", folder_path=tmp_path).oid == "0" * 40
        later = huggingface_hub.HfApi().upload_file(
            path_or_fileobj=tmp_path / "x", path_in_repo="x", repo_id="me/model", run_as_future=True
        )
        assert later.result().oid == "0" * 40
        config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8)
        transformers.GPT2LMHeadModel(config).push_to_hub("me/model")
    assert {each.split()[0] for each in said(recorded)} >= {"create_repo", "upload_folder", "upload_file"}
    assert all(each.endswith("me/model") for each in said(recorded))


LIBRARIES = {
    "wandb/__init__.py": "def init(**settings):\n    return settings\n",
    "botocore/__init__.py": "",
    "botocore/client.py": "class BaseClient:\n    def _make_api_call(self, name, given):\n        return {name: 1}\n",
}


def test_trackers_and_object_stores_that_are_imported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in LIBRARIES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with fxmem.record("cpu") as recorded:
        import botocore.client  # type: ignore[import-not-found]
        import wandb  # type: ignore[import-not-found]

        assert wandb.init(mode="online")["mode"] == "offline"
        assert wandb.init(mode="disabled")["mode"] == "disabled"
        client = botocore.client.BaseClient()
        assert client._make_api_call("PutObject", {"Bucket": "b", "Key": "best.pt"})["ETag"] == '""'
        assert client._make_api_call("GetObject", {}) == {"GetObject": 1}
    assert said(recorded) == ["wandb.init: offline", "PutObject b/best.pt"]
    assert wandb.init(mode="online")["mode"] == "online"
    assert client._make_api_call("PutObject", {}) == {"PutObject": 1}


SENDING = (
    "aws s3 cp best.pt s3://b/best.pt",
    "cd out && gsutil cp best.pt gs://b",
    ["rsync", "-a", "out/", "host:out/"],
    ["scp", "best.pt", "host:"],
    ["git", "push", "origin", "main"],
    ["docker", "push", "me/image"],
    "twine upload dist/x.whl",
    "(cd out; gsutil -m cp -r . gs://b)",
    ["huggingface-cli", "upload", "me/model", "."],
    ["/usr/bin/rclone", "copy", "out", "remote:out"],
    "wandb sync wandb/offline-run-1",
)
STAYING = (
    ["rsync", "-a", "out/", "backup/"],
    ["git", "clone", "https://example.com/x"],
    "curl -O https://example.com/data.zip",
    ["wget", "https://example.com/data.zip"],
    ["python", "aws"],
    "echo 'unbalanced",
    "git commit -m push",
    "echo aws s3 cp x s3://b",
    "aws s3 cp s3://b/x .",
    ["gsutil", "cp", "gs://b/x", "here"],
    ["rsync", "-a", "host:out/", "out/"],
    ["ssh", "host", "ls"],
    ["scp", "host:x", "."],
    [],
)


@pytest.mark.parametrize("command", SENDING, ids=str)
def test_commands_that_send(command: Any) -> None:
    assert sends(command)


@pytest.mark.parametrize("command", STAYING, ids=str)
def test_commands_that_do_not(command: Any) -> None:
    assert not sends(command)


def test_tools_that_send_are_not_started() -> None:
    with fxmem.record("cpu") as recorded:
        assert subprocess.run(["aws", "s3", "cp", "best.pt", "s3://b"], check=True, capture_output=True).stdout == b""
        assert subprocess.check_output("gsutil cp best.pt gs://b", shell=True) == b""
        assert os.system("scp best.pt host:") == 0
        assert subprocess.check_output([sys.executable, "-S", "-c", "print(3)"]).split() == [b"3"]
    assert said(recorded) == ["aws s3 cp", "gsutil cp best.pt", "scp best.pt host:"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has networks of processes")
def test_downloads_are_connected_outside(server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this process connects to nothing: what is read is connected there, and raw sockets are not."""
    address, _ = server
    port = int(address.rpartition(":")[2])

    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "as in a network of its own")

    async def read_later() -> list[bytes]:
        async with aiohttp.ClientSession() as session, session.get(address) as first:
            found = [await first.read()]
        async with httpx.AsyncClient() as client:
            return [*found, (await client.get(address)).content]

    outside = Outside(lambda: None)
    try:
        monkeypatch.setattr(socket.socket, "connect", refuse)
        with nested(*network_patches(MadeUpNotes(), outside.descriptor, refuses_all=False)):
            assert requests.get(address, timeout=5).content == WEIGHTS
            assert httpx.get(address).content == WEIGHTS
            assert urllib.request.urlopen(address, timeout=5).read() == WEIGHTS
            assert asyncio.run(read_later()) == [WEIGHTS, WEIGHTS]
            with pytest.raises(ConnectionRefusedError, match="network of its own"):
                socket.create_connection(("127.0.0.1", port), 5)
            with pytest.raises(urllib.error.URLError, match=r"Name or service|not known|resolution"):
                urllib.request.urlopen(AWAY, timeout=5)
            with pytest.raises(urllib.error.URLError, match="Connection refused"):
                urllib.request.urlopen("http://127.0.0.1:9", timeout=5)
    finally:
        outside.close()


def test_only_what_came_from_the_network_stays_in_caches(
    server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # else they are temporary files
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    (cache / "before").write_bytes(b"x")
    with fxmem.record("rtx3080") as recorded:
        torch.hub.download_url_to_file(server[0], str(cache / "by_hub"), progress=False)
        (cache / "by_requests").write_bytes(requests.get(server[0], timeout=5).content)
        urllib.request.urlretrieve(server[0], cache / "changed")
        with (cache / "changed").open("ab") as file:
            file.write(b"x")
        (cache / "cut").write_bytes(WEIGHTS[:-1])
        torch.save(torch.nn.Linear(2, 2).cuda().state_dict(), cache / "made.pt")
        (cache / "made.npy").write_bytes(torch.ones(2, device="cuda").cpu().numpy().tobytes())
        (cache / "before").write_bytes(WEIGHTS)
        (cache / "done").touch()
        (cache / "link").symlink_to("by_hub")
        (cache / "link_of_made").symlink_to("made.pt")
        assert (cache / "made.npy").stat().st_size == 8
    assert {each.name for each in cache.iterdir()} == {"before", "by_hub", "by_requests", "link"}
    assert (cache / "by_hub").read_bytes() == (cache / "by_requests").read_bytes() == WEIGHTS
    assert (cache / "before").read_bytes() == b"x"
    assert recorded.files is not None
    assert [Path(each.path).name for each in recorded.files.written] == ["changed", "cut", "made.npy", "made.pt"]


SENDS = Path(__file__).parent / "sends.py"
HAS_NETWORK = shutil.which("unshare") is not None and not subprocess.call(["unshare", "-Urn", "true"])


def listen(host: str, count: int) -> list[socket.socket]:
    """Sockets for connections and for datagrams, in turn, at ports that follow each other."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server((host, 0))).getsockname()[1]
            stack.close()
            made = []
            for port in range(first, first + count):
                made.append(stack.enter_context(socket.create_server((host, port))))
                made.append(stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
                made[-1].bind((host, port))
            stack.pop_all()
            return made


@pytest.mark.truth
@pytest.mark.skipif(not HAS_NETWORK, reason="this machine gives a process no network of its own")
def test_no_way_to_send_leads_out(capfd: pytest.CaptureFixture[str]) -> None:
    listening = listen("127.0.0.2", 40)  # an address of this machine that programs do not have for it
    try:
        first = listening[0].getsockname()[1]
        code = main(["run", "--target", "rtx3080", "--until", "end", str(SENDS), "127.0.0.2", str(first)])
        err = capfd.readouterr().err
        assert code == 0, err
        reached = {each.getsockname()[1] - first for each in select.select(listening, [], [], 0)[0]}
    finally:
        for each in listening:
            each.close()
    ways = json.loads(re.search(r"^WAYS (.*)$", err, re.MULTILINE)[1])  # type: ignore[index]
    assert len(ways) > 30
    assert reached == {list(ways).index("get")}  # a download
    assert [ways[name] for name in ways if name.startswith("own")] == [True] * 4


@pytest.mark.skipif(not HAS_NETWORK or not os.access("/run", os.W_OK), reason="no view of its own, or no place there")
@pytest.mark.parametrize("sends", [False, True])
def test_sockets_of_services_are_reached_by_a_program_that_may_send_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sends: bool
) -> None:
    script, folder = tmp_path / "train.py", Path(tempfile.mkdtemp(dir="/run"))
    script.write_text(
        "import socket, sys, torch\n"
        "torch.ones(1, device='cuda')\n"
        "for file in sys.argv[1:]:\n"
        "    with socket.socket(socket.AF_UNIX) as made:\n"
        "        print('REACHED', made.connect_ex(file) == 0)\n"
        "with socket.socket(socket.AF_UNIX) as own, socket.socket(socket.AF_UNIX) as made:\n"
        "    own.bind(sys.argv[1] + '.own')\n"
        "    own.listen()\n"
        "    print('OWN', made.connect_ex(sys.argv[1] + '.own') == 0)\n"
    )
    try:
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(str(folder / "service.sock"))
            service.listen()
            options = ["--network"] if sends else []
            assert main(["run", "--target", "rtx3080", *options, str(script), str(folder / "service.sock")]) == 0
            found = capfd.readouterr()
    finally:
        shutil.rmtree(folder)
    assert f"REACHED {sends}" in found.out + found.err
    assert "OWN True" in found.out + found.err
