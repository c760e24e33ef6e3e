"""One table that maps the engine's errors to HTTP statuses and to the reasons that metrics count."""

from expertd.service.engine.errors import (
    ChannelLimitError,
    ChannelRefusedError,
    ChannelsDisabledError,
    EngineError,
    MemoryFullError,
    NotReadyError,
    PartitionsRefusedError,
    PartitionsUnavailableError,
    QueueFullError,
    QueueTimeoutError,
    RegionRefusedError,
    RequestRefusedError,
    SchedulerClosedError,
    SharedMemoryDisabledError,
    StepFailedError,
    UnknownChannelError,
    UnknownModelError,
    UnknownRegionError,
)
from expertd.service.engine.refusals import Reason

ANSWERS: dict[type[EngineError], tuple[int, Reason]] = {
    ChannelRefusedError: (400, "invalid_request"),
    RegionRefusedError: (400, "invalid_request"),
    RequestRefusedError: (400, "invalid_request"),
    ChannelsDisabledError: (403, "invalid_request"),
    SharedMemoryDisabledError: (403, "invalid_request"),
    UnknownChannelError: (404, "invalid_request"),
    UnknownModelError: (404, "unknown_model"),
    UnknownRegionError: (404, "invalid_request"),
    PartitionsUnavailableError: (409, "invalid_request"),
    PartitionsRefusedError: (422, "invalid_request"),
    StepFailedError: (500, "step_failed"),
    ChannelLimitError: (503, "queue_full"),
    MemoryFullError: (503, "memory_full"),
    NotReadyError: (503, "not_ready"),
    QueueFullError: (503, "queue_full"),
    QueueTimeoutError: (503, "queue_timeout"),
    SchedulerClosedError: (503, "shutting_down"),
}
