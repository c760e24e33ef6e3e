"""The bodies of answers: JSON, errors, and an output's tensor."""

import json
import time
from email.utils import parsedate_to_datetime
from typing import Any

from expertd_client.arrays import ITEM_BYTES
from expertd_client.calls import LayerCall
from expertd_client.errors import ExpertError, InvalidAnswerError, error_of
from expertd_client.http.attempts import ErrorAnswerError
from expertd_client.http.connection import Connection
from expertd_client.http.exchange import receive_bytes, receive_into
from expertd_client.http.head import AnswerHead
from expertd_client.steps import Steps

_MAX_JSON_BYTES = 16 << 20  # of an answer without tensors
_ERROR_CHARACTERS = 500
_DECODER = json.JSONDecoder()


def read_json(connection: Connection, head: AnswerHead) -> Steps[Any]:
    """The JSON of a successful answer; None if the body is empty. Raises RefusedError for an error."""
    if head.content_length > _MAX_JSON_BYTES:
        text = (
            f"Content-Length: expected at most {_MAX_JSON_BYTES} without tensors, got {head.content_length}"
        )
        raise InvalidAnswerError(text, head.status)
    body = yield from receive_bytes(connection, head.content_length)
    if head.status >= 300:
        raise ErrorAnswerError(_error(head, body))
    return _json(body, head.status) if body else None


def read_output(call: LayerCall, connection: Connection, head: AnswerHead) -> Steps[None]:
    """Write the output's bytes into the memory of `call.output`. Raises RefusedError for an error."""
    if head.status != 200:
        yield from read_json(connection, head)
    if head.json_length is None:
        raise InvalidAnswerError("output hidden_states: expected binary, got JSON", head.status)
    rows, columns = call.shape
    datatype = call.output.datatype
    expected, got = rows * columns * ITEM_BYTES[datatype], head.content_length - head.json_length
    if got != expected:
        raise InvalidAnswerError(f"output hidden_states: expected {expected} bytes, got {got}", head.status)
    if head.json_length > _MAX_JSON_BYTES:
        text = f"JSON: expected at most {_MAX_JSON_BYTES} bytes, got {head.json_length}"
        raise InvalidAnswerError(text, head.status)
    header = _json((yield from receive_bytes(connection, head.json_length)), head.status)
    _check(header, [rows, columns], datatype)
    yield from receive_into(connection, call.output.memory())


def _check(header: Any, shape: list[int], datatype: str) -> None:
    try:
        (output,) = header["outputs"]
        found = (output["name"], output["datatype"], output["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidAnswerError(f"answer: expected one output, got {header!r:.200}", 200) from error
    expected = ("hidden_states", datatype, shape)
    if found != expected:
        raise InvalidAnswerError(f"output: expected {expected}, got {found}", 200)


def _json(body: bytes, status: int) -> Any:
    try:
        return _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidAnswerError(f"answer: expected JSON, got {body!r:.100}", status) from error


def _error(head: AnswerHead, body: bytes) -> ExpertError:
    """The exception for an answer that is not a success."""
    return error_of(head.status, _text(body), _seconds(head.retry_after))


def _text(body: bytes) -> str:
    """The protocol's error text, or what a proxy has answered."""
    try:
        text = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body.decode("utf-8", "replace").strip()
    return str(text)[:_ERROR_CHARACTERS] or "answer: expected an error text, got an empty body"


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds from now, from a number or a date."""
    if retry_after is None:
        return None
    try:
        if retry_after.isdigit():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
