"""Conversion between JSON numbers and the little-endian bytes of the protocol's datatypes."""

from itertools import chain
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd.service.http.protocol.errors import OipError
from expertd.service.inference.tensors import FLOATS
from expertd.service.memory import Buffer
from expertd.service.util.sentences import shown

_KINDS = {
    NoneType: "null",
    bool: "true or false",
    str: "text",
    float: "a float",
    list: "an array",
    dict: "an object",
}
_NUMPY = {"FP16": "<f2", "FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}


def numbers_to_bytes(data: object, shape: list[int], datatype: str, where: str) -> bytes:
    """Convert JSON numbers, flat or nested by row, to the bytes of a [rows, columns] tensor.

    BF16 values are rounded to nearest even. Raises OipError (400), with `where` in its text, for a wrong
    count, ragged rows, values that are not numbers, and numbers that the datatype cannot hold.
    """
    flat = _flatten(data, shape, where)
    allowed = {int, float} if datatype in FLOATS else {int}
    kinds = set(map(type, flat))
    if not kinds <= allowed:
        expected = "numbers" if datatype in FLOATS else "integers"
        got = ", ".join(sorted(_KINDS[kind] for kind in kinds - allowed))
        raise OipError(400, f"{where}: expected {expected} for {datatype}, got {got}")
    try:
        if datatype in FLOATS:
            return _floats_to_bytes(np.array(flat, dtype=np.float64), datatype, where)
        return np.array(flat, dtype=_NUMPY[datatype]).tobytes()
    except OverflowError as error:
        raise OipError(400, f"{where}: expected numbers that fit {datatype}, got a larger one") from error


def bytes_to_numbers(buffer: Buffer, datatype: str, where: str) -> list[float]:
    """The values of a float tensor for a JSON response, flat and row-major.

    Raises OipError (400) for NaN and infinity, which JSON cannot represent.
    """
    if datatype == "BF16":
        values = (np.frombuffer(buffer, dtype="<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(buffer, dtype=_NUMPY[datatype])
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise OipError(
            400,
            f"{where}: expected finite values in JSON, got {wrong.size} that are not finite "
            f"(the first at {wrong[0]}: {values[wrong[0]]}); set binary_data to get them in binary",
        )
    numbers: list[float] = values.tolist()
    return numbers


def _flatten(data: object, shape: list[int], where: str) -> list[Any]:
    rows, columns = shape
    if not isinstance(data, list):
        raise OipError(400, f"{where}: expected an array of numbers, got {shown(data)}")
    if not any(type(row) is list for row in data):
        if len(data) != rows * columns:
            raise OipError(400, f"{where}: expected {rows * columns} numbers, got {len(data)}")
        return data
    if len(data) != rows:
        raise OipError(400, f"{where}: expected {rows} rows for shape {shape}, got {len(data)}")
    for index, row in enumerate(data):
        if type(row) is not list or len(row) != columns:
            got = f"{len(row)} numbers" if type(row) is list else shown(row)
            raise OipError(400, f"row {index} of {where}: expected {columns} numbers, got {got}")
    return list(chain.from_iterable(data))


def _floats_to_bytes(values: npt.NDArray[np.float64], datatype: str, where: str) -> bytes:
    with np.errstate(over="ignore"):
        narrow: npt.NDArray[Any] = values.astype(_NUMPY.get(datatype, "<f4"))
    if datatype == "BF16":
        bits = narrow.view("<u4")
        # Add half a unit of the last kept bit, minus one if that bit is 0: ties round to even.
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        narrow = (bits >> 16).astype("<u2")
        finite = (narrow & 0x7F80) != 0x7F80
    else:
        finite = np.isfinite(narrow)
    if not finite.all():
        index = int(np.flatnonzero(~finite)[0])
        raise OipError(400, f"{where}: expected numbers that fit {datatype}, got {values[index]} at {index}")
    return narrow.tobytes()
