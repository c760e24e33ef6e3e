"""The engine's exceptions."""

from collections.abc import Mapping

from expertd.service.engine.refusals import Reason


class EngineError(Exception):
    """Base class; the text is one sentence for the caller.

    reason       by which metrics count a request that fails with it
    retry_after  seconds until another try may succeed; 0: unknown
    """

    reason: Reason = "invalid_request"
    retry_after = 0


class ModelNotFoundError(EngineError):
    """No model with that name and version is served."""

    reason: Reason = "unknown_model"


class ModelUnloadedError(ModelNotFoundError):
    """The model is configured, but not loaded."""


class RepositoryUnavailableError(EngineError):
    """Models cannot be loaded and unloaded here; the text says why."""


class RepositoryRefusedError(EngineError):
    """There is no memory for the model; the text has the numbers."""


class LoadFailedError(EngineError):
    """A model could not be loaded; the log says why."""

    reason: Reason = "internal_error"


class NotReadyError(EngineError):
    """The server or a model is not ready."""

    reason: Reason = "not_ready"


class DeviceLostError(EngineError):
    """The device computes nothing at present, and is being started again."""

    reason: Reason = "not_ready"
    retry_after = 1


class DeviceFailedError(DeviceLostError):
    """The device computes nothing any more, and the process ends."""

    retry_after = 0


class QueueFullError(EngineError):
    """The queue is full; `retry_after` estimates the seconds until it has room.

    Also of a request whose output would be too late; 0 if it would be without a queue, too.
    """

    reason: Reason = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyRequestsError(QueueFullError):
    """The same, where the setting `limits.queue_full_status` is 429."""


class ExecutorClosedError(EngineError):
    """The server accepts no more requests."""

    reason: Reason = "shutting_down"


class QueueTimeoutError(EngineError):
    """The request's own timeout expired before its answer was ready."""

    reason: Reason = "queue_timeout"


class MemoryFullError(EngineError):
    """The memory for bodies and outputs is in use."""

    reason: Reason = "memory_full"
    retry_after = 1


class RequestRefusedError(EngineError):
    """The request is invalid, as the engine found; the text says why."""


class SomeRefusedError(Exception):
    """Some requests of a step are invalid, by their indices in it; the others can be a step of their own."""

    def __init__(self, refused: Mapping[int, RequestRefusedError]) -> None:
        super().__init__(f"refused: {', '.join(map(str, refused.values()))}")
        self.refused = refused


class RegionsElsewhereError(Exception):
    """The request names regions, which only the engine's process has: it must answer the request itself."""


class StepFailedError(EngineError):
    """A step with only this request raised."""

    reason: Reason = "step_failed"


class PartitionsUnavailableError(EngineError):
    """The device has no SMs to partition; the text says why."""


class PartitionsRefusedError(EngineError):
    """The new partitions do not fit the device, or lack one that a model runs in."""


class RoutingUnavailableError(EngineError):
    """This process has no router to ask; the text says why."""


class ProfileUnavailableError(EngineError):
    """Steps cannot be recorded at present; the text says why."""


class ProfileRefusedError(EngineError):
    """The recording is too large."""


class StorageUnavailableError(EngineError):
    """What is written to a file meanwhile cannot be written; the text has the folder and the reason."""

    reason: Reason = "internal_error"


class StorageFullError(EngineError):
    """The same, because there is no room for it."""

    reason: Reason = "internal_error"


class PlacementUnavailableError(EngineError):
    """The experts' placement cannot be changed; the text says why."""


class PlacementRefusedError(EngineError):
    """A placement does not fit the ranks, or lacks an expert."""


class SharedMemoryDisabledError(EngineError):
    """The settings do not allow shared memory."""


class RegionRefusedError(EngineError):
    """A region of shared memory cannot be registered."""


class UnknownRegionError(EngineError):
    """No region of that kind has that name."""


class ChannelsDisabledError(EngineError):
    """The settings do not allow channels."""


class ChannelRefusedError(EngineError):
    """A channel with these sizes or this memory cannot be opened."""


class ChannelLimitError(EngineError):
    """Too many channels are open, or they have too much memory."""

    reason: Reason = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnknownChannelError(EngineError):
    """No channel with that id is open."""
