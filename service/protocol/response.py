"""Builds an infer response: JSON alone, or a JSON header with the tensor's bytes after it."""

import json
from dataclasses import dataclass

from service.moe.runner import Buffer
from service.protocol.datatypes import bytes_to_numbers
from service.protocol.request import OUTPUT, InferRequest, LayerSpec

MODEL_VERSION = "1"


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The body in parts, to be sent one after the other; `header_length` is None for JSON alone."""

    parts: list[bytes | memoryview]
    header_length: int | None


def build_response(request: InferRequest, output: Buffer, spec: LayerSpec) -> InferResponse:
    """The answer to `request`: `output` holds [num_tokens, hidden_size] values of its output datatype.

    Raises OipError (400) when JSON was asked for values that JSON cannot carry.
    """
    datatype = request.layer.output_datatype
    tensor: dict[str, object] = {
        "name": OUTPUT,
        "shape": [request.layer.num_tokens, spec.hidden_size],
        "datatype": datatype,
    }
    body: dict[str, object] = {"model_name": spec.name, "model_version": MODEL_VERSION, "outputs": [tensor]}
    if request.id is not None:
        body["id"] = request.id
    if not request.binary_output:
        tensor["data"] = bytes_to_numbers(output, datatype, f"output {OUTPUT}")
        return InferResponse([_dumps(body)], None)
    data = memoryview(output).cast("B") if request.layer.num_tokens else memoryview(b"")
    tensor["parameters"] = {"binary_data_size": len(data)}
    header = _dumps(body)
    return InferResponse([header, data], len(header))


def _dumps(body: dict[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii")
