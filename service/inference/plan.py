"""Parsed infer requests without their bodies: those that differ in nothing but tensors are parsed once."""

from dataclasses import replace
from typing import Any

from expertd.service.inference.request import InferRequest
from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest

_BODY = object()  # owns the spans that stand for parts of any body

_Part = tuple[int, int]  # offset in the body, bytes


class RequestPlan:
    """A parsed request whose binary tensors are parts of any body with the same JSON.

    answer_head  what precedes the output in its answers, as the way that it came has it; None: not known yet
    """

    __slots__ = (
        "_ids",
        "_layer",
        "_scales",
        "_states",
        "_weights",
        "answer_head",
        "body_bytes",
        "num_tokens",
        "output",
        "output_datatype",
        "request",
    )

    def __init__(self, request: InferRequest, body_bytes: int) -> None:
        layer = request.layer
        self._states, self._ids, self._weights, self._scales = (
            _part_of(tensor)
            for tensor in (layer.hidden_states, layer.topk_ids, layer.topk_weights, layer.scales)
        )
        # Without the tensors, because they keep the first body.
        self._layer = replace(layer, hidden_states=b"", topk_ids=None, topk_weights=None, scales=None)
        self.num_tokens, self.output_datatype = layer.num_tokens, layer.output_datatype
        self.output = layer.output  # in a caller's region
        self.request = replace(request, layer=self._layer)
        self.body_bytes = body_bytes
        self.answer_head: Any = None

    @property
    def is_worth_keeping(self) -> bool:
        """Whether every tensor is a part of the body."""
        is_binary = all(tensor is None or isinstance(tensor, tuple) for tensor in self._tensors)
        return is_binary and self.request.regions is None

    @property
    def uses_body(self) -> bool:
        """Whether a tensor is a part of the body."""
        return any(isinstance(tensor, tuple) for tensor in self._tensors)

    @property
    def _tensors(self) -> "tuple[Buffer | Span | _Part | None, ...]":
        return self._states, self._ids, self._weights, self._scales

    def layer(self, body: Buffer | Span, output: Span | None) -> LayerRequest:
        """The request with the tensors of `body`, to be computed into `output`."""
        layer, ids, weights = self._layer, self._ids, self._weights
        states = _resolved(self._states, body)
        assert states is not None
        return LayerRequest(
            layer.num_tokens,
            states,
            layer.datatype,
            ids if ids is None else _resolved(ids, body),
            layer.topk_ids_datatype,
            weights if weights is None else _resolved(weights, body),
            layer.output_datatype,
            output,
            scales=self._scales if self._scales is None else _resolved(self._scales, body),
        )


def any_body(body: Buffer | Span) -> Span:
    """A span that stands for `body`, and for any other with the same JSON: tensors that are its parts."""
    view = host_view(body)
    return Span(0, len(view), None, view, _BODY)


def _part_of(tensor: Buffer | Span | None) -> Buffer | Span | _Part | None:
    if isinstance(tensor, Span) and tensor.owner is _BODY:
        return tensor.address, tensor.num_bytes
    return tensor


def _resolved(tensor: Buffer | Span | _Part | None, body: Buffer | Span) -> Buffer | Span | None:
    if not isinstance(tensor, tuple):
        return tensor
    offset, num_bytes = tensor
    if isinstance(body, Span):
        return body.part(offset, num_bytes)
    return memoryview(body)[offset : offset + num_bytes]
