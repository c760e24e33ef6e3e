"""Exports spans, and logs when that begins to fail and when it works again: not each failure."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

logger = logging.getLogger(__name__)

# The SDK logs each attempt, and each twentieth second that its queue is full.
_OF_ATTEMPTS = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_OF_QUEUE = "opentelemetry.sdk._shared_internal"
_WHY_CHARACTERS = 200


class Exporter(OTLPSpanExporter):
    """Sends spans to `endpoint`, a URL. For one thread at a time; one of each process."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint=endpoint)
        self._url = endpoint
        self._fails = False
        self._why = ""  # the last attempt failed
        self._filters = {_OF_ATTEMPTS: self._keep, _OF_QUEUE: lambda _: not self._fails}
        for name, check in self._filters.items():
            logging.getLogger(name).addFilter(check)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self._why = ""
        result = super().export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._fails:
            why = self._why[:_WHY_CHARACTERS] or "no reason is known"
            logger.warning("spans cannot be exported to %s, and are lost until they can: %s", self._url, why)
        elif self._fails and not failed:
            logger.info("spans are exported to %s again", self._url)
        self._fails = failed
        return result

    def shutdown(self) -> None:
        """Export no more."""
        super().shutdown()  # type: ignore[no-untyped-call]
        for name, check in self._filters.items():
            logging.getLogger(name).removeFilter(check)

    def _keep(self, record: logging.LogRecord) -> bool:
        self._why = record.getMessage()
        return False
