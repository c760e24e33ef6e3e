"""Opening, claiming and closing channels, and what they may use."""

import asyncio
import base64
import errno
import grp
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from expertd.service.channels.listener import ChannelListener
from expertd.service.channels.open_channel import OpenChannel
from expertd.service.engine.loading import LoadedLayers
from expertd.service.http.server import num_files
from expertd.service.memory import DeviceMemory, Span
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import ChannelSettings
from tests.paths import ROOT
from tests.service.apps import MODEL, error_of, rows, serving, serving_runner, tiny_settings
from tests.service.channels.peer import HEADER, ChannelClosedError, Peer
from tests.service.channels.servers import (
    answer_of,
    answer_to,
    channel,
    channel_server,
    claimed,
    mapped,
    opened,
)
from tests.service.runners import EchoRunner
from tests.service.waiting import until

BODY = {"version": 3, "model": "tiny", "num_slots": 2, "max_tokens": 4}


async def test_the_answer_describes_the_memory(tmp_path: Path) -> None:
    async with channel_server(tmp_path, EchoRunner()) as server:
        answer = await opened(server, num_slots=3, max_tokens=5, datatype="BF16")
        assert (answer["id"], answer["version"], answer["model"]) == ("1", 3, "tiny")
        assert answer["instance"] == server.app.engine.instance
        assert answer["geometry"] == {
            "num_slots": 3,
            "max_tokens": 5,
            "hidden_size": 128,
            "top_k": 2,
            "data_bytes": 3 * 4096,
            "data_slot_bytes": 4096,
            "hidden_states_offset": 0,
            "topk_ids_offset": 1280,
            "topk_weights_offset": 1344,
            "output_offset": 1408,
            "control_bytes": 256 + 3 * 512,
            "header_bytes": 256,
            "slot_bytes": 512,
            "answer_offset": 128,
            "error_offset": 192,
            "error_bytes": 320,
        }
        peer = await asyncio.to_thread(Peer, answer)
        magic, *header = HEADER.unpack_from(peer.control)
        assert (magic, header) == (
            b"expertd\0",
            [3, 256, 3, 5, 128, 2, 3 * 4096, 4096, 0, 1280, 1344, 1408, 256 + 3 * 512],
        )
        listed = (await server.http.get("/v1/channels")).json()
        assert listed == {"channels": [(await server.http.get("/v1/channels/1")).json()]}
        assert listed["channels"][0] == {
            "id": "1",
            "model": "tiny",
            "memory": "system",
            "data_bytes": 3 * 4096,
            "owner": os.getpid(),
            "requests": 0,
        }
        peer.close()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "channels: expected the setting channels.socket, got null"),
        ("", "channels: expected the setting channels.socket, got null"),
        ("auto", "channels: expected a server on loopback that has a folder for their socket, or the setting "
        "channels.socket, got neither"),
    ],
)  # fmt: skip
async def test_a_server_without_a_socket_has_no_channels(given: str | None, text: str) -> None:
    async with serving(tiny_settings(channels={"socket": given})) as server:
        assert error_of(await server.http.post("/v1/channels", json=BODY), 403) == text
        for method, path in (("GET", ""), ("GET", "/1"), ("DELETE", "/1")):
            assert error_of(await server.http.request(method, f"/v1/channels{path}"), 403) == text
        assert server.metric("channels") == 0


def cuda(b64: str) -> dict[str, Any]:
    return {"memory": {"cuda": {"device_id": 0, "raw_handle": {"b64": b64}, "byte_size": 64}}}


MEMORY = (
    'memory: expected "system", {"system": ...}, {"cuda": ...}, {"device_calls": {}} or {"nixl": ...}, got '
)
WRONG: dict[str, dict[str, Any]] = {
    "num_slots: expected a number greater than 0, got 0": {"num_slots": 0},
    "num_slots: expected 1 to 4096, got 4097": {"num_slots": 4097},
    "version of channels: expected 3, got 2": {"version": 2},
    "max_tokens: expected 1 to 64, got 65": {"max_tokens": 65},
    "max_tokens: expected a valid integer, got '4'": {"max_tokens": "4"},
    "slots: expected no such key, got 4": {"slots": 4},
    "datatype: expected 'BF16', 'FP16' or 'FP32', got 'FP8'": {"datatype": "FP8"},
    "memory: expected system on backend 'reference', got cuda": cuda("AAAA"),
    "memory: expected system or cuda on backend 'reference', without ranks or lanes, got device_calls": {
        "memory": {"device_calls": {}}
    },
    "raw_handle.b64: expected base64, got 'A'": cuda("A"),
    "raw_handle.b64: expected base64, got '\\xe9'": cuda("\u00e9"),
    MEMORY + "'gpu'": {"memory": "gpu"},
    MEMORY + "5": {"memory": 5},
    MEMORY + "an object": {"memory": {"system": {"byte_size": 1}, "cuda": {}}},
    "memory.system.byte_size: expected a number greater than 0, got 0": {
        "memory": {"system": {"byte_size": 0}}
    },
    "memory.system.byte_size: expected a value, got none": {"memory": {"system": {}}},
    "memory.cuda.device_id: expected a number greater than or equal to 0, got -1": {
        "memory": {"cuda": {"device_id": -1}}
    },
    "model: expected one of model and models, got neither": {"model": None},
    "model: expected one of model and models, got both": {"models": ["tiny"]},
    "models: expected at least 1 entry, got none": {"model": None, "models": []},
    "models: expected different names, got ['tiny', 'tiny']": {"model": None, "models": ["tiny", "tiny"]},
    "channels.max_bytes: expected a region of at most 1000000 bytes, got 6963200": {
        "max_tokens": 64,
        "num_slots": 100,
    },
}


async def test_what_cannot_be_opened(tmp_path: Path) -> None:
    async with channel_server(tmp_path, channels={"max_bytes": 1_000_000}) as server:
        for text, changes in WRONG.items():
            response = await server.http.post("/v1/channels", json={**BODY, **changes})
            assert error_of(response, 400) == text
        unknown: list[dict[str, Any]] = [{"model": "nobody"}, {"model": None, "models": ["tiny", "nobody"]}]
        for changes in unknown:
            response = await server.http.post("/v1/channels", json={**BODY, **changes})
            assert error_of(response, 404) == "model: expected tiny, got 'nobody'"
        error_of(await server.http.post("/v1/channels", content=b"{"), 400)
        assert server.metric("channel_bytes") == 0
        await opened(server)


async def test_the_number_of_channels_and_their_bytes_are_limited(tmp_path: Path) -> None:
    limits = {"max_channels": 2, "max_bytes": 1_000_000}
    region = {"memory": {"system": {"byte_size": 600_000}}}
    async with channel(tmp_path, EchoRunner(), channels=limits, request=region) as (server, first):
        body = {**BODY, "memory": {"system": {"byte_size": 500_000}}}
        response = await server.http.post("/v1/channels", json=body)
        expected = "expected a region of at most 400000 bytes beside the open channels, got 500000"
        assert error_of(response, 503) == f"channels.max_bytes: {expected}"
        assert "retry-after" not in response.headers, "nobody knows when the caller leaves"
        await opened(server)
        response = await server.http.post("/v1/channels", json=BODY)
        text = "channels.max_channels: expected fewer than 2 open channels, got 2"
        assert error_of(response, 503) == text
        assert response.headers["retry-after"] == "1", "one of them is not claimed yet"
        first.socket.close()
        await until(lambda: server.metric("channels") == 1)
        await opened(server)


async def test_the_limit_on_open_files_has_room_for_channels(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    channels = {"max_channels": 3}
    async with channel_server(tmp_path, EchoRunner(), channels=channels) as server:
        settings = server.app.engine.settings
        await server.http.get("/v2")  # opens its connection
        before = open_files()
        for _ in range(3):
            await opened(server)
        without = settings.model_copy(update={"channels": ChannelSettings(socket=None)})
        assert open_files() - before == num_files(settings, 1) - num_files(without, 1)


async def test_unclaimed_channels_give_way(tmp_path: Path) -> None:
    async with channel_server(tmp_path, EchoRunner(), channels={"max_channels": 3}) as server:
        server.app.channels.give_way_seconds = 0
        peer = await claimed(server)
        oldest, _, _ = [await opened(server) for _ in range(3)]
        listed = (await server.http.get("/v1/channels")).json()["channels"]
        assert [channel["id"] for channel in listed] == ["1", "3", "4"]
        with pytest.raises(ChannelClosedError):
            await asyncio.to_thread(Peer, oldest)
        await asyncio.to_thread(peer.infer, rows(1))
        others = [await claimed(server) for _ in range(2)]
        error_of(await server.http.post("/v1/channels", json=BODY), 503)
        for claimed_channel in (peer, *others):
            claimed_channel.close()


async def test_the_memory_of_unclaimed_channels_gives_way(tmp_path: Path) -> None:
    async with channel_server(tmp_path, EchoRunner(), channels={"max_bytes": 1_000_000}) as server:
        for _ in range(2):
            await opened(server, memory={"system": {"byte_size": 400_000}})
        body = {**BODY, "memory": {"system": {"byte_size": 900_000}}}
        error_of(await server.http.post("/v1/channels", json=body), 503)  # they are new
        server.app.channels.give_way_seconds = 0
        await opened(server, memory={"system": {"byte_size": 900_000}})
        assert server.metric("channel_bytes") == 900_000


async def test_memory_is_freed_when_the_owner_leaves(tmp_path: Path) -> None:
    async with channel_server(tmp_path) as server:
        before = mapped()
        peer = await claimed(server)
        await asyncio.to_thread(peer.infer, rows(3))
        assert mapped() == before + 4, "control and data, of server and caller"
        assert server.metric("channel_bytes") == peer.data_bytes
        peer.close()
        del peer
        await until(lambda: server.metric("channel_bytes") == 0)
        await until(lambda: mapped() == before)


async def test_memory_in_a_step_is_freed_after_it(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server)
        runner.gate.clear()
        peer.send(1, peer.places(1))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        peer.close()
        await until(lambda: server.metric("channels") == 0)
        assert server.metric("channel_bytes") > 0
        runner.gate.set()
        await until(lambda: server.metric("channel_bytes") == 0)
        assert server.metric("requests_total", model="tiny", status="200") == 1


async def test_memory_stays_if_the_device_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending the device's access would wait for what it computes, and the process with it."""
    runner, released = EchoRunner(), list[OpenChannel]()
    monkeypatch.setattr(OpenChannel, "release", released.append)
    async with channel_server(tmp_path, runner, step_timeout_seconds=0.5) as server, asyncio.timeout(60):
        peer, idle = await claimed(server), await opened(server)
        runner.gate.clear()
        assert (await answer_of(peer)).status == 503
        assert server.app.engine.device_failed
        await server.http.delete(f"/v1/channels/{idle['id']}")
        await server.app.channels.stop()
        assert not server.app.channels.entries
        assert not released
        runner.gate.set()
        peer.close()


async def test_delete_answers_what_is_queued_and_closes(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel(tmp_path, runner, {"max_batch_tokens": 64}) as (server, peer):
        runner.gate.clear()
        peer.send(1, peer.places(1))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        response = await server.http.delete("/v1/channels/1")
        assert response.json()["requests"] == 1
        with pytest.raises(ChannelClosedError):
            await answer_to(peer, 1)
        text = "channel: expected the id of an open channel, got '1'"
        assert error_of(await server.http.delete("/v1/channels/1"), 404) == text
        assert error_of(await server.http.get("/v1/channels/1"), 404) == text
        runner.gate.set()
        await until(lambda: server.metric("channel_bytes") == 0)


async def test_an_unclaimed_channel_expires(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "expertd.service.channels")
    async with channel_server(tmp_path, EchoRunner()) as server:
        server.app.channels.claim_seconds = 0.05
        answer = await opened(server)
        await until(lambda: server.metric("channels") == 0)
        assert "channel 1 of model tiny closed: it was not claimed within 0.05 s" in caplog.text
        with pytest.raises(ChannelClosedError):
            await asyncio.to_thread(Peer, answer)
        await until(lambda: server.metric("channel_bytes") == 0)
        server.app.channels.claim_seconds = 1.0
        peer = await claimed(server)
        await asyncio.sleep(1.2)  # longer than that
        await asyncio.to_thread(peer.infer, rows(1))
        peer.close()


async def test_a_token_is_good_once(tmp_path: Path) -> None:
    async with channel_server(tmp_path, EchoRunner()) as server:
        answer = await opened(server)
        for token in ("00" * 32, answer["token"][:-2] + "00" if answer["token"][-2:] != "00" else "11" * 32):
            with pytest.raises(ChannelClosedError):
                await asyncio.to_thread(Peer, {**answer, "token": token})
        peer = await asyncio.to_thread(Peer, answer, 0.0)
        with pytest.raises(ChannelClosedError):
            await asyncio.to_thread(Peer, answer)
        await asyncio.to_thread(peer.infer, rows(1))
        peer.close()


async def test_a_connection_that_sends_nothing_is_not_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "expertd.service.channels")
    async with channel_server(tmp_path, EchoRunner()) as server:
        for sent in (b"", b"x"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(tmp_path / "channels"))
                probe.sendall(sent)
        await until(lambda: "unknown token" in caplog.text)
        assert caplog.text.count("unknown token") == 1
        assert server.metric("channels") == 0


async def test_bytes_after_the_token_end_the_channel(tmp_path: Path) -> None:
    async with channel(tmp_path, EchoRunner()) as (server, peer):
        peer.socket.send(b"x")
        await until(lambda: server.metric("channels") == 0)


async def test_the_socket_is_for_this_user_only_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "channels"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # as a killed server leaves it
    async with channel_server(tmp_path, EchoRunner()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        taken = r"^channels\.socket: expected a free path, got .*, on which another server listens$"
        with pytest.raises(OSError, match=taken):
            ChannelListener(path)
        assert path.is_socket()
    assert not path.exists()
    path.write_text("a file of the user's")
    other = r"^channels\.socket: expected a free path or a socket, got .*, which is another file$"
    with pytest.raises(OSError, match=other):
        ChannelListener(path)
    assert path.read_text() == "a file of the user's"
    with pytest.raises(OSError, match=r"channels\.socket: .*too long"):
        ChannelListener(tmp_path / ("x" * 120))


@pytest.mark.parametrize("as_name", [True, False])
async def test_a_group_may_connect(tmp_path: Path, as_name: bool) -> None:
    group = os.getgid()
    given = grp.getgrgid(group).gr_name if as_name else group
    async with channel_server(tmp_path, EchoRunner(), channels={"group": given}) as server:
        status = (tmp_path / "channels").stat()
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, group)
        (await claimed(server)).close()


@pytest.mark.parametrize(
    "group", ["no-such-group", "-1", "4294967295", "9" * 5000, "a\0b", "\u0663", "0x1", " "]
)
def test_a_group_that_is_none_is_refused(tmp_path: Path, group: str) -> None:
    path = tmp_path / "channels"
    expected = r"^channels\.group: expected the name of a group, or its number, got '"
    with pytest.raises(OSError, match=expected):
        ChannelListener(path, group)
    assert not path.exists()


def test_a_group_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chown(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", chown)
    path = tmp_path / "channels"
    expected = f"expected a group of uid {os.geteuid()}, to give it to, got 5"
    with pytest.raises(OSError, match=f"^channels.socket: {expected}$"):
        ChannelListener(path, "5")
    assert not path.exists()


AS_ANOTHER = """
import json, os, sys
import numpy as np
from tests.service.channels.peer import Peer
user, group = map(int, sys.argv[1:3])
os.setgroups([])
os.setgid(group)
os.setuid(user)
try:
    peer = Peer(json.loads(sys.argv[3]))
except PermissionError:
    print("refused")
else:
    print(np.isfinite(peer.infer(np.ones((3, peer.hidden_size), np.float32))).all())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to start processes of other users")
async def test_users_of_the_group_have_channels_and_others_none() -> None:
    member, stranger = 54321, 54322
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        async with channel_server(Path(name), channels={"group": member}) as server:
            server.app.channels.claim_seconds = 240.0  # for new processes on a busy machine
            for user, group, expected in (
                (54323, member, "True"),
                (54324, member, "True"),
                (54323, stranger, "refused"),
                (0, 0, "True"),
            ):
                channel = json.dumps(await opened(server))
                command = [sys.executable, "-c", AS_ANOTHER, str(user), str(group), channel]
                run = partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=True)
                assert (await asyncio.to_thread(run)).stdout.strip() == expected, (user, group)
            await until(lambda: len(server.app.channels.listed) == 1)  # the stranger's, not claimed


def with_gpu_memory(opener: Callable[[bytes, int], DeviceMemory], runner: EchoRunner) -> Any:
    """A loader with a GPU's function, which a CPU has not."""

    def load(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
        loaded = serving_runner(runner)(settings, cancelled)
        return LoadedLayers(**{**vars(loaded), "open_cuda": opener})

    return load


async def test_memory_of_a_gpu_is_opened_checked_and_closed(tmp_path: Path) -> None:
    events: list[object] = []

    def opener(handle: bytes, num_bytes: int) -> DeviceMemory:
        events.append((handle, num_bytes))
        if any(handle):
            raise ValueError("raw_handle: expected another one, got this")
        return DeviceMemory(Span(1 << 40, num_bytes, 0), lambda: events.append("closed"))

    channels = {"socket": str(tmp_path / "channels")}
    masked = tiny_settings(channels=channels, models=[{**MODEL, "masked_max_tokens": 8}])
    async with serving(masked, with_gpu_memory(opener, EchoRunner())) as server:
        memory = {
            "device_id": 7,  # of the caller, who may see other GPUs
            "raw_handle": {"b64": base64.b64encode(bytes(64)).decode()},
            "byte_size": 1 << 20,
        }
        peer = await claimed(server, memory={"cuda": memory})
        assert peer.data is None
        assert peer.data_slot_bytes > 0, "the default places fit"
        assert events == [(bytes(64), 1 << 20)]
        answer = await answer_of(peer, routed=True)
        expected = "flags: expected no routing (a masked layout needs it in host memory), got 1"
        assert (answer.status, answer.error) == (400, expected)
        peer.close()
        await until(lambda: events[-1] == "closed")
        memory["raw_handle"] = {"b64": base64.b64encode(bytes(63) + b"x").decode()}
        body = {**BODY, "memory": {"cuda": memory}}
        text = error_of(await server.http.post("/v1/channels", json=body), 400)
        assert text == "raw_handle: expected another one, got this"
        assert server.metric("channel_bytes") == 0
