"""Message classes of the protocol, made from its tables when this module is imported."""

import re
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClassesForFiles

from expertd.service.grpc.tables import ENUMS, MESSAGES, PACKAGE

_FIELD = re.compile(r"(\|?)(\d+) (\w+): ([\[{]?)(\w+)")
_FILE = "expertd/inference"
ONEOF = "parameter_choice"


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for oneof, number, field, kind, typename in _FIELD.findall(fields):
            _add_field(message, field, int(number), kind, typename, is_choice=bool(oneof))
    return file


def _add_field(
    message: DescriptorProto, name: str, number: int, kind: str, typename: str, is_choice: bool = False
) -> None:
    if kind == "{":
        entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "", "string")
        _add_field(entry, "value", 2, "", typename)
        typename = f"{message.name}.{entry.name}"
    repeated = FieldDescriptorProto.LABEL_REPEATED if kind else FieldDescriptorProto.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=repeated)
    if typename[0].islower():
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{typename.upper()}")
    else:
        is_enum = typename in ENUMS
        field.type = FieldDescriptorProto.TYPE_ENUM if is_enum else FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{typename}"
    if is_choice:
        if not message.oneof_decl:
            message.oneof_decl.add(name=ONEOF)
        field.oneof_index = 0


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()  # of our own: a client in the same process has its messages in the default one
    pool.Add(_file())
    found = GetMessageClassesForFiles([_FILE], pool)
    return {name: found[f"{PACKAGE}.{name}"] for name in MESSAGES}


CLASSES: dict[str, Any] = _classes()
"""The classes of all messages, by name."""
