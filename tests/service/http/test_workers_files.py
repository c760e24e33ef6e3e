"""Keys and certificates with several HTTP processes: each checks them, and reads the files again."""

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from tests.service.apps import hidden_request, rows
from tests.service.certificates import FOLDER, client_context, install, serial_of
from tests.service.http.processes import GOOD, asked, samples, two_processes, workers_of
from tests.service.keys import all_keys, bearer, key_of, write_keys
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import connect, infer, read_answer
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process each

BODY = hidden_request(rows(3))
METRICS = bearer("metrics")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_keys(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest.fixture(scope="module")
def server(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for all tests, of which the last changes its keys."""
    settings = two_processes(keys=keys, shared_memory={"enabled": True})
    with server_process(settings, tmp_path_factory.mktemp("server")) as process:
        yield process


def request(name: str) -> bytes:
    return infer(*BODY, f"Authorization: Bearer {key_of(name)}")


def test_every_process_checks_every_call(server: ServerProcess) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(server.port)) for _ in range(4)]  # spread evenly
        for sock in socks:
            statuses = [asked(sock, request(name)).status for name in ("infer", "nobody", "admin", "infer")]
            assert statuses == [200, 401, 403, 200]
    for _ in range(4):
        with httpx.Client(base_url=f"http://{server.url}", timeout=60, verify=False) as http:
            assert http.get("/v2/health/ready").status_code == http.options("/").status_code == 200
            for name, status in (("metrics", 200), ("infer", 403), ("nobody", 401)):
                assert http.get("/metrics", headers=bearer(name)).status_code == status
            refused = http.put("/v1/partitions", headers=bearer("infer"), content=bytes(70_000))
            assert refused.json() == {"error": "key infer: expected the right admin, got infer"}
            regions = http.get("/v2/systemsharedmemory/status", headers=bearer("infer"))
            assert (regions.status_code, regions.json()) == (200, [])
            assert http.head("/v2").status_code == 401
            unknown = http.get("/v2/models/none/ready")
            assert unknown.json() == {"error": "model: expected a served one, got 'none'"}
    counts = samples(server, "key_requests_total", METRICS)
    assert counts["infer", "admitted"] == 4 * 2 + 4
    assert (counts["admin", "forbidden"], counts["infer", "forbidden"]) == (4, 8)
    assert counts["", "unauthorized"] == 4 + 8
    refusals = samples(server, "refusals_total", METRICS)
    assert (refusals["tiny", "forbidden"], refusals["tiny", "unauthorized"]) == (4, 4)
    assert "secret" not in server.log()


def test_requests_that_name_regions_are_passed_on_without_their_key(server: ServerProcess) -> None:
    """The engine's process answers them; it asks for no key, on a socket that only this user can reach."""
    header = b'{"inputs": [{"name": "hidden_states", "shape": [1, 128], "datatype": "FP32", "parameters": '
    header += b'{"shared_memory_region": "none", "shared_memory_byte_size": 512}}]}'
    with connect(server.port) as sock:
        for name, status in (("infer", 400), ("admin", 403)):
            data = infer(header, len(header), f"Authorization: Bearer {key_of(name)}")
            assert asked(sock, data).status == status


def test_every_process_reads_a_change_and_one_that_is_replaced_has_the_last_valid_keys(
    server: ServerProcess, keys: Path
) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(server.port)) for _ in range(4)]

        def answered(name: str, status: int) -> bool:
            return all(asked(sock, request(name)).status == status for sock in socks)

        assert answered("infer", 200)
        write_keys(keys, new=["infer"], metrics=["metrics"])
        wait_for(lambda: answered("new", 200) and answered("infer", 401), "all processes have the new keys")
        wait_for(lambda: server.log().count("and has new and metrics") == 3, "the engine's process, too")
        keys.write_text("[")
        wait_for(lambda: server.log().count("the keys that were read before remain") == 3, "all have read it")
        assert answered("new", 200)
        assert answered("infer", 401)
    before = workers_of(server)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(set(workers_of(server)) - set(before)) == 2, "others have been started")
    with connect(server.port) as sock:
        assert asked(sock, request("new")).status == 200
        assert asked(sock, request("infer")).status == 401


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("server")
    install("server", made)
    return made


@pytest.fixture(scope="module")
def tls_server(folder: Path) -> Iterator[ServerProcess]:
    tls = {"certificate": str(folder / "tls.pem"), "key": str(folder / "tls.key")}
    with server_process(two_processes(tls=tls), folder) as process:
        yield process
        assert "Traceback" not in process.log()


def secure(server: ServerProcess) -> ssl.SSLSocket:
    """A connection whose first request is answered."""
    sock = client_context().wrap_socket(connect(server.port), server_hostname="localhost")
    assert is_answered(sock)
    return sock


def is_answered(sock: ssl.SSLSocket) -> bool:
    sock.sendall(GOOD)
    return read_answer(sock).status == 200


def serials(server: ServerProcess) -> set[str]:
    """Of the certificates that new connections are shown, by either process."""
    socks = [secure(server) for _ in range(4)]
    found = {serial_of(sock) for sock in socks}
    for sock in socks:
        sock.close()
    return found


def test_the_certificate_is_replaced_without_touching_connections(
    tls_server: ServerProcess, folder: Path
) -> None:
    assert f"listening on https://127.0.0.1:{tls_server.port}" in tls_server.log()
    with closing(secure(tls_server)) as before:
        (first,) = serials(tls_server)
        assert first == serial_of(before)
        install("second", folder)
        wait_for(lambda: first not in serials(tls_server), "new connections have the new certificate")
        (second,) = serials(tls_server)

        (folder / "tls.pem").write_bytes((FOLDER / "server.pem").read_bytes())  # not of this key
        wait_for(lambda: tls_server.log().count("remains in use") >= 3, "each process says so")
        os.kill(workers_of(tls_server)[0], signal.SIGKILL)
        wait_for(lambda: "starting another" in tls_server.log(), "a process is replaced")
        wait_for(lambda: len(workers_of(tls_server)) == 2, "it is")
        assert serials(tls_server) == {second}
        assert tls_server.log().count("expected the key of") <= 4, "not every second"
        install("second", folder)


def test_it_drains(tls_server: ServerProcess) -> None:
    with closing(secure(tls_server)) as idle:
        tls_server.terminate()
        assert idle.recv(1) == b""
    assert tls_server.process.wait(60) == 0
