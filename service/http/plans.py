"""The plans of requests with the same head, by their JSON."""

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol import parse_request
from expertd.service.inference.plan import RequestPlan, any_body
from expertd.service.inference.regions import NewUses, no_regions
from expertd.service.memory import Buffer, Span, host_view

_MAX_KEPT = 16  # of one head
_MAX_JSON_BYTES = 2048  # of one that is kept


class Plans:
    """Keeps some."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[bytes, RequestPlan] = {}

    def find(self, body: Buffer | Span, header_length: int) -> RequestPlan | None:
        """The plan of an earlier request, if `body` differs from its body in nothing but tensors."""
        view = body if isinstance(body, bytes) else host_view(body)
        plan = self._kept.get(bytes(view[:header_length]))
        return plan if plan is not None and plan.body_bytes == len(view) else None

    def parse(
        self, body: Buffer | Span, header_length: int | None, spec: LayerSpec, new_uses: NewUses = no_regions
    ) -> RequestPlan:
        """Parse `body` as `parse_request` does, and keep the plan if it is worth it. Safe in any thread."""
        any_one = any_body(body)
        plan = RequestPlan(parse_request(any_one, header_length, spec, new_uses), any_one.num_bytes)
        if header_length is not None and header_length <= _MAX_JSON_BYTES and plan.is_worth_keeping:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[bytes(host_view(body)[:header_length])] = plan
        return plan
