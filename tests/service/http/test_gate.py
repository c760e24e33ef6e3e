"""Who may call what: every route, with each kind of key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from expertd.service.http.app import ExpertApp
from expertd.service.http.rights import ANY, CALLS, rights_for
from tests.service.apps import Serving, error_of, hidden_request, rows, serving, serving_runner, tiny_settings
from tests.service.keys import all_keys, bearer, key_of
from tests.service.runners import EchoRunner
from tests.service.sockets import ask, infer

NAMES = ("infer", "admin", "metrics")
UNKNOWN = "Authorization: expected a key of this server, got an unknown one"
MISSING = "Authorization: expected Bearer and a key, got none"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return all_keys(tmp_path / "keys.yaml")


@asynccontextmanager
async def guarded(keys: Path) -> AsyncIterator[Serving]:
    """An application with these keys."""
    settings = tiny_settings(keys=keys)
    async with serving(settings, serving_runner(EchoRunner())) as server:
        yield server


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
