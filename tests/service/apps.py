"""Servers for tests, with a tiny real layer or a test's own runners, and clients in the same process."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

import httpx
import numpy as np
import numpy.typing as npt
import uvloop
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from expertd.service.engine.loading import LoadedLayers, Loader, Partitions, load
from expertd.service.engine.steps import Runner
from expertd.service.http.app import ExpertApp
from expertd.service.http.connection import HttpConnection
from expertd.service.http.listening import listen_for_channels
from expertd.service.http.server_context import ServerContext
from expertd.service.http.tls import TlsProtocol
from expertd.service.memory import Arena
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import AUTO

HIDDEN = 128
TOP_K = 2
NUM_EXPERTS = 4
MODEL = {
    "name": "tiny",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_experts": NUM_EXPERTS,
    "top_k": TOP_K,
    "datatype": "FP32",
}
LIMITS = {
    "max_request_tokens": 64,
    "max_batch_tokens": 256,
    "max_queue_tokens": 1024,
    "max_body_bytes": 1 << 20,
}
P = ParamSpec("P")


def limits_for(num_tokens: int) -> dict[str, float]:
    """Limits for requests of this many tokens, with room for 8 of them in the queue."""
    tokens: dict[str, float] = dict.fromkeys(("max_request_tokens", "max_batch_tokens"), num_tokens)
    return {**tokens, "max_queue_tokens": 8 * num_tokens, "max_body_bytes": 2 * num_tokens * HIDDEN * 4}


def on_uvloop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test, on the event loop that servers have; others run on asyncio's."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


def tiny_settings(limits: Mapping[str, float] | None = None, **changes: Any) -> Settings:
    """Settings for the model "tiny" on the CPU."""
    values = {"backend": "reference", "models": [MODEL], "limits": {**LIMITS, **(limits or {})}, **changes}
    return Settings.model_validate(values)


def serving_runner(
    runner: Runner, partitions: Partitions | None = None, prepare: Callable[[], None] = lambda: None
) -> Loader:
    """A loader that loads nothing and serves every model with `runner`."""

    def load(settings: Settings, _: Callable[[], bool]) -> LoadedLayers:
        runners = {model.name: runner for model in settings.models}
        return LoadedLayers("reference", "test", runners, partitions, lambda: None, lambda _: prepare())

    return load


@dataclass(frozen=True)
class Serving:
    """A running application, the port that it is served at, and a client of it."""

    app: ExpertApp
    port: int
    http: httpx.AsyncClient

    async def infer(self, body: bytes, header_length: int | None = None, **headers: str) -> httpx.Response:
        """POST `body` to the model "tiny"; header names are written with underscores."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if header_length is not None:
            sent["Inference-Header-Content-Length"] = str(header_length)
        return await self.http.post("/v2/models/tiny/infer", content=body, headers=sent)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 if it does not exist."""
        return self.app.metrics.registry.get_sample_value(f"expertd_{name}", labels) or 0.0

    def counted(self, status: int) -> float:
        """The infer requests to the model "tiny" that had this status."""
        return self.metric("requests_total", model="tiny", status=str(status))

    @property
    def arena(self) -> Arena:
        assert self.app.engine.arena is not None
        return self.app.engine.arena


@asynccontextmanager
async def serving(
    settings: Settings,
    loader: Loader = load,
    other: ASGIApp | None = None,
    connections: set[HttpConnection] | None = None,
    send_buffer: int | None = None,
    tls: ssl.SSLContext | None = None,
    wait: bool = True,
) -> AsyncIterator[Serving]:
    """The loaded application of `settings`, served on a socket in this process; its lifespan is the block.

    `other` takes the place of the application, for all but infer requests. `connections` receives those open.
    `send_buffer` is the size of the system's buffer for what is written; None: it grows. `tls` is for HTTPS.
    Without `wait`, the application may still be loading.
    """
    app = ExpertApp(settings, loader)
    if settings.channels.socket != AUTO:  # which would be the same for servers of other tests
        app.listener = listen_for_channels(settings, 0)
    context = ServerContext(other or app, app.infer, app.metrics, settings)
    state = ServerState()
    if connections is not None:
        vars(state)["connections"] = connections
    sock = socket.create_server(("127.0.0.1", 0), backlog=100)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it

    def protocol() -> asyncio.BufferedProtocol:
        if tls is None:
            return HttpConnection(context, state, {})
        return TlsProtocol(context, state, tls, lambda: HttpConnection(context, state, {}, is_admitted=True))

    async with app.router.lifespan_context(app):
        if wait:
            await app.engine.wait_loaded()
        listener = await asyncio.get_running_loop().create_server(protocol, sock=sock)
        port = sock.getsockname()[1]
        try:
            # verify: the system's certificates take longer to read than the rest of the server's start.
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=None, verify=False) as http:
                yield Serving(app, port, http)
        finally:
            listener.close()
            for connection in list(state.connections):
                if isinstance(connection, HttpConnection):
                    connection.transport.abort()
                else:
                    connection.shutdown()
            await asyncio.gather(*state.tasks)


def rows(num_tokens: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Normal hidden states [num_tokens, HIDDEN]."""
    return np.random.default_rng(seed).standard_normal((num_tokens, HIDDEN)).astype(np.float32)


def json_input(
    values: npt.NDArray[Any], name: str = "hidden_states", datatype: str = "FP32"
) -> dict[str, Any]:
    """An input of a JSON request, with nested data."""
    return {"name": name, "shape": list(values.shape), "datatype": datatype, "data": values.tolist()}


def json_request(*inputs: dict[str, Any], **more: Any) -> bytes:
    """An infer request in JSON only."""
    return json.dumps({"inputs": inputs, **more}).encode()


def binary_request(tensors: Mapping[str, tuple[str, list[int], bytes]], **more: Any) -> tuple[bytes, int]:
    """An infer request with binary tensors (name -> datatype, shape, bytes), and its header's length."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, (datatype, shape, data) in tensors.items()
    ]
    header = json_request(*inputs, **more)
    return header + b"".join(data for _, _, data in tensors.values()), len(header)


def hidden_request(values: npt.NDArray[np.float32], **more: Any) -> tuple[bytes, int]:
    """A binary request with `values` that requests binary output."""
    parameters = {"binary_data_output": True, **more.pop("parameters", {})}
    tensor = ("FP32", list(values.shape), values.tobytes())
    return binary_request({"hidden_states": tensor}, parameters=parameters, **more)


def output_of(response: httpx.Response) -> npt.NDArray[np.float32]:
    """The FP32 output of a successful response, binary or JSON."""
    assert response.status_code == 200, response.text
    length = response.headers.get("inference-header-content-length")
    header = json.loads(response.content[: int(length)] if length else response.content)
    output = header["outputs"][0]
    assert output["datatype"] == "FP32"
    data = (
        np.frombuffer(response.content[int(length) :], np.float32)
        if length
        else np.array(output["data"], np.float32)
    )
    return data.reshape(output["shape"])


def error_of(response: httpx.Response, status: int) -> str:
    """The error's text, after checking status and format."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert isinstance(body["error"], str)
    return body["error"]
