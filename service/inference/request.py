"""An infer request as its caller gives it, and all checks but those on the values of its tensors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeGuard

from expertd.service.engine.spec import LayerSpec
from expertd.service.engine.steps import DEFAULT_PRIORITY, LAST_PRIORITY
from expertd.service.inference.errors import RequestError
from expertd.service.inference.regions import (
    BYTE_SIZE,
    OFFSET,
    REGION,
    NewUses,
    no_regions,
    place_of,
    uses_of,
)
from expertd.service.inference.tensors import (
    ELEMENT_BYTES,
    FLOATS,
    FP8S,
    INPUT_DATATYPES,
    OUTPUT,
    InputTensor,
    OutputTensor,
    check_json_output,
    check_shape,
    check_shapes,
    layer_request,
)
from expertd.service.memory import Buffer, RegionUses, Span
from expertd.service.moe.request import LayerRequest
from expertd.service.util.sentences import any_of, shown

_LONG_SECONDS = 1.0  # a timeout that hardly ever passes during a step: the output is written in place
# Parameters of the protocol that this server does not support: ignoring them would mislead.
_UNSUPPORTED = frozenset({"sequence_id", "sequence_start", "sequence_end", "classification"})
# Where a parameter belongs: elsewhere it would be ignored, as unknown ones are, and the answer be another.
_PLACES = {
    **dict.fromkeys(("timeout", "priority", "binary_data_output"), "the request"),
    **dict.fromkeys((REGION, BYTE_SIZE, OFFSET), "a tensor"),
    "binary_data_size": "an input",
    **dict.fromkeys(("binary_data", "datatype"), "an output"),
}
_MISPLACED = {
    owner: frozenset(name for name, place in _PLACES.items() if place not in places)
    for owner, *places in (
        ("request", "the request"),
        ("input", "a tensor", "an input"),
        ("output", "a tensor", "an output"),
    )
}


class GivenInput(NamedTuple):
    """An input as a caller gives it; nothing is checked, not even types.

    source  what holds its data; None: nothing here, so it must be in a region
    data    reads the data, once all but their number is right: where it is in errors, shape and datatype
    """

    name: object
    datatype: object
    shape: object
    parameters: object
    source: str | None
    data: Callable[[str, list[int], str], Buffer | Span]


class GivenOutput(NamedTuple):
    """An output as a caller asks for it; nothing is checked."""

    name: object
    parameters: object


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request with consistent types, shapes and sizes; the values of its routing are not checked.

    regions: what holds the shared memory that it names, for the receiver to load, store and release.
    """

    id: str | None
    layer: LayerRequest
    binary_output: bool
    timeout_seconds: float | None
    priority: int = DEFAULT_PRIORITY
    regions: RegionUses | None = None

    @property
    def json_output(self) -> bool:
        """Whether the response holds the output as JSON numbers."""
        return not self.binary_output and (self.regions is None or self.regions.output_place is None)


def infer_request(
    request_id: str | None,
    given_parameters: object,
    inputs: Iterable[GivenInput],
    outputs: Sequence[GivenOutput],
    spec: LayerSpec,
    new_uses: NewUses = no_regions,
    binary_output: bool = False,
) -> InferRequest:
    """The request to the model of `spec` with these inputs, which are read in their order.

    binary_output  whether outputs are binary if the request does not say
    Raises RequestError, also for a large output as JSON, and without memory to copy a region to.
    """
    parameters = _parameters(given_parameters, "the request", "request")
    tensors: dict[str, InputTensor] = {}
    num_tokens: int | None = None
    for given in inputs:
        name = given.name
        if not isinstance(name, str) or name not in INPUT_DATATYPES:
            refuse(f"name of an input: expected {any_of(INPUT_DATATYPES)}, got {shown(name)}")
        if name in tensors:
            refuse(f"input {name}: expected once, got twice")
        shape = given.shape
        if not _is_shape(shape):
            expected = "two sizes of 0 to 2^31 - 1, [tokens, columns]"
            refuse(f"shape of input {name}: expected {expected}, got {shown(shape)}")
        num_tokens = shape[0] if name == "hidden_states" else num_tokens
        if num_tokens is not None:  # before the data, whose size follows from the shape
            check_shape(name, shape, num_tokens, spec)
        tensors[name] = _tensor(given, name, shape)
    if "hidden_states" not in tensors:
        refuse(f"inputs: expected hidden_states, got {', '.join(tensors) or 'none'}")
    datatype = tensors["hidden_states"].datatype
    datatype = spec.datatype if datatype in FP8S else datatype
    output = OutputTensor(datatype, _boolean(parameters, "binary_data_output", binary_output))
    if outputs:
        output = _output(outputs, output)
    timeout, priority = _timeout(parameters), _priority(parameters)
    check_shapes(tensors, spec)
    check_json_output(output, tensors["hidden_states"].shape[0], spec)
    uses = uses_of([*(tensor.data for tensor in tensors.values()), output.place], new_uses)
    try:
        layer = layer_request(tensors, output, spec, uses, timeout is not None and timeout < _LONG_SECONDS)
    except BaseException:
        if uses is not None:
            uses.release()
        raise
    return InferRequest(request_id, layer, output.binary, timeout, priority, uses)


def check_size(name: str, where: str, shape: list[int], datatype: str, got: object) -> int:
    """The bytes of a tensor; raises RequestError if the size that `name` gives is another one."""
    expected = shape[0] * shape[1] * ELEMENT_BYTES[datatype]
    if type(got) is not int or got != expected:
        refuse(f"{name} of {where}: expected {expected} for shape {shape} of {datatype}, got {shown(got)}")
    return expected


def refuse(message: str) -> NoReturn:
    """Refuse the request for what is wrong in it."""
    raise RequestError(message)


def _tensor(given: GivenInput, name: str, shape: list[int]) -> InputTensor:
    where = f"input {name}"
    datatype = given.datatype
    if not isinstance(datatype, str) or datatype not in INPUT_DATATYPES[name]:
        refuse(f"datatype of {where}: expected {any_of(INPUT_DATATYPES[name])}, got {shown(datatype)}")
    place = place_of(_parameters(given.parameters, where, "input"), where)
    if place is None:
        return InputTensor(datatype, shape, given.data(where, shape, datatype))
    if given.source is not None:
        refuse(f"{where}: expected {REGION} alone, got {given.source} too")
    check_size(BYTE_SIZE, where, shape, datatype, place.num_bytes)
    return InputTensor(datatype, shape, place)


def _output(outputs: Sequence[GivenOutput], output: OutputTensor) -> OutputTensor:
    if len(outputs) > 1 and all(given.name == OUTPUT for given in outputs):
        refuse(f"output {OUTPUT}: expected once, got {len(outputs)} times")
    for given in outputs:
        if given.name != OUTPUT:
            refuse(f"name of an output: expected {OUTPUT}, got {shown(given.name)}")
        parameters = _parameters(given.parameters, f"output {OUTPUT}", "output")
        binary = _boolean(parameters, "binary_data", output.binary)
        datatype = parameters.get("datatype", output.datatype)
        if datatype not in FLOATS:
            refuse(f"datatype of output {OUTPUT}: expected {any_of(FLOATS)}, got {shown(datatype)}")
        output = OutputTensor(datatype, binary, place_of(parameters, f"output {OUTPUT}"))
    return output


def _is_shape(shape: object) -> TypeGuard[list[int]]:
    return (
        isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 <= n < 2**31 for n in shape)
    )


def _parameters(parameters: object, where: str, owner: str) -> dict[str, Any]:
    """The parameters of the request or of a tensor; those that nobody knows are ignored, as in Triton."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        refuse(f"parameters of {where}: expected an object, got {shown(parameters)}")
    for name in _UNSUPPORTED & parameters.keys():
        if parameters[name]:
            got = shown(parameters[name])
            refuse(f"parameter {name} of {where}: expected none (not supported), got {got}")
    for name, value in parameters.items():
        if name in _MISPLACED[owner]:
            refuse(f"parameter {name} of {where}: expected it at {_PLACES[name]}, got {shown(value)} here")
    return parameters


def _boolean(parameters: dict[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        refuse(f"parameter {name}: expected true or false, got {shown(value)}")
    return value


def _timeout(parameters: dict[str, Any]) -> float | None:
    """The request's `timeout` in seconds (microseconds on the wire); None if it is 0 or absent."""
    value = parameters.get("timeout", 0)
    if type(value) is not int or not 0 <= value < 2**63:
        expected = "an integer of microseconds from 0 (none) to 2^63 - 1"
        refuse(f"parameter timeout: expected {expected}, got {shown(value)}")
    return value / 1e6 if value else None


def _priority(parameters: dict[str, Any]) -> int:
    """The request's `priority`, 1 to 255; the default one if it is 0 or absent."""
    value = parameters.get("priority", 0)
    if type(value) is not int or not 0 <= value <= LAST_PRIORITY:
        refuse(f"parameter priority: expected an integer from 0 to {LAST_PRIORITY}, got {shown(value)}")
    return value or DEFAULT_PRIORITY
