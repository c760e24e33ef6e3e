"""Several HTTP processes: the same answers and metrics as one, and what happens when processes end."""

import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertd.service.settings.model import Settings
from tests.service.apps import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, binary_request, hidden_request, rows
from tests.service.apps import tiny_settings as one_process
from tests.service.processes import ServerProcess, clean_environment, server_process
from tests.service.shm import segment
from tests.service.sockets import INFER, Answer, ask, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process each

OTHER = {**MODEL, "name": "other", "hidden_size": 256, "datatype": "BF16"}
GOOD = infer(*hidden_request(rows(3)))
LARGE = {
    "max_request_tokens": 4096,
    "max_batch_tokens": 4096,
    "max_queue_tokens": 65536,
    "max_body_bytes": 8 << 20,
}


def settings(limits: dict[str, float] | None = None, **changes: object) -> Settings:
    return one_process(limits, **{"http_workers": 2, "models": [MODEL, OTHER], **changes})


def workers_of(server: ServerProcess) -> list[int]:
    """The process ids of the HTTP processes."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"http.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def samples(server: ServerProcess, name: str) -> dict[tuple[str, ...], float]:
    """Values other than 0 by the values of their labels."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        tuple(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"expertd_{name}" and sample.value
    }


def both(stack: ExitStack, server: ServerProcess) -> list[socket.socket]:
    """Four connections, two to each process, once every process has its channel."""
    socks = [stack.enter_context(connect(server.port)) for _ in range(4)]
    for sock in socks:
        wait_for(lambda sock=sock: _asked(sock, GOOD).status == 200, "the process has its channel")  # type: ignore[misc]
    return socks


def _asked(sock: socket.socket, request: bytes) -> Answer:
    sock.sendall(request)
    return read_answer(sock)


def output_of(answer: Answer) -> bytes:
    assert answer.status == 200, answer.body
    return answer.body[int(answer.headers["inference-header-content-length"]) :]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("workers")
    shared_memory = {"enabled": True}
    channels = {"socket": str(directory / "channels")}
    several = settings(LARGE, shared_memory=shared_memory, channels=channels)
    with server_process(several, directory) as process:
        yield process


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(settings(LARGE, http_workers=1), tmp_path_factory.mktemp("one")) as process:
        yield process


def routed(ids: np.ndarray, datatype: str, num_tokens: int) -> bytes:
    hidden, weights = rows(num_tokens), np.full((num_tokens, TOP_K), 0.5, np.float32)
    tensors = {
        "topk_ids": (datatype, list(ids.shape), ids.tobytes()),
        "topk_weights": ("FP32", list(weights.shape), weights.tobytes()),
        "hidden_states": ("FP32", list(hidden.shape), hidden.tobytes()),
    }
    return infer(*binary_request(tensors, parameters={"binary_data_output": True}))


def ids_of(num_tokens: int) -> np.ndarray:
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
        infer(b"{", 1),
        GOOD.replace(b"/tiny/", b"/nobody/"),
    ]
    with ExitStack() as stack:
        socks = both(stack, server)
        alone = stack.enter_context(connect(single.port))
        for request in requests:
            expected = _asked(alone, request)
            for sock in socks:
                answer = _asked(sock, request)
                assert (answer.status, answer.body) == (expected.status, expected.body)
                assert answer.headers.keys() == expected.headers.keys()


def test_all_other_calls_are_passed_through(server: ServerProcess, single: ServerProcess) -> None:
    same = (
        "/v2",
        "/v2/health/live",
        "/v2/models/tiny",
        "/v2/models/other/ready",
        "/openapi.json",
        "/docs",
        "/no",
    )
    with (
        httpx.Client(base_url=f"http://{server.url}") as many,
        httpx.Client(base_url=f"http://{single.url}") as one,
    ):
        for path in (*same[1:], "/docs/swagger-ui.css", "/v1/partitions", "/v2/models/nobody"):
            for method in ("GET", "HEAD", "DELETE"):
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
            "/v1/channels", json={"models": ["tiny", "other"], "num_slots": 1, "max_tokens": 4}
        )
        assert opened.json()["models"] == ["tiny", "other"]
        assert many.delete(f"/v1/channels/{opened.json()['id']}").status_code == 200


def test_requests_that_name_regions_are_answered(server: ServerProcess) -> None:
    values = rows(3)
    place = {"shared_memory_region": "workers", "shared_memory_byte_size": values.nbytes}
    entry = {"name": "hidden_states", "datatype": "FP32", "shape": [3, HIDDEN], "parameters": place}
    written = {"name": "hidden_states", "parameters": {**place, "shared_memory_offset": values.nbytes}}
    url = f"http://{server.url}"
    with segment(2 * values.nbytes) as (key, memory):
        memory[: values.nbytes] = values.tobytes()
        body = {"key": key, "offset": 0, "byte_size": 2 * values.nbytes}
        path = f"{url}/v2/systemsharedmemory/region/workers"
        assert httpx.post(f"{path}/register", json=body).status_code == 200
        before = samples(server, "requests_total").get(("tiny", "200"), 0)
        answer = httpx.post(f"{url}{INFER}", json={"inputs": [entry], "outputs": [written]})
        assert answer.status_code == 200, answer.text
        with connect(server.port) as sock:
            expected = output_of(_asked(sock, infer(*hidden_request(values))))
        assert bytes(memory[values.nbytes :]) == expected
        wait_for(
            lambda: samples(server, "requests_total")["tiny", "200"] == before + 2, "each is counted once"
        )
        assert httpx.post(f"{path}/unregister").status_code == 200
        unknown = httpx.post(f"{url}{INFER}", json={"inputs": [entry]})
        assert unknown.status_code == 400


def test_metrics_are_sums_over_the_processes(tmp_path: Path) -> None:
    with server_process(settings(), tmp_path) as server, ExitStack() as stack:
        socks = both(stack, server)
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
                assert _asked(sock, GOOD).status == 200
            assert _asked(sock, infer(b"{", 1)).status == 400
            assert _asked(sock, GOOD.replace(b"/tiny/", b"/nobody/")).status == 404
        assert ask(server.port, b"nonsense\r\n\r\n")[0].status == 400
        for sock in socks[2:]:
            sock.sendall(GOOD[:-10])
            sock.close()
        expected = (sent + 10, 4, 4, 2, 4, 2, 1, sent + 20)
        wait_for(lambda: counted() == expected, f"{expected}")
        before = set(workers_of(server))
        os.kill(min(before), signal.SIGKILL)
        wait_for(lambda: len(set(workers_of(server)) - before) == 1, "it is replaced")
        assert counted() == expected, "counters never go back"
        families = text_string_to_metric_families(server.get("/metrics").text)
        assert len({family.name for family in families}) == len(
            re.findall("^# TYPE", server.get("/metrics").text, re.M)
        )


def test_a_killed_process_costs_only_its_own_connections(tmp_path: Path) -> None:
    def channels() -> int:
        return Path(f"/proc/{server.process.pid}/maps").read_text().count("/memfd:expertd-channel")

    with server_process(settings(), tmp_path) as server, ExitStack() as stack:
        socks = both(stack, server)
        before, memory = workers_of(server), channels()
        os.kill(before[0], signal.SIGKILL)
        survivors = []
        for sock in socks:
            try:
                answer = _asked(sock, GOOD)
            except (OSError, AssertionError):
                continue
            assert answer.status == 200
            survivors.append(sock)
        assert len(survivors) == 2, "connections are spread evenly"
        wait_for(lambda: len(workers_of(server)) == 2, "it is replaced")
        assert "HTTP process" in server.log()
        assert "ended with exit code -9: starting another" in server.log()
        assert before[1] in workers_of(server)
        new = [stack.enter_context(connect(server.port)) for _ in range(2)]
        for sock in new:
            wait_for(lambda sock=sock: _asked(sock, GOOD).status == 200, "the new process answers")  # type: ignore[misc]
        wait_for(lambda: channels() == memory, "its channel's memory is freed")
        server.terminate()
        assert server.process.wait(30) == 0


def test_connections_are_spread_evenly(server: ServerProcess) -> None:
    def sockets(pid: int) -> int:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()]
        return sum(link.startswith("socket:") for link in links)

    first, second = workers_of(server)
    before = sockets(first), sockets(second)
    with ExitStack() as stack:
        for _ in range(40):
            sock = stack.enter_context(connect(server.port))
            sock.sendall(head("GET /v2/health/live HTTP/1.1"))
            read_answer(sock)
        added = sockets(first) - before[0], sockets(second) - before[1]
    assert abs(added[0] - added[1]) <= 4


def test_the_processes_end_with_the_main_one(tmp_path: Path) -> None:
    with server_process(settings(), tmp_path) as server:
        workers = workers_of(server)
        folder = Path(os.readlink(f"/proc/{workers[0]}/fd/0").partition(" ")[0]).parent
        assert folder.name.startswith("expertd-")
        assert folder.stat().st_mode & 0o777 == 0o700
        server.process.kill()
        wait_for(lambda: not any(map(alive, workers)), "they end", seconds=1.5)
        wait_for(lambda: not folder.exists(), "nothing is left")


SLOW_TOKENS = 2048
SLOW = {**MODEL, "hidden_size": 1024, "intermediate_size": 8192, "top_k": 4}
SLOW_LIMITS = {
    "max_request_tokens": SLOW_TOKENS,
    "max_batch_tokens": SLOW_TOKENS,
    "max_queue_tokens": 64 * SLOW_TOKENS,
    "max_body_bytes": 64 << 20,
}


def in_a_slow_step(
    stack: ExitStack, directory: Path, **more: object
) -> tuple[ServerProcess, list[socket.socket]]:
    """A server in a step for one of five clients, while the others' requests wait."""
    several = settings(SLOW_LIMITS, models=[SLOW], **more)
    server = stack.enter_context(server_process(several, directory))
    small = infer(*hidden_request(np.ones((1, 1024), np.float32)))
    socks = [stack.enter_context(connect(server.port)) for _ in range(5)]
    for sock in socks:
        wait_for(lambda sock=sock: _asked(sock, small).status == 200, "the process has its channel")  # type: ignore[misc]
    request = infer(*hidden_request(np.ones((SLOW_TOKENS, 1024), np.float32)))
    for sock in socks:
        sock.sendall(request)
    done = 'expertd_batch_tokens_sum{layout="contiguous",model="tiny"} 5.0'
    assert done in server.get("/metrics").text
    wait_for(lambda: received(server) == 5 * len(request), "all have sent their requests")
    return server, socks


def received(server: ServerProcess) -> int:
    """Bytes of large bodies: all five when every one has been received in full."""
    for pid in workers_of(server):
        links = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        port = f":{server.port:04X}"
        for line in links:
            fields = line.split()
            if fields[1].endswith(port) and fields[3] == "01" and not fields[4].endswith(":00000000"):
                return 0
    return 5 * len(infer(*hidden_request(np.ones((SLOW_TOKENS, 1024), np.float32))))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_answers_everything_accepted(tmp_path: Path, number: signal.Signals) -> None:
    with ExitStack() as stack:
        server, socks = in_a_slow_step(stack, tmp_path, drain_timeout_seconds=120)
        idle = stack.enter_context(connect(server.port))
        server.process.send_signal(number)
        with connect(server.port) as sock:
            sock.sendall(head("GET /v2/health/ready HTTP/1.1"))
            (ready,) = read_to_end(sock)
            assert (ready.status, ready.headers["connection"]) == (503, "close")
        for sock in socks:
            sock.settimeout(120)
            (answer,) = read_to_end(sock)
            assert answer.status == 200, answer.body
            assert answer.headers["connection"] == "close"
        assert read_to_end(idle) == []
        assert server.process.wait(60) == 0
        for word in ("Traceback", "ERROR"):
            assert word not in server.log()


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server, socks = in_a_slow_step(stack, tmp_path)
        workers = workers_of(server)
        server.terminate()
        wait_for(lambda: "shutting down" in server.log(), "the first signal took effect")
        started = time.monotonic()
        server.terminate()
        answers = [answer for sock in socks for answer in read_to_end(sock)]
        assert [answer.status for answer in answers].count(503) >= 3
        assert all(
            answer.error == "the server was stopped before the response was ready"
            for answer in answers
            if answer.status == 503
        )
        assert server.process.wait(30) == 1
        assert time.monotonic() - started < 5
        wait_for(lambda: not any(map(alive, workers)), "they end", seconds=2)
        assert "Traceback" not in server.log()


def test_load_during_a_drain_loses_nothing(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def call(port: int) -> None:
        """Ask until the server ends the connection, which it announces."""
        while True:
            try:
                sock = connect(port)
            except ConnectionRefusedError:
                return
            with sock:
                try:
                    while True:
                        answer = _asked(sock, GOOD)
                        outcomes.append(str(answer.status))
                        if answer.headers.get("connection") == "close":
                            break
                except (OSError, AssertionError) as error:
                    # An accepted connection that ends without an answer to its first request is none.
                    outcomes.append(f"lost: {error}" if answer_is_due(sock) else "closed")

    def answer_is_due(sock: socket.socket) -> bool:
        return False

    with server_process(settings(shutdown_delay_seconds=0.5), tmp_path) as server:
        callers = [threading.Thread(target=call, args=(server.port,)) for _ in range(8)]
        for caller in callers:
            caller.start()
        wait_for(lambda: outcomes.count("200") > 200, "there is load")
        server.terminate()
        for caller in callers:
            caller.join(60)
        assert server.process.wait(30) == 0
        assert not [each for each in outcomes if each not in ("200", "503", "closed")]
        assert "Traceback" not in server.log()
        assert "ERROR" not in server.log()


def test_a_client_that_leaves_frees_its_place_in_the_queue(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server, socks = in_a_slow_step(stack, tmp_path, drain_timeout_seconds=120)
        for sock in socks[1:]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        assert read_answer(socks[0]).status == 200
        wait_for(lambda: samples(server, "requests_total").get(("tiny", "499")) == 4, "they are counted")
        computed = samples(server, "batch_tokens_sum")["tiny", "contiguous"]
        assert computed <= 5 + 2 * SLOW_TOKENS, "at most one of them had begun"


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with server_process(
        settings(uds=path),
        tmp_path,
    ) as server:
        pass
