"""The head of an infer request: its model, and the headers that matter. Equal heads are read once."""

from collections.abc import Sequence

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.bodies import number_of_bytes
from expertd.service.http.plans import Plans
from expertd.service.http.protocol import BodyLimit, body_limit, check_client
from expertd.service.http.threads import INLINE_BYTES
from expertd.service.settings.keys import Keys
from expertd.service.settings.parts import Limits

_HEADER_LENGTH = "Inference-Header-Content-Length"


class InferHead:
    """`model` and `version` as the path names them, served or not; `read` sets what the other headers say.

    keys    by which a request with this head was admitted, as that of `key_name`; set by the gate
    caller  the number of `key_name`, for the queue
    """

    __slots__ = (
        "_is_read",
        "accept_encoding",
        "caller",
        "content_encoding",
        "content_length",
        "expects",
        "header_length",
        "headers",
        "key_name",
        "keys",
        "limit",
        "model",
        "plans",
        "version",
    )

    def __init__(self, model: str, version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.model = model
        self.version = version
        self.content_length: int | None = None
        self.header_length: int | None = None
        self.content_encoding: str | None = None
        self.accept_encoding = ""
        self.limit = BodyLimit(0)
        self.expects = any(name == b"expect" for name, _ in headers)
        self.plans = Plans()
        self.headers = headers
        self.keys: Keys | None = None
        self.key_name = ""
        self.caller = 0
        self._is_read = False

    def read(self, limits: Limits) -> None:
        """Read the headers and check what they say, unless that is done. Raises OipError (400, 413)."""
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
        self._is_read = True

    @property
    def has_large_json(self) -> bool:
        """Whether the headers say that the JSON is large, or may become so: see `where_to_parse`."""
        if self.header_length is not None:
            return self.header_length > INLINE_BYTES
        return self.content_encoding is not None or (self.content_length or 0) > INLINE_BYTES

    def _check_sizes(self, limits: Limits) -> None:
        length, json_bytes = self.content_length, self.header_length
        self.limit = body_limit(limits.max_body_bytes, limits.max_json_bytes, json_bytes)
        if length is not None:
            self.limit.check(length)
        if json_bytes is not None:
            if length is not None and self.content_encoding is None:
                json_bytes = min(json_bytes, length)  # that it is longer than the body is another error
            BodyLimit(limits.max_json_bytes, is_json=True).check(json_bytes)


def least_tokens(head: InferHead, spec: LayerSpec) -> int:
    """The tokens that a request has at least, as far as its headers tell: of binary tensors, the bytes."""
    if head.content_length is None or head.header_length is None or head.content_encoding is not None:
        return 1
    most_bytes = 4 * spec.hidden_size + 12 * spec.top_k  # of a token: FP32, and ids of 64 bits with weights
    return max(1, (head.content_length - head.header_length) // most_bytes)


def _joined(earlier: str | None, value: bytes) -> str:
    """Headers of the same name form one list (RFC 9110, 5.3)."""
    text = value.decode("latin-1")
    return f"{earlier}, {text}" if earlier else text
