"""The head of an infer request: its model, and what the way that it came says of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from expertd.service.engine.spec import LayerSpec
from expertd.service.inference.body import Received
from expertd.service.inference.errors import RequestError
from expertd.service.inference.limits import BodyLimit
from expertd.service.inference.plan import RequestPlan
from expertd.service.inference.regions import NewUses
from expertd.service.inference.threads import Where
from expertd.service.memory import Arena, Buffer, Span
from expertd.service.moe.request import OutputMemory
from expertd.service.settings.keys import Keys
from expertd.service.settings.parts import Limits
from expertd.service.tracing.context import Headers


class InferHead(ABC):
    """`model` and `version` as the caller names them, served or not; one for each way that requests come.

    headers     names are in lower case; with the caller's key
    keys        by which a request with this head was admitted, as that of `key_name`; set by the gate
    caller      the number of `key_name`, for the queue
    request_id  the caller's own, if the head has it

    limit           of the body; set by `read`, as the next two
    tensor_bytes    of all inputs, as far as the head tells: the tokens follow from them
    has_large_text  whether what is parsed is large, or may become so
    """

    __slots__ = (
        "caller",
        "has_large_text",
        "headers",
        "key_name",
        "keys",
        "limit",
        "model",
        "request_id",
        "tensor_bytes",
        "version",
    )

    def __init__(self, model: str, version: str, headers: Headers, request_id: str | None = None) -> None:
        self.model = model
        self.version = version
        self.headers = headers
        self.request_id = request_id
        self.keys: Keys | None = None
        self.key_name = ""
        self.caller = 0
        self.limit = BodyLimit(0)
        self.tensor_bytes = 0
        self.has_large_text = False

    @abstractmethod
    def read(self, limits: Limits) -> None:
        """Check what the head says. Raises RequestError."""

    @abstractmethod
    def find(self, content: Buffer | Span) -> RequestPlan | None:
        """The plan of an earlier request that had another body with the same head."""

    @abstractmethod
    def where_to_parse(self, received: Received) -> Where:
        """Where a body is parsed."""

    @abstractmethod
    def parse(
        self, received: Received, spec: LayerSpec, arena: Arena | None, new_uses: NewUses
    ) -> RequestPlan:
        """Parse a body, and give it back unless tensors are its parts. Raises RequestError."""

    @abstractmethod
    def kept_answer(self, plan: RequestPlan, output: OutputMemory) -> Any:
        """The answer to a request with a plan that had one like it; None without."""

    @abstractmethod
    def where_to_answer(self, plan: RequestPlan, spec: LayerSpec) -> Where:
        """Where its answer is written."""

    @abstractmethod
    def answer(
        self, plan: RequestPlan, output: OutputMemory, spec: LayerSpec, pause: Callable[[], object]
    ) -> Any:
        """The answer; `pause` is called while much text is written. Raises RequestError."""

    @abstractmethod
    def refusal(self, error: RequestError, status: int) -> Any:
        """The answer to a request that is refused; `status` is what the endpoint calls the error's reason."""

    def min_tokens(self, spec: LayerSpec) -> int:
        """The tokens that a request has at least, as far as its head tells."""
        max_bytes = 4 * spec.hidden_size + 12 * spec.top_k  # of a token: FP32, 64-bit ids, weights
        return max(1, self.tensor_bytes // max_bytes)
