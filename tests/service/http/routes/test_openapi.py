"""The OpenAPI document lists every route and describes it correctly."""

from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from expertd.service.http.app import ExpertApp
from expertd.service.http.rights import CALLS
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

OWN = {"/openapi.json", "/docs", "/docs/{name}", "/", "/page/{name}", "/v1/live"}
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


def test_the_documented_calls_are_those_with_a_right(document: dict[str, Any]) -> None:
    """All that are served have one (test_keys)."""
    documented = {f"{method} {path}" for method, path in operations(document)}
    assert documented == {call for call in CALLS if call.partition(" ")[2] not in OWN}


async def test_every_documented_call_is_served(document: dict[str, Any]) -> None:
    async with serving(tiny_settings()) as server:
        for (method, path), operation in sorted(
            operations(document).items(), key=lambda each: "unload" in each[0][1]
        ):
            url = path.format(model="tiny", version="1", name="region", channel="1")
            response = await server.http.request(method, url, json=BODIES.get(path))
            status, kind = str(response.status_code), response.headers["content-type"].split(";")[0]
            assert status in operation["responses"], (url, response.text)
            assert kind in operation["responses"][status]["content"], url
            assert (await server.http.request("PATCH", url)).status_code == 405, url


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
    statuses = "200 400 401 403 404 408 413 415 429 500 503"
    assert set(operation["responses"]) == set(statuses.split())


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
