"""Our messages are those of tritonclient on the wire."""

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from expertd.service.grpc.messages import CLASSES

NESTED = {
    "InferInputTensor": "ModelInferRequest.InferInputTensor",
    "InferRequestedOutputTensor": "ModelInferRequest.InferRequestedOutputTensor",
    "InferOutputTensor": "ModelInferResponse.InferOutputTensor",
    "TensorMetadata": "ModelMetadataResponse.TensorMetadata",
    "ModelIndex": "RepositoryIndexResponse.ModelIndex",
    "SystemRegionStatus": "SystemSharedMemoryStatusResponse.RegionStatus",
    "CudaRegionStatus": "CudaSharedMemoryStatusResponse.RegionStatus",
}


EXTENSIONS = dict.fromkeys(
    ("TensorMetadata", "ModelMetadataResponse"), "parameters"
)  # of other servers, which tritonclient skips


def theirs(name: str) -> Any:
    first, *rest = NESTED.get(name, name).split(".")
    found = getattr(service_pb2, first, None) or getattr(model_config_pb2, first)
    for each in rest:
        found = getattr(found, each)
    return found


def filled(made: Any, depth: int = 0) -> Any:
    """A message whose every field has a value other than its default."""
    for field in made.DESCRIPTOR.fields:
        if EXTENSIONS.get(made.DESCRIPTOR.name) == field.name:
            continue
        value = getattr(made, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            filled(value["key"], depth + 1)
        elif field.message_type is not None:
            filled(value.add() if field.is_repeated else value, depth + 1)
        else:
            kinds = {
                field.TYPE_STRING: f"{field.name}é",
                field.TYPE_BYTES: b"\x00\xff",
                field.TYPE_BOOL: True,
                field.TYPE_FLOAT: 2.5,
                field.TYPE_DOUBLE: 2.5,
            }
            each = kinds.get(field.type, 3)
            if field.is_repeated:
                value.extend([each, each])
            else:
                setattr(made, field.name, each)
    return made


@pytest.mark.parametrize("name", CLASSES)
def test_a_message_means_the_same_to_tritonclient(name: str) -> None:
    ours = filled(CLASSES[name]())
    read = theirs(name).FromString(ours.SerializeToString())
    assert str(read) == str(ours), "names, numbers and types agree"
    assert CLASSES[name].FromString(read.SerializeToString()) == ours


@pytest.mark.parametrize("name", CLASSES)
def test_no_field_of_tritonclients_is_missing(name: str) -> None:
    rest = {"memory_usage", "response_stats"}  # of ModelStatistics: what this server does not count
    if name.startswith("Model") and name.removeprefix("Model") in (
        "Config",
        "Input",
        "Output",
        "InstanceGroup",
        "DynamicBatching",
    ):
        return
    fields = {field.name for field in theirs(name).DESCRIPTOR.fields}
    ours = {field.name for field in CLASSES[name].DESCRIPTOR.fields}
    assert fields - rest == ours - {EXTENSIONS.get(name)}


@pytest.mark.parametrize("enum", ["DataType", "Kind"])
def test_enums(enum: str) -> None:
    ours = CLASSES["ModelConfig"].DESCRIPTOR.file.enum_types_by_name[enum]
    other = (
        model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"]
        if enum == "DataType"
        else model_config_pb2.ModelInstanceGroup.DESCRIPTOR.enum_types_by_name["Kind"]
    )
    assert ours.values_by_name.keys() == other.values_by_name.keys()
    assert [value.number for value in ours.values] == [
        other.values_by_name[value.name].number for value in ours.values
    ]
