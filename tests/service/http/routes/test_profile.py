"""/v1/profile on a CPU: the steps that it records, and what it refuses."""

import asyncio
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from expertd.service.engine import profiling, recorder
from tests.service.apps import (
    Serving,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.full import REASONS, break_temporary_files
from tests.service.runners import EchoRunner
from tests.service.sockets import connect, head
from tests.service.waiting import until

LANES = {"decode_max_tokens": 2, "decode_batch_tokens": 4}


async def load(server: Serving, end: asyncio.Event) -> None:
    while not end.is_set():
        for num_tokens in (1, 8):
            output_of(await server.infer(*hidden_request(rows(num_tokens))))


@pytest.mark.parametrize("lanes", [{}, LANES])
async def test_steps_are_recorded_while_requests_are_answered(lanes: dict[str, int]) -> None:
    async with serving(tiny_settings(lanes=lanes)) as server:
        end = asyncio.Event()
        loading = asyncio.ensure_future(load(server, end))
        response = await server.http.post("/v1/profile", json={"steps": 10, "seconds": 20})
        end.set()
        await loading
    assert response.status_code == 200
    trace = json.loads(response.content)
    assert trace["expertd"]["steps"] >= 10
    assert trace["expertd"]["backend"] == "reference"
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert len(names) > 10
    assert any(name.startswith("aten::") for name in names)


async def test_a_recording_ends_without_steps_and_when_the_server_shuts_down() -> None:
    async with serving(tiny_settings()) as server:
        begin = time.monotonic()
        response = await server.http.post("/v1/profile", json={"seconds": 0.2})
        assert time.monotonic() - begin >= 0.2
        assert json.loads(response.content)["expertd"]["steps"] == 0
        for body in ({"steps": 0}, {"steps": 257}, {"seconds": 0}, {"seconds": 61}, {"more": 1}):
            error_of(await server.http.post("/v1/profile", json=body), 422)
        asked = asyncio.ensure_future(server.http.post("/v1/profile", json={"seconds": 60}))
        await until(lambda: server.app.engine._profiling._is_running)
        text = error_of(await server.http.post("/v1/profile", json={}), 409)
        assert text == "profile: expected none to be recorded, got one that is"
        server.app.engine.begin_drain()
        assert error_of(await asyncio.wait_for(asked, 60), 503).startswith("the server is shutting down")
        assert await server.app.engine.drain()


async def test_it_ends_when_the_caller_hangs_up() -> None:
    async with serving(tiny_settings()) as server:
        with connect(server.port) as caller:
            body = b'{"seconds": 60}'
            caller.sendall(head("POST /v1/profile HTTP/1.1", f"Content-Length: {len(body)}") + body)
            await until(lambda: server.app.engine._profiling._is_running)
            error_of(await server.http.post("/v1/profile", json={}), 409)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with asyncio.timeout(50):
            while (await server.http.post("/v1/profile", json={"seconds": 0.1})).status_code != 200:
                await asyncio.sleep(0.1)


async def test_the_profiler_is_stopped_if_the_caller_hangs_up_while_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[str]()
    starts, goes_on = threading.Event(), threading.Event()

    class Slow(recorder.Recorder):
        def start(self, streams: Iterable[tuple[str, Any]]) -> None:
            starts.set()
            assert goes_on.wait(60)
            super().start(streams)
            calls.append("start")

        def stop(self, about: Mapping[str, Any] | None = None) -> None:
            super().stop(about)
            calls.append("stop")

    monkeypatch.setattr(profiling, "Recorder", Slow)
    async with serving(tiny_settings()) as server:
        asked = asyncio.ensure_future(server.app.engine.profile(1, 5.0))
        assert await asyncio.to_thread(starts.wait, 60)
        asked.cancel()
        await asyncio.sleep(0)
        error_of(await server.http.post("/v1/profile", json={}), 409)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert calls == ["start", "stop"]
        assert (await server.http.post("/v1/profile", json={"seconds": 0.1})).status_code == 200


async def test_nothing_is_recorded_if_the_caller_hangs_up_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("nobody wants it")

    monkeypatch.setattr(recorder.Recorder, "start", start)
    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        blocker = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        await runner.begun()
        lane = server.app.engine.executor.lanes[0]
        asked = asyncio.ensure_future(server.app.engine.profile(1, 5.0))
        await until(lambda: bool(lane.jobs))
        asked.cancel()
        await asyncio.sleep(0)
        runner.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        output_of(await blocker)


async def test_a_large_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_BYTES", 100)
    async with serving(tiny_settings()) as server:
        text = error_of(await server.http.post("/v1/profile", json={"seconds": 0.1}), 422)
    assert text.startswith("profile: expected a trace of at most 100 bytes, got ")


@pytest.mark.parametrize("kind", REASONS)
async def test_nothing_is_recorded_without_a_temporary_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_settings()) as server:
        tried = break_temporary_files(monkeypatch, kind, tmp_path)
        monkeypatch.setattr(profiling, "Recorder", None)  # it is not asked for one
        text = error_of(await server.http.post("/v1/profile", json={}), 507 if kind == "full" else 503)
        expected = "profile: expected a folder for temporary files (TMPDIR) that can be written to"
        assert text == f"{expected}, got {tried}: {REASONS[kind]}"


def cut_off(file: Path, export: Callable[[str], None]) -> None:
    export(str(file))
    file.write_bytes(file.read_bytes()[:-100])


def nothing(file: Path, export: Callable[[str], None]) -> None:
    file.with_suffix(".tmp").symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("write", "status", "reason"),
    [
        (cut_off, 503, "Input/output error"),
        (nothing, 507, "No space left on device"),
    ],
)
async def test_a_trace_that_could_not_be_written_is_no_answer(
    write: Callable[[Path, Callable[[str], None]], None], status: int, reason: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The profiler says nothing, and leaves the beginning of a trace, or none."""
    export = torch.profiler.profile.export_chrome_trace
    async with serving(tiny_settings()) as server:
        with monkeypatch.context() as broken:
            broken.setattr(tempfile, "tempdir", str(tmp_path))
            broken.setattr(
                torch.profiler.profile,
                "export_chrome_trace",
                lambda self, file: write(Path(file), partial(export, self)),
            )
            text = error_of(await server.http.post("/v1/profile", json={"seconds": 0.1}), status)
            assert text == f"profile: expected room for the trace, got {tmp_path}: {reason}"
            assert list(tmp_path.iterdir()) == []
        response = await server.http.post("/v1/profile", json={"seconds": 0.1})
        assert "traceEvents" in json.loads(response.content)


async def test_a_trace_that_could_not_be_written_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the profiler keeps its file open."""
    with ExitStack() as stack:
        held: list[IO[bytes]] = []

        def export(_: object, name: str) -> None:
            held.append(stack.enter_context(Path(f"{name}.tmp").open("wb")))
            held[0].write(bytes(100_000))
            held[0].flush()

        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
        async with serving(tiny_settings()) as server:
            error_of(await server.http.post("/v1/profile", json={"seconds": 0.1}), 503)
        assert os.fstat(held[0].fileno()).st_size == 0
