"""A client for expertd, the server for the expert layers of Mixture-of-Experts models. See README.md."""

from expertd_client.async_client import AsyncExpertClient, AsyncPendingCall
from expertd_client.channel.async_channel import AsyncChannel
from expertd_client.channel.channel import Channel
from expertd_client.channel.enqueueing import Enqueued
from expertd_client.channel.slots import Slot, Ticket
from expertd_client.client import ExpertClient, PendingCall
from expertd_client.errors import (
    AccessDeniedError,
    DeadlineError,
    ExpertError,
    InvalidAnswerError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.metadata import ModelMetadata, ModelStatus, ServerMetadata, ServerState
from expertd_client.version import __version__
from expertd_client.weights import weights_id

__all__ = [
    "AccessDeniedError",
    "AsyncChannel",
    "AsyncExpertClient",
    "AsyncPendingCall",
    "Channel",
    "DeadlineError",
    "Enqueued",
    "ExpertClient",
    "ExpertError",
    "InvalidAnswerError",
    "InvalidRequestError",
    "ModelMetadata",
    "ModelStatus",
    "PendingCall",
    "ServerBusyError",
    "ServerMetadata",
    "ServerState",
    "ServerUnreachableError",
    "Slot",
    "Ticket",
    "TransportUnavailableError",
    "UnknownModelError",
    "__version__",
    "weights_id",
]
