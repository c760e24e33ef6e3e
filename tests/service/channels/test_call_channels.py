"""Channels of device calls, but for the calls: opening, both memories' descriptors, faults, and the end."""

import asyncio
import dataclasses
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertd.device_calls import CallCounts, CallSlot
from expertd.service.channels.call_channel import CallGeometry
from expertd_client import ExpertClient, ServerBusyError
from expertd_client.channel import making
from expertd_client.channel.device_link import DeviceLink
from expertd_client.channel.layout import GREETING
from expertd_client.channel.opening import post
from expertd_client.deadline import Deadline
from expertd_client.metadata import ModelMetadata
from expertd_client.steps import run
from tests.service.apps import Serving, error_of
from tests.service.channels.servers import channel_server
from tests.service.runners import EchoRunner
from tests.service.waiting import until

BODY = {"version": 3, "model": "tiny", "num_slots": 3, "max_tokens": 4, "memory": {"device_calls": {}}}


class FakeMemory:
    """A file."""

    def __init__(self, address: int, num_bytes: int, descriptor: int | None = None) -> None:
        self.address, self.num_bytes = address, num_bytes
        self._file = os.memfd_create("fake") if descriptor is None else os.dup(descriptor)
        if descriptor is None:
            os.ftruncate(self._file, num_bytes)
        self.is_closed = False

    def descriptor(self) -> int:
        return os.dup(self._file)

    def read(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._file, num_bytes, offset)

    def close(self) -> None:
        os.close(self._file)
        self.is_closed = True


class FakeCalls:
    """A `CallServer` that answers nothing, and keeps what it was told."""

    max_tokens = 5
    gpu, own_gpu = "GPU-1", "turns"
    are_made = False

    def __init__(self) -> None:
        self.memories: list[FakeMemory] = []
        self.slots: list[CallSlot] = []
        self.error: Exception | None = None
        self.lies = self.is_prepared = False

    def start(self) -> bool:
        return True

    def hold(self) -> None: ...

    def let_go(self) -> None: ...

    def stop(self) -> None: ...

    def run(self) -> None: ...

    def answers(self, model: str) -> bool:
        return self.error is None

    def prepare(self, model: str) -> None:
        assert model == "tiny"
        if self.error is not None:
            raise self.error
        self.is_prepared = True

    def share(self, num_bytes: int) -> FakeMemory:
        assert self.is_prepared
        self.memories.append(FakeMemory(1 << 20, num_bytes))
        return self.memories[-1]

    def open_shared(self, descriptor: int, num_bytes: int) -> FakeMemory:
        if os.fstat(descriptor).st_size < num_bytes:
            raise RuntimeError("cuMemImportFromShareableHandle: expected CUDA_SUCCESS, got another")
        self.memories.append(FakeMemory(len(self.memories) << 30, num_bytes, descriptor))
        return self.memories[-1]

    def connect(self, models: tuple[str, ...], slots: Sequence[CallSlot]) -> list[int]:
        self.slots = list(slots)
        return [7, 8, 9]

    def disconnect(self, indices: Sequence[int], *memories: Any) -> None:
        assert list(indices) == ([7, 8, 9] if self.slots else [])
        self.slots = []
        for memory in memories:
            memory.close()

    def forget(self, model: str) -> None: ...

    def counts(self) -> Mapping[str, CallCounts]:
        return {}

    def num_calls(self, index: int) -> int:
        return index

    def has_fault(self, indices: Sequence[int]) -> bool:
        return self.lies and list(indices) == [7, 8, 9]


@asynccontextmanager
async def serving_calls(directory: Path, **channels: Any) -> AsyncIterator[tuple[Serving, FakeCalls]]:
    calls = FakeCalls()
    async with channel_server(directory, EchoRunner(), channels=channels) as server:
        engine = server.app.engine
        assert engine.loaded is not None
        engine.loaded = dataclasses.replace(engine.loaded, calls=calls)
        yield server, calls


def claim(opened: Any) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(opened["socket"])
    connection.sendall(bytes.fromhex(opened["token"]))
    return connection


def received(connection: socket.socket) -> int:
    greeting, (descriptor,), _, _ = socket.recv_fds(connection, len(GREETING), 2)
    assert greeting == GREETING
    return descriptor


def send_memory(connection: socket.socket, *sizes: int, words: Mapping[int, int] = {}) -> None:
    """Of new files; words: of the first one, by their offsets."""
    files = [os.memfd_create("memory") for _ in sizes]
    for file, num_bytes in zip(files, sizes, strict=True):
        os.ftruncate(file, num_bytes)
    for offset, word in words.items():
        os.pwrite(files[0], struct.pack("<Q", word), offset)
    socket.send_fds(connection, [b"\0"], files)
    for file in files:
        os.close(file)


async def connected(server: Serving) -> socket.socket:
    """The connection of a new channel, with memory for answers."""
    opened = (await server.http.post("/v1/channels", json=BODY)).json()
    connection = claim(opened)
    os.close(await asyncio.to_thread(received, connection))
    send_memory(connection, opened["geometry"]["answer_bytes"])
    assert await asyncio.to_thread(connection.recv, 1) == b"\1"
    return connection


async def test_metadata_say_which_gpu_answers_calls(tmp_path: Path) -> None:
    async with serving_calls(tmp_path) as (server, calls):
        told = (await server.http.get("/v2/models/tiny")).json()["parameters"]
        assert (told["device_calls"], told["device_calls_own_gpu"]) == ("GPU-1", "turns")
        with ExpertClient(f"http://127.0.0.1:{server.port}") as client:
            layer = await asyncio.to_thread(client.metadata, "tiny")
        assert (layer.device_calls, layer.device_calls_own_gpu) == ("GPU-1", "turns")
        calls.error = ValueError("a layer that answers none")
        told = (await server.http.get("/v2/models/tiny")).json()["parameters"]
        assert "device_calls" not in told


@pytest.mark.parametrize(
    ("gpu", "own_gpu", "warned"),
    [("GPU-1", "turns", True), ("GPU-2", "turns", False), ("GPU-1", "mps", False)],
)
def test_a_caller_on_the_servers_own_gpu_is_warned_of_turns(
    gpu: str, own_gpu: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layer = ModelMetadata("tiny", 128, 2, "BF16", device_calls="GPU-1", device_calls_own_gpu=own_gpu)
    making._warn_of_shared_gpu(layer, gpu)
    text = (
        "channel: device calls of tiny: expected a server on another GPU, or CUDA MPS, got the caller's own"
    )
    assert [message.startswith(text) for message in caplog.messages] == [True] * warned


def test_replicas_on_different_gpus_have_the_same_layer() -> None:
    one, two = (ModelMetadata("tiny", 128, 2, "BF16", device_calls=f"GPU-{number}") for number in (1, 2))
    making.check_same(one, two)


async def test_both_sides_have_both_memories(tmp_path: Path) -> None:
    """And the slots do not overlap, from the opening to the end of the connection."""
    async with serving_calls(tmp_path) as (server, calls):
        response = await server.http.post("/v1/channels", json=BODY)
        assert response.status_code == 201
        opened = response.json()
        geometry = CallGeometry(**opened["geometry"])
        assert (geometry.num_slots, geometry.max_tokens, geometry.hidden_size, geometry.top_k) == (
            3,
            4,
            128,
            2,
        )
        connection = claim(opened)
        descriptor = await asyncio.to_thread(received, connection)
        assert os.fstat(descriptor).st_size == geometry.data_bytes
        os.close(descriptor)
        send_memory(connection, geometry.answer_bytes)
        assert await asyncio.to_thread(connection.recv, 1) == b"\1"
        check_places(calls, geometry)
        shown = (await server.http.get("/v1/channels/1")).json()
        assert (shown["memory"], shown["requests"]) == ("device_calls", 7 + 8 + 9)
        assert shown["data_bytes"] == geometry.data_bytes == server.metric("channel_bytes")
        connection.close()
        await until(lambda: len(calls.memories) == 2 and all(each.is_closed for each in calls.memories))
        await until(lambda: server.metric("channel_bytes") == 0)
        assert not calls.slots


def check_places(calls: FakeCalls, geometry: CallGeometry) -> None:
    here, there = calls.memories
    assert [slot.sequence for slot in calls.slots] == [0, 0, 0]
    tokens = geometry.max_tokens
    taken: list[tuple[int, int]] = []
    for slot in calls.slots:
        assert slot.max_tokens == tokens
        taken += [
            (slot.header, 16), (slot.hidden_states, tokens * 256), (slot.topk_ids, tokens * 8),
            (slot.topk_weights, tokens * 8), (slot.answer, 8), (slot.out, tokens * 256),
        ]  # fmt: skip
    assert all(address % 16 == 0 for address, _ in taken)
    assert len(taken) == 18
    for memory in (here, there):
        inside = sorted(place for place in taken if memory.address <= place[0] < memory.address + (1 << 29))
        ends = [memory.address, *(address + size for address, size in inside)]
        assert all(begin >= end for (begin, _), end in zip(inside, ends, strict=False))
        assert ends[-1] <= memory.address + memory.num_bytes


async def test_another_server_takes_over_memories(tmp_path: Path) -> None:
    """Each slot goes on behind its last answer, refused ones too."""
    async with serving_calls(tmp_path) as (server, calls):
        opened = (await server.http.post("/v1/channels", json=BODY)).json()
        sizes = CallGeometry(**opened["geometry"])
        connection = claim(opened)
        os.close(await asyncio.to_thread(received, connection))
        words = {0: 5, sizes.header_bytes: 0, 2 * sizes.header_bytes: 9 | 1 << 63}
        send_memory(connection, sizes.answer_bytes, sizes.data_bytes, words=words)
        assert await asyncio.to_thread(connection.recv, 1) == b"\1"
        own, answers, taken = calls.memories
        assert (own.is_closed, answers.is_closed, taken.is_closed) == (True, False, False)
        assert [slot.sequence for slot in calls.slots] == [5, 0, 9]
        assert [slot.header - taken.address for slot in calls.slots] == [0, 128, 256]
        assert [slot.answer - answers.address for slot in calls.slots] == [0, 128, 256]
        connection.close()
        await until(lambda: all(each.is_closed for each in calls.memories))


async def test_a_caller_that_lies_is_closed(tmp_path: Path) -> None:
    async with serving_calls(tmp_path) as (server, calls):
        connection = await connected(server)
        calls.lies = True
        assert await asyncio.to_thread(connection.recv, 1) == b""
        connection.close()
        await until(lambda: all(each.is_closed for each in calls.memories))


async def test_memory_that_cannot_be_opened_closes_the_channel(tmp_path: Path) -> None:
    """Also none at all; the memory for calls is free again."""
    async with serving_calls(tmp_path) as (server, calls):
        for sends in (True, False):
            opened = (await server.http.post("/v1/channels", json=BODY)).json()
            connection = claim(opened)
            os.close(await asyncio.to_thread(received, connection))
            if sends:
                send_memory(connection, 1)
            else:
                connection.sendall(b"\0")
            assert await asyncio.to_thread(connection.recv, 1) == b""
            connection.close()
            await until(lambda: all(each.is_closed for each in calls.memories))
        assert len(calls.memories) == 2
        assert (await server.http.get("/v1/channels")).json() == {"channels": []}


async def test_a_server_that_ends_lets_go_of_memories_first(tmp_path: Path) -> None:
    """Then the caller sees the end of its connection, and no answer comes any more."""
    async with serving_calls(tmp_path) as (server, calls):
        connection = await connected(server)
        ended = asyncio.create_task(asyncio.to_thread(connection.recv, 1))
        ended.add_done_callback(lambda _: held.extend(each.is_closed for each in calls.memories))
        held: list[bool] = []
    assert await ended == b""
    connection.close()
    await until(lambda: held == [True, True])
    assert not calls.slots


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": 6}, "max_tokens: expected 1 to 5, got 6"),
        ({"num_slots": 257}, "num_slots: expected 1 to 256, got 257"),
        (
            {"memory": {"device_calls": {"device_id": 1}}},
            "memory.device_calls.device_id: expected no such key, got 1",
        ),
    ],
)
async def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    async with serving_calls(tmp_path) as (server, calls):
        response = await server.http.post("/v1/channels", json={**BODY, **changes})
        assert error_of(response, 400) == text
        calls.error = ValueError("memory: model tiny: expected the contiguous layout, got the masked one")
        assert error_of(await server.http.post("/v1/channels", json=BODY), 400) == str(calls.error)
        assert server.metric("channel_bytes") == 0


async def test_limits_and_keys_are_those_of_all_channels(tmp_path: Path) -> None:
    """`max_bytes` counts the memory for calls; a channel ends when its key may not infer any more."""
    num_bytes = CallGeometry.for_slots(3, 4, 128, 2).data_bytes
    async with serving_calls(tmp_path, max_bytes=2 * num_bytes - 1) as (server, calls):
        connection = await connected(server)
        refused = await server.http.post("/v1/channels", json=BODY)
        assert error_of(refused, 503) == (
            f"channels.max_bytes: expected a region of at most {num_bytes - 1} bytes beside the open "
            f"channels, got {num_bytes}"
        )
        assert len(calls.slots) == 3
        server.app.channels.close_others(["another"])
        assert await asyncio.to_thread(connection.recv, 1) == b""
        assert not calls.slots
        connection.close()
        (await connected(server)).close()
    async with serving_calls(tmp_path, max_bytes=num_bytes - 1) as (server, _):
        error_of(await server.http.post("/v1/channels", json=BODY), 400)


def asking(server: Serving, opened: list[Any]) -> Callable[[Deadline], Any]:
    def ask(deadline: Deadline) -> Any:
        """As the client, from a thread of its own."""
        response = httpx.post(f"http://127.0.0.1:{server.port}/v1/channels", json=BODY, timeout=60)
        if response.status_code != 201:
            raise ServerBusyError(response.text, status=503)
        opened.append(response.json())
        return opened[-1]

    return ask


async def test_the_client_hands_its_memories_to_the_next_server(tmp_path: Path) -> None:
    """Again and again, as long as it is open, and until the server refuses for too long."""
    async with serving_calls(tmp_path) as (server, calls):
        opened: list[Any] = []
        deadline = Deadline(60, retry_seconds=2)
        share = partial(FakeMemory, 1)
        link = await asyncio.to_thread(DeviceLink, asking(server, opened), share, deadline)
        assert asdict(link.geometry) == opened[0]["geometry"]
        assert os.fstat(link.calls).st_size == link.geometry.data_bytes
        given = os.fstat(link.answers.descriptor()).st_ino, os.fstat(link.calls).st_ino
        link.start(lambda: False)
        entries = server.app.channels.entries

        async def answers(channel: str) -> None:
            await until(lambda: len(calls.slots) == 3 and list(entries) == [channel])

        for turn in range(3):
            await answers(str(turn + 1))
            held = [memory for memory in calls.memories if not memory.is_closed]
            if turn:
                assert tuple(os.fstat(memory.descriptor()).st_ino for memory in held) == given
            server.app.channels.close(entries[str(turn + 1)].channel, "test")
        await answers("4")
        calls.error = RuntimeError("no memory")
        server.app.channels.close(entries["4"].channel, "test")
        assert link._thread is not None
        await asyncio.to_thread(link._thread.join, 60)
        assert not link._thread.is_alive()
        await asyncio.to_thread(link.close)
        assert not entries


async def test_a_link_that_is_closed_or_has_failed_asks_no_more(tmp_path: Path) -> None:
    async with serving_calls(tmp_path) as (server, calls):
        for fails in (False, True):
            opened: list[Any] = []
            ask = asking(server, opened)
            link = await asyncio.to_thread(DeviceLink, ask, partial(FakeMemory, 1), Deadline(60, 60))
            link.start(partial(bool, fails))
            await until(lambda: len(calls.slots) == 3)
            if fails:
                server.app.channels.close(next(iter(server.app.channels.entries.values())).channel, "test")
                assert link._thread is not None
                await asyncio.to_thread(link._thread.join, 60)
            await asyncio.to_thread(link.close)
            await until(lambda: not calls.slots and not server.app.channels.entries)
            assert len(opened) == 1


async def test_in_a_pool_another_server_answers_calls_when_theirs_has_drained(tmp_path: Path) -> None:
    """With both memories of before, so that a captured graph stays as it is."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    async with AsyncExitStack() as first, serving_calls(folders[1]) as (second, others):
        server, calls = await first.enter_async_context(serving_calls(folders[0]))
        urls = [f"http://127.0.0.1:{each.port}" for each in (server, second)]
        with ExpertClient(urls, timeout=60, retry_seconds=60) as client:

            def ask(deadline: Deadline) -> Any:
                return run(post(client._to, ("tiny",), BODY, deadline))

            link = await asyncio.to_thread(DeviceLink, ask, partial(FakeMemory, 1), Deadline(60, 60))
            given = os.fstat(link.answers.descriptor()).st_ino, os.fstat(link.calls).st_ino
            link.start(lambda: False)
            await until(lambda: len(calls.slots) == 3)
            assert not others.memories
            await first.aclose()
            await until(lambda: len(others.slots) == 3)
            held = [memory for memory in others.memories if not memory.is_closed]
            assert tuple(os.fstat(memory.descriptor()).st_ino for memory in held) == given
            assert not calls.slots
            await asyncio.to_thread(link.close)
            await until(lambda: not others.slots)
