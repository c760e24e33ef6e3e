"""Which input a connection accepts or refuses, and the order of its responses, over raw sockets."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from expertd.service.http.request_head import Heads
from expertd.service.http.responses import RefusedError
from expertd.service.settings.parts import Limits
from tests.service.apps import HIDDEN, hidden_request, rows, tiny_settings
from tests.service.http.processes import samples
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import INFER, ask, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process

LIVE = head("GET /v2/health/live HTTP/1.1")
LAST = head("GET /v2/health/live HTTP/1.1", "Connection: close")


@contextmanager
def everything(directory: Path, http_workers: int) -> Iterator[ServerProcess]:
    """A server with channels and shared memory."""
    channels = {"socket": str(directory / "channels")}
    settings = tiny_settings(http_workers=http_workers, channels=channels, shared_memory={"enabled": True})
    with server_process(settings, directory) as process:
        yield process
        for word in ("Traceback", "WebSocket", "upgrade", "Invalid HTTP"):
            assert word not in process.log()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with everything(tmp_path_factory.mktemp("one"), 1) as process:
        yield process


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with everything(tmp_path_factory.mktemp("several"), 2) as process:
        yield process


@pytest.fixture(params=["server", "several"])
def control_server(request: pytest.FixtureRequest) -> ServerProcess:
    found: ServerProcess = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(
    ("protocol", "pieces"), [("h2c", 1), ("websocket", 2), ("TLS/1.0, other", 3), ("websocket", 3)]
)
def test_an_upgrade_is_ignored(server: ServerProcess, protocol: str, pieces: int) -> None:
    body, length = hidden_request(rows(1))
    request = infer(body, length, "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}")
    with connect(server.port) as sock:
        cut = {1: [], 2: [len(request) - len(body)], 3: [40, len(request) - 7]}[pieces]
        for begin, end in zip([0, *cut], [*cut, len(request)], strict=True):
            sock.sendall(request[begin:end])
            server.get("/v2/health/live")  # once it answers, the server has read the piece
        answer = read_answer(sock)
        assert answer.status == 200
        assert len(answer.body) - int(answer.headers["inference-header-content-length"]) == 4 * HIDDEN
        sock.sendall(LAST)
        assert [after.status for after in read_to_end(sock)] == [200], "the same connection"


def test_a_body_after_an_upgrade_is_not_parsed_as_a_request(server: ServerProcess) -> None:
    inside = head("PUT /v1/partitions HTTP/1.1", "Content-Length: 2") + b"{}"
    upgrade = ("Connection: Upgrade", "Upgrade: h2c", f"Content-Length: {len(inside)}")
    request = head(f"POST {INFER} HTTP/1.1", *upgrade) + inside
    first, second, third = ask(server.port, request + request + LAST)
    assert "JSON" in first.error
    assert (first.status, second.status) == (400, 400)
    assert json.loads(third.body) == {"live": True}


def test_thousands_of_upgrades_at_once(server: ServerProcess) -> None:
    one = head("GET /v2/health/live HTTP/1.1", "Connection: Upgrade", "Upgrade: h2c")
    got = ask(server.port, 3000 * one + LAST)
    assert [answer.status for answer in got] == [200] * 3001


def test_connect_is_refused_and_nothing_after_it_is_executed(server: ServerProcess) -> None:
    (answer,) = ask(server.port, head("CONNECT other:80 HTTP/1.1") + LAST)
    assert (answer.status, answer.error) == (501, "method: expected one of this API, got CONNECT")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (head("GET /v2 HTTP/1.1", host=None), 400, "Host: expected one header, got none"),
        (head("GET /v2 HTTP/1.1", "Host: y"), 400, "Host: expected one header, got 2"),
        (head("GET /v2 HTTP/1.0", "Host: y"), 400, "Host: expected one header, got 2"),
        (head("POST /v2 HTTP/1.1", "Transfer-Encoding: chunked", "Content-Length: 5"), 400, "Content-Length"),
        (head("POST /v2 HTTP/1.1", "Transfer-Encoding: gzip, chunked"), 501, "chunked, got 'gzip, chunked'"),
        (
            head("POST /v2 HTTP/1.0", "Transfer-Encoding: chunked"),
            400,
            "HTTP version: expected 1.1 with Transfer",
        ),
        (
            head("GET http://x:99999/ HTTP/1.1"),
            400,
            "target: expected a path or a URL, got 'http://x:99999/'",
        ),
        (b"\x16\x03\x01\x02\x00\x01", 400, "request: expected HTTP/1.1, got invalid input: "),
    ],
)
def test_ambiguous_and_invalid_requests_are_refused(
    server: ServerProcess, data: bytes, status: int, text: str
) -> None:
    (answer,) = ask(server.port, data + b"0\r\n\r\n" + LIVE)
    assert answer.status == status
    assert text in answer.error
    assert answer.headers["connection"] == "close"
    assert server.get("/v2/health/live").status_code == 200


def test_http_1_0_without_host_is_answered_and_closed(server: ServerProcess) -> None:
    (answer,) = ask(server.port, head("GET /v2/health/live HTTP/1.0", host=None))
    assert answer.status == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://x/v2/health/live", 200),
        ("http://x/v2/health/live?a=b", 200),
        ("http://x", 200),  # the page
        ("*", 404),
        ("/v2/health/l%69ve", 200),
        ("/v2%2Fhealth/live", 404),
        ("/v2%2fhealth/live", 404),
        ("/v1%2Fpartitions", 404),
        ("/v2/models/ti%2Fny", 404),
        ("/v1/partitions", 409),
    ],
)
def test_targets(server: ServerProcess, target: str, status: int) -> None:
    (answer,) = ask(server.port, head(f"GET {target} HTTP/1.1", "Connection: close"))
    assert answer.status == status
    if status == 404 and "%" in target:
        name = target.removeprefix("/v2/models/").lower()
        assert answer.error.lower().endswith(f"got '{name}'")


def test_heads_beyond_the_limits_get_431(server: ServerProcess) -> None:
    many = [f"X-{i}: y" for i in range(99)]
    assert ask(server.port, head("GET /v2 HTTP/1.1", "Connection: close", *many[1:]))[0].status == 200
    (answer,) = ask(server.port, head("GET /v2 HTTP/1.1", "Connection: close", *many))
    assert (answer.status, answer.error) == (431, "headers: expected at most 100, got 101")
    for request in (head("GET /v2 HTTP/1.1", f"X: {'y' * 65536}"), head(f"GET /{'y' * 65536} HTTP/1.1")):
        (answer,) = ask(server.port, request)
        assert answer.status == 431
        text = "request line and headers: expected at most 65536 bytes, got (at least )?65[0-9]+"
        assert re.fullmatch(text, answer.error)
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("piece", [b"y" * 4096, b"a: b\r\n" * 50], ids=["one", "many"])
@pytest.mark.parametrize(
    "before",
    [
        b"GET /v2 HTTP/1.1\r\nX: z",
        head(f"POST {INFER} HTTP/1.1", "Transfer-Encoding: chunked") + b"0\r\nX: z",
    ],
    ids=["headers", "trailers"],
)
def test_endless_headers_are_refused_while_they_arrive(
    server: ServerProcess, before: bytes, piece: bytes
) -> None:
    with connect(server.port) as sock:
        sock.sendall(before)
        sent = 0
        sock.setblocking(False)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(piece)
            try:
                data = sock.recv(65536)
                break
            except BlockingIOError:
                pass
        assert data.startswith(b"HTTP/1.1 431 ")
        assert b'{"error"' in data
        assert sent < 16 << 20
        sock.settimeout(60)
        assert sock.recv(65536) == b"", "the connection is closed without another response"


def test_the_limits_of_a_head_are_settings() -> None:
    heads = Heads(Limits(max_header_bytes=1024, max_headers=2))
    whole = head("GET / HTTP/1.1", f"A: {'y' * (1024 - len(head('GET / HTTP/1.1', 'A: ')))}")
    assert heads.parse(whole).raw_path == b"/"
    with pytest.raises(RefusedError, match="at most 1024 bytes, got 1025"):
        heads.parse(whole.replace(b"/ ", b"/y ", 1))
    with pytest.raises(RefusedError, match="headers: expected at most 2, got 3"):
        heads.parse(head("GET / HTTP/1.1", "A: y", "B: "))


def test_a_refusal_follows_the_pending_responses_and_nothing_the_last_request(server: ServerProcess) -> None:
    request = infer(*hidden_request(rows(1)))
    got = ask(server.port, request + LIVE + request + b"nonsense\r\n\r\n" + LIVE)
    assert [answer.status for answer in got] == [200, 200, 200, 400]
    assert [answer.status for answer in ask(server.port, LAST + LIVE + LIVE)] == [200]
    for wrong, status in ((head("GET /v2 HTTP/1.2"), 505), (head("GET /v2 HTTP/1.1", "Host: y"), 400)):
        # It is parsed while the application handles the exception of the request before.
        first, second = ask(server.port, head("GET /v1/partitions HTTP/1.1") + wrong)
        assert (first.status, second.status) == (409, status)


def test_a_refused_head_request_gets_no_body(server: ServerProcess) -> None:
    with connect(server.port) as sock:
        sock.sendall(head("HEAD /v2 HTTP/3.0"))
        data = sock.recv(65536)
        assert data.startswith(b"HTTP/1.1 505 ")
        assert data.endswith(b"\r\n\r\n")
        assert sock.recv(65536) == b""


def counted(server: ServerProcess, status: int) -> float:
    return samples(server, "requests_total").get(("tiny", str(status)), 0)


def test_an_invalid_body_is_refused_and_counted_as_400(server: ServerProcess) -> None:
    before = counted(server, 400)
    request = head(f"POST {INFER} HTTP/1.1", "Transfer-Encoding: chunked") + b"4\r\nabcd\r\nnonsense\r\n"
    (answer,) = ask(server.port, request)
    assert answer.status == 400
    assert answer.error.startswith("request: expected HTTP/1.1, got invalid input: ")
    wait_for(lambda: counted(server, 400) == before + 1, "it is counted")


CONTROL_CALLS = (
    "PUT /v1/partitions",
    "POST /v1/channels",
    "POST /v2/systemsharedmemory/region/mine/register",
    "POST /v2/cudasharedmemory/region/mine/register",
    "POST /v2/repository/index",
)


@pytest.mark.parametrize("call", CONTROL_CALLS)
@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"10001\r\n", 413, "body: expected at most 65536 bytes, got at least 65537"),
        (b"fffffffffffffff\r\n", 413, f"body: expected at most 65536 bytes, got at least {16**15 - 1}"),
        (b"1\r\n \r\n10000\r\n", 413, "body: expected at most 65536 bytes, got at least 65537"),
        (b"4\r\nabcd\r\n-1\r\n", 400, "a chunk size that is no number"),
        (b"4\r\nabcdef\r\n", 400, "bytes after a chunk"),
        (b"2\r\n{}\r\n0\r\nno header\r\n\r\n", 400, "a trailer that is no header"),
    ],
)
def test_a_wrong_chunk_of_a_control_call_is_refused_at_once(
    control_server: ServerProcess, call: str, body: bytes, status: int, text: str
) -> None:
    """Before the rest of it arrives."""
    with connect(control_server.port) as sock:
        sock.sendall(head(f"{call} HTTP/1.1", "Transfer-Encoding: chunked") + body)
        answer = read_answer(sock)
        assert (answer.status, answer.error.endswith(text)) == (status, True), answer.error
    assert [after.status for after in ask(control_server.port, LAST)] == [200]


def test_the_largest_body_of_a_control_call_is_read(control_server: ServerProcess) -> None:
    body = b" " * (64 * 1024)
    for chunks in (b"10000\r\n" + body + b"\r\n", (b"800\r\n" + body[:2048] + b"\r\n") * 32):
        request = head("POST /v1/channels HTTP/1.1", "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"
        answer, after = ask(control_server.port, request + LAST)
        assert (answer.status, after.status) == (400, 200)
        assert "expected JSON" in answer.error


def test_an_incomplete_body_at_the_end_counts_as_499(server: ServerProcess) -> None:
    before = counted(server, 499)
    request = infer(*hidden_request(rows(1)))
    for whole in (0, 1):
        with connect(server.port) as sock:
            sock.sendall(whole * request + request[:-1])
            for _ in range(whole):
                assert read_answer(sock).status == 200
    wait_for(lambda: counted(server, 499) == before + 2, "both are counted")


def test_refusals_of_connections_are_counted(server: ServerProcess) -> None:
    def refusals() -> dict[tuple[str, ...], float]:
        return samples(server, "connection_refusals_total")

    for request, status in (
        (b"GET /v2 HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (head("GET /v2 HTTP/1.1", *(f"X-{number}: 1" for number in range(101))), 431),
    ):
        before = refusals()
        (answer,) = ask(server.port, request)
        assert answer.status == status
        assert refusals() == before | {(str(status),): before.get((str(status),), 0) + 1}


def test_a_response_to_head_has_no_body(server: ServerProcess) -> None:
    requests = head("HEAD /openapi.json HTTP/1.1") + head("GET /v2 HTTP/1.1", "Connection: close")
    with connect(server.port) as sock:
        sock.sendall(requests)
        received = b""
        while data := sock.recv(1 << 16):
            received += data
    first, _, rest = received.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert rest.startswith(b"HTTP/1.1 200 "), "the next response follows at once"
