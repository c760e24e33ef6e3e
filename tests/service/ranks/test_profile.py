"""Recordings of steps that ranks run: one trace, in which each rank has a name."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import httpx
import pytest

from expertd.service.engine.errors import (
    DeviceLostError,
    StorageFullError,
    StorageUnavailableError,
)
from expertd.service.engine.profile_run import profile_steps
from expertd.service.ranks import recording
from expertd.service.ranks import setup as words
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.front.loading import load_ranks
from expertd.service.ranks.recording import RankRecorder, RankRecordings
from tests.service.apps import Serving, error_of, rows, tiny_settings
from tests.service.forking import import_first
from tests.service.full import REASONS, break_temporary_files
from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.servers import output_for, rank_processes, serving_ranks
from tests.service.waiting import until

pytestmark = pytest.mark.slow  # each server starts processes


@pytest.fixture(scope="module", autouse=True)
def profiler() -> None:
    """Imported before the forks: it takes each process seconds."""
    import_first("torch.profiler", "torch._inductor.config")


async def load(server: Serving, end: asyncio.Event) -> None:
    while not end.is_set():
        await output_for(server, rows(8))


async def record(server: Serving, **wanted: float) -> httpx.Response:
    """The answer of a recording while requests are answered."""
    end = asyncio.Event()
    loading = asyncio.ensure_future(load(server, end))
    response = await server.http.post("/v1/profile", json=wanted)
    end.set()
    await loading
    return response


async def recorded(server: Serving, **wanted: float) -> dict[str, Any]:
    """The trace of one."""
    response = await record(server, **wanted)
    assert response.status_code == 200, response.text
    trace: dict[str, Any] = json.loads(response.content)
    return trace


def processes(trace: dict[str, Any]) -> dict[int, str]:
    """The names of processes, by number."""
    events = trace["traceEvents"]
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def check(trace: dict[str, Any], ranks: int, steps: int) -> None:
    """Each rank has its operations, at the time of the others'."""
    names = processes(trace)
    assert list(names.values()).count("front end: CPU") == 1
    assert trace["expertd"]["steps"] >= steps
    operations = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    spans = {}
    for rank in range(ranks):
        (number,) = [pid for pid, name in names.items() if name == f"rank {rank}: CPU"]
        own = [event for event in operations if event["pid"] == number]
        assert sum(event["name"] == "aten::softmax" for event in own) >= steps - 1  # one may run at the end
        threads = [
            event["args"]["name"]
            for event in trace["traceEvents"]
            if event["name"] == "thread_name" and event["pid"] == number
        ]
        assert any(thread.startswith("steps (thread ") for thread in threads)
        spans[rank] = min(event["ts"] for event in own), max(event["ts"] for event in own)
    assert max(first for first, _ in spans.values()) < min(last for _, last in spans.values())


async def test_each_rank_records_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server:
        first = asyncio.ensure_future(recorded(server, steps=5, seconds=60))
        await until(lambda: server.app.engine._profiling._is_running)
        text = error_of(await server.http.post("/v1/profile", json={}), 409)
        assert text == "profile: expected none to be recorded, got one that is"
        check(await first, 2, 5)
        with monkeypatch.context() as context:
            context.setattr("expertd.service.engine.recorder.MAX_BYTES", 20_000)  # here, but not on ranks
            text = error_of(await record(server, steps=5, seconds=60), 422)
        assert text.startswith("profile: expected a trace of at most 20000 bytes, got ")
        begin, begun = RankRecordings.begin, threading.Event()

        def begin_and_say(ranks: RankRecordings) -> None:
            begin(ranks)
            begun.set()

        with monkeypatch.context() as context:
            context.setattr(RankRecordings, "begin", begin_and_say)
            waiting = asyncio.ensure_future(server.app.engine.profile(steps=2, seconds=3600))
            await until(begun.is_set)
        os.kill(rank_processes()[1], signal.SIGKILL)
        with pytest.raises(DeviceLostError):  # it does not wait for steps that will not come
            await waiting
        await until(lambda: server.app.engine.why_not_ready() is None)
        check(await recorded(server, steps=2, seconds=60), 2, 2)  # of ranks that have started again


def full_disk() -> IO[bytes]:
    return Path("/dev/full").open("w+b")


@pytest.mark.parametrize("kind", REASONS)
def test_the_front_end_says_what_a_rank_cannot_write(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a temporary folder records nothing."""
    said: list[str] = []
    rank = RankRecorder(1, cast(Any, None), lambda job: job(), said.append)
    with monkeypatch.context() as broken:
        tried = break_temporary_files(broken, kind, tmp_path)
        rank.handle([words.BEGIN], cast(Any, None))
    rank.handle([words.END], cast(Any, None))
    assert said[1] == ""
    group = SimpleNamespace(record=lambda files, *message: {0: "", 1: said[0] * (message[1] == words.BEGIN)})
    error = StorageFullError if kind == "full" else StorageUnavailableError
    with pytest.raises(error) as caught:
        RankRecordings(lambda: cast(RankGroup, group)).begin()
    expected = "profile: expected a folder for temporary files (TMPDIR) that can be written to"
    assert str(caught.value) == f"rank 1: {expected}, got {tried}: {REASONS[kind]}"


async def test_ranks_of_other_nodes_record_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = node_settings(ranks=1)
    with agent(settings, tmp_path):
        async with serving_ranks(settings) as server:
            with monkeypatch.context() as full:
                full.setattr(recording, "_memory_file", full_disk)
                for _ in range(2):
                    text = error_of(await record(server, steps=3, seconds=60), 507)
                    room = "profile: expected room for the trace, got an error: No space left on device"
                    assert text == f"rank 0: {room}"
            check(await recorded(server, steps=3, seconds=60), 2, 3)


async def test_steps_are_recorded_without_a_server() -> None:
    recording = await profile_steps(tiny_settings(ranks=2), 3, 8, 20, load_ranks)
    trace = json.loads(recording.trace)
    check(trace, 2, 3)
    assert recording.steps == trace["expertd"]["steps"] == 3
