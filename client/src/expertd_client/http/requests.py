"""Requests as bytes."""

import json
from functools import lru_cache
from urllib.parse import quote

from expertd_client.address import Address
from expertd_client.arrays import Tensor
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.http.attempts import Request
from expertd_client.version import __version__


def control_request(address: Address, method: str, path: str, body: object = None) -> Request:
    """A request without tensors; `body` is sent as JSON."""
    content = b"" if body is None else json.dumps(body).encode()
    head = _head(address, method, path)
    if method != "GET":
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(content)
    whole = memoryview(head + b"\r\n" + content)
    return lambda: [whole]


def infer_request(address: Address, call: LayerCall, deadline: Deadline) -> Request:
    """An infer request; its tensors stay where they are."""
    tensors = [tensor.view() for tensor in call.inputs]
    num_bytes = sum(map(len, tensors))
    inputs = ",".join(map(_input, call.inputs))
    outputs = ""
    if call.output.datatype != call.inputs[0].datatype:
        outputs = (
            f',"outputs":[{{"name":"hidden_states","parameters":{{"datatype":"{call.output.datatype}"}}}}]'
        )
    start = _head(address, "POST", f"{model_path(call.model)}/infer")

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


def _input(tensor: Tensor) -> str:
    rows, columns = tensor.shape
    return (
        f'{{"name":"{tensor.name}","shape":[{rows},{columns}],"datatype":"{tensor.datatype}",'
        f'"parameters":{{"binary_data_size":{tensor.num_bytes}}}}}'
    )


@lru_cache(maxsize=1024)
def model_path(model: str) -> str:
    """The path of a model's calls."""
    return f"/v2/models/{quote(model, safe='')}"


@lru_cache(maxsize=1024)
def _head(address: Address, method: str, path: str) -> bytes:
    key = f"Authorization: Bearer {address.key}\r\n" if address.key else ""
    return (
        f"{method} {address.base}{path} HTTP/1.1\r\nHost: {address.authority}\r\n"
        f"User-Agent: expertd-client/{__version__}\r\nexpertd-client: {__version__}\r\nAccept: */*\r\n{key}"
    ).encode("ascii")
