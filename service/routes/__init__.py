"""Every route but the hot one: protocol metadata, SM partitions, metrics."""

from service.routes.metrics import metrics_router
from service.routes.partitions import partitions_router
from service.routes.protocol import protocol_router

__all__ = ["metrics_router", "partitions_router", "protocol_router"]
