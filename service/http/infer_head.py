"""The head of an infer request over HTTP. Equal heads are kept."""

from collections.abc import Callable

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.bodies import number_of_bytes
from expertd.service.http.plans import Plans
from expertd.service.http.protocol import decompress, oip_error
from expertd.service.http.responses import Answer, Headers, error_answer, output_answer
from expertd.service.inference.body import InferBody, Received
from expertd.service.inference.errors import RequestError
from expertd.service.inference.head import InferHead
from expertd.service.inference.limits import BodyLimit, body_limit
from expertd.service.inference.plan import RequestPlan
from expertd.service.inference.regions import NewUses
from expertd.service.inference.threads import INLINE_BYTES, Where, thread_from
from expertd.service.inference.versions import check_client
from expertd.service.memory import Arena, Buffer, Span, host_view
from expertd.service.moe.request import OutputMemory
from expertd.service.settings.parts import Limits

_HEADER_LENGTH = "Inference-Header-Content-Length"
_INLINE_COMPRESSED_BYTES = 1024  # which may become a thousand times as many
_INLINE_NUMBERS = 2048  # that are written as JSON in about a millisecond


class HttpHead(InferHead):
    """A head of HTTP; `read` sets what its headers say."""

    __slots__ = (
        "_is_read",
        "accept_encoding",
        "content_encoding",
        "content_length",
        "expects",
        "header_length",
        "plans",
    )

    def __init__(self, model: str, version: str, headers: Headers) -> None:
        super().__init__(model, version, headers)
        self.content_length: int | None = None
        self.header_length: int | None = None
        self.content_encoding: str | None = None
        self.accept_encoding = ""
        self.expects = any(name == b"expect" for name, _ in headers)
        self.plans = Plans()
        self._is_read = False

    def read(self, limits: Limits) -> None:
        """Read the headers and check what they say, unless that is done. Raises RequestError."""
        if self._is_read:
            return
        check_client(self.headers)
        self.content_encoding, self.accept_encoding = None, ""
        for name, value in self.headers:
            if name == b"inference-header-content-length":
                self.header_length = number_of_bytes(value, _HEADER_LENGTH, self.header_length)
            elif name == b"content-length":
                self.content_length = number_of_bytes(value, "Content-Length", self.content_length)
            elif name == b"content-encoding":
                self.content_encoding = _joined(self.content_encoding, value)
            elif name == b"accept-encoding":
                self.accept_encoding = _joined(self.accept_encoding, value)
        self._check_sizes(limits)
        is_packed = self.content_encoding is not None
        if self.header_length is None:
            self.has_large_text = is_packed or (self.content_length or 0) > INLINE_BYTES
        else:
            self.has_large_text = self.header_length > INLINE_BYTES
            if self.content_length is not None and not is_packed:
                self.tensor_bytes = self.content_length - self.header_length
        self._is_read = True

    def find(self, content: Buffer | Span) -> RequestPlan | None:
        if not self.header_length or self.content_encoding is not None:
            return None
        return self.plans.find(content, self.header_length)

    def where_to_parse(self, received: Received) -> Where:
        """Compressed JSON may become a thousand times as large."""
        size, header_length = len(host_view(received.content)), self.header_length
        is_packed = self.content_encoding is not None
        if header_length is None:
            return Where.JSON_THREAD if is_packed or size > INLINE_BYTES else Where.EVENT_LOOP
        if min(header_length, self.limit.num_bytes if is_packed else size) > INLINE_BYTES:
            return Where.JSON_THREAD
        return Where.ANY_THREAD if is_packed and size > _INLINE_COMPRESSED_BYTES else Where.EVENT_LOOP

    def parse(
        self, received: Received, spec: LayerSpec, arena: Arena | None, new_uses: NewUses
    ) -> RequestPlan:
        if self.content_encoding is not None:
            content = decompress(host_view(received.content), self.content_encoding, self.limit)
            received.release()  # before its successor takes memory
            received.content, received.body = content, None
            body = InferBody(arena, self.limit, len(content), self.header_length)
            body.write(memoryview(content))
            received.content, received.body = body.content(), body
        plan = self.plans.parse(received.content, self.header_length, spec, new_uses)
        if not plan.uses_body:
            received.release()
        return plan

    def kept_answer(self, plan: RequestPlan, output: OutputMemory) -> Answer | None:
        if plan.answer_head is None or self.accept_encoding:
            return None
        fields, header = plan.answer_head
        return Answer(200, fields, [header, output if isinstance(output, memoryview) else host_view(output)])

    def where_to_answer(self, plan: RequestPlan, spec: LayerSpec) -> Where:
        numbers = plan.num_tokens * spec.hidden_size
        if plan.request.json_output:
            return Where.JSON_THREAD if numbers > _INLINE_NUMBERS else Where.EVENT_LOOP
        compressed = plan.request.binary_output and self.accept_encoding
        return thread_from(8 * numbers if compressed else 0)

    def answer(
        self, plan: RequestPlan, output: OutputMemory, spec: LayerSpec, pause: Callable[[], object]
    ) -> Answer:
        return output_answer(plan, output, spec, self.accept_encoding, pause)

    def refusal(self, error: RequestError, status: int) -> Answer:
        return error_answer(oip_error(error, status), self.expects)

    def _check_sizes(self, limits: Limits) -> None:
        length, json_bytes = self.content_length, self.header_length
        self.limit = body_limit(limits.max_body_bytes, limits.max_json_bytes, json_bytes)
        if length is not None:
            self.limit.check(length)
        if json_bytes is not None:
            if length is not None and self.content_encoding is None:
                json_bytes = min(json_bytes, length)  # that it is longer than the body is another error
            BodyLimit(limits.max_json_bytes, is_json=True).check(json_bytes)


def _joined(earlier: str | None, value: bytes) -> str:
    """Headers of the same name form one list (RFC 9110, 5.3)."""
    text = value.decode("latin-1")
    return f"{earlier}, {text}" if earlier else text
