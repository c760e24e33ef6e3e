"""From the bytes of an infer request to its plan: decompresses, parses."""

from dataclasses import dataclass

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.infer_body import InferBody
from expertd.service.http.infer_head import InferHead
from expertd.service.http.plans import Plan
from expertd.service.http.protocol import NewUses, decompress
from expertd.service.memory import Arena, Buffer, Span, host_view

# Below this many bytes a thread hop costs more than the work.
INLINE_BYTES = 64 * 1024
_INLINE_COMPRESSED_BYTES = 1024  # which may become a thousand times as many


@dataclass(slots=True)
class Received:
    """A whole body, and the memory that it lies in, if it is not bytes."""

    content: Buffer | Span
    body: InferBody | None

    def release(self) -> None:
        """Give the memory back."""
        if self.body is not None:
            self.body.release()


def takes_long(received: Received, head: InferHead) -> bool:
    """Whether parsing is work for a thread."""
    if head.content_encoding is not None:
        return len(host_view(received.content)) > _INLINE_COMPRESSED_BYTES
    return _json_bytes(received, head) > INLINE_BYTES


def parse_body(
    received: Received,
    head: InferHead,
    spec: LayerSpec,
    arena: Arena | None,
    new_uses: NewUses,
) -> Plan:
    """Parse a body, after replacing its content if it is compressed. Raises OipError."""
    if head.content_encoding is not None:
        content = decompress(host_view(received.content), head.content_encoding, head.limit)
        received.release()  # before its successor takes memory
        received.content, received.body = content, None
        body = InferBody(arena, head.limit, len(content), head.header_length)
        body.write(memoryview(content))
        received.content, received.body = body.content(), body
    plan = head.plans.parse(received.content, head.header_length, spec, new_uses)
    if not plan.uses_body:
        received.release()
    return plan


def _json_bytes(received: Received, head: InferHead) -> int:
    size = len(host_view(received.content))
    return size if head.header_length is None else min(head.header_length, size)
