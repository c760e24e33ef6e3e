"""The OpenAPI document lists every route and describes it correctly."""

from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from expertd.service.http.app import ExpertApp
from expertd.service.http.bodies import BodyReader
from expertd.service.http.routes import (
    channels_router,
    configuration_router,
    log_router,
    metrics_router,
    partitions_router,
    placement_router,
    profile_router,
    protocol_router,
    repository_router,
    routing_router,
    shared_memory_router,
    statistics_router,
    swagger_router,
)
from expertd.service.settings.loader import load_settings
from expertd.service.settings.model import Settings
from tests.paths import DEMO
from tests.service.apps import (
    hidden_request,
    json_input,
    json_request,
    output_of,
    rows,
    serving,
    tiny_settings,
)

OWN = {"/openapi.json", "/docs", "/docs/{name}"}
BODIES = {"/v1/profile": {"seconds": 0.1}}  # without steps, it takes the seconds that it is asked to


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return ExpertApp(tiny_settings()).openapi()


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


EXPECTED = {
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/{model}"),
    ("GET", "/v2/models/{model}/versions/{version}"),
    ("GET", "/v2/models/{model}/ready"),
    ("GET", "/v2/models/{model}/versions/{version}/ready"),
    ("GET", "/v2/models/{model}/config"),
    ("GET", "/v2/models/{model}/versions/{version}/config"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/models/{model}/stats"),
    ("GET", "/v2/models/{model}/versions/{version}/stats"),
    ("POST", "/v2/models/{model}/infer"),
    ("POST", "/v2/models/{model}/versions/{version}/infer"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/{model}/load"),
    ("POST", "/v2/repository/models/{model}/unload"),
    *(
        (method, f"/v2/{kind}sharedmemory/{call}")
        for kind in ("system", "cuda")
        for method, call in (
            ("GET", "status"),
            ("GET", "region/{name}/status"),
            ("POST", "region/{name}/register"),
            ("POST", "unregister"),
            ("POST", "region/{name}/unregister"),
        )
    ),
    ("GET", "/v1/partitions"),
    ("PUT", "/v1/partitions"),
    ("GET", "/v1/placement"),
    ("POST", "/v1/placement"),
    ("GET", "/v1/log"),
    ("PUT", "/v1/log"),
    ("POST", "/v1/profile"),
    ("POST", "/v1/models/{model}/routing"),
    ("GET", "/v1/channels"),
    ("POST", "/v1/channels"),
    ("GET", "/v1/channels/{channel}"),
    ("DELETE", "/v1/channels/{channel}"),
    ("GET", "/metrics"),
}


def test_the_documented_routes_are_complete(document: dict[str, Any]) -> None:
    assert set(operations(document)) == EXPECTED


@pytest.mark.parametrize(("method", "path"), sorted(EXPECTED))
async def test_every_documented_route_is_served(document: dict[str, Any], method: str, path: str) -> None:
    url = path.format(model="tiny", version="1", name="region", channel="1")
    async with serving(tiny_settings()) as server:
        response = await server.http.request(method, url, json=BODIES.get(path))
        other = await server.http.request("PATCH", url)
    responses = operations(document)[method, path]["responses"]
    assert str(response.status_code) in responses, response.text
    assert response.headers["content-type"].split(";")[0] in responses[str(response.status_code)]["content"]
    assert other.status_code == 405


def test_no_route_is_served_without_being_documented(document: dict[str, Any]) -> None:
    app = ExpertApp(tiny_settings())
    bodies = BodyReader(app.engine.settings.limits)
    routers = [
        statistics_router(app.engine, app.metrics),
        configuration_router(app.engine),
        protocol_router(app.engine),
        repository_router(app.engine, bodies),
        shared_memory_router(app.engine.shared_memory, bodies),
        partitions_router(app.engine, bodies),
        placement_router(app.engine, bodies),
        channels_router(app.channels, bodies, app.gate),
        metrics_router(app.metrics),
        log_router(app.set_log_level, bodies),
        profile_router(app.engine, bodies),
        routing_router(app.engine, bodies),
    ]
    routes = [route for router in routers for route in router.routes]
    assert all(isinstance(route, APIRoute) for route in routes)
    served = {(method, r.path) for r in routes if isinstance(r, APIRoute) for method in r.methods or ()}
    assert served == set(operations(document))
    own = {route.path for route in app.routes if isinstance(route, Route) and not isinstance(route, APIRoute)}
    own |= {route.path for route in swagger_router("").routes if isinstance(route, APIRoute)}
    assert own == OWN, "besides the document itself and its page"


def test_every_error_has_the_protocols_form_and_every_reference_its_target(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for operation in operations(document).values():
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
    references = set(_references(document))
    assert references == {f"#/components/schemas/{name}" for name in schemas}, "all defined, all used"


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [found for value in node.values() for found in _references(value)]
    if isinstance(node, list):
        return [found for value in node for found in _references(value)]
    return []


def test_infer_is_documented_with_both_bodies_and_its_headers(document: dict[str, Any]) -> None:
    operation = operations(document)["POST", "/v2/models/{model}/infer"]
    for body in (operation["requestBody"], operation["responses"]["200"]):
        assert set(body["content"]) == {"application/json", "application/octet-stream"}
        assert body["content"]["application/octet-stream"]["schema"] == {"type": "string", "format": "binary"}
    names = {parameter["name"] for parameter in operation["parameters"]}
    assert names == {"model", "Inference-Header-Content-Length", "Content-Encoding", "Accept-Encoding"}
    assert set(operation["responses"]) == {
        "200",
        "400",
        "401",
        "403",
        "404",
        "408",
        "413",
        "415",
        "429",
        "500",
        "503",
    }


async def test_responses_match_their_schemas(document: dict[str, Any]) -> None:
    response_schema = operations(document)["POST", "/v2/models/{model}/infer"]["responses"]["200"]
    schema = response_schema["content"]["application/json"]["schema"]
    async with serving(tiny_settings()) as server:
        in_json = await server.infer(json_request(json_input(rows(1)), id="a"))
        in_binary = await server.infer(*hidden_request(rows(1)))
        served: httpx.Response = await server.http.get("/openapi.json")
    assert set(in_json.json()) <= set(schema["properties"])
    assert set(schema["required"]) <= set(in_json.json())
    assert in_binary.headers["content-type"] in response_schema["content"]
    assert served.json() == document


@pytest.mark.parametrize("path", ["/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"])
@pytest.mark.parametrize("read", [tiny_settings, partial(load_settings, DEMO)], ids=["tiny", "demo"])
async def test_the_example_works_as_sent(read: Callable[[], Settings], path: str) -> None:
    settings = read()
    async with serving(settings) as server:
        served = (await server.http.get("/openapi.json")).json()
        operation = operations(served)["POST", path]
        values = {p["name"]: p["example"] for p in operation["parameters"] if p["in"] == "path"}
        example = operation["requestBody"]["content"]["application/json"]["example"]
        response = await server.http.post(path.format(**values), json=example)
    assert output_of(response).shape == (1, settings.models[0].hidden_size)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


async def test_the_page_works_offline() -> None:
    async with serving(tiny_settings()) as server:
        page = await server.http.get("/docs")
        assert page.status_code == 200
        links = _Links()
        links.feed(page.text)
        types = {}
        for link in links.found:
            assert not urlsplit(link).netloc
            answer = await server.http.get(urljoin("/docs", link))
            assert answer.status_code == 200
            assert len(answer.content) > 1000
            types[link.rpartition(".")[2]] = answer.headers["content-type"].split(";")[0]
        assert types == {"js": "text/javascript", "css": "text/css", "png": "image/png"}
        assert (await server.http.get("/docs/redoc.standalone.js")).status_code == 404
    assert "://" not in page.text
    assert "url: 'openapi.json'" in page.text
    policy = page.headers["content-security-policy"]
    assert policy == (
        "default-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ), "the browser contacts no other host"
