"""/metrics: the registry in the text format that Prometheus requests."""

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from expertd.service.engine.metrics import Metrics
from expertd.service.http.protocol import accepts_gzip, compress


def metrics_router(metrics: Metrics) -> APIRouter:
    """GET /metrics."""
    router = APIRouter(tags=["Metrics"])

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "Prometheus metrics", "content": {"text/plain": {}}}},
    )
    def get_metrics(request: Request) -> Response:  # not async: thousands of series are formatted in a thread
        """Every metric of this server, as Prometheus or OpenMetrics text, compressed if gzip is accepted."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        text, headers = encode(metrics.registry), {"Vary": "Accept, Accept-Encoding"}
        if accepts_gzip(", ".join(request.headers.getlist("accept-encoding"))):
            text, headers["Content-Encoding"] = compress([text], "gzip"), "gzip"
        return Response(text, headers=headers, media_type=content_type)

    return router
