"""Tests that need a real process: connections kept after an error, SIGTERM, exit codes, the command line."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from expertd import __version__
from tests.paths import DEMO
from tests.service.apps import HIDDEN, hidden_request, rows, tiny_settings
from tests.service.held_steps import HeldSteps
from tests.service.processes import (
    EXPERTD,
    ServerProcess,
    clean_environment,
    expertd,
    new_expertd,
    server_process,
    serving,
)
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process each

INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tiny_settings(), tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[http.client.HTTPConnection]:
    made = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    made.connect()
    yield made
    made.close()


def check_still_usable(connection: http.client.HTTPConnection, used: socket.socket) -> None:
    body, length = hidden_request(rows(1))
    connection.request("POST", INFER, body, {"Inference-Header-Content-Length": str(length)})
    response = connection.getresponse()
    assert response.status == 200
    assert len(response.read()) - int(response.headers["Inference-Header-Content-Length"]) == 4 * HIDDEN
    assert connection.sock is used, "the same connection"


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"", 400), (bytes(2 << 20), 413), (b"[" * 50_000, 400)],
    ids=["broken", "empty", "large", "deep"],
)
def test_the_connection_survives_an_error(
    connection: http.client.HTTPConnection, body: bytes, status: int
) -> None:
    used = connection.sock
    connection.request("POST", INFER, body)
    response = connection.getresponse()
    assert response.status == status
    assert json.loads(response.read())["error"]
    check_still_usable(connection, used)


def test_a_chunked_body_past_the_limit(connection: http.client.HTTPConnection) -> None:
    used = connection.sock
    chunks = (bytes(64 * 1024) for _ in range(32))
    connection.request("POST", INFER, chunks, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413
    assert "at most 1048576 bytes" in json.loads(response.read())["error"]
    check_still_usable(connection, used)


def test_a_chunked_body_within_the_limit(connection: http.client.HTTPConnection) -> None:
    body, length = hidden_request(rows(1))
    headers = {"Transfer-Encoding": "chunked", "Inference-Header-Content-Length": str(length)}
    connection.request("POST", INFER, iter([body[:50], body[50:]]), headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()


def test_a_refusal_before_the_body_closes_connections_that_expect_100_continue(server: ServerProcess) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {2 << 20}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(head.encode())
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_a_slow_body_times_out(tmp_path: Path) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    settings = tiny_settings({"body_timeout_seconds": 1})
    with server_process(settings, tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(head.encode())
            answer, ended = b"", threading.Event()

            def trickle() -> None:
                while not ended.wait(0.1):
                    sock.sendall(b"x")

            sender = threading.Thread(target=lambda: suppressed(trickle))
            sender.start()
            while data := sock.recv(65536):
                answer += data
            ended.set()
            sender.join()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body: expected the whole body within 1 s, got a part of it" in answer
        assert b"connection: close" in answer.lower()
        assert server.get("/v2/health/ready").status_code == 200


BODIES = [f"POST {INFER}", "PUT /v1/partitions", "POST /v2/repository/index"]


def half_a_body(server: ServerProcess, request: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    sock.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc".encode())
    return sock


def rest(sock: socket.socket) -> bytes:
    answer = b""
    with sock:
        while data := sock.recv(65536):
            answer += data
    return answer


def test_bodies_of_every_route_time_out(tmp_path: Path) -> None:
    with server_process(tiny_settings({"body_timeout_seconds": 1}), tmp_path) as server:
        for answer in [rest(sock) for sock in [half_a_body(server, request) for request in BODIES]]:
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b'{"error": "body: expected the whole body within 1 s, got a part of it"}' in answer


def test_an_incomplete_body_does_not_delay_shutdown(tmp_path: Path) -> None:
    with server_process(tiny_settings(drain_timeout_seconds=600), tmp_path) as server:
        socks = [half_a_body(server, request) for request in BODIES]
        server.terminate()
        for answer in map(rest, socks):
            assert answer.startswith(b"HTTP/1.1 503 "), answer
            assert b"the body had not arrived" in answer
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log()


def suppressed(work: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the server has closed the connection
        work()


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    requests = b""
    for i in range(3):
        body, length = hidden_request(rows(1), id=f"pipelined-{i}")
        requests += (
            f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            f"Inference-Header-Content-Length: {length}\r\n"
            f"Connection: {'keep-alive' if i < 2 else 'close'}\r\n\r\n"
        ).encode() + body
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(requests)
        answers = b""
        while data := sock.recv(65536):
            answers += data
    positions = [answers.find(f"pipelined-{i}".encode()) for i in range(3)]
    assert positions == sorted(positions)
    assert positions[0] > 0


def test_a_caller_that_disconnects_within_its_body_affects_no_one_else(
    server: ServerProcess, connection: http.client.HTTPConnection
) -> None:
    def left() -> bool:
        return 'expertd_requests_total{model="tiny",status="499"} 1.0' in server.get("/metrics").text

    assert not left()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf".encode())
    wait_for(left, "the server notices")
    check_still_usable(connection, connection.sock)


def test_sigterm_answers_accepted_requests_and_exits_with_0(tmp_path: Path) -> None:
    values, steps = rows(64), HeldSteps(tmp_path)
    body, length = hidden_request(values)
    answers: list[httpx.Response] = []

    settings = tiny_settings({"max_batch_tokens": 64}, drain_timeout_seconds=120)
    with server_process(settings, tmp_path, environment=steps.environment) as server:
        steps.hold()

        def call() -> None:
            headers = {"Inference-Header-Content-Length": str(length)}
            url = f"http://{server.url}{INFER}"
            answers.append(httpx.post(url, content=body, headers=headers, timeout=120))

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        waiting = 'expertd_queue_requests{model="tiny"} 2.0'
        wait_for(lambda: waiting in server.get("/metrics").text, "2 requests wait")
        server.terminate()
        wait_for(lambda: server.get("/v2/health/ready").status_code != 200, "the server is not ready")
        ready = server.get("/v2/health/ready")
        assert ready.status_code == 503
        assert ready.headers["connection"] == "close"
        assert server.get("/v2/health/live").status_code == 200

        def late() -> httpx.Response:
            return httpx.post(f"http://{server.url}{INFER}", content=body, timeout=30)

        # The signal takes effect at the server's next tick (0.1 s); until then this is no JSON.
        wait_for(lambda: late().status_code == 503, "late requests are refused")
        assert late().json() == {"error": "the server is shutting down"}
        steps.release()
        for caller in callers:
            caller.join(timeout=120)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert all(len(answer.content) > values.nbytes for answer in answers)
        assert server.process.wait(timeout=60) == 0
        assert "Traceback" not in server.log()


def test_sigterm_without_requests_and_sigint_exit_with_0(tmp_path: Path) -> None:
    with server_process(tiny_settings(), tmp_path, fork=False) as server:
        server.terminate()
        assert server.process.wait(timeout=60) == 0
        with pytest.raises(httpx.ConnectError):
            server.get("/v2/health/live")


def test_sigterm_does_not_wait_for_an_incomplete_body(tmp_path: Path) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode()
    with (
        server_process(tiny_settings(), tmp_path) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as sender,
    ):
        sender.sendall(head)
        server.get("/v2/health/live")  # once it answers, the server has read the bytes sent before
        server.terminate()
        assert server.process.wait(timeout=10) == 0
        assert b"503 Service Unavailable" in sender.recv(4096)
        assert "Traceback" not in server.log()


def test_sigterm_during_imports_exits_with_0() -> None:
    def caught() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        mask = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(mask >> (signal.SIGTERM - 1) & 1)

    command: list[str | Path] = [EXPERTD, "serve", "--config", DEMO, "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    try:
        wait_for(caught, "there is a handler")
        process.terminate()
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, log) == (0, ""), "before any log line"


def test_version() -> None:
    result = new_expertd("--version")
    assert (result.returncode, result.stdout) == (0, f"expertd {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (("--port", "http"), {}, "port: expected a valid integer"),
        (("--backend", "tpu"), {}, "backend: expected one of auto, hopper, reference, got 'tpu'"),
        (
            (),
            {"EXPERTD_LIMITS__MAX_BATCH_TOKENS": "0"},
            "limits.max_batch_tokens: expected a number greater",
        ),
        (
            (),
            {"EXPERTD_COLOUR": "red"},
            "environment variable EXPERTD_COLOUR: colour: expected one of host, ",
        ),
    ],
)
def test_invalid_settings_exit_with_one_sentence(
    arguments: tuple[str, ...], environment: dict[str, str], expected: str
) -> None:
    result = expertd("serve", "--config", DEMO, *arguments, **environment)
    assert result.returncode == 2
    assert result.stderr.startswith("expertd: ")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_settings_a_demo_layer_is_served(tmp_path: Path) -> None:
    with serving([], tmp_path) as server:
        assert server.get("/v2/models/demo").status_code == 200
        assert "no --model or --config: serving a demo layer of random weights\n" in server.log()


def test_a_used_port_exits_with_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        result = expertd("serve", "--host", "127.0.0.1", "--port", port, EXPERTD_CONFIG=str(DEMO))
    assert result.returncode == 2
    assert (
        result.stderr
        == f"expertd: port: expected a free address, got 127.0.0.1:{port}: Address already in use\n"
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("256.1.1.1", "host: expected a name or address, got '256.1.1.1': "),
        ("192.0.2.1", "host: expected an address of this machine, got 192.0.2.1: "),
    ],
)
def test_an_unusable_host_is_named(host: str, expected: str) -> None:
    result = expertd("serve", "--host", host, "--port", "0", "--insecure", EXPERTD_CONFIG=str(DEMO))
    assert result.returncode == 2
    assert f"expertd: {expected}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "3"), "model: expected --model with --layers, got none"),
        (("--model", "/none"), "/none/config.json: cannot be read: No such file or directory"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_exits_with_one_sentence(
    arguments: tuple[str, ...], message: str
) -> None:
    result = expertd("serve", *arguments)
    assert result.returncode == 2
    assert result.stderr == f"expertd: {message}\n"


def test_a_backend_that_cannot_run_here_ends_the_server(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "backend: hopper\nport: 0\nmodels:\n"
        "  - {name: m, hidden_size: 128, intermediate_size: 128, num_experts: 2, top_k: 1}\n"
    )
    result = expertd("serve", "--config", path, "--host", "127.0.0.1", CUDA_VISIBLE_DEVICES="")
    expected = "backend 'hopper': expected a device that it can run on, got no CUDA device"
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"expertd: {expected}"
    assert "listening" not in result.stderr
