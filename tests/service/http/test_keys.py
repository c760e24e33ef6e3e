"""Who may call what: every route with each kind of key; keys that change, are counted, and are in the log."""

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from expertd.service.http.app import ExpertApp
from expertd.service.http.rights import ANY, CALLS, rights_for
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
from tests.service.sockets import INFER, Answer, ask, connect, head, infer, read_answer

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


def messages_of_the_gate(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == gate.__name__]


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
        assert messages_of_the_gate(caplog) == [
            f"keys: {keys} has changed, and has {names}"
            for names in ("infer and new", "infer and new", "other")
        ]


async def test_a_broken_file_leaves_the_keys_as_they_were(
    clock: list[float], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, gate.__name__)
    async with guarded(keys) as server:
        with closing(connect(server.port)) as sock:

            async def unchanged() -> None:
                for _ in range(3):
                    clock[0] += 1
                    assert await statuses(sock, "infer", "nobody") == [200, 401]

            away = keys.rename(keys.with_suffix(".away"))
            await unchanged()
            away.rename(keys)
            await unchanged()
            keys.write_text(f"- {key_of('infer')}\n- 1\n")
            await unchanged()
            write_keys(keys, nobody=["infer"])
            clock[0] += 1
            assert await statuses(sock, "infer", "nobody") == [401, 200]
    remain = "the keys that were read before remain in use"
    expected = "expected name, sha256 and rights, got another text (and 1 more)"
    assert messages_of_the_gate(caplog) == [
        f"keys: {keys}: cannot be read: No such file or directory; {remain}",
        f"keys: {keys} can be read again, and has not changed",
        f"keys: {keys}: 0: {expected}; {remain}",
        f"keys: {keys} has changed, and has nobody",
    ]
    assert key_of("infer") not in caplog.text


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
        caplog.set_level(logging.INFO, "expertd.service.inference.admission")
        with closing(connect(server.port)) as first, closing(connect(server.port)) as second:
            waiting = asyncio.ensure_future(statuses(first, "infer"))
            await runner.begun()
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


NAMES = ("infer", "admin", "metrics")
UNKNOWN = "Authorization: expected a key of this server, got an unknown one"
MISSING = "Authorization: expected Bearer and a key, got none"


def url_of(path: str) -> str:
    path = "/page/main.js" if path == "/page/{name}" else path
    query = "?events=1" if path == "/v1/live" else ""
    return path.format(model="tiny", version="1", name="region", channel="1") + query


def test_every_route_has_its_right() -> None:
    """A new route without a right fails here: say in the table who may call it."""
    app = ExpertApp(tiny_settings())
    served = {
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, Route | APIRoute)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == set(CALLS)


def test_only_health_and_the_empty_page_are_open() -> None:
    assert {call for call, rights in CALLS.items() if not rights} == {
        "GET /v2/health/live",
        "GET /v2/health/ready",
        "GET /v2/models/{model}/ready",
        "GET /v2/models/{model}/versions/{version}/ready",
        "GET /",
        "GET /page/{name}",
    }


async def test_every_route_is_checked(keys: Path) -> None:
    async with guarded(keys) as server:
        for route, rights in CALLS.items():
            method, path = route.split(" ")
            # A recording takes the seconds that it is asked to.
            body = {"seconds": 0.1} if path == "/v1/profile" else None

            async def call(way: str, headers: dict[str, str], body: Any = body, path: str = path) -> Any:
                return await server.http.request(way, url_of(path), headers=headers, json=body)

            for way in (method, "HEAD") if method == "GET" else (method,):
                for headers, text in (({}, MISSING), (bearer("nobody"), UNKNOWN)):
                    response = await call(way, headers)
                    assert response.status_code == (401 if rights else 200), route
                    if rights:
                        assert response.headers["www-authenticate"] == "Bearer"
                        assert way == "HEAD" or error_of(response, 401) == text
            for name in NAMES if rights else ():
                response = await call(method, bearer(name))
                if name in rights:
                    assert response.status_code != 401, route
                    assert "expected the right" not in response.text
                else:
                    expected = " or ".join(rights)
                    assert error_of(response, 403) == f"key {name}: expected the right {expected}, got {name}"
                    assert "www-authenticate" not in response.headers


async def test_an_unknown_path_needs_a_key_but_no_right(keys: Path) -> None:
    async with guarded(keys) as server:
        for path in ("/page", "/nothing", "/v2/models", "/v1/partitions/", "/v2/models/a/b/c", "/*"):
            assert (await server.http.get(path)).status_code == 401
            for name in NAMES:
                assert (await server.http.get(path, headers=bearer(name))).status_code == 404
        assert (await server.http.patch("/metrics")).status_code == 401
        assert (await server.http.patch("/metrics", headers=bearer("infer"))).status_code == 405
        for path in ("/v1/partitions%0A", "/v1%2Fpartitions", "/v1/partition%73", "//v1/partitions"):
            response = await server.http.put(path, headers=bearer("infer"), content=b'{"partitions": {}}')
            assert response.status_code in (403, 404), "no spelling of a path gets around its right"


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/v1/partitions\n"), ("HEAD", "/metrics"), ("GET", "/v2\n")]
)
def test_paths_match_as_the_application_matches_them(method: str, path: str) -> None:
    call = f"{'GET' if method == 'HEAD' else method} {path.strip()}"
    assert rights_for(method, path) == CALLS[call]
    assert rights_for("PATCH", path) == ANY


ELSE = "Authorization: expected Bearer and a key, got something else"


async def test_forms_of_the_header(keys: Path) -> None:
    key = key_of("infer")
    forms = [
        ([f"bearer {key}"], None),
        ([f"BEARER   {key} "], None),
        ([key], ELSE),
        (["Bearer "], ELSE),
        ([f"Basic {key}"], ELSE),
        ([f"Bearer {key} x"], UNKNOWN),
        ([f"Bearer {key[:-1]}"], UNKNOWN),
        ([f"Bearer {key}"] * 2, "Authorization: expected one header, got 2"),
        (["Bearer \xff"], UNKNOWN),
    ]
    async with guarded(keys) as server:
        for values, expected in forms:
            lines = [f"Authorization: {value}" for value in values]
            request = infer(*hidden_request(rows(1)), *lines, "Connection: close")
            (answer,) = await asyncio.to_thread(ask, server.port, request)
            if expected is None:
                assert answer.status == 200
            else:
                assert (answer.status, answer.error) == (401, expected)
                assert key.encode() not in answer.body
