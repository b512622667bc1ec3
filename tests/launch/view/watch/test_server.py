"""The server of the page, attacked."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.invoking import printed
from tests.ports import free_port
from tests.programs import ran
from tests.runs import EVIL, append, records, served, trainer, write_run
from thinpipe.launch.view.report.journal import Journal, Told

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "secret.txt").write_text("secret")
    with served(write_run(folder / "run", records(20), name=EVIL)) as (number, _):
        yield number


def ask(port: int, request: bytes, *, host: str = "127.0.0.1", whole: bool = True) -> bytes:
    """The answer to bytes, as they are; of a stream its beginning."""
    with socket.create_connection((host, port), timeout=PATIENCE_S) as client:
        with contextlib.suppress(OSError):  # rejected before it was read
            client.sendall(request)
        answer = b""
        try:
            while chunk := client.recv(1 << 16):
                answer += chunk
                if not whole and b"\n\n" in answer.partition(b"\r\n\r\n")[2]:
                    break
        except ConnectionResetError:
            pass
        return answer


def get(port: int, path: str, *headers: str, method: str = "GET", whole: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(headers or (f"Host: localhost:{port}",)), "", ""]
    return ask(port, "\r\n".join(lines).encode(), whole=whole)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt", "/../../../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd", "/run/metrics.jsonl", "/metrics.jsonl", "/page.js",
        "//etc/passwd", "/events/../", "/%00", "/\\..\\secret.txt", "/events/",
        "file:///etc/passwd", "http://other/etc/passwd",
    ],
)  # fmt: skip
def test_nothing_but_the_page_is_served(port: int, path: str) -> None:
    answer = get(port, path)
    assert status(answer) in (400, 404)
    assert b"root:" not in answer
    assert b"secret" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/events"])
def test_nothing_can_be_changed(port: int, method: str, path: str) -> None:
    answer = get(port, path, f"Host: localhost:{port}", "Content-Length: 0", method=method)
    assert status(answer) == 405


def test_headers_keep_the_page_to_itself(port: int) -> None:
    head = get(port, "/").partition(b"\r\n\r\n")[0].decode().lower()
    assert "content-security-policy: default-src 'none'" in head
    assert "unsafe" not in head
    assert "frame-ancestors 'none'" in head
    assert "x-content-type-options: nosniff" in head
    assert "referrer-policy: no-referrer" in head
    assert "access-control-allow-origin" not in head
    assert "server:" not in head


def test_names_that_lead_here_are_not_this_page_s(port: int) -> None:
    for name in ("evil.example", f"evil.example:{port}", "localhost.evil.example", ""):
        for path in ("/", "/events"):
            assert status(get(port, path, f"Host: {name}")) == 403
    for name in ("[::1]:9", "[::1]", f"Localhost:{port}", "127.0.0.1"):
        assert status(get(port, "/", f"Host: {name}")) == 200


def test_a_link_to_another_address_of_this_machine_alone_is_answered(tmp_path: Path) -> None:
    with (
        served(write_run(tmp_path / "run", records(2)), listen="127.0.0.2") as (_, links),
        urllib.request.urlopen(links[0], timeout=PATIENCE_S) as page,
    ):
        assert links[0].startswith("http://127.0.0.2:")
        assert page.status == 200


def test_text_of_others_is_data(port: int) -> None:
    body = get(port, "/events", whole=False).partition(b"\r\n\r\n")[2]
    text = body.decode().split("data: ", 1)[1].split("\n\n")[0]
    parts = json.loads(text)["parts"]
    assert parts["head"]["name"] == EVIL
    assert parts["samples"][0]["text"].endswith(EVIL)
    assert b"pwned" not in get(port, "/")


def test_huge_headers_are_rejected(port: int) -> None:
    huge = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 10_000_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 1_000_000 + b"\r\n",
        bytes(100_000),
        b"\x16\x03\x01" + bytes(1000),
    ]
    for request in huge:
        answer = ask(port, request)
        assert answer == b"" or status(answer) == 400
    assert status(get(port, "/")) == 200


@pytest.mark.slow
def test_a_thousand_clients_that_never_finish_keep_nobody_out(port: int) -> None:
    slow = []
    try:
        for number in range(1000):
            client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            client.sendall(b"GET / HTTP/1.1\r\nX: " if number % 2 else b"")
            slow.append(client)
        assert status(get(port, "/")) == 200
        assert b"data: " in get(port, "/events", whole=False)
        begin_s = time.monotonic()
        for client in slow:  # all are closed: the oldest at once, the others at their deadline
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert time.monotonic() - begin_s < PATIENCE_S
    finally:
        for client in slow:
            client.close()


def test_readers_are_counted_and_leave(port: int) -> None:
    def stream() -> socket.socket:
        client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return client

    readers = [stream() for _ in range(64)]
    for reader in readers:
        assert reader.recv(12) == b"HTTP/1.1 200"
    last = stream()
    assert last.recv(12) == b"HTTP/1.1 503"
    for reader in [*readers, last]:
        reader.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while status(get(port, "/events", whole=False)) != 200:
        assert time.monotonic() < deadline_s


def test_other_machines_need_the_token_of_the_link(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(4))
    with served(folder, listen="0.0.0.0") as (port, links):
        address, _, token = links[0].partition("#")
        assert len(token) >= 20
        assert address.endswith(f":{port}/")

        def stream(*given: str) -> int:
            headers = [f"Authorization: {text}" for text in given]
            return status(get(port, "/events", "Host: any.example", *headers, whole=False))

        assert stream() == 401
        assert stream("Bearer") == 401
        assert stream(f"Bearer {token[:-1]}") == 401
        assert stream(f"Bearer {token}x") == 401
        assert stream("Bearer \u00e9") == 401
        assert stream(f"Bearer {token}") == 200
        page = get(port, "/", "Host: any.example")
        assert status(page) == 200
        assert token.encode() not in page


def test_a_port_in_use_is_named(port: int, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(2))
    command = [sys.executable, "-P", "-m", "thinpipe.launch", "watch", str(folder)]
    command += ["--listen", f"127.0.0.1:{port}"]
    done = ran(*command, code=2)
    assert f"--listen = 127.0.0.1:{port}: Address already in use" in done.stderr
    assert f"--listen 127.0.0.1:{port + 1}" in done.stderr
    command.append("--with-parent")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) as server:
        assert server.stderr is not None
        said = server.stderr.read()
    assert f"watch.port = {port}: Address already in use; the run goes on" in said


@pytest.mark.parametrize("killed", [True, False])
def test_it_shows_the_end_of_who_started_it_and_ends(killed: bool, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    command = [sys.executable, "-P", "-m", "thinpipe.launch", "watch", str(folder)]
    command += ["--listen", f"127.0.0.1:{free_port()}", "--with-parent"]
    pipe = subprocess.PIPE
    with trainer(folder) as process, subprocess.Popen(command, stdin=pipe, stdout=pipe) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        link = server.stdout.readline().decode().split()[-1]
        with urllib.request.urlopen(f"{link}events", timeout=PATIENCE_S) as events:
            assert b'"run":0' in events.readline()
            append(folder, records(20)[-1:])
            if killed:
                process.kill()
                process.wait(PATIENCE_S)  # its lock is free then
            else:
                Journal(Told(folder).info, []).write(ended="enough")
            server.stdin.close()
            lines = [line for line in events if line.startswith(b"data: ")]
        assert server.wait(PATIENCE_S) == 0
    why = b"its process is gone, and did not say why" if killed else b"enough"
    assert b"Ended after step 20 of 40: %s." % why in b"".join(lines)
    assert lines[-1] == b'data: {"over":true}\n'
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(link, timeout=PATIENCE_S)


@pytest.mark.parametrize("listen", ["8042", "localhost:x", "127.0.0.1:0"])
def test_an_address_that_is_none_is_named(listen: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(2))
    output = printed("watch", folder, "--listen", listen, code=2)
    assert f"--listen = {listen}: write an address and a port" in output
