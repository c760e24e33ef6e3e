"""What service/http uses of uvicorn and httptools beyond their documentation still exists."""

import inspect
import re

import httptools
import pytest
import uvicorn
from uvicorn.server import ServerState


@pytest.mark.parametrize("name", ["capture_signals", "handle_exit", "on_tick", "shutdown", "server_state"])
def test_a_server_has(name: str) -> None:
    on_instances = set(re.findall(r"self\.(\w+)\b.*=", inspect.getsource(uvicorn.Server)))
    assert name in {*dir(uvicorn.Server), *on_instances}, f"uvicorn {uvicorn.__version__} has no {name}"


def test_protocols_are_made_with_the_servers_state() -> None:
    assert {"connections", "tasks", "default_headers"} <= vars(ServerState()).keys()
    call = inspect.getsource(uvicorn.Server.startup)
    for argument in ("config=", "server_state=", "app_state=", "_loop="):
        assert argument in call, f"uvicorn {uvicorn.__version__} passes no {argument[:-1]}"


def test_the_parser_accepts_other_versions() -> None:
    httptools.HttpRequestParser(object()).set_dangerous_leniencies(lenient_version=True)
