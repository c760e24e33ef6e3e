"""What can go wrong with a request, in the engine's own words; `service.http.errors` gives each a status."""


class EngineError(Exception):
    """The text is one sentence for the caller: what was expected and what came."""


class UnknownModelError(EngineError):
    """No model of that name and version is served."""


class NotReadyError(EngineError):
    """The server, or a model, should not be sent requests now."""


class QueueFullError(EngineError):
    """No room for a request; worth another try in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SchedulerClosedError(EngineError):
    """The server takes no more requests."""


class QueueTimeoutError(EngineError):
    """The request's own timeout passed while it was waiting."""


class StepFailedError(EngineError):
    """The step that held the request, and no other one, raised."""


class PartitionsUnavailableError(EngineError):
    """There is no GPU whose SMs could be partitioned; the text says why."""


class PartitionsRefusedError(EngineError):
    """A new set of partitions does not fit the device, or lacks one that a model runs in."""
