"""/ and /v1/live: a page that shows what the server does, and the events that it shows."""

import re
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from expertd.service.engine.engine import Engine
from expertd.service.engine.metrics import Metrics
from expertd.service.http.feed import Feed, Viewer
from expertd.service.http.protocol import OipError
from expertd.service.http.routes.snapshots import Snapshots
from expertd.service.util.sentences import shown

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# No script or style but those of the page's own files, and no connection but to this server.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
_NUMBER = re.compile(r"[1-9]\d{0,2}")


def page_router(engine: Engine, metrics: Metrics) -> tuple[APIRouter, Feed]:
    """GET /, its files, with relative URLs so that a proxy may add a prefix, and /v1/live; and its feed."""
    # Not in the OpenAPI document, which cannot describe events.
    router = APIRouter(include_in_schema=False)
    # Read once: no name of a request reaches the file system.
    folder = files("expertd.service.http") / "page"
    assets = {file.name: file.read_bytes() for file in folder.iterdir() if _kind(file.name) in _TYPES}
    snapshots = Snapshots(engine, metrics)
    feed = Feed(snapshots.take, engine.settings.page.max_viewers)

    @router.get("/")
    async def page() -> Response:
        return _asset("index.html", assets)

    @router.get("/page/{name}")
    async def asset(name: str) -> Response:
        return _asset(name, assets)

    @router.get("/v1/live")
    async def live(request: Request) -> Response:
        """Snapshots as server-sent events, with the experts of one model."""
        model = request.query_params.get("model", next(iter(engine.models)))
        max_events = _number(request.query_params.get("events"))
        return _EventStream(snapshots.server(), feed, feed.open(engine.model(model).name), max_events)

    return router, feed


class _EventStream(StreamingResponse):
    """The events of one viewer, who is gone when it ends."""

    def __init__(self, first: bytes, feed: Feed, viewer: Viewer, max_events: int | None) -> None:
        async def events() -> AsyncIterator[bytes]:
            yield first
            async for event in viewer.events(max_events):
                yield event

        super().__init__(events(), media_type="text/event-stream")
        self._feed, self._viewer = feed, viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.leave(self._viewer)


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise OipError(400, f"events: expected a number from 1 to 999, got {shown(text)}")
    return int(text)


def _asset(name: str, assets: Mapping[str, bytes]) -> Response:
    if name not in assets:
        raise HTTPException(404)
    return Response(assets[name], headers=_HEADERS, media_type=_TYPES[_kind(name)])


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
