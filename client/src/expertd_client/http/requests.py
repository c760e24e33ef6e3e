"""Requests as bytes."""

import json
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

from expertd_client.address import Address
from expertd_client.arrays import ITEM_BYTES, Tensor
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.http.attempts import Request
from expertd_client.places import Layout
from expertd_client.version import __version__


def control_request(address: Address, method: str, path: str, body: object = None) -> Request:
    """A request without tensors; `body` is sent as JSON."""
    content = b"" if body is None else json.dumps(body).encode()
    head = _head(address, method, path)
    if method != "GET":
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(content)
    whole = memoryview(head + b"\r\n" + content)
    return lambda: [whole]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a call's tensors are in shared memory: from `start` of a region on, by name in `where`.

    `names` are those of the inputs that are there; the others travel in the body.
    """

    region: str
    start: int
    where: Layout
    names: tuple[str, ...]

    def parameters(self, offset: int, num_bytes: int) -> str:
        """Those of a tensor, as JSON without braces."""
        return (
            f'"shared_memory_region":"{self.region}","shared_memory_byte_size":{num_bytes},'
            f'"shared_memory_offset":{self.start + offset}'
        )


def infer_request(
    address: Address, call: LayerCall, deadline: Deadline, placed: Placed | None = None
) -> Request:
    """An infer request; its tensors stay where they are."""
    sent = [tensor for tensor in call.inputs if placed is None or tensor.name not in placed.names]
    tensors = [tensor.view() for tensor in sent]
    num_bytes = sum(map(len, tensors))
    inputs = ",".join(_input(tensor, placed) for tensor in call.inputs)
    outputs = _outputs(call, placed)
    start = _head(address, "POST", f"/v2/models/{_quoted(call.model)}/infer")

    def request() -> list[memoryview]:
        left = deadline.microseconds()
        more = "" if left is None else f',"timeout":{left}'
        more += f',"priority":{call.priority}' if call.priority else ""
        text = f'{{"parameters":{{"binary_data_output":true{more}}},"inputs":[{inputs}]{outputs}}}'
        head = (
            b"%bContent-Type: application/octet-stream\r\nContent-Length: %d\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n%b"
        ) % (start, len(text) + num_bytes, len(text), text.encode("ascii"))
        return [memoryview(head), *tensors]

    return request


def _input(tensor: Tensor, placed: Placed | None) -> str:
    datatype, parameters = tensor.datatype, f'"binary_data_size":{tensor.num_bytes}'
    rows, columns = tensor.shape
    if placed is not None and tensor.name in placed.names:
        datatype = "INT32" if tensor.name == "topk_ids" else datatype  # as they are in places
        offset = getattr(placed.where, tensor.name)
        parameters = placed.parameters(offset, rows * columns * ITEM_BYTES[datatype])
    return (
        f'{{"name":"{tensor.name}","shape":[{rows},{columns}],"datatype":"{datatype}",'
        f'"parameters":{{{parameters}}}}}'
    )


def _outputs(call: LayerCall, placed: Placed | None) -> str:
    datatype, (rows, columns) = call.output.datatype, call.shape
    parameters = [f'"datatype":"{datatype}"'] if datatype != call.inputs[0].datatype else []
    if placed is not None:
        parameters.append(placed.parameters(placed.where.output, rows * columns * ITEM_BYTES[datatype]))
    if not parameters:
        return ""
    return f',"outputs":[{{"name":"hidden_states","parameters":{{{",".join(parameters)}}}}}]'


def model_path(model: str) -> str:
    """The path of a model's calls."""
    return f"/v2/models/{_quoted(model)}"


@lru_cache(maxsize=1024)
def _quoted(model: str) -> str:
    return quote(model, safe="")


@lru_cache(maxsize=1024)
def _head(address: Address, method: str, path: str) -> bytes:
    key = f"Authorization: Bearer {address.key}\r\n" if address.key else ""
    return (
        f"{method} {address.base}{path} HTTP/1.1\r\nHost: {address.authority}\r\n"
        f"User-Agent: expertd-client/{__version__}\r\nAccept: */*\r\n{key}"
    ).encode("ascii")
