"""Builds an infer response: JSON alone, or a JSON header with the tensor's bytes after it."""

import json
from dataclasses import dataclass

from expertd.service.engine.spec import MODEL_VERSION, LayerSpec
from expertd.service.http.protocol.datatypes import bytes_to_numbers
from expertd.service.http.protocol.request import OUTPUT, InferRequest
from expertd.service.moe.request import Buffer


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The body in parts, to be sent one after the other; `header_length` is None for JSON alone."""

    parts: list[bytes | memoryview]
    header_length: int | None


def build_response(request: InferRequest, output: Buffer, spec: LayerSpec) -> InferResponse:
    """The answer to `request`: `output` holds [num_tokens, hidden_size] values of its output datatype.

    Raises OipError (400) when JSON was asked for values that JSON cannot carry.
    """
    num_tokens, datatype = request.layer.num_tokens, request.layer.output_datatype
    request_id = "" if request.id is None else f',"id":{json.dumps(request.id)}'
    # Written out: every request pays for this, and a JSON encoder costs five times as much.
    opening = (
        f'{{"model_name":"{spec.name}","model_version":"{MODEL_VERSION}"{request_id},"outputs":['
        f'{{"name":"{OUTPUT}","shape":[{num_tokens},{spec.hidden_size}],"datatype":"{datatype}"'
    )
    if not request.binary_output:
        numbers = json.dumps(bytes_to_numbers(output, datatype, f"output {OUTPUT}"), separators=(",", ":"))
        return InferResponse([f'{opening},"data":{numbers}}}]}}'.encode("ascii")], None)
    data = memoryview(output).cast("B") if num_tokens else memoryview(b"")
    header = f'{opening},"parameters":{{"binary_data_size":{len(data)}}}}}]}}'.encode("ascii")
    return InferResponse([header, data], len(header))
