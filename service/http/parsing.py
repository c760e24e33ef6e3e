"""From the bytes of an infer request to its plan: decompresses, parses."""

from dataclasses import dataclass

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.infer_body import InferBody
from expertd.service.http.infer_head import InferHead
from expertd.service.http.plans import Plan
from expertd.service.http.protocol import NewUses, decompress
from expertd.service.http.threads import INLINE_BYTES, Where
from expertd.service.memory import Arena, Buffer, Span, host_view

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


def where_to_parse(received: Received, head: InferHead) -> Where:
    """Where a body is parsed; compressed JSON may become a thousand times as large."""
    size, header_length = len(host_view(received.content)), head.header_length
    is_packed = head.content_encoding is not None
    if header_length is None:
        return Where.JSON_THREAD if is_packed or size > INLINE_BYTES else Where.EVENT_LOOP
    if min(header_length, head.limit.num_bytes if is_packed else size) > INLINE_BYTES:
        return Where.JSON_THREAD
    return Where.ANY_THREAD if is_packed and size > _INLINE_COMPRESSED_BYTES else Where.EVENT_LOOP


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
