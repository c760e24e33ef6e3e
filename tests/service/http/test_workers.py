"""Several HTTP processes: the same answers and metrics as one, and what happens when one of them ends."""

import os
import re
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.apps import MODEL, NUM_EXPERTS, TOP_K, binary_request, hidden_request, limits_for, rows
from tests.service.http.processes import GOOD, alive, asked, connected, samples, two_processes, workers_of
from tests.service.http.test_fp8 import fp8_request, quantized
from tests.service.http.test_signals import in_a_step
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import ask, connect, head, infer
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process each

LARGE = {**limits_for(4096), "max_body_bytes": 8 << 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("workers")
    shared_memory = {"enabled": True}
    channels = {"socket": str(directory / "channels")}
    several = two_processes(LARGE, shared_memory=shared_memory, channels=channels)
    with server_process(several, directory) as process:
        yield process


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(two_processes(LARGE, http_workers=1), tmp_path_factory.mktemp("one")) as process:
        yield process


def routed(ids: npt.NDArray[Any], datatype: str, num_tokens: int) -> bytes:
    hidden, weights = rows(num_tokens), np.full((num_tokens, TOP_K), 0.5, np.float32)
    tensors = {
        "topk_ids": (datatype, list(ids.shape), ids.tobytes()),
        "topk_weights": ("FP32", list(weights.shape), weights.tobytes()),
        "hidden_states": ("FP32", list(hidden.shape), hidden.tobytes()),
    }
    return infer(*binary_request(tensors, parameters={"binary_data_output": True}))


def ids_of(num_tokens: int) -> npt.NDArray[Any]:
    return np.stack([np.arange(num_tokens) % NUM_EXPERTS, (np.arange(num_tokens) + 1) % NUM_EXPERTS], axis=1)


def test_the_answers_are_those_of_one_process(server: ServerProcess, single: ServerProcess) -> None:
    wide = np.ones((5, 256), np.float32)
    other = binary_request(
        {"hidden_states": ("FP32", [5, 256], wide.tobytes())}, outputs=[{"name": "hidden_states"}], id="json"
    )
    requests = [
        *(infer(*hidden_request(rows(count, count))) for count in (1, 100, 120, 300, 4096)),
        *(infer(*hidden_request(rows(count), parameters={"datatype": "BF16"})) for count in (0, 2)),
        infer(*other).replace(b"/tiny/", b"/other/"),
        infer(*hidden_request(rows(7)), "Accept-Encoding: gzip"),
        *(routed(ids_of(n).astype(np.int64), "INT64", n) for n in (2, 1000)),
        *(routed(ids_of(n).astype(np.int32), "INT32", n) for n in (2, 1000)),
        routed(np.full((2, 2), 1), "INT64", 2),
        routed(np.full((2, 2), NUM_EXPERTS + 2**32), "INT64", 2),
        routed(np.full((2, 2), -1, np.int32), "INT32", 2),
        infer(*fp8_request(*quantized(5)[:2])),
        infer(b"{", 1),
        GOOD.replace(b"/tiny/", b"/nobody/"),
    ]
    with ExitStack() as stack:
        socks = connected(stack, server, 4)
        alone = stack.enter_context(connect(single.port))
        for request in requests:
            expected = asked(alone, request)
            for sock in socks:
                answer = asked(sock, request)
                assert (answer.status, answer.body) == (expected.status, expected.body)
                assert answer.headers.keys() == expected.headers.keys()


def test_all_other_calls_are_passed_through(server: ServerProcess, single: ServerProcess) -> None:
    paths = (
        "/v2/health/live",
        "/v2/models/tiny",
        "/v2/models/other/ready",
        "/openapi.json",
        "/docs",
        "/no",
        "/docs/swagger-ui.css",
        "/v1/partitions",
        "/v2/models/nobody",
    )
    with (
        httpx.Client(base_url=f"http://{server.url}", timeout=60) as many,
        httpx.Client(base_url=f"http://{single.url}", timeout=60) as one,
    ):
        for path in paths:
            for method in ("GET", "HEAD", "DELETE", "OPTIONS"):
                expected, got = one.request(method, path), many.request(method, path)
                assert (got.status_code, got.content) == (expected.status_code, expected.content), path
                assert got.headers.keys() == expected.headers.keys()
        body = b'{"ready": true}'
        index = many.post("/v2/repository/index", content=body)
        assert [entry["name"] for entry in index.json()] == ["tiny", "other"]
        assert (
            many.post("/v2/repository/index", content=iter([b'{"ready"', b": true}"])).json() == index.json()
        )
        for wrong in (b"{", bytes(70_000)):
            expected, got = (each.post("/v2/repository/index", content=wrong) for each in (one, many))
            assert (got.status_code, got.content) == (expected.status_code, expected.content)
        assert 'expertd_model_ready{model="other"} 1.0' in many.get("/metrics").text
        assert many.get("/v1/channels").json() == {"channels": []}, (
            "those of the HTTP processes are not shown"
        )
        opened = many.post(
            "/v1/channels", json={"version": 3, "models": ["tiny", "other"], "num_slots": 1, "max_tokens": 4}
        )
        assert opened.json()["models"] == ["tiny", "other"]
        assert many.delete(f"/v1/channels/{opened.json()['id']}").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        head("GET /v2 HTTP/1.1", "Connection: close"),
        head("GET /docs HTTP/1.1", "Connection: close"),
        head("GET /none HTTP/1.1", "Connection: close"),
        infer(*hidden_request(rows(1)), "Connection: close"),
        b"no request\r\n\r\n",
    ],
    ids=["passed on", "page", "none", "infer", "refused"],
)
def test_every_response_has_the_headers_for_browsers_once(server: ServerProcess, data: bytes) -> None:
    with connect(server.port) as sock:
        sock.sendall(data)
        received = b""
        while piece := sock.recv(1 << 20):
            received += piece
    lines = received.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")[1:]
    for expected in ("x-content-type-options: nosniff", "cache-control: no-store"):
        name = expected.partition(":")[0]
        assert [line for line in lines if line.startswith(f"{name}:")] == [expected]
    policies = [line for line in lines if line.startswith("content-security-policy: ")]
    assert len(policies) == (b"/docs" in data)
    assert all("frame-ancestors 'none'" in policy for policy in policies)


def test_metrics_are_sums_over_the_processes(tmp_path: Path) -> None:
    with server_process(two_processes(), tmp_path) as server, ExitStack() as stack:
        socks = connected(stack, server, 4)
        sent = samples(server, "requests_total").get(("tiny", "200"), 0)

        def counted() -> tuple[float, ...]:
            requests = samples(server, "requests_total")
            refused = samples(server, "refusals_total")
            keys = (("tiny", "200"), ("tiny", "400"), ("", "404"), ("tiny", "499"))
            seconds = samples(server, "request_seconds_count")
            return (
                *(requests.get(key, 0) for key in keys),
                refused.get(("tiny", "invalid_request"), 0),
                refused.get(("tiny", "client_gone"), 0),
                sum(samples(server, "connection_refusals_total").values()),
                sum(seconds.values()),
            )

        for count, sock in enumerate(socks):
            for _ in range(count + 1):
                assert asked(sock, GOOD).status == 200
            assert asked(sock, infer(b"{", 1)).status == 400
            assert asked(sock, GOOD.replace(b"/tiny/", b"/nobody/")).status == 404
        assert ask(server.port, b"nonsense\r\n\r\n")[0].status == 400
        for sock in socks[2:]:
            sock.sendall(GOOD[:-10])
            sock.close()
        expected = (sent + 10, 4, 4, 2, 4, 2, 1, sent + 10)
        wait_for(lambda: counted() == expected, f"{expected}")
        before = set(workers_of(server))
        os.kill(min(before), signal.SIGKILL)
        wait_for(lambda: len(set(workers_of(server)) - before) == 1, "it is replaced")
        assert counted() == expected, "counters never go back"
        (statistics,) = httpx.get(f"http://{server.url}/v2/models/tiny/stats", timeout=60).json()[
            "model_stats"
        ]
        outcomes = {name: statistics["inference_stats"][name]["count"] for name in ("success", "fail")}
        assert outcomes == {"success": sent + 10, "fail": 4 + 2}
        assert statistics["inference_count"] == 3 * (sent + 10)
        families = text_string_to_metric_families(server.get("/metrics").text)
        assert len({family.name for family in families}) == len(
            re.findall("^# TYPE", server.get("/metrics").text, re.M)
        )


def test_models_are_loaded_and_unloaded_behind_the_processes(server: ServerProcess) -> None:
    with ExitStack() as stack:
        socks = connected(stack, server, 4)
        expected = [asked(sock, GOOD).body for sock in socks]
        base = f"http://{server.url}/v2/repository/models/tiny"
        for _ in range(2):
            assert httpx.post(f"{base}/unload", timeout=60).status_code == 200
            refused = [asked(sock, GOOD) for sock in socks]
            assert [answer.status for answer in refused] == [404] * 4
            assert b"model tiny: expected a loaded one, got it unloaded" in refused[0].body
            assert httpx.get(f"http://{server.url}/v2/models/tiny", timeout=60).status_code == 404
            assert httpx.post(f"{base}/load", timeout=60).status_code == 200
            assert [asked(sock, GOOD).body for sock in socks] == expected


def channels_of(server: ServerProcess) -> int:
    return Path(f"/proc/{server.process.pid}/maps").read_text().count("/memfd:expertd-channel")


def test_a_killed_process_costs_only_its_own_connections(tmp_path: Path) -> None:
    limits = {"max_request_tokens": 256, "max_body_bytes": 1 << 20}
    with server_process(two_processes(limits), tmp_path) as server, ExitStack() as stack:
        socks = connected(stack, server, 8)
        for sock in connected(stack, server, 4):
            sock.sendall(infer(*hidden_request(rows(256)))[:-1])
        wait_for(lambda: len(samples(server, "buffered_bytes")) == 2, "both have bodies in their memory")
        before, memory = workers_of(server), channels_of(server)
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: len(samples(server, "buffered_bytes")) == 1, "its bodies are gone")
        survivors = []
        for sock in socks:
            try:
                answer = asked(sock, GOOD)
            except (OSError, AssertionError):
                continue
            assert answer.status == 200
            survivors.append(sock)
        assert len(survivors) == 4, "those of the other process"
        wait_for(lambda: len(workers_of(server)) == 2, "it is replaced")
        assert "HTTP process" in server.log()
        assert "ended with exit code -9: starting another" in server.log()
        assert before[1] in workers_of(server)
        connected(stack, server, 2)
        wait_for(lambda: channels_of(server) == memory, "its channel's memory is freed")
        server.terminate()
        assert server.process.wait(60) == 0


def folder_of(server: ServerProcess) -> Path:
    """Where the socket between the processes is."""
    files = {str(file.readlink()) for file in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {Path(line[7]) for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in files}
    (path,) = (path for path in named if path.name == "engine")
    return path.parent


def test_the_processes_end_with_the_main_one(tmp_path: Path) -> None:
    with server_process(two_processes(), tmp_path) as server:
        workers = workers_of(server)
        folder = folder_of(server)
        assert folder.name.startswith("expertd-")
        assert folder.stat().st_mode & 0o777 == 0o700
        server.process.kill()
        wait_for(lambda: not any(map(alive, workers)), "they end, without a drain")
        wait_for(lambda: not folder.exists(), "nothing is left")


def test_a_process_that_is_signalled_alone_goes_on(server: ServerProcess) -> None:
    with ExitStack() as stack:
        os.kill(workers_of(server)[0], signal.SIGTERM)
        for sock in connected(stack, server, 8):
            assert "connection" not in asked(sock, GOOD).headers
        assert "HTTP process" not in server.log(), "none has ended"


def test_after_the_drain_nobody_can_connect(tmp_path: Path) -> None:
    """A client that does not read its answer keeps the processes."""
    large = memoryview(infer(*hidden_request(np.ones((64, 1024), np.float32))))
    settings = two_processes(models=[{**MODEL, "hidden_size": 1024}], drain_timeout_seconds=600)
    with server_process(settings, tmp_path) as server, connect(server.port, 4096) as sock:
        sent = 0
        while select.select([], [sock], [], 2)[1]:  # until it reads no more: its answers are not read
            sent += sock.send(large[sent % len(large) :])

        def is_refused() -> bool:
            try:
                connect(server.port).close()
            except ConnectionRefusedError:
                return True
            return False

        server.terminate()
        wait_for(is_refused, "new connections are refused")
        assert server.process.poll() is None, "it has not ended"


@pytest.mark.thorough
def test_a_process_that_is_killed_during_the_drain_is_in_the_log(tmp_path: Path) -> None:
    with in_a_step(tmp_path, 2, drain_timeout_seconds=2) as (server, _, _):
        worker = workers_of(server)[0]
        server.terminate()
        wait_for(lambda: "shutting down" in server.log(), "the signal took effect")
        os.kill(worker, signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert re.search("ERROR .*HTTP process [01] ended with exit code -9$", server.log(), re.M)
