"""The undocumented parts of uvicorn and httptools that service/http uses still exist."""

import asyncio
import inspect
import re

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

METHODS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "pause_writing",
    "resume_writing",
    "on_message_begin",
    "on_url",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
    "shutdown",
    "timeout_keep_alive_handler",
    "_unset_keepalive_if_required",
)
ATTRIBUTES = (
    "parser",
    "headers",
    "scope",
    "flow",
    "cycle",
    "pipeline",
    "connections",
    "tasks",
    "loop",
    "client",
    "transport",
    "server_state",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
)
CYCLE = (
    "scope",
    "disconnected",
    "response_started",
    "response_complete",
    "keep_alive",
    "message_event",
    "run_asgi",
)


@pytest.fixture(scope="module")
def protocol() -> HttpToolsProtocol:
    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError

    async def make() -> HttpToolsProtocol:
        config = uvicorn.Config(app, ws="none", log_config=None, lifespan="off")
        config.load()
        return HttpToolsProtocol(config, ServerState(), {})

    return asyncio.run(make())


@pytest.mark.parametrize("name", [*METHODS, *ATTRIBUTES])
def test_the_protocol_has(protocol: HttpToolsProtocol, name: str) -> None:
    assert hasattr(protocol, name), f"uvicorn {uvicorn.__version__} has no HttpToolsProtocol.{name}"


@pytest.mark.parametrize("name", CYCLE)
def test_a_cycle_has(name: str) -> None:
    source = inspect.getsource(RequestResponseCycle)
    assert re.search(rf"self\.{name} =|self\.{name}: |def {name}\(", source), (
        f"uvicorn {uvicorn.__version__} has no RequestResponseCycle.{name}"
    )


def test_other_internals_exist() -> None:
    assert {"write_paused", "drain", "resume_reading"} <= {*dir(FlowControl), *vars_of(FlowControl)}
    assert {"connections", "tasks", "default_headers"} <= vars(ServerState()).keys()
    assert STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")
    for name in ("capture_signals", "handle_exit", "on_tick", "startup", "shutdown", "server_state"):
        assert name in {*dir(uvicorn.Server), *vars_of(uvicorn.Server)}
    parser = httptools.HttpRequestParser(object())
    parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)


def vars_of(kind: type) -> set[str]:
    """Attributes that a class sets on its instances."""
    return set(re.findall(r"self\.(\w+)\b.*=", inspect.getsource(kind)))
