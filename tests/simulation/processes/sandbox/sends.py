"""Sends what it has made in some thirty ways; prints which of them were answered by a server.

`python sends.py HOST PORT`, where somebody listens at HOST from PORT on, at a port for each way.
"""

import asyncio
import contextlib
import ftplib
import http.client
import json
import multiprocessing
import os
import shutil
import smtplib
import socket
import subprocess
import sys
import threading
import urllib.request
import xmlrpc.client

import torch

HOST = sys.argv[1]
CHILD = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).sendall(b'POST / HTTP/1.0')"


def run(*words: str) -> bool:
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(words[0])
    return subprocess.run(words, capture_output=True, timeout=10, check=False).returncode == 0


def child(port: int) -> list[str]:
    return [sys.executable, "-S", "-c", CHILD, HOST, str(port)]


def raw_socket(port: int) -> bool:
    with socket.create_connection((HOST, port), 3) as made:
        made.sendall(b"POST / HTTP/1.0\r\n\r\n")
        return bool(made.recv(1))


def raw_socket_by_number(port: int) -> bool:
    with socket.socket() as made:
        made.settimeout(3)
        return made.connect_ex((HOST, port)) == 0


def datagram(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        return made.sendto(b"made up", (HOST, port)) > 0


def datagram_connected(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.connect((HOST, port))
        return made.send(b"made up") > 0


def mail(port: int) -> bool:
    with smtplib.SMTP(HOST, port, timeout=3):
        return True


def ftp(port: int) -> bool:
    made = ftplib.FTP(timeout=3)
    made.connect(HOST, port)
    return True


def event_loop(port: int) -> bool:
    async def send() -> bool:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(HOST, port), 3)
        writer.write(b"POST / HTTP/1.0\r\n\r\n")
        return bool(await reader.read(1))

    return asyncio.run(send())


def event_loop_datagram(port: int) -> bool:
    async def send() -> bool:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=(HOST, port)
        )
        transport.sendto(b"made up")
        return True

    return asyncio.run(send())


def library_post(port: int) -> bool:
    made = http.client.HTTPConnection(HOST, port, timeout=3)
    made.request("POST", "/")
    return made.getresponse().status == 200


def library_socket(port: int) -> bool:
    made = http.client.HTTPConnection(HOST, port, timeout=3)
    made.putrequest("PUT", "/")
    made.endheaders(b"made up")
    return made.getresponse().status == 200


def xml(port: int) -> bool:
    return bool(xmlrpc.client.ServerProxy(f"http://{HOST}:{port}").save(1))


def thread(port: int) -> bool:
    found: list[bool] = []

    def send() -> None:
        with contextlib.suppress(OSError):
            found.append(raw_socket(port))

    made = threading.Thread(target=send)
    made.start()
    made.join()
    return found == [True]


def forked(port: int) -> bool:
    made = multiprocessing.get_context("fork").Process(target=raw_socket, args=(port,))
    made.start()
    made.join()
    return made.exitcode == 0


def forked_by_hand(port: int) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            raw_socket(port)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def child_python(port: int) -> bool:
    return run(*child(port))


def child_detached(port: int) -> bool:
    with subprocess.Popen(child(port), start_new_session=True, stderr=subprocess.DEVNULL) as made:
        return made.wait(10) == 0


def spawned_by_os(port: int) -> bool:
    return os.spawnv(os.P_WAIT, sys.executable, child(port)) == 0


def spawned_by_posix(port: int) -> bool:
    return os.waitpid(os.posix_spawn(sys.executable, child(port), os.environ), 0)[1] == 0


def executed(port: int) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            os.execv(sys.executable, child(port))
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def shell(port: int) -> bool:
    return os.system(f"bash -c 'echo POST > /dev/tcp/{HOST}/{port}' 2>/dev/null") == 0


def opened_pipe(port: int) -> bool:
    with os.popen(f"bash -c 'echo POST > /dev/tcp/{HOST}/{port}' 2>/dev/null && echo done") as made:
        return made.read() == "done\n"


def shell_environment(port: int) -> bool:
    return run("env", "A=b", "timeout", "5", "bash", "-c", f"echo POST > /dev/tcp/{HOST}/{port}")


def curl(port: int) -> bool:
    return run("curl", "-sf", "-d", "made=up", f"http://{HOST}:{port}")


def curl_joined(port: int) -> bool:
    return run("curl", "-sfT/proc/self/comm", f"http://{HOST}:{port}")


def curl_other_joined(port: int) -> bool:
    return run("curl", "-sfdmade=up", "-XPOST", f"http://{HOST}:{port}")


def curl_upload(port: int) -> bool:
    return run("curl", "-sf", "--upload-file=/proc/self/comm", f"http://{HOST}:{port}")


def curl_in_shell(port: int) -> bool:
    return run("bash", "-c", f"curl -sf -d made=up http://{HOST}:{port}")


def wget(port: int) -> bool:
    return run("wget", "-q", "-t1", "-O", "/dev/null", "--post-file=/proc/self/comm", f"http://{HOST}:{port}")


def git(port: int) -> bool:
    return run("git", "ls-remote", f"http://{HOST}:{port}/made-up")


def perl(port: int) -> bool:
    return run("perl", "-MIO::Socket", "-e", f"IO::Socket::INET->new('{HOST}:{port}') or exit 1")


WAYS = [each for each in list(globals().values()) if list(getattr(each, "__annotations__", {})) == ["port", "return"]]
WAYS = [each for each in WAYS if each.__annotations__["return"] is bool]


def own_server() -> bool:
    """The program's own server, and its own child, reach each other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen([sys.executable, "-S", "-c", CHILD, "127.0.0.1", str(port)]):
            server.settimeout(10)
            return server.accept()[0].recv(4) == b"POST"


def own_server_by_python() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"x")).start()
        with socket.create_connection(server.getsockname(), 5) as made:
            return made.recv(1) == b"x"


def own_unix_socket() -> bool:
    one, other = socket.socketpair()
    one.send(b"x")
    return other.recv(1) == b"x"


def own_name() -> bool:
    return bool(socket.getaddrinfo(socket.gethostname(), 80))


def try_way(way, *given):
    try:
        return way(*given)
    except (Exception, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    first = int(sys.argv[2])
    model = torch.nn.Linear(8, 8).cuda()
    model(torch.randn(4, 8).cuda()).sum().backward()
    found = {each.__name__: try_way(each, first + index) for index, each in enumerate(WAYS)}
    port = first + len(WAYS)
    found["get"] = try_way(lambda: urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=2).read().decode())
    for each in (own_server, own_server_by_python, own_unix_socket, own_name):
        found[each.__name__] = try_way(each)
    print("WAYS", json.dumps(found), flush=True)
