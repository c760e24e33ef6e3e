"""Tests that need a real process: connections kept after an error, SIGTERM, exit codes, the command line."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from expertd import __version__
from expertd.service.cli import main
from tests.paths import DEMO
from tests.service.apps import HIDDEN, hidden_request, rows, tiny_settings
from tests.service.held_steps import HeldSteps
from tests.service.http.processes import all_received
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
    made = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
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
    [(b"{", 400), (b"", 400), (bytes(2 << 20), 413), (b"[" * 50_000, 400), ([bytes(64 << 10)] * 32, 413)],
    ids=["broken", "empty", "large", "deep", "large in chunks"],
)
def test_the_connection_survives_an_error(
    connection: http.client.HTTPConnection, body: bytes | list[bytes], status: int
) -> None:
    used = connection.sock
    if isinstance(body, list):
        headers = {"Transfer-Encoding": "chunked"}
        connection.request("POST", INFER, iter(body), headers, encode_chunked=True)
    else:
        connection.request("POST", INFER, body)
    response = connection.getresponse()
    assert response.status == status
    assert json.loads(response.read())["error"]
    check_still_usable(connection, used)


def test_a_refusal_before_the_body_closes_connections_that_expect_100_continue(server: ServerProcess) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {2 << 20}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head.encode())
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


BODIES = [f"POST {INFER}", "PUT /v1/partitions", "POST /v2/repository/index"]


def half_a_body(server: ServerProcess, request: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    sock.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc".encode())
    return sock


def rest(sock: socket.socket) -> bytes:
    answer = b""
    with sock:
        while data := sock.recv(65536):
            answer += data
    return answer


def test_bodies_of_every_route_time_out(tmp_path: Path) -> None:
    """However slowly they come."""
    with server_process(tiny_settings({"body_timeout_seconds": 1}), tmp_path) as server:
        socks, ended = [half_a_body(server, request) for request in BODIES], threading.Event()

        def trickle() -> None:
            while not ended.wait(0.1):
                socks[0].sendall(b"x")

        sender = threading.Thread(target=lambda: suppressed(trickle))
        sender.start()
        for answer in [rest(sock) for sock in socks]:
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b'{"error": "body: expected the whole body within 1 s, got a part of it"}' in answer
            assert b"connection: close" in answer.lower()
        ended.set()
        sender.join()
        assert server.get("/v2/health/ready").status_code == 200


def test_an_incomplete_body_does_not_delay_shutdown(tmp_path: Path) -> None:
    with server_process(tiny_settings(drain_timeout_seconds=600), tmp_path) as server:
        socks = [half_a_body(server, request) for request in BODIES]
        wait_for(lambda: all_received(server), "the heads are read")
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
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(requests)
        answers = b""
        while data := sock.recv(65536):
            answers += data
    positions = [answers.find(f"pipelined-{i}".encode()) for i in range(3)]
    assert positions == sorted(positions)
    assert positions[0] > 0


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
            answers.append(httpx.post(url, content=body, headers=headers, timeout=120, verify=False))

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
            return httpx.post(f"http://{server.url}{INFER}", content=body, timeout=60, verify=False)

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
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, log) == (0, ""), "before any log line"


def test_version() -> None:
    result = new_expertd("--version")
    assert (result.returncode, result.stdout) == (0, f"expertd {__version__}\n")


def test_without_settings_a_demo_layer_is_served(tmp_path: Path) -> None:
    with serving([], tmp_path) as server:
        assert server.get("/v2/models/demo").status_code == 200
        assert "no --model or --config: serving a demo layer of random weights\n" in server.log()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["--port", "http"], {}, "port: expected a valid integer"),
        (
            ["--backend", "tpu"],
            {},
            "backend: expected one of auto, hopper, triton, cpu, reference, got 'tpu'",
        ),
        ([], {"EXPERTD_LIMITS__MAX_BATCH_TOKENS": "0"}, "limits.max_batch_tokens: expected a number greater"),
        ([], {"EXPERTD_COLOUR": "red"}, "environment variable EXPERTD_COLOUR: colour: expected one of "),
        (["--host", "256.1.1.1", "--insecure"], {}, "host: expected a name or address, got '256.1.1.1': "),
        (["--host", "192.0.2.1", "--insecure"], {}, "host: expected an address of this machine, got "),
        (["--layers", "3"], {}, "model: expected --model with --layers, got none"),
        (["--model", "/none"], {}, "/none/config.json: cannot be read: No such file or directory"),
        (
            ["--model", "Qwen/Qwen3-30B-A3B-FP8", "--layers", "0"],
            {},
            "Qwen/Qwen3-30B-A3B-FP8: expected a directory with a checkpoint, got none with that name; "
            "for a model on the Hugging Face hub: "
            "hf download Qwen/Qwen3-30B-A3B-FP8 --local-dir Qwen/Qwen3-30B-A3B-FP8\n",
        ),
        (
            ["--set", "models.0.weights={path: /none.safetensors}"],
            {},
            "/none.safetensors: cannot be read: No such file or directory\n",
        ),
        (
            ["--backend", "hopper"],
            {},
            "backend 'hopper': expected a device that it can run on, got no CUDA device\n",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_prevents_a_start_is_one_sentence(
    arguments: list[str],
    environment: dict[str, str],
    expected: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = [] if {"--model", "--layers"} & set(arguments) else ["--config", str(config)]
    assert main(["serve", "--port", "0", *given, *arguments]) == 2
    error = capsys.readouterr().err
    (line,) = re.findall(r"^expertd: .*\n", error, re.M)
    assert expected in line
    assert error.endswith(line)
    assert "listening" not in error


def test_a_used_port_exits_with_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        result = expertd("serve", "--host", "127.0.0.1", "--port", port, EXPERTD_CONFIG=str(DEMO))
    expected = f"expertd: port: expected a free address, got 127.0.0.1:{port}: Address already in use\n"
    assert (result.returncode, result.stderr) == (2, expected)
