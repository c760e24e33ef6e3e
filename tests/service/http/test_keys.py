"""Keys over a connection: refused before the body, changed while it is open, counted, and in the log."""

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import numpy as np
import pytest

from expertd.service.inference import gate
from tests.service.apps import (
    HIDDEN,
    Serving,
    error_of,
    hidden_request,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.keys import all_keys, bearer, key_of, write_keys
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, Answer, connect, head, infer, read_answer

BODY, LENGTH = hidden_request(rows(1))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return all_keys(tmp_path / "keys.yaml")


@asynccontextmanager
async def guarded(keys: Path) -> AsyncIterator[Serving]:
    """An application with these keys."""
    settings = tiny_settings(keys=keys, access_log=True)
    async with serving(settings, serving_runner(EchoRunner())) as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The gate's time, which only a test moves on."""
    time = [100.0]
    monkeypatch.setattr(gate, "monotonic", lambda: time[0])
    return time


def request(name: str) -> bytes:
    """An infer request with a name's key."""
    return infer(BODY, LENGTH, f"Authorization: Bearer {key_of(name)}")


def partitions(name: str, *headers: str) -> bytes:
    """The head of a change of partitions with a name's key."""
    return head("PUT /v1/partitions HTTP/1.1", f"Authorization: Bearer {key_of(name)}", *headers)


async def asked(sock: socket.socket, data: bytes) -> Answer:
    """The answer on a connection that stays open."""

    def ask() -> Answer:
        sock.sendall(data)
        return read_answer(sock)

    return await asyncio.to_thread(ask)


async def statuses(sock: socket.socket, *names: str) -> list[int]:
    """The statuses of infer requests with these names' keys, one after the other."""
    return [(await asked(sock, request(name))).status for name in names]


async def test_each_request_of_a_connection_is_checked(keys: Path) -> None:
    async with guarded(keys) as server:
        with closing(connect(server.port)) as sock:
            names = ("infer", "nobody", "infer", "infer", "admin", "infer", "metrics")
            assert await statuses(sock, *names) == [200, 401, 200, 200, 403, 200, 403]
            assert (await asked(sock, infer(BODY, LENGTH))).status == 401
            assert (await asked(sock, partitions("infer"))).status == 403
            assert (await asked(sock, partitions("admin"))).status == 400, "no body"
            assert (await asked(sock, head("GET /v2/health/ready HTTP/1.1"))).status == 200


@pytest.mark.parametrize(("name", "status"), [("nobody", 401), ("metrics", 403)])
@pytest.mark.parametrize("call", [f"POST {INFER}", "PUT /v1/partitions"])
async def test_a_call_is_refused_before_its_body(keys: Path, call: str, name: str, status: int) -> None:
    size = 300_000
    lines = (f"Content-Length: {size}", f"Authorization: Bearer {key_of(name)}")
    async with guarded(keys) as server:
        with closing(connect(server.port)) as sock:
            assert (await asked(sock, head(f"{call} HTTP/1.1", *lines))).status == status
            assert (await asked(sock, bytes(size) + request("infer"))).status == 200, "the body is dropped"
            data = head(f"{call} HTTP/1.1", *lines, "Expect: 100-continue")
            assert (await asked(sock, data)).status == status
            assert await asyncio.to_thread(sock.recv, 1) == b"", "closed: the body may follow or not"


async def test_models_that_are_not_served_are_not_told_apart(keys: Path) -> None:
    async with guarded(keys) as server:
        for path in ("/v2/models/tiny/infer", "/v2/models/other/infer", "/v2/models/tiny/versions/9/infer"):
            answer = await server.http.post(path)
            assert answer.status_code == 401
            assert "model" not in answer.text


async def test_calls_that_need_no_key_do_not_name_models(keys: Path) -> None:
    poisoned = hidden_request(np.zeros((1, HIDDEN), np.float32))
    settings = tiny_settings(keys=keys)
    async with serving(settings, serving_runner(EchoRunner(poison=0.0))) as server:
        for path in ("/v2/models/other/ready", "/v2/models/other/versions/1/ready"):
            assert error_of(await server.http.get(path), 404) == "model: expected a served one, got 'other'"
        answer = await server.http.get("/v2/models/other", headers=bearer("infer"))
        assert error_of(answer, 404) == "model: expected tiny, got 'other'"
        for _ in range(5):
            error_of(await server.infer(*poisoned, Authorization=bearer("infer")["Authorization"]), 500)
        text = error_of(await server.http.get("/v2/health/ready"), 503)
        assert text == "1 of 1 models: at least the last 5 steps failed"
        assert "model tiny: " in error_of(await server.http.get("/v2/models/tiny/ready"), 503)


async def test_keys_change_while_a_connection_is_open(
    clock: list[float], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(keys) as server:
        caplog.set_level(logging.INFO, "expertd.service.inference.gate")
        with closing(connect(server.port)) as sock:
            assert await statuses(sock, "infer", "new") == [200, 401]
            write_keys(keys, infer=["infer"], new=["infer"])
            assert await statuses(sock, "infer", "new") == [200, 401], "looked at within the last second"
            clock[0] += 1
            assert await statuses(sock, "infer", "new") == [200, 200]
            keys.touch()
            clock[0] += 1
            assert await statuses(sock, "infer", "new") == [200, 200], "the same keys"
            write_keys(keys, infer=["metrics"], new=["infer"])
            clock[0] += 1
            assert await statuses(sock, "infer", "new") == [403, 200], "another right"
            write_keys(keys, other=["infer"])
            clock[0] += 1
            assert await statuses(sock, "infer", "new", "other") == [401, 401, 200]
        assert caplog.messages == [
            f"keys: {keys} has changed, and has {names}"
            for names in ("infer and new", "infer and new", "other")
        ]


async def test_a_broken_file_leaves_the_keys_as_they_were(
    clock: list[float], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(keys) as server:
        with closing(connect(server.port)) as sock:
            keys.write_text(f"- {key_of('infer')}\n- 1\n")
            for _ in range(3):
                clock[0] += 1
                assert await statuses(sock, "infer", "nobody") == [200, 401]
            keys.unlink()
            for _ in range(3):
                clock[0] += 1
                assert await statuses(sock, "infer", "nobody") == [200, 401]
            write_keys(keys, nobody=["infer"])
            clock[0] += 1
            assert await statuses(sock, "infer", "nobody") == [401, 200]
        remain = "the keys that were read before remain in use"
        expected = "expected name, sha256 and rights, got another text (and 1 more)"
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert errors == [
            f"keys: {keys}: 0: {expected}; {remain}",
            f"keys: {keys}: cannot be read: No such file or directory; {remain}",
        ]
        assert key_of("infer") not in caplog.text


async def test_a_file_that_comes_back_unchanged_is_logged(
    clock: list[float], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(keys) as server:
        away = keys.rename(keys.with_suffix(".away"))
        for _ in range(3):
            clock[0] += 1
            assert (await server.infer(BODY, LENGTH, **bearer("infer"))).status_code == 200
        away.rename(keys)
        for _ in range(3):
            clock[0] += 1
            assert (await server.infer(BODY, LENGTH, **bearer("infer"))).status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.name == gate.__name__]
    assert len(lines) == 2
    assert lines[1] == f"keys: {keys} can be read again, and has not changed"


async def test_a_file_that_differs_in_its_time_or_its_inode_alone_is_read_again(
    clock: list[float], keys: Path
) -> None:
    async with guarded(keys) as server:
        found = keys.stat()
        for name, other in (("one", "two"), ("two", "six")):
            write_keys(keys, **{name: ["infer"]})
            os.utime(keys, ns=(found.st_atime_ns, found.st_mtime_ns))
            clock[0] += 1
            assert (await server.infer(BODY, LENGTH, **bearer(name))).status_code == 200
            assert (await server.infer(BODY, LENGTH, **bearer(other))).status_code == 401


async def test_calls_are_counted_by_key_and_refusals_by_reason(keys: Path) -> None:
    async with guarded(keys) as server:

        def count(key: str, result: str) -> float:
            return server.metric("key_requests_total", key=key, result=result)

        with closing(connect(server.port)) as sock:
            await statuses(sock, "infer", "infer", "nobody", "metrics", "infer")
            await asked(sock, partitions("infer"))
            await asked(sock, head("GET /v2 HTTP/1.1"))
        assert (count("infer", "admitted"), count("infer", "forbidden")) == (3, 1)
        assert (count("metrics", "admitted"), count("metrics", "forbidden")) == (0, 1)
        assert (count("admin", "admitted"), count("", "unauthorized")) == (0, 2)
        for reason, status in (("unauthorized", "401"), ("forbidden", "403")):
            assert server.metric("refusals_total", model="tiny", reason=reason) == 1
            assert server.metric("requests_total", model="tiny", status=status) == 1


async def test_the_access_log_has_names_and_no_keys(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with guarded(keys) as server:
        caplog.set_level(logging.DEBUG)
        with closing(connect(server.port)) as sock:
            await statuses(sock, "infer", "nobody")
            await asked(sock, partitions("metrics"))
        lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
        assert [re.sub(r"^127\.0\.0\.1:\d+ ", "", line) for line in lines] == [
            f'infer "POST {INFER} HTTP/1.1" 200',
            f'- "POST {INFER} HTTP/1.1" 401',
            'metrics "PUT /v1/partitions HTTP/1.1" 403',
        ]
        assert "secret" not in caplog.text


async def test_a_request_keeps_its_name_while_another_with_the_same_head_is_refused(
    clock: list[float], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings(keys=keys, access_log=True, log_format="json")
    runner = EchoRunner()
    runner.gate.clear()
    async with serving(settings, serving_runner(runner)) as server:
        caplog.set_level(logging.INFO, "expertd.service.inference.call")
        with closing(connect(server.port)) as first, closing(connect(server.port)) as second:
            waiting = asyncio.ensure_future(statuses(first, "infer"))
            assert await asyncio.to_thread(runner.entered.acquire, True, 10)
            write_keys(keys, other=["infer"])
            clock[0] += 1
            assert await statuses(second, "infer") == [401]
            runner.gate.set()
            assert await waiting == [200]
    logged = [vars(record)["fields"] for record in caplog.records if "fields" in vars(record)]
    assert [(fields["status"], fields.get("key")) for fields in logged] == [(401, None), (200, "infer")]


async def test_without_a_file_everybody_may_call(keys: Path) -> None:
    async with serving(tiny_settings(), serving_runner(EchoRunner())) as server:
        for headers in ({}, bearer("nobody")):
            assert (await server.http.get("/metrics", headers=headers)).status_code == 200
            assert (await server.infer(BODY, LENGTH, **headers)).status_code == 200
        assert server.metric("key_requests_total", key="", result="unauthorized") == 0
