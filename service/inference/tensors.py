"""Builds a layer's request from the parsed inputs and output, and checks that they fit each other."""

from collections.abc import Mapping
from dataclasses import dataclass

from expertd.limits import SCALE_BLOCK
from expertd.service.engine.spec import LayerSpec
from expertd.service.inference.errors import RequestError
from expertd.service.inference.regions import check_routing, hidden_states_at, output_at, routing_at
from expertd.service.memory import Buffer, RegionSlice, RegionUses, Span
from expertd.service.moe.request import FP8, LayerRequest
from expertd.service.util.sentences import any_of

ELEMENT_BYTES = {"BF16": 2, "FP16": 2, "FP32": 4, "FP8": 1, "UINT8": 1, "INT32": 4, "INT64": 8}
FLOATS = ("BF16", "FP16", "FP32")
FP8S = ("FP8", "UINT8")  # both e4m3: clients know no FP8
SCALE = "hidden_states_scale"
INPUT_DATATYPES = {
    "hidden_states": (*FLOATS, *FP8S),
    SCALE: ("FP32",),
    "topk_ids": ("INT32", "INT64"),
    "topk_weights": ("FP32",),
}
OUTPUT = "hidden_states"

_NUMBER_BYTES = 24  # of JSON: the longest value of any datatype, such as -1.1754943508222875e-38, and a comma


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input: its shape [tokens, columns], and its bytes or where they lie."""

    datatype: str
    shape: list[int]
    data: Buffer | Span | RegionSlice


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """What the request says of its output; `place`: where it goes, None: into the response."""

    datatype: str
    binary: bool
    place: RegionSlice | None = None


def check_shape(name: str, shape: list[int], num_tokens: int, spec: LayerSpec) -> None:
    """Raise RequestError if an input's shape does not fit the tokens, the model or its limit on tokens."""
    columns = {"hidden_states": spec.hidden_size, SCALE: spec.hidden_size // SCALE_BLOCK}
    expected = [num_tokens, columns.get(name, spec.top_k)]
    if shape != expected:
        raise RequestError(f"shape of input {name}: expected {expected}, got {shape}")
    check_tokens(num_tokens, spec)


def check_tokens(num_tokens: int, spec: LayerSpec, at_least: str = "") -> None:
    """Raise RequestError for more tokens than the model's requests may have.

    at_least  "at least " if there may be more than `num_tokens`
    """
    if num_tokens > spec.max_request_tokens:
        text = f"request: expected at most {spec.max_request_tokens} tokens, got {at_least}{num_tokens}"
        raise RequestError(text, reason="too_many_tokens")


def check_shapes(tensors: Mapping[str, InputTensor], spec: LayerSpec) -> None:
    """Raise RequestError if the inputs do not fit each other, the model or its limit on tokens."""
    num_tokens = tensors["hidden_states"].shape[0]
    for name, tensor in tensors.items():
        check_shape(name, tensor.shape, num_tokens, spec)
    datatype = tensors["hidden_states"].datatype
    if (SCALE in tensors) != (datatype in FP8S):
        got = f"{datatype} with it" if SCALE in tensors else f"{datatype} without it"
        raise RequestError(f"input {SCALE}: expected it with FP8 or UINT8 hidden_states alone, got {got}")
    if datatype in FP8S and not spec.takes_fp8:
        why = f"with a hidden_size ({spec.hidden_size}) that is no multiple of {SCALE_BLOCK}"
        text = f"expected {any_of(FLOATS)} {why}, got {datatype}"
        raise RequestError(f"datatype of input hidden_states: {text}")
    if ("topk_ids" in tensors) != ("topk_weights" in tensors):
        given = "topk_ids" if "topk_ids" in tensors else "topk_weights"
        raise RequestError(f"inputs topk_ids and topk_weights: expected both or neither, got {given} alone")


def check_json_output(output: OutputTensor, num_tokens: int, spec: LayerSpec) -> None:
    """Raise RequestError if the output is wanted as JSON and may be too large for that."""
    max_bytes = num_tokens * spec.hidden_size * _NUMBER_BYTES
    if output.binary or output.place is not None or max_bytes <= spec.max_json_bytes:
        return
    text = (
        f"output hidden_states: expected at most {spec.max_json_bytes} bytes of JSON, got up to {max_bytes} "
        f"for shape {[num_tokens, spec.hidden_size]}; set binary_data_output to get it in binary"
    )
    raise RequestError(text, reason="json_too_large")


def layer_request(
    tensors: Mapping[str, InputTensor],
    output: OutputTensor,
    spec: LayerSpec,
    uses: RegionUses | None,
    stored_later: bool = False,
) -> LayerRequest:
    """The request of inputs that passed `check_shapes`; `uses` holds the regions of places, if there are any.

    stored_later  an output in a region is stored after the step where possible, because its caller may be
                  answered, and have the region again, before the step ends
    Raises RequestError, also without memory to copy a region to.
    """
    data = {name: _data(name, tensor, uses) for name, tensor in tensors.items()}
    hidden_states, ids = tensors["hidden_states"], tensors.get("topk_ids")
    check_routing(data.get("topk_ids"), data.get("topk_weights"), spec)
    num_bytes = hidden_states.shape[0] * spec.hidden_size * ELEMENT_BYTES[output.datatype]
    return LayerRequest(
        num_tokens=hidden_states.shape[0],
        hidden_states=data["hidden_states"],
        datatype=FP8 if hidden_states.datatype in FP8S else hidden_states.datatype,
        topk_ids=data.get("topk_ids"),
        topk_ids_datatype=ids.datatype if ids else "INT32",
        topk_weights=data.get("topk_weights"),
        output_datatype=output.datatype,
        output=output_at(output.place, uses, num_bytes, stored_later) if output.place and uses else None,
        scales=data.get(SCALE),
    )


def _data(name: str, tensor: InputTensor, uses: RegionUses | None) -> Buffer | Span:
    if not isinstance(tensor.data, RegionSlice):
        return tensor.data
    assert uses is not None
    if name == "hidden_states":
        return hidden_states_at(tensor.data, uses)
    return routing_at(tensor.data, uses, ELEMENT_BYTES[tensor.datatype])
