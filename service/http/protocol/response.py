"""Builds an infer response: JSON only, or a JSON header followed by the tensor's bytes."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from expertd.service.engine.spec import MODEL_VERSION, LayerSpec
from expertd.service.http.protocol.datatypes import bytes_to_numbers
from expertd.service.inference.request import InferRequest
from expertd.service.inference.tensors import OUTPUT
from expertd.service.memory import host_view
from expertd.service.moe.request import OutputMemory

_PIECE = 1024  # numbers: about half a millisecond


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The parts of a body, in order; `header_length` is None if all of it is JSON."""

    parts: list[bytes | memoryview]
    header_length: int | None


def build_response(
    request: InferRequest, output: OutputMemory, spec: LayerSpec, pause: Callable[[], object] = lambda: None
) -> InferResponse:
    """The response to `request`; `output` holds [num_tokens, hidden_size] values of its output datatype.

    `pause` is called in between while much JSON is written, so that other threads can run.
    Raises OipError (400) if JSON is requested but cannot represent the values.
    """
    num_tokens, datatype = request.layer.num_tokens, request.layer.output_datatype
    request_id = "" if request.id is None else f',"id":{json.dumps(request.id)}'
    # Formatted by hand: a JSON encoder takes five times as long, in every request.
    opening = (
        f'{{"model_name":"{spec.name}","model_version":"{MODEL_VERSION}"{request_id},"outputs":['
        f'{{"name":"{OUTPUT}","shape":[{num_tokens},{spec.hidden_size}],"datatype":"{datatype}"'
    )
    if request.regions is not None and (place := request.regions.output_place) is not None:
        parameters = {
            "shared_memory_region": place.name,
            "shared_memory_offset": place.offset,
            "shared_memory_byte_size": place.num_bytes,
        }
        return InferResponse([f'{opening},"parameters":{json.dumps(parameters)}}}]}}'.encode("ascii")], None)
    if not request.binary_output:
        numbers = _json_of(bytes_to_numbers(host_view(output), datatype, f"output {OUTPUT}"), pause)
        return InferResponse([f'{opening},"data":[{numbers}]}}]}}'.encode("ascii")], None)
    data = host_view(output).cast("B") if num_tokens else memoryview(b"")
    header = f'{opening},"parameters":{{"binary_data_size":{len(data)}}}}}]}}'.encode("ascii")
    return InferResponse([header, data], len(header))


def _json_of(numbers: list[float], pause: Callable[[], object]) -> str:
    pieces = []
    for begin in range(0, len(numbers), _PIECE):
        pieces.append(json.dumps(numbers[begin : begin + _PIECE], separators=(",", ":"))[1:-1])
        pause()
    return ",".join(pieces)
