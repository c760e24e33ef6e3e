"""The ASGI application: its routes around one engine, and one format for every error."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from expertd import __version__
from expertd.service.channels.hub import ChannelHub
from expertd.service.channels.listener import ChannelListener
from expertd.service.channels.relays import Relays
from expertd.service.engine import engine_metrics
from expertd.service.engine.engine import Engine
from expertd.service.engine.errors import EngineError
from expertd.service.engine.loading import Loader, load
from expertd.service.engine.metrics import Metrics
from expertd.service.http.asgi_cycle import connection_of
from expertd.service.http.bodies import BodyReader, ClientGoneError
from expertd.service.http.protocol import error_body, oip_error
from expertd.service.http.request_head import decoded
from expertd.service.http.responses import http_error
from expertd.service.http.rights import rights_for
from expertd.service.http.routes import (
    channels_router,
    configuration_router,
    log_router,
    metrics_router,
    page_router,
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
from expertd.service.http.routes.documentation import document
from expertd.service.inference.endpoint import InferEndpoint
from expertd.service.inference.errors import RequestError
from expertd.service.inference.gate import Gate, KeyFile
from expertd.service.settings.model import Settings
from expertd.service.statuses import infer_status
from expertd.service.tracing import tracing_of
from expertd.service.util import logs
from expertd.service.util.sentences import any_of, shown

_READY = "/v2/health/ready"
_HEALTH = re.compile("/(live|ready)$")  # the paths of checks
_DESCRIPTION = "Expert layers of Mixture-of-Experts models over the Open Inference Protocol v2."


class SideServer(Protocol):
    """Another server around the same application, on its event loop.

    cut_off  calls that had not ended in their time
    """

    cut_off: int

    async def start(self) -> None: ...
    def finish(self, seconds: float) -> None: ...
    async def stop(self) -> None: ...


class ExpertApp(FastAPI):
    """All calls but infer, which connections answer themselves.

    Its lifespan starts loading and ends the worker thread; `side_server`, if there is one, lives as long.
    Raises SettingsError for a file of keys that cannot be used.
    """

    def __init__(self, settings: Settings, loader: Loader = load) -> None:
        super().__init__(
            title="expertd",
            version=__version__,
            description=_DESCRIPTION,
            lifespan=_lifespan,
            redirect_slashes=False,
            docs_url=None,
            redoc_url=None,
            swagger_ui_oauth2_redirect_url=None,
        )
        self.status_of = partial(infer_status, queue_full_status=settings.limits.queue_full_status)
        self.metrics = Metrics(__version__, self.status_of)
        self.engine = Engine(settings, self.metrics, loader)
        engine_metrics.watch(self.engine, self.metrics)
        self.channels = ChannelHub(settings.channels, self.engine, self.metrics)
        self.listener: ChannelListener | None = None  # of channels
        self.relays = Relays(self.channels)
        self.side_server: SideServer | None = None
        self.pass_on_log_level: Callable[[str], None] = lambda level: None  # to other processes
        self._bodies = BodyReader(settings.limits)
        file = None if settings.keys is None else KeyFile(settings.keys)
        self.gate = Gate(file, self.metrics.keys, behind=settings.http_workers > 1)
        self.tracing = tracing_of(settings.tracing)
        self.infer = InferEndpoint(self.engine, self.metrics, self.gate, self.status_of, tracing=self.tracing)
        page, self._feed = page_router(self.engine, self.metrics)
        protocol = protocol_router(self.engine)
        routers = (
            statistics_router(self.engine, self.metrics),  # its /v2/models/stats is no model's metadata
            configuration_router(self.engine),
            protocol,
            repository_router(self.engine, self._bodies),
            shared_memory_router(self.engine.shared_memory, self._bodies),
            partitions_router(self.engine, self._bodies),
            placement_router(self.engine, self._bodies),
            channels_router(self.channels, self.relays, self._bodies, self.gate),
            metrics_router(self.metrics),
            log_router(self.set_log_level, self._bodies),
            profile_router(self.engine, self._bodies),
            routing_router(self.engine, self._bodies),
            swagger_router(self.title),
            *([page] if settings.page.enabled else ()),
        )
        # As they are: `include_router` would build each once more, at the first request.
        self.router.routes += [route for router in routers for route in router.routes]
        routes = [route for route in protocol.routes if isinstance(route, APIRoute)]
        self._health = [route for route in routes if _HEALTH.search(route.path)]
        self.add_exception_handler(EngineError, _engine_error)
        self.add_exception_handler(RequestError, _refused)
        self.add_exception_handler(ClientGoneError, _client_gone)
        self.add_exception_handler(HTTPException, _http_error)
        self.add_exception_handler(Exception, _unexpected_error)
        document(self, next(iter(self.engine.models.values())))

    def set_log_level(self, level: str) -> None:
        """Change the minimum level of the log lines of this process and of its HTTP processes."""
        logs.set_level(level)
        self.pass_on_log_level(level)

    def stop_reading(self) -> None:
        """Refuse every request whose body has not arrived yet; called at the end of a drain."""
        self._bodies.stop()

    def stop_showing(self) -> None:
        """End the streams of all viewers, which would go on for as long as these look."""
        self._feed.close()

    def methods_of(self, scope: Scope) -> set[str]:
        """The methods that this API supports at the path of `scope`, which several routes may share."""
        routes = [route for route in self.routes if route.matches(scope)[0] is not Match.NONE]
        methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
        methods |= {"HEAD"} if "GET" in methods else set()
        return methods | {"OPTIONS"} if methods or scope["path"] == "/" else methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI scope."""
        if scope["type"] == "http":
            if self.engine.draining:
                send = _closing(scope, send)
            if b"%2" in scope.get("raw_path", b""):
                scope["path"] = decoded(scope["raw_path"])
            if scope["method"] == "HEAD" and "GET" in self.methods_of(scope):
                scope, send = {**scope, "method": "GET"}, _without_body(send)
            try:
                self.gate.admit(rights_for(scope["method"], scope["path"]), scope["headers"])
            except RequestError as error:
                await _response_of(error)(scope, receive, send)
                return
            if scope["method"] == "OPTIONS" and (methods := self.methods_of(scope)):
                await (await self._options(scope, methods))(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def _options(self, scope: Scope, methods: Collection[str]) -> Response:
        """The methods of a path, in `Allow`. Where GET checks health, the status is that of GET.

        Load balancers check health by OPTIONS, usually at `/`, which has the status of readiness.
        """
        asked = {**scope, "method": "GET", "path": _READY if scope["path"] == "/" else scope["path"]}
        try:
            for route in self._health:
                match, found = route.matches(asked)
                if match is Match.FULL:
                    await route.endpoint(**found["path_params"])
        except EngineError as error:
            return _response_of(http_error(error))
        return Response(headers={"Allow": ", ".join(sorted(methods))})

    async def answer_admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request other than infer whose key was checked."""
        await super().__call__(scope, receive, send)


@asynccontextmanager
async def _lifespan(app: ExpertApp) -> AsyncIterator[None]:
    if app.tracing is not None:
        app.tracing.start()
    app.engine.start()
    app.channels.start()
    if app.listener is not None:
        app.listener.start(app.channels)
    try:
        if app.side_server is not None:
            await app.side_server.start()
        yield
    finally:  # whatever ends it: nothing that was started may be left
        if app.side_server is not None:
            await app.side_server.stop()
        if app.listener is not None:
            await app.listener.stop()
        await app.channels.stop()
        await app.relays.stop()
        await app.engine.stop()
        if app.tracing is not None:
            await asyncio.to_thread(app.tracing.stop)


def _closing(scope: Scope, send: Send) -> Send:
    """`send`, with `Connection: close` added while the server drains.

    Of pipelined requests only the last response has it, because the client ignores any that follow.
    """

    connection = connection_of(scope)

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start" and not (connection and connection.more_pending):
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await send(message)

    return closing


def _without_body(send: Send) -> Send:
    """`send` for HEAD: the same status and headers as for GET."""

    async def headers_only(message: Message) -> None:
        if message["type"] == "http.response.start":  # there may be no end of the body
            await send(message)
            await send({"type": "http.response.body", "body": b""})

    return headers_only


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return _response_of(http_error(error))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _response_of(error)


def _response_of(error: RequestError) -> Response:
    answer = oip_error(error)
    return Response(answer.body(), answer.status, answer.headers, "application/json")


async def _client_gone(request: Request, error: Exception) -> Response:
    text = "body: expected the whole body, got a closed connection"
    return Response(error_body(text), 400, None, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = f"path: expected one of this API (see /docs), got {shown(request.url.path)}"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        methods = sorted(request.app.methods_of(request.scope))
        headers["Allow"] = ", ".join(methods)
        allowed = any_of(methods)
        text = f"method: expected {allowed} at {shown(request.url.path)}, got {shown(request.method)}"
    return Response(error_body(text), error.status_code, headers, "application/json")


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return Response(error_body("internal server error: see the server's log"), 500, None, "application/json")
