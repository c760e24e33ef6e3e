"""All routes except infer: metadata, statistics, shared memory, channels, partitions, and others."""

from expertd.service.http.routes.channels import channels_router
from expertd.service.http.routes.log import log_router
from expertd.service.http.routes.model_configuration import configuration_router
from expertd.service.http.routes.model_statistics import statistics_router
from expertd.service.http.routes.open_inference import protocol_router
from expertd.service.http.routes.page import page_router
from expertd.service.http.routes.partitions import partitions_router
from expertd.service.http.routes.placement import placement_router
from expertd.service.http.routes.profile import profile_router
from expertd.service.http.routes.prometheus import metrics_router
from expertd.service.http.routes.repository import repository_router
from expertd.service.http.routes.routing import routing_router
from expertd.service.http.routes.shared_memory import shared_memory_router
from expertd.service.http.routes.swagger import swagger_router

__all__ = [
    "channels_router",
    "configuration_router",
    "log_router",
    "metrics_router",
    "page_router",
    "partitions_router",
    "placement_router",
    "profile_router",
    "protocol_router",
    "repository_router",
    "routing_router",
    "shared_memory_router",
    "statistics_router",
    "swagger_router",
]
