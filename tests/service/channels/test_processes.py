"""Server and callers in processes of their own: killed callers, a killed server, an idle server."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from expertd_client import ExpertClient
from tests.paths import DEMO, ROOT
from tests.service.apps import HIDDEN, rows, tiny_settings
from tests.service.channels.peer import ChannelClosedError, Peer
from tests.service.http.processes import two_processes
from tests.service.keys import bearer, write_keys
from tests.service.processes import ServerProcess, clean_environment, expertd, server_process, serving
from tests.service.waiting import wait_for
from tests.short import few_of

pytestmark = pytest.mark.slow  # a server process each


@contextmanager
def served(directory: Path) -> Iterator[ServerProcess]:
    channels = {"socket": str(directory / "channels"), "max_channels": 8, "max_bytes": 16 << 20}
    with server_process(tiny_settings(channels=channels), directory) as process:
        yield process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("server")) as process:
        yield process


def opened(server: ServerProcess, headers: dict[str, str] | None = None, **request: Any) -> dict[str, Any]:
    body = {"version": 3, "model": "tiny", "num_slots": 4, "max_tokens": 16, **request}
    response = httpx.post(f"http://{server.url}/v1/channels", json=body, headers=headers, timeout=60)
    assert response.status_code == 201, response.text
    answer: dict[str, Any] = response.json()
    return answer


def metric(server: ServerProcess, name: str) -> float:
    found = re.search(rf"^expertd_{name} (\S+)$", server.get("/metrics").text, re.M)
    assert found
    return float(found[1])


def caller(server: ServerProcess, seed: int, requests: int | None) -> "subprocess.Popen[str]":
    """A running caller that has the channel."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.channels.caller"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=clean_environment(),
    )
    assert process.stdin
    json.dump({"opened": opened(server), "seed": seed, "requests": requests}, process.stdin)
    process.stdin.close()
    process.stdin = None  # `communicate` would use it
    return process


def memory_of(server: ServerProcess) -> int:
    """The parts of the server's memory that belong to channels."""
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    return maps.count("/memfd:expertd-channel")


def descriptors_of(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_several_processes_get_their_own_answers(server: ServerProcess) -> None:
    callers = [caller(server, seed, 300) for seed in range(3)]
    for process in callers:
        assert process.communicate(timeout=240)[0].count("answered") == 300
        assert process.returncode == 0
    wait_for(lambda: metric(server, "channel_bytes") == 0, "all channels are freed")


def test_callers_killed_at_random_leave_nothing_behind(server: ServerProcess) -> None:
    seed = 7
    print(f"seed {seed}")
    chance = random.Random(seed)
    survivor = Peer(opened(server))
    hidden_states = rows(5)
    expected = survivor.infer(hidden_states)
    before = memory_of(server), metric(server, "channel_bytes")
    descriptors = descriptors_of(server)
    for turn in range(6):
        process = caller(server, turn, 1_000_000 if turn % 2 else None)
        assert process.stdout
        assert process.stdout.readline()
        time.sleep(chance.uniform(0, 0.02))  # any point of a request
        process.kill()
        # Its steps may have had others' tokens, which changes the rounding.
        atol = 2**-7 * np.abs(expected).max()
        np.testing.assert_allclose(survivor.infer(hidden_states), expected, rtol=0, atol=atol)
        process.wait()
        process.stdout.close()
    wait_for(lambda: metric(server, "channels") == 1, "the other channels are closed")
    wait_for(lambda: (memory_of(server), metric(server, "channel_bytes")) == before, "their memory is freed")
    wait_for(lambda: descriptors_of(server) <= descriptors, "their descriptors are closed")
    assert np.array_equal(survivor.infer(hidden_states), expected)
    survivor.close()
    log = server.log()
    assert len(re.findall(r"channel \d+ of model tiny closed: process \d+ has closed it", log)) >= 6
    assert "Traceback" not in log


def test_an_idle_server_with_a_channel_uses_no_cpu(server: ServerProcess) -> None:
    peer = Peer(opened(server))
    peer.infer(rows(1))
    time.sleep(0.2)  # past the first samples of metrics
    for _ in range(5):  # where other processes compete for the cores, the same work takes longer now and then
        before = cpu_seconds(server)
        time.sleep(2)
        used = round(cpu_seconds(server) - before, 2)  # it is counted in hundredths
        if used <= 0.02:
            break
    assert used <= 0.02, "1% of a core"
    peer.infer(rows(1))
    peer.close()


def cpu_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # ticks of 10 ms


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_callers_learn_that_the_server_has_ended(number: signal.Signals, tmp_path: Path) -> None:
    """After SIGTERM, it has answered what it had read, and removes its socket."""
    with served(tmp_path) as server:
        peer = Peer(opened(server))
        last = peer.send(16, peer.places(1))
        assert peer.wait(last).status == 200
        server.process.send_signal(number)
        with pytest.raises(ChannelClosedError):
            peer.wait(peer.sequence + 1, 30)
        peer.close()
        if number == signal.SIGTERM:
            assert server.process.wait(60) == 0
            assert not (tmp_path / "channels").exists()
            assert "Traceback" not in server.log()


def test_a_socket_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "channels"
    result = expertd("serve", "--config", DEMO, "--port", "0", "--set", f"channels.socket={path}")
    assert result.returncode == 2
    text = f"channels.socket: expected a path for a new socket, got {path}: No such file or directory"
    assert result.stderr.splitlines()[-1] == f"expertd: {text}"


def test_clients_find_the_channels_of_a_server_on_loopback(tmp_path: Path) -> None:
    with serving(["--config", DEMO], tmp_path, XDG_RUNTIME_DIR=str(tmp_path)) as server:
        path = tmp_path / f"expertd-{os.geteuid()}-{server.port}.sock"
        assert f"channels are claimed at {path}\n" in server.log()
        with ExpertClient(f"http://localhost:{server.port}") as client:
            hidden_states = np.ones((3, 512), np.float32)
            over_a_channel = client.infer("demo", hidden_states)
            assert client.transport == "channel"
        with ExpertClient(f"http://localhost:{server.port}", transport="http") as client:
            assert np.array_equal(over_a_channel, client.infer("demo", hidden_states))
        server.terminate()
        assert server.process.wait(60) == 0
        assert not path.exists()


@pytest.mark.parametrize("http_workers", few_of([1, 2], [1]))
def test_a_channel_belongs_to_the_name_of_its_key(tmp_path: Path, http_workers: int) -> None:
    """Others but admins cannot close it, and it is closed when the name may not infer any more."""
    names = {name: ["infer"] for name in ("gone", "changed", "kept")}
    keys = write_keys(tmp_path / "keys.yaml", **names, admin=["admin"])
    channels = {"socket": str(tmp_path / "channels"), "max_channels": 8, "max_bytes": 16 << 20}
    settings = two_processes(channels=channels, keys=keys, http_workers=http_workers)
    with server_process(settings, tmp_path) as server, ExitStack() as stack:
        peers = {name: Peer(opened(server, bearer(name))) for name in ("gone", "changed", "kept")}
        for peer in peers.values():
            stack.callback(peer.close)
            assert peer.infer(rows(2)).shape == (2, HIDDEN)
        closers = (("kept", 403), ("gone", 200)), (("gone", 403), ("admin", 200))
        for opener, attempts in zip(("gone", "changed"), closers, strict=True):
            channel = opened(server, bearer(opener))["id"]
            for closer, status in attempts:
                forged = {"expertd-key-name": opener, "expertd-key-admin": "true"}
                url = f"http://{server.url}/v1/channels/{channel}"
                answer = httpx.delete(url, headers=bearer(closer) | forged, timeout=60)
                assert answer.status_code == status, (opener, closer)
                if status == 403:
                    expected = "the key that opened it, or one with the right admin"
                    text = f"channel {channel}: expected {expected}, got key {closer}"
                    assert answer.json() == {"error": text}
        write_keys(keys, changed=["metrics"], kept=["infer"], new=["infer"])
        wait_for(lambda: server.log().count("may not infer any more") == 2, "they are closed")
        for name in ("gone", "changed"):
            with pytest.raises(ChannelClosedError):
                peers[name].infer(rows(1))
        assert peers["kept"].infer(rows(1)).shape == (1, HIDDEN)
