"""Passing requests on to the engine's process: what it does when that process misbehaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from expertd.service.engine.metrics.requests import KeyCounts
from expertd.service.engine.steps import caller_number
from expertd.service.http.bodies import BodyReader
from expertd.service.http.engine_proxy import EngineProxy
from expertd.service.http.infer_head import HttpHead
from expertd.service.inference.gate import KEY_NAME, Gate, KeyFile
from expertd.service.settings.parts import Limits
from tests.service.apps import error_of
from tests.service.keys import all_keys, bearer


@asynccontextmanager
async def passed(path: Path, keys: KeyFile | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the proxy to the process at `path`."""
    proxy = EngineProxy(path, BodyReader(Limits()), Gate(keys, KeyCounts()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://test") as http:
        yield http


@asynccontextmanager
async def answering(path: Path, response: bytes) -> AsyncIterator[list[bytes]]:
    """A process that answers everything with `response`; yields the requests' heads."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(response)
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        yield heads


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n1234",
        b"HTTP/1.1 200 OK\r\nx: " + bytes(100_000),
    ],
    ids=["nothing", "no response", "half a head", "half a body", "an endless head"],
)
async def test_a_broken_response_is_503(tmp_path: Path, response: bytes) -> None:
    async with answering(tmp_path / "engine", response), passed(tmp_path / "engine") as http:
        answer = await http.get("/v2")
        assert error_of(answer, 503) == "the engine's process does not answer"
        assert answer.headers["retry-after"] == "1"


async def test_an_engine_that_is_gone_is_503(tmp_path: Path) -> None:
    async with passed(tmp_path / "engine") as http:
        assert error_of(await http.get("/v2"), 503) == "the engine's process does not answer"


async def test_headers_of_a_connection_stay_on_it(tmp_path: Path) -> None:
    response = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nconnection: close\r\ndate: never\r\n"
        b"content-length: 2\r\nx-own: yes\r\n\r\nok"
    )
    async with answering(tmp_path / "engine", response) as heads, passed(tmp_path / "engine") as http:
        headers = {"Expect": "100-continue", "Connection": "keep-alive", "Accept": "text/*", "X-Other": "1"}
        answer = await http.post("/v1/a%2Fb?c=d", content=b"body", headers=headers)
        assert (answer.status_code, answer.content) == (201, b"ok")
        assert dict(answer.headers) == {"content-length": "2", "x-own": "yes"}
        line, *lines = heads[0].decode().lower().split("\r\n")[:-2]
        assert line == "post /v1/a%2fb?c=d http/1.1"
        sent = dict(each.split(": ", 1) for each in lines)
        assert (sent["host"], sent["connection"], sent["content-length"]) == ("engine", "close", "4")
        assert (sent["accept"], sent["x-other"]) == ("text/*", "1")
        assert "expect" not in sent


async def test_the_engine_is_told_the_name_of_a_key_and_not_the_key(tmp_path: Path) -> None:
    keys = KeyFile(all_keys(tmp_path / "keys.yaml"))
    response = b"HTTP/1.1 200 OK\r\n\r\n"
    async with (
        answering(tmp_path / "engine", response) as heads,
        passed(tmp_path / "engine", keys) as http,
    ):
        for headers in ({}, {"Expertd-Key-Name": "admin"}):  # a client's own is not passed on
            await http.get("/v1/channels", headers={**bearer("infer"), **headers})
    for head in heads:
        lines = [line for line in head.split(b"\r\n") if line.startswith((KEY_NAME, b"authorization"))]
        assert lines == [KEY_NAME + b": infer"]


def test_only_an_engine_behind_http_processes_believes_a_name() -> None:
    headers = [(KEY_NAME, b"infer")]
    assert Gate(None, KeyCounts(), behind=True).caller(headers) == "infer"
    assert Gate(None, KeyCounts()).caller(headers) == ""
    head = HttpHead("tiny", "1", headers)
    Gate(None, KeyCounts(), behind=True).admit_infer(head)
    assert (head.key_name, head.caller) == ("infer", caller_number("infer"))


async def test_a_large_body_is_refused_here(tmp_path: Path) -> None:
    async with passed(tmp_path / "engine") as http:
        text = error_of(await http.post("/v2/repository/index", content=bytes(65537)), 413)
        assert text == "body: expected at most 65536 bytes, got at least 65537"


async def test_a_client_that_leaves_ends_its_call(tmp_path: Path) -> None:
    """As of a recording, which would go on."""
    is_asked, is_left = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        is_asked.set()
        await reader.read()
        is_left.set()
        writer.close()

    async def receive() -> Message:
        await is_asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    path = "/v1/profile"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    async with await asyncio.start_unix_server(answer, tmp_path / "engine"):
        proxy = EngineProxy(tmp_path / "engine", BodyReader(Limits()), Gate(None, KeyCounts()))
        await asyncio.wait_for(proxy({**scope, "headers": []}, receive, send), 60)
        await asyncio.wait_for(is_left.wait(), 60)
