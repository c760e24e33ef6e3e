"""An infer call: the caller's arguments, checked before anything is sent."""

from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

from expertd_client.arrays import FLOATS, INTEGERS, Tensor, read
from expertd_client.deadline import check_seconds
from expertd_client.errors import InvalidRequestError
from expertd_client.outputs import Output, make_output

_WEIGHTS = {"float32": "FP32"}


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One request; `inputs` are hidden_states and, if the caller routes, topk_ids and topk_weights."""

    model: str
    inputs: tuple[Tensor, ...]
    output: Output
    priority: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of hidden_states and of the output."""
        return self.inputs[0].shape

    def parts(self, max_tokens: int) -> "list[LayerCall]":
        """Calls of equal size, as far as that goes, whose outputs are parts of this one's."""
        rows = self.shape[0]
        count = -(-rows // max_tokens)
        ends = [rows * number // count for number in range(count + 1)]
        return [
            LayerCall(
                self.model,
                tuple(tensor.rows(start, stop) for tensor in self.inputs),
                self.output.rows(start, stop),
                self.priority,
            )
            for start, stop in pairwise(ends)
        ]


def layer_call(
    model: str,
    hidden_states: object,
    topk_ids: object = None,
    topk_weights: object = None,
    output_dtype: object = None,
    out: object = None,
    priority: object = 0,
) -> LayerCall:
    """Raises InvalidRequestError if the arguments do not fit each other."""
    check_model(model)
    urgency = checked_priority(priority)
    tensor = read("hidden_states", hidden_states, FLOATS)
    if (topk_ids is None) != (topk_weights is None):
        given = "topk_weights" if topk_ids is None else "topk_ids"
        raise InvalidRequestError(f"topk_ids and topk_weights: expected both or neither, got {given} alone")
    output = make_output(tensor, output_dtype, out)
    if topk_ids is None:
        return LayerCall(model, (tensor,), output, urgency)
    ids, weights = read("topk_ids", topk_ids, INTEGERS), read("topk_weights", topk_weights, _WEIGHTS)
    if ids.shape[0] != tensor.shape[0]:
        expected = [tensor.shape[0], ids.shape[1]]
        raise InvalidRequestError(f"shape of topk_ids: expected {expected}, got {list(ids.shape)}")
    if weights.shape != ids.shape:
        expected = list(ids.shape)
        raise InvalidRequestError(f"shape of topk_weights: expected {expected}, got {list(weights.shape)}")
    return LayerCall(model, (tensor, ids, weights), output, urgency)


def checked_priority(priority: object) -> int:
    """Raises InvalidRequestError unless it is an integer from 0 to 255."""
    if type(priority) is not int or not 0 <= priority <= 255:
        raise InvalidRequestError(f"priority: expected an integer from 0 to 255, got {priority!r}")
    return priority


def check_model(model: object) -> None:
    """Raises InvalidRequestError unless it can be a model's name."""
    try:
        is_name = isinstance(model, str) and bool(model.encode())
    except UnicodeEncodeError:  # lone surrogates
        is_name = False
    if not is_name:
        raise InvalidRequestError(f"model: expected a name, got {model!r}")


def check_limits(
    timeout: float, max_connections: int, max_retries: int, retry_seconds: float, failover_seconds: float
) -> None:
    """Raises InvalidRequestError for settings of a client that cannot work."""
    check_seconds(timeout)
    if not isinstance(retry_seconds, Real) or not retry_seconds >= 0:
        raise InvalidRequestError(f"retry_seconds: expected at least 0, got {retry_seconds!r:.80}")
    if not isinstance(failover_seconds, Real) or not 0.05 <= failover_seconds <= 3600:
        text = f"failover_seconds: expected 0.05 to 3600, got {failover_seconds!r:.80}"
        raise InvalidRequestError(text)
    if max_connections < 1:
        raise InvalidRequestError(f"max_connections: expected at least 1, got {max_connections}")
    if max_retries < 0:
        raise InvalidRequestError(f"max_retries: expected at least 0, got {max_retries}")
